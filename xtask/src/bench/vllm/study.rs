//! The whole comparison: an engine for every back end, cells of one rate and burstiness, turns in each.

use std::{collections::BTreeMap, path::Path, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{
    Plan,
    backends::{self, Places, RECOMPUTE},
    rows::{Row, compare, rep},
};
use crate::bench::{
    devices::{
        setup::Device,
        throttle::{Counts, Throttle},
    },
    lmcache::alone::{Alone, best},
    worker::{Place, Worker},
};

const OPEN_LIMIT: Duration = Duration::from_secs(900);
/// Of a cell, within the worker; a request that takes longer has failed.
const CELL_S: f64 = 240.0;
const STEP_LIMIT: Duration = Duration::from_secs(400);
/// After a cell: the throttle has begun a new slice.
const SETTLE: Duration = Duration::from_millis(250);
const ALONE_REQUESTS: u32 = 12;
const ALONE_BYTES_MBPS: u64 = 2_000_000;
const ALONE_BLOCK: u64 = 4 << 20;
const ALONE_TURNS: u32 = 2;
const MB: f64 = 1e6;

/// What is compared, and on what.
pub(super) struct Study<'a> {
    pub(super) place: Place<'a>,
    pub(super) throttle: Throttle,
    pub(super) devices: &'a [Device],
    pub(super) limits_mbps: [u32; 2],
    pub(super) home: &'a Path,
    pub(super) trace: &'a Path,
    pub(super) backends: Vec<&'static str>,
    pub(super) plan: &'a Plan,
}

/// What was measured.
#[derive(Default)]
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    /// Rates of the devices alone.
    pub(super) device_mbps: Vec<f64>,
    /// For each back end, the part of the time to first token that a request waits for its prefix, when it is alone.
    pub(super) shares: BTreeMap<&'static str, f64>,
    /// What each answered when it was asked one request at a time.
    pub(super) alone: BTreeMap<&'static str, Value>,
    /// Requests that recomputing does when it is never idle.
    pub(super) capacity_per_s: f64,
    pub(super) failed: Vec<Value>,
}

/// A back end at work.
struct Runner<'a> {
    name: &'static str,
    worker: Worker<'a>,
}

/// One rate and burstiness.
struct Cell {
    name: String,
    rate: f64,
    cv: f64,
    per_s: f64,
}

impl<'a> Study<'a> {
    pub(super) fn run(&'a self) -> Result<Found> {
        let mut found = Found::default();
        // What learns from its devices learns from these.
        for (device, mbps) in self.devices.iter().zip(self.limits_mbps) {
            self.throttle.limit(&device.number, u64::from(mbps) * 1_000_000)?;
        }
        let mut runners = self.open(&mut found)?;
        found.device_mbps = self.read_alone().unwrap_or_else(|error| {
            found.failed.push(json!({"backend": "alone", "why": format!("{error:#}")}));
            Vec::new()
        });
        self.burst(&mut runners, &mut found)?;
        self.alone(&mut runners, &mut found)?;
        println!("recomputing does {:.2} requests a second", found.capacity_per_s);
        for turn in 0..self.plan.reps {
            for (at, cell) in self.cells(turn, found.capacity_per_s).iter().enumerate() {
                self.cell(cell, turn as usize + at, &mut runners, &mut found)?;
            }
        }
        ensure!(!self.place.signals.arrived(), "stopped by a signal");
        Ok(found)
    }

