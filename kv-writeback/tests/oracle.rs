//! Random operations against a sequential oracle that knows the rules and not the code.
//!
//! The oracle does not predict which replica back-pressure gives up; it learns it from what happens and checks that
//! the rule allowed it, and that in the end every replica of every accepted chunk is accounted for exactly once.

mod common;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use common::{key, payload};
use kv_chunk::WriteId;
use kv_tiers::{Arena, ArenaConfig, Record};
use kv_writeback::{
    HeldOpen, Next, Refused, Staged, Writeback, WritebackConfig, WritebackStats, Written,
};
use proptest::prelude::*;

const TIERS: u8 = 3;
const CHUNKS: u32 = 10;
const MAX_AGE_NS: u64 = 50;
const SPARE_SLOTS: usize = 64;

#[derive(Clone, Debug)]
enum Operation {
    Stage { chunk: u32, wanted: u8 },
    Next { tier: u8 },
    Finish { nth: usize, outcome: Written },
    FinishAgain { tier: u8, chunk: u32 },
    Requeue { nth: usize },
    ReadStarted,
    ReadFinished,
    ForwardBegan,
    ForwardEnded,
    BeginFlush,
    EndFlush,
    StopWrites { tier: u8 },
    TierGone { tier: u8 },
    TierBack { tier: u8 },
    Advance { ns: u64 },
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let outcome = prop_oneof![
        6 => Just(Written::Done), 1 => Just(Written::AlreadyHeld), 2 => Just(Written::Failed), 1 => Just(Written::Dropped)
    ];
    let tier = || 0..TIERS;
    prop_oneof![
        10 => (0..CHUNKS, 0..16_u8).prop_map(|(chunk, wanted)| Stage { chunk, wanted }),
        10 => tier().prop_map(|tier| Next { tier }),
        8 => (any::<usize>(), outcome).prop_map(|(nth, outcome)| Finish { nth, outcome }),
        1 => (tier(), 0..CHUNKS).prop_map(|(tier, chunk)| FinishAgain { tier, chunk }),
        1 => any::<usize>().prop_map(|nth| Requeue { nth }),
        2 => Just(ReadStarted),
        2 => Just(ReadFinished),
        1 => Just(ForwardBegan),
        1 => Just(ForwardEnded),
        1 => Just(BeginFlush),
        1 => Just(EndFlush),
        1 => tier().prop_map(|tier| StopWrites { tier }),
        1 => tier().prop_map(|tier| TierGone { tier }),
        2 => tier().prop_map(|tier| TierBack { tier }),
        4 => (0..MAX_AGE_NS).prop_map(|ns| Advance { ns }),
    ]
}

/// What the oracle knows of one replica.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Replica {
    Queued,
    Writing,
    Held,
    Ended,
}

#[derive(Debug)]
struct Chunk {
    write_id: u128,
    staged_ns: u64,
    replicas: BTreeMap<u8, Replica>,
}

impl Chunk {
    fn has(&self, replica: Replica) -> bool {
        self.replicas.values().any(|known| *known == replica)
    }

    fn home_besides(&self, tier: u8) -> bool {
        self.replicas.iter().any(|(other, known)| *other != tier && *known != Replica::Ended)
    }
}

#[derive(Default)]
struct Totals {
    wanted: u64,
    held: u64,
    failed: u64,
    given_up: u64,
    withdrawn: u64,
    lost: u64,
}

/// A write that was handed out.
struct Job {
    tier: u8,
    chunk: u32,
    write_id: u128,
    record: Arc<Record>,
}

struct Oracle<'a> {
    writeback: &'a Writeback,
    arena: Arc<Arena>,
    config: WritebackConfig,
    now_ns: u64,
    chunks: BTreeMap<u32, Chunk>,
    queues: Vec<VecDeque<u32>>,
    accepts: Vec<bool>,
    jobs: Vec<Job>,
    reads: usize,
    hooks_used: bool,
    forward_runs: bool,
    holds: Vec<HeldOpen<'a>>,
    write_ids: u128,
    totals: Totals,
}

impl<'a> Oracle<'a> {
    fn new(writeback: &'a Writeback, arena: Arc<Arena>, config: WritebackConfig) -> Self {
        Self {
            writeback,
            arena,
            config,
            now_ns: 1_000,
            chunks: BTreeMap::new(),
            queues: vec![VecDeque::new(); usize::from(TIERS)],
            accepts: vec![true; usize::from(TIERS)],
            jobs: Vec::new(),
            reads: 0,
            hooks_used: false,
            forward_runs: false,
            holds: Vec::new(),
            write_ids: 0,
            totals: Totals::default(),
        }
    }

