//! The whole comparison: a worker for every back end, repetitions side by side.

use std::{thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{
    alone::{Alone, best, bound_s},
    backends::{self, CHUNK_BYTES, Mounts},
    rows::{Row, rep},
    throttle::{Counts, Throttle},
    worker::{Place, Worker},
};
use crate::bench::devices::setup::Device;

const OPEN_LIMIT: Duration = Duration::from_secs(300);
const STEP_LIMIT: Duration = Duration::from_secs(180);
/// After a step: the throttle has begun a new slice.
const SETTLE: Duration = Duration::from_millis(250);
const OVERHEAD_KEYS: u32 = 64;
const OVERHEAD_REPS: u32 = 200;
/// A device is read alone in each so many repetitions, for somewhat longer than a step takes.
const ALONE_EACH: u32 = 3;
const ALONE_LONGER: f64 = 1.1;
/// By how much a step is made longer than it has to be: a throttle begins with a slice in hand.
const STEP_LONGER: f64 = 1.06;
const MB: f64 = 1e6;

/// What is compared, and on what.
pub(super) struct Study<'a> {
    pub(super) place: Place<'a>,
    pub(super) throttle: Throttle,
    pub(super) devices: &'a [Device],
    pub(super) limits_mbps: [u32; 2],
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
    passes: u64,
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
        for &name in &self.backends {
            match self.open_one(name) {
                Ok(runner) => runners.push(runner),
                Err(error) => {
                    ensure!(!self.place.signals.arrived(), "stopped by a signal");
                    failed.push(json!({"backend": name, "why": format!("{error:#}")}));
                }
            }
        }
        Ok(runners)
    }

    fn open_one(&'a self, name: &'static str) -> Result<Runner<'a>> {
        let mounts = Mounts { fast: &self.devices[0].mount, slow: &self.devices[1].mount };
        let [fast, slow] = self.limits_mbps;
        let mbps = if backends::is_ours(name) { fast + slow } else { fast };
        let order = backends::order(name, &mounts, step_chunks(mbps, self.seconds))?;
        let mut worker = Worker::start(&self.place, name)?;
        let answer = worker.ask(&order, OPEN_LIMIT)?;
        println!("{name}: stored in {:.1} s", answer["store_s"].as_f64().unwrap_or(f64::NAN));
        Ok(Runner { name, worker, reps: Vec::new(), passes: 1 })
    }

    /// Steps at the devices' limits.
    pub(super) fn throttled(&self, runners: &mut Vec<Runner<'a>>, reps: u32) -> Result<Found> {
        let mut found = Found::default();
        let mut reader = Worker::start(&self.place, "alone")?;
        for (at, mbps) in self.limits_mbps.into_iter().enumerate() {
            let order = json!({"do": "write", "path": self.alone_path(at),
                "bytes": self.alone_bytes(mbps), "block_bytes": CHUNK_BYTES});
            reader.ask(&order, OPEN_LIMIT).context("the file that is read alone")?;
        }
        let mut alone = vec![Vec::new(); self.devices.len()];
        for turn in 0..reps {
            if turn % ALONE_EACH == 0 {
                for (at, runs) in alone.iter_mut().enumerate() {
                    runs.push(self.alone(&mut reader, at)?);
                }
            }
            self.turn(runners, turn, &mut found.failed)?;
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
            // As many passes as make a step of the due length, by one that does not count.
            if let Ok(rep) = self.step(runner) {
                let seconds = rep["seconds"].as_f64().unwrap_or(self.seconds);
                #[expect(clippy::cast_possible_truncation, reason = "a small number")]
                let passes = (1.1 * self.seconds / seconds).ceil().clamp(1.0, 50.0) as u64;
                runner.passes = passes;
            }
        }
        for turn in 0..reps {
            self.turn(runners, turn, &mut found.failed)?;
        }
        found.rows = runners.iter_mut().map(|it| it.row(&[])).collect();
        Ok(found)
    }

    /// What our adapter costs the thread that calls it; none where it does not run.
    pub(super) fn overhead(&self, runners: &mut [Runner<'a>]) -> Result<Option<Value>> {
        let Some(ours) = runners.iter_mut().find(|it| backends::is_ours(it.name)) else {
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
        let order = json!({"do": "read", "passes": runner.passes});
        let answer = runner.worker.ask(&order, STEP_LIMIT)?;
        let after = self.counts()?;
        let counts: Vec<Counts> =
            after.into_iter().zip(before).map(|(after, before)| after.since(before)).collect();
        Ok(rep(answer, &counts, self.seconds))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        self.devices.iter().map(|it| self.throttle.counts(&it.number)).collect()
    }

    fn alone(&self, reader: &mut Worker<'_>, at: usize) -> Result<Alone> {
        thread::sleep(SETTLE);
        let bytes = self.alone_bytes(self.limits_mbps[at]);
        let order = json!({"do": "alone", "path": self.alone_path(at), "bytes": bytes,
            "block_bytes": CHUNK_BYTES});
        Alone::read(&reader.ask(&order, STEP_LIMIT)?)
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
        assert!((1_590_000_000..1_680_000_000).contains(&bytes), "{bytes}");
    }
}
