//! When waiting requests will read what they claimed, projected by tokens from a caller's schedule.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use kv_staging::{ClaimId, DecodeOptions, DecodeProjection, TimeToUse, Work};

use super::schedule::{RequestWork, Schedule};
use crate::clock::ns_of;

/// Outputs remembered.
pub(super) const OUTPUTS_MAX: usize = 256;
/// How far ahead the projection looks: a claim that is used later is not staged yet.
const HORIZON_NS: u64 = 4_000_000_000;
/// A schedule says nothing any more after so long: its scheduler works on something long, or is gone.
const STALE_NS: u64 = 60_000_000_000;
/// The work of a projection: scenarios times requests that run.
const WORK_MAX: usize = 16_384;

/// One schedule, projected once: until the next one only time goes on.
#[derive(Debug)]
pub(super) struct Plan {
    projection: DecodeProjection,
    as_of_ns: u64,
    /// By request, running ones included: whose start it reads at.
    reads_with: HashMap<ClaimId, ClaimId>,
}

/// Names are compared by their hash: a collision would only cost an estimate.
fn id_of(request: &str) -> ClaimId {
    let mut hasher = DefaultHasher::new();
    request.hash(&mut hasher);
    ClaimId(hasher.finish())
}

impl Plan {
    /// Projects `schedule` of time `as_of_ns`, knowing what earlier outputs were.
    pub(super) fn new(
        schedule: &Schedule,
        as_of_ns: u64,
        outputs: impl IntoIterator<Item = u64>,
        quantile_percent: u32,
    ) -> Self {
        let mut options = DecodeOptions::new(
            schedule.slots,
            ns_of(schedule.iteration),
            ns_of(schedule.iteration_per_request),
        );
        options.quantile_percent = quantile_percent;
        options.horizon_ns = HORIZON_NS;
        options.history_len = OUTPUTS_MAX;
        let scenarios = (WORK_MAX / (schedule.running.len() + 1)).clamp(4, 64);
        options.scenarios = u32::try_from(scenarios).unwrap_or(64);
        let mut projection = DecodeProjection::new(options);
        outputs.into_iter().for_each(|tokens| projection.learn(tokens));
        let mut reads_with = HashMap::new();
        for it in &schedule.running {
            let id = id_of(&it.request);
            projection.enqueue(id, work(it, schedule.prompt_token));
            projection.start(id, as_of_ns);
            if it.prompt_tokens == 0 {
                projection.progress(id, it.output_tokens, as_of_ns);
            }
            reads_with.insert(id, id);
        }
        let first = schedule.waiting.first().map(|it| id_of(&it.request));
        for (place, it) in schedule.waiting.iter().enumerate() {
            let id = id_of(&it.request);
            projection.enqueue(id, work(it, schedule.prompt_token));
            let ahead = first.filter(|_| place < schedule.read_ahead);
            reads_with.insert(id, ahead.unwrap_or(id));
        }
        let plan = Self { projection, as_of_ns, reads_with };
        if let Some(first) = first {
            // Now, while nobody is kept waiting.
            let _ = plan.projection.time_to_use_ns(first, as_of_ns);
        }
        plan
    }

    pub(super) fn is_stale(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.as_of_ns) > STALE_NS
    }

    /// From `now_ns`; `None`: the schedule does not name the request.
    pub(super) fn time_to_use_ns(&self, request: &str, now_ns: u64) -> Option<u64> {
        let id = self.reads_with.get(&id_of(request))?;
        let ns = self.projection.time_to_use_ns(*id, self.as_of_ns)?;
        // What lies beyond the horizon comes no nearer with time.
        let elapsed_ns = if ns < HORIZON_NS { now_ns.saturating_sub(self.as_of_ns) } else { 0 };
        Some(ns.saturating_sub(elapsed_ns))
    }

    /// That it is used within `within_ns` from `now_ns`, in thousandths.
    pub(super) fn use_chance_permille(
        &self,
        request: &str,
        within_ns: u64,
        now_ns: u64,
    ) -> Option<u32> {
        let id = self.reads_with.get(&id_of(request))?;
        let elapsed_ns = now_ns.saturating_sub(self.as_of_ns);
        let within_ns = within_ns.saturating_add(elapsed_ns);
        self.projection.use_chance_permille(*id, within_ns, self.as_of_ns)
    }
}

