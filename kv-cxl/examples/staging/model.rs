//! All scenarios in virtual time.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use kv_staging::{Reservation, policy::TempoQ};

use crate::{
    device::Pipes,
    policies::{ALL, Kind, TEMPO_Q},
    rows::{Row, Run},
    serve::{Server, Virtual},
    workload::{Setting, Workload, bytes},
};

/// Parameters of `tempo_q` were chosen on seeds 1000 to 1029.
pub(crate) const FIRST_SEED: u64 = 2000;
/// What is judged has at least so many seeds.
const JUDGED_SEEDS: u64 = 30;
pub(crate) const RESERVATIONS: [Reservation; 2] = [Reservation::Eager, Reservation::Lazy];

/// One point of a scenario: what is served, and by which policies.
struct Point {
    scenario: &'static str,
    /// What is varied, if not the utilisation.
    varied: Option<(&'static str, f64)>,
    setting: Setting,
    utilisation: f64,
    seeds: u64,
    policies: Vec<(&'static str, Kind)>,
}

/// Every row, in order.
pub(crate) fn study(seeds: u64) -> Vec<Row> {
    points(seeds).iter().flat_map(measure).collect()
}

fn points(seeds: u64) -> Vec<Point> {
    let all = || ALL.to_vec();
    let point = |scenario, setting, utilisation| Point {
        scenario,
        varied: None,
        setting,
        utilisation,
        seeds,
        policies: all(),
    };
    let homogeneous = Setting::homogeneous;
    let mut points: Vec<Point> = [0.8, 0.95, 1.05]
        .map(|utilisation| Point {
            seeds: seeds.max(JUDGED_SEEDS),
            ..point("homogeneous", homogeneous(), utilisation)
        })
        .into();
    let heterogeneous = Setting { slots: 2, object_sigma: 0.8, output_sigma: 1.0, ..homogeneous() };
    let slow = Setting { staging_gib_s: 4.0, staging_sigma: 0.5, ..heterogeneous.clone() };
    points.push(point("heterogeneous", heterogeneous, 1.0));
    points.push(point("slow_noisy_staging", slow, 0.9));
    for budget_gib in [100.0, 50.0, 25.0] {
        let setting = Setting { budget_gib, ..homogeneous() };
        let swept = point("capacity", setting, 1.05);
        points.push(Point { varied: Some(("budget_gib", budget_gib)), ..swept });
    }
    let base = || vec![("demand", Kind::Demand), ("immediate", Kind::Immediate)];
    for lead_s in [0.0, 0.25, 0.5, 1.0, 2.0, 4.0] {
        let mut policies = base();
        policies.push(("tempo", Kind::Tempo { lead_s }));
        let swept = Point { policies, ..point("lead", homogeneous(), 0.95) };
        points.push(Point { varied: Some(("lead_s", lead_s)), ..swept });
    }
    for late_price_gib in [2.5, 5.0, 10.0, 20.0, 40.0, 80.0] {
        let Kind::TempoQ(tempo_q) = TEMPO_Q else { continue };
        let priced = TempoQ { late_price_bytes: bytes(late_price_gib), ..tempo_q };
        let mut policies = base();
        policies.push(("tempo_q", Kind::TempoQ(priced)));
        let swept = Point { policies, ..point("late_price", homogeneous(), 0.95) };
        points.push(Point { varied: Some(("late_price_gib", late_price_gib)), ..swept });
    }
    points
}

/// Every policy of a point, on the same requests and with the same noise of the device.
fn measure(point: &Point) -> Vec<Row> {
    let per_s = capacity_per_s(&point.setting) * point.utilisation;
    let jobs: Vec<(Kind, Reservation, u64)> = RESERVATIONS
        .into_iter()
        .flat_map(|reservation| {
            let seeds = FIRST_SEED..FIRST_SEED + point.seeds;
            let policies = point.policies.iter();
            policies.flat_map(move |(_, kind)| {
                seeds.clone().map(move |seed| (*kind, reservation, seed))
            })
        })
        .collect();
    let runs = parallel(&jobs, |(kind, reservation, seed)| {
        run(&point.setting, per_s, kind, *reservation, *seed)
    });
    let seeds = usize::try_from(point.seeds).expect("few seeds");
    let mut rows: Vec<Row> = Vec::new();
    let mut runs = runs.into_iter();
    for reservation in RESERVATIONS {
        for (policy, _) in &point.policies {
            rows.push(Row {
                scenario: point.scenario,
                varied: point.varied,
                utilisation: point.utilisation,
                offered_per_s: per_s,
                policy,
                reservation,
                runs: runs.by_ref().take(seeds).collect(),
            });
        }
    }
    rows
}

fn run(setting: &Setting, per_s: f64, kind: &Kind, reservation: Reservation, seed: u64) -> Run {
    let workload = Workload::draw(setting, per_s, seed);
    let device = Pipes::new(setting, &workload.object_bytes, seed);
    let server = Server::new(setting, &workload, kind, reservation, device);
    Run::of(&server.run(&mut Virtual).0)
}

/// Requests a second when all are there from the beginning, staged at once into boundless memory.
pub(crate) fn capacity_per_s(setting: &Setting) -> f64 {
    let setting = Setting { objects: 64, requests: 160, budget_gib: 1e4, ..setting.clone() };
    let workload = Workload::draw(&setting, 1e3, 5);
    let device = Pipes::new(&setting, &workload.object_bytes, 5);
    let server = Server::new(&setting, &workload, &Kind::Immediate, Reservation::Eager, device);
    let (outcome, _) = server.run(&mut Virtual);
    setting.requests as f64 / (outcome.end_ns as f64 / 1e9)
}

/// Results in the order of the jobs.
fn parallel<J: Sync, R: Send>(jobs: &[J], work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    // Only who gets which number; results are handed over by the lock.
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<R>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((at, job)) = Some(next.fetch_add(1, Ordering::Relaxed))
                    .and_then(|at| Some((at, jobs.get(at)?)))
                {
                    let result = work(job);
                    results.lock().expect("no job panicked")[at] = Some(result);
                }
            });
        }
    });
    let results = results.into_inner().expect("no job panicked");
    results.into_iter().map(|result| result.expect("every job ran")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_everything() {
        let setting = Setting { requests: 60, ..Setting::homogeneous() };
        let runs = [1, 1, 2].map(|seed| run(&setting, 1.0, &TEMPO_Q, Reservation::Lazy, seed));
        assert_eq!(runs[0], runs[1]);
        assert_ne!(runs[0], runs[2]);
    }

    #[test]
    fn staging_in_time_saves_waiting_and_protects_less_than_at_once() {
        let setting = Setting::homogeneous();
        let per_s = capacity_per_s(&setting);
        let run = |kind| run(&setting, per_s, &kind, Reservation::Eager, 7);
        let [demand, immediate, tempo] = [Kind::Demand, Kind::Immediate, TEMPO_Q].map(run);
        assert_eq!((demand.c_gib_s, demand.late), (0.0, 1.0));
        assert!(tempo.p95_ttft_s < demand.p95_ttft_s && tempo.c_gib_s < immediate.c_gib_s / 2.0);
    }
}
