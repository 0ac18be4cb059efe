//! Staging is one after the other: who comes first, and who would be late behind it.

use std::collections::HashSet;

use crate::{ClaimId, ObjectId, policy::Outlook};

/// Who is used first comes first; what is requested is used now, and of what nothing is known comes last.
pub(crate) fn order(waiting: &mut [(Outlook, ClaimId)]) {
    let use_ns = |outlook: &Outlook| match outlook.requested {
        true => 0,
        false => outlook.time_to_use_ns.unwrap_or(u64::MAX),
    };
    waiting.sort_by_key(|(outlook, id)| (use_ns(outlook), *id));
}

/// Tells the first claim that lacks something how likely each behind it is late, if it waits any longer. `lacks` names the
/// objects that a claim has to have staged; `late_permille` is the chance that it is used within the policy's lead of a
/// time until ready, which here is that of all before it and its own.
pub(crate) fn tell(
    waiting: &mut [(Outlook, ClaimId)],
    lacks: impl Fn(ClaimId) -> Vec<ObjectId>,
    late_permille: impl Fn(ClaimId, u64) -> u32,
) {
    let mut counted = HashSet::new();
    let (mut first, mut ready_ns, mut late_behind_permille) = (None, 0_u64, 0_u32);
    for (at, (outlook, id)) in waiting.iter().enumerate() {
        // What claims share is staged once, in the first one's turn.
        if lacks(*id).into_iter().filter(|object| counted.insert(*object)).count() == 0 {
            continue;
        }
        ready_ns = ready_ns.saturating_add(outlook.time_to_ready_ns);
        if first.is_none() {
            first = Some(at);
        } else {
            late_behind_permille =
                late_behind_permille.saturating_add(late_permille(*id, ready_ns));
        }
    }
    if let Some(first) = first {
        waiting[first].0.late_behind_permille = late_behind_permille;
    }
}
