//! What stands on a medium of chunks, and how it is found again. `docs/media.md` draws the bytes.

use std::{fmt, path::Path, sync::Arc};

use bytemuck::{Pod, Zeroable};
use kv_chunk::{
    ChunkHeader, Digest, HEADER_BYTES, HeaderError, WriteId, block_crc,
    le::{Le32, Le64},
};
use kv_tiers::{Held, record_bytes};

use crate::{Extent, FastTierError};

/// The version that this crate writes and reads.
pub const MEDIA_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"KVBRADAX";
const PAGE_BYTES: usize = 4096;
/// A line is written back whole, so an entry is one.
const ENTRY_BYTES: usize = 64;
const STATE_HELD: u32 = 1;
/// The table is read in pieces of so many entries.
const TABLE_PIECE: u32 = 1024;

/// Bytes that keep what is written to them: a mapped device, a file.
///
/// [`flush`](Self::flush) is the only order there is: what was flushed is on the medium before anything that is written
/// afterwards, and survives what the medium survives. What was not flushed may survive in any part and any order.
pub trait Medium: fmt::Debug + Send {
    /// What it is called, for errors.
    fn path(&self) -> &Path;

    /// Its length; it does not change.
    fn bytes(&self) -> u64;

    /// Copies out.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError>;

    /// Copies in.
    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError>;

    /// Orders `extent` before everything written from now on, and makes it as durable as the medium can.
    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError>;

    /// Reads the same bytes from other threads, also while others read, write and flush; it may outlive this. `None`, the
    /// default: then whoever owns the medium reads.
    fn reader(&self) -> Option<Arc<dyn MediumReader>> {
        None
    }
}

/// Reads a [`Medium`] from any number of threads at once.
pub trait MediumReader: fmt::Debug + Send + Sync {
    /// Copies out. What is written at the same time may be read as a mixture.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError>;
}

const _: Option<&dyn Medium> = None;
const _: Option<&dyn MediumReader> = None;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawSuperblock {
    magic: [u8; 8],
    version: Le32,
    crc: Le32,
    medium_bytes: Le64,
    data_offset: Le64,
    entries: Le32,
    entry_bytes: Le32,
    reserved: [u8; 24],
}

const _: () = assert!(size_of::<RawSuperblock>() == 64);

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawEntry {
    crc: Le32,
    state: Le32,
    generation: Le64,
    digest: [u8; 16],
    write_id: [u8; 16],
    offset: Le64,
    payload_bytes: Le64,
}

const _: () = assert!(size_of::<RawEntry>() == ENTRY_BYTES);

/// Where what is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) medium_bytes: u64,
    pub(crate) data_offset: u64,
    pub(crate) entries: u32,
}

/// What the first page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing was ever written there.
    Blank,
    /// A store of ours.
    Store(Layout),
    /// A store of a later version.
    Newer { version: u32 },
    /// A store of ours whose first page is damaged.
    Damaged,
    /// Something else.
    Foreign,
}

/// One chunk as the table names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) generation: u64,
    pub(crate) digest: Digest,
    pub(crate) held: Held,
    pub(crate) offset: u64,
}

/// What a slot of the table holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    Held(Entry),
    /// Half a write, or damage: nobody relies on it.
    Torn,
}

impl Layout {
    /// That of a new store, or `None` if not a single chunk would fit.
    pub(crate) fn new(medium_bytes: u64, entries: u32) -> Option<Self> {
        let page_bytes = PAGE_BYTES as u64;
        let table_bytes = u64::from(entries) * ENTRY_BYTES as u64;
        let data_offset = (page_bytes + table_bytes).next_multiple_of(page_bytes);
        let fits = entries > 0 && data_offset + page_bytes <= medium_bytes;
        fits.then_some(Self { medium_bytes, data_offset, entries })
    }

    fn slot(index: u32) -> Extent {
        let offset = PAGE_BYTES as u64 + u64::from(index) * ENTRY_BYTES as u64;
        Extent { offset, bytes: ENTRY_BYTES as u64 }
    }

    fn raw(&self) -> RawSuperblock {
        let mut raw = RawSuperblock {
            magic: MAGIC,
            version: MEDIA_VERSION.into(),
            crc: 0.into(),
            medium_bytes: self.medium_bytes.into(),
            data_offset: self.data_offset.into(),
            entries: self.entries.into(),
            entry_bytes: 64.into(),
            reserved: [0; 24],
        };
        raw.crc = block_crc(bytemuck::bytes_of(&raw)).into();
        raw
    }
}

/// Looks at the first page.
pub(crate) fn look(medium: &dyn Medium) -> Result<Found, FastTierError> {
    let mut page = [0; PAGE_BYTES];
    if medium.bytes() < PAGE_BYTES as u64 {
        return Ok(Found::Foreign);
    }
    medium.read(0, &mut page)?;
    let raw: RawSuperblock = bytemuck::pod_read_unaligned(&page[..64]);
    if raw.magic != MAGIC {
        let blank = page.iter().all(|byte| *byte == 0);
        return Ok(if blank { Found::Blank } else { Found::Foreign });
    }
    let version = raw.version.get();
    if version > MEDIA_VERSION {
        return Ok(Found::Newer { version });
    }
    let Some(layout) = Layout::new(raw.medium_bytes.get(), raw.entries.get()) else {
        return Ok(Found::Damaged);
    };
    // What is accepted is exactly what a writer writes.
    let is_ours = bytemuck::bytes_of(&layout.raw()) == bytemuck::bytes_of(&raw);
    Ok(if is_ours { Found::Store(layout) } else { Found::Damaged })
}

