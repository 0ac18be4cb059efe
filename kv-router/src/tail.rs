//! The end of a step: idle slots duplicate what has been waited for longest, within a byte budget.

use crate::pool::Chunk;
use crate::slot::{PARTS, READERS, Token};
use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use crate::{Claim, MAX_TIERS, PoolConfig, StepPool, TierId};

/// Set in every published entry of the log, so that 0 means "not yet".
const PUBLISHED: u64 = 1 << 63;

/// The order in which reads were claimed, and what duplicates may still cost.
pub(crate) struct Hedge {
    /// Entries handed out, published or not; can exceed the log's length. Raised by every claim.
    /// `Relaxed`: the entry itself is what is published.
    claimed: AtomicU32,
    /// Claims in order, duplicates among them: chunk and token. Each entry is written once, with
    /// `Release`, by whoever claimed; read with `Acquire` by whoever looks for something to
    /// duplicate. A step with very many failures outgrows the log; later reads are then not
    /// duplicated.
    log: Box<[AtomicU64]>,
    /// By tier: every entry below is one that the tier will never duplicate. Only saves work;
    /// `Relaxed`.
    from: Box<[AtomicU32]>,
    /// Bytes that duplicates may still read. Lowered before and, where the duplicate then does not
    /// come about, raised after; `Relaxed`, as only the sum counts.
    budget: AtomicI64,
}

/// Room in the log of a step: each chunk once, and as many reads again may fail; chunks of the tail
/// in up to eight pieces; what is in flight at the end, twice more.
pub(crate) fn log_entries(chunks: usize, config: &PoolConfig) -> usize {
    let places = usize::try_from(config.places()).unwrap_or(0);
    let parts = usize::from(PARTS);
    2 * (chunks + parts * chunks.min(2 * places)) + 2 * parts * chunks.min(places)
}

impl Hedge {
    pub(crate) fn new(chunks: &[Chunk], config: &PoolConfig) -> Self {
        let held = || chunks.iter().filter(|chunk| !chunk.tiers.is_empty());
        let bytes = held().fold(0_u64, |sum, chunk| sum.saturating_add(chunk.bytes));
        let budget = config.duplicate_bytes(held().count() as u64, bytes);
        let entries = log_entries(chunks.len(), config);
        Self {
            claimed: AtomicU32::new(0),
            log: (0..entries).map(|_| AtomicU64::new(0)).collect(),
            from: (0..MAX_TIERS).map(|_| AtomicU32::new(0)).collect(),
            budget: AtomicI64::new(i64::try_from(budget).unwrap_or(i64::MAX)),
        }
    }

    pub(crate) fn record(&self, chunk: u32, token: Token) {
        let at = self.claimed.fetch_add(1, Ordering::Relaxed);
        if let Some(entry) = usize::try_from(at).ok().and_then(|at| self.log.get(at)) {
            let name = u64::from(token.pack()) << 32 | u64::from(chunk);
            entry.store(PUBLISHED | name, Ordering::Release);
        }
    }

    pub(crate) fn refund(&self, bytes: u64) {
        self.budget.fetch_add(i64::try_from(bytes).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    fn reserve(&self, bytes: u64) -> bool {
        let Ok(bytes) = i64::try_from(bytes) else { return false };
        let pay = |left: i64| (left >= bytes).then(|| left - bytes);
        self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
    }
}

impl StepPool {
    /// A duplicate of outstanding blocks that `tier` holds too, whichever tier reads them: of those
    /// whose latest read was claimed first, in the smallest pieces of the chunk.
    ///
    /// Only when nothing of the step is unclaimed, at most two for the same blocks, and within
    /// the configured bytes. Do not ask for a tier that has a write in flight.
    pub fn claim_duplicate(&self, tier: TierId) -> Option<Claim> {
        let hedge = self.hedge.as_ref()?;
        if self.unclaimed() != 0 || self.is_finished() || self.gone().contains(tier) {
            return None;
        }
        let from = hedge.from.get(tier.index())?;
        let first = from.load(Ordering::Relaxed);
        let mut all_over = true;
        for at in first..hedge.claimed.load(Ordering::Relaxed) {
            let entry = hedge.log.get(usize::try_from(at).ok()?)?.load(Ordering::Acquire);
            match self.duplicate(hedge, entry, tier) {
                Found::Claim(claim) => return Some(claim),
                Found::NoBudget => return None,
                Found::NotYet => all_over = false,
                Found::Over if all_over => from.store(at + 1, Ordering::Relaxed),
                Found::Over => {}
            }
        }
        None
    }

    fn duplicate(&self, hedge: &Hedge, entry: u64, tier: TierId) -> Found {
        if entry == 0 {
            return Found::NotYet;
        }
        let [a, b, c, d, e, f, g, h] = entry.to_le_bytes();
        let index = u32::from_le_bytes([a, b, c, d]);
        let last = Token::unpack(u32::from_le_bytes([e, f, g, h]));
        let Some((slot, chunk)) = self.at(index) else { return Found::Over };
        let Some((_, next)) = slot.load().duplicate(tier, last, chunk.parts, 1) else {
            return Found::Over;
        };
        let bytes = chunk.claim(index, tier, next).bytes;
        if !hedge.reserve(bytes) {
            return Found::NoBudget;
        }
        let same = |(_, token): &(_, Token)| *token == next;
        let Ok(change) =
            slot.update(|word| word.duplicate(tier, last, chunk.parts, 1).filter(same))
        else {
            // Another part of it may do: this call passes it over, the next one will not.
            hedge.refund(bytes);
            return Found::NotYet;
        };
        if next.reader + 1 < READERS {
            hedge.record(index, next);
        }
        self.counters.get(tier.index()).inspect(|counters| counters.duplicated(bytes));
        Found::Claim(chunk.claim(index, tier, change.with))
    }
}

/// What an entry of the log is good for.
enum Found {
    Claim(Claim),
    /// It can be duplicated, but not paid for.
    NoBudget,
    /// It is being written, or changed under this call.
    NotYet,
    /// It will not be duplicated by this tier any more.
    Over,
}
