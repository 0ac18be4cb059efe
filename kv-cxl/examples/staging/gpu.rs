//! A modelled accelerator: slots, a prefill at a time, and a batch that decodes when no prefill runs.

use kv_staging::ClaimId;

use crate::workload::{Setting, ns, whole};

#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) claim: ClaimId,
    /// Its place in the workload.
    pub(crate) request: usize,
    pub(crate) tokens: u64,
    pub(crate) written: f64,
    pub(crate) phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its data are not on the accelerator yet.
    Loading,
    Prefilling {
        end_ns: u64,
    },
    /// Waits for the prefill of another.
    Loaded,
    Decoding,
}

#[derive(Debug)]
pub(crate) struct Gpu {
    setting: Setting,
    pub(crate) running: Vec<Running>,
    now_ns: u64,
}

/// What came about.
pub(crate) enum Turn {
    /// A prefill is done: the first token.
    First(usize),
    /// A request is done, with so many tokens.
    Done(usize),
}

impl Gpu {
    pub(crate) fn new(setting: &Setting) -> Self {
        Self { setting: setting.clone(), running: Vec::new(), now_ns: 0 }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.running.len() < self.setting.slots
    }

    /// A request takes a slot.
    pub(crate) fn start(&mut self, claim: ClaimId, request: usize, tokens: u64) {
        self.running.push(Running { claim, request, tokens, written: 0.0, phase: Phase::Loading });
    }

    /// The data of `claim` are on the accelerator.
    pub(crate) fn loaded(&mut self, claim: ClaimId) {
        let running = self.running.iter_mut().find(|running| running.claim == claim);
        running.expect("it loads").phase = Phase::Loaded;
        self.prefill_next();
    }

    /// Seconds a token; `None` while a prefill runs or nobody decodes.
    fn iteration_s(&self) -> Option<f64> {
        let decoding = self.running.iter().filter(|it| it.phase == Phase::Decoding).count();
        let setting = &self.setting;
        (decoding > 0 && !self.is_prefilling())
            .then_some(setting.iteration_s + setting.iteration_s_per_request * decoding as f64)
    }

    fn is_prefilling(&self) -> bool {
        self.running.iter().any(|running| matches!(running.phase, Phase::Prefilling { .. }))
    }

    fn prefill_next(&mut self) {
        if !self.is_prefilling()
            && let Some(next) = self.running.iter_mut().find(|it| it.phase == Phase::Loaded)
        {
            next.phase = Phase::Prefilling { end_ns: self.now_ns + ns(self.setting.prefill_s) };
        }
    }

    /// When something happens next.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let prefill = self.running.iter().find_map(|running| match running.phase {
            Phase::Prefilling { end_ns } => Some(end_ns),
            _ => None,
        });
        let iteration_s = self.iteration_s();
        let ends = self.running.iter().filter(|it| it.phase == Phase::Decoding).filter_map(|it| {
            // Rounded up, so that it is done then.
            Some(self.now_ns + ns((it.tokens as f64 - it.written) * iteration_s?) + 1)
        });
        ends.chain(prefill).min()
    }

    /// Lets time pass; what came about goes to `turns`.
    pub(crate) fn advance(&mut self, now_ns: u64, turns: &mut Vec<(ClaimId, Turn)>) {
        if let Some(iteration_s) = self.iteration_s() {
            let tokens = (now_ns - self.now_ns) as f64 / 1e9 / iteration_s;
            let decoding = self.running.iter_mut().filter(|it| it.phase == Phase::Decoding);
            decoding.for_each(|running| running.written += tokens);
        }
        self.now_ns = now_ns;
        for running in &mut self.running {
            if matches!(running.phase, Phase::Prefilling { end_ns } if end_ns <= now_ns) {
                running.phase = Phase::Decoding;
                turns.push((running.claim, Turn::First(running.request)));
            }
        }
        self.running.retain(|running| {
            let done = running.written + 1e-6 >= running.tokens as f64;
            if done {
                turns.push((running.claim, Turn::Done(running.request)));
            }
            !done
        });
        self.prefill_next();
    }

    /// What each decoding request has written.
    pub(crate) fn progress(&self) -> impl Iterator<Item = (ClaimId, u64)> {
        let decoding = self.running.iter().filter(|running| running.phase == Phase::Decoding);
        decoding.map(|running| (running.claim, whole(running.written)))
    }
}