    fn apply(&mut self, operation: Operation) {
        let gate = self.writeback.gate();
        match operation {
            Operation::Stage { chunk, wanted } => self.stage(chunk, wanted),
            Operation::Next { tier } => self.next(tier),
            Operation::Finish { nth, outcome } => self.finish(nth, outcome),
            Operation::FinishAgain { tier, chunk } => self.finish_again(tier, chunk),
            Operation::Requeue { nth } => self.requeue(nth),
            Operation::ReadStarted => {
                gate.read_started();
                self.reads += 1;
            }
            Operation::ReadFinished => {
                gate.read_finished();
                self.reads = self.reads.saturating_sub(1);
            }
            Operation::ForwardBegan => {
                gate.forward_began();
                (self.hooks_used, self.forward_runs) = (true, true);
            }
            Operation::ForwardEnded => {
                gate.forward_ended();
                (self.hooks_used, self.forward_runs) = (true, false);
            }
            Operation::BeginFlush => self.holds.push(self.writeback.begin_flush()),
            Operation::EndFlush => drop(self.holds.pop()),
            Operation::StopWrites { tier } => {
                self.writeback.stop_writes(tier);
                self.withdraw(tier, &[Replica::Queued]);
            }
            Operation::TierGone { tier } => {
                self.writeback.tier_gone(tier);
                self.withdraw(tier, &[Replica::Queued, Replica::Writing]);
                for chunk in self.chunks.values_mut() {
                    chunk.replicas.entry(tier).and_modify(|known| *known = Replica::Ended);
                }
            }
            Operation::TierBack { tier } => {
                self.writeback.tier_back(tier);
                self.accepts[usize::from(tier)] = true;
            }
            Operation::Advance { ns } => self.now_ns += ns,
        }
        self.settle_departed();
        self.check();
    }

    fn stage(&mut self, chunk: u32, wanted: u8) {
        self.write_ids += 1;
        let write_id = self.write_ids;
        let (bytes, id) = (payload(chunk, write_id), WriteId::new(write_id));
        let before = self.writeback.stats();
        let accepting = (0..TIERS).filter(|tier| self.accepts[usize::from(*tier)]);
        let accepting = accepting.filter(|tier| wanted & (1 << tier) != 0).collect::<Vec<_>>();
        let full = |tier: &u8| backlog(&before, *tier) == self.config.queue_chunks_max;
        match self.writeback.stage(&key(chunk), &bytes, id, wanted, self.now_ns) {
            Ok(Staged::AlreadyStaged) => assert!(self.chunks.contains_key(&chunk)),
            Ok(Staged::Accepted { replicas }) => {
                // The newcomer may have pushed one out; one that was staged under its own key never.
                self.settle_departed();
                assert!(!self.chunks.contains_key(&chunk), "staged twice");
                self.accept(chunk, write_id, &accepting, replicas);
            }
            Err(Refused::NoTier) => assert!(accepting.is_empty()),
            Err(Refused::StagingFull) => {
                assert_eq!(before.pending, self.config.staged_chunks_max);
                let can_go = |it: &Chunk| it.has(Replica::Held) && !it.has(Replica::Writing);
                assert!(!self.chunks.values().any(can_go), "refused before a second replica went");
                assert_eq!(before.replicas_given_up, self.writeback.stats().replicas_given_up);
            }
            Err(Refused::QueueFull) => {
                assert!(accepting.iter().all(full));
                assert_eq!(before.replicas_given_up, self.writeback.stats().replicas_given_up);
            }
            Err(other) => panic!("{other}: there are slots enough"),
        }
    }

    fn accept(&mut self, chunk: u32, write_id: u128, accepting: &[u8], replicas: u8) {
        assert_ne!(replicas, 0);
        self.totals.wanted += accepting.len() as u64;
        let mut known = BTreeMap::new();
        for tier in 0..TIERS {
            if replicas & (1 << tier) != 0 {
                assert!(accepting.contains(&tier), "queued for a tier that was not wanted");
                known.insert(tier, Replica::Queued);
                self.queues[usize::from(tier)].push_back(chunk);
            } else if accepting.contains(&tier) {
                self.totals.given_up += 1;
            }
        }
        let staged_ns = self.now_ns;
        self.chunks.insert(chunk, Chunk { write_id, staged_ns, replicas: known });
    }

    fn gate_is_open(&self, staged_ns: u64) -> bool {
        let calm = self.reads == 0 && (!self.hooks_used || self.forward_runs);
        !self.holds.is_empty() || self.now_ns >= staged_ns + MAX_AGE_NS || calm
    }

