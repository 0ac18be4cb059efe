//! The whole comparison: every scenario, every policy, repetitions side by side.

use std::{
    path::PathBuf,
    process,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use kv_connector::{TailPolicy, TierMask, replay::Watch};
use serde_json::{Value, json};

use super::{
    Device,
    bound::{Alone, bound_s},
    cgroup::Cgroup,
    costs::{copy_s_per_gb, crc_s_per_gb},
    counters::read_by,
    one_device,
    policy::{Average, Policy, deal, grid, only},
    reader::Colocated,
    rig::{CHUNK_BYTES, Delivery, Load, Rig, poison},
    row::{Rep, Row},
    scenario::Scenario,
    schedule::{Schedule, seconds_for},
};
use crate::{failure::Failure, watch::Bar};

/// Steps of this length are shown beside, and not judged: the throttle's slice of 100 ms is a tenth of them.
const SHORT_SECONDS: f64 = 1.0;
/// Chunks of one request, where requests are served one after another.
const REQUEST_CHUNKS: usize = 16;
/// Runs of each device alone, among the repetitions.
const ALONE_RUNS: usize = 3;
/// By how much they are longer than a step that wastes nothing.
const LONGER: f64 = 1.1;
/// After a limit was set: the throttle has begun a new slice.
const SETTLE: Duration = Duration::from_millis(250);

/// What is compared on what.
#[derive(Debug)]
pub(super) struct Study {
    pub(super) cgroup: Cgroup,
    pub(super) devices: Vec<Device>,
    pub(super) reps: usize,
    pub(super) seconds: f64,
    pub(super) window: u32,
    pub(super) fio: Option<PathBuf>,
}

/// Everything that was measured.
#[derive(Debug, Default)]
struct Results {
    io_modes: Vec<String>,
    rows: Vec<Row>,
    short: Vec<Row>,
    grid: Vec<Value>,
    skipped: Vec<Value>,
    /// Scenarios that gave no figures, and why.
    failed: Vec<Value>,
    /// The engine's steps on one device with the bytes copied to the caller.
    copied: Vec<Row>,
    /// Every run of a device alone.
    alone: Vec<Value>,
}

impl Study {
    /// Runs these scenarios; the document for the file.
    pub(super) fn run(&self, scenarios: &[Scenario]) -> Result<Value, Failure> {
        let bar = Bar::new(scenarios.len() * self.reps);
        let crc_s_per_gb = crc_s_per_gb();
        let mut buffer = vec![0; self.chunks(self.seconds) * CHUNK_BYTES];
        let mut results = Results::default();
        for &scenario in scenarios {
            bar.phase(scenario.name());
            match self.run_scenario(scenario, &mut buffer, crc_s_per_gb, &bar, &mut results) {
                Ok(()) => {}
                Err(stopped) if bar.is_stopped() => return Err(stopped),
                Err(failure) => {
                    let why = failure.line();
                    results.failed.push(json!({"scenario": scenario.name(), "why": why}));
                }
            }
        }
        bar.done();
        Ok(self.document(&results))
    }

    fn run_scenario(
        &self,
        scenario: Scenario,
        buffer: &mut [u8],
        crc_s_per_gb: f64,
        bar: &Bar,
        results: &mut Results,
    ) -> Result<(), Failure> {
        if scenario == Scenario::OneDevice {
            let found = one_device::run(self, buffer, bar)?;
            results.rows.extend(found.rows);
            results.copied.extend(found.copied);
            results.skipped.extend(found.skipped);
            return Ok(());
        }
        let mut trial = Trial::new(self, scenario, self.seconds, buffer)?;
        results.io_modes = trial.kvbraid.io_modes();
        let rows = trial.run(&Policy::ALL, &mut results.grid, crc_s_per_gb, bar)?;
        results.alone.append(&mut trial.alone_runs);
        results.rows.extend(rows);
        drop(trial);
        if scenario == Scenario::TwoTiers && self.seconds > SHORT_SECONDS {
            let mut trial = Trial::new(self, scenario, SHORT_SECONDS, buffer)?;
            let policies = [Policy::FastOnly, Policy::Window, Policy::Kvbraid];
            results.short = trial.run(&policies, &mut Vec::new(), crc_s_per_gb, bar)?;
        }
        Ok(())
    }

    fn document(&self, results: &Results) -> Value {
        let rows = |rows: &[Row]| rows.iter().map(Row::to_json).collect::<Vec<_>>();
        json!({
            "results": rows(&results.rows),
            "short_steps": rows(&results.short),
            "static_grid": results.grid,
            "copied": rows(&results.copied),
            "skipped": results.skipped,
            "failed": results.failed,
            "alone": results.alone,
            "details": results.rows.iter().map(Row::to_detail).collect::<Vec<_>>(),
            "parameters": {
                "chunk_bytes": CHUNK_BYTES,
                "chunks": self.chunks(self.seconds),
                "reps": self.reps,
                "seconds": self.seconds,
                "short_seconds": SHORT_SECONDS,
                "window": self.window,
                "copy_s_per_gb": copy_s_per_gb(),
                "io_modes": results.io_modes,
                "request_chunks_serial": REQUEST_CHUNKS,
                "limits_mbps": self.devices.iter().map(|it| it.bytes_per_s / 1_000_000).collect::<Vec<_>>(),
            },
        })
    }

    /// Chunks that are stored beside steps. Every scenario's store has room for them: a smaller cap would drop chunks.
    pub(super) fn spare(&self) -> usize {
        let most = Scenario::ALL.into_iter().map(Scenario::stored).max().unwrap_or(0);
        most * (self.reps * Policy::ALL.len() + 8)
    }

    /// Chunks of a step of `seconds` at the limits.
    pub(super) fn chunks(&self, seconds: f64) -> usize {
        let rate: f64 = self.devices.iter().map(|device| device.bytes_per_s as f64).sum();
        whole(rate * seconds)
    }
}

/// Whole chunks in so many bytes, at least one.
fn whole(bytes: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "far below 2^53, and not negative")]
    let chunks = (bytes / CHUNK_BYTES as f64).round().max(1.0) as usize;
    chunks
}

