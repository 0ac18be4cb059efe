//! Rules of room: removal, the cap, eviction.

use super::{Outcome, Verdict, case::Case, model::Ended};
use crate::{ErrorKind, record_bytes};

/// Writes of the smallest chunks are bounded too, where a cap would take very many.
const CHUNKS_MAX: u64 = 4096;

pub(super) fn a_removed_chunk_is_gone_at_once(case: &mut Case<'_, '_>) -> Outcome {
    if case.remove(0)? {
        return Err("a chunk never written was removed".into());
    }
    for payload_bytes in [1, case.payload_bytes_max()?] {
        for _ in 0..2 {
            // The same key again with other bytes: the old ones must not come back.
            let content = case.write(0, payload_bytes)?;
            let found = case.read(0, 0..u32::MAX)?;
            if found != content {
                return Err(format!("{content:?} was written, {found:?} was read"));
            }
            case.remove(0)?;
            case.submit_read(0, 0..1)?;
            case.settle()?;
            case.compare_list()?;
        }
    }
    Ok(Verdict::Holds)
}

pub(super) fn a_removed_chunk_is_read_whole_or_not(case: &mut Case<'_, '_>) -> Outcome {
    let max = case.payload_bytes_max()?;
    for _ in 0..4 {
        case.write(0, max)?;
        case.submit_read(0, 0..u32::MAX)?;
        case.remove(0)?;
        // Both are checked against the content that their write id names: a mixture fails.
        let content = case.content(0, max);
        case.submit_write(content)?;
        case.submit_read(0, 0..u32::MAX)?;
        case.settle()?;
        if case.holds(0) != Some(content) {
            return Err(format!("{content:?} was not written after the removal"));
        }
        case.remove(0)?;
    }
    Ok(Verdict::Holds)
}

pub(super) fn the_cap_holds_under_many_writes(case: &mut Case<'_, '_>) -> Outcome {
    let capacity_bytes = case.tier()?.stats().capacity_bytes;
    let max = case.payload_bytes_max()?;
    let sizes = [max, (1 << 20) - 1, 4095, max];
    let sizes: Vec<u64> = sizes.into_iter().filter(|&bytes| bytes <= max).collect();
    let (mut written_bytes, mut number) = (0, 0);
    while written_bytes < 3 * capacity_bytes && u64::from(number) < CHUNKS_MAX {
        let payload_bytes = sizes[number as usize % sizes.len()];
        let content = case.content(number, payload_bytes);
        case.submit_write(content)?;
        written_bytes += record_bytes(payload_bytes);
        number += 1;
    }
    // The cap was compared with the use after every poll.
    case.settle()?;
    if written_bytes < 2 * capacity_bytes {
        return Ok(Verdict::Skip(format!("{capacity_bytes} bytes are too many to fill")));
    }
    if case.evictions == 0 {
        return Err(format!("{written_bytes} bytes into {capacity_bytes} without an eviction"));
    }
    let held_bytes = case.held_bytes();
    if held_bytes < capacity_bytes / 8 {
        return Err(format!("only {held_bytes} bytes are held of a cap of {capacity_bytes}"));
    }
    case.read_all()
}

/// Writes chunks of one size until a write meets the cap: returns how many were written before.
fn fill(case: &mut Case<'_, '_>, payload_bytes: u64) -> Result<u32, String> {
    let capacity_bytes = case.tier()?.stats().capacity_bytes;
    let most = capacity_bytes / record_bytes(payload_bytes) + 2;
    let used_up = |ended: &[Ended]| {
        ended.iter().any(|it| matches!(it, Ended::NotWritten { kind: ErrorKind::NoSpace, .. }))
    };
    for number in 0..u32::try_from(most).unwrap_or(u32::MAX) {
        let content = case.content(number, payload_bytes);
        case.submit_write(content)?;
        if used_up(&case.settle()?) || case.evictions > 0 {
            return Ok(number);
        }
    }
    Err(format!("{most} writes of {payload_bytes} bytes did not meet the cap of {capacity_bytes}"))
}

pub(super) fn refused_victims_stay(case: &mut Case<'_, '_>) -> Outcome {
    case.guard.refuse_all = true;
    let payload_bytes = case.payload_bytes_max()?;
    let number = fill(case, payload_bytes)?;
    if case.evictions > 0 {
        return Err("a refused chunk was evicted".into());
    }
    case.read_all()?;
    case.guard.refuse_all = false;
    // All but one stay leased: that one goes, and a write fits again.
    case.guard.refused = case
        .held_numbers()
        .into_iter()
        .filter(|&leased| leased != number / 2)
        .map(|leased| super::content::key(leased).digest())
        .collect();
    let content = case.content(number + 1, payload_bytes);
    case.submit_write(content)?;
    case.settle()?;
    if case.holds(number / 2).is_some() && case.holds(content.number).is_none() {
        return Ok(Verdict::Skip("the tier evicts coarser than one chunk".into()));
    }
    case.guard.refused.clear();
    case.write(number + 2, payload_bytes)?;
    case.read_all()
}

pub(super) fn a_chunk_being_read_is_not_evicted(case: &mut Case<'_, '_>) -> Outcome {
    let payload_bytes = case.payload_bytes_max()?;
    let number = fill(case, payload_bytes)?;
    let queue = case.tier()?.capabilities().queue_ops_max;
    let reads = u32::try_from(case.arena().free_slots() / 2).unwrap_or(1).min(queue / 2);
    for round in 0..4 {
        // Reads of what was written first, then writes that need room, all before a poll: the reads must find their
        // chunks (the model knows that they were readable) whole.
        let mut oldest = case.held_numbers();
        oldest.sort_unstable();
        for &read in oldest.iter().take(reads as usize) {
            case.submit_read(read, 0..u32::MAX)?;
        }
        for write in 0..reads {
            let content = case.content(number + 2 + round * reads + write, payload_bytes);
            case.submit_write(content)?;
        }
        case.settle()?;
    }
    case.read_all()
}
