//! What changed in the index since its snapshot, record by record; `docs/journal.md` draws the bytes.
//!
//! A record says the state of one slot or segment whole, so reading one twice changes nothing, and its checksum covers
//! the checksum of the one before: a record that is torn, missing or of another journal ends the journal.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use bytemuck::{Pod, Zeroable};
use kv_chunk::{
    Digest, WriteId, block_crc,
    le::{Le32, Le64},
};

use crate::{
    Held,
    nvme::{
        segment::Geometry,
        slots::{Queue, Slot, State},
    },
};

const MAGIC: [u8; 8] = *b"KVBJRNAL";
pub(super) const VERSION: u32 = 1;
/// Bytes of a record, and of the header of a file.
pub(super) const RECORD_BYTES: u64 = 64;
/// Largest journal read.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    SegmentAdded = 1,
    SegmentRemoved = 2,
    /// Its header is zero.
    Free = 3,
    /// In doubt: its header tells.
    Check = 4,
    /// Its header is to be overwritten.
    Wipe = 5,
    Chunk = 6,
}

impl Kind {
    pub(super) fn parse(byte: u8) -> Option<Self> {
        [Self::SegmentAdded, Self::SegmentRemoved, Self::Free, Self::Check, Self::Wipe, Self::Chunk]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }

    pub(super) fn of(state: State) -> Self {
        match state {
            State::Free => Self::Free,
            State::Live => Self::Chunk,
            State::Writing | State::Quarantined => Self::Check,
            State::Doomed | State::Wiping => Self::Wipe,
        }
    }
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Change {
    crc: Le32,
    kind: u8,
    queue: u8,
    reserved: [u8; 2],
    segment_id: Le64,
    /// Of a segment: how many.
    slot: Le32,
    payload_bytes: Le32,
    /// Of a segment: bytes of a slot.
    used_at: Le64,
    digest: [u8; 16],
    write_id: [u8; 16],
}

const _: () = assert!(size_of::<Change>() as u64 == RECORD_BYTES && align_of::<Change>() == 1);

impl Change {
    pub(super) fn segment_added(geometry: &Geometry) -> Self {
        Self {
            slot: geometry.slots.into(),
            used_at: geometry.record_bytes.into(),
            ..Self::new(Kind::SegmentAdded, geometry.segment_id)
        }
    }

    pub(super) fn segment_removed(segment_id: u64) -> Self {
        Self::new(Kind::SegmentRemoved, segment_id)
    }

    pub(super) fn of_slot(segment_id: u64, number: u32, slot: &Slot) -> Self {
        let told = Told::of(slot);
        Self {
            slot: number.into(),
            queue: told.queue,
            payload_bytes: told.payload_bytes.into(),
            used_at: told.used_at.into(),
            digest: told.digest,
            write_id: told.write_id,
            ..Self::new(Kind::of(slot.state), segment_id)
        }
    }

    fn new(kind: Kind, segment_id: u64) -> Self {
        Self { kind: kind as u8, segment_id: segment_id.into(), ..Self::zeroed() }
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        Kind::parse(self.kind)
    }

    pub(super) fn segment_id(&self) -> u64 {
        self.segment_id.get()
    }

    pub(super) fn slot_number(&self) -> u32 {
        self.slot.get()
    }

    /// Whether it is about a segment that is cut like this one.
    pub(super) fn is_of(&self, geometry: &Geometry) -> bool {
        self.segment_id.get() == geometry.segment_id
            && self.slot.get() == geometry.slots
            && self.used_at.get() == geometry.record_bytes
    }

    /// The slot as this record leaves it.
    pub(super) fn slot(&self) -> Slot {
        let told = Told {
            queue: self.queue,
            payload_bytes: self.payload_bytes.get(),
            used_at: self.used_at.get(),
            digest: self.digest,
            write_id: self.write_id,
        };
        told.slot(self.kind())
    }

    fn own_crc(&self, chain: u32) -> u32 {
        block_crc(bytemuck::bytes_of(&Self { crc: chain.into(), ..*self }))
    }
}

/// What both kinds of index files tell of a slot besides its [`Kind`]; zeros where it holds no chunk.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) queue: u8,
    pub(super) payload_bytes: u32,
    pub(super) used_at: u64,
    pub(super) digest: [u8; 16],
    pub(super) write_id: [u8; 16],
}

impl Told {
    pub(super) fn of(slot: &Slot) -> Self {
        if Kind::of(slot.state) != Kind::Chunk {
            return Self::default();
        }
        let held = slot.held();
        Self {
            queue: slot.queue as u8,
            payload_bytes: u32::try_from(held.payload_bytes).unwrap_or(u32::MAX),
            used_at: slot.used_at,
            digest: slot.digest.to_bytes(),
            write_id: held.write_id.get().to_le_bytes(),
        }
    }

