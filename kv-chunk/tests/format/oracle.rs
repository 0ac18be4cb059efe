//! A second, plain implementation of `docs/format.md`, a generator of valid headers, and what must hold of any bytes.
//!
//! The fuzz target compiles this very file, so that the fuzzer and the tests ask the same questions.

use kv_chunk::{
    BLOCK_BYTES, ChunkHeader, ChunkKey, Digest, HEADER_BYTES, KeyParts, KeySpace, MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES, Namespace, block_count, block_crc,
};

/// SplitMix64: reproducible bytes from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number that fits 32 bits, below `bound`.
    pub(crate) fn small(&mut self, bound: u32) -> u32 {
        u32::try_from(self.next() % u64::from(bound)).expect("below a u32")
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).expect("below a usize")
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(count);
        bytes
    }
}

/// A valid namespace; `extra` pairs go into `Namespace::extra`.
pub(crate) fn namespace(extra: usize) -> Namespace {
    Namespace {
        model: "example/model-8b".into(),
        weights: "rev-1".into(),
        dtype: "bf16".into(),
        layout: "NHD".into(),
        chunk_tokens: 256,
        serde: "raw".into(),
        hash_algorithm: "blake3".into(),
        hash_seed: "none".into(),
        tensor_parallel: 4,
        pipeline_parallel: 2,
        context_parallel: 1,
        engine: "vllm".into(),
        engine_major: 0,
        extra: (0..extra).map(|i| (format!("name-{i}"), format!("value-{i}"))).collect(),
    }
}

/// A valid header of a random key and size, with random block checksums.
pub(crate) fn any_header(random: &mut Random) -> Vec<u8> {
    let space = KeySpace::new(&namespace(random.below(3))).expect("valid");
    let hash_bytes = 8 + random.below(57);
    let (hash, salt_bytes) = (random.bytes(hash_bytes), random.below(200));
    let salt = random.bytes(salt_bytes);
    let key = space.key(random.small(64), random.small(4), &hash, &salt).expect("valid");
    let sizes = [
        0,
        1,
        BLOCK_BYTES as u64 - 1,
        BLOCK_BYTES as u64,
        20 << 20,
        MAX_PAYLOAD_BYTES,
        random.next() >> 36,
    ];
    let payload_bytes = sizes[random.below(sizes.len())].min(MAX_PAYLOAD_BYTES);
    let crcs: Vec<u32> = (0..block_count(payload_bytes)).map(|_| random.small(u32::MAX)).collect();
    header_bytes(key.canonical(), random.next().into(), payload_bytes, &crcs)
}

/// The header that `docs/format.md` describes, written without the crate's structs.
pub(crate) fn header_bytes(
    canonical: &[u8],
    write_id: u128,
    payload_bytes: u64,
    crcs: &[u32],
) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[0..8].copy_from_slice(b"KVBCHUNK");
    bytes[8..12].copy_from_slice(&1_u32.to_le_bytes());
    bytes[16..32].copy_from_slice(&Digest::of(canonical).to_bytes());
    bytes[32..48].copy_from_slice(&write_id.to_le_bytes());
    bytes[48..56].copy_from_slice(&payload_bytes.to_le_bytes());
    bytes[56..60].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    bytes[60..62].copy_from_slice(&u16::try_from(canonical.len()).expect("it fits").to_le_bytes());
    bytes[128..128 + canonical.len()].copy_from_slice(canonical);
    for (i, crc) in crcs.iter().enumerate() {
        bytes[2048 + 4 * i..2052 + 4 * i].copy_from_slice(&crc.to_le_bytes());
    }
    seal(&mut bytes);
    bytes
}

/// Makes the header checksum right, so that a changed field reaches the checks behind it.
pub(crate) fn seal(bytes: &mut [u8]) {
    if let Some(header) = bytes.get_mut(..HEADER_BYTES) {
        header[12..16].fill(0);
        let crc = block_crc(header);
        header[12..16].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Makes digest and checksum right for whatever key bytes are there.
pub(crate) fn seal_key(bytes: &mut [u8]) {
    let Some(header) = bytes.get_mut(..HEADER_BYTES) else { return };
    let key_bytes = usize::from(u16::from_le_bytes([header[60], header[61]])).min(MAX_KEY_BYTES);
    let digest = Digest::of(&header[128..128 + key_bytes]).to_bytes();
    header[16..32].copy_from_slice(&digest);
    seal(bytes);
}

/// What must hold of any bytes: the parser returns, and what it accepts is what the writer writes. True if accepted.
pub(crate) fn check_parser(bytes: &[u8]) -> bool {
    let _ = check_key(bytes);
    let Ok(header) = ChunkHeader::parse(bytes) else { return false };
    assert_eq!(header.as_bytes(), &bytes[..HEADER_BYTES], "a header is kept as it was read");
    assert!(header.payload_bytes() <= MAX_PAYLOAD_BYTES);
    let crcs: Vec<u32> = bytes[2048..HEADER_BYTES]
        .chunks_exact(4)
        .map(|crc| u32::from_le_bytes(crc.try_into().expect("four bytes")))
        .take(header.blocks() as usize)
        .collect();
    let canonical = header.canonical_key();
    let expected = header_bytes(canonical, header.write_id().get(), header.payload_bytes(), &crcs);
    assert!(header.as_bytes() == expected, "an accepted header is one that the format describes");
    let key = check_key(canonical).expect("an accepted header holds a key");
    assert_eq!(key.digest(), header.digest());
    assert_eq!(header.verify_key(&key), Ok(()));
    let _ = header.verify_payload(&bytes[HEADER_BYTES..]);
    let _ = header.verify_blocks(header.blocks(), &bytes[HEADER_BYTES..]);
    true
}

/// What must hold of any bytes as a key: if they parse, making that key anew gives the same bytes.
pub(crate) fn check_key(bytes: &[u8]) -> Option<ChunkKey> {
    let parts = KeyParts::parse(bytes).ok();
    let read = ChunkKey::from_canonical(bytes).ok();
    assert_eq!(parts.is_some(), read.is_some(), "both readers accept the same bytes");
    let (parts, read) = (parts?, read?);
    let made = ChunkKey::new(
        &parts.namespace,
        parts.kv_rank,
        parts.object_group,
        &parts.chunk_hash,
        &parts.cache_salt,
    );
    assert_eq!(made.as_ref(), Ok(&read), "a stored key can be made again");
    Some(read)
}
