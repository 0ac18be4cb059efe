//! What an engine is opened from: TOML, JSON, or these structs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_chunk::Namespace;
use serde::Deserialize;

use crate::{ByteSize, EngineError, Observer};

mod check;
mod flash;
pub(crate) mod memory;
mod queue;
mod rank;
mod shared;
mod space;
mod window;

pub use self::{
    flash::{FlashPolicy, FlashReservation, FlashSection},
    queue::QueueSection,
    shared::SharedSection,
};
pub(crate) use window::windows;

/// A whole configuration. Tiers are named fastest first; the engine then learns their order from their live rates.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// `[engine]`.
    #[serde(default)]
    pub engine: EngineConfig,
    /// `[[tier]]`, one to eight of them.
    #[serde(default, rename = "tier")]
    pub tiers: Vec<TierConfig>,
    /// `[queue]`; only looked at by a [`LoadQueue`](crate::LoadQueue).
    #[serde(default)]
    pub queue: QueueSection,
    /// `[namespace]`, each field mandatory but `extra`; only looked at by adapters of serving engines: callers of an
    /// engine itself bring whole keys.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    /// Told of what is published, evicted and lost; not in files.
    #[serde(skip)]
    pub observer: Option<Observer>,
}

/// `[engine]`: memory and deadlines.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Largest payload of a chunk; one slot of memory holds one chunk.
    pub chunk_bytes_max: ByteSize,
    /// Memory that keeps whole chunks for the next load; 0 keeps none.
    pub host_cache: ByteSize,
    /// Memory that storage reads land in, besides the cache; by default two windows of every tier. It bounds windows that
    /// are learned; of a smaller one than all windows together each tier gets its part.
    pub read_buffer: Option<ByteSize>,
    /// Memory that holds chunks until they are written.
    pub staging: ByteSize,
    /// Keep stored chunks in the host cache, too.
    pub cache_stores: bool,
    /// Lock the memory (asks for RLIMIT_MEMLOCK; refused = unlocked, said in the stats).
    pub lock_memory: bool,
    /// A storage read that takes longer has failed.
    pub read_deadline_ms: u64,
    /// What a load has not got after this is a miss.
    pub step_deadline_ms: u64,
    /// A chunk staged longer than this is written even while reads run.
    pub write_max_age_ms: u64,
    /// How long dropping the engine may take to write what is staged.
    pub close_deadline_ms: u64,
    /// How long a look-up waits for tiers that other nodes write into; later answers serve later look-ups.
    pub lookup_wait_ms: u64,
    /// After a tier had no room, its writes pause this long.
    pub write_back_off_ms: u64,
    /// Bytes a second that each tier reads and verifies while no step runs, to find what has rotted; 0, the default,
    /// for none.
    pub scrub_bytes_per_s: ByteSize,
    /// What idle tiers do at the end of a step.
    pub tail: TailPolicy,
    /// Unix socket (mode 0600) that answers `stats`; none by default.
    pub socket: Option<PathBuf>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            chunk_bytes_max: ByteSize::mib(4),
            host_cache: ByteSize::mib(256),
            read_buffer: None,
            staging: ByteSize::mib(128),
            cache_stores: true,
            lock_memory: false,
            read_deadline_ms: 30_000,
            step_deadline_ms: 60_000,
            write_max_age_ms: 2_000,
            close_deadline_ms: 30_000,
            lookup_wait_ms: 20,
            write_back_off_ms: 1_000,
            scrub_bytes_per_s: ByteSize(0),
            tail: TailPolicy::default(),
            socket: None,
        }
    }
}

/// What idle tiers do at the end of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TailPolicy {
    /// Nothing: every chunk is read whole, by one tier.
    Whole,
    /// Read again what another tier is slow to deliver.
    Duplicate,
    /// That, and read the last chunks in pieces.
    #[default]
    SplitAndDuplicate,
}

