//! Namespaces and keys: what is refused, what tells two keys apart, what comes back.

use std::collections::{BTreeMap, HashSet};

use kv_chunk::{ChunkKey, KeyError, KeyParts, KeySpace, MAX_KEY_BYTES, Namespace};
use proptest::{collection::vec, prelude::*};

use crate::oracle::{self, check_key};

/// Picks a field of a namespace.
type Field<T> = fn(&mut Namespace) -> &mut T;
type Change = fn(&mut Namespace);
const TEXTS: [(&str, Field<String>); 8] = [
    ("model", |n| &mut n.model),
    ("weights", |n| &mut n.weights),
    ("dtype", |n| &mut n.dtype),
    ("layout", |n| &mut n.layout),
    ("serde", |n| &mut n.serde),
    ("hash_algorithm", |n| &mut n.hash_algorithm),
    ("hash_seed", |n| &mut n.hash_seed),
    ("engine", |n| &mut n.engine),
];
const SIZES: [(&str, Field<u32>); 4] = [
    ("chunk_tokens", |n| &mut n.chunk_tokens),
    ("tensor_parallel", |n| &mut n.tensor_parallel),
    ("pipeline_parallel", |n| &mut n.pipeline_parallel),
    ("context_parallel", |n| &mut n.context_parallel),
];

fn changed(change: impl FnOnce(&mut Namespace)) -> Namespace {
    let mut namespace = oracle::namespace(0);
    change(&mut namespace);
    namespace
}

/// A namespace whose keys (32-byte hash, no salt) are exactly as long as a header holds.
pub(crate) fn longest_namespace() -> Namespace {
    let mut long = Namespace {
        extra: BTreeMap::from([("pad".into(), String::new())]),
        ..oracle::namespace(0)
    };
    let short = ChunkKey::new(&long, 0, 0, &[0; 32], b"").expect("valid").canonical().len();
    long.extra.insert("pad".into(), "x".repeat(MAX_KEY_BYTES - short));
    long
}

#[test]
fn blank_texts_are_refused_by_name() {
    for (field, text) in TEXTS {
        for blank in ["", " \t"] {
            let namespace = changed(|n| *text(n) = blank.into());
            assert_eq!(namespace.validate(), Err(KeyError::Blank { field }));
            assert_eq!(KeySpace::new(&namespace).err(), Some(KeyError::Blank { field }));
        }
    }
    let nameless = changed(|n| n.extra = BTreeMap::from([(String::new(), "value".into())]));
    assert!(matches!(nameless.validate(), Err(KeyError::Blank { .. })));
}

#[test]
fn zero_sizes_are_refused_by_name() {
    for (field, size) in SIZES {
        let namespace = changed(|n| *size(n) = 0);
        assert_eq!(namespace.validate(), Err(KeyError::Zero { field }));
        assert_eq!(
            ChunkKey::new(&namespace, 0, 0, &[0; 8], b"").err(),
            Some(KeyError::Zero { field })
        );
    }
}

#[test]
fn errors_name_the_field_and_the_fix() {
    let error = changed(|n| n.weights.clear()).validate().unwrap_err().to_string();
    assert_eq!(error, "namespace field `weights` is blank: name it, or write `none`");
}

#[test]
fn a_hash_outside_8_to_64_bytes_is_refused() {
    let space = KeySpace::new(&oracle::namespace(0)).unwrap();
    for bytes in [0, 7, 65, 4096] {
        assert_eq!(space.key(0, 0, &vec![1; bytes], b""), Err(KeyError::HashLength { bytes }));
    }
    for bytes in [8, 64] {
        space.key(0, 0, &vec![1; bytes], b"").unwrap();
    }
}

#[test]
fn a_key_may_fill_its_area_and_no_more() {
    let space = KeySpace::new(&longest_namespace()).unwrap();
    assert_eq!(space.key(0, 0, &[0; 32], b"").unwrap().canonical().len(), MAX_KEY_BYTES);
    let over = Err(KeyError::TooLong { bytes: MAX_KEY_BYTES + 1 });
    assert_eq!(space.key(0, 0, &[0; 32], b"s"), over);
    assert_eq!(space.key(0, 0, &[0; 33], b""), over);
    let hopeless = changed(|n| n.model = "m".repeat(MAX_KEY_BYTES));
    assert!(matches!(KeySpace::new(&hopeless), Err(KeyError::TooLong { .. })));
}

