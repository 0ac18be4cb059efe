//! Headers: round trips, and every kind of damage seen.

use kv_chunk::{
    BLOCK_BYTES, ChunkHeader, ChunkKey, HEADER_BYTES, HeaderError, MAX_PAYLOAD_BYTES, WriteId,
    block_crc,
};
use proptest::{collection::vec, prelude::*};

use crate::oracle::{self, Random, check_parser, header_bytes, seal, seal_key};

/// The identity used where a test does not care.
pub(crate) const WRITE_ID: WriteId = WriteId::new(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210);

fn key(salt: &[u8]) -> ChunkKey {
    ChunkKey::new(&oracle::namespace(1), 3, 1, &[5; 32], salt).unwrap()
}

fn written(payload: &[u8]) -> ChunkHeader {
    ChunkHeader::new(&key(b""), WRITE_ID, payload).unwrap()
}

/// A valid header with one change behind a right checksum and digest.
fn sealed(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = written(b"payload").as_bytes().to_vec();
    change(&mut bytes);
    seal_key(&mut bytes);
    bytes
}

fn refusal(bytes: &[u8]) -> HeaderError {
    assert!(!check_parser(bytes));
    ChunkHeader::parse(bytes).unwrap_err()
}

#[test]
fn a_newer_version_is_told_from_damage() {
    for version in [0, 2, 900] {
        let bytes = sealed(|bytes| bytes[8..12].copy_from_slice(&u32::to_le_bytes(version)));
        assert_eq!(refusal(&bytes), HeaderError::Version { version });
    }
    let mut damaged = written(b"payload").as_bytes().to_vec();
    damaged[8] = 2;
    assert_eq!(refusal(&damaged), HeaderError::HeaderCrc);
}

#[test]
fn foreign_bytes_are_no_chunk() {
    assert_eq!(refusal(&[0; HEADER_BYTES]), HeaderError::Magic);
    assert_eq!(refusal(&[0xff; HEADER_BYTES]), HeaderError::Magic);
    assert_eq!(refusal(&[]), HeaderError::Truncated { bytes: 0 });
}

#[test]
fn impossible_fields_are_refused_by_name() {
    let field = |field| HeaderError::Field { field };
    assert_eq!(refusal(&sealed(|b| b[56] = 1)), field("block_bytes"));
    let too_large = MAX_PAYLOAD_BYTES + 1;
    assert_eq!(
        refusal(&sealed(|b| b[48..56].copy_from_slice(&too_large.to_le_bytes()))),
        field("payload_bytes")
    );
    assert_eq!(refusal(&sealed(|b| b[61] = 0xff)), field("key_bytes"));
    assert_eq!(refusal(&sealed(|b| b[60] -= 1)), field("key"));
    assert_eq!(refusal(&sealed(|b| b[62] = 1)), field("reserved bytes"));
    assert_eq!(refusal(&sealed(|b| b[64] = 1)), field("reserved bytes"));
    assert_eq!(refusal(&sealed(|b| b[127] = 1)), field("reserved bytes"));
    assert_eq!(refusal(&sealed(|b| b[2047] = 1)), field("reserved bytes"));
    assert_eq!(refusal(&sealed(|b| b[2052] = 1)), field("block_crcs"));
    let mut wrong_digest = written(b"payload").as_bytes().to_vec();
    wrong_digest[16] ^= 1;
    seal(&mut wrong_digest);
    assert_eq!(refusal(&wrong_digest), field("digest"));
}

