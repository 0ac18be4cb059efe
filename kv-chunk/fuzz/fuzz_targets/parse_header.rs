//! Any bytes as a header and as a key: nothing panics, and what is accepted is what the writer writes.

#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

fuzz_target!(|bytes: &[u8]| kv_chunk_fuzz::run(bytes));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    kv_chunk_fuzz::mutant(data, size, seed, |data, size| fuzzer_mutate(data, size, max_size))
});
