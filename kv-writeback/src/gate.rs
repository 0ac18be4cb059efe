//! When a write may start: behind the forward pass and away from reads, but never later than a chunk's `max_age`.

use crate::sync::{AtomicU8, AtomicUsize, Ordering};

const HOOKS_UNUSED: u8 = 0;
const FORWARD_ENDED: u8 = 1;
const FORWARD_RUNS: u8 = 2;

/// Decides whether writes may start now.
///
/// Open when any of these holds, asked in this order:
///
/// 1. somebody flushes ([`hold_open`](Self::hold_open));
/// 2. the oldest chunk that waits is `max_age_ns` old or older;
/// 3. no read is in flight, and either a forward pass runs or the forward hooks were never used.
///
/// The second rule stands above the hooks, so a hook that is never called again (a lost `read_finished`, a crashed
/// model runner) delays writes by `max_age_ns` and no more. A lost `forward_ended` only leaves rule 3 to the reads.
///
/// The gate advises; it locks nothing: a read may start the moment after a write was let through. What it promises is
/// that a read whose start is visible to the asking thread closes it.
#[derive(Debug)]
pub struct Gate {
    max_age_ns: u64,
    // All three are relaxed: they publish nothing but their own value, and a thread that was told of a change (through
    // a lock, a channel, a flag) sees that change or a later one under any ordering.
    /// Reads in flight. Written by whoever starts or ends a read, read by `may_write`.
    reads: AtomicUsize,
    /// The last forward hook. Written by the hooks, read by `may_write`.
    forward: AtomicU8,
    /// Flushes in progress. Written by `hold_open` and its guard, read by `may_write`.
    holds: AtomicUsize,
}

impl Gate {
    /// A gate on which no hook was used yet.
    pub fn new(max_age_ns: u64) -> Self {
        Self {
            max_age_ns,
            reads: AtomicUsize::new(0),
            forward: AtomicU8::new(HOOKS_UNUSED),
            holds: AtomicUsize::new(0),
        }
    }

    /// A read was handed to a tier.
    pub fn read_started(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// That read came back, in any way. One call too many does nothing.
    pub fn read_finished(&self) {
        let one_less = |reads: usize| reads.checked_sub(1);
        let _ = self.reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }

    /// Reads in flight.
    pub fn reads_in_flight(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }

    /// A forward pass began. From the first use of a hook on, young chunks are written during forward passes only.
    pub fn forward_began(&self) {
        self.forward.store(FORWARD_RUNS, Ordering::Relaxed);
    }

    /// The forward pass ended.
    pub fn forward_ended(&self) {
        self.forward.store(FORWARD_ENDED, Ordering::Relaxed);
    }

    /// Holds the gate open until the guard is dropped. Nests.
    pub fn hold_open(&self) -> HeldOpen<'_> {
        self.holds.fetch_add(1, Ordering::Relaxed);
        HeldOpen { gate: self }
    }

    /// Whether a write may start now, given when the oldest chunk that waits for it was staged.
    pub fn may_write(&self, now_ns: u64, oldest_staged_ns: Option<u64>) -> bool {
        if self.holds.load(Ordering::Relaxed) > 0 {
            return true;
        }
        if oldest_staged_ns.is_some_and(|staged_ns| now_ns >= self.opens_at(staged_ns)) {
            return true;
        }
        self.reads_in_flight() == 0 && self.forward.load(Ordering::Relaxed) != FORWARD_ENDED
    }

    /// When the gate opens for a chunk staged then, whatever the hooks say.
    pub fn opens_at(&self, staged_ns: u64) -> u64 {
        staged_ns.saturating_add(self.max_age_ns)
    }
}

/// Holds a [`Gate`] open while it lives.
#[derive(Debug)]
#[must_use = "the gate is held open only while this lives"]
pub struct HeldOpen<'a> {
    gate: &'a Gate,
}

impl Drop for HeldOpen<'_> {
    fn drop(&mut self) {
        self.gate.holds.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn without_hooks_the_gate_follows_the_reads() {
        let gate = Gate::new(100);
        assert!(gate.may_write(0, Some(0)));
        gate.read_started();
        gate.read_started();
        gate.read_finished();
        assert!(!gate.may_write(99, Some(0)));
        gate.read_finished();
        assert!(gate.may_write(99, Some(0)));
    }

    #[test]
    fn with_hooks_young_chunks_wait_for_a_forward_pass() {
        let gate = Gate::new(100);
        gate.forward_began();
        assert!(gate.may_write(0, Some(0)));
        gate.read_started();
        assert!(
            !gate.may_write(0, Some(0)),
            "reads come before writes, also behind a forward pass"
        );
        gate.read_finished();
        gate.forward_ended();
        assert!(!gate.may_write(99, Some(0)));
        gate.forward_began();
        assert!(gate.may_write(99, Some(0)));
    }

    #[test]
    fn lost_hooks_delay_a_write_by_max_age_and_no_more() {
        let gate = Gate::new(100);
        gate.read_started();
        gate.forward_began();
        gate.forward_ended();
        assert!(!gate.may_write(109, Some(10)));
        assert!(gate.may_write(110, Some(10)));
        assert!(gate.may_write(u64::MAX, Some(10)));
        assert!(!gate.may_write(u64::MAX, None), "age is a chunk's age");
    }

    #[test]
    fn an_extra_read_finished_does_not_wrap() {
        let gate = Gate::new(100);
        gate.read_finished();
        assert_eq!(gate.reads_in_flight(), 0);
        gate.read_started();
        assert!(!gate.may_write(0, None));
    }

    #[test]
    fn a_flush_opens_the_gate_while_its_guard_lives() {
        let gate = Gate::new(100);
        gate.read_started();
        let (outer, inner) = (gate.hold_open(), gate.hold_open());
        drop(inner);
        assert!(gate.may_write(0, None));
        drop(outer);
        assert!(!gate.may_write(0, None));
    }
}
