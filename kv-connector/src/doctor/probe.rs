//! A tier tried out: an engine over it alone, in a fresh directory inside the tier's, writes, reads and verifies.

use std::{
    thread,
    time::{Duration, Instant},
};

use kv_chunk::{ChunkKey, KeySpace, Namespace};

use super::{Diagnosis, machine};
use crate::{
    ByteSize, Config, Engine, EngineError, Stored, TierKind, Want,
    replay::{Scratch, fill, wrong_bytes},
};

/// What is written at most, and for how long.
const BYTES_MAX: u64 = 256 << 20;
const WRITE_FOR: Duration = Duration::from_secs(2);
const FLUSH_FOR: Duration = Duration::from_secs(20);
const READ_FOR: Duration = Duration::from_secs(2);
/// How long the engine's own search for a window may take after open.
const SEARCH_FOR: Duration = Duration::from_secs(2);
const CHUNKS_LEAST: u64 = 4;
/// How long a tier may take to say what it holds.
const LOOKUP_WAIT_MS: u64 = 5_000;

pub(super) fn examine(diagnosis: &mut Diagnosis, config: &Config, place: usize) {
    let tier = &config.tiers[place];
    let what = format!("tier {}", tier.name);
    match try_out(config, place) {
        Ok(Some(tried)) => {
            io(diagnosis, &what, tier.kind, &tried);
            rates(diagnosis, &what, &tried);
        }
        Ok(None) => {
            let why = "its bandwidth is not known";
            diagnosis.warn(what, "no room to try it", (why, "make room, or raise its capacity"));
        }
        Err(error) => {
            let mut found = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(inner) = cause {
                found = format!("{found}: {inner}");
                cause = inner.source();
            }
            diagnosis.fail(what, found, ("an engine does not open there", "see the lines above"));
        }
    }
}

/// What was seen.
struct Tried {
    io_mode: String,
    fallbacks: Vec<String>,
    chunks: u64,
    written_bytes: u64,
    written_s: f64,
    read_bytes: u64,
    read_s: f64,
    wrong_bytes: u64,
    misses: u64,
    window: Option<u32>,
}

fn try_out(config: &Config, place: usize) -> Result<Option<Tried>, EngineError> {
    let Some(config) = small(config, place) else { return Ok(None) };
    let failed = |error: crate::replay::ReplayError| {
        EngineError::system("a trial directory", std::io::Error::other(error))
    };
    let scratch = Scratch::new(&config).map_err(failed)?;
    let payload = usize::try_from(config.engine.chunk_bytes_max.0).unwrap_or(usize::MAX);
    // Half of the space, so that nothing is evicted on the way.
    let room = config.tiers[0].capacity.unwrap_or_default().0 / 2;
    let record = kv_tiers::record_bytes(config.engine.chunk_bytes_max.0);
    let keys = keys(BYTES_MAX.min(room) / record);
    let engine = Engine::open(scratch.config().clone())?;
    let (stored, written_s) = write(&engine, &keys, payload);
    engine.close(FLUSH_FOR);
    let engine = Engine::open(scratch.config().clone())?;
    let window = search(&engine);
    let mut tried = read(&engine, &keys[..stored], payload);
    let stats = engine.stats();
    engine.close(FLUSH_FOR);
    (tried.written_s, tried.window) = (written_s, window);
    tried.written_bytes = stored as u64 * payload as u64;
    for tier in &stats.tiers {
        tried.io_mode.clone_from(&tier.io_mode);
        tried.fallbacks.clone_from(&tier.fallbacks);
    }
    Ok(Some(tried))
}

/// The tier alone, with as much space as the trial needs; none if it has less than that.
fn small(config: &Config, place: usize) -> Option<Config> {
    let mut small = config.clone();
    small.observer = None;
    small.tiers = vec![config.tiers[place].clone()];
    small.engine.host_cache = ByteSize(0);
    let chunk = config.engine.chunk_bytes_max.0;
    let record = kv_tiers::record_bytes(chunk);
    small.engine.staging =
        ByteSize(record.saturating_mul(8).max(64 << 20).min(BYTES_MAX.max(record)));
    small.engine.cache_stores = false;
    small.engine.scrub_bytes_per_s = ByteSize(0);
    // A shared tier that was just opened knows no chunk: on a busy machine it answers late.
    small.engine.lookup_wait_ms = small.engine.lookup_wait_ms.max(LOOKUP_WAIT_MS);
    let tier = &mut small.tiers[0];
    let space = nix::sys::statvfs::statvfs(tier.path.as_deref()?).ok()?;
    let free = space.blocks_available().saturating_mul(space.fragment_size());
    let wanted = 2 * BYTES_MAX.max(CHUNKS_LEAST * record);
    let cap = wanted.max(tier.segment.unwrap_or_default().0).min(tier.capacity?.0);
    tier.capacity = Some(ByteSize(cap));
    (cap < free / 2 && cap >= 2 * CHUNKS_LEAST * record).then_some(small)
}

fn keys(count: u64) -> Vec<ChunkKey> {
    let text = |text: &str| text.to_owned();
    let namespace = Namespace {
        model: text("kvbraid doctor"),
        weights: text("none"),
        dtype: text("none"),
        layout: text("none"),
        chunk_tokens: 1,
        serde: text("raw"),
        hash_algorithm: text("none"),
        hash_seed: text("none"),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: text("kvbraid"),
        engine_major: 0,
        extra: Default::default(),
    };
    let space = KeySpace::new(&namespace).expect("no field is blank");
    let key = |n: u64| space.key(0, 0, &n.to_le_bytes(), b"").expect("eight bytes are a hash");
    (0..count.max(CHUNKS_LEAST)).map(key).collect()
}

