//! The chunks of a tier, a bounded number at a time: an index of millions is never copied whole.

use std::collections::VecDeque;

use kv_chunk::Digest;
use kv_tiers::{Held, ListCursor, Tier};

/// Chunks held at once: some hundred kilobytes. Tiers that order by digest go through their index once for each page.
const PAGE_CHUNKS: usize = 16_384;

/// A way through all chunks of a tier.
#[derive(Debug)]
pub(crate) struct Pages {
    page: VecDeque<(Digest, Held)>,
    next: Option<ListCursor>,
    page_chunks: usize,
}

impl Default for Pages {
    /// From the beginning.
    fn default() -> Self {
        Self::of(PAGE_CHUNKS)
    }
}

impl Pages {
    fn of(page_chunks: usize) -> Self {
        Self { page: VecDeque::new(), next: Some(ListCursor::START), page_chunks }
    }

    /// The chunk that comes next; `None` at the end.
    pub(crate) fn peek(&mut self, tier: &dyn Tier) -> Option<(Digest, Held)> {
        while self.page.is_empty() {
            let from = self.next?;
            let page = &mut self.page;
            let mut keep = |digest, held| page.push_back((digest, held));
            self.next = tier.list_from(from, self.page_chunks, &mut keep);
        }
        self.page.front().copied()
    }

    /// Goes past the chunk that `peek` showed.
    pub(crate) fn pass(&mut self) {
        self.page.pop_front();
    }

    /// The next page whole; empty at the end.
    pub(crate) fn take_page(&mut self, tier: &dyn Tier) -> Vec<(Digest, Held)> {
        self.peek(tier);
        self.page.drain(..).collect()
    }

    /// Nothing comes any more.
    pub(crate) fn is_at_end(&self) -> bool {
        self.page.is_empty() && self.next.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kv_chunk::WriteId;
    use kv_tiers::{
        Arena, ArenaConfig, MemoryConfig, MemoryTier, Op, OpId, Record, Unguarded, WriteOp,
    };

    use super::*;
    use crate::testing::key;

    fn tier_of(chunks: u64) -> MemoryTier {
        let arena = Arena::new(ArenaConfig::new(8192, 1)).unwrap();
        let mut tier = MemoryTier::new(MemoryConfig::new("m", 64 << 20));
        for n in 0..chunks {
            let slot = arena.try_take().unwrap();
            let record = Record::encode(slot, &key(n), WriteId::new(n.into()), b"x").unwrap();
            let write = WriteOp { id: OpId(n), record: Arc::new(record) };
            tier.submit(Op::Write(write), 0).unwrap();
            tier.poll(0, &Unguarded, &mut Vec::new());
        }
        tier
    }

    #[test]
    fn every_chunk_that_stays_is_met_once_and_no_more_than_a_page_is_held() {
        for chunks in [0, 1, 6, 7, 8, 50] {
            let mut tier = tier_of(chunks);
            let mut pages = Pages::of(7);
            let mut met = Vec::new();
            while let Some((digest, _)) = pages.peek(&tier) {
                assert!(pages.page.len() <= 7);
                pages.pass();
                met.push(digest);
                // What was met can go without moving what comes.
                if met.len() % 2 == 0 {
                    tier.remove(digest, 0);
                }
            }
            assert!(pages.is_at_end());
            let mut all: Vec<Digest> = (0..chunks).map(|n| key(n).digest()).collect();
            all.sort_unstable();
            met.sort_unstable();
            assert_eq!(met, all);
        }
    }
}
