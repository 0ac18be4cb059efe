//! What must be readable, and the checks of everything the tier says against it.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    ops::Range,
};

use kv_chunk::Digest;

use super::{
    case::Case,
    content::{Content, key},
};
use crate::{
    Completion, ErrorKind, EvictionGuard, Held, ListCursor, Piece, ReadDone, Slot, TierError,
    piece_range,
};

/// Confirms what the rule allows and remembers it.
#[derive(Debug, Default)]
pub(super) struct Guard {
    pub(super) refuse_all: bool,
    pub(super) refused: HashSet<Digest>,
    pub(super) confirmed: RefCell<HashSet<Digest>>,
}

impl EvictionGuard for Guard {
    fn try_evict(&self, digest: Digest) -> bool {
        let confirmed = self.may_evict(digest);
        if confirmed {
            self.confirmed.borrow_mut().insert(digest);
        }
        confirmed
    }

    fn may_evict(&self, digest: Digest) -> bool {
        !self.refuse_all && !self.refused.contains(&digest)
    }
}

#[derive(Debug)]
pub(super) enum Asked {
    /// `must_find`: the chunk was readable at submit and has not been removed since.
    Read {
        number: u32,
        blocks: Range<u32>,
        must_find: bool,
    },
    Write {
        content: Content,
    },
}

/// How an op ended, checked already: bytes are right, and errors are ones that could be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Read { number: u32, found: Option<Content> },
    Written { content: Content },
    NotWritten { content: Content, kind: ErrorKind },
}

impl Case<'_, '_> {
    pub(super) fn apply(&mut self, completion: Completion) -> Result<Option<Ended>, String> {
        match completion {
            Completion::Read { id, digest, slot, result } => {
                let asked = self.asked.remove(&id);
                let Some(Asked::Read { number, blocks, must_find }) = asked else {
                    return Err(format!("a read completion for op {id:?}, which is {asked:?}"));
                };
                if key(number).digest() != digest {
                    return Err(format!("the read of chunk {number} completed as {digest}"));
                }
                let found = self.check_read(number, &blocks, must_find, slot, result)?;
                Ok(Some(Ended::Read { number, found }))
            }
            Completion::Write { id, digest, result } => {
                let asked = self.asked.remove(&id);
                let Some(Asked::Write { content }) = asked else {
                    return Err(format!("a write completion for op {id:?}, which is {asked:?}"));
                };
                if content.key().digest() != digest {
                    return Err(format!("the write of {content:?} completed as {digest}"));
                }
                self.check_write(content, result).map(Some)
            }
            Completion::Evicted { digest } => {
                if !self.guard.confirmed.borrow_mut().remove(&digest) {
                    return Err(format!("{digest} was evicted without being confirmed"));
                }
                self.evictions += 1;
                let before = self.held.len();
                self.held.retain(|&number, _| key(number).digest() != digest);
                let known = self.held.len() < before;
                known.then_some(None).ok_or(format!("{digest} was evicted but not readable"))
            }
            Completion::Lost { digest, error } => Err(format!("{digest} was lost: {error}")),
        }
    }

    /// The content that was read; `None` for "not held", if that could be.
    fn check_read(
        &self,
        number: u32,
        blocks: &Range<u32>,
        must_find: bool,
        slot: Slot,
        result: Result<ReadDone, TierError>,
    ) -> Result<Option<Content>, String> {
        let done = match result {
            Ok(done) => done,
            Err(TierError::NotFound { .. }) if !must_find => return Ok(None),
            Err(error) => return Err(format!("reading {blocks:?} of chunk {number}: {error}")),
        };
        let piece = Piece::verify(slot, done, &key(number), blocks)
            .map_err(|error| format!("reading {blocks:?} of chunk {number}: {error}"))?;
        let content = Content::named(piece.write_id(), number)
            .ok_or_else(|| format!("chunk {number} has a write id that nobody wrote"))?;
        let range = piece_range(content.payload_bytes.into(), blocks);
        let range = usize::try_from(range.start).expect("small")
            ..usize::try_from(range.end).expect("small");
        if content.bytes(range) != piece.bytes() {
            return Err(format!("{blocks:?} of {content:?} came back with other bytes"));
        }
        Ok(Some(content))
    }

