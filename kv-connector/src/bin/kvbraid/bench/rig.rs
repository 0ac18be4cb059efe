//! One engine on the devices, and one step read by it.

use std::{
    collections::BTreeMap,
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use kv_chunk::{ChunkKey, KeySpace, Namespace};
use kv_connector::{
    ByteSize, Config, Engine, Lease, Outcome, StepReport, Stored, TailPolicy, TierConfig, TierMask,
    TierStatus, Want,
    replay::{fill, wrong_bytes},
};

use super::{Device, bound::Arrival, counters::cpu_time, handed::Expected};
use crate::failure::Failure;

/// Payload of every chunk.
pub(super) const CHUNK_BYTES: usize = 4 << 20;
const STAGING: ByteSize = ByteSize::mib(128);
const FLUSH_DEADLINE: Duration = Duration::from_secs(120);
/// When a step's writes are staged: its first reads are under way by then.
const STAGED_AFTER: Duration = Duration::from_millis(50);
/// Between two looks at whether anything is still read.
const QUIET: Duration = Duration::from_millis(120);

/// An engine whose chunks lie on every device.
#[derive(Debug)]
pub(super) struct Rig {
    engine: Engine,
    keys: Vec<ChunkKey>,
    expected: Expected,
    /// The next chunk to be stored beside a step.
    next_key: usize,
}

/// How a step is read.
#[derive(Clone, Debug)]
pub(super) struct Load {
    /// Of each chunk the devices that may read it.
    pub(super) masks: Vec<TierMask>,
    /// Chunks that are loaded at once; then the next, and so on.
    pub(super) request_chunks: usize,
    /// Ranks that wait, each for as many of the chunks.
    pub(super) ranks: usize,
    /// Chunks that are stored meanwhile.
    pub(super) stored: usize,
    /// Whether the bytes are copied to the caller, or taken where they landed.
    pub(super) delivery: Delivery,
}

/// What becomes of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    Copied,
    Handed,
}

/// What a step took, every byte of it having been right.
#[derive(Clone, Debug, Default)]
pub(super) struct Shot {
    pub(super) seconds: f64,
    /// Payload, each chunk once.
    pub(super) bytes: u64,
    /// Of that, by device.
    pub(super) tier_bytes: Vec<u64>,
    /// Time in which a device had reads in flight.
    pub(super) tier_busy_s: Vec<f64>,
    /// Of bytes that were handed over: when how many had arrived.
    pub(super) arrivals: Vec<Arrival>,
    /// Payload that came too late.
    pub(super) late_bytes: u64,
    pub(super) duplicate_bytes: u64,
    pub(super) cpu_s: f64,
}

impl Rig {
    /// Opens the engine in directory `name` of each device and stores `chunks` chunks, unless they are there. Beside
    /// them there is room for `spare` more.
    pub(super) fn open(
        devices: &[Device],
        name: &str,
        tail: TailPolicy,
        window: u32,
        chunks: usize,
        spare: usize,
    ) -> Result<Self, Failure> {
        // A header each, what the store keeps for itself, and the room that it makes ahead of writes: below its high
        // watermark it drops nothing.
        let capacity = (((chunks + spare) * 4 / 3 + 64) * (CHUNK_BYTES + 8192)) as u64;
        let tier = |device: &Device| {
            let path = device.path.join(name);
            let mut tier = TierConfig::nvme(&device.name, path, ByteSize(capacity));
            tier.segment = Some(ByteSize::mib(256));
            tier.window = Some(window);
            tier
        };
        let mut config = Config::new(devices.iter().map(tier).collect());
        config.engine.chunk_bytes_max = ByteSize(CHUNK_BYTES as u64);
        // Nothing is served from memory.
        config.engine.host_cache = ByteSize(0);
        config.engine.cache_stores = false;
        config.engine.staging = STAGING;
        config.engine.tail = tail;
        let engine = Engine::open(config)?;
        let keys = keys(0..chunks)?;
        let rig = Self { engine, expected: Expected::of(&keys), keys, next_key: 0 };
        rig.store_all()?;
        Ok(rig)
    }

    /// Stores in parts that staging holds with ease: under pressure it would give up replicas.
    fn store_all(&self) -> Result<(), Failure> {
        let mut payload = vec![0; CHUNK_BYTES];
        for part in self.keys.chunks(16) {
            for key in part {
                self.store(key, &mut payload)?;
            }
            self.flush()?;
        }
        let lacks = |tier: &TierStatus| tier.chunks < self.keys.len() as u64;
        match self.engine.stats().tiers.iter().find(|tier| lacks(tier)) {
            None => Ok(()),
            Some(tier) => Err(Failure::failed(format!(
                "{} holds {} of {} chunks: what it lacks would be read elsewhere",
                tier.name,
                tier.chunks,
                self.keys.len()
            ))),
        }
    }

