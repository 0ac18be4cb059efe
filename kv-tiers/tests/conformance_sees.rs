//! The conformance suite sees each way of breaking the contract, and names the rule.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

use std::os::fd::BorrowedFd;

use kv_chunk::Digest;
use kv_tiers::{
    Arena, ArenaConfig, Capabilities, Completion, CrashImage, Crashing, EvictionGuard, FaultKind,
    FaultPlan, Faulty, FlushPolicy, Held, ListCursor, Located, MemoryConfig, MemoryTier, Op,
    Rejected, Tier, TierError, TierStats, Unguarded, When,
    conformance::{self, Broken, Harness, Open, OpenTier},
};

/// A way of breaking the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Break {
    LosesACompletion,
    CompletesAWriteTwice,
    ShowsAWriteAtSubmit,
    OverwritesAHeldChunk,
    LetsTwoWritesWin,
    ReadsFromTheFirstBlock,
    EvictsWithoutAsking,
    EvictsInSilence,
    ExceedsItsCap,
    IgnoresTheHold,
    AcceptsMoreThanItSays,
    AcceptsLargerThanItSays,
    StaysOpen,
    KeepsWhatIsRemoved,
    LocatesNothing,
    LocatesForEver,
    ListsInPart,
    PagesOneTwice,
    CountsReadsTwice,
    ForgetsItsErrors,
    NeverRests,
    LeaksASlot,
}

#[derive(Debug)]
struct Mutant {
    inner: MemoryTier,
    way: Break,
    early: Vec<(Digest, Held)>,
    leaked: bool,
}

fn config() -> MemoryConfig {
    let mut config = MemoryConfig::new("host", 32 << 20);
    config.payload_bytes_max = (2 << 20) + 5;
    config.queue_ops_max = 6;
    config
}

impl Mutant {
    fn new(way: Break) -> Self {
        let mut config = config();
        match way {
            Break::AcceptsMoreThanItSays => config.queue_ops_max += 1,
            Break::AcceptsLargerThanItSays => config.payload_bytes_max += 1,
            Break::ExceedsItsCap => config.capacity_bytes *= 2,
            _ => {}
        }
        let inner = MemoryTier::new(config);
        Self { inner, way, early: Vec::new(), leaked: false }
    }

    fn change(&mut self, completion: Completion, completions: &mut Vec<Completion>) {
        match (self.way, completion) {
            (Break::LosesACompletion, Completion::Read { .. })
            | (Break::EvictsInSilence, Completion::Evicted { .. }) => {}
            (Break::CompletesAWriteTwice, Completion::Write { id, digest, result: Ok(()) }) => {
                completions.push(Completion::Write { id, digest, result: Ok(()) });
                completions.push(Completion::Write { id, digest, result: Ok(()) });
            }
            (
                Break::LetsTwoWritesWin,
                Completion::Write { id, digest, result: Err(TierError::AlreadyHeld { .. }) },
            ) => completions.push(Completion::Write { id, digest, result: Ok(()) }),
            (
                Break::ReadsFromTheFirstBlock,
                Completion::Read { id, digest, slot, result: Ok(mut done) },
            ) => {
                done.first_block = 0;
                completions.push(Completion::Read { id, digest, slot, result: Ok(done) });
            }
            (Break::LeaksASlot, Completion::Read { id, digest, slot, result }) => {
                if !std::mem::replace(&mut self.leaked, true) {
                    slot.arena().try_take().unwrap().leak();
                }
                completions.push(Completion::Read { id, digest, slot, result });
            }
            (_, completion) => completions.push(completion),
        }
    }
}

