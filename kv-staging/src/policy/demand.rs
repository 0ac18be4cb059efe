//! Never protect: the baseline without staging.

use super::{Outlook, Policy};

/// No claim is ever committed; every retrieval takes the demand path.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demand;

impl Policy for Demand {
    fn name(&self) -> &'static str {
        "demand"
    }

    fn is_eligible(&self, _outlook: &Outlook) -> bool {
        false
    }
}