    fn store(&self, key: &ChunkKey, payload: &mut [u8]) -> Result<(), Failure> {
        fill(key.digest(), payload);
        match self.engine.store(key, payload) {
            Stored::Staged | Stored::AlreadyHeld => Ok(()),
            Stored::Refused(why) => {
                Err(Failure::failed(format!("a chunk was not stored: {why:?}")))
            }
        }
    }

    fn flush(&self) -> Result<(), Failure> {
        let report = self.engine.flush(FLUSH_DEADLINE);
        if report.drained {
            return Ok(());
        }
        Err(Failure::failed(format!("{} chunks were not written in time", report.pending)))
    }

    /// Keys for chunks that are stored beside a step, each once.
    pub(super) fn spare_keys(&mut self, count: usize) -> Result<Vec<ChunkKey>, Failure> {
        let from = 1_000_000 + self.next_key;
        self.next_key += count;
        keys(from..from + count)
    }

    /// Number of requests that the devices were sent so far.
    pub(super) fn requests(&self) -> u64 {
        self.engine.stats().tiers.iter().map(|tier| tier.device_requests).sum()
    }

    /// How the tiers do their I/O.
    pub(super) fn io_modes(&self) -> Vec<String> {
        self.engine.stats().tiers.into_iter().map(|tier| tier.io_mode).collect()
    }

    /// Reads one step into `buffer` and checks every byte of it; `stored` are stored meanwhile. `begins` and `ends` are
    /// called when it does.
    pub(super) fn load(
        &self,
        load: &Load,
        stored: &[ChunkKey],
        buffer: &mut [u8],
        begins: impl FnOnce(Instant),
        ends: impl FnOnce(),
    ) -> Result<Shot, Failure> {
        let chunks = load.masks.len();
        let keys = &self.keys[..chunks];
        let lease = self.engine.lookup(keys);
        let places = buffer.chunks_exact_mut(CHUNK_BYTES);
        let wants = keys.iter().zip(places).zip(&load.masks).enumerate().map(
            |(at, ((key, dest), mask))| {
                let mut want = match load.delivery {
                    Delivery::Copied => Want::new(key, dest),
                    Delivery::Handed => Want::handed(key, CHUNK_BYTES),
                };
                want.tiers = *mask;
                want.rank = u16::try_from(at * load.ranks / chunks).unwrap_or(0);
                want
            },
        );
        let mut wants: Vec<Want<'_>> = wants.collect();
        let shot = thread::scope(|scope| {
            let writer = (!stored.is_empty()).then(|| scope.spawn(|| self.store_beside(stored)));
            begins(Instant::now());
            let shot = self.timed(&lease, &mut wants, load.request_chunks);
            ends();
            let written = writer.map_or(Ok(()), |writer| {
                writer.join().unwrap_or_else(|_| Err(Failure::failed("the writer panicked")))
            });
            written.and(shot)
        })?;
        if !stored.is_empty() {
            self.flush()?;
        }
        check(&wants)?;
        Ok(shot)
    }

    fn store_beside(&self, keys: &[ChunkKey]) -> Result<(), Failure> {
        let mut payload = vec![0; CHUNK_BYTES];
        thread::sleep(STAGED_AFTER);
        keys.iter().try_for_each(|key| self.store(key, &mut payload))
    }