    fn next(&mut self, tier: u8) {
        match self.writeback.next(tier, self.now_ns) {
            Next::Write(record) => self.handed_out(tier, record),
            Next::Wait { until_ns } => {
                assert!(until_ns > self.now_ns, "told to ask again at once");
                let staged_ns = until_ns - MAX_AGE_NS;
                assert!(!self.gate_is_open(staged_ns), "the gate is open");
                let head = |it: &u32| self.chunks[it].staged_ns == staged_ns;
                assert!(self.queues[usize::from(tier)].iter().any(head), "waits for nothing");
            }
            Next::Idle => {
                while let Some(chunk) = self.queues[usize::from(tier)].pop_front() {
                    self.give_up(tier, chunk);
                }
            }
        }
    }

    fn handed_out(&mut self, tier: u8, record: Arc<Record>) {
        let write_id = record.header().write_id().get();
        let chunk = (0..CHUNKS).find(|it| key(*it).digest() == record.digest()).expect("known");
        // Those before it in the queue were given up.
        loop {
            let head =
                self.queues[usize::from(tier)].pop_front().expect("handed out twice, or unasked");
            if head == chunk {
                break;
            }
            self.give_up(tier, head);
        }
        let known = self.chunks.get_mut(&chunk).expect("handed out after it left");
        assert_eq!(known.write_id, write_id);
        assert_eq!(known.replicas.insert(tier, Replica::Writing), Some(Replica::Queued));
        let staged_ns = known.staged_ns;
        assert!(self.gate_is_open(staged_ns), "handed out behind a closed gate");
        assert_eq!(record.payload(), payload(chunk, write_id));
        self.jobs.push(Job { tier, chunk, write_id, record });
    }

    /// Back-pressure took this replica at some time: its chunk must have had another home.
    fn give_up(&mut self, tier: u8, chunk: u32) {
        let known = self.chunks.get_mut(&chunk).expect("it is in the queue");
        assert!(known.home_besides(tier), "an only replica was given up");
        assert_eq!(known.replicas.insert(tier, Replica::Ended), Some(Replica::Queued));
        self.totals.given_up += 1;
    }

    fn finish(&mut self, nth: usize, outcome: Written) {
        if self.jobs.is_empty() {
            return;
        }
        let job = self.jobs.swap_remove(nth % self.jobs.len());
        let (digest, id) = (key(job.chunk).digest(), WriteId::new(job.write_id));
        let finished = self.writeback.finish(job.tier, digest, id, outcome);
        let known = self.chunks.get_mut(&job.chunk).filter(|it| it.write_id == job.write_id);
        let Some(known) = known.filter(|it| it.replicas[&job.tier] == Replica::Writing) else {
            assert!(!finished.last && finished.replicas == 0, "a late finish changed something");
            return;
        };
        let (replica, total) = match outcome {
            Written::Done | Written::AlreadyHeld => (Replica::Held, &mut self.totals.held),
            Written::Failed => (Replica::Ended, &mut self.totals.failed),
            Written::Dropped => (Replica::Ended, &mut self.totals.withdrawn),
        };
        *total += 1;
        known.replicas.insert(job.tier, replica);
        let held = known.replicas.iter().filter(|(_, it)| **it == Replica::Held);
        assert_eq!(finished.replicas, held.map(|(tier, _)| 1 << tier).sum::<u8>());
        assert_eq!(finished.last, self.writeback.get(&key(job.chunk)).is_none());
        assert_eq!(job.record.payload(), payload(job.chunk, job.write_id), "changed while written");
    }

    fn finish_again(&mut self, tier: u8, chunk: u32) {
        let stale = WriteId::new(u128::MAX);
        let finished = self.writeback.finish(tier, key(chunk).digest(), stale, Written::Done);
        assert!(!finished.last && finished.replicas == 0);
    }

    fn requeue(&mut self, nth: usize) {
        if self.jobs.is_empty() {
            return;
        }
        let job = self.jobs.swap_remove(nth % self.jobs.len());
        let (digest, id) = (key(job.chunk).digest(), WriteId::new(job.write_id));
        let back = self.writeback.requeue(job.tier, digest, id);
        let known = self.chunks.get_mut(&job.chunk).filter(|it| it.write_id == job.write_id);
        let Some(known) = known.filter(|it| it.replicas[&job.tier] == Replica::Writing) else {
            return assert!(!back);
        };
        assert_eq!(back, self.accepts[usize::from(job.tier)]);
        if back {
            known.replicas.insert(job.tier, Replica::Queued);
            self.queues[usize::from(job.tier)].push_front(job.chunk);
        } else {
            known.replicas.insert(job.tier, Replica::Ended);
            self.totals.withdrawn += 1;
        }
    }

