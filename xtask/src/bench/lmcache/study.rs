//! The whole comparison: a worker for every back end, repetitions side by side.

use std::{thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{
    Subject,
    alone::{Alone, best, bound_s},
    backends::{self, CHUNK_BYTES, Mounts},
    rows::{Row, rep},
};
use crate::bench::{
    devices::{
        setup::Device,
        throttle::{Counts, Throttle},
    },
    worker::{Place, Worker},
};

const OPEN_LIMIT: Duration = Duration::from_secs(900);
const STEP_LIMIT: Duration = Duration::from_secs(180);
/// After a step: the throttle has begun a new slice.
const SETTLE: Duration = Duration::from_millis(250);
const OVERHEAD_KEYS: u32 = 64;
const OVERHEAD_REPS: u32 = 200;
/// A device is read alone in each so many repetitions, for somewhat longer than a step takes.
const ALONE_EACH: u32 = 4;
const ALONE_LONGER: f64 = 1.1;
/// By how much a step is made longer than it has to be: a throttle begins with a slice in hand.
const STEP_LONGER: f64 = 1.04;
const MB: f64 = 1e6;

/// What is compared, and on what.
pub(super) struct Study<'a> {
    pub(super) place: Place<'a>,
    pub(super) throttle: Throttle,
    pub(super) devices: &'a [Device],
    pub(super) limits_mbps: [u32; 2],
    pub(super) subject: Subject,
    pub(super) backends: Vec<&'static str>,
    pub(super) seconds: f64,
}

/// What was measured of one scenario.
#[derive(Default)]
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    /// Rates of the devices alone, in MB/s.
    pub(super) device_mbps: Vec<f64>,
    pub(super) failed: Vec<Value>,
}

/// A back end at work.
pub(super) struct Runner<'a> {
    name: &'static str,
    worker: Worker<'a>,
    reps: Vec<Value>,
    /// All chunks are read again until this has passed.
    repeated_s: f64,
}

/// Chunks of a step that takes at least so many seconds at a rate.
pub(super) fn step_chunks(mbps: u32, seconds: f64) -> u64 {
    chunks(mbps, seconds * STEP_LONGER)
}

/// Whole chunks that take so many seconds at a rate.
pub(super) fn chunks(mbps: u32, seconds: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "far below 2^53, and not negative")]
    let chunks = (f64::from(mbps) * MB * seconds / CHUNK_BYTES as f64).ceil().max(1.0) as u64;
    chunks.next_multiple_of(backends::REQUESTS)
}

