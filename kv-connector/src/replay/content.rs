//! Payloads that prove where they came from: every 8-byte word follows from the chunk's key and the word's offset.

use kv_chunk::Digest;

/// Weyl increment: odd, so that the words of one chunk take 2^64 steps to repeat.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bytes compared before a difference is looked at closely.
const STRIDE_BYTES: usize = 4096;

/// The words of one chunk, in order.
struct Words {
    state: u64,
    factor: u64,
}

impl Words {
    fn of(digest: Digest) -> Self {
        let [low, high] = halves(digest);
        // An odd factor is a bijection: two chunks that share it still differ by their starting state.
        Self { state: low, factor: high | 1 }
    }

    #[inline]
    fn next(&mut self) -> [u8; 8] {
        self.state = self.state.wrapping_add(INCREMENT);
        let mixed = self.state.wrapping_mul(self.factor);
        (mixed ^ (mixed >> 32)).to_le_bytes()
    }
}

fn halves(digest: Digest) -> [u64; 2] {
    let value = u128::from_le_bytes(digest.to_bytes());
    let bytes = |shift: u32| {
        let mut half = [0; 8];
        half.copy_from_slice(&(value >> shift).to_le_bytes()[..8]);
        u64::from_le_bytes(half)
    };
    [bytes(0), bytes(64)]
}

/// Writes the content that belongs to the chunk with this digest.
///
/// ```
/// use kv_connector::replay::{fill, wrong_bytes};
///
/// let (mine, yours) = (kv_chunk::Digest::of(b"mine"), kv_chunk::Digest::of(b"yours"));
/// let mut payload = vec![0; 1 << 16];
/// fill(mine, &mut payload);
/// assert_eq!(wrong_bytes(mine, &payload), 0);
/// assert!(wrong_bytes(yours, &payload) > 65_000);
/// ```
pub fn fill(digest: Digest, payload: &mut [u8]) {
    let mut words = Words::of(digest);
    let mut whole = payload.chunks_exact_mut(8);
    for word in &mut whole {
        word.copy_from_slice(&words.next());
    }
    let rest = whole.into_remainder();
    rest.copy_from_slice(&words.next()[..rest.len()]);
}

/// How many bytes differ from what [`fill`] writes for this digest.
pub fn wrong_bytes(digest: Digest, payload: &[u8]) -> u64 {
    let mut words = Words::of(digest);
    payload.chunks(STRIDE_BYTES).map(|stride| wrong_in(stride, &mut words)).sum()
}

/// Differing bytes of one stride; a clean stride costs one pass without branches.
fn wrong_in(stride: &[u8], words: &mut Words) -> u64 {
    let start = Words { ..*words };
    let mut whole = stride.chunks_exact(8);
    let mut difference = 0;
    for word in &mut whole {
        let mut found = [0; 8];
        found.copy_from_slice(word);
        difference |= u64::from_le_bytes(found) ^ u64::from_le_bytes(words.next());
    }
    if difference == 0 && whole.remainder().is_empty() {
        return 0;
    }
    let mut again = start;
    let differing = stride
        .chunks(8)
        .map(|word| word.iter().zip(again.next()).filter(|(found, due)| *found != due).count());
    differing.sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 3 * STRIDE_BYTES + 13;

    fn chunk(name: u32) -> (Digest, Vec<u8>) {
        let digest = Digest::of(&name.to_le_bytes());
        let mut payload = vec![0; BYTES];
        fill(digest, &mut payload);
        (digest, payload)
    }

    #[test]
    fn own_content_is_right_at_every_length() {
        let (digest, payload) = chunk(1);
        for bytes in [0, 1, 7, 8, 9, 4095, 4096, 4097, BYTES] {
            assert_eq!(wrong_bytes(digest, &payload[..bytes]), 0, "{bytes} bytes");
        }
    }

    #[test]
    fn a_swapped_chunk_is_wrong_in_nearly_every_byte() {
        let (digest, _) = chunk(1);
        let (_, other) = chunk(2);
        assert!(wrong_bytes(digest, &other) > BYTES as u64 * 98 / 100);
    }

    #[test]
    fn swapped_words_of_two_chunks_are_each_seen() {
        let (digest, mut payload) = chunk(1);
        let (_, other) = chunk(2);
        payload[800..808].copy_from_slice(&other[800..808]);
        assert!(wrong_bytes(digest, &payload) >= 6);
    }

    #[test]
    fn content_at_a_wrong_offset_is_seen() {
        let (digest, payload) = chunk(1);
        for shift in [1, 8, 512, STRIDE_BYTES] {
            let mut shifted = payload.clone();
            shifted.rotate_left(shift);
            assert!(wrong_bytes(digest, &shifted) > BYTES as u64 * 98 / 100, "shift {shift}");
        }
    }

    #[test]
    fn every_single_wrong_byte_is_counted() {
        let (digest, mut payload) = chunk(1);
        for at in [0, 4095, 4096, BYTES - 14, BYTES - 1] {
            payload[at] ^= 0x10;
        }
        assert_eq!(wrong_bytes(digest, &payload), 5);
    }

    #[test]
    fn a_buffer_that_was_never_written_is_seen() {
        assert!(wrong_bytes(chunk(1).0, &vec![0; BYTES]) > BYTES as u64 * 98 / 100);
    }
}
