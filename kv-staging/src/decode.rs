//! When will a claim's data be wanted, by the tokens that running requests still have to write?

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
};

use crate::{
    ClaimId, TimeToUse,
    lengths::{Lengths, Outputs},
};

/// Progress is counted in millionths of a token.
const MICRO: u64 = 1_000_000;

/// Options of [`DecodeProjection`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DecodeOptions {
    /// Requests that run at once; at least 1 is assumed.
    pub slots: usize,
    /// Time of a decoding iteration, without the part that grows with the batch.
    pub iteration_ns: u64,
    /// What each decoding request adds to it.
    pub iteration_ns_per_request: u64,
    /// What is assumed of outputs that are not finished.
    pub outputs: Outputs,
    /// Finished requests remembered.
    pub history_len: usize,
    /// Which quantile of the projected times is the answer, 1 to 100.
    pub quantile_percent: u32,
    /// Projections per question, rounded up to a power of two.
    pub scenarios: u32,
    /// How far ahead to look; whoever is used later is said to be used then.
    pub horizon_ns: u64,
    /// Seed of the draws.
    pub seed: u64,
}

impl DecodeOptions {
    /// Defaults: the 10 % quantile of 64 scenarios of drawn outputs, 256 requests remembered, 10 s ahead.
    pub const fn new(slots: usize, iteration_ns: u64, iteration_ns_per_request: u64) -> Self {
        Self {
            slots,
            iteration_ns,
            iteration_ns_per_request,
            outputs: Outputs::Drawn,
            history_len: 256,
            quantile_percent: 10,
            scenarios: 64,
            horizon_ns: 10_000_000_000,
            seed: 0,
        }
    }
}

/// What a request takes besides its output, calibrated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// From its start until its data are on the accelerator, if they are ready.
    pub retrieval_ns: u64,
    /// Its prefill, during which nothing is decoded.
    pub prefill_ns: u64,
    /// The most tokens that it may write, if there is such a limit. Before any output is known, it writes so many.
    pub tokens_max: Option<u64>,
}

/// Projects a batch that decodes together and is refilled first come first served, in tokens.
///
/// All decoding requests advance by one token an iteration, so which slot is free first depends on who has least left
/// to write, and when on the iteration's length: it grows with the batch, and prefills interrupt it. What a running
/// request has left is drawn from finished requests that wrote more than it has. Each projected time is thus an order
/// statistic of all that run, and its quantile is the answer.
///
/// Tell it of every request and, every now and then, how much each has written: an engine knows after each iteration.
#[derive(Debug)]
pub struct DecodeProjection {
    options: DecodeOptions,
    running: Vec<Running>,
    queue: VecDeque<Queued>,
    lengths: Lengths,
    /// The latest time told.
    as_of_ns: u64,
    /// Answers to the last question, as long as nothing changes.
    answers: RefCell<Option<Answers>>,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    claim: ClaimId,
    work: Work,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    claim: ClaimId,
    work: Work,
    started_ns: u64,
    /// `None` until it decodes.
    tokens: Option<u64>,
}

#[derive(Debug)]
struct Answers {
    now_ns: u64,
    scenarios: u32,
    elapsed_ns: u64,
    /// Ascending; one for each scenario in which it starts before the horizon.
    by_claim: HashMap<ClaimId, Vec<u64>>,
}

impl DecodeProjection {
    /// No requests yet.
    pub fn new(options: DecodeOptions) -> Self {
        Self {
            lengths: Lengths::new(options.history_len),
            options,
            running: Vec::new(),
            queue: VecDeque::new(),
            as_of_ns: 0,
            answers: RefCell::new(None),
        }
    }

    /// Remembers the output of a request that finished before this began.
    pub fn learn(&mut self, tokens: u64) {
        self.lengths.learn(tokens);
        self.answers.take();
    }

    /// `claim`'s request joins the end of the queue.
    pub fn enqueue(&mut self, claim: ClaimId, work: Work) {
        self.queue.push_back(Queued { claim, work });
        self.answers.take();
    }

    /// `claim`'s request leaves the queue, wherever it stood, and takes a slot. An unknown one is ignored.
    pub fn start(&mut self, claim: ClaimId, now_ns: u64) {
        let Some(at) = self.queue.iter().position(|queued| queued.claim == claim) else { return };
        if let Some(Queued { work, .. }) = self.queue.remove(at) {
            self.running.push(Running { claim, work, started_ns: now_ns, tokens: None });
        }
        self.touch(now_ns);
    }

