//! Every device, size and policy, for several seeds.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{
    case::{Case, Outcome, Schedule},
    policy::Policy,
    profile::Profile,
    statistics::Summary,
};

/// What is varied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StudyOptions {
    /// Independent repetitions of everything, at least 1.
    pub seeds: u64,
    /// The first seed.
    pub first_seed: u64,
    /// Chunks that each repetition reads at least; decides how many steps it has.
    pub chunks: usize,
    /// Names of the devices; all if empty.
    pub devices: Vec<String>,
}

impl Default for StudyOptions {
    /// All devices, 20 seeds, 60 steps of 230 chunks.
    fn default() -> Self {
        Self { seeds: 20, first_seed: 1000, chunks: 60 * 230, devices: Vec::new() }
    }
}

/// One combination, with an outcome for each seed.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The device's letter.
    pub device: &'static str,
    /// Its tiers.
    pub tiers: usize,
    /// Chunks and ranks.
    pub case: Case,
    /// The policy; of the fixed splits, the best.
    pub policy: Policy,
    /// By seed.
    pub outcomes: Vec<Outcome>,
}

impl Row {
    /// Time over the bound.
    #[must_use]
    pub fn gap(&self) -> Summary {
        self.summary(Outcome::gap)
    }

    /// Any figure over the seeds.
    #[must_use]
    pub fn summary(&self, figure: impl Fn(&Outcome) -> f64) -> Summary {
        Summary::of(self.outcomes.iter().map(figure))
    }
}

/// The results.
#[derive(Clone, Debug, PartialEq)]
pub struct Study {
    /// What was asked for.
    pub options: StudyOptions,
    /// A row for each combination, in the order of [`Study::POLICIES`] within each.
    pub rows: Vec<Row>,
    /// Every fixed split that was tried.
    pub grid: Vec<Row>,
}

const CASES: [(usize, usize, u16); 13] = [
    // Tiers, chunks, ranks.
    (2, 230, 1),
    (2, 230, 4),
    (2, 64, 1),
    (2, 16, 1),
    (2, 7, 1),
    (2, 2, 1),
    (2, 1, 1),
    (3, 230, 1),
    (3, 64, 1),
    (3, 16, 1),
    (4, 230, 1),
    (4, 64, 1),
    (4, 16, 1),
];
/// The fastest tier's share over its part of the calibrated rates.
const GRID: [f64; 7] = [0.94, 0.97, 1.0, 1.03, 1.06, 1.1, 1.16];
const PLAIN: [Policy; 5] =
    [Policy::Kvbraid, Policy::Window, Policy::Ewma, Policy::FastOnly, Policy::Serial];

impl Study {
    /// The policies' names, in the order of the rows.
    pub const POLICIES: [&str; 6] =
        ["kvbraid", "window", "static_best", "ewma", "fast_only", "serial"];

    /// Runs everything on all cores; the results do not depend on how many there are.
    #[must_use]
    pub fn run(options: StudyOptions) -> Self {
        let devices = devices(&options);
        let jobs = jobs(&devices, &options);
        let done = in_parallel(&jobs, |job| job.run(&options));
        let (grid, plain): (Vec<_>, Vec<_>) =
            done.into_iter().partition(|row| matches!(row.policy, Policy::Static(_)));
        let mut rows = plain;
        // The grid holds as many rows for each combination, one combination after another.
        for of_one in grid.chunks(GRID.len()) {
            rows.extend(of_one.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).cloned());
        }
        let place = |row: &Row| Self::POLICIES.iter().position(|name| *name == row.policy.name());
        rows.sort_by_key(|row| {
            let case = CASES.iter().position(|&(tiers, chunks, ranks)| {
                (tiers, chunks, ranks) == (row.tiers, row.case.chunks, row.case.ranks)
            });
            (case, row.device, place(row))
        });
        Self { options, rows, grid }
    }

    /// The row of one combination.
    #[must_use]
    pub fn row(
        &self,
        device: &str,
        [tiers, chunks, ranks]: [usize; 3],
        policy: &str,
    ) -> Option<&Row> {
        self.rows.iter().find(|row| {
            let case = [row.tiers, row.case.chunks, usize::from(row.case.ranks)];
            row.device == device && case == [tiers, chunks, ranks] && row.policy.name() == policy
        })
    }
}

/// A profile of four tiers and the rates of each; those of fewer tiers are their beginning.
struct Device {
    name: &'static str,
    calibrated: Vec<f64>,
}

struct Job<'a> {
    device: &'a Device,
    tiers: usize,
    case: Case,
    policy: Policy,
}

impl Job<'_> {
    fn run(&self, options: &StudyOptions) -> Row {
        let profile = Profile::named(self.device.name, self.tiers).expect("taken from the list");
        let calibrated = &self.device.calibrated[..self.tiers];
        let seeds = options.first_seed..options.first_seed + options.seeds.max(1);
        let outcomes = seeds.map(|seed| self.case.run(&profile, calibrated, self.policy, seed));
        Row {
            device: self.device.name,
            tiers: self.tiers,
            case: self.case,
            policy: self.policy,
            outcomes: outcomes.collect(),
        }
    }
}

fn devices(options: &StudyOptions) -> Vec<Device> {
    let mut profiles = Profile::all(4);
    let wanted =
        |name: &str| options.devices.is_empty() || options.devices.iter().any(|d| d == name);
    profiles.retain(|profile| wanted(profile.name));
    in_parallel(&profiles, |profile| Device { name: profile.name, calibrated: profile.calibrate() })
}

fn jobs<'a>(devices: &'a [Device], options: &StudyOptions) -> Vec<Job<'a>> {
    let policies = || PLAIN.into_iter().chain(GRID.map(Policy::Static));
    let cases = CASES.map(|(tiers, chunks, ranks)| {
        let steps = options.chunks.div_ceil(chunks).min(4 * options.chunks.div_ceil(230));
        (tiers, Case { chunks, ranks, schedule: Schedule { steps, ..Schedule::default() } })
    });
    let of_device = |device: &'a Device| {
        cases.into_iter().flat_map(move |(tiers, case)| {
            policies().map(move |policy| Job { device, tiers, case, policy })
        })
    };
    devices.iter().flat_map(of_device).collect()
}

fn seconds(row: &Row) -> f64 {
    row.summary(Outcome::step_s).mean
}

/// The results of `work` in the order of `items`.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let one_after_another = || {
        while let Some((at, item)) = {
            // Relaxed: it only hands out indices.
            let at = next.fetch_add(1, Ordering::Relaxed);
            items.get(at).map(|item| (at, item))
        } {
            let result = work(item);
            done.lock().expect("no worker panicked").push((at, result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(one_after_another);
        }
    });
    let mut done = done.into_inner().expect("no worker panicked");
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
