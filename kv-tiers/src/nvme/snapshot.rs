//! The whole index in one file; `docs/journal.md` draws the bytes.
//!
//! It is written in sections while the store goes on: what changes meanwhile is in the journal of the same generation,
//! which begins before the first section is made.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use bytemuck::{Pod, Zeroable};
use kv_chunk::{
    block_crc,
    le::{Le32, Le64},
};

use crate::nvme::{
    index::{Index, Place, Segment},
    journal::{Identity, Kind, Told, Unusable},
    slots::{Slot, State},
};

const MAGIC: [u8; 8] = *b"KVBINDEX";
const VERSION: u32 = 1;
/// Bytes of an entry, of the header and of the head of a section.
pub(super) const ENTRY_BYTES: u64 = 64;
/// Slots that one section tells of at most: what is copied at a time.
const SECTION_SLOTS_MAX: u32 = 8192;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawSnapshot {
    magic: [u8; 8],
    version: Le32,
    header_crc: Le32,
    generation: Le64,
    store_uuid: [u8; 16],
    next_segment_id: Le64,
    reserved: [u8; 16],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawSection {
    section_crc: Le32,
    entries: Le32,
    entries_crc: Le32,
    /// Slots of the whole segment.
    slots: Le32,
    /// 0 in the last section, which has no entries.
    segment_id: Le64,
    record_bytes: Le64,
    first_slot: Le32,
    /// Slots told of; those without an entry are free.
    told: Le32,
    reserved: [u8; 24],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawEntry {
    kind: u8,
    queue: u8,
    hits: u8,
    reserved: u8,
    slot: Le32,
    payload_bytes: Le32,
    reserved_too: Le32,
    used_at: Le64,
    queued_at: Le64,
    digest: [u8; 16],
    write_id: [u8; 16],
}

const _: () = assert!(
    size_of::<RawSnapshot>() as u64 == ENTRY_BYTES
        && size_of::<RawSection>() as u64 == ENTRY_BYTES
        && size_of::<RawEntry>() as u64 == ENTRY_BYTES
);

impl RawSnapshot {
    fn own_crc(&self) -> u32 {
        block_crc(bytemuck::bytes_of(&Self { header_crc: 0.into(), ..*self }))
    }
}

impl RawSection {
    fn own_crc(&self) -> u32 {
        block_crc(bytemuck::bytes_of(&Self { section_crc: 0.into(), ..*self }))
    }
}

/// Most bytes of the snapshot of so many slots.
pub(super) fn bytes_max(slots: u64, segments: u64) -> u64 {
    let sections = segments + slots / u64::from(SECTION_SLOTS_MAX);
    ENTRY_BYTES * (2 + sections + slots)
}

/// The header block.
pub(super) fn encode_header(identity: Identity, next_segment_id: u64, out: &mut Vec<u8>) {
    let mut raw = RawSnapshot {
        magic: MAGIC,
        version: VERSION.into(),
        generation: identity.generation.into(),
        store_uuid: identity.store_uuid,
        next_segment_id: next_segment_id.into(),
        ..Zeroable::zeroed()
    };
    raw.header_crc = raw.own_crc().into();
    out.extend_from_slice(bytemuck::bytes_of(&raw));
}

/// Where the encoding of an index stands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    segment_id: u64,
    slot: u32,
}

/// Appends the next section. False: that was the last.
pub(super) fn encode_section(index: &Index, cursor: &mut Cursor, out: &mut Vec<u8>) -> bool {
    let Some(segment) = index.segment_from(cursor.segment_id) else {
        let mut end = RawSection::zeroed();
        end.section_crc = end.own_crc().into();
        out.extend_from_slice(bytemuck::bytes_of(&end));
        return false;
    };
    let geometry = segment.geometry;
    if geometry.segment_id != cursor.segment_id {
        *cursor = Cursor { segment_id: geometry.segment_id, slot: 0 };
    }
    let told = (geometry.slots - cursor.slot).min(SECTION_SLOTS_MAX);
    encode_slots(segment, cursor.slot, told, out);
    cursor.slot += told;
    if cursor.slot == geometry.slots {
        *cursor = Cursor { segment_id: geometry.segment_id + 1, slot: 0 };
    }
    true
}

fn encode_slots(segment: &Segment, first_slot: u32, told: u32, out: &mut Vec<u8>) {
    let head_at = out.len();
    out.extend_from_slice(bytemuck::bytes_of(&RawSection::zeroed()));
    let from = first_slot as usize;
    let slots = segment.slots.get(from..from + told as usize).unwrap_or_default();
    for (number, slot) in (first_slot..).zip(slots).filter(|(_, slot)| slot.state != State::Free) {
        out.extend_from_slice(bytemuck::bytes_of(&entry(number, slot)));
    }
    let entries = &out[head_at + size_of::<RawSection>()..];
    let mut head = RawSection {
        entries: u32::try_from(entries.len() / size_of::<RawEntry>()).unwrap_or(0).into(),
        entries_crc: block_crc(entries).into(),
        slots: segment.geometry.slots.into(),
        segment_id: segment.geometry.segment_id.into(),
        record_bytes: segment.geometry.record_bytes.into(),
        first_slot: first_slot.into(),
        told: told.into(),
        ..Zeroable::zeroed()
    };
    head.section_crc = head.own_crc().into();
    out[head_at..head_at + size_of::<RawSection>()].copy_from_slice(bytemuck::bytes_of(&head));
}

fn entry(number: u32, slot: &Slot) -> RawEntry {
    let kind = Kind::of(slot.state);
    let told = Told::of(slot);
    let raw = RawEntry {
        kind: kind as u8,
        queue: told.queue,
        slot: number.into(),
        payload_bytes: told.payload_bytes.into(),
        used_at: told.used_at.into(),
        digest: told.digest,
        write_id: told.write_id,
        ..Zeroable::zeroed()
    };
    if kind != Kind::Chunk {
        return raw;
    }
    RawEntry { hits: slot.hits, queued_at: slot.queued_at.into(), ..raw }
}

impl RawEntry {
    fn slot(&self) -> Slot {
        let told = Told {
            queue: self.queue,
            payload_bytes: self.payload_bytes.get(),
            used_at: self.used_at.get(),
            digest: self.digest,
            write_id: self.write_id,
        };
        let slot = told.slot(Kind::parse(self.kind));
        if slot.state != State::Live {
            return slot;
        }
        Slot { hits: self.hits, queued_at: self.queued_at.get(), ..slot }
    }
}

/// A snapshot being read.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) identity: Identity,
    next_segment_id: u64,
    bytes: Vec<u8>,
}

