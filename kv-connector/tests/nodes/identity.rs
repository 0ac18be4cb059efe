//! Who shares a directory shares no chunk that is not the same.

use kv_chunk::{ChunkKey, KeySpace, Namespace};

use crate::{common::*, testing::namespace};

fn keys_of(namespace: &Namespace, rank: u32, salt: &[u8]) -> Vec<ChunkKey> {
    let space = KeySpace::new(namespace).unwrap();
    (0..12_u64).map(|n| space.key(rank, 0, &n.to_le_bytes(), salt).unwrap()).collect()
}

#[test]
fn ranks_models_and_tenants_on_one_directory_never_get_each_others_bytes() {
    let place = Place::new();
    let (one, other) = (node(&place.first()), node(&place.second()));
    let bf16 = namespace("m");
    let fp8 = Namespace { dtype: "fp8".to_owned(), ..bf16.clone() };
    let kinds = [
        keys_of(&bf16, 0, b""),
        keys_of(&bf16, 1, b""),
        keys_of(&bf16, 0, b"tenant"),
        keys_of(&fp8, 0, b""),
        keys_of(&namespace("n"), 0, b""),
    ];
    // The hashes of all are equal; the nodes take turns.
    for (at, keys) in kinds.iter().enumerate() {
        let (writer, reader) = if at % 2 == 0 { (&one, &other) } else { (&other, &one) };
        assert_eq!(load(reader, keys).hits(), 0, "kind {at} is not stored yet");
        store(writer, keys);
    }
    assert_eq!(files(&place.first(), ".kvc"), 12 * kinds.len());
    let third = node(&place.first());
    for keys in &kinds {
        // Every byte is compared with what follows from the key.
        assert_eq!(load(&third, keys).hits(), 12);
    }
}

#[test]
fn a_node_that_restarts_at_once_serves_what_it_and_others_stored() {
    let place = Place::new();
    let (keys, other) = (keys(0..24), node(&place.second()));
    for round in 1..=3 {
        let leader = node(&place.first());
        store(&leader, &keys[..4 * round]);
        store(&other, &keys[12..12 + 4 * round]);
        // Its lease still stands there, and is its own no more.
        drop(leader);
        let again = node(&place.first());
        let report = load(&again, &keys);
        assert_eq!(report.hits(), 8 * round as u64, "{report:?}");
    }
}
