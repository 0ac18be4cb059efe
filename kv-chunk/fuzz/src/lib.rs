//! What the fuzz target runs: the questions of the crate's own tests, and mutants that get past the checksum.

#![forbid(unsafe_code)]

#[path = "../../tests/format/oracle.rs"]
mod oracle;

use kv_chunk::HEADER_BYTES;
use oracle::{Random, any_header, check_parser, seal, seal_key};

/// Fails (by panicking) unless the parser behaves on `bytes`.
pub fn run(bytes: &[u8]) {
    let _ = check_parser(bytes);
}

/// Makes one mutant in `buffer`, whose first `size` bytes are the input it starts from; returns its size.
///
/// An input too short for a header is mostly replaced by a valid one, so that no seed corpus is needed; of the others
/// most get a right digest and checksum after `mutate`, so that the fuzzer sees the checks behind it.
pub fn mutant(
    buffer: &mut [u8],
    size: usize,
    seed: u32,
    mutate: impl FnOnce(&mut [u8], usize) -> usize,
) -> usize {
    let random = &mut Random(seed.into());
    if buffer.len() >= HEADER_BYTES && size < HEADER_BYTES && random.below(4) != 0 {
        buffer[..HEADER_BYTES].copy_from_slice(&any_header(random));
        return HEADER_BYTES;
    }
    let size = mutate(buffer, size);
    match random.below(4) {
        0 => {}
        1 => seal(&mut buffer[..size]),
        _ => seal_key(&mut buffer[..size]),
    }
    size
}
