//! CRC-32C of payload blocks.

/// Bytes of one checksummed payload block: 1 MiB. The last block of a payload may be shorter.
pub const BLOCK_BYTES: usize = 1 << 20;

/// Number of blocks of a payload of `payload_bytes`; an empty payload has none.
pub const fn block_count(payload_bytes: u64) -> u64 {
    payload_bytes.div_ceil(BLOCK_BYTES as u64)
}

/// CRC-32C (Castagnoli, reflected, as in RFC 3720 appendix B.4) of one block.
pub fn block_crc(block: &[u8]) -> u32 {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, block);
    u32::try_from(crc).expect("a 32-bit CRC fits 32 bits")
}
