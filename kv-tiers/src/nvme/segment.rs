//! The header block of a segment file; `docs/segment.md` draws it.

use bytemuck::{Pod, Zeroable};
use kv_chunk::{
    HEADER_BYTES, MAX_PAYLOAD_BYTES, block_crc,
    le::{Le32, Le64},
};

use crate::record_bytes;

/// Alignment of every offset, length and buffer.
pub(super) const BLOCK: u64 = 4096;
/// Bytes of a block in memory.
pub(super) const BLOCK_LEN: usize = 4096;

const MAGIC: [u8; 8] = *b"KVBSEGMT";
const VERSION: u32 = 1;

/// One aligned block in memory, as O_DIRECT demands.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(4096))]
pub(super) struct Page(pub(super) [u8; BLOCK_LEN]);

impl Page {
    pub(super) fn zeroed() -> Box<Self> {
        bytemuck::zeroed_box()
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawSegment {
    magic: [u8; 8],
    version: Le32,
    header_crc: Le32,
    segment_id: Le64,
    store_uuid: [u8; 16],
    record_bytes: Le64,
    first_slot_offset: Le64,
    slots: Le32,
    flags: Le32,
    reserved: [u8; 4032],
}

const _: () = assert!(size_of::<RawSegment>() == BLOCK_LEN && align_of::<RawSegment>() == 1);

/// Which segment this is and how it is cut into slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) segment_id: u64,
    pub(super) store_uuid: [u8; 16],
    /// Bytes of one slot: header, payload, padding to 4 KiB.
    pub(super) record_bytes: u64,
    pub(super) slots: u32,
}

/// Why a block is not the header of a segment we can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotASegment {
    /// Something else: not ours to touch.
    Foreign,
    /// Written by a later version: left alone.
    Newer(u32),
    /// Ours, but not whole.
    Damaged(&'static str),
}

impl Geometry {
    /// Length of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        BLOCK + self.record_bytes * u64::from(self.slots)
    }

    /// Where slot number `slot` begins.
    pub(super) fn slot_offset(&self, slot: u32) -> u64 {
        BLOCK + self.record_bytes * u64::from(slot)
    }

    /// Most bytes that the file is counted with. A file system also counts the blocks that list the file's extents:
    /// slots are written in any order, so each can need two extents, and the lists can be half full.
    pub(super) fn bound_bytes(&self) -> u64 {
        let extents = 2 * u64::from(self.slots) + self.file_bytes() / (128 << 20) + 8;
        self.file_bytes() + BLOCK * (2 + extents / 170)
    }

    /// The header block.
    pub(super) fn encode(&self) -> Box<Page> {
        let mut raw = RawSegment::zeroed();
        raw.magic = MAGIC;
        raw.version = VERSION.into();
        raw.segment_id = self.segment_id.into();
        raw.store_uuid = self.store_uuid;
        raw.record_bytes = self.record_bytes.into();
        raw.first_slot_offset = BLOCK.into();
        raw.slots = self.slots.into();
        raw.header_crc = raw.own_crc().into();
        let mut page = Page::zeroed();
        page.0.copy_from_slice(bytemuck::bytes_of(&raw));
        page
    }

    /// Reads a header block; rejects, never panics.
    pub(super) fn parse(page: &Page) -> Result<Self, NotASegment> {
        let raw: &RawSegment = bytemuck::from_bytes(&page.0);
        if raw.magic != MAGIC {
            return Err(NotASegment::Foreign);
        }
        if raw.version.get() > VERSION {
            return Err(NotASegment::Newer(raw.version.get()));
        }
        if raw.version.get() != VERSION {
            return Err(NotASegment::Damaged("version"));
        }
        if raw.header_crc.get() != raw.own_crc() {
            return Err(NotASegment::Damaged("checksum"));
        }
        let record = raw.record_bytes.get();
        let largest = record_bytes(MAX_PAYLOAD_BYTES);
        if !record.is_multiple_of(BLOCK) || !(HEADER_BYTES as u64..=largest).contains(&record) {
            return Err(NotASegment::Damaged("record_bytes"));
        }
        if raw.first_slot_offset.get() != BLOCK {
            return Err(NotASegment::Damaged("first_slot_offset"));
        }
        if raw.slots.get() == 0 {
            return Err(NotASegment::Damaged("slots"));
        }
        if raw.flags.get() != 0 || raw.reserved.iter().any(|&byte| byte != 0) {
            return Err(NotASegment::Damaged("flags"));
        }
        Ok(Self {
            segment_id: raw.segment_id.get(),
            store_uuid: raw.store_uuid,
            record_bytes: record,
            slots: raw.slots.get(),
        })
    }
}

impl RawSegment {
    /// CRC-32C of the block with its checksum field zeroed.
    fn own_crc(&self) -> u32 {
        let mut copy = *self;
        copy.header_crc = 0.into();
        block_crc(bytemuck::bytes_of(&copy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry { segment_id: 7, store_uuid: [9; 16], record_bytes: 12_288, slots: 5 }
    }

    #[test]
    fn a_header_reads_back() {
        assert_eq!(Geometry::parse(&geometry().encode()), Ok(geometry()));
    }

    #[test]
    fn every_changed_byte_is_seen() {
        for at in 0..BLOCK_LEN {
            let mut page = geometry().encode();
            page.0[at] ^= 1;
            assert!(Geometry::parse(&page).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_later_version_is_told_from_damage() {
        let mut page = geometry().encode();
        page.0[8] = 9;
        assert_eq!(Geometry::parse(&page), Err(NotASegment::Newer(9)));
    }

    #[test]
    fn impossible_values_with_a_valid_checksum_are_rejected() {
        for broken in [
            Geometry { record_bytes: 0, ..geometry() },
            Geometry { record_bytes: 4097, ..geometry() },
            Geometry { record_bytes: u64::MAX - 4095, ..geometry() },
            Geometry { slots: 0, ..geometry() },
        ] {
            assert!(matches!(Geometry::parse(&broken.encode()), Err(NotASegment::Damaged(_))));
        }
    }
}