/// Makes an empty store: the table first, then the page that says that it is one.
pub(crate) fn format(medium: &mut dyn Medium, layout: Layout) -> Result<(), FastTierError> {
    let first = Extent { offset: 0, bytes: PAGE_BYTES as u64 };
    medium.write(0, &[0; PAGE_BYTES])?;
    medium.flush(first)?;
    let zeros = vec![0; TABLE_PIECE as usize * ENTRY_BYTES];
    let table = Extent { offset: first.bytes, bytes: layout.data_offset - first.bytes };
    let mut offset = table.offset;
    while offset < layout.data_offset {
        let left = usize::try_from(layout.data_offset - offset).unwrap_or(usize::MAX);
        let piece = &zeros[..zeros.len().min(left)];
        medium.write(offset, piece)?;
        offset += piece.len() as u64;
    }
    medium.flush(table)?;
    medium.write(0, bytemuck::bytes_of(&layout.raw()))?;
    medium.flush(first)
}

/// Reads the table, in order.
pub(crate) fn read_table(
    medium: &dyn Medium,
    layout: Layout,
    mut visit: impl FnMut(u32, SlotState),
) -> Result<(), FastTierError> {
    let mut piece = vec![0; TABLE_PIECE as usize * ENTRY_BYTES];
    let mut index = 0;
    while index < layout.entries {
        let count = (layout.entries - index).min(TABLE_PIECE);
        let bytes = &mut piece[..count as usize * ENTRY_BYTES];
        medium.read(Layout::slot(index).offset, bytes)?;
        for line in bytes.chunks_exact(ENTRY_BYTES) {
            visit(index, parse(line, layout));
            index += 1;
        }
    }
    Ok(())
}

fn parse(line: &[u8], layout: Layout) -> SlotState {
    if line.iter().all(|byte| *byte == 0) {
        return SlotState::Free;
    }
    let mut raw: RawEntry = bytemuck::pod_read_unaligned(line);
    let stored = std::mem::replace(&mut raw.crc, 0.into());
    if stored.get() != block_crc(bytemuck::bytes_of(&raw)) || raw.state.get() != STATE_HELD {
        return SlotState::Torn;
    }
    let entry = Entry {
        generation: raw.generation.get(),
        digest: Digest::from_bytes(raw.digest),
        held: Held {
            payload_bytes: raw.payload_bytes.get(),
            write_id: WriteId::new(u128::from_le_bytes(raw.write_id)),
        },
        offset: raw.offset.get(),
    };
    let end = (entry.held.payload_bytes <= kv_chunk::MAX_PAYLOAD_BYTES)
        .then(|| entry.offset.checked_add(record_bytes(entry.held.payload_bytes)))
        .flatten();
    let inside =
        entry.offset >= layout.data_offset && end.is_some_and(|end| end <= layout.medium_bytes);
    if inside { SlotState::Held(entry) } else { SlotState::Torn }
}

/// Writes one slot of the table, and flushes it: from then on the chunk is there.
pub(crate) fn write_entry(
    medium: &mut dyn Medium,
    index: u32,
    entry: &Entry,
) -> Result<(), FastTierError> {
    let mut raw = RawEntry {
        crc: 0.into(),
        state: STATE_HELD.into(),
        generation: entry.generation.into(),
        digest: entry.digest.to_bytes(),
        write_id: entry.held.write_id.get().to_le_bytes(),
        offset: entry.offset.into(),
        payload_bytes: entry.held.payload_bytes.into(),
    };
    raw.crc = block_crc(bytemuck::bytes_of(&raw)).into();
    let slot = Layout::slot(index);
    medium.write(slot.offset, bytemuck::bytes_of(&raw))?;
    medium.flush(slot)
}

/// Empties one slot of the table, and flushes it: from then on the chunk's bytes may be overwritten.
pub(crate) fn clear_entry(medium: &mut dyn Medium, index: u32) -> Result<(), FastTierError> {
    let slot = Layout::slot(index);
    medium.write(slot.offset, &[0; ENTRY_BYTES])?;
    medium.flush(slot)
}

/// What stands where an entry says that its chunk begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    /// That chunk.
    Agrees,
    /// Something else.
    Differs,
    /// A header of a later version: left alone.
    Newer,
}

/// Looks at the header of an entry's chunk.
pub(crate) fn look_at_header(medium: &dyn Medium, entry: &Entry) -> Result<Header, FastTierError> {
    let mut bytes = vec![0; HEADER_BYTES];
    medium.read(entry.offset, &mut bytes)?;
    let agrees = |header: &ChunkHeader| {
        header.digest() == entry.digest
            && header.write_id() == entry.held.write_id
            && header.payload_bytes() == entry.held.payload_bytes
    };
    Ok(match ChunkHeader::parse(&bytes) {
        Ok(header) if agrees(&header) => Header::Agrees,
        Err(HeaderError::Version { .. }) => Header::Newer,
        _ => Header::Differs,
    })
}