impl Tier for Mutant {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(config().payload_bytes_max, config().queue_ops_max)
    }

    fn submit(&mut self, op: Op, now_ns: u64) -> Result<(), Rejected> {
        if let Op::Write(write) = &op {
            let (digest, header) = (write.record.digest(), write.record.header());
            let held = Held { payload_bytes: header.payload_bytes(), write_id: header.write_id() };
            match self.way {
                Break::ShowsAWriteAtSubmit => self.early.push((digest, held)),
                Break::OverwritesAHeldChunk => {
                    self.inner.remove(digest, now_ns);
                }
                _ => {}
            }
        }
        self.inner.submit(op, now_ns)
    }

    fn poll(
        &mut self,
        now_ns: u64,
        guard: &dyn EvictionGuard,
        completions: &mut Vec<Completion>,
    ) -> Option<u64> {
        let mut inner = Vec::new();
        self.early.clear();
        let unguarded = self.way == Break::EvictsWithoutAsking;
        self.inner.poll(now_ns, if unguarded { &Unguarded } else { guard }, &mut inner);
        for completion in inner {
            self.change(completion, completions);
        }
        (self.way == Break::NeverRests).then_some(now_ns)
    }

    fn hold_writes(&mut self, hold: bool) {
        self.inner.hold_writes(hold && self.way != Break::IgnoresTheHold);
    }

    fn contains(&self, digest: Digest) -> Option<Held> {
        let early = self.early.iter().find(|(early, _)| *early == digest).map(|(_, held)| *held);
        self.inner.contains(digest).or(early)
    }

    fn locate(&mut self, digest: Digest, now_ns: u64) -> Located {
        match self.way {
            Break::LocatesNothing => Located::Absent,
            Break::LocatesForEver => Located::Asked,
            _ => self.inner.locate(digest, now_ns),
        }
    }

    fn remove(&mut self, digest: Digest, now_ns: u64) -> bool {
        if self.way == Break::KeepsWhatIsRemoved {
            return self.inner.contains(digest).is_some();
        }
        self.inner.remove(digest, now_ns)
    }

    fn list(&self, visit: &mut dyn FnMut(Digest, Held)) {
        let mut skip = usize::from(self.way == Break::ListsInPart);
        self.inner.list(&mut |digest, held| {
            if skip == 0 {
                visit(digest, held);
            }
            skip = skip.saturating_sub(1);
        });
    }

    fn list_from(
        &self,
        from: ListCursor,
        max: usize,
        visit: &mut dyn FnMut(Digest, Held),
    ) -> Option<ListCursor> {
        let next = self.inner.list_from(from, max, visit)?;
        let back = u128::from(self.way == Break::PagesOneTwice);
        Some(ListCursor(next.0 - back))
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn stats(&self) -> TierStats {
        let mut stats = self.inner.stats();
        stats.capacity_bytes = config().capacity_bytes;
        match self.way {
            Break::CountsReadsTwice => stats.reads *= 2,
            Break::ForgetsItsErrors => stats.errors.clear(),
            _ => {}
        }
        stats
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn close(&mut self) {
        if self.way != Break::StaysOpen {
            self.inner.close();
        }
    }
}

fn run(open: &mut OpenTier<'_>) -> Result<conformance::Report, Broken> {
    let arena = Arena::new(ArenaConfig::new(3 << 20, 8)).unwrap();
    conformance::run(&mut Harness::new(open, arena, &mut conformance::virtual_clock()))
}

#[track_caller]
fn assert_sees(open: &mut OpenTier<'_>, rule: &str, detail: &str) {
    let broken = run(open).unwrap_err();
    assert!(broken.rule == rule && broken.detail.contains(detail), "{broken}");
}

#[test]
fn each_broken_rule_is_seen_and_named() {
    for (way, rule, detail) in [
        (Break::LosesACompletion, "whole_and_pieces_agree", "in_flight says"),
        (Break::CompletesAWriteTwice, "whole_and_pieces_agree", "which is None"),
        (Break::ShowsAWriteAtSubmit, "whole_and_pieces_agree", "not complete"),
        (Break::OverwritesAHeldChunk, "a_held_chunk_is_not_overwritten", "is readable, but"),
        (Break::LetsTwoWritesWin, "a_held_chunk_is_not_overwritten", "was written over"),
        (Break::ReadsFromTheFirstBlock, "whole_and_pieces_agree", "failed verification"),
        (Break::EvictsWithoutAsking, "the_cap_holds_under_many_writes", "without being confirmed"),
        (Break::EvictsInSilence, "the_cap_holds_under_many_writes", "not evicted"),
        (Break::ExceedsItsCap, "the_cap_holds_under_many_writes", "bytes are used, the cap is"),
        (Break::IgnoresTheHold, "held_writes_wait_and_reads_do_not", "while writes were held"),
        (Break::AcceptsMoreThanItSays, "the_queue_is_bounded", "op 6 of 6"),
        (Break::AcceptsLargerThanItSays, "a_record_too_large_is_rejected", "Ok(())"),
        (Break::StaysOpen, "a_closed_tier_takes_nothing_and_finishes", "after close"),
        (Break::KeepsWhatIsRemoved, "a_removed_chunk_is_gone_at_once", "not complete"),
        (Break::LocatesNothing, "what_is_located_is_held", "is located as None"),
        (Break::LocatesForEver, "what_is_located_is_held", "is never answered"),
        (Break::ListsInPart, "whole_and_pieces_agree", "list shows"),
        (Break::PagesOneTwice, "whole_and_pieces_agree", "list_from shows"),
        (Break::CountsReadsTwice, "stats_count_what_happened", "reads"),
        (Break::ForgetsItsErrors, "stats_count_what_happened", "errors"),
        (Break::NeverRests, "an_idle_tier_asks_for_nothing", "still asks"),
        (Break::LeaksASlot, "whole_and_pieces_agree", "1 leaked"),
    ] {
        let mut open =
            |_: Open| -> Result<Box<dyn Tier>, TierError> { Ok(Box::new(Mutant::new(way))) };
        let broken = run(&mut open).expect_err(&format!("{way:?} was not seen"));
        assert!(broken.rule == rule && broken.detail.contains(detail), "{way:?}: {broken}");
    }
}

#[test]
fn every_kind_of_fault_is_seen() {
    for kind in [
        FaultKind::ReadFails,
        FaultKind::ReadStopsShort,
        FaultKind::ReadIsTruncated,
        FaultKind::ReadFlipsBit,
        FaultKind::ReadFindsItDeleted,
        FaultKind::WriteFails,
        FaultKind::WriteTears,
        FaultKind::WriteTearsUnseen,
        FaultKind::WriteFlipsBit,
        FaultKind::Vanishes,
        FaultKind::Stalls { ns: u64::MAX },
    ] {
        let mut open = |_: Open| -> Result<Box<dyn Tier>, TierError> {
            let plan = FaultPlan::default().with(kind, When::Nth(3));
            Ok(Box::new(Faulty::new(Box::new(MemoryTier::new(config())), plan)))
        };
        let broken = run(&mut open).expect_err(&format!("{kind:?} was not seen"));
        assert_eq!(broken.rule, "whole_and_pieces_agree", "{kind:?}: {broken}");
    }
}

#[test]
fn a_store_that_forgets_over_a_restart_is_seen() {
    let mut open = |_: Open| -> Result<Box<dyn Tier>, TierError> {
        Ok(Box::new(Crashing::open(CrashImage::new(4096), config(), FlushPolicy::Never)))
    };
    assert_sees(&mut open, "a_restart_finds_every_chunk", "contains says None");
}

#[test]
fn a_store_that_brings_removed_chunks_back_is_seen() {
    // It reopens the state before the last writes: what was removed since is there again.
    let mut image = CrashImage::new(4096);
    let mut open = |open: Open| -> Result<Box<dyn Tier>, TierError> {
        image = match open {
            Open::Fresh => CrashImage::new(4096),
            Open::Reopen => image.crash(kv_tiers::Crash::Power { seed: 1 }),
        };
        Ok(Box::new(Crashing::open(image.clone(), config(), FlushPolicy::Never)))
    };
    assert_sees(&mut open, "a_restart_finds_every_chunk", "");
}
