//! Requests to scheduler steps, by arrival.

use fastrand::Rng;

use crate::replay::Request;

/// How requests are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleOptions {
    /// Arrivals within one such stretch of trace time are served in one step, in milliseconds; at least 1.
    pub step_ms: u64,
    /// Most requests in one step; those beyond it form a further step.
    pub requests_max: usize,
    /// The trace's clock ticks this coarsely (Mooncake: about 3000 ms): each arrival is moved later by a uniformly
    /// random part of a tick, so that a tick is not one burst.
    pub tick_ms: u64,
    /// Seed of that.
    pub seed: u64,
}

impl Default for ScheduleOptions {
    /// Steps of 3 s of trace time, at most 64 requests each, arrivals within a tick of 3 s, seed 1.
    fn default() -> Self {
        Self { step_ms: 3000, requests_max: 64, tick_ms: 3000, seed: 1 }
    }
}

/// Requests served together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// End of its stretch of trace time: when a live scheduler would start it, in milliseconds.
    pub start_ms: u64,
    /// Indices into the trace's requests, by arrival.
    pub requests: Vec<usize>,
}

/// A trace cut into steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// In order; none is empty.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// Groups `requests`. The same options and requests always give the same steps.
    pub fn new(requests: &[Request], options: ScheduleOptions) -> Self {
        let mut rng = Rng::with_seed(options.seed);
        let jitter = |request: &Request| {
            request.timestamp_ms.saturating_add(rng.u64(..options.tick_ms.max(1)))
        };
        let mut arrivals: Vec<(u64, usize)> = requests.iter().map(jitter).zip(0..).collect();
        arrivals.sort_unstable();
        let mut steps: Vec<Step> = Vec::new();
        let step_ms = options.step_ms.max(1);
        for (arrival_ms, request) in arrivals {
            let start_ms = (arrival_ms / step_ms).saturating_add(1).saturating_mul(step_ms);
            match steps.last_mut() {
                Some(step)
                    if step.start_ms == start_ms && step.requests.len() < options.requests_max =>
                {
                    step.requests.push(request);
                }
                _ => steps.push(Step { start_ms, requests: vec![request] }),
            }
        }
        Self { steps }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(timestamp_ms: u64) -> Request {
        Request { timestamp_ms, input_tokens: 0, output_tokens: 0, chunks: Vec::new() }
    }

    #[test]
    fn arrivals_of_one_stretch_share_a_step() {
        let requests = [at(0), at(900), at(1000), at(5200)];
        let options = ScheduleOptions { step_ms: 1000, tick_ms: 0, ..ScheduleOptions::default() };
        let steps = Schedule::new(&requests, options).steps;
        let grouped: Vec<_> = steps.iter().map(|s| (s.start_ms, s.requests.clone())).collect();
        assert_eq!(grouped, [(1000, vec![0, 1]), (2000, vec![2]), (6000, vec![3])]);
    }

    #[test]
    fn a_tick_is_spread_and_the_seed_decides_how() {
        let requests: Vec<_> = (0..200).map(|_| at(3000)).collect();
        let options = ScheduleOptions { step_ms: 100, ..ScheduleOptions::default() };
        let schedule = Schedule::new(&requests, options);
        assert!(schedule.steps.len() > 20, "200 arrivals spread over 30 stretches");
        assert_eq!(schedule, Schedule::new(&requests, options));
        assert_ne!(schedule, Schedule::new(&requests, ScheduleOptions { seed: 2, ..options }));
    }

    proptest! {
        #[test]
        fn every_request_is_served_once_in_bounded_steps_in_order(
            times in prop::collection::vec(0..1_000_000_u64, 0..200),
            step_ms in 0..50_000_u64,
            requests_max in 0..10_usize,
            tick_ms in 0..5000_u64,
        ) {
            let requests: Vec<_> = times.iter().map(|&ms| at(ms)).collect();
            let options = ScheduleOptions { step_ms, requests_max, tick_ms, seed: 7 };
            let steps = Schedule::new(&requests, options).steps;
            let mut served: Vec<_> = steps.iter().flat_map(|step| step.requests.clone()).collect();
            served.sort_unstable();
            prop_assert_eq!(served, (0..times.len()).collect::<Vec<_>>());
            prop_assert!(steps.iter().all(|s| (1..=requests_max.max(1)).contains(&s.requests.len())));
            prop_assert!(steps.is_sorted_by_key(|step| step.start_ms));
            for step in &steps {
                prop_assert!(step.requests.iter().all(|&r| times[r] < step.start_ms));
            }
        }
    }
}
