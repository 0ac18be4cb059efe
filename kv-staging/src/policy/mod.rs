//! When a claim becomes eligible. One file a policy; all run behind one interface, so that they can be compared.

mod demand;
mod fixed;
mod immediate;
mod queue;
mod tempo;

pub use self::{
    demand::Demand, fixed::Static, immediate::Immediate, queue::QueueDepth, tempo::Tempo,
};

/// What a policy may look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outlook {
    /// Claims recorded earlier whose retrieval has not begun.
    pub ahead: usize,
    /// Bytes of the claim's objects, resident or not.
    pub bytes: u64,
    /// Estimated time until use; `None` if unknown.
    pub time_to_use_ns: Option<u64>,
    /// Estimated time until ready, if committed now.
    pub time_to_ready_ns: u64,
    /// Its retrieval is requested: the scheduler waits for it.
    pub requested: bool,
}

impl Outlook {
    /// Nanoseconds to spare: time until use less time until ready. Claims are committed in this order. A requested
    /// claim is used now; one of unknown use comes last.
    pub fn slack_ns(&self) -> i128 {
        let time_to_use_ns = if self.requested { Some(0) } else { self.time_to_use_ns };
        time_to_use_ns.map_or(i128::MAX, |ns| i128::from(ns) - i128::from(self.time_to_ready_ns))
    }
}

/// Decides when a claim becomes eligible.
///
/// # Contract
/// The answer depends on the outlook alone. Eligible is for good: the policy is not asked again. Whether there is room is
/// not its business. Every policy but [`Demand`] says yes once the retrieval is requested.
pub trait Policy {
    /// For reports.
    fn name(&self) -> &'static str;

    /// Whether to commit the claim as soon as there is room.
    fn is_eligible(&self, outlook: &Outlook) -> bool;
}

const _: Option<&dyn Policy> = None;