#[test]
fn a_change_in_any_field_is_another_key() {
    let mut changes: Vec<Change> = vec![
        |n| n.model.push('x'),
        |n| n.weights.push('x'),
        |n| n.dtype.push('x'),
        |n| n.layout.push('x'),
        |n| n.chunk_tokens += 1,
        |n| n.serde.push('x'),
        |n| n.hash_algorithm.push('x'),
        |n| n.hash_seed.push('x'),
        |n| n.tensor_parallel += 1,
        |n| n.pipeline_parallel += 1,
        |n| n.context_parallel += 1,
        |n| n.engine.push('x'),
        |n| n.engine_major += 1,
    ];
    changes.push(|n| drop(n.extra.insert("a".into(), String::new())));
    changes.push(|n| drop(n.extra.insert("a".into(), "b".into())));
    changes.push(|n| drop(n.extra.insert("ab".into(), String::new())));
    changes.push(|_| ());
    let mut keys: Vec<ChunkKey> = changes
        .iter()
        .map(|change| ChunkKey::new(&changed(change), 1, 2, &[3; 8], b"salt").unwrap())
        .collect();
    let space = KeySpace::new(&oracle::namespace(0)).unwrap();
    keys.push(space.key(2, 1, &[3; 8], b"salt").unwrap());
    keys.push(space.key(1, 2, &[4; 8], b"salt").unwrap());
    keys.push(space.key(1, 2, &[3; 9], b"salt").unwrap());
    keys.push(space.key(1, 2, &[3; 8], b"").unwrap());
    keys.push(space.key(1, 2, &[3; 8], b"salty").unwrap());
    let digests: HashSet<_> = keys.iter().map(ChunkKey::digest).collect();
    assert_eq!(digests.len(), keys.len());
}

#[test]
fn another_encoding_is_left_alone() {
    let key = ChunkKey::new(&oracle::namespace(0), 0, 0, &[0; 8], b"").unwrap();
    let mut newer = key.canonical().to_vec();
    newer[4] = 2;
    assert_eq!(KeyParts::parse(&newer), Err(KeyError::Version { version: 2 }));
}

#[test]
fn repeated_or_unsorted_extra_names_are_malformed() {
    let namespace =
        changed(|n| n.extra = [("aa", "1"), ("bb", "2")].map(|(k, v)| (k.into(), v.into())).into());
    let key = ChunkKey::new(&namespace, 0, 0, &[0; 8], b"").unwrap();
    let at = key.canonical().windows(2).position(|pair| pair == b"aa").unwrap();
    for name in [b"bb", b"cc"] {
        let mut unsorted = key.canonical().to_vec();
        unsorted[at..at + 2].copy_from_slice(name);
        assert!(matches!(KeyParts::parse(&unsorted), Err(KeyError::Malformed { .. })));
    }
}

fn any_namespace() -> impl Strategy<Value = Namespace> {
    let texts = vec("[a-zA-Z0-9/._-]{1,24}|\\PC{1,8}x", 8);
    let numbers = proptest::array::uniform4(1..=u32::MAX);
    let extra = proptest::collection::btree_map("\\PC{0,6}n", "\\PC{0,12}", 0..4);
    (texts, numbers, any::<u32>(), extra).prop_map(|(texts, numbers, engine_major, extra)| {
        let mut namespace = Namespace { engine_major, extra, ..oracle::namespace(0) };
        TEXTS.iter().zip(texts).for_each(|((_, field), text)| *field(&mut namespace) = text);
        SIZES.iter().zip(numbers).for_each(|((_, field), number)| *field(&mut namespace) = number);
        namespace
    })
}

proptest! {
    #[test]
    fn a_key_comes_back_as_it_was_made(
        namespace in any_namespace(),
        kv_rank: u32,
        object_group: u32,
        chunk_hash in vec(any::<u8>(), 8..=64),
        cache_salt in vec(any::<u8>(), 0..40),
    ) {
        let key = ChunkKey::new(&namespace, kv_rank, object_group, &chunk_hash, &cache_salt).unwrap();
        let parts = KeyParts { namespace, kv_rank, object_group, chunk_hash, cache_salt };
        prop_assert_eq!(KeyParts::parse(key.canonical()).unwrap(), parts);
        prop_assert_eq!(ChunkKey::from_canonical(key.canonical()).unwrap(), key);
    }

    #[test]
    fn a_damaged_key_is_refused_or_another_key(
        namespace in any_namespace(),
        at: prop::sample::Index,
        flip in 1..=255_u8,
        cut: prop::sample::Index,
    ) {
        let key = ChunkKey::new(&namespace, 0, 0, &[9; 16], b"salt").unwrap();
        let mut damaged = key.canonical().to_vec();
        let at = at.index(damaged.len());
        damaged[at] ^= flip;
        prop_assert_ne!(check_key(&damaged), Some(key.clone()));
        let cut = cut.index(key.canonical().len());
        prop_assert!(check_key(&key.canonical()[..cut]).is_none());
        damaged = key.canonical().to_vec();
        damaged.push(flip);
        prop_assert!(check_key(&damaged).is_none());
    }

    #[test]
    fn random_bytes_are_no_key(bytes in vec(any::<u8>(), 0..300)) {
        prop_assert!(check_key(&bytes).is_none());
    }
}
