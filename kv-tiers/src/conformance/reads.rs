//! Rules of reading, and of the queue.

use std::sync::Arc;

use kv_chunk::{BLOCK_BYTES, HEADER_BYTES, block_count};

use super::{Outcome, Verdict, case::Case, model::Ended};
use crate::{Arena, ArenaConfig, Op, RejectReason, Rejected, Slot};

/// More ops than this are not worth their memory.
const QUEUE_OPS_MAX: u32 = 4096;

pub(super) fn whole_and_pieces_agree(case: &mut Case<'_, '_>) -> Outcome {
    for (number, payload_bytes) in (0..).zip(case.sizes()?) {
        case.write(number, payload_bytes)?;
        let blocks = u32::try_from(block_count(payload_bytes)).expect("small");
        case.read(number, 0..u32::MAX)?;
        case.read(number, 0..blocks)?;
        for block in 0..blocks {
            case.read(number, block..block + 1)?;
            case.read(number, block..u32::MAX)?;
        }
    }
    case.read_all()
}

pub(super) fn no_blocks_read_the_header_alone(case: &mut Case<'_, '_>) -> Outcome {
    let max = case.payload_bytes_max()?;
    case.write(0, max.min(BLOCK_BYTES as u64 + 1))?;
    case.write(1, 0)?;
    for blocks in [0..0, 1..1, 2..2, 7..9, u32::MAX..u32::MAX] {
        case.read(0, blocks.clone())?;
        case.read(1, blocks)?;
    }
    Ok(Verdict::Holds)
}

pub(super) fn what_is_not_held_is_not_found(case: &mut Case<'_, '_>) -> Outcome {
    case.write(0, 1)?;
    for number in [7, 8] {
        case.submit_read(number, 0..1)?;
        let ended = case.settle()?;
        if ended != [Ended::Read { number, found: None }] {
            return Err(format!("a read of chunk {number}, never written, ended as {ended:?}"));
        }
    }
    Ok(Verdict::Holds)
}

pub(super) fn what_is_located_is_held(case: &mut Case<'_, '_>) -> Outcome {
    case.write(0, 4095)?;
    for (number, is_there) in [(0, true), (7, false), (0, true), (7, false)] {
        let located = case.locate(number)?;
        let held = case.tier()?.contains(super::content::key(number).digest());
        if located != held || located.is_some() != is_there {
            return Err(format!("chunk {number} is located as {located:?}, contains: {held:?}"));
        }
    }
    case.remove(0)?;
    match case.locate(0)? {
        None => Ok(Verdict::Holds),
        found => Err(format!("a removed chunk is located as {found:?}")),
    }
}

pub(super) fn many_reads_of_one_chunk_run_together(case: &mut Case<'_, '_>) -> Outcome {
    let max = case.payload_bytes_max()?;
    case.write(0, max)?;
    case.write(1, 4095)?;
    for block in (0..3).cycle().take(24) {
        case.submit_read(0, block..block + 1)?;
        case.submit_read(1, 0..1)?;
    }
    case.settle()?;
    Ok(Verdict::Holds)
}

pub(super) fn a_slot_too_small_is_rejected(case: &mut Case<'_, '_>) -> Outcome {
    let max = case.payload_bytes_max()?;
    if max <= HEADER_BYTES as u64 {
        return Ok(Verdict::Skip(format!("a payload has at most {max} bytes")));
    }
    case.write(0, max)?;
    let small = small_arena(1)?;
    let op = case.read_op(0, 0..1, take(&small)?);
    match case.try_submit(0, op)? {
        Err(Rejected { op: Op::Read(read), reason: RejectReason::TooLarge })
            if Arc::ptr_eq(read.slot.arena(), &small) =>
        {
            Ok(Verdict::Holds)
        }
        other => Err(format!("1 MiB read into a slot of 8 KiB: {other:?}")),
    }
}

pub(super) fn a_slot_of_another_arena_works(case: &mut Case<'_, '_>) -> Outcome {
    case.write(0, 4095)?;
    let other = small_arena(1)?;
    let op = case.read_op(0, 0..1, take(&other)?);
    case.submit(0, op)?;
    case.settle()?;
    if other.free_slots() != 1 {
        return Err("the slot did not come back".into());
    }
    Ok(Verdict::Holds)
}

pub(super) fn the_queue_is_bounded(case: &mut Case<'_, '_>) -> Outcome {
    let bound = case.tier()?.capabilities().queue_ops_max;
    if bound > QUEUE_OPS_MAX {
        return Ok(Verdict::Skip(format!("the queue takes {bound} ops")));
    }
    case.write(0, 4095)?;
    let arena = small_arena(bound as usize + 1)?;
    for round in 0..2 {
        for accepted in 0..bound {
            let op = case.read_op(0, 0..1, take(&arena)?);
            if let Err(Rejected { reason, .. }) = case.try_submit(0, op)? {
                return Err(format!("round {round}: {reason:?} after {accepted} ops of {bound}"));
            }
        }
        let op = case.read_op(0, 0..1, take(&arena)?);
        let id = op.id();
        match case.try_submit(0, op)? {
            Err(Rejected { op, reason: RejectReason::QueueFull }) if op.id() == id => {}
            other => return Err(format!("round {round}: op {bound} of {bound}: {other:?}")),
        }
        case.settle()?;
    }
    let seen = case.tier()?.stats().in_flight_max;
    if seen != bound {
        return Err(format!("in_flight_max says {seen}, {bound} ops were in flight"));
    }
    Ok(Verdict::Holds)
}

/// Slots that hold a header and one more page.
pub(super) fn small_arena(slots: usize) -> Result<Arc<Arena>, String> {
    Arena::new(ArenaConfig::new(2 * HEADER_BYTES, slots)).map_err(|error| error.to_string())
}

pub(super) fn take(arena: &Arc<Arena>) -> Result<Slot, String> {
    arena.try_take().ok_or_else(|| "the suite's own arena has no free slot".into())
}
