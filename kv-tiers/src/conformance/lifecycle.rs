//! Rules of statistics, waking, closing and restarting.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    Outcome, Verdict,
    case::Case,
    model::Ended,
    reads::{small_arena, take},
};
use crate::{ErrorKind, RejectReason, Rejected, record_bytes};

/// How long a wake-up may take, in real time.
const WAKE_MS_MAX: u16 = 10_000;
const IDLE_POLLS_MAX: u32 = 10_000;

pub(super) fn stats_count_what_happened(case: &mut Case<'_, '_>) -> Outcome {
    let before = case.tier()?.stats();
    let sizes = case.sizes()?;
    for (number, &payload_bytes) in (0..).zip(&sizes) {
        case.write(number, payload_bytes)?;
        case.read(number, 0..u32::MAX)?;
    }
    let again = case.content(0, 1);
    case.submit_write(again)?;
    case.submit_read(1000, 0..1)?;
    case.settle()?;
    let stats = case.tier()?.stats();
    let payload_bytes = sizes.iter().sum::<u64>();
    let chunks = sizes.len() as u64;
    let error = |kind| stats.errors.iter().find(|error| error.0 == kind).map_or(0, |error| error.1);
    let counts = [
        ("writes", stats.writes - before.writes, chunks),
        ("write_bytes", stats.write_bytes - before.write_bytes, payload_bytes),
        ("reads", stats.reads - before.reads, chunks),
        ("read_bytes", stats.read_bytes - before.read_bytes, payload_bytes),
        ("AlreadyHeld errors", error(ErrorKind::AlreadyHeld), 1),
        ("NotFound errors", error(ErrorKind::NotFound), 1),
        ("recovered_chunks", stats.recovered_chunks, 0),
    ];
    for (name, counted, happened) in counts {
        if counted != happened && case.evictions == 0 {
            return Err(format!("stats count {counted} {name}, there were {happened}"));
        }
    }
    if stats.used_bytes < case.held_bytes() {
        let (used, held) = (stats.used_bytes, case.held_bytes());
        return Err(format!("{used} bytes are said to be used, readable records have {held}"));
    }
    Ok(Verdict::Holds)
}

pub(super) fn an_idle_tier_asks_for_nothing(case: &mut Case<'_, '_>) -> Outcome {
    case.write(0, 1)?;
    for _ in 0..IDLE_POLLS_MAX {
        match case.poll()? {
            (_, None) => return Ok(Verdict::Holds),
            (_, next_ns) => case.pass_time(next_ns),
        }
    }
    Err(format!("after {IDLE_POLLS_MAX} polls it still asks to be called"))
}

pub(super) fn wake_fd_wakes(case: &mut Case<'_, '_>) -> Outcome {
    if case.tier()?.wake_fd().is_none() {
        return Ok(Verdict::Skip("the tier has no wake_fd: only time brings completions".into()));
    }
    let max = case.payload_bytes_max()?;
    case.write(0, max)?;
    case.submit_read(0, 0..u32::MAX)?;
    let content = case.content(1, max);
    case.submit_write(content)?;
    let mut left = 2;
    while left > 0 {
        let (ended, next_ns) = case.poll()?;
        left -= ended.len();
        let now_ns = case.now_ns;
        if ended.is_empty() && !readable(case, wait_ms(now_ns, next_ns))? && next_ns.is_none() {
            return Err("wake_fd stayed silent although ops were in flight".into());
        }
        case.pass_time(Some(now_ns));
    }
    // Level-triggered: silent again once poll has nothing left to do.
    for _ in 0..IDLE_POLLS_MAX {
        case.poll()?;
        if !readable(case, 0)? {
            return Ok(Verdict::Holds);
        }
    }
    Err("wake_fd stays readable although nothing is in flight".into())
}

fn wait_ms(now_ns: u64, next_ns: Option<u64>) -> u16 {
    let wait_ms =
        next_ns.map_or(u64::MAX, |next_ns| next_ns.saturating_sub(now_ns) / 1_000_000 + 1);
    u16::try_from(wait_ms).unwrap_or(u16::MAX).min(WAKE_MS_MAX)
}

