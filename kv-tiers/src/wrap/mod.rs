//! Decorators that pace, break or crash a tier. What they do is a value of the seam: product code has no failpoints.

mod crashing;
mod faulty;
mod image;
mod pace;
mod plan;
mod throttled;

use std::collections::BTreeMap;

pub use self::{
    crashing::{Crashing, FlushPolicy},
    faulty::Faulty,
    image::{Crash, CrashImage, Dead, FlushViolation},
    pace::{Drift, Latency, Stalls, ThrottleConfig},
    plan::{Fault, FaultHandle, FaultKind, FaultPlan, When},
    throttled::{ThrottleHandle, Throttled},
};

/// Things that wait for their time; equal times keep their order.
#[derive(Debug)]
struct Due<T> {
    waiting: BTreeMap<(u64, u64), T>,
    pushed: u64,
}

impl<T> Default for Due<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), pushed: 0 }
    }
}

impl<T> Due<T> {
    fn push(&mut self, due_ns: u64, thing: T) {
        self.waiting.insert((due_ns, self.pushed), thing);
        self.pushed += 1;
    }

    fn pop(&mut self, now_ns: u64) -> Option<T> {
        let first = self.waiting.first_entry().filter(|first| first.key().0 <= now_ns)?;
        Some(first.remove())
    }

    fn next_ns(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|(&(due_ns, _), _)| due_ns)
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// The earlier of two times, either of which may be absent.
fn earlier(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}