/// One scenario with steps of one length.
struct Trial<'a> {
    study: &'a Study,
    scenario: Scenario,
    schedules: Vec<Schedule>,
    chunks: usize,
    /// Reads whole chunks and duplicates nothing.
    plain: Rig,
    kvbraid: Rig,
    others: Option<Colocated>,
    buffer: &'a mut [u8],
    /// What a user who knows the devices would expect of each, in bytes/s.
    expected: Vec<f64>,
    average: Average,
    alone_runs: Vec<Value>,
}

impl<'a> Trial<'a> {
    fn new(
        study: &'a Study,
        scenario: Scenario,
        seconds: f64,
        buffer: &'a mut [u8],
    ) -> Result<Self, Failure> {
        let devices = &study.devices;
        for device in devices {
            // What is read to open a store is not what is measured.
            study.cgroup.limit(&device.number, None)?;
        }
        let chunks = study.chunks(study.seconds);
        let spare = study.spare();
        let rig = |name, tail| Rig::open(devices, name, tail, study.window, chunks, spare);
        let (plain, kvbraid) =
            (rig("plain", TailPolicy::Whole)?, rig("kvbraid", Policy::Kvbraid.tail())?);
        let others = scenario.others_mbps(devices);
        let mut expected: Vec<f64> = devices.iter().map(|it| it.bytes_per_s as f64).collect();
        let others = match (others, devices.last()) {
            (Some(mbps), Some(slow)) => {
                expected[devices.len() - 1] -= f64::from(mbps) * 1e6;
                Some(Colocated::start(&slow.path, mbps)?)
            }
            _ => None,
        };
        Ok(Self {
            study,
            scenario,
            schedules: scenario.schedules(devices, seconds),
            chunks: study.chunks(seconds),
            plain,
            kvbraid,
            others,
            buffer,
            average: Average::new(expected.clone()),
            alone_runs: Vec::new(),
            expected,
        })
    }

