//! When a claim becomes eligible. One file a policy; all run behind one interface, so that they can be compared.

mod by_chance;
mod demand;
mod fixed;
mod immediate;
mod queue;
mod tempo;
mod tempo_q;

pub use self::{
    by_chance::ByChance, demand::Demand, fixed::Static, immediate::Immediate, queue::QueueDepth,
    tempo::Tempo, tempo_q::TempoQ,
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
    /// How likely use falls within the policy's lead, in thousandths; `None` if unknown, or if the policy has no lead.
    pub use_chance_permille: Option<u32>,
    /// How likely use is so soon that staging would hardly be sooner done than a read on demand, in thousandths; `None` if
    /// unknown, if nothing is to be staged, or if the policy does not ask ([`Policy::soon_ns`]).
    pub soon_chance_permille: Option<u32>,
    /// How likely each claim that is staged after this one is late, if this one waits any longer: in thousandths, all of them
    /// together. 0 of all but the first, and if the policy does not take turns ([`Policy::takes_turns`]).
    pub late_behind_permille: u32,
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
/// The answer depends on the outlook and on the claims recorded so far, nothing else. Eligible is for good: the policy is not asked again. Whether there is room is
/// not its business. Every policy but [`Demand`] says yes once the retrieval is requested.
pub trait Policy {
    /// For reports.
    fn name(&self) -> &'static str;

    /// A claim of so many bytes was recorded: for policies that go by what is usual.
    fn recorded(&mut self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether to commit the claim as soon as there is room.
    fn is_eligible(&self, outlook: &Outlook) -> bool;

    /// Within which time the chance of use is asked ([`Outlook::use_chance_permille`]); `None` if the policy does not need
    /// it: then nothing is worked out for it. `restage_ns` tells of a claim whose objects others hold or bring in how long
    /// it would take to bring them in again, once those let go of them.
    fn lead_ns(&self, time_to_ready_ns: u64, restage_ns: &dyn Fn() -> Option<u64>) -> Option<u64> {
        let _ = (time_to_ready_ns, restage_ns);
        None
    }

    /// Within which time use would be too soon for staging to be of help; `None` if the policy does not ask.
    fn soon_ns(&self, time_to_ready_ns: u64) -> Option<u64> {
        let _ = time_to_ready_ns;
        None
    }

    /// Whether claims are staged in the order of their use rather than of their slack, and the first is told of those behind
    /// it. Of all orders on a device that stages one after the other that of use makes the least late; that of slack puts a
    /// large claim before a small one that is used sooner.
    fn takes_turns(&self) -> bool {
        false
    }

    /// Whether an eligible claim is committed although its staging cannot start yet. If not, it stays eligible until the
    /// device is free for it: under eager reservation nothing is then protected that only waits.
    fn commits_ahead(&self) -> bool {
        true
    }
}

const _: Option<&dyn Policy> = None;