fn readable(case: &mut Case<'_, '_>, timeout_ms: u16) -> Result<bool, String> {
    let fd = case.tier()?.wake_fd().ok_or("wake_fd disappeared")?;
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::from(timeout_ms))
        .map(|ready| ready > 0)
        .map_err(|errno| format!("poll of wake_fd: {errno}"))
}

pub(super) fn a_closed_tier_takes_nothing(case: &mut Case<'_, '_>) -> Outcome {
    let max = case.payload_bytes_max()?;
    case.write(0, max)?;
    case.submit_read(0, 0..u32::MAX)?;
    let content = case.content(1, max);
    case.submit_write(content)?;
    case.tier()?.close();
    let arena = small_arena(1)?;
    let read = case.read_op(0, 0..0, take(&arena)?);
    let id = read.id();
    match case.try_submit(0, read)? {
        Err(Rejected { op, reason: RejectReason::Closed }) if op.id() == id => {}
        other => return Err(format!("a read after close: {other:?}")),
    }
    let ended = case.settle()?;
    if !ended.contains(&Ended::Written { content }) || ended.len() != 2 {
        return Err(format!("what was in flight at close ended as {ended:?}"));
    }
    case.tier()?.close();
    Ok(Verdict::Holds)
}

pub(super) fn dropping_a_busy_tier(case: &mut Case<'_, '_>) -> Outcome {
    let max = case.payload_bytes_max()?;
    case.write(0, max)?;
    case.submit_read(0, 0..u32::MAX)?;
    let content = case.content(1, max);
    case.submit_write(content)?;
    case.poll()?;
    // That all slots are free again is compared after every rule.
    case.drop_tier();
    Ok(Verdict::Holds)
}

pub(super) fn a_restart_finds_every_chunk(case: &mut Case<'_, '_>) -> Outcome {
    if !case.tier()?.capabilities().persistent {
        return Ok(Verdict::Skip("the tier is not persistent".into()));
    }
    let sizes = case.sizes()?;
    for (number, &payload_bytes) in (0..).zip(&sizes) {
        case.write(number, payload_bytes)?;
    }
    // Removed, and removed and written again: the old bytes must not come back.
    case.remove(1)?;
    case.remove(2)?;
    case.write(2, sizes[2])?;
    for round in 0..2 {
        case.reopen()?;
        case.poll()?;
        if let Some(found) = case.locate(1)? {
            return Err(format!("restart {round}: chunk 1, removed, is back: {found:?}"));
        }
        case.compare_list().map_err(|detail| format!("restart {round}: {detail}"))?;
        let stats = case.tier()?.stats();
        if stats.recovered_chunks != stats.chunks || stats.used_bytes < case.held_bytes() {
            let held_bytes = case.held_bytes();
            return Err(format!("{held_bytes} bytes of records were found, stats say {stats:?}"));
        }
        case.read_all()?;
    }
    Ok(Verdict::Holds)
}

pub(super) fn what_a_restart_found_counts(case: &mut Case<'_, '_>) -> Outcome {
    let capabilities = case.tier()?.capabilities();
    if !capabilities.persistent {
        return Ok(Verdict::Skip("the tier is not persistent".into()));
    }
    let payload_bytes = case.payload_bytes_max()?;
    let capacity_bytes = case.tier()?.stats().capacity_bytes;
    let most = u32::try_from(capacity_bytes / record_bytes(payload_bytes)).unwrap_or(u32::MAX);
    for number in 0..most {
        let content = case.content(number, payload_bytes);
        case.submit_write(content)?;
    }
    case.settle()?;
    case.reopen()?;
    // The cap is compared with the use after every poll: what was found must count, and can be evicted.
    for number in most..most + most / 2 + 2 {
        let content = case.content(number, payload_bytes);
        case.submit_write(content)?;
    }
    case.settle()?;
    if case.evictions == 0 {
        return Err("after the restart half the cap more was written without an eviction".into());
    }
    case.read_all()
}