    fn run(
        &mut self,
        policies: &[Policy],
        tried: &mut Vec<Value>,
        crc_s_per_gb: f64,
        bar: &Bar,
    ) -> Result<Vec<Row>, Failure> {
        let mut alone = vec![Vec::new(); self.study.devices.len()];
        let mut reps = vec![Vec::new(); policies.len()];
        let mut shares = Vec::new();
        for rep in 0..self.study.reps {
            if rep < ALONE_RUNS {
                for (tier, runs) in alone.iter_mut().enumerate() {
                    runs.push(self.alone(tier)?);
                }
            }
            if rep == 0 && policies.contains(&Policy::StaticBest) {
                shares = self.best_split(tried)?;
            }
            for turn in 0..policies.len() {
                // Nobody is always first.
                let at = (turn + rep) % policies.len();
                reps[at].push(self.serve(policies[at], &shares)?);
            }
            if !bar.step() {
                return Err(Failure::failed("stopped before the end"));
            }
        }
        self.plain.problems()?;
        self.kvbraid.problems()?;
        let alone: Vec<Alone> = alone.iter().filter_map(|runs| best(runs)).collect();
        let row =
            |(policy, reps): (&Policy, Vec<Rep>)| self.row(*policy, reps, &alone, crc_s_per_gb);
        Ok(policies.iter().zip(reps).map(row).collect())
    }

    fn row(&self, policy: Policy, reps: Vec<Rep>, alone: &[Alone], crc_s_per_gb: f64) -> Row {
        let others = |tier: usize| {
            reps.iter().map(|rep| rep.others_bytes_per_s[tier]).sum::<f64>() / reps.len() as f64
        };
        let others: Vec<f64> = (0..alone.len()).map(others).collect();
        Row {
            scenario: self.scenario.name(),
            policy: policy.name(),
            alone_mbps: alone.iter().map(Alone::mbps).collect(),
            bound_s: bound_s((self.chunks * CHUNK_BYTES) as u64, alone, &others),
            crc_s_per_gb,
            reps,
        }
    }

    /// One device alone, for longer than the bound will be.
    fn alone(&mut self, tier: usize) -> Result<Alone, Failure> {
        let bytes = (self.chunks * CHUNK_BYTES) as f64;
        let others = |tier: usize| self.schedules[tier].first as f64 - self.expected[tier];
        // A step with the others' bytes in it takes as long as one of ours beside them.
        let all_others: f64 = (0..self.schedules.len()).map(others).sum();
        let without = seconds_for(bytes, &self.schedules);
        let rate = self.schedules.iter().map(|it| it.last() as f64).sum::<f64>();
        let seconds = LONGER * without * rate / (rate - all_others);
        let chunks = whole(self.schedules[tier].bytes_in(seconds) - others(tier) * seconds);
        let masks = vec![only(tier); chunks.min(self.chunks)];
        let delivery = Delivery::Handed;
        let load = Load { masks, request_chunks: usize::MAX, ranks: 1, stored: 0, delivery };
        let rep = self.step(Policy::Window, &load)?;
        self.alone_runs.push(json!({
            "scenario": self.scenario.name(),
            "tier": tier,
            "bytes": rep.shot.bytes,
            "seconds": rep.shot.seconds,
            "others_mbps": rep.others_bytes_per_s[tier] / 1e6,
        }));
        Ok(Alone {
            arrivals: rep.shot.arrivals,
            others_bytes_per_s: rep.others_bytes_per_s[tier],
            end_bytes_per_s: self.schedules[tier].last(),
        })
    }