    fn withdraw(&mut self, tier: u8, which: &[Replica]) {
        self.accepts[usize::from(tier)] = false;
        let gone = self.queues[usize::from(tier)].drain(..).collect::<Vec<_>>();
        let given_up_before = self.writeback.stats().replicas_given_up;
        for chunk in self.chunks.values_mut() {
            if let Some(known) = chunk.replicas.get_mut(&tier).filter(|it| which.contains(it)) {
                *known = Replica::Ended;
                self.totals.withdrawn += 1;
            }
        }
        // Replicas that had been given up unseen are not withdrawn: the counter tells them apart.
        let unseen = self.totals.withdrawn - self.writeback.stats().replicas_withdrawn;
        assert!(unseen <= gone.len() as u64 && given_up_before >= unseen);
        self.totals.withdrawn -= unseen;
        self.totals.given_up += unseen;
    }

    /// Chunks that are no longer staged: nothing of them is being written, and what still queued was given up.
    fn settle_departed(&mut self) {
        let gone = |it: &u32| match self.writeback.get(&key(*it)) {
            Some(record) => record.header().write_id().get() != self.chunks[it].write_id,
            None => true,
        };
        let departed: Vec<u32> = self.chunks.keys().copied().filter(gone).collect();
        for chunk in departed {
            let known = self.chunks.remove(&chunk).expect("listed");
            assert!(!known.has(Replica::Writing), "left while a tier writes it");
            let queued =
                known.replicas.values().filter(|it| **it == Replica::Queued).count() as u64;
            self.totals.given_up += queued;
            self.totals.lost += u64::from(!known.has(Replica::Held));
            for queue in &mut self.queues {
                queue.retain(|queued| *queued != chunk);
            }
        }
    }

    fn check(&self) {
        let stats = self.writeback.stats();
        assert!(stats.pending <= self.config.staged_chunks_max);
        assert_eq!(stats.pending, self.chunks.len());
        assert_eq!(stats.lost_writes, self.totals.lost);
        let mut backlogs = 0;
        for tier in 0..TIERS {
            assert!(backlog(&stats, tier) <= self.config.queue_chunks_max);
            backlogs += backlog(&stats, tier) as u64;
        }
        let ended = stats.replicas_written + stats.replicas_already_held + stats.replicas_failed;
        let ended = ended + stats.replicas_given_up + stats.replicas_withdrawn;
        assert_eq!(stats.replicas_wanted, ended + backlogs);
        for (chunk, known) in &self.chunks {
            let record = self.writeback.get(&key(*chunk)).expect("readable until its last finish");
            assert_eq!(record.payload(), payload(*chunk, known.write_id));
        }
        let abandoned = |job: &&Job| {
            self.chunks.get(&job.chunk).is_none_or(|known| known.write_id != job.write_id)
        };
        let mut abandoned: Vec<_> =
            self.jobs.iter().filter(abandoned).map(|job| job.record.slot().index()).collect();
        abandoned.sort_unstable();
        abandoned.dedup();
        let used = self.arena.slots() - self.arena.free_slots();
        assert_eq!(used, stats.pending + abandoned.len(), "a slot leaked or was freed early");
    }

    fn drain(&mut self) {
        self.apply(Operation::BeginFlush);
        while !self.writeback.is_drained() {
            (0..TIERS).for_each(|tier| self.apply(Operation::Next { tier }));
            while !self.jobs.is_empty() {
                self.apply(Operation::Finish { nth: 0, outcome: Written::Done });
            }
        }
        self.jobs.clear();
        self.holds.clear();
        let (stats, totals) = (self.writeback.stats(), &self.totals);
        assert_eq!(self.arena.free_slots(), self.arena.slots(), "a slot leaked");
        assert_eq!(stats.replicas_written + stats.replicas_already_held, totals.held);
        assert_eq!(stats.replicas_failed, totals.failed);
        assert_eq!(stats.replicas_given_up, totals.given_up);
        assert_eq!(stats.replicas_withdrawn, totals.withdrawn);
        assert_eq!(stats.replicas_wanted, totals.wanted);
    }
}

fn backlog(stats: &WritebackStats, tier: u8) -> usize {
    let tier = &stats.tiers[usize::from(tier)];
    tier.queued + tier.writing
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_replica_of_every_accepted_chunk_is_accounted_for_once(
        staged_chunks_max in 1..6_usize,
        queue_chunks_max in 1..5_usize,
        operations in prop::collection::vec(operation(), 0..300),
    ) {
        let slots = staged_chunks_max + SPARE_SLOTS;
        let arena = Arena::new(ArenaConfig::new(8 << 10, slots)).unwrap();
        let mut config = WritebackConfig::new(TIERS, staged_chunks_max);
        config.max_age_ns = MAX_AGE_NS;
        config.queue_chunks_max = queue_chunks_max;
        let writeback = Writeback::new(config, Arc::clone(&arena)).unwrap();
        let mut oracle = Oracle::new(&writeback, arena, config);
        for operation in operations {
            oracle.apply(operation);
        }
        oracle.drain();
    }
}
