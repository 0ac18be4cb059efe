//! When claims will be used: as their callers say, else from the order and pace of the retrievals so far.

use std::collections::HashMap;

use kv_staging::{ClaimId, ProjectionOptions, SlotProjection, TimeToUse};

/// Claims further back in the queue are of unknown use: projecting costs more the longer the queue is.
const QUEUE_MAX: usize = 64;

/// Time until use of all living claims.
///
/// What is projected is one timeline: claims are served in the order in which they were recorded, each as long after the one
/// before it as retrievals followed each other lately, while there was a queue.
#[derive(Debug)]
pub(super) struct Uses {
    /// As callers said.
    told_ns: HashMap<ClaimId, u64>,
    timeline: SlotProjection,
    /// Claims whose retrieval has not begun.
    waiting: usize,
    /// The one whose retrieval began last.
    served: Option<ClaimId>,
}

impl Uses {
    pub(super) fn new(quantile_percent: u32) -> Self {
        let mut options = ProjectionOptions::new(1);
        options.quantile_percent = quantile_percent;
        options.history_len = 64;
        let timeline = SlotProjection::new(options);
        Self { told_ns: HashMap::new(), timeline, waiting: 0, served: None }
    }

    pub(super) fn recorded(&mut self, claim: ClaimId, use_at_ns: Option<u64>) {
        // Time without a queue says nothing of how fast one is served.
        if self.waiting == 0
            && let Some(served) = self.served.take()
        {
            self.timeline.remove(served);
        }
        self.waiting += 1;
        self.timeline.enqueue(claim, 0);
        self.told(claim, use_at_ns);
    }

    pub(super) fn told(&mut self, claim: ClaimId, use_at_ns: Option<u64>) {
        match use_at_ns {
            Some(at_ns) => drop(self.told_ns.insert(claim, at_ns)),
            None => drop(self.told_ns.remove(&claim)),
        }
    }

    /// Its retrieval began.
    pub(super) fn began(&mut self, claim: ClaimId, now_ns: u64) {
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(served) = self.served.replace(claim) {
            self.timeline.finish(served, now_ns);
        }
        self.timeline.start(claim, now_ns);
    }

    /// It is gone; `waited` if its retrieval had not begun.
    pub(super) fn gone(&mut self, claim: ClaimId, waited: bool) {
        self.told_ns.remove(&claim);
        if waited {
            self.waiting = self.waiting.saturating_sub(1);
            self.timeline.remove(claim);
        }
    }
}

impl Uses {
    /// As its caller said.
    pub(super) fn told_time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        self.told_ns.get(&claim).map(|at_ns| at_ns.saturating_sub(now_ns))
    }
}

impl TimeToUse for Uses {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        let told = self.told_time_to_use_ns(claim, now_ns);
        if told.is_some() {
            return told;
        }
        if self.waiting > QUEUE_MAX {
            return None;
        }
        self.timeline.time_to_use_ns(claim, now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn claims(uses: &mut Uses, range: std::ops::Range<u64>) {
        range.for_each(|claim| uses.recorded(ClaimId(claim), None));
    }

    #[test]
    fn a_queue_is_projected_at_the_pace_of_the_retrievals_so_far() {
        let mut uses = Uses::new(30);
        claims(&mut uses, 0..6);
        uses.began(ClaimId(0), 10 * S);
        uses.began(ClaimId(1), 12 * S);
        uses.began(ClaimId(2), 14 * S);
        let until = |claim| uses.time_to_use_ns(ClaimId(claim), 14 * S);
        assert_eq!([3, 4, 5].map(until), [2, 4, 6].map(|s| Some(s * S)));
    }

    #[test]
    fn what_the_caller_says_comes_first_and_may_change() {
        let mut uses = Uses::new(30);
        uses.recorded(ClaimId(1), Some(9 * S));
        assert_eq!(uses.time_to_use_ns(ClaimId(1), 4 * S), Some(5 * S));
        uses.told(ClaimId(1), Some(6 * S));
        assert_eq!(uses.time_to_use_ns(ClaimId(1), 4 * S), Some(2 * S));
        assert_eq!(uses.time_to_use_ns(ClaimId(1), 7 * S), Some(0));
    }

    #[test]
    fn a_pause_without_a_queue_is_no_pace() {
        let mut uses = Uses::new(30);
        claims(&mut uses, 0..2);
        uses.began(ClaimId(0), 0);
        uses.began(ClaimId(1), S);
        uses.gone(ClaimId(1), false);
        // An hour later.
        claims(&mut uses, 2..5);
        uses.began(ClaimId(2), 3600 * S);
        assert_eq!(uses.time_to_use_ns(ClaimId(4), 3600 * S), Some(2 * S));
    }

    #[test]
    fn a_claim_that_left_the_queue_makes_room() {
        let mut uses = Uses::new(30);
        claims(&mut uses, 0..4);
        uses.began(ClaimId(0), 0);
        uses.began(ClaimId(1), S);
        uses.gone(ClaimId(2), true);
        assert_eq!(uses.time_to_use_ns(ClaimId(3), S), Some(S));
        assert_eq!(uses.time_to_use_ns(ClaimId(2), S), None);
    }
}
