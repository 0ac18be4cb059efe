//! One load's reads, shared by the tier threads, and what they send back to the loading thread.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc::Sender,
    },
};

use kv_chunk::{ChunkKey, WriteId};
use kv_router::{Claim, Delivery, Failure, Outcome, StepPool, TierId, Withdrawn};
use kv_tiers::Piece;

use crate::sync::lock_plain;

/// What a tier thread tells the loading thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// Verified bytes, `new_bytes` of them the first of their kind: to be copied, then the slot is free.
    Piece { chunk: u32, tier: u8, attempt: u8, new_bytes: u64, piece: Piece },
    /// The chunk is a miss; the pool knows why.
    Missed { chunk: u32 },
    /// Some chunks became misses: look which.
    Look,
}

/// One load's storage reads.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) pool: StepPool,
    /// By chunk of the pool.
    keys: Vec<ChunkKey>,
    sender: Sender<Message>,
    /// Of chunks read in pieces, by chunk and attempt: the staging that all pieces must belong to.
    stagings: Mutex<HashMap<(u32, u8), WriteId>>,
    uses: Vec<TierUse>,
}

/// When one tier had reads of the step in flight. Written by that tier's thread, read by the loading thread for its
/// report: relaxed, since a report decides nothing.
#[derive(Debug, Default)]
struct TierUse {
    in_flight: AtomicU32,
    since_ns: AtomicU64,
    busy_ns: AtomicU64,
}

/// What a landed read was worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// Delivered, so many bytes; as many more had been delivered before.
    Delivered { new_bytes: u64, late_bytes: u64 },
    /// Too late, so many bytes.
    Late(u64),
    /// So many bytes of another staging than the chunk's other pieces: the chunk is read again, whole.
    Mixed(u64),
}

impl Step {
    pub(crate) fn key(&self, chunk: u32) -> &ChunkKey {
        &self.keys[chunk as usize]
    }

    /// Hands a verified read over, if it is the first of its bytes. True: tiers that have nothing to do should look.
    pub(crate) fn deliver(&self, claim: Claim, piece: Piece) -> (Worth, bool) {
        let bytes = piece.bytes().len() as u64;
        let (chunk, attempt) = (claim.chunk, claim.attempt);
        if claim.is_piece() && !self.fits(&claim, piece.write_id()) {
            // Its own slot is free before another read of the chunk asks for one.
            drop(piece);
            return (Worth::Mixed(bytes), self.follow_up(chunk, self.pool.reread_whole(claim)));
        }
        let tier = claim.tier.0;
        match self.pool.complete(claim) {
            Delivery::First { new_bytes, .. } => {
                // Nobody receives after the load returned: the piece is dropped.
                let message = Message::Piece { chunk, tier, attempt, new_bytes, piece };
                let _ = self.sender.send(message);
                let late_bytes = bytes.saturating_sub(new_bytes);
                (Worth::Delivered { new_bytes, late_bytes }, false)
            }
            Delivery::Late => (Worth::Late(bytes), false),
        }
    }

    /// The read failed. True: tiers that have nothing to do should look.
    pub(crate) fn fail(&self, claim: Claim, failure: Failure) -> bool {
        self.follow_up(claim.chunk, self.pool.fail(claim, failure))
    }

    /// The read is overdue; the claim stays until it comes in. True: tiers that have nothing to do should look.
    pub(crate) fn expire(&self, claim: &Claim) -> bool {
        self.follow_up(claim.chunk, self.pool.expire(claim))
    }

    /// Withdraws a tier.
    pub(crate) fn mask_tier(&self, tier: TierId) {
        let Withdrawn { missed, .. } = self.pool.mask_tier(tier);
        if missed > 0 {
            let _ = self.sender.send(Message::Look);
        }
    }

    fn follow_up(&self, chunk: u32, outcome: Outcome) -> bool {
        if let Outcome::Missed { .. } = outcome {
            let _ = self.sender.send(Message::Missed { chunk });
        }
        outcome == Outcome::Returned
    }

    fn fits(&self, claim: &Claim, write_id: WriteId) -> bool {
        let mut stagings = lock_plain(&self.stagings);
        *stagings.entry((claim.chunk, claim.attempt)).or_insert(write_id) == write_id
    }

    /// A read of the step starts on `tier`. Called by that tier's thread.
    pub(crate) fn read_starts(&self, tier: TierId, now_ns: u64) {
        let Some(tier) = self.uses.get(tier.index()) else { return };
        if tier.in_flight.fetch_add(1, Ordering::Relaxed) == 0 {
            tier.since_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// It ended, in any way. Called by that tier's thread.
    pub(crate) fn read_ends(&self, tier: TierId, now_ns: u64) {
        let Some(tier) = self.uses.get(tier.index()) else { return };
        if tier.in_flight.fetch_sub(1, Ordering::Relaxed) == 1 {
            let busy_ns = now_ns.saturating_sub(tier.since_ns.load(Ordering::Relaxed));
            tier.busy_ns.fetch_add(busy_ns, Ordering::Relaxed);
        }
    }

    /// Time until now in which `tier` had reads of the step in flight.
    pub(crate) fn busy_ns(&self, tier: usize, now_ns: u64) -> u64 {
        let Some(tier) = self.uses.get(tier) else { return 0 };
        let since_ns = tier.since_ns.load(Ordering::Relaxed);
        let running = tier.in_flight.load(Ordering::Relaxed) > 0;
        let running_ns = if running { now_ns.saturating_sub(since_ns) } else { 0 };
        tier.busy_ns.load(Ordering::Relaxed) + running_ns
    }
}

/// A step in a tier's queue.
#[derive(Clone, Debug)]
pub(crate) struct StepHandle(pub(crate) Arc<Step>);

impl StepHandle {
    pub(crate) fn new(pool: StepPool, keys: Vec<ChunkKey>, sender: Sender<Message>) -> Self {
        let uses = (0..pool.config().tiers).map(|_| TierUse::default()).collect();
        Self(Arc::new(Step { pool, keys, sender, stagings: Mutex::default(), uses }))
    }
}

impl AsRef<StepPool> for StepHandle {
    fn as_ref(&self) -> &StepPool {
        &self.0.pool
    }
}