    /// All at once: they wait for the same imports. Ours are opened again over what they stored: a tier that is opened
    /// empty has nothing to learn its device from, and would go on with the window that it begins with.
    fn open(&'a self, found: &mut Found) -> Result<Vec<Runner<'a>>> {
        let (ours, others): (Vec<_>, Vec<_>) =
            self.backends.iter().copied().partition(|name| backends::is_ours(name));
        let mut begun: Vec<_> =
            self.backends.iter().map(|name| (*name, self.begin(name, false))).collect();
        let mut runners = Vec::new();
        for again in [false, true] {
            for (name, worker) in begun.drain(..) {
                let opened = worker.and_then(|mut worker| Ok((worker.answer(OPEN_LIMIT)?, worker)));
                match opened {
                    Ok((answer, worker)) if again || others.contains(&name) => {
                        println!(
                            "{name}: {} chunks in {:.1} s",
                            answer["blocks"],
                            number(&answer, "store_s")
                        );
                        runners.push(Runner { name, worker });
                    }
                    Ok(_) => {}
                    Err(error) => self.lost(found, name, "open", &error)?,
                }
            }
            if !again {
                let failed = |name: &str| found.failed.iter().any(|it| it["backend"] == name);
                let left = ours.iter().filter(|name| !failed(name));
                begun = left.map(|name| (*name, self.begin(name, true))).collect();
            }
        }
        runners.sort_by_key(|it| self.backends.iter().position(|name| *name == it.name));
        Ok(runners)
    }

    /// Has a worker open its engine; with everything stored, or over what an earlier one stored.
    fn begin(&'a self, name: &'static str, stored: bool) -> Result<Worker<'a>> {
        let mounts = [self.devices[0].mount.as_path(), self.devices[1].mount.as_path()];
        let places = Places { home: self.home, trace: self.trace, mounts };
        let mut order = backends::open(name, &places, &self.plan.load);
        order["stored"] = json!(stored);
        let mut worker = Worker::start(&self.place, name)?;
        worker.tell(&order)?;
        Ok(worker)
    }

    /// All requests at once, for everybody to warm up; of recomputing, or of who is there, it says what it can do.
    fn burst(&self, runners: &mut Vec<Runner<'_>>, found: &mut Found) -> Result<()> {
        let cell = Cell { name: "burst".to_owned(), rate: 0.0, cv: 1.0, per_s: 0.0 };
        let answers = self.all(runners, &cell.name, &self.order(&cell), found)?;
        let answer = answers.iter().find(|(name, _)| *name == RECOMPUTE).or(answers.first());
        let (_, answer) = answer.context("no back end is left")?;
        found.capacity_per_s = number(answer, "requests") / number(answer, "seconds");
        ensure!(found.capacity_per_s.is_finite(), "requests failed in the burst: {answer}");
        Ok(())
    }

    /// How long one request at a time waits for its prefix.
    fn alone(&self, runners: &mut Vec<Runner<'_>>, found: &mut Found) -> Result<()> {
        let order = json!({"do": "alone", "requests": ALONE_REQUESTS});
        for (name, answer) in self.all(runners, "alone", &order, found)? {
            let sum = |key: &str| -> f64 {
                answer[key].as_array().into_iter().flatten().filter_map(Value::as_f64).sum()
            };
            found.shares.insert(name, sum("retrieval_s") / sum("ttft_s"));
            found.alone.insert(name, answer);
        }
        Ok(())
    }

    /// Has each do it, one after another. Who fails is out.
    fn all(
        &self,
        runners: &mut Vec<Runner<'_>>,
        what: &str,
        order: &Value,
        found: &mut Found,
    ) -> Result<Vec<(&'static str, Value)>> {
        let mut answers = Vec::new();
        for runner in runners.iter_mut() {
            match self.prepared(runner, order) {
                Ok((answer, _)) => answers.push((runner.name, answer)),
                Err(error) => self.lost(found, runner.name, what, &error)?,
            }
        }
        runners.retain(|it| answers.iter().any(|(name, _)| *name == it.name));
        Ok(answers)
    }

