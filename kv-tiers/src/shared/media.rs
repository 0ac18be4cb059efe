//! The marker of the directory and the leader's lease, byte by byte; `docs/shared.md` draws them.

use bytemuck::{Pod, Zeroable};
use kv_chunk::{
    block_crc,
    le::{Le32, Le64},
};

pub(super) const VERSION: u32 = 1;
const MARKER_MAGIC: [u8; 8] = *b"KVBSHARE";
const LEASE_MAGIC: [u8; 8] = *b"KVBLEASE";

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    /// Written by a later version: left alone.
    Newer(u32),
    /// Not ours, or not whole.
    Damaged,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawMarker {
    magic: [u8; 8],
    version: Le32,
    crc: Le32,
    store: [u8; 16],
    fan_bits: Le32,
    reserved: [u8; 28],
}

/// What the directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Marker {
    /// Random, for those who compare.
    pub(super) store: [u8; 16],
}

const FAN_BITS: u32 = 12;
pub(super) const MARKER_BYTES: usize = size_of::<RawMarker>();
const _: () = assert!(MARKER_BYTES == 64 && align_of::<RawMarker>() == 1);

impl Marker {
    pub(super) fn encode(self) -> [u8; MARKER_BYTES] {
        let mut raw = RawMarker::zeroed();
        raw.magic = MARKER_MAGIC;
        raw.version = VERSION.into();
        raw.store = self.store;
        raw.fan_bits = FAN_BITS.into();
        raw.crc = block_crc(bytemuck::bytes_of(&raw)).into();
        bytemuck::cast(raw)
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Bad> {
        version_of(bytes, MARKER_MAGIC)?;
        let bytes: [u8; MARKER_BYTES] = bytes.try_into().map_err(|_| Bad::Damaged)?;
        let mut raw: RawMarker = bytemuck::cast(bytes);
        let crc = std::mem::replace(&mut raw.crc, 0.into());
        let is_ours = crc.get() == block_crc(bytemuck::bytes_of(&raw))
            && raw.fan_bits.get() == FAN_BITS
            && raw.reserved == [0; 28];
        if is_ours { Ok(Self { store: raw.store }) } else { Err(Bad::Damaged) }
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawLease {
    magic: [u8; 8],
    version: Le32,
    crc: Le32,
    node: Le64,
    generation: Le64,
    beat: Le64,
    ttl_ms: Le64,
    round: Le64,
    used_bytes: Le64,
    chunks: Le64,
    reserved: [u8; 56],
}

pub(super) const LEASE_BYTES: usize = size_of::<RawLease>();
const _: () = assert!(LEASE_BYTES == 128 && align_of::<RawLease>() == 1);

/// Who collects, and what the directory held when it was last counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lease {
    /// The leader; 0 if it left in order.
    pub(super) node: u64,
    /// Counts leaders.
    pub(super) generation: u64,
    /// Counts signs of life. Who sees no new one for `ttl_ms` by its own clock may take over: clocks of nodes are not
    /// compared.
    pub(super) beat: u64,
    pub(super) ttl_ms: u64,
    /// Counts how often the directory was counted.
    pub(super) round: u64,
    pub(super) used_bytes: u64,
    pub(super) chunks: u64,
}

impl Lease {
    pub(super) fn encode(self) -> [u8; LEASE_BYTES] {
        let mut raw = RawLease::zeroed();
        raw.magic = LEASE_MAGIC;
        raw.version = VERSION.into();
        raw.node = self.node.into();
        raw.generation = self.generation.into();
        raw.beat = self.beat.into();
        raw.ttl_ms = self.ttl_ms.into();
        raw.round = self.round.into();
        raw.used_bytes = self.used_bytes.into();
        raw.chunks = self.chunks.into();
        raw.crc = block_crc(bytemuck::bytes_of(&raw)).into();
        bytemuck::cast(raw)
    }

    /// Every version keeps magic, version, and the CRC of the whole file where they are: else one flipped bit of the
    /// version would leave a directory without a leader for ever.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Bad> {
        match version_of(bytes, LEASE_MAGIC) {
            Err(Bad::Newer(_)) if !is_whole(bytes) => return Err(Bad::Damaged),
            other => other?,
        }
        let bytes: [u8; LEASE_BYTES] = bytes.try_into().map_err(|_| Bad::Damaged)?;
        let mut raw: RawLease = bytemuck::cast(bytes);
        let crc = std::mem::replace(&mut raw.crc, 0.into());
        if crc.get() != block_crc(bytemuck::bytes_of(&raw)) || raw.reserved != [0; 56] {
            return Err(Bad::Damaged);
        }
        Ok(Self {
            node: raw.node.get(),
            generation: raw.generation.get(),
            beat: raw.beat.get(),
            ttl_ms: raw.ttl_ms.get(),
            round: raw.round.get(),
            used_bytes: raw.used_bytes.get(),
            chunks: raw.chunks.get(),
        })
    }
}

/// Whether bytes 12 to 15 are the CRC of all bytes, those zeroed.
fn is_whole(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    let Some(crc) = bytes.get_mut(12..16) else { return false };
    let told = [crc[0], crc[1], crc[2], crc[3]];
    crc.fill(0);
    u32::from_le_bytes(told) == block_crc(&bytes)
}

/// Magic and version come first and are read before all else, so that a later version may change all else.
fn version_of(bytes: &[u8], magic: [u8; 8]) -> Result<(), Bad> {
    let rest = bytes.strip_prefix(&magic).ok_or(Bad::Damaged)?;
    let version = rest.first_chunk::<4>().ok_or(Bad::Damaged)?;
    match u32::from_le_bytes(*version) {
        VERSION => Ok(()),
        newer if newer > VERSION => Err(Bad::Newer(newer)),
        _ => Err(Bad::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_any_flipped_bit_is_not() {
        let lease = Lease {
            node: 7,
            generation: 2,
            beat: 3,
            ttl_ms: 4,
            round: 5,
            used_bytes: 6,
            chunks: 1,
        };
        let marker = Marker { store: [9; 16] };
        assert_eq!(Lease::parse(&lease.encode()), Ok(lease));
        assert_eq!(Marker::parse(&marker.encode()), Ok(marker));
        for bit in 0..LEASE_BYTES * 8 {
            let mut bytes = lease.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Lease::parse(&bytes), Err(Bad::Damaged), "bit {bit}");
        }
        for bit in 0..MARKER_BYTES * 8 {
            let mut bytes = marker.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Marker::parse(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_later_version_is_told_from_damage_whatever_follows() {
        let mut bytes = Marker { store: [9; 16] }.encode().to_vec();
        bytes[8] = 2;
        bytes.push(1);
        assert_eq!(Marker::parse(&bytes), Err(Bad::Newer(2)));
        assert_eq!(Marker::parse(&bytes[..9]), Err(Bad::Damaged));
        assert_eq!(Lease::parse(b""), Err(Bad::Damaged));

        let mut bytes = Lease::default().encode().to_vec();
        bytes[8] = 2;
        bytes.extend([1; 50]);
        bytes[12..16].fill(0);
        let crc = block_crc(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Lease::parse(&bytes), Err(Bad::Newer(2)));
        assert_eq!(Lease::parse(&bytes[..100]), Err(Bad::Damaged), "it lost its end");
        assert_eq!(Lease::parse(&bytes[..14]), Err(Bad::Damaged));
    }
}
