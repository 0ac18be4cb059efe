//! Protect the head of the queue.

use super::{Outlook, Policy};

/// The oldest `claims` whose retrieval has not begun are eligible (Queue-k).
#[derive(Clone, Copy, Debug)]
pub struct QueueDepth {
    /// How many.
    pub claims: usize,
}

impl Policy for QueueDepth {
    fn name(&self) -> &'static str {
        "queue"
    }

    fn is_eligible(&self, outlook: &Outlook) -> bool {
        outlook.requested || outlook.ahead < self.claims
    }
}