impl From<TailPolicy> for kv_router::Tail {
    fn from(policy: TailPolicy) -> Self {
        match policy {
            TailPolicy::Whole => Self::Whole,
            TailPolicy::Duplicate => Self::Duplicate,
            TailPolicy::SplitAndDuplicate => Self::SplitAndDuplicate,
        }
    }
}

/// `[[tier]]`: one place that keeps chunks.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TierConfig {
    /// For reports; unique.
    pub name: String,
    /// What it is.
    pub kind: TierKind,
    /// Its directory, for kinds with files; of kind flash a file or a device. One tier, one path.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// Most bytes it may use, all of its files counted. Mandatory.
    #[serde(default)]
    pub capacity: Option<ByteSize>,
    /// Bytes of one preallocated file.
    #[serde(default)]
    pub segment: Option<ByteSize>,
    /// Free space that the file system shall keep, whoever else uses it: segments are given up for it when something is
    /// written. 0, the default, for none. Of kind nvme.
    #[serde(default)]
    pub min_free_bytes: Option<ByteSize>,
    /// Once so much of a full store is in use, in thousandths, chunks are dropped ahead of writes, a few at a time; 990
    /// by default. Of kind nvme.
    #[serde(default)]
    pub high_watermark_permille: Option<u32>,
    /// Until so much is in use; 10 below `high_watermark_permille` by default. Of kind nvme.
    #[serde(default)]
    pub low_watermark_permille: Option<u32>,
    /// Reads in flight. By default the least number that reaches the tier's full rate is learned while it works.
    #[serde(default)]
    pub window: Option<u32>,
    /// The most reads in flight where the number is learned; by default what memory holds, up to 32.
    #[serde(default)]
    pub window_max: Option<u32>,
    /// Writes in flight.
    #[serde(default = "default_write_window")]
    pub write_window: u32,
    /// Its known rate when it reads alone, for the bound in reports.
    #[serde(default)]
    pub alone_bytes_per_s: Option<ByteSize>,
    /// Paces the tier below its real speed.
    #[serde(default)]
    pub throttle: Option<ThrottleSection>,
    /// Settings of a shared tier.
    #[serde(default)]
    pub shared: Option<SharedSection>,
    /// Settings of a tier of kind flash.
    #[serde(default)]
    pub flash: Option<FlashSection>,
}

/// Kinds of tiers that a configuration can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TierKind {
    /// Files of a local file system, through io_uring and O_DIRECT where they work.
    Nvme,
    /// Files of a file system that many nodes mount, each chunk once for all of them.
    Shared,
    /// Host memory.
    Memory,
    /// Memory on flash: a file whose page cache is the fast part of it, or a Device-DAX device.
    Flash,
}

impl TierKind {
    /// As a configuration says it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nvme => "nvme",
            Self::Shared => "shared",
            Self::Memory => "memory",
            Self::Flash => "flash",
        }
    }
}

/// `[tier.throttle]`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ThrottleSection {
    /// Reads and writes together.
    pub bytes_per_s: ByteSize,
    /// What may pass at once after a pause.
    #[serde(default)]
    pub burst: Option<ByteSize>,
    /// Added to every operation.
    #[serde(default)]
    pub latency_us: u64,
}

impl ThrottleSection {
    /// A rate, with the default burst and no added latency.
    pub const fn new(bytes_per_s: ByteSize) -> Self {
        Self { bytes_per_s, burst: None, latency_us: 0 }
    }
}

fn default_write_window() -> u32 {
    4
}

impl Config {
    /// Default engine settings over `tiers`, fastest first.
    pub fn new(tiers: Vec<TierConfig>) -> Self {
        Self { tiers, ..Self::default() }
    }