    /// `claim`'s running request has written `tokens` so far; 0 means that its prefill is done.
    pub fn progress(&mut self, claim: ClaimId, tokens: u64, now_ns: u64) {
        if let Some(running) = self.running.iter_mut().rfind(|running| running.claim == claim) {
            running.tokens = Some(tokens);
        }
        self.touch(now_ns);
    }

    /// `claim`'s running request is done after `tokens`, which is remembered.
    pub fn finish(&mut self, claim: ClaimId, tokens: u64, now_ns: u64) {
        let before = self.running.len();
        self.running.retain(|running| running.claim != claim);
        if self.running.len() < before {
            self.lengths.learn(tokens);
        }
        self.touch(now_ns);
    }

    /// `claim`'s request is gone, queued or running; nothing is learnt from it.
    pub fn remove(&mut self, claim: ClaimId) {
        self.queue.retain(|queued| queued.claim != claim);
        self.running.retain(|running| running.claim != claim);
        self.answers.take();
    }

    fn touch(&mut self, now_ns: u64) {
        self.as_of_ns = self.as_of_ns.max(now_ns);
        self.answers.take();
    }

    /// When each queued claim starts, from the latest time told; a quantile over scenarios.
    fn project(&self, now_ns: u64) -> Answers {
        let scenarios = match self.options.outputs {
            Outputs::Drawn => self.options.scenarios.clamp(1, 1 << 16).next_power_of_two(),
            Outputs::Mean => 1,
        };
        let elapsed_ns = now_ns.saturating_sub(self.as_of_ns);
        let horizon_ns = self.options.horizon_ns.saturating_add(elapsed_ns);
        let mut starts: Vec<Vec<u64>> = Vec::new();
        for index in 0..scenarios {
            let scenario = Scenario { index, count: scenarios, seed: self.options.seed };
            self.batch(&scenario, horizon_ns).run(&self.queue, horizon_ns, |position, start_ns| {
                if starts.len() <= position {
                    starts.push(Vec::new());
                }
                starts[position].push(start_ns);
            });
        }
        starts.resize_with(self.queue.len(), Vec::new);
        starts.iter_mut().for_each(|times| times.sort_unstable());
        let by_claim = self.queue.iter().map(|queued| queued.claim).zip(starts).collect();
        Answers { now_ns, elapsed_ns, scenarios, by_claim }
    }

    fn ask<T>(&self, now_ns: u64, question: impl FnOnce(&Answers) -> Option<T>) -> Option<T> {
        let mut answers = self.answers.borrow_mut();
        if answers.as_ref().is_none_or(|answers| answers.now_ns != now_ns) {
            *answers = Some(self.project(now_ns));
        }
        answers.as_ref().and_then(question)
    }

    fn is_running(&self, claim: ClaimId) -> bool {
        self.running.iter().any(|running| running.claim == claim)
    }

    /// The batch as it is, with outputs of one scenario.
    fn batch(&self, scenario: &Scenario, horizon_ns: u64) -> Batch<'_> {
        let mut batch = Batch {
            projection: self,
            scenario: *scenario,
            decoding: Vec::with_capacity(self.options.slots + 1),
            loading: Vec::new(),
            horizon_ns,
        };
        for running in &self.running {
            let written = running.tokens.unwrap_or(0);
            let left = self.left_micro(running.claim, running.work, scenario, written);
            if running.tokens.is_some() {
                batch.decoding.push(left);
            } else {
                let age_ns = self.as_of_ns.saturating_sub(running.started_ns);
                let ready_ns = running.work.retrieval_ns.saturating_sub(age_ns);
                batch.loading.push((ready_ns, running.work.prefill_ns, left));
            }
        }
        batch
    }

    fn left_micro(&self, claim: ClaimId, work: Work, scenario: &Scenario, written: u64) -> u64 {
        let left = match self.options.outputs {
            Outputs::Mean => self.lengths.mean_left(written),
            Outputs::Drawn => self.lengths.draw_left(scenario.rank(claim), scenario.count, written),
        };
        let most = work.tokens_max.map(|tokens| tokens.saturating_sub(written));
        let left = match most {
            Some(most) if self.lengths.is_empty() => most,
            Some(most) => left.min(most),
            None => left,
        };
        left.saturating_mul(MICRO)
    }
}

