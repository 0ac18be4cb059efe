//! Images that are kept for ever: this version still writes and reads exactly these bytes.

use std::path::PathBuf;

use kv_cxl::{DaxTier, DaxTierConfig, DeviceDax, DeviceDaxConfig};

use crate::chunks::{Content, Driver, digest};

const IMAGE_BYTES: usize = 36 << 10;

/// A small chunk, a removed one whose entry is free again, and one written in its place.
const CONTENTS: [Content; 3] = [
    Content { number: 1, version: 1, bytes: 100 },
    Content { number: 2, version: 2, bytes: 3000 },
    Content { number: 3, version: 3, bytes: 5000 },
];

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1/three-chunks.dax")
}

fn open(path: &std::path::Path) -> Driver {
    let mut config = DaxTierConfig::new("memory");
    config.entries = Some(64);
    let medium = DeviceDax::open(&DeviceDaxConfig::new(path)).unwrap().medium();
    Driver::new(Box::new(DaxTier::open(config, Box::new(medium)).unwrap()), 64 << 10)
}

#[test]
fn version_1_is_written_as_it_was() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, vec![0; IMAGE_BYTES]).unwrap();
    let mut driver = open(&path);
    for content in CONTENTS {
        driver.write(content).0.unwrap();
    }
    assert!(driver.tier.remove(digest(2), 0));
    driver.write(Content { number: 4, version: 4, bytes: 0 }).0.unwrap();
    drop(driver);
    let written = std::fs::read(&path).unwrap();
    assert!(
        written == std::fs::read(golden()).unwrap(),
        "version 1 is written differently: give it a new version"
    );
}

#[test]
fn version_1_is_read() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("image");
    std::fs::copy(golden(), &path).unwrap();
    let mut driver = open(&path);
    assert_eq!(driver.tier.stats().recovered_chunks, 3);
    for content in [CONTENTS[0], CONTENTS[2], Content { number: 4, version: 4, bytes: 0 }] {
        assert_eq!(driver.read(content.number), Ok(Some(content)));
    }
    assert_eq!(driver.read(2), Ok(None));
}
