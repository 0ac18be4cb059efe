//! A crash at any point: afterwards each chunk is whole and right, or absent.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use kv_cxl::{DaxTier, DaxTierConfig, Extent, FastTierError, Medium};
use kv_tiers::{Crash, CrashImage, Dead, IoContext};
use proptest::{collection::vec, prelude::*};

use crate::chunks::{Content, Driver, digest};

const MEDIUM_BYTES: u64 = 160 << 10;
const LINE_BYTES: u64 = 64;
const CHUNKS: u32 = 6;

/// Memory that loses what was not flushed.
#[derive(Debug)]
pub(crate) struct ImageMedium {
    pub(crate) image: CrashImage,
    path: PathBuf,
}

impl ImageMedium {
    pub(crate) fn new(image: CrashImage) -> Self {
        Self { image, path: "image".into() }
    }

    fn told(&self, result: Result<(), Dead>) -> Result<(), FastTierError> {
        let path = self.path.clone();
        let context = IoContext { call: "store", path, offset: 0, length: 0 };
        result.map_err(|Dead| FastTierError::Io { context, errno: 5 })
    }
}

impl Medium for ImageMedium {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        MEDIUM_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        self.image.read(offset, into);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), FastTierError> {
        assert!(offset + from.len() as u64 <= MEDIUM_BYTES);
        let written = self.image.write(offset, from);
        self.told(written)
    }

    fn flush(&mut self, extent: Extent) -> Result<(), FastTierError> {
        let flushed = self.image.flush_range(extent.offset..extent.offset + extent.bytes);
        self.told(flushed)
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write { number: u32, bytes: u32 },
    Remove { number: u32 },
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..CHUNKS, prop_oneof![0..60_000_u32, Just(0), Just(4096)])
            .prop_map(|(number, bytes)| Step::Write { number, bytes }),
        1 => (0..CHUNKS).prop_map(|number| Step::Remove { number }),
    ]
}

fn any_crash() -> impl Strategy<Value = Crash> {
    prop_oneof![Just(Crash::Process), any::<u64>().prop_map(|seed| Crash::Power { seed })]
}

/// What each chunk may be after a crash now.
type Possible = HashMap<u32, HashSet<Option<Content>>>;

struct Run {
    image: CrashImage,
    possible: Possible,
    version: u32,
}

impl Run {
    fn open(&self) -> Option<Driver> {
        let mut config = DaxTierConfig::new("memory");
        config.entries = Some(8);
        let medium = Box::new(ImageMedium::new(self.image.clone()));
        // Making the store can meet the end of the medium.
        DaxTier::open(config, medium).ok().map(|tier| Driver::new(Box::new(tier), 128 << 10))
    }

    /// The chunk is `now`; if the medium has died on the way, it may be what it was as well.
    fn becomes(&mut self, number: u32, now: Option<Content>) {
        let possible = self.possible.entry(number).or_insert_with(|| HashSet::from([None]));
        if !self.image.is_dead() {
            possible.clear();
        }
        possible.insert(now);
    }

    fn step(&mut self, driver: &mut Driver, step: Step) {
        match step {
            Step::Write { number, bytes } => {
                self.version += 1;
                let content = Content { number, version: self.version, bytes };
                let held = driver.tier.contains(digest(number)).is_some();
                let (result, evicted) = driver.write(content);
                for other in 0..CHUNKS {
                    if evicted.contains(&digest(other)) {
                        self.becomes(other, None);
                    }
                }
                match result {
                    Ok(()) => self.becomes(number, Some(content)),
                    // Half written on a dead medium: it may be found or not.
                    Err(_) if !held && self.image.is_dead() => self.becomes(number, Some(content)),
                    Err(_) => assert!(held || self.image.is_dead(), "{step:?}"),
                }
            }
            Step::Remove { number } => {
                driver.tier.remove(digest(number), 0);
                self.becomes(number, None);
            }
        }
    }

    /// What is found must be possible; from then on it is certain.
    fn compare(&mut self, driver: &mut Driver) -> Result<(), TestCaseError> {
        for number in 0..CHUNKS {
            let found = driver.read(number).map_err(TestCaseError::fail)?;
            let listed = driver.tier.contains(digest(number)).map(|held| held.write_id);
            prop_assert_eq!(listed, found.map(Content::write_id));
            let possible = self.possible.entry(number).or_insert_with(|| HashSet::from([None]));
            prop_assert!(possible.contains(&found), "{:?} is found of {:?}", found, possible);
            *possible = HashSet::from([found]);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn after_a_crash_each_chunk_is_whole_and_right_or_absent(
        lives in vec((vec(any_step(), 1..12), 0..4000_u64, any_crash()), 1..4),
    ) {
        let image = CrashImage::new(LINE_BYTES);
        let mut run = Run { image, possible: Possible::new(), version: 0 };
        for (steps, grains, crash) in lives {
            run.image.stop_after_grains(grains);
            if let Some(mut driver) = run.open() {
                for step in steps {
                    run.step(&mut driver, step);
                }
            }
            run.image = run.image.crash(crash);
            // The new life looks before it writes: opening may clear what is torn.
            let mut driver = run.open().expect("the medium lives");
            run.compare(&mut driver)?;
            drop(driver);
            // Looking has changed nothing: it is found again.
            let mut driver = run.open().expect("the medium lives");
            run.compare(&mut driver)?;
        }
    }
}