    /// Reads TOML and checks it.
    pub fn from_toml(text: &str) -> Result<Self, EngineError> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| text[..span.start].lines().count().max(1));
            let key = line.and_then(|line| key_on(text, line));
            parse_error(key, line, error.message())
        })?;
        config.check()?;
        Ok(config)
    }

    /// Reads JSON and checks it.
    pub fn from_json(text: &str) -> Result<Self, EngineError> {
        let config: Self = serde_json::from_str(text).map_err(|error| {
            let key = key_before(text, error.line(), error.column());
            parse_error(key, None, &error.to_string())
        })?;
        config.check()?;
        Ok(config)
    }

    /// Reads a file: JSON if its name ends in `.json`, else TOML.
    pub fn from_file(path: &Path) -> Result<Self, EngineError> {
        let text = fs::read_to_string(path)
            .map_err(|source| EngineError::Read { path: path.to_owned(), source })?;
        if path.extension().is_some_and(|extension| extension == "json") {
            Self::from_json(&text)
        } else {
            Self::from_toml(&text)
        }
    }

    /// Fails unless an engine can be opened from this; the error names the field and what to write.
    pub fn check(&self) -> Result<(), EngineError> {
        check::check(self)
    }
}

impl TierConfig {
    /// A tier in host memory.
    pub fn memory(name: &str, capacity: ByteSize) -> Self {
        Self {
            name: name.to_owned(),
            kind: TierKind::Memory,
            path: None,
            capacity: Some(capacity),
            segment: None,
            min_free_bytes: None,
            high_watermark_permille: None,
            low_watermark_permille: None,
            window: None,
            window_max: None,
            write_window: default_write_window(),
            alone_bytes_per_s: None,
            throttle: None,
            shared: None,
            flash: None,
        }
    }

    /// Memory on flash: `path` is a file on local flash, made if absent, or a Device-DAX device.
    pub fn flash(name: &str, path: impl Into<PathBuf>, capacity: ByteSize) -> Self {
        Self { kind: TierKind::Flash, path: Some(path.into()), ..Self::memory(name, capacity) }
    }

    /// A tier of files in `path`, a directory that many nodes mount.
    pub fn shared(name: &str, path: impl Into<PathBuf>, capacity: ByteSize) -> Self {
        Self { kind: TierKind::Shared, path: Some(path.into()), ..Self::memory(name, capacity) }
    }

    /// A tier of files in `path`.
    pub fn nvme(name: &str, path: impl Into<PathBuf>, capacity: ByteSize) -> Self {
        Self { kind: TierKind::Nvme, path: Some(path.into()), ..Self::memory(name, capacity) }
    }
}

/// The key on a line of TOML.
fn key_on(text: &str, line: usize) -> Option<&str> {
    let line = text.lines().nth(line.checked_sub(1)?)?;
    let key = line.split_once('=')?.0.trim_matches([' ', '"', '{', '\t']);
    (!key.is_empty()).then_some(key)
}

/// The last key of JSON before a place, all of which may be one line.
fn key_before(text: &str, line: usize, column: usize) -> Option<&str> {
    let above: usize = text.split_inclusive('\n').take(line.checked_sub(1)?).map(str::len).sum();
    let before = text.get(..above + column).unwrap_or(text);
    let key = before[..before.rfind("\":")?].rsplit('"').next()?;
    (!key.is_empty()).then_some(key)
}

/// Names the field of a parse error: the one the parser speaks of, else the one where it stopped.
fn parse_error(key: Option<&str>, line: Option<usize>, message: &str) -> EngineError {
    let spoken =
        ["unknown field `", "missing field `", "duplicate key `"].iter().find_map(|intro| {
            let rest = &message[message.find(intro)? + intro.len()..];
            Some(rest[..rest.find('`')?].to_owned())
        });
    // TOML has keys without a letter.
    let field = spoken
        .filter(|field| !field.is_empty())
        .or_else(|| key.map(str::to_owned))
        .unwrap_or_else(|| "configuration".to_owned());
    let place = line.map_or(String::new(), |line| format!(" (line {line})"));
    let fix = if message.contains("missing field") { "add it" } else { "correct or remove it" };
    EngineError::config(field, format!("{}{place}", message.trim_end()), fix)
}
