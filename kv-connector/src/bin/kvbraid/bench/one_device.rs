//! One device without a limit: the engine against fio with as large and as many requests, in pairs.

use std::{path::Path, process};

use kv_connector::{TierMask, replay::Watch};
use serde_json::{Value, json};

use super::{
    Device,
    counters::read_by,
    fio::Fio,
    policy::Policy,
    reader::make,
    rig::{CHUNK_BYTES, Load, Rig, Shot, poison},
    row::{Rep, Row, mean},
    scenario::Scenario,
    study::Study,
};
use crate::{failure::Failure, watch::Bar};

/// Pairs for each repetition of the other scenarios: these are short.
const PAIRS: usize = 2;

/// Chunks in flight, at least: a device without a limit takes more.
const WINDOW_MIN: u32 = 4;

/// What was found, or why nothing was.
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    pub(super) skipped: Vec<Value>,
}

impl Found {
    fn nothing(why: &str) -> Self {
        let skipped = vec![json!({"scenario": Scenario::OneDevice.name(), "why": why})];
        Self { rows: Vec::new(), skipped }
    }
}

pub(super) fn run(
    study: &Study,
    buffer: &mut [u8],
    crc_s_per_gb: f64,
    bar: &Bar,
) -> Result<Found, Failure> {
    let Some(program) = &study.fio else { return Ok(Found::nothing("no fio")) };
    let device = &study.devices[0];
    study.cgroup.limit(&device.number, None)?;
    let mut duel = Duel::new(study, device, program, buffer)?;
    if let Err(error) = duel.fio.read() {
        return Ok(Found::nothing(error.line()));
    }
    let mut reps = [Vec::new(), Vec::new()];
    for pair in 0..PAIRS * study.reps {
        for turn in 0..2 {
            let who = (pair + turn) % 2;
            reps[who].push(duel.read(who)?);
        }
        if pair % PAIRS == 0 && !bar.step() {
            return Err(Failure::failed("stopped before the end"));
        }
    }
    duel.rig.problems()?;
    let [ours, fios] = reps;
    Ok(Found { rows: rows(ours, fios, crc_s_per_gb), skipped: Vec::new() })
}

/// fio's rate is the yardstick of both.
fn rows(ours: Vec<Rep>, fios: Vec<Rep>, crc_s_per_gb: f64) -> Vec<Row> {
    let rate = |rep: &Rep| rep.shot.bytes as f64 / rep.shot.seconds;
    let fio_rate = mean(&fios.iter().map(rate).collect::<Vec<_>>());
    let row = |policy, reps: Vec<Rep>| Row {
        scenario: Scenario::OneDevice.name(),
        policy,
        alone_mbps: vec![fio_rate / 1e6],
        bound_s: reps.first().map_or(0.0, |rep| rep.shot.bytes as f64) / fio_rate,
        crc_s_per_gb,
        reps,
    };
    vec![row(Policy::Kvbraid.name(), ours), row("fio", fios)]
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
        let rig = Rig::open(devices, "kvbraid", Policy::Kvbraid.tail(), window, chunks, 0)?;
        let masks = vec![TierMask::all(u8::MAX); chunks];
        let load = Load { masks, request_chunks: usize::MAX, ranks: 1, stored: 0 };
        let bytes = buffer.len() as u64;
        let fio =
            Fio { program, file: device.path.join("fio.bin"), bytes, request_bytes: 0, depth: 0 };
        let mut duel = Self { study, device, rig, load, fio, buffer };
        // The first step tells how large the engine's requests are.
        let before = duel.rig.requests();
        duel.ours()?;
        let requests = (duel.rig.requests() - before).div_ceil(chunks as u64).max(1);
        let record_bytes = (CHUNK_BYTES + 4096) as u64;
        duel.fio.request_bytes = record_bytes.div_ceil(requests).next_multiple_of(4096);
        duel.fio.depth = u64::from(window) * requests;
        make(&duel.fio.file, bytes)?;
        Ok(duel)
    }

    fn ours(&mut self) -> Result<Shot, Failure> {
        poison(self.buffer);
        self.rig.load(&self.load, &[], self.buffer, |_| {}, || {})
    }

    /// One step by the engine (0) or by fio (1).
    fn read(&mut self, who: usize) -> Result<Rep, Failure> {
        let cgroup = &self.study.cgroup;
        // Children that have ended are counted in.
        let read_before = read_by(process::id())?;
        let charged_before = cgroup.charged(&self.device.number)?;
        let shot = if who == 0 { self.ours()? } else { self.fio.read()? };
        self.rig.wait_until_quiet();
        Ok(Rep {
            shot,
            charged_bytes: cgroup.charged(&self.device.number)? - charged_before,
            read_bytes: read_by(process::id())? - read_before,
            others_bytes_per_s: vec![0.0],
        })
    }
}