    fn check_write(
        &mut self,
        content: Content,
        result: Result<(), TierError>,
    ) -> Result<Ended, String> {
        let Content { number, .. } = content;
        match result {
            Ok(()) => match self.held.insert(number, content) {
                None => Ok(Ended::Written { content }),
                Some(old) => Err(format!("{content:?} was written over {old:?}")),
            },
            Err(error) => match error.kind() {
                kind @ (ErrorKind::AlreadyHeld | ErrorKind::NoSpace) => {
                    Ok(Ended::NotWritten { content, kind })
                }
                _ => Err(format!("the write of {content:?}: {error}")),
            },
        }
    }

    /// Everything visible agrees with the model now, and the cap holds.
    pub(super) fn compare(&mut self) -> Result<(), String> {
        let tier = self.tier.as_ref().ok_or("the tier is dropped")?;
        for (&number, content) in &self.held {
            let found = tier.contains(key(number).digest());
            if found != Some(held(*content)) {
                return Err(format!("{content:?} is readable, but contains says {found:?}"));
            }
        }
        for asked in self.asked.values() {
            let number = match asked {
                Asked::Read { number, .. } => *number,
                Asked::Write { content } => content.number,
            };
            let found = tier.contains(key(number).digest());
            if !self.held.contains_key(&number) && found.is_some() {
                return Err(format!("contains shows chunk {number}, which is not complete"));
            }
        }
        let (stats, in_flight) = (tier.stats(), tier.in_flight());
        if stats.used_bytes > stats.capacity_bytes {
            let (used, cap) = (stats.used_bytes, stats.capacity_bytes);
            return Err(format!("{used} bytes are used, the cap is {cap}"));
        }
        if in_flight != self.asked.len() {
            return Err(format!("in_flight says {in_flight}, it is {}", self.asked.len()));
        }
        Ok(())
    }

    /// `list` shows each readable chunk once and nothing else, and so do its parts one after the other.
    pub(super) fn compare_list(&mut self) -> Result<(), String> {
        let mut listed = HashMap::new();
        let mut twice = None;
        self.tier()?.list(&mut |digest, held| {
            if listed.insert(digest, held).is_some() {
                twice = Some(digest);
            }
        });
        if let Some(digest) = twice {
            return Err(format!("list shows {digest} twice"));
        }
        let parts = self.list_in_parts(listed.len())?;
        if parts != listed {
            return Err(format!("list shows {listed:?}, its parts show {parts:?}"));
        }
        let expected: HashMap<Digest, Held> =
            self.held.values().map(|content| (content.key().digest(), held(*content))).collect();
        if listed != expected {
            return Err(format!("list shows {listed:?}, readable are {expected:?}"));
        }
        let chunks = self.tier()?.stats().chunks;
        if chunks != expected.len() as u64 {
            return Err(format!("stats count {chunks} chunks, readable are {}", expected.len()));
        }
        Ok(())
    }

    fn list_in_parts(&mut self, chunks: usize) -> Result<HashMap<Digest, Held>, String> {
        let max = chunks / 3 + 1;
        let (mut listed, mut next) = (HashMap::new(), Some(ListCursor::START));
        let (mut calls, mut twice) = (0, None);
        while let Some(from) = next {
            let mut shown = 0;
            next = self.tier()?.list_from(from, max, &mut |digest, held| {
                shown += 1;
                if listed.insert(digest, held).is_some() {
                    twice = Some(digest);
                }
            });
            calls += 1;
            if shown > max || calls > chunks + 2 {
                return Err(format!("list_from shows {shown} of at most {max} in call {calls}"));
            }
        }
        match twice {
            Some(digest) => Err(format!("list_from shows {digest} twice")),
            None => Ok(listed),
        }
    }
}

fn held(content: Content) -> Held {
    Held { payload_bytes: content.payload_bytes.into(), write_id: content.write_id() }
}