/// Writes chunks while there is time; how many are there, and how long it took.
fn write(engine: &Engine, keys: &[ChunkKey], payload: usize) -> (usize, f64) {
    let mut buffer = vec![0; payload];
    let mut stored = 0;
    let mut busy = Duration::ZERO;
    for key in keys {
        fill(key.digest(), &mut buffer);
        let begun = Instant::now();
        while engine.store(key, &buffer) != Stored::Staged && busy + begun.elapsed() < WRITE_FOR {
            thread::sleep(Duration::from_millis(1));
        }
        busy += begun.elapsed();
        stored += 1;
        if busy > WRITE_FOR {
            break;
        }
    }
    let begun = Instant::now();
    engine.flush(FLUSH_FOR);
    (stored, (busy + begun.elapsed()).as_secs_f64())
}

/// What the engine's own search found after open.
fn search(engine: &Engine) -> Option<u32> {
    let end = Instant::now() + SEARCH_FOR;
    loop {
        let search = engine.stats().tiers.first().map(|tier| tier.window_search.clone())?;
        if search.probe.is_some() || Instant::now() > end {
            return search.probe.and_then(|probe| probe.window);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn read(engine: &Engine, keys: &[ChunkKey], payload: usize) -> Tried {
    let mut tried = Tried {
        io_mode: String::new(),
        fallbacks: Vec::new(),
        chunks: keys.len() as u64,
        written_bytes: 0,
        written_s: 0.0,
        read_bytes: 0,
        read_s: 0.0,
        wrong_bytes: 0,
        misses: 0,
        window: None,
    };
    let at_once = keys.len().min((128 << 20) / payload.max(1)).max(1);
    let mut buffers = vec![vec![0; payload]; at_once];
    let mut busy = Duration::ZERO;
    for keys in keys.chunks(at_once) {
        let mut wants: Vec<_> =
            keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
        let begun = Instant::now();
        let report = engine.load(&engine.lookup(keys), &mut wants);
        busy += begun.elapsed();
        tried.misses += keys.len() as u64 - report.hits();
        tried.read_bytes += report.hits() * payload as u64;
        let hits = wants.iter().filter(|want| want.outcome.is_hit());
        tried.wrong_bytes +=
            hits.map(|want| wrong_bytes(want.key.digest(), want.dest)).sum::<u64>();
        if busy > READ_FOR {
            break;
        }
    }
    tried.read_s = busy.as_secs_f64();
    tried
}

fn io(diagnosis: &mut Diagnosis, what: &str, kind: TierKind, tried: &Tried) {
    let what = format!("{what} io");
    if tried.fallbacks.is_empty() {
        diagnosis.ok(what, &tried.io_mode);
        return;
    }
    for line in &tried.fallbacks {
        let (why, fix) = advice(line, kind);
        diagnosis.warn(&what, format!("{}; {line}", tried.io_mode), (why, fix));
    }
}

/// What a fallback of a driver means.
fn advice(line: &str, kind: TierKind) -> (&'static str, &'static str) {
    let threads =
        "reads and writes go through threads: more CPU time and latency for the same bandwidth";
    if line.starts_with("io_uring") && line.contains("Cannot allocate memory") {
        return (threads, "raise RLIMIT_MEMLOCK: ulimit -l unlimited, or --ulimit memlock=-1");
    }
    if line.starts_with("io_uring") && machine::io_uring_disabled().is_some_and(|it| it > 0) {
        return (threads, "sysctl -w kernel.io_uring_disabled=0 (on the host, for a container)");
    }
    if line.starts_with("io_uring") && machine::has_seccomp() {
        return (
            threads,
            "a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register (docker: --security-opt seccomp=FILE)",
        );
    }
    if line.starts_with("io_uring") {
        return (threads, "a kernel with io_uring (5.15 or later)");
    }
    if line.starts_with("registered buffers") || line.contains("ring entries") {
        return (
            "each read pins its pages anew, or fewer reads are given to the kernel at once",
            "raise RLIMIT_MEMLOCK: ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1",
        );
    }
    if line.starts_with("O_DIRECT") && kind == TierKind::Nvme {
        return (
            "reads go through the page cache: copied once more, and they push out what others need",
            "ext4 or xfs on a block device",
        );
    }
    ("a faster way of I/O is not used", "see the driver's words")
}

fn rates(diagnosis: &mut Diagnosis, what: &str, tried: &Tried) {
    let what = format!("{what} speed");
    if tried.wrong_bytes > 0 {
        let found = format!("{} bytes came back WRONG", tried.wrong_bytes);
        diagnosis.fail(
            what,
            found,
            ("the medium, its driver or the memory corrupts", "do not use it"),
        );
        return;
    }
    if tried.misses > 0 || tried.read_bytes == 0 {
        let found = format!("{} of {} chunks did not come back", tried.misses, tried.chunks);
        let why = "writes fail, or take longer than is waited for here";
        diagnosis.fail(what, found, (why, "look at the kernel's log, and at the device's load"));
        return;
    }
    let rate = |bytes: u64, seconds: f64| bytes as f64 / seconds.max(1e-9) / 1e6;
    let window = tried
        .window
        .map_or(String::new(), |window| format!(", full rate with {window} reads in flight"));
    let (read, written) =
        (rate(tried.read_bytes, tried.read_s), rate(tried.written_bytes, tried.written_s));
    diagnosis.ok(
        what,
        format!(
            "{read:.0} MB/s read (all verified){window}; {written:.0} MB/s written, of {} in all",
            ByteSize(tried.written_bytes)
        ),
    );
}
