//! A small fuzzer that runs with every `cargo test`: seeded, bounded, its mutants sealed so that they get past the
//! checksum. `fuzz/` holds the coverage-guided one.

use kv_chunk::HEADER_BYTES;

use crate::oracle::{Random, any_header, check_parser, seal, seal_key};

const ROUNDS: u64 = 20_000;

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        // Most fields stand in the first 512 bytes.
        let bound = if random.below(4) == 0 { bytes.len() } else { bytes.len().min(512) };
        let at = random.below(bound);
        match random.below(5) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            2 => bytes[at..].rotate_left(1),
            3 => bytes[at..].rotate_right(1),
            _ => {
                let (from, count) = (random.below(bound), random.below(16));
                let copied: Vec<u8> = bytes[from..].iter().take(count).copied().collect();
                let to = at.min(bytes.len() - copied.len());
                bytes[to..to + copied.len()].copy_from_slice(&copied);
            }
        }
    }
    if random.below(16) == 0 {
        bytes.truncate(random.below(HEADER_BYTES + 1));
    }
}

#[test]
fn mutants_are_refused_or_are_what_the_writer_writes() {
    let mut accepted = 0;
    for round in 0..ROUNDS {
        let random = &mut Random(round);
        let mut bytes = any_header(random);
        if random.below(32) != 0 {
            mutate(&mut bytes, random);
        }
        match random.below(8) {
            0 => {}
            1..=3 => seal(&mut bytes),
            _ => seal_key(&mut bytes),
        }
        accepted += u64::from(check_parser(&bytes));
    }
    // A mutant is often valid (another write_id, hash or checksum), often not: neither path may have died out.
    assert!((ROUNDS / 20..ROUNDS * 19 / 20).contains(&accepted), "{accepted} of {ROUNDS} accepted");
}