/// Reads a snapshot; rejects, never panics.
pub(super) fn read(path: &Path) -> Result<Read, Unusable> {
    let is_file = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file());
    let bytes = is_file.then(|| fs::read(path).ok()).flatten();
    let bytes = bytes.ok_or(Unusable::Damaged("unreadable"))?;
    let header = bytes.get(..size_of::<RawSnapshot>()).ok_or(Unusable::Damaged("too short"))?;
    let raw: &RawSnapshot = bytemuck::from_bytes(header);
    if raw.magic != MAGIC {
        return Err(Unusable::Damaged("magic"));
    }
    if raw.version.get() > VERSION {
        return Err(Unusable::Newer(raw.version.get()));
    }
    if raw.version.get() != VERSION || raw.header_crc.get() != raw.own_crc() {
        return Err(Unusable::Damaged("checksum"));
    }
    let identity = Identity { store_uuid: raw.store_uuid, generation: raw.generation.get() };
    Ok(Read { identity, next_segment_id: raw.next_segment_id.get(), bytes })
}

impl Read {
    /// Fills the slots of the segments that are there. False: a part was damaged; what it told of is not filled.
    pub(super) fn apply(&self, index: &mut Index) -> bool {
        index.reserve_ids_to(self.next_segment_id.saturating_sub(1));
        let mut rest = self.bytes.get(size_of::<RawSnapshot>()..).unwrap_or_default();
        loop {
            let Some((head, behind)) = rest.split_at_checked(size_of::<RawSection>()) else {
                return false;
            };
            let head: &RawSection = bytemuck::from_bytes(head);
            if head.section_crc.get() != head.own_crc() {
                return false;
            }
            if head.segment_id.get() == 0 {
                return behind.is_empty();
            }
            let bytes = head.entries.get() as usize * size_of::<RawEntry>();
            let Some((entries, behind)) = behind.split_at_checked(bytes) else { return false };
            if head.entries_crc.get() != block_crc(entries) {
                return false;
            }
            apply_section(head, bytemuck::cast_slice(entries), index);
            rest = behind;
        }
    }
}

fn apply_section(head: &RawSection, entries: &[RawEntry], index: &mut Index) {
    let Some(row) = index.row_of(head.segment_id.get()) else { return };
    let Some(geometry) = index.segment(row).map(|segment| segment.geometry) else { return };
    let fits = geometry.record_bytes == head.record_bytes.get()
        && geometry.slots == head.slots.get()
        && head.first_slot.get().checked_add(head.told.get()) <= Some(geometry.slots);
    if !fits {
        return;
    }
    for entry in entries {
        index.recover(Place { row, slot: entry.slot.get() }, entry.slot());
    }
    index.recover_told(row, head.told.get());
}

/// A snapshot being written under a temporary name.
#[derive(Debug)]
pub(super) struct Writer {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
}

impl Writer {
    pub(super) fn create(path: &Path, temporary: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(temporary)?;
        Ok(Self { file, temporary: temporary.to_owned(), path: path.to_owned() })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Gives it its name: from now on it counts.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let temporary = std::mem::take(&mut self.temporary);
        let renamed = fs::rename(&temporary, &self.path);
        if renamed.is_err() {
            self.temporary = temporary;
        }
        renamed
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.temporary.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