#[test]
fn every_flipped_bit_of_a_header_is_seen() {
    let bytes = written(b"payload").as_bytes().to_vec();
    for bit in 0..HEADER_BYTES * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(ChunkHeader::parse(&damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn every_truncation_of_a_header_is_seen() {
    let bytes = written(b"payload").as_bytes().to_vec();
    for cut in 0..HEADER_BYTES {
        assert_eq!(
            ChunkHeader::parse(&bytes[..cut]).unwrap_err(),
            HeaderError::Truncated { bytes: cut }
        );
    }
}

#[test]
fn another_chunks_header_is_seen() {
    let header = ChunkHeader::parse(written(b"payload").as_bytes()).unwrap();
    assert_eq!(header.verify_key(&key(b"")), Ok(()));
    assert_eq!(header.verify_key(&key(b"other tenant")), Err(HeaderError::Key));
}

#[test]
fn an_empty_payload_is_a_chunk() {
    let header = written(b"");
    assert!(check_parser(header.as_bytes()));
    assert_eq!((header.blocks(), header.verify_payload(b"")), (0, Ok(())));
    assert!(header.verify_payload(b"x").is_err());
}

#[test]
fn a_payload_that_does_not_fit_is_refused() {
    let bytes = MAX_PAYLOAD_BYTES + 1;
    let payload = vec![0; usize::try_from(bytes).unwrap()];
    assert_eq!(
        ChunkHeader::new(&key(b""), WRITE_ID, &payload).unwrap_err(),
        HeaderError::PayloadTooLarge { bytes }
    );
}

#[test]
fn blocks_are_verified_only_whole_and_in_their_place() {
    let payload = Random(1).bytes(2 * BLOCK_BYTES + 100);
    let header = written(&payload);
    let (first, second, last) = (
        &payload[..BLOCK_BYTES],
        &payload[BLOCK_BYTES..2 * BLOCK_BYTES],
        &payload[2 * BLOCK_BYTES..],
    );
    assert_eq!(header.verify_blocks(0, first), Ok(()));
    assert_eq!(header.verify_blocks(1, second), Ok(()));
    assert_eq!(header.verify_blocks(1, &payload[BLOCK_BYTES..]), Ok(()));
    assert_eq!(header.verify_blocks(2, last), Ok(()));
    assert_eq!(header.verify_blocks(1, first), Err(HeaderError::BlockCrc { block: 1 }));
    for (first_block, bytes) in
        [(0, last), (2, first), (3, last), (u32::MAX, first), (1, &second[1..])]
    {
        let refused = header.verify_blocks(first_block, bytes).unwrap_err();
        assert!(matches!(refused, HeaderError::PayloadLength { .. }), "{refused}");
    }
}

#[test]
fn checksums_are_crc32c() {
    // RFC 3720, appendix B.4.
    assert_eq!(block_crc(&[0; 32]), 0x8a91_36aa);
    assert_eq!(block_crc(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(block_crc(b"123456789"), 0xe306_9283);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_header_comes_back_as_it_was_written(
        seed: u64,
        payload_bytes in prop_oneof![0..5000_usize, (0..3_usize, 0..3_usize).prop_map(|(blocks, over)| {
            (blocks * BLOCK_BYTES + over).saturating_sub(1)
        })],
        write_id: u128,
        hash in vec(any::<u8>(), 8..=64),
        salt in vec(any::<u8>(), 0..100),
        extra in 0..3_usize,
    ) {
        let key = ChunkKey::new(&oracle::namespace(extra), 1, 0, &hash, &salt).unwrap();
        let payload = Random(seed).bytes(payload_bytes);
        let written = ChunkHeader::new(&key, WriteId::new(write_id), &payload).unwrap();
        let crcs: Vec<u32> = payload.chunks(BLOCK_BYTES).map(block_crc).collect();
        let expected = header_bytes(key.canonical(), write_id, payload.len() as u64, &crcs);
        prop_assert!(written.as_bytes() == expected);
        prop_assert!(check_parser(written.as_bytes()));
        let read = ChunkHeader::parse(written.as_bytes()).unwrap();
        prop_assert_eq!(read.write_id().get(), write_id);
        prop_assert_eq!(read.payload_bytes(), payload.len() as u64);
        prop_assert_eq!(read.blocks() as usize, crcs.len());
        prop_assert_eq!(read.verify_key(&key), Ok(()));
        prop_assert_eq!(read.verify_payload(&payload), Ok(()));
    }

    #[test]
    fn a_flipped_bit_of_a_payload_is_seen_in_its_block(
        seed: u64,
        payload_bytes in 1..2 * BLOCK_BYTES + 9,
        at: prop::sample::Index,
        bit in 0..8_u32,
    ) {
        let mut payload = Random(seed).bytes(payload_bytes);
        let header = written(&payload);
        let at = at.index(payload.len());
        payload[at] ^= 1_u8 << bit;
        let block = u32::try_from(at / BLOCK_BYTES).unwrap();
        prop_assert_eq!(header.verify_payload(&payload), Err(HeaderError::BlockCrc { block }));
    }

    #[test]
    fn a_payload_of_another_length_is_refused(payload_bytes in 1..9000_usize, cut: prop::sample::Index) {
        let mut payload = Random(1).bytes(payload_bytes);
        let header = written(&payload);
        let short = &payload[..cut.index(payload_bytes)];
        let refused = header.verify_payload(short);
        let is_length = matches!(refused, Err(HeaderError::PayloadLength { .. }));
        prop_assert!(is_length);
        payload.push(0);
        prop_assert!(header.verify_payload(&payload).is_err());
    }

    #[test]
    fn random_bytes_are_no_header(bytes in vec(any::<u8>(), 0..2 * HEADER_BYTES)) {
        prop_assert!(!check_parser(&bytes));
    }
}