    fn timed(
        &self,
        lease: &Lease,
        wants: &mut [Want<'_>],
        request_chunks: usize,
    ) -> Result<Shot, Failure> {
        let request_chunks = request_chunks.max(1);
        let mut shot = Shot::default();
        let (mut arrivals, mut arrived_bytes, mut wrong) =
            (Vec::with_capacity(2 * wants.len()), 0, 0);
        let (cpu_before, began) = (cpu_time(), Instant::now());
        for (at, request) in wants.chunks_mut(request_chunks).enumerate() {
            let report = self.engine.load_handing(lease, request, |places, arrived| {
                let chunk = |place: &usize| at.saturating_mul(request_chunks) + place;
                wrong +=
                    places.iter().filter(|it| !self.expected.is_met(chunk(it), &arrived)).count();
                arrived_bytes += arrived.bytes().len() as u64;
                arrivals
                    .push(Arrival { seconds: began.elapsed().as_secs_f64(), bytes: arrived_bytes });
            });
            shot.add(&report);
        }
        shot.seconds = began.elapsed().as_secs_f64();
        shot.cpu_s = (cpu_time() - cpu_before).as_secs_f64();
        shot.arrivals = arrivals;
        match wrong {
            0 => Ok(shot),
            wrong => Err(Failure::failed(format!("{wrong} pieces were WRONG"))),
        }
    }

    /// Returns when no read has come in for a while: those that lost are over, too.
    pub(super) fn wait_until_quiet(&self) {
        let read = || self.engine.stats().tiers.iter().map(|tier| tier.read_bytes).sum::<u64>();
        let mut before = read();
        for _ in 0..100 {
            thread::sleep(2 * QUIET);
            let now = read();
            if now == before {
                break;
            }
            before = now;
        }
    }

    /// What went wrong since it was opened, by kind: nothing, if the figures are to count.
    pub(super) fn problems(&self) -> Result<(), Failure> {
        let stats = self.engine.stats();
        let mut problems: BTreeMap<String, u64> = stats
            .tiers
            .iter()
            .flat_map(|tier| tier.errors.iter().map(|(kind, count)| (kind.clone(), *count)))
            .collect();
        let timed_out: u64 = stats.tiers.iter().map(|tier| tier.timed_out_reads).sum();
        let corrupt: u64 = stats.tiers.iter().map(|tier| tier.corrupt_reads).sum();
        problems.insert("overdue reads".to_owned(), timed_out);
        problems.insert("corrupt reads".to_owned(), corrupt);
        problems.insert("failed writes".to_owned(), stats.replicas_failed + stats.lost_writes);
        problems.retain(|_, count| *count > 0);
        if problems.is_empty() {
            return Ok(());
        }
        Err(Failure::failed(format!("the engine counted failures: {problems:?}")))
    }
}

impl Shot {
    fn add(&mut self, report: &StepReport) {
        self.bytes += report.storage_bytes;
        self.duplicate_bytes += report.duplicate_bytes;
        self.tier_bytes.resize(report.tiers.len(), 0);
        self.tier_busy_s.resize(report.tiers.len(), 0.0);
        for (at, tier) in report.tiers.iter().enumerate() {
            self.tier_bytes[at] += tier.payload_bytes;
            self.tier_busy_s[at] += tier.busy_s;
            self.late_bytes += tier.late_bytes;
        }
    }
}

/// What an earlier step left would pass for this step's bytes.
pub(super) fn poison(buffer: &mut [u8]) {
    buffer.fill(0xa5);
}

/// Every chunk must have come from storage, and every byte of it must be what its key says.
fn check(wants: &[Want<'_>]) -> Result<(), Failure> {
    let wrong = |wants: &[Want<'_>]| -> Result<u64, Failure> {
        let mut wrong = 0;
        for want in wants {
            match want.outcome {
                // Looked at when it was handed over.
                Outcome::Hit(_) if want.dest.is_empty() => {}
                Outcome::Hit(_) => wrong += wrong_bytes(want.key.digest(), want.dest),
                Outcome::Miss(why) => {
                    return Err(Failure::failed(format!("a chunk was not delivered: {why:?}")));
                }
            }
        }
        Ok(wrong)
    };
    let (one, other) = wants.split_at(wants.len() / 2);
    let wrong = thread::scope(|scope| {
        let other = scope.spawn(|| wrong(other));
        let one = wrong(one)?;
        let other = other.join().unwrap_or_else(|_| Err(Failure::failed("a check panicked")))?;
        Ok::<_, Failure>(one + other)
    })?;
    match wrong {
        0 => Ok(()),
        wrong => Err(Failure::failed(format!("{wrong} bytes were WRONG"))),
    }
}

fn keys(range: Range<usize>) -> Result<Vec<ChunkKey>, Failure> {
    let namespace = Namespace {
        model: "bench".to_owned(),
        weights: "none".to_owned(),
        dtype: "u64".to_owned(),
        layout: format!("{CHUNK_BYTES} bytes"),
        chunk_tokens: 256,
        serde: "raw".to_owned(),
        hash_algorithm: "number".to_owned(),
        hash_seed: "none".to_owned(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "kvbraid bench".to_owned(),
        engine_major: 0,
        extra: BTreeMap::new(),
    };
    let space = KeySpace::new(&namespace);
    let keys = space.and_then(|space| {
        range.map(|index| space.key(0, 0, &(index as u64).to_le_bytes(), b"")).collect()
    });
    keys.map_err(|error| Failure::failed(format!("a key: {error}")))
}
