//! Serving engines that open one engine for each of their ranks: each gets its part of what the configuration gives
//! the node.

use std::path::{Path, PathBuf};

use kv_tiers::record_bytes;

use super::{Config, TierKind, windows};
use crate::{ByteSize, EngineError};

impl Config {
    /// The part of one of `ranks` engines on this node that are opened from the same configuration.
    ///
    /// Directories and the socket become the rank's own (`rank-3` in the directory, `rank-3.` before the socket's name);
    /// `rank` need only differ from that of the other engines. Capacities, windows, memory and rates are divided by
    /// `ranks`. A directory that many nodes share stays one, with its whole cap: its ranks keep their chunks apart by key.
    ///
    /// # Errors
    /// If what is left is too little to open an engine from.
    pub fn for_rank(mut self, rank: u32, ranks: u32) -> Result<Self, EngineError> {
        if ranks == 0 {
            return Err(EngineError::config("ranks", "0 engines", "write at least 1"));
        }
        self.check()?;
        let directory = format!("rank-{rank}");
        let is_device = |path: &Path| path.exists() && !path.is_file();
        for (place, tier) in self.tiers.iter().enumerate() {
            if tier.kind == TierKind::Flash && tier.path.as_deref().is_some_and(is_device) {
                let field = format!("tier[{place}].path");
                let fix = "write a file, or a configuration for each rank";
                return Err(EngineError::config(field, "a device serves one engine", fix));
            }
        }
        let windows = windows(&self);
        let part = |bytes: ByteSize| ByteSize(bytes.0 / u64::from(ranks));
        for (tier, window) in self.tiers.iter_mut().zip(windows) {
            let places = |window: u32| (window / ranks).max(1);
            tier.window = tier.window.map(places);
            if tier.window.is_none() {
                tier.window_max = Some(places(window.max));
            }
            tier.write_window = places(tier.write_window);
            tier.alone_bytes_per_s = tier.alone_bytes_per_s.map(part);
            if let Some(throttle) = &mut tier.throttle {
                throttle.bytes_per_s = part(throttle.bytes_per_s);
            }
            if tier.kind == TierKind::Shared {
                continue;
            }
            tier.capacity = tier.capacity.map(part);
            let own = |path: PathBuf| match tier.kind {
                // A file, and not a directory of files.
                TierKind::Flash => beside(&path, &directory),
                _ => path.join(&directory),
            };
            tier.path = tier.path.take().map(own);
            if let Some(flash) = &mut tier.flash {
                flash.protected_bytes = flash.protected_bytes.map(part);
            }
        }
        let record = record_bytes(self.engine.chunk_bytes_max.0);
        let at_least = |bytes: ByteSize, least: u64| ByteSize(part(bytes).0.max(least));
        let engine = &mut self.engine;
        engine.host_cache = part(engine.host_cache);
        engine.staging = at_least(engine.staging, record);
        engine.read_buffer = engine.read_buffer.map(|bytes| at_least(bytes, 8 * record));
        engine.scrub_bytes_per_s = part(engine.scrub_bytes_per_s);
        engine.socket = engine.socket.take().map(|path| beside(&path, &directory));
        let memory = self.queue.memory.map(|bytes| at_least(bytes, engine.chunk_bytes_max.0));
        self.queue.memory = memory;
        self.check().map_err(|error| as_one_of(error, ranks))?;
        Ok(self)
    }
}

/// A rank's own file, beside that of the configuration.
fn beside(path: &Path, rank: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{rank}.{name}"))
}

/// Says that a value is too small only because it was divided.
fn as_one_of(error: EngineError, ranks: u32) -> EngineError {
    match error {
        EngineError::Config { field, problem, fix } if ranks > 1 => {
            let fix = format!("{fix} for each of {ranks} ranks");
            EngineError::Config { field, problem, fix }
        }
        other => other,
    }
}