impl<'a> Study<'a> {
    /// Opens every back end and stores its chunks; those that cannot are told.
    pub(super) fn open(&'a self, failed: &mut Vec<Value>) -> Result<Vec<Runner<'a>>> {
        let mut runners = Vec::new();
        // All begin at once with what takes longest, their imports.
        let started = self.backends.iter().map(|name| (*name, Worker::start(&self.place, name)));
        for (name, worker) in started.collect::<Vec<_>>() {
            match worker.and_then(|worker| self.open_one(name, worker)) {
                Ok(runner) => runners.push(runner),
                Err(error) => {
                    ensure!(!self.place.signals.arrived(), "stopped by a signal");
                    failed.push(json!({"backend": name, "why": format!("{error:#}")}));
                }
            }
        }
        Ok(runners)
    }

    fn open_one(&'a self, name: &'static str, mut worker: Worker<'a>) -> Result<Runner<'a>> {
        let mounts = Mounts { fast: &self.devices[0].mount, slow: &self.devices[1].mount };
        let [fast, slow] = self.limits_mbps;
        let mbps = if backends::is_ours(name) { fast + slow } else { fast };
        let chunks = step_chunks(mbps, self.seconds);
        let order = match self.subject {
            Subject::Lmcache => backends::lmcache(name, &mounts, chunks)?,
            Subject::Hicache => backends::hicache(name, &mounts, chunks),
        };
        let answer = worker.ask(&order, OPEN_LIMIT)?;
        println!("{name}: stored in {:.1} s", answer["store_s"].as_f64().unwrap_or(f64::NAN));
        Ok(Runner { name, worker, reps: Vec::new(), repeated_s: 0.0 })
    }

    /// Steps at the devices' limits.
    pub(super) fn throttled(&'a self, runners: &mut Vec<Runner<'a>>, reps: u32) -> Result<Found> {
        let mut found = Found::default();
        // Without the yardstick the back ends are still compared with each other.
        let mut reader = self.reader();
        let mut alone = vec![Vec::new(); self.devices.len()];
        for turn in 0..reps {
            if turn % ALONE_EACH == 0 {
                reader = reader.and_then(|reader| self.read_alone(reader, &mut alone));
            }
            self.turn(runners, turn, &mut found.failed)?;
        }
        if let Err(error) = reader {
            found.failed.push(json!({"backend": "alone", "why": format!("{error:#}")}));
            alone.clear();
        }
        let alone: Vec<&Alone> = alone.iter().filter_map(|runs| best(runs)).collect();
        found.device_mbps = alone.iter().map(|it| it.rate() / MB).collect();
        found.rows = runners.iter_mut().map(|it| it.row(&alone)).collect();
        Ok(found)
    }

    /// The same without limits: both devices are files of one disk, and bound nothing.
    pub(super) fn bare(&self, runners: &mut Vec<Runner<'a>>, reps: u32) -> Result<Found> {
        let mut found = Found::default();
        for runner in runners.iter_mut() {
            runner.repeated_s = self.seconds;
        }
        for turn in 0..reps {
            self.turn(runners, turn, &mut found.failed)?;
        }
        found.rows = runners.iter_mut().map(|it| it.row(&[])).collect();
        Ok(found)
    }

    /// What our adapter costs the thread that calls it; none where it does not run.
    pub(super) fn overhead(&self, runners: &mut [Runner<'a>]) -> Result<Option<Value>> {
        let ours = runners.iter_mut().find(|it| backends::is_ours(it.name));
        let Some(ours) = ours.filter(|_| self.subject == Subject::Lmcache) else {
            return Ok(None);
        };
        let order = json!({"do": "overhead", "keys": OVERHEAD_KEYS, "reps": OVERHEAD_REPS});
        ours.worker.ask(&order, STEP_LIMIT).map(Some)
    }

    pub(super) fn limit(&self, is_on: bool) -> Result<()> {
        for (device, mbps) in self.devices.iter().zip(self.limits_mbps) {
            let bytes_per_s = if is_on { u64::from(mbps) * 1_000_000 } else { 0 };
            self.throttle.limit(&device.number, bytes_per_s)?;
        }
        Ok(())
    }

    /// One repetition of each; nobody is always first. Who fails is out.
    fn turn(
        &self,
        runners: &mut Vec<Runner<'a>>,
        turn: u32,
        failed: &mut Vec<Value>,
    ) -> Result<()> {
        let mut lost = Vec::new();
        for at in 0..runners.len() {
            let at = (at + turn as usize) % runners.len();
            let runner = &mut runners[at];
            match self.step(runner) {
                Ok(rep) => runner.reps.push(rep),
                Err(error) => {
                    ensure!(!self.place.signals.arrived(), "stopped by a signal");
                    failed.push(json!({"backend": runner.name, "why": format!("{error:#}")}));
                    lost.push(runner.name);
                }
            }
        }
        runners.retain(|it| !lost.contains(&it.name));
        Ok(())
    }

    /// All chunks once, or as often as the runner is to.
    fn step(&self, runner: &mut Runner<'_>) -> Result<Value> {
        runner.worker.ask(&json!({"do": "prepare"}), STEP_LIMIT)?;
        thread::sleep(SETTLE);
        let before = self.counts()?;
        let order = json!({"do": "read", "seconds": runner.repeated_s});
        let answer = runner.worker.ask(&order, STEP_LIMIT)?;
        let after = self.counts()?;
        let counts: Vec<Counts> =
            after.into_iter().zip(before).map(|(after, before)| after.since(before)).collect();
        Ok(rep(answer, &counts, self.seconds))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        self.devices.iter().map(|it| self.throttle.counts(&it.number)).collect()
    }

    /// Who reads the devices alone, with a file on each.
    fn reader(&'a self) -> Result<Worker<'a>> {
        let mut reader = Worker::start(&self.place, "alone")?;
        for (at, mbps) in self.limits_mbps.into_iter().enumerate() {
            let order = json!({"do": "write", "path": self.alone_path(at),
                "bytes": self.alone_bytes(mbps), "block_bytes": CHUNK_BYTES});
            reader.ask(&order, OPEN_LIMIT).context("the file that is read alone")?;
        }
        Ok(reader)
    }

    /// One run of each device.
    fn read_alone(&self, mut reader: Worker<'a>, runs: &mut [Vec<Alone>]) -> Result<Worker<'a>> {
        for (at, runs) in runs.iter_mut().enumerate() {
            thread::sleep(SETTLE);
            let order = json!({"do": "alone", "path": self.alone_path(at),
                "bytes": self.alone_bytes(self.limits_mbps[at]), "block_bytes": CHUNK_BYTES});
            runs.push(Alone::read(&reader.ask(&order, STEP_LIMIT)?)?);
        }
        Ok(reader)
    }

    fn alone_path(&self, at: usize) -> String {
        self.devices[at].mount.join("alone").display().to_string()
    }

    fn alone_bytes(&self, mbps: u32) -> u64 {
        chunks(mbps, self.seconds * STEP_LONGER * ALONE_LONGER) * CHUNK_BYTES
    }
}

impl Runner<'_> {
    /// What it has done so far, which it forgets.
    fn row(&mut self, alone: &[&Alone]) -> Row {
        let reps = std::mem::take(&mut self.reps);
        let devices =
            if backends::is_ours(self.name) { alone } else { &alone[..alone.len().min(1)] };
        let bytes = reps.iter().filter_map(|it| it["bytes"].as_f64()).fold(0.0, f64::max);
        let bound_s = (!devices.is_empty()).then(|| bound_s(bytes, devices));
        Row { backend: self.name, reps, bound_s }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_step_is_never_shorter_than_asked_for() {
        let bytes = super::step_chunks(300, 5.0) * super::CHUNK_BYTES;
        assert!((1_560_000_000..1_640_000_000).contains(&bytes), "{bytes}");
    }
}
