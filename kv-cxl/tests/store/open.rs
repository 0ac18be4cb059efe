//! What is found at open: blank, ours, of a later version, damaged, somebody else's, or contradicting itself.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_cxl::{DaxTier, DaxTierConfig, DeviceDax, DeviceDaxConfig, Format, Place};
use kv_tiers::{Tier, TierError};
use proptest::{collection::vec, prelude::*};

use crate::chunks::{Content, Driver, digest};

const IMAGE_BYTES: usize = 1 << 20;
const TABLE: usize = 4096;
const ENTRY: usize = 64;
const CONTENT: Content = Content { number: 7, version: 1, bytes: 9000 };

struct Store {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

impl Store {
    /// A file of zeros.
    fn blank() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("memory");
        fs::write(&path, vec![0; IMAGE_BYTES]).unwrap();
        Self { _directory: directory, path }
    }

    /// One that holds [`CONTENT`].
    fn filled() -> Self {
        let store = Self::blank();
        store.driver().write(CONTENT).0.unwrap();
        store
    }

    fn driver(&self) -> Driver {
        Driver::new(Box::new(open(&self.path, Format::IfBlank).unwrap()), 64 << 10)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = fs::read(&self.path).unwrap();
        change(&mut bytes);
        fs::write(&self.path, &bytes).unwrap();
        bytes
    }
}

fn open(path: &Path, format: Format) -> Result<DaxTier, TierError> {
    let mut config = DaxTierConfig::new("memory");
    config.format = format;
    let medium = DeviceDax::open(&DeviceDaxConfig::new(path)).unwrap().medium();
    DaxTier::open(config, Box::new(medium))
}

/// The entry in slot `index`.
fn slot(index: usize) -> std::ops::Range<usize> {
    TABLE + index * ENTRY..TABLE + (index + 1) * ENTRY
}

#[test]
fn a_later_version_is_left_alone() {
    let store = Store::filled();
    let before = store.change(|bytes| bytes[8] = 2);
    let refused = open(&store.path, Format::IfBlank).unwrap_err();
    assert!(matches!(refused, TierError::Newer { found: 2, known: 1, .. }), "{refused}");
    assert!(fs::read(&store.path).unwrap() == before);
}

#[test]
fn what_is_not_ours_is_left_alone_unless_told_otherwise() {
    let store = Store::blank();
    let before = store.change(|bytes| bytes[3000] = 1);
    let refused = open(&store.path, Format::IfBlank).unwrap_err().to_string();
    assert!(refused.contains("holds something else") && refused.contains("format"), "{refused}");
    assert!(fs::read(&store.path).unwrap() == before);
    assert_eq!(open(&store.path, Format::Always).unwrap().stats().chunks, 0);
    assert_eq!(open(&store.path, Format::IfBlank).unwrap().stats().chunks, 0);
}

#[test]
fn a_damaged_first_page_costs_the_chunks_and_nothing_else() {
    let store = Store::filled();
    store.change(|bytes| bytes[20] ^= 1);
    let mut driver = store.driver();
    assert_eq!(driver.read(CONTENT.number), Ok(None));
    driver.write(CONTENT).0.unwrap();
    drop(driver);
    assert_eq!(store.driver().read(CONTENT.number), Ok(Some(CONTENT)));
}

#[test]
fn a_chunk_whose_entry_or_header_is_damaged_is_absent() {
    let header = 4096 + 4096;
    let empty = Store::blank().driver().tier.stats().used_bytes;
    for (at, what) in
        [(slot(0).start + 20, "digest"), (slot(0).start, "checksum"), (header, "header")]
    {
        let store = Store::filled();
        store.change(|bytes| bytes[at] ^= 1);
        let mut driver = store.driver();
        assert_eq!(driver.read(CONTENT.number), Ok(None), "{what}");
        assert_eq!(driver.tier.stats().used_bytes, empty, "{what}: its place is free");
        driver.write(CONTENT).0.unwrap();
        assert_eq!(driver.read(CONTENT.number), Ok(Some(CONTENT)), "{what}");
    }
}

#[test]
fn of_two_entries_for_one_place_the_later_stays_and_the_other_does_not_come_back() {
    let store = Store::filled();
    let early = fs::read(&store.path).unwrap()[slot(0)].to_vec();
    let mut driver = store.driver();
    driver.tier.remove(digest(CONTENT.number), 0);
    let later = Content { number: 8, version: 2, bytes: 9000 };
    driver.write(later).0.unwrap();
    drop(driver);
    // As if the removal had not reached the medium.
    store.change(|bytes| bytes[slot(5)].copy_from_slice(&early));
    let mut driver = store.driver();
    assert_eq!(driver.read(later.number), Ok(Some(later)));
    assert_eq!(driver.read(CONTENT.number), Ok(None));
    drop(driver);
    assert!(fs::read(&store.path).unwrap()[slot(5)].iter().all(|byte| *byte == 0));
}

#[test]
fn a_chunk_of_a_later_format_keeps_its_place_and_is_a_miss() {
    let store = Store::filled();
    let used = store.driver().tier.stats().used_bytes;
    store.change(|bytes| {
        // A later version of the chunk header, with the checksum that it would have.
        let header = &mut bytes[8192..12_288];
        header[8] = 9;
        header[12..16].fill(0);
        let crc = kv_chunk::block_crc(header).to_le_bytes();
        header[12..16].copy_from_slice(&crc);
    });
    let mut driver = store.driver();
    assert_eq!(driver.read(CONTENT.number), Ok(None));
    assert_eq!((driver.tier.stats().used_bytes, driver.tier.stats().chunks), (used, 0));
}

