//! Files written by version 1, kept for ever: this version still writes and reads exactly these bytes.

use kv_chunk::{BLOCK_BYTES, ChunkHeader, ChunkKey, HEADER_BYTES, KeyParts};

use crate::{
    header::WRITE_ID,
    keys::longest_namespace,
    oracle::{self, Random, check_parser},
};

/// Writes the chunk again, compares it with the file, and reads the file.
fn check(file: &[u8], key: &ChunkKey, payload: &[u8]) {
    let written = ChunkHeader::new(key, WRITE_ID, payload).unwrap();
    assert!(
        written.as_bytes() == &file[..HEADER_BYTES],
        "version 1 is written differently: give it a new version"
    );
    assert!(check_parser(file));
    let read = ChunkHeader::parse(file).unwrap();
    assert_eq!(read.verify_key(key), Ok(()));
    assert_eq!(read.verify_payload(payload), Ok(()));
    assert_eq!(read.write_id(), WRITE_ID);
}

#[test]
fn a_small_chunk() {
    let file = include_bytes!("../golden/v1/small.chunk");
    let key = ChunkKey::new(&oracle::namespace(0), 0, 0, &[0xa5; 8], b"").unwrap();
    check(file, &key, &Random(1).bytes(100));
    assert_eq!(file[HEADER_BYTES..], Random(1).bytes(100));
}

#[test]
fn a_header_of_several_blocks() {
    let file = include_bytes!("../golden/v1/multi-block.header");
    let key =
        ChunkKey::new(&oracle::namespace(2), 0x0402_0402, 1, &[0x5a; 32], b"tenant-7").unwrap();
    check(file, &key, &Random(2).bytes(2 * BLOCK_BYTES + 4097));
}

#[test]
fn a_key_that_fills_its_area() {
    let file = include_bytes!("../golden/v1/long-key.header");
    let namespace = longest_namespace();
    let key = ChunkKey::new(&namespace, 0, 0, &[0x3c; 32], b"").unwrap();
    check(file, &key, b"");
    assert_eq!(KeyParts::parse(key.canonical()).unwrap().namespace, namespace);
}

#[test]
fn digests_do_not_change() {
    let key = ChunkKey::new(&oracle::namespace(0), 0, 0, &[0xa5; 8], b"").unwrap();
    assert_eq!(key.digest().to_string(), "0a954c8fcc5b848fdae34324a698a0ba");
    // XXH3-128 of nothing, from the algorithm's own test vectors, little-endian.
    assert_eq!(kv_chunk::Digest::of(b"").to_string(), "7f498d4624c30160d8984701d306aa99");
}
