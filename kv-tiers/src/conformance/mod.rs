//! One suite for every tier: each rule of the [`Tier`] contract as a named check.
//!
//! Every driver and wrapper of this crate runs it, and so can any outside implementer: give [`run`] a [`Harness`] that
//! opens the tier, an arena and a clock. It reads no clock itself, so a tier in virtual time runs it too. Besides the
//! rules, a model of what must be readable is compared with the tier after every single poll.
//!
//! ```
//! use kv_tiers::{Arena, ArenaConfig, MemoryConfig, MemoryTier, Tier, conformance};
//!
//! let arena = Arena::new(ArenaConfig::new(4 << 20, 8))?;
//! let mut open = |_| -> Result<Box<dyn Tier>, _> {
//!     Ok(Box::new(MemoryTier::new(MemoryConfig::new("host", 16 << 20))))
//! };
//! let mut clock = conformance::virtual_clock();
//! let report = conformance::run(&mut conformance::Harness::new(&mut open, arena, &mut clock))?;
//! assert!(report.passed.contains(&"whole_and_pieces_agree"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod case;
mod content;
mod lifecycle;
mod model;
mod random;
mod reads;
mod space;
mod writes;

use std::{fmt, sync::Arc};

use thiserror::Error;

use self::case::Case;
use crate::{Arena, Tier, TierError};

/// Largest capacity that the suite is willing to fill three times.
const CAPACITY_BYTES_MAX: u64 = 256 << 20;
/// Payloads up to two blocks and a bit need slots of this size.
const SLOT_BYTES_MIN: usize = 3 << 20;
const SLOTS_MIN: usize = 8;

/// How the suite opens the tier under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// An empty store, with the same settings each time.
    Fresh,
    /// The store that the tier before this one, now dropped, used. Asked for only if the tier says it is persistent.
    Reopen,
}

/// Opens a tier.
pub type OpenTier<'a> = dyn FnMut(Open) -> Result<Box<dyn Tier>, TierError> + 'a;

/// Lets time pass, at most until the given time (`None`: a moment), and says what time it is.
pub type Clock<'a> = dyn FnMut(Option<u64>) -> u64 + 'a;

/// What the suite needs.
///
/// The capacity should hold some 10 chunks of each of the sizes 0, 1, 4095, 1 MiB, 1 MiB + 1 and the largest (2 MiB + 5,
/// or what the tier takes), and be at most 256 MiB. A largest payload below a slot's room lets `TooLarge` be tested.
#[non_exhaustive]
pub struct Harness<'a> {
    /// Opens the tier.
    pub open: &'a mut OpenTier<'a>,
    /// At least 8 slots of at least 3 MiB, all free.
    pub arena: Arc<Arena>,
    /// Virtual or real time.
    pub clock: &'a mut Clock<'a>,
    /// Time, by that clock, after which a wait counts as a hang.
    pub wait_ns_max: u64,
}

impl<'a> Harness<'a> {
    /// Waits up to a minute.
    pub fn new(open: &'a mut OpenTier<'a>, arena: Arc<Arena>, clock: &'a mut Clock<'a>) -> Self {
        Self { open, arena, clock, wait_ns_max: 60_000_000_000 }
    }
}

impl fmt::Debug for Harness<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness").field("arena", &self.arena).finish_non_exhaustive()
    }
}

/// A clock of a tier that lives in virtual time: waiting costs nothing.
pub fn virtual_clock() -> impl FnMut(Option<u64>) -> u64 {
    let mut now_ns = 1_000_000;
    move |until| {
        now_ns = until.unwrap_or(now_ns + 1_000).max(now_ns);
        now_ns
    }
}

/// Which rules a tier kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Names of the rules that were checked and hold.
    pub passed: Vec<&'static str>,
    /// Names of the rules that this tier or harness cannot be asked about, and why.
    pub skipped: Vec<(&'static str, String)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rules hold", self.passed.len())?;
        self.skipped.iter().try_for_each(|(rule, why)| write!(f, "\nSKIP {rule}: {why}"))
    }
}

/// A rule that the tier broke.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the tier breaks the rule {rule}: {detail}")]
pub struct Broken {
    /// Its name.
    pub rule: &'static str,
    /// What happened.
    pub detail: String,
}

/// How one rule ended; an error says what was seen.
type Outcome = Result<Verdict, String>;

