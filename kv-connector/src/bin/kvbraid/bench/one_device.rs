//! One device without a limit: the engine against fio with as large and as many requests, in pairs. fio leaves what it
//! read where it landed, and so does the engine here; steps that copy it to the caller are shown beside.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

use kv_connector::{TierMask, replay::Watch};
use serde_json::{Value, json};

use super::{
    Device,
    costs::crc_s_per_gb,
    counters::read_by,
    fio::Fio,
    policy::Policy,
    rig::{CHUNK_BYTES, Delivery, Load, Rig, Shot, poison},
    row::{Rep, Row, mean},
    scenario::Scenario,
    study::Study,
};
use crate::{failure::Failure, watch::Bar};

/// Pairs for each repetition of the other scenarios: these are short.
const PAIRS: usize = 2;

/// Chunks in flight, at least: a device without a limit takes more until it is at its knee.
const WINDOW_MIN: u32 = 16;

/// A chunk and its header.
const RECORD_BYTES: usize = CHUNK_BYTES + 4096;

/// The engine's directory on the device.
const NAME: &str = "kvbraid";

/// What was found, or why nothing was.
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    pub(super) copied: Vec<Row>,
    pub(super) skipped: Vec<Value>,
}

impl Found {
    fn nothing(why: &str) -> Self {
        let skipped = vec![json!({"scenario": Scenario::OneDevice.name(), "why": why})];
        Self { rows: Vec::new(), copied: Vec::new(), skipped }
    }
}

pub(super) fn run(study: &Study, buffer: &mut [u8], bar: &Bar) -> Result<Found, Failure> {
    let Some(program) = &study.fio else { return Ok(Found::nothing("no fio")) };
    let device = &study.devices[0];
    study.cgroup.limit(&device.number, None)?;
    let mut duel = Duel::new(study, device, program, buffer)?;
    if let Err(error) = duel.fio.read() {
        return Ok(Found::nothing(error.line()));
    }
    let mut reps = Contestant::ALL.map(|_| Vec::new());
    let mut crc_costs = Vec::new();
    for pair in 0..PAIRS * study.reps {
        // Beside the reads, since the machine is faster at one time than at another.
        crc_costs.push(crc_s_per_gb());
        for turn in 0..reps.len() {
            let who = (pair + turn) % reps.len();
            reps[who].push(duel.read(Contestant::ALL[who])?);
        }
        if pair % PAIRS == 0 && !bar.step() {
            return Err(Failure::failed("stopped before the end"));
        }
    }
    duel.rig.problems()?;
    let [ours, copied, fios] = reps;
    // fio's rate is the yardstick of all.
    let rate = |rep: &Rep| rep.shot.bytes as f64 / rep.shot.seconds;
    let crc_s_per_gb = mean(&crc_costs);
    let fio_rate = mean(&fios.iter().map(rate).collect::<Vec<_>>());
    let row = |policy, reps: Vec<Rep>| Row {
        scenario: Scenario::OneDevice.name(),
        policy,
        alone_mbps: vec![fio_rate / 1e6],
        bound_s: reps.first().map_or(0.0, |rep| rep.shot.bytes as f64) / fio_rate,
        crc_s_per_gb,
        reps,
    };
    let kvbraid = Policy::Kvbraid.name();
    Ok(Found {
        rows: vec![row(kvbraid, ours), row("fio", fios)],
        copied: vec![row(kvbraid, copied)],
        skipped: Vec::new(),
    })
}

/// Who reads the device.
#[derive(Clone, Copy, Debug)]
enum Contestant {
    Handed,
    Copied,
    Fio,
}

impl Contestant {
    const ALL: [Self; 3] = [Self::Handed, Self::Copied, Self::Fio];
}

/// Segments of one length, and how many chunks they hold.
struct Segments {
    files: Vec<PathBuf>,
    file_bytes: u64,
    chunks: usize,
}

/// The segments that `chunks` chunks fill, in the order of their making, and their length. fio reads the same blocks as
/// the engine: where a file lies on the device makes a difference.
fn full_segments(directory: &Path, chunks: usize) -> Result<Segments, Failure> {
    let failed = |error| Failure::failed(format!("read {}: {error}", directory.display()));
    let is_segment = |path: &PathBuf| path.extension().is_some_and(|suffix| suffix == "kvb");
    let entries = fs::read_dir(directory).map_err(failed)?;
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(is_segment).collect();
    files.sort_unstable();
    let first = files.first().ok_or_else(|| Failure::failed("the store has no segment"))?;
    let file_bytes = fs::metadata(first).map_err(failed)?.len();
    let slots = usize::try_from(file_bytes).unwrap_or(usize::MAX) / RECORD_BYTES;
    // A part of the last is not written, and would be read at the speed of memory.
    files.truncate((chunks / slots.max(1)).max(1));
    Ok(Segments { chunks: chunks.min(slots * files.len()), files, file_bytes })
}

/// The engine and fio on one device.
struct Duel<'a> {
    study: &'a Study,
    device: &'a Device,
    rig: Rig,
    load: Load,
    fio: Fio<'a>,
    buffer: &'a mut [u8],
}

impl<'a> Duel<'a> {
    fn new(
        study: &'a Study,
        device: &'a Device,
        program: &'a Path,
        buffer: &'a mut [u8],
    ) -> Result<Self, Failure> {
        let chunks = buffer.len() / CHUNK_BYTES;
        let devices = std::slice::from_ref(device);
        let window = study.window.max(WINDOW_MIN);
        let rig = Rig::open(devices, NAME, Policy::Kvbraid.tail(), window, chunks, study.spare())?;
        let segments = full_segments(&device.path.join(NAME), chunks)?;
        let chunks = segments.chunks;
        let masks = vec![TierMask::all(u8::MAX); chunks];
        let delivery = Delivery::Copied;
        let load = Load { masks, request_chunks: usize::MAX, ranks: 1, stored: 0, delivery };
        let Segments { files, file_bytes, .. } = segments;
        let fio = Fio { program, files, file_bytes, request_bytes: 0, depth: 0 };
        let mut duel = Self { study, device, rig, load, fio, buffer };
        // The first step tells how large the engine's requests are; those of its tail are smaller.
        let before = duel.rig.requests();
        duel.ours(Delivery::Copied)?;
        let (requests, chunks) = (duel.rig.requests() - before, chunks as u64);
        let requests = ((requests + chunks / 2) / chunks).max(1);
        duel.fio.request_bytes = (RECORD_BYTES as u64).div_ceil(requests).next_multiple_of(4096);
        duel.fio.depth = u64::from(window) * requests;
        Ok(duel)
    }

    fn ours(&mut self, delivery: Delivery) -> Result<Shot, Failure> {
        poison(self.buffer);
        self.load.delivery = delivery;
        self.rig.load(&self.load, &[], self.buffer, |_| {}, || {})
    }

    /// One step.
    fn read(&mut self, who: Contestant) -> Result<Rep, Failure> {
        let cgroup = &self.study.cgroup;
        // Children that have ended are counted in.
        let read_before = read_by(process::id())?;
        let charged_before = cgroup.charged(&self.device.number)?;
        let shot = match who {
            Contestant::Handed => self.ours(Delivery::Handed)?,
            Contestant::Copied => self.ours(Delivery::Copied)?,
            Contestant::Fio => self.fio.read()?,
        };
        self.rig.wait_until_quiet();
        Ok(Rep {
            shot,
            charged_bytes: cgroup.charged(&self.device.number)? - charged_before,
            read_bytes: read_by(process::id())? - read_before,
            others_bytes_per_s: vec![0.0],
        })
    }
}