    /// The slot; of an unknown kind it is in doubt.
    pub(super) fn slot(&self, kind: Option<Kind>) -> Slot {
        match kind {
            Some(Kind::Chunk) => {}
            Some(Kind::Free) => return Slot::in_state(State::Free),
            Some(Kind::Wipe) => return Slot::in_state(State::Wiping),
            _ => return Slot::in_state(State::Quarantined),
        }
        let write_id = WriteId::new(u128::from_le_bytes(self.write_id));
        let held = Held { payload_bytes: u64::from(self.payload_bytes), write_id };
        let queue = if self.queue == Queue::Main as u8 { Queue::Main } else { Queue::Small };
        let slot = Slot::live(Digest::from_bytes(self.digest), held, self.used_at);
        Slot { queue, ..slot }
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawJournal {
    magic: [u8; 8],
    version: Le32,
    header_crc: Le32,
    generation: Le64,
    store_uuid: [u8; 16],
    /// Checksum of the last record of the journal before this one; 0 if there is none.
    previous_chain: Le32,
    reserved: [u8; 20],
}

const _: () =
    assert!(size_of::<RawJournal>() as u64 == RECORD_BYTES && align_of::<RawJournal>() == 1);

impl RawJournal {
    fn own_crc(&self) -> u32 {
        block_crc(bytemuck::bytes_of(&Self { header_crc: 0.into(), ..*self }))
    }
}

/// Which journal of which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) store_uuid: [u8; 16],
    pub(super) generation: u64,
}

/// Why an index file is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// Written by a later version: left alone.
    Newer(u32),
    Damaged(&'static str),
}

/// A journal being written.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    bytes: u64,
    chain: u32,
    buffer: Vec<u8>,
}

impl Journal {
    pub(super) fn create(path: &Path, identity: Identity, previous_chain: u32) -> io::Result<Self> {
        let mut raw = RawJournal {
            magic: MAGIC,
            version: VERSION.into(),
            generation: identity.generation.into(),
            store_uuid: identity.store_uuid,
            previous_chain: previous_chain.into(),
            ..Zeroable::zeroed()
        };
        raw.header_crc = raw.own_crc().into();
        let file = options().create(true).truncate(true).open(path)?;
        file.write_all_at(bytemuck::bytes_of(&raw), 0)?;
        let chain = raw.header_crc.get();
        Ok(Self { file, path: path.to_owned(), bytes: RECORD_BYTES, chain, buffer: Vec::new() })
    }

    /// Goes on behind the last good record of a journal that was read.
    pub(super) fn resume(path: &Path, read: &Read) -> io::Result<Self> {
        let file = options().open(path)?;
        let bytes = RECORD_BYTES * (1 + read.changes.len() as u64);
        file.set_len(bytes)?;
        Ok(Self { file, path: path.to_owned(), bytes, chain: read.chain, buffer: Vec::new() })
    }

    /// Writes records; they are with the system when this returns. Empties `changes`.
    pub(super) fn append(&mut self, changes: &mut Vec<Change>) -> io::Result<()> {
        self.buffer.clear();
        let mut chain = self.chain;
        for mut change in changes.drain(..) {
            chain = change.own_crc(chain);
            change.crc = chain.into();
            self.buffer.extend_from_slice(bytemuck::bytes_of(&change));
        }
        self.file.write_all_at(&self.buffer, self.bytes)?;
        self.bytes += self.buffer.len() as u64;
        self.chain = chain;
        Ok(())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Checksum of its last record.
    pub(super) fn chain(&self) -> u32 {
        self.chain
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options
}

/// What a journal says.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) identity: Identity,
    pub(super) previous_chain: u32,
    pub(super) changes: Vec<Change>,
    /// Checksum of the last good record.
    pub(super) chain: u32,
    /// Bytes behind it: a record that was cut off, or more.
    pub(super) torn_bytes: u64,
}

/// Reads a journal up to its first bad record; rejects, never panics.
pub(super) fn read(path: &Path) -> Result<Read, Unusable> {
    let length = fs::symlink_metadata(path).map_or(u64::MAX, |metadata| metadata.len());
    if length > FILE_BYTES_MAX {
        return Err(Unusable::Damaged("unreadable, or too long"));
    }
    let bytes = fs::read(path).map_err(|_| Unusable::Damaged("unreadable"))?;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Result<Read, Unusable> {
    let (header, mut rest) = bytes
        .split_at_checked(size_of::<RawJournal>())
        .ok_or(Unusable::Damaged("shorter than its header"))?;
    let raw: &RawJournal = bytemuck::from_bytes(header);
    if raw.magic != MAGIC {
        return Err(Unusable::Damaged("magic"));
    }
    if raw.version.get() > VERSION {
        return Err(Unusable::Newer(raw.version.get()));
    }
    if raw.version.get() != VERSION || raw.header_crc.get() != raw.own_crc() {
        return Err(Unusable::Damaged("checksum"));
    }
    let mut chain = raw.header_crc.get();
    let mut changes = Vec::with_capacity(rest.len() / size_of::<Change>());
    while let Some((record, behind)) = rest.split_at_checked(size_of::<Change>()) {
        let change: Change = *bytemuck::from_bytes(record);
        if change.crc.get() != change.own_crc(chain) || change.kind().is_none() {
            break;
        }
        chain = change.crc.get();
        changes.push(change);
        rest = behind;
    }
    Ok(Read {
        identity: Identity { store_uuid: raw.store_uuid, generation: raw.generation.get() },
        previous_chain: raw.previous_chain.get(),
        changes,
        chain,
        torn_bytes: rest.len() as u64,
    })
}