enum Verdict {
    Holds,
    Skip(String),
}

type Rule = fn(&mut Case<'_, '_>) -> Outcome;

/// Each line of the contract.
const RULES: &[(&str, Rule)] = &[
    ("whole_and_pieces_agree", reads::whole_and_pieces_agree),
    ("no_blocks_read_the_header_alone", reads::no_blocks_read_the_header_alone),
    ("what_is_not_held_is_not_found", reads::what_is_not_held_is_not_found),
    ("many_reads_of_one_chunk_run_together", reads::many_reads_of_one_chunk_run_together),
    ("a_slot_too_small_is_rejected", reads::a_slot_too_small_is_rejected),
    ("a_slot_of_another_arena_works", reads::a_slot_of_another_arena_works),
    ("the_queue_is_bounded", reads::the_queue_is_bounded),
    ("a_write_shows_only_when_complete", writes::a_write_shows_only_when_complete),
    ("a_held_chunk_is_not_overwritten", writes::a_held_chunk_is_not_overwritten),
    ("one_of_several_writes_wins", writes::one_of_several_writes_wins),
    ("held_writes_wait_and_reads_do_not", writes::held_writes_wait_and_reads_do_not),
    ("a_record_too_large_is_rejected", writes::a_record_too_large_is_rejected),
    ("a_removed_chunk_is_gone_at_once", space::a_removed_chunk_is_gone_at_once),
    ("a_removed_chunk_is_read_whole_or_not", space::a_removed_chunk_is_read_whole_or_not),
    ("what_is_located_is_held", reads::what_is_located_is_held),
    ("the_cap_holds_under_many_writes", space::the_cap_holds_under_many_writes),
    ("refused_victims_stay", space::refused_victims_stay),
    ("a_chunk_being_read_is_not_evicted", space::a_chunk_being_read_is_not_evicted),
    ("random_operations_follow_the_model", random::random_operations_follow_the_model),
    ("stats_count_what_happened", lifecycle::stats_count_what_happened),
    ("an_idle_tier_asks_for_nothing", lifecycle::an_idle_tier_asks_for_nothing),
    ("wake_fd_wakes", lifecycle::wake_fd_wakes),
    ("a_closed_tier_takes_nothing_and_finishes", lifecycle::a_closed_tier_takes_nothing),
    ("dropping_a_busy_tier_returns_the_slots", lifecycle::dropping_a_busy_tier),
    ("a_restart_finds_every_chunk", lifecycle::a_restart_finds_every_chunk),
    ("what_a_restart_found_counts_and_leaves", lifecycle::what_a_restart_found_counts),
];

/// Checks every rule; the first broken one ends it.
pub fn run(harness: &mut Harness<'_>) -> Result<Report, Broken> {
    let mut report = Report::default();
    for &(rule, check) in RULES {
        match run_rule(harness, check) {
            Ok(Verdict::Holds) => report.passed.push(rule),
            Ok(Verdict::Skip(why)) => report.skipped.push((rule, why)),
            Err(detail) => return Err(Broken { rule, detail }),
        }
    }
    Ok(report)
}

fn run_rule(harness: &mut Harness<'_>, check: Rule) -> Outcome {
    let arena = Arc::clone(&harness.arena);
    if arena.slot_bytes() < SLOT_BYTES_MIN || arena.free_slots() < SLOTS_MIN {
        return Err(format!(
            "the harness must give {SLOTS_MIN} free slots of {SLOT_BYTES_MIN} bytes"
        ));
    }
    let free_before = arena.free_slots();
    let leaked_before = arena.stats().leaked_slots;
    let mut case = Case::open(harness)?;
    let capacity_bytes = case.tier()?.stats().capacity_bytes;
    if capacity_bytes > CAPACITY_BYTES_MAX {
        return Err(format!(
            "the harness must give at most {CAPACITY_BYTES_MAX} bytes of capacity"
        ));
    }
    let verdict = check(&mut case)?;
    case.finish()?;
    drop(case);
    let (free, leaked) = (arena.free_slots(), arena.stats().leaked_slots - leaked_before);
    if free != free_before || leaked != 0 {
        return Err(format!(
            "{free_before} slots were free before and {free} after, {leaked} leaked"
        ));
    }
    Ok(verdict)
}
