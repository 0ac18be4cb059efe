//! Which faults strike when.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kv_chunk::Digest;

/// What can go wrong with an op. Read faults strike reads, write faults writes, the others both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FaultKind {
    /// The read fails with EIO.
    ReadFails,
    /// The read fails with [`TierError::Short`](crate::TierError::Short).
    ReadStopsShort,
    /// The read succeeds with fewer payload bytes than asked for (not for an empty payload).
    ReadIsTruncated,
    /// One bit of what the read brought is flipped.
    ReadFlipsBit,
    /// The chunk was deleted behind the tier's back: the read finds nothing, and the tier reports it lost.
    ReadFindsItDeleted,
    /// The write fails with EIO; nothing was written.
    WriteFails,
    /// The write fails with ENOSPC.
    WriteFindsNoSpace,
    /// The write fails with EIO after half of the payload.
    WriteTears,
    /// The write succeeds, but the second half of the payload is zeros.
    WriteTearsUnseen,
    /// The write succeeds, but one bit in the stored copy is flipped.
    WriteFlipsBit,
    /// The op completes later.
    Stalls {
        /// By how much; `u64::MAX` for never.
        ns: u64,
    },
    /// The medium is gone from this op on: every op fails with EIO, every chunk is lost.
    Vanishes,
}

impl FaultKind {
    fn strikes(self, write: bool) -> bool {
        match self {
            Self::Stalls { .. } | Self::Vanishes => true,
            Self::ReadFails
            | Self::ReadStopsShort
            | Self::ReadIsTruncated
            | Self::ReadFlipsBit
            | Self::ReadFindsItDeleted => !write,
            Self::WriteFails
            | Self::WriteFindsNoSpace
            | Self::WriteTears
            | Self::WriteTearsUnseen
            | Self::WriteFlipsBit => write,
        }
    }
}

/// Which of the ops that a fault can strike it does strike, counted since the plan was set.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum When {
    /// The n-th, from 1.
    Nth(u64),
    /// Each n-th.
    Every(u64),
    /// Each with this probability, 0 to 1.
    Probability(f64),
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// What.
    pub kind: FaultKind,
    /// When.
    pub when: When,
}

/// Faults to come. Of those that strike one op the first listed counts; a stall adds to it.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct FaultPlan {
    /// In order of precedence.
    pub faults: Vec<Fault>,
    /// Of everything random.
    pub seed: u64,
}

impl FaultPlan {
    /// No faults.
    pub const NONE: Self = Self { faults: Vec::new(), seed: 0 };

    /// Adds a fault.
    #[must_use]
    pub fn with(mut self, kind: FaultKind, when: When) -> Self {
        self.faults.push(Fault { kind, when });
        self
    }

    /// Another seed.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Self { seed, ..self }
    }
}

/// Steers a [`Faulty`](crate::Faulty) tier while it runs, and counts what struck.
#[derive(Clone, Debug)]
pub struct FaultHandle(Arc<Mutex<Control>>);

#[derive(Debug)]
pub(super) struct Control {
    plan: FaultPlan,
    /// Ops that each fault of the plan could have struck.
    seen: Vec<u64>,
    pub(super) random: fastrand::Rng,
    counts: BTreeMap<FaultKind, u64>,
    pub(super) vanished: bool,
    pub(super) deleted: BTreeSet<Digest>,
}

/// What the plan has for one op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Strike {
    pub(super) kind: Option<FaultKind>,
    pub(super) stall_ns: u64,
}

impl FaultHandle {
    pub(super) fn new(plan: FaultPlan) -> Self {
        let handle = Self(Arc::new(Mutex::new(Control {
            plan: FaultPlan::NONE,
            seen: Vec::new(),
            random: fastrand::Rng::with_seed(0),
            counts: BTreeMap::new(),
            vanished: false,
            deleted: BTreeSet::new(),
        })));
        handle.set_plan(plan);
        handle
    }

    /// Replaces the plan; its ops are counted from here. Counts of what struck stay.
    pub fn set_plan(&self, plan: FaultPlan) {
        let mut control = self.control();
        control.seen = vec![0; plan.faults.len()];
        control.random = fastrand::Rng::with_seed(plan.seed);
        control.plan = plan;
    }

    /// How often each kind struck.
    pub fn counts(&self) -> BTreeMap<FaultKind, u64> {
        self.control().counts.clone()
    }

    /// How often `kind` struck.
    pub fn count(&self, kind: FaultKind) -> u64 {
        self.control().counts.get(&kind).copied().unwrap_or(0)
    }

    /// Takes the medium away: every op fails, in-flight ones too, and every chunk is reported lost.
    pub fn vanish(&self) {
        let mut control = self.control();
        control.vanished = true;
        control.count(FaultKind::Vanishes);
    }

    /// Brings a vanished medium back with what it held.
    pub fn come_back(&self) {
        self.control().vanished = false;
    }

    /// Deletes a chunk behind the tier's back: the next read of it finds nothing.
    pub fn delete(&self, digest: Digest) {
        self.control().deleted.insert(digest);
    }

    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        // Counters and values: whole even after a panic elsewhere.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    /// Counts the op; says what strikes it.
    pub(super) fn strike(&mut self, write: bool) -> Strike {
        let mut strike = Strike::default();
        for (fault, seen) in self.plan.faults.iter().zip(&mut self.seen) {
            if !fault.kind.strikes(write) {
                continue;
            }
            *seen += 1;
            let hit = match fault.when {
                When::Nth(n) => *seen == n,
                When::Every(n) => seen.is_multiple_of(n.max(1)),
                When::Probability(probability) => self.random.f64() < probability,
            };
            match fault.kind {
                _ if !hit => {}
                FaultKind::Stalls { ns } => strike.stall_ns = strike.stall_ns.max(ns),
                kind => strike.kind = strike.kind.or(Some(kind)),
            }
        }
        strike
    }

    pub(super) fn count(&mut self, kind: FaultKind) {
        *self.counts.entry(kind).or_default() += 1;
    }
}