impl TimeToUse for DecodeProjection {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        let percent = self.options.quantile_percent.clamp(1, 100) as usize;
        let queued = self.ask(now_ns, |answers| {
            let times = answers.by_claim.get(&claim)?;
            let rank = (answers.scenarios as usize * percent).div_ceil(100) - 1;
            // Scenarios in which it starts beyond the horizon are missing, and would all come last.
            let ns = times.get(rank).map(|ns| ns.saturating_sub(answers.elapsed_ns));
            Some(ns.unwrap_or(self.options.horizon_ns))
        });
        queued.or_else(|| self.is_running(claim).then_some(0))
    }

    fn use_chance_permille(&self, claim: ClaimId, within_ns: u64, now_ns: u64) -> Option<u32> {
        let queued = self.ask(now_ns, |answers| {
            let times = answers.by_claim.get(&claim)?;
            let within_ns = within_ns.saturating_add(answers.elapsed_ns);
            let within = times.partition_point(|ns| *ns <= within_ns) as u64;
            u32::try_from(within * 1000 / u64::from(answers.scenarios)).ok()
        });
        queued.or_else(|| self.is_running(claim).then_some(1000))
    }
}

/// One of `count` assignments of outputs to claims.
#[derive(Clone, Copy)]
struct Scenario {
    index: u32,
    count: u32,
    seed: u64,
}

impl Scenario {
    /// Over all scenarios a claim has each rank once (a Latin hypercube), and the same whenever it is asked, so that
    /// estimates neither jitter nor miss the ends of the distribution.
    fn rank(&self, claim: ClaimId) -> u32 {
        let random = mix(self.seed ^ mix(claim.0));
        // Low words, each of its own; an odd factor permutes the powers of two.
        let [factor, offset] = [random, random >> 32].map(|word| (word & 0xffff_ffff) as u32);
        let permuted = self.index.wrapping_mul(factor | 1).wrapping_add(offset);
        let mask = self.count - 1;
        // Without this, claims with equal factors would march in step.
        let mixed = permuted & mask;
        (mixed ^ (mixed >> 1)).wrapping_mul((factor >> 16) | 1) & mask
    }
}

/// The batch of one scenario, as it goes on.
struct Batch<'a> {
    projection: &'a DecodeProjection,
    scenario: Scenario,
    /// What each has left to write.
    decoding: Vec<u64>,
    /// When each has its data, its prefill, and what it has to write.
    loading: Vec<(u64, u64, u64)>,
    horizon_ns: u64,
}

impl Batch<'_> {
    /// Plays until every queued request has started or the horizon is reached.
    fn run(
        mut self,
        queue: &VecDeque<Queued>,
        horizon_ns: u64,
        mut started: impl FnMut(usize, u64),
    ) {
        let options = &self.projection.options;
        let mut now_ns = 0_u64;
        let mut queue = queue.iter().enumerate();
        loop {
            while self.decoding.len() + self.loading.len() < options.slots.max(1) {
                let Some((position, next)) = queue.next() else { return };
                started(position, now_ns);
                let left = self.projection.left_micro(next.claim, next.work, &self.scenario, 0);
                let ready_ns = now_ns.saturating_add(next.work.retrieval_ns);
                self.loading.push((ready_ns, next.work.prefill_ns, left));
            }
            now_ns = self.step(now_ns);
            if now_ns >= horizon_ns.min(self.horizon_ns) {
                return;
            }
        }
    }

    /// To the next end of an output or of a prefill.
    fn step(&mut self, now_ns: u64) -> u64 {
        let options = &self.projection.options;
        let batch = self.decoding.len() as u64;
        let iteration_ns = options
            .iteration_ns
            .saturating_add(options.iteration_ns_per_request.saturating_mul(batch))
            .max(1);
        let least = self.decoding.iter().copied().min();
        let end_ns = least.map(|left| {
            let ns = u128::from(left) * u128::from(iteration_ns) / u128::from(MICRO);
            now_ns.saturating_add(u64::try_from(ns).unwrap_or(u64::MAX))
        });
        let next = self.loading.iter().enumerate().min_by_key(|(_, (ready_ns, ..))| *ready_ns);
        let next = next.map(|(at, (ready_ns, ..))| (at, (*ready_ns).max(now_ns)));
        match (end_ns, next) {
            (Some(end_ns), next) if next.is_none_or(|(_, ready_ns)| end_ns <= ready_ns) => {
                let least = least.unwrap_or(0);
                self.decoding.retain(|left| *left > least);
                self.decoding.iter_mut().for_each(|left| *left -= least);
                end_ns
            }
            (_, Some((at, ready_ns))) => {
                let wrote =
                    u128::from(ready_ns - now_ns) * u128::from(MICRO) / u128::from(iteration_ns);
                let wrote = u64::try_from(wrote).unwrap_or(u64::MAX);
                self.decoding.iter_mut().for_each(|left| *left = left.saturating_sub(wrote));
                let (_, prefill_ns, left) = self.loading.swap_remove(at);
                self.decoding.push(left);
                ready_ns.saturating_add(prefill_ns)
            }
            (_, None) => u64::MAX,
        }
    }
}

/// SplitMix64's finaliser.
const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
