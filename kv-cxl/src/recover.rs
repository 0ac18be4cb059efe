//! Opening what an earlier run left: which chunks are there, and what of the medium is free.

use std::collections::HashMap;

use hashlink::LinkedHashMap;
use kv_chunk::Digest;
use kv_tiers::{TierError, record_bytes};

use crate::{
    DaxTierConfig, Extent, Format, Medium,
    media::{self, Entry, Found, Header, Layout, MEDIA_VERSION, SlotState},
    space::Space,
    tier::{Chunk, Place},
};

/// Unless it is told, a store has an entry for so many bytes of its medium.
const BYTES_PER_ENTRY: u64 = 64 << 10;

pub(crate) struct Recovered {
    /// Oldest writing first.
    pub(crate) chunks: LinkedHashMap<Digest, Chunk>,
    pub(crate) free_entries: Vec<u32>,
    pub(crate) next_generation: u64,
    pub(crate) space: Space,
    pub(crate) stuck: u64,
    /// Entries that are to be cleared before anything else changes.
    pub(crate) unmended: Vec<u32>,
    pub(crate) newer_chunks: u64,
    pub(crate) dropped: u64,
}

/// What the first page says, and what was made of it.
pub(crate) struct Store {
    pub(crate) layout: Layout,
    pub(crate) found: Found,
}

/// The layout of the store on `medium`, which is made if there is none and `config` says so.
pub(crate) fn store(config: &DaxTierConfig, medium: &mut dyn Medium) -> Result<Store, TierError> {
    let found = if config.format == Format::Always { Found::Blank } else { media::look(medium)? };
    match found {
        // A medium may have grown or shrunk since.
        Found::Store(layout) => {
            let medium_bytes = layout.medium_bytes.min(medium.bytes());
            return Ok(Store { layout: Layout { medium_bytes, ..layout }, found });
        }
        Found::Newer { version } => {
            let path = medium.path().to_owned();
            return Err(TierError::Newer { path, found: version, known: MEDIA_VERSION });
        }
        Found::Foreign => {
            return Err(TierError::Config {
                field: "path",
                problem: format!("{} holds something else", medium.path().display()),
                fix: "name another device, or format this one, which loses what it holds".into(),
            });
        }
        Found::Damaged => {
            let path = medium.path().display();
            tracing::warn!("the first page of the store on {path} is damaged: all of it is lost");
        }
        Found::Blank => {}
    }
    let bytes = medium.bytes();
    let entries = config
        .entries
        .unwrap_or_else(|| u32::try_from(bytes / BYTES_PER_ENTRY).unwrap_or(u32::MAX).max(1));
    let layout = Layout::new(bytes, entries).ok_or_else(|| TierError::Config {
        field: "entries",
        problem: format!("a table of {entries} leaves no room in {bytes} bytes"),
        fix: "use a larger medium, or fewer entries".into(),
    })?;
    if !config.look_only {
        media::format(medium, layout)?;
    }
    Ok(Store { layout, found })
}

/// Reads the table. A chunk whose header is of a later version keeps its entry and place, and is a miss. Of two entries that name one chunk or share bytes the later writing stays. What is dropped is
/// cleared, so that it cannot come back when the one that it lost to is gone; `look_only` leaves that for later.
pub(crate) fn chunks(
    medium: &mut dyn Medium,
    store: &Store,
    mut space: Space,
    look_only: bool,
) -> Result<Recovered, TierError> {
    let layout = match store.found {
        // What stands where a table would be is none.
        Found::Blank | Found::Damaged if look_only => Layout { entries: 0, ..store.layout },
        _ => store.layout,
    };
    let mut found: Vec<(u32, Entry)> = Vec::new();
    let mut free_entries = Vec::new();
    let mut to_clear = Vec::new();
    media::read_table(medium, layout, |index, state| match state {
        SlotState::Free => free_entries.push(index),
        SlotState::Held(entry) => found.push((index, entry)),
        SlotState::Torn => to_clear.push(index),
    })?;
    found.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.generation));
    let next_generation = found.first().map_or(1, |(_, entry)| entry.generation.saturating_add(1));
    let mut newest: HashMap<Digest, u64> = HashMap::new();
    let (mut kept, mut newer_chunks) = (Vec::new(), 0);
    for (index, entry) in found {
        let bytes = space.rounded(record_bytes(entry.held.payload_bytes));
        let extent = Extent { offset: entry.offset, bytes };
        let is_newest = *newest.entry(entry.digest).or_insert(entry.generation) == entry.generation;
        let header =
            if is_newest { media::look_at_header(medium, &entry)? } else { Header::Differs };
        if header == Header::Differs || !space.take_at(extent) {
            to_clear.push(index);
        } else if header == Header::Agrees {
            let place = Place { extent, generation: entry.generation };
            kept.push((entry.digest, Chunk { held: entry.held, place, entry: index }));
        } else {
            newer_chunks += 1;
        }
    }
    let dropped = to_clear.len() as u64;
    if !to_clear.is_empty() && !look_only {
        let (path, count) = (medium.path().display(), to_clear.len());
        tracing::warn!("{count} chunks of the store on {path} were not whole: dropped");
    }
    let mut stuck = 0;
    let unmended = if look_only { std::mem::take(&mut to_clear) } else { Vec::new() };
    for index in to_clear {
        match media::clear_entry(medium, index) {
            Ok(()) => free_entries.push(index),
            Err(_) => stuck += 1,
        }
    }
    // The lowest entries are used first.
    free_entries.sort_unstable_by(|one, other| other.cmp(one));
    let chunks = kept.into_iter().rev().collect();
    Ok(Recovered {
        chunks,
        free_entries,
        next_generation,
        space,
        stuck,
        unmended,
        newer_chunks,
        dropped,
    })
}