    fn cells(&self, turn: u32, capacity_per_s: f64) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &cv in self.plan.cvs {
            for &rate in self.plan.rates {
                let name = format!("{rate} cv {cv} turn {turn}");
                cells.push(Cell { name, rate, cv, per_s: rate * capacity_per_s });
            }
        }
        cells
    }

    /// All back ends in turn; nobody is always first. Who fails is out.
    fn cell(
        &self,
        cell: &Cell,
        turn: usize,
        runners: &mut Vec<Runner<'_>>,
        found: &mut Found,
    ) -> Result<()> {
        let (mut reps, mut lost) = (Vec::new(), Vec::new());
        for at in 0..runners.len() {
            let at = (at + turn) % runners.len();
            let runner = &mut runners[at];
            match self.prepared(runner, &self.order(cell)) {
                Ok((answer, counts)) => {
                    let rep = rep(runner.name, answer, &counts);
                    println!(
                        "{} {}: mean TTFT {:.3} s",
                        cell.name,
                        runner.name,
                        number(&rep, "ttft_mean_s")
                    );
                    reps.push((runner.name, rep));
                }
                Err(error) => {
                    self.lost(found, runner.name, &cell.name, &error)?;
                    lost.push(runner.name);
                }
            }
        }
        runners.retain(|it| !lost.contains(&it.name));
        compare(&mut reps);
        for name in &self.backends {
            for (_, rep) in reps.iter().filter(|(who, _)| who == name) {
                let same = |it: &&mut Row| it.backend == *name && it.is_of(cell.rate, cell.cv);
                match found.rows.iter_mut().find(same) {
                    Some(row) => row.reps.push(rep.clone()),
                    None => found.rows.push(Row {
                        backend: name,
                        rate: cell.rate,
                        cv: cell.cv,
                        per_s: cell.per_s,
                        reps: vec![rep.clone()],
                    }),
                }
            }
        }
        Ok(())
    }

    fn order(&self, cell: &Cell) -> Value {
        json!({"do": "cell", "cell": cell.name, "per_s": cell.per_s, "cv": cell.cv,
            "seed": cell.name, "requests": self.plan.load.requests, "limit_s": CELL_S})
    }

    /// Nothing is in memory when it begins; and what the devices gave meanwhile.
    fn prepared(&self, runner: &mut Runner<'_>, order: &Value) -> Result<(Value, Vec<Counts>)> {
        runner.worker.ask(&json!({"do": "prepare"}), STEP_LIMIT)?;
        thread::sleep(SETTLE);
        let before = self.counts()?;
        let answer = runner.worker.ask(order, STEP_LIMIT)?;
        let after = self.counts()?;
        Ok((
            answer,
            after.into_iter().zip(before).map(|(after, before)| after.since(before)).collect(),
        ))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        self.devices.iter().map(|it| self.throttle.counts(&it.number)).collect()
    }

    fn lost(&self, found: &mut Found, name: &str, cell: &str, error: &anyhow::Error) -> Result<()> {
        ensure!(!self.place.signals.arrived(), "stopped by a signal");
        println!("{name} {cell}: {error:#}");
        found.failed.push(json!({"backend": name, "cell": cell, "why": format!("{error:#}")}));
        Ok(())
    }

    /// Each device by itself under large direct reads.
    fn read_alone(&self) -> Result<Vec<f64>> {
        let mut reader = Worker::start(&self.place, "alone")?;
        let mut rates = Vec::new();
        for (device, mbps) in self.devices.iter().zip(self.limits_mbps) {
            let path = device.mount.join("alone");
            let bytes = (u64::from(mbps) * ALONE_BYTES_MBPS).next_multiple_of(ALONE_BLOCK);
            let order = |what| json!({"do": what, "path": path, "bytes": bytes, "block_bytes": ALONE_BLOCK});
            reader.ask(&order("write"), OPEN_LIMIT)?;
            let mut runs = Vec::new();
            for _ in 0..ALONE_TURNS {
                thread::sleep(SETTLE);
                runs.push(Alone::read(&reader.ask(&order("read"), STEP_LIMIT)?)?);
            }
            rates.push(best(&runs).map_or(f64::NAN, Alone::rate) / MB);
        }
        Ok(rates)
    }
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(f64::NAN)
}