#[test]
fn a_place_that_is_used_again_has_another_generation() {
    let store = Store::blank();
    let mut tier = open(&store.path, Format::IfBlank).unwrap();
    let mut seen: Vec<Place> = Vec::new();
    for version in 1..4 {
        let mut driver = Driver::new(Box::new(tier), 64 << 10);
        driver.write(Content { version, ..CONTENT }).0.unwrap();
        drop(driver);
        tier = open(&store.path, Format::IfBlank).unwrap();
        seen.push(tier.place(digest(CONTENT.number)).unwrap());
        assert!(tier.remove(digest(CONTENT.number), 0));
        assert_eq!(tier.place(digest(CONTENT.number)), None);
    }
    assert!(seen.windows(2).all(|two| two[0].extent == two[1].extent), "{seen:?}");
    assert!(seen[0].generation < seen[1].generation, "{seen:?}");
}

#[test]
fn a_medium_in_use_is_refused() {
    let store = Store::blank();
    let _tier = open(&store.path, Format::IfBlank).unwrap();
    let refused = DeviceDax::open(&DeviceDaxConfig::new(&store.path)).unwrap_err().to_string();
    assert!(refused.contains("another process"), "{refused}");
}

#[test]
fn a_medium_that_has_grown_or_shrunk_keeps_what_still_fits() {
    let store = Store::blank();
    let mut driver = store.driver();
    let contents = (0..12).map(|number| Content { number, ..CONTENT });
    contents.for_each(|content| driver.write(content).0.unwrap());
    drop(driver);
    // To where the fifth chunk ends.
    let fifth = open(&store.path, Format::IfBlank).unwrap().place(digest(4)).unwrap();
    let end = fifth.extent.end().unwrap();
    let file = fs::File::options().write(true).open(&store.path).unwrap();
    for (bytes, chunks) in [(2 * IMAGE_BYTES as u64, 12), (end, 5), (2 * IMAGE_BYTES as u64, 5)] {
        file.set_len(bytes).unwrap();
        let mut driver = store.driver();
        let stats = driver.tier.stats();
        assert_eq!(stats.chunks, chunks, "{bytes}");
        assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
        assert_eq!(stats.capacity_bytes, bytes.min(IMAGE_BYTES as u64));
        assert_eq!(driver.read(4), Ok(Some(Content { number: 4, ..CONTENT })));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damage_anywhere_costs_chunks_and_never_gives_wrong_bytes(
        damage in vec((0..32_768_usize, any::<u8>()), 1..40),
    ) {
        let store = Store::filled();
        store.driver().write(Content { number: 8, ..CONTENT }).0.unwrap();
        store.change(|bytes| damage.iter().for_each(|(at, byte)| bytes[*at] = *byte));
        // What is not a store any more is refused; what is one gives right bytes, or a miss, or says that they are not.
        if let Ok(tier) = open(&store.path, Format::IfBlank) {
            let mut driver = Driver::new(Box::new(tier), 64 << 10);
            for number in [7, 8] {
                if let Ok(Some(content)) = driver.read(number) {
                    prop_assert_eq!(content, Content { number, ..CONTENT });
                }
            }
            driver.write(Content { number: 9, ..CONTENT }).0.unwrap();
        }
    }
}

#[test]
fn a_tool_changes_nothing_but_what_it_removes_and_what_would_come_back_with_that() {
    let look = |store: &Store| {
        let mut config = DaxTierConfig::new("memory");
        config.look_only = true;
        let medium = DeviceDax::open(&DeviceDaxConfig::new(&store.path)).unwrap().medium();
        DaxTier::open(config, Box::new(medium)).unwrap()
    };
    let store = Store::filled();
    let early = fs::read(&store.path).unwrap()[slot(0)].to_vec();
    let mut driver = store.driver();
    driver.tier.remove(digest(CONTENT.number), 0);
    let later = Content { version: 2, ..CONTENT };
    driver.write(later).0.unwrap();
    driver.write(Content { number: 8, ..CONTENT }).0.unwrap();
    drop(driver);
    let before = store.change(|bytes| {
        // An older writing of the same chunk, and half an entry.
        bytes[slot(5)].copy_from_slice(&early);
        bytes[slot(6).start] = 1;
    });
    let mut tier = look(&store);
    assert_eq!(tier.findings().torn_entries, 2);
    assert_eq!((tier.stats().chunks, tier.findings().is_first_page_damaged), (2, false));
    assert!(fs::read(&store.path).unwrap() == before);
    assert!(tier.remove(digest(CONTENT.number), 0));
    drop(tier);
    let mut driver = store.driver();
    assert_eq!(driver.read(CONTENT.number), Ok(None), "the older writing is back");
    assert!(driver.read(8).unwrap().is_some());
    drop(driver);
    assert_eq!(look(&store).findings(), Default::default());

    let damaged = store.change(|bytes| bytes[20] ^= 1);
    let tier = look(&store);
    assert_eq!((tier.stats().chunks, tier.findings().is_first_page_damaged), (0, true));
    drop(tier);
    assert!(fs::read(&store.path).unwrap() == damaged);
    let blank = Store::blank();
    assert_eq!(look(&blank).stats().chunks, 0);
    assert!(fs::read(&blank.path).unwrap().iter().all(|byte| *byte == 0));
}
