//! What a medium holds when the lights go out.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use thiserror::Error;

/// A sparse medium that knows which of its bytes would survive which crash.
///
/// It keeps two images: *live* is what reads return, *durable* is what has been flushed. Bytes are written in grains
/// (the unit that is written whole or not at all: 4096 for pages, 512 for sectors, 64 for cache lines). Clones share
/// the medium. Bytes never written read as zeros.
#[derive(Clone, Debug)]
pub struct CrashImage(Arc<Mutex<Image>>);

#[derive(Debug, Default)]
struct Image {
    grain_bytes: u64,
    live: BTreeMap<u64, Box<[u8]>>,
    durable: BTreeMap<u64, Box<[u8]>>,
    /// Versions of each grain since it was last flushed, oldest first.
    unflushed: BTreeMap<u64, Vec<Box<[u8]>>>,
    grains_written: u64,
    stop_after_grains: Option<u64>,
    violations: Vec<FlushViolation>,
}

/// How the world ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Crash {
    /// The process dies: all that was written survives, flushed or not.
    Process,
    /// The power fails: each unflushed grain holds its flushed content or any version written since, at random.
    Power {
        /// Of the choice.
        seed: u64,
    },
}

/// The medium stopped: nothing is written any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the medium has stopped")]
pub struct Dead;

/// Something was relied on before it was durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlushViolation {
    /// The bytes that had to be durable.
    pub range: Range<u64>,
    /// The first of their grains that was not, by offset.
    pub offset: u64,
    /// Grains written on the whole medium before.
    pub grains_written: u64,
}

impl CrashImage {
    /// An empty medium; `grain_bytes` is at least 1.
    pub fn new(grain_bytes: u64) -> Self {
        let image = Image { grain_bytes: grain_bytes.max(1), ..Image::default() };
        Self(Arc::new(Mutex::new(image)))
    }

    /// The bytes at `offset`.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let image = self.image();
        image.for_grains(offset, into.len(), |grain, within, part| match image.live.get(&grain) {
            Some(bytes) => into[part].copy_from_slice(&bytes[within]),
            None => into[part].fill(0),
        });
    }

    /// End of the last grain ever written.
    pub fn end(&self) -> u64 {
        let image = self.image();
        image.live.last_key_value().map_or(0, |(&grain, _)| (grain + 1) * image.grain_bytes)
    }

    /// Writes grain by grain, in order. Stops at the grain at which the medium was told to.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Dead> {
        let mut image = self.image();
        let mut grains = Vec::new();
        image.for_grains(offset, bytes.len(), |grain, within, part| {
            grains.push((grain, within, part));
        });
        for (grain, within, part) in grains {
            image.write_grain(grain, within, &bytes[part])?;
        }
        Ok(())
    }

    /// Makes everything durable.
    pub fn flush(&self) -> Result<(), Dead> {
        self.flush_range(0..u64::MAX)
    }

    /// Makes every grain that overlaps `range` durable.
    pub fn flush_range(&self, range: Range<u64>) -> Result<(), Dead> {
        let mut image = self.image();
        if image.is_dead() {
            return Err(Dead);
        }
        let grains: Vec<u64> =
            image.unflushed.range(image.grains(&range)).map(|(&grain, _)| grain).collect();
        for grain in grains {
            if let Some(newest) = image.unflushed.remove(&grain).and_then(|mut all| all.pop()) {
                image.durable.insert(grain, newest);
            }
        }
        Ok(())
    }

    /// Says that from now on `range` is relied on (a record that points to it is written, a chunk is announced): if it
    /// is not durable yet, that is a violation.
    pub fn rely_on(&self, range: Range<u64>) {
        let mut image = self.image();
        let first = image.unflushed.range(image.grains(&range)).next().map(|(&grain, _)| grain);
        if let Some(grain) = first {
            let (offset, grains_written) = (grain * image.grain_bytes, image.grains_written);
            image.violations.push(FlushViolation { range, offset, grains_written });
        }
    }

    /// What was relied on too early.
    pub fn violations(&self) -> Vec<FlushViolation> {
        self.image().violations.clone()
    }

    /// Stops the medium when so many more grains have been written: a crash can strike at any of them.
    pub fn stop_after_grains(&self, grains: u64) {
        let mut image = self.image();
        image.stop_after_grains = Some(image.grains_written.saturating_add(grains));
    }

    /// Grains written since it was made.
    pub fn grains_written(&self) -> u64 {
        self.image().grains_written
    }

    /// It was told to stop, and did.
    pub fn is_dead(&self) -> bool {
        self.image().is_dead()
    }

    /// The medium that one finds after the crash, running again. This one stays as it is.
    #[must_use]
    pub fn crash(&self, crash: Crash) -> Self {
        let image = self.image();
        let found = match crash {
            Crash::Process => image.live.clone(),
            Crash::Power { seed } => image.after_power_loss(fastrand::Rng::with_seed(seed)),
        };
        Self(Arc::new(Mutex::new(Image {
            grain_bytes: image.grain_bytes,
            live: found.clone(),
            durable: found,
            ..Image::default()
        })))
    }

    fn image(&self) -> MutexGuard<'_, Image> {
        // A test that panicked has failed already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Image {
    fn is_dead(&self) -> bool {
        self.stop_after_grains.is_some_and(|stop| self.grains_written >= stop)
    }

    /// Numbers of the grains that overlap `range`.
    fn grains(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.div_ceil(self.grain_bytes);
        (range.start / self.grain_bytes).min(end)..end
    }

    /// Calls with each grain, the bytes within it, and the part of the transfer that they are.
    fn for_grains(
        &self,
        offset: u64,
        length: usize,
        mut visit: impl FnMut(u64, Range<usize>, Range<usize>),
    ) {
        let grain_bytes = usize::try_from(self.grain_bytes).expect("a grain is small");
        let mut done = 0;
        while done < length {
            let at = offset + done as u64;
            let within = usize::try_from(at % self.grain_bytes).expect("less than a grain");
            let part = (grain_bytes - within).min(length - done);
            visit(at / self.grain_bytes, within..within + part, done..done + part);
            done += part;
        }
    }

    fn write_grain(&mut self, grain: u64, within: Range<usize>, bytes: &[u8]) -> Result<(), Dead> {
        if self.is_dead() {
            return Err(Dead);
        }
        self.grains_written += 1;
        let grain_bytes = usize::try_from(self.grain_bytes).expect("a grain is small");
        let live =
            self.live.entry(grain).or_insert_with(|| vec![0; grain_bytes].into_boxed_slice());
        live[within].copy_from_slice(bytes);
        self.unflushed.entry(grain).or_default().push(live.clone());
        Ok(())
    }

    fn after_power_loss(&self, mut random: fastrand::Rng) -> BTreeMap<u64, Box<[u8]>> {
        let mut found = self.durable.clone();
        for (&grain, versions) in &self.unflushed {
            let newer = random.usize(0..=versions.len());
            if let Some(version) = newer.checked_sub(1) {
                found.insert(grain, versions[version].clone());
            }
        }
        found
    }
}
