//! Rules of writing.

use super::{Outcome, Verdict, case::Case, model::Ended};
use crate::{ErrorKind, Op, RejectReason, Rejected};

/// Long enough, by the harness's clock, that a write which does not wait would have ended.
const HELD_NS: u64 = 50_000_000;
const HELD_POLLS: u32 = 50;

pub(super) fn a_write_shows_only_when_complete(case: &mut Case<'_, '_>) -> Outcome {
    for (number, payload_bytes) in (0..).zip(case.sizes()?) {
        let content = case.content(number, payload_bytes);
        case.submit_write(content)?;
        // Contains is compared with the model after every submit and poll. This read overtakes the write or not: it
        // finds nothing, or the right bytes.
        case.submit_read(number, 0..u32::MAX)?;
        case.settle()?;
        if case.holds(number) != Some(content) {
            return Err(format!("{content:?} was not written"));
        }
    }
    case.read_all()
}

pub(super) fn a_held_chunk_is_not_overwritten(case: &mut Case<'_, '_>) -> Outcome {
    let first = case.write(0, 4097)?;
    let second = case.content(0, 4097);
    case.submit_write(second)?;
    let expected = Ended::NotWritten { content: second, kind: ErrorKind::AlreadyHeld };
    let ended = case.settle()?;
    if ended != [expected] {
        return Err(format!("writing a held chunk ended as {ended:?}"));
    }
    let found = case.read(0, 0..1)?;
    if found != first {
        return Err(format!("{first:?} was held, {found:?} was read"));
    }
    Ok(Verdict::Holds)
}

pub(super) fn one_of_several_writes_wins(case: &mut Case<'_, '_>) -> Outcome {
    for payload_bytes in [4095, case.payload_bytes_max()?] {
        let number = u32::try_from(payload_bytes).expect("small");
        for _ in 0..3 {
            // Different contents of one chunk: any mixture of them fails verification.
            let content = case.content(number, payload_bytes);
            case.submit_write(content)?;
        }
        case.settle()?;
        let winner = case.holds(number).ok_or("no write of three succeeded")?;
        let found = case.read(number, 0..u32::MAX)?;
        if found != winner {
            return Err(format!("{winner:?} was written, {found:?} was read"));
        }
    }
    Ok(Verdict::Holds)
}

pub(super) fn held_writes_wait_and_reads_do_not(case: &mut Case<'_, '_>) -> Outcome {
    case.write(0, 4095)?;
    case.tier()?.hold_writes(true);
    let max = case.payload_bytes_max()?;
    let content = case.content(1, max);
    case.submit_write(content)?;
    case.submit_read(0, 0..1)?;
    let mut read = false;
    let until_ns = case.now_ns + HELD_NS;
    for polls in 0.. {
        if read && (case.now_ns >= until_ns || polls > HELD_POLLS) {
            break;
        }
        let (ended, next_ns) = case.poll()?;
        for ended in ended {
            match ended {
                Ended::Read { number: 0, found: Some(_) } => read = true,
                other => return Err(format!("while writes were held: {other:?}")),
            }
        }
        if !read && polls > 1_000_000 {
            return Err("a read waited for held writes".into());
        }
        case.pass_time(next_ns.or(read.then_some(until_ns)));
    }
    case.tier()?.hold_writes(false);
    case.settle()?;
    if case.holds(1) != Some(content) {
        return Err("the write did not go on when released".into());
    }
    Ok(Verdict::Holds)
}

pub(super) fn a_record_too_large_is_rejected(case: &mut Case<'_, '_>) -> Outcome {
    let capabilities = case.tier()?.capabilities();
    let too_large = capabilities.payload_bytes_max.saturating_add(1);
    let room = (case.arena().slot_bytes() - kv_chunk::HEADER_BYTES) as u64;
    if too_large > room {
        return Ok(Verdict::Skip(format!(
            "the tier takes payloads of {} bytes, a slot holds {room}",
            capabilities.payload_bytes_max
        )));
    }
    let content = case.content(0, too_large);
    let op = case.write_op(content)?;
    match case.try_submit(0, op)? {
        Err(Rejected { op: Op::Write(write), reason: RejectReason::TooLarge })
            if write.record.digest() == content.key().digest() => {}
        other => return Err(format!("a payload of {too_large} bytes: {other:?}")),
    }
    case.write(0, capabilities.payload_bytes_max)?;
    case.read(0, 0..u32::MAX)?;
    Ok(Verdict::Holds)
}