fn work(of: &RequestWork, prompt_token: Duration) -> Work {
    let prefill_ns = ns_of(prompt_token).saturating_mul(of.prompt_tokens);
    Work { retrieval_ns: 0, prefill_ns, tokens_max: of.output_tokens_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn request(name: &str, prompt_tokens: u64, output_tokens: u64) -> RequestWork {
        let output_tokens_max = Some(100);
        RequestWork { request: name.to_owned(), prompt_tokens, output_tokens, output_tokens_max }
    }

    /// Iterations of 100 ms, prompts of 1 s per 100 tokens; both slots are taken.
    fn schedule() -> Schedule {
        Schedule {
            slots: 2,
            iteration: Duration::from_millis(100),
            prompt_token: Duration::from_millis(10),
            running: vec![request("a", 0, 4), request("b", 0, 15)],
            waiting: ["w0", "w1", "w2"].map(|name| request(name, 50, 0)).to_vec(),
            ..Schedule::default()
        }
    }

    fn times(schedule: &Schedule, outputs: &[u64], now_ns: u64) -> [Option<u64>; 3] {
        let plan = Plan::new(schedule, 0, outputs.iter().copied(), 30);
        ["w0", "w1", "w2"].map(|name| Some(plan.time_to_use_ns(name, now_ns)? / MS))
    }

    #[test]
    fn who_waits_starts_when_those_that_run_have_written_what_they_will() {
        // b writes 5 more; then w0 has its prompt computed, and a has 11 left.
        // When a ends, w1 has its prompt computed, and w0 has 9 left.
        let found = times(&schedule(), &[20], 0);
        assert_eq!(found, [Some(500), Some(500 + 500 + 1100), Some(2100 + 500 + 900)]);
        assert_eq!(times(&schedule(), &[20], 450 * MS)[0], Some(50));
        assert_eq!(times(&schedule(), &[20], 900 * MS)[0], Some(0));
        // A prompt that is being computed comes first.
        let mut computing = schedule();
        computing.running[0].prompt_tokens = 30;
        assert_eq!(times(&computing, &[20], 0)[0], Some(300 + 500));
    }

    #[test]
    fn before_an_output_is_known_all_are_as_long_as_they_may_be() {
        assert_eq!(times(&schedule(), &[], 0)[0], Some(HORIZON_NS / MS), "8.5 s are beyond");
        assert_eq!(times(&schedule(), &[], 5000 * MS)[0], Some(HORIZON_NS / MS));
        let mut short = schedule();
        short.running[1].output_tokens_max = Some(25);
        assert_eq!(times(&short, &[], 0)[0], Some(1000));
    }

    #[test]
    fn who_reads_ahead_reads_when_the_first_starts() {
        let mut ahead = schedule();
        ahead.read_ahead = 2;
        let found = times(&ahead, &[20], 0);
        assert_eq!((found[0], found[1]), (Some(500), Some(500)));
        assert!(found[2] > Some(2000), "{found:?}");
    }

    #[test]
    fn the_chance_grows_with_time_and_with_what_is_known() {
        let outputs: Vec<u64> = (16..=115).collect();
        let plan = Plan::new(&schedule(), 0, outputs, 30);
        let chance = |within, now| plan.use_chance_permille("w0", within * MS, now * MS).unwrap();
        let (soon, later, at_last) = (chance(500, 0), chance(3000, 0), chance(3900, 0));
        assert!(0 < soon && soon < later && later < at_last, "{soon} {later} {at_last}");
        assert_eq!(chance(1000, 2000), later);
        // One that runs reads now, one that is not named nobody knows.
        assert_eq!(plan.use_chance_permille("a", 0, 0), Some(1000));
        assert_eq!(plan.use_chance_permille("x", 0, 0), None);
        assert_eq!(plan.time_to_use_ns("x", 0), None);
    }

    #[test]
    fn a_free_slot_means_now_and_an_empty_schedule_nothing() {
        let mut free = schedule();
        free.slots = 3;
        assert_eq!(times(&free, &[20], 0)[0], Some(0));
        assert_eq!(times(&Schedule::default(), &[20], 0), [None; 3]);
        let plan = Plan::new(&free, MS, [20], 30);
        assert!(!plan.is_stale(0) && !plan.is_stale(STALE_NS) && plan.is_stale(STALE_NS + 2 * MS));
    }

    #[test]
    fn many_requests_are_projected_all_the_same() {
        let many = |count: u64, tokens| -> Vec<RequestWork> {
            (0..count).map(|n| request(&format!("{tokens}-{n}"), 0, tokens)).collect()
        };
        let (running, waiting) = (many(4000, 3), many(20_000, 0));
        let schedule = Schedule { slots: 4000, running, waiting, ..schedule() };
        let plan = Plan::new(&schedule, 0, [20], 30);
        assert_eq!(plan.time_to_use_ns("0-0", 0), Some(1700 * MS));
    }
}