    /// The best of a grid of fixed splits, each tried once.
    fn best_split(&mut self, tried: &mut Vec<Value>) -> Result<Vec<f64>, Failure> {
        let mut best: Option<(f64, Vec<f64>)> = None;
        for shares in grid(&self.expected) {
            let seconds = self.serve(Policy::StaticBest, &shares)?.shot.seconds;
            tried.push(json!({
                "scenario": self.scenario.name(), "shares": shares, "seconds": seconds,
            }));
            if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
                best = Some((seconds, shares));
            }
        }
        Ok(best.map(|(_, shares)| shares).unwrap_or_default())
    }

    fn serve(&mut self, policy: Policy, shares: &[f64]) -> Result<Rep, Failure> {
        let masks = match policy {
            Policy::Serial | Policy::FastOnly => vec![only(0); self.chunks],
            Policy::StaticBest => deal(self.chunks, shares),
            Policy::Ewma => deal(self.chunks, &self.average.shares()),
            Policy::Window | Policy::Kvbraid => vec![TierMask::all(u8::MAX); self.chunks],
        };
        let load = Load {
            masks,
            request_chunks: if policy == Policy::Serial { REQUEST_CHUNKS } else { usize::MAX },
            ranks: self.scenario.ranks(),
            stored: self.scenario.stored(),
            delivery: Delivery::Copied,
        };
        let rep = self.step(policy, &load)?;
        if policy == Policy::Ewma {
            self.average.add(&rep.shot.tier_bytes, &rep.shot.tier_busy_s);
        }
        Ok(rep)
    }

    /// One step by the engine that `policy` uses, under the scenario's limits.
    fn step(&mut self, policy: Policy, load: &Load) -> Result<Rep, Failure> {
        let study = self.study;
        let Self { schedules, others, buffer, .. } = self;
        let rig = if policy == Policy::Kvbraid { &mut self.kvbraid } else { &mut self.plain };
        for (device, schedule) in study.devices.iter().zip(schedules.iter()) {
            study.cgroup.limit(&device.number, Some(schedule.first))?;
        }
        poison(buffer);
        thread::sleep(SETTLE);
        let stored = rig.spare_keys(load.stored)?;
        let read = |others: &mut Option<Colocated>| {
            let others = others.as_mut().map_or(Ok(0), Colocated::read_bytes)?;
            Ok::<_, Failure>((read_by(process::id())?, others))
        };
        let (charged_before, read_before) = (study.charged()?, read(others)?);
        let mut others_at_end = Ok((0, 0));
        let shot = thread::scope(|scope| {
            let (signals, followers): (Vec<Sender<Instant>>, Vec<_>) = study
                .devices
                .iter()
                .zip(schedules.iter())
                .map(|(device, schedule)| {
                    let (signal, signals): (_, Receiver<Instant>) = channel();
                    let follow = move || schedule.follow(&study.cgroup, &device.number, &signals);
                    (signal, scope.spawn(follow))
                })
                .unzip();
            let begins = |at| {
                for signal in &signals {
                    // Its follower has ended: it says why when it is joined.
                    let _ = signal.send(at);
                }
            };
            let ends = || others_at_end = read(others);
            let shot = rig.load(load, &stored, buffer, begins, ends);
            drop(signals);
            followers.into_iter().try_for_each(|it| {
                it.join().unwrap_or_else(|_| Err(Failure::failed("a schedule panicked")))
            })?;
            shot
        })?;
        let others_bytes = (others_at_end?.1 - read_before.1) as f64;
        rig.wait_until_quiet();
        let read_after = read(others)?;
        let mut others_bytes_per_s = vec![0.0; study.devices.len()];
        if let Some(last) = others_bytes_per_s.last_mut() {
            *last = others_bytes / shot.seconds;
        }
        Ok(Rep {
            charged_bytes: study.charged()? - charged_before,
            read_bytes: read_after.0 - read_before.0 + read_after.1 - read_before.1,
            others_bytes_per_s,
            shot,
        })
    }
}

impl Study {
    fn charged(&self) -> Result<u64, Failure> {
        self.devices.iter().map(|device| self.cgroup.charged(&device.number)).sum()
    }
}

/// The run in which the device got furthest: whatever else the machine does makes it look slower than it is.
fn best(runs: &[Alone]) -> Option<Alone> {
    let seconds = runs.iter().map(Alone::seconds).fold(f64::INFINITY, f64::min);
    runs.iter().max_by(|a, b| a.by(seconds).total_cmp(&b.by(seconds))).cloned()
}
