//! Protect at once: the baseline that spends most memory.

use super::{Outlook, Policy};

/// Every claim is eligible as soon as it is recorded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Immediate;

impl Policy for Immediate {
    fn name(&self) -> &'static str {
        "immediate"
    }

    fn is_eligible(&self, _outlook: &Outlook) -> bool {
        true
    }
}
