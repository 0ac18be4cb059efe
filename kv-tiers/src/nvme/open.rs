//! Opens a store: lock, a trial of how I/O works here, recovery.

use std::{io, sync::Arc, time::Duration};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{
    Arena, IoContext, IoMode, TierError, TierStats,
    nvme::{
        IoEngine, NvmeConfig, NvmeDetail, NvmeTier,
        backend::{self, Backend, Ended, Sending},
        files,
        index::Index,
        lock::DirectoryLock,
        ring::{Ring, RingOptions},
        room::{Space, is_full},
        segment::{BLOCK_LEN, Page},
        threads::Threads,
        transfer::{Direction, Memory, Run, Sizing, Transfer},
    },
    probe::RequestLimits,
};

#[cfg(feature = "glommio")]
use crate::nvme::glommio::Glommio;

/// A device that gives no sign for this long at open is not opened.
pub(super) const OPEN_WAIT: Duration = Duration::from_secs(30);

/// With fewer entries than this a ring is worth no more than threads.
const RING_ENTRIES_MIN: u32 = 8;

/// How I/O is done, as found out by trying.
struct Chosen {
    backend: Box<dyn Backend>,
    mode: IoMode,
    fallbacks: Vec<String>,
}

impl NvmeTier {
    /// Opens the store in `config.directory`, or makes it.
    ///
    /// `arenas` are registered with the kernel; slots of other arenas work too, slower. Every faster way of I/O is tried
    /// with a real write and read in the directory; what is refused is not used, said in one warning and in
    /// [`TierStats::fallbacks`]. Blocks while it reads the headers of all slots. `_now_ns` is for later versions.
    pub fn open(
        config: NvmeConfig,
        arenas: &[Arc<Arena>],
        _now_ns: u64,
    ) -> Result<Self, TierError> {
        config.check()?;
        let lock = DirectoryLock::take(&config.directory)?;
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| open_error(&config, "eventfd", errno.into()))?;
        let wake = Arc::new(wake);
        let chosen = choose(&config, arenas, &wake)?;
        let directory = config.directory.clone();
        let uuid = fastrand::u128(..).to_le_bytes();
        let space = Space::new(directory, config.capacity_bytes, config.segment_bytes(), uuid);
        let mut tier = Self {
            owner_pid: std::process::id(),
            backend: Some(chosen.backend),
            wake,
            wake_raised: false,
            index: Index::default(),
            persist: None,
            space,
            drain: Default::default(),
            reads: Default::default(),
            writes: Default::default(),
            writing: Default::default(),
            jobs: Default::default(),
            next_key: 0,
            ops: 0,
            hold_writes: false,
            closed: false,
            stats: TierStats { io_mode: chosen.mode, ..TierStats::default() },
            detail: NvmeDetail::default(),
            findings: Vec::new(),
            config,
            _lock: lock,
        };
        for line in chosen.fallbacks {
            tracing::warn!(tier = tier.config.name, "{line}");
            tier.stats.fallbacks.push(line);
        }
        tier.recover()?;
        Ok(tier)
    }
}

fn open_error(config: &NvmeConfig, call: &'static str, error: io::Error) -> TierError {
    let path = config.directory.clone();
    TierError::io(IoContext { call, path, offset: 0, length: 0 }, error)
}

/// Tries from the fastest way downwards until a write and a read bring the right bytes.
fn choose(
    config: &NvmeConfig,
    arenas: &[Arc<Arena>],
    wake: &Arc<EventFd>,
) -> Result<Chosen, TierError> {
    let mut allowed = config.allow;
    let mut fallbacks = Vec::new();
    loop {
        let (mut backend, mode) = build(config, arenas, wake, allowed, &mut fallbacks)?;
        let Err(error) = try_out(config, backend.as_mut(), arenas, wake, mode.direct) else {
            return Ok(Chosen { backend, mode, fallbacks });
        };
        backend::drain(backend, wake, config.drop_wait);
        let (what, flag) = match &error {
            // What is compared must not be something else.
            _ if config.engine != IoEngine::Own => return Err(error),
            TierError::Io { errno: libc::EINVAL, .. } if mode.direct => {
                ("O_DIRECT", &mut allowed.direct)
            }
            TierError::Io { context, .. } if context.call == "open" => return Err(error),
            _ if mode.registered_buffers => ("registered buffers", &mut allowed.registered_buffers),
            _ if mode.registered_files => ("registered files", &mut allowed.registered_files),
            _ if mode.ring => ("io_uring", &mut allowed.ring),
            _ => return Err(error),
        };
        *flag = false;
        fallbacks.push(format!("{what} not used: {error}"));
    }
}

fn build(
    config: &NvmeConfig,
    arenas: &[Arc<Arena>],
    wake: &Arc<EventFd>,
    allowed: IoMode,
    fallbacks: &mut Vec<String>,
) -> Result<(Box<dyn Backend>, IoMode), TierError> {
    let limits = RequestLimits::of(&config.directory, config.request_bytes_max);
    let sizing = Sizing::new(limits, arenas);
    let write_requests_max = config.write_requests_max as usize;
    #[cfg(feature = "glommio")]
    if config.engine == IoEngine::Glommio {
        let glommio = Glommio::start(config.ring_entries, write_requests_max, sizing, wake)
            .map_err(|error| open_error(config, "glommio", error))?;
        let mode = IoMode { ring: true, direct: true, ..IoMode::default() };
        return Ok((Box::new(glommio), mode));
    }
    if allowed.ring {
        let options = RingOptions {
            entries: config.ring_entries,
            write_requests_max,
            register_buffers: allowed.registered_buffers,
            register_files: allowed.registered_files,
            sizing: sizing.clone(),
        };
        let mut refused = Vec::new();
        let make = |entries| {
            let options = RingOptions { entries, ..options.clone() };
            refused.clear();
            Ring::new(options, arenas, Arc::clone(wake), &mut refused)
        };
        match with_fewer_entries(config.ring_entries, make) {
            Ok((ring, fewer)) => {
                let mode = IoMode {
                    ring: true,
                    direct: allowed.direct,
                    registered_buffers: ring.has_registered_buffers(),
                    registered_files: ring.has_registered_files(),
                };
                let lines = refused.iter().map(|(what, error)| format!("{what} not used: {error}"));
                for line in lines.chain(fewer) {
                    if !fallbacks.contains(&line) {
                        fallbacks.push(line);
                    }
                }
                return Ok((Box::new(ring), mode));
            }
            Err(error) => fallbacks.push(format!("io_uring not used: io_uring_setup: {error}")),
        }
    }
    let threads = Threads::new(config.threads, write_requests_max, sizing, wake)
        .map_err(|error| open_error(config, "clone", error))?;
    Ok((Box::new(threads), IoMode { direct: allowed.direct, ..IoMode::default() }))
}

/// Makes a ring of as many entries as there is memory for: a kernel can count them against the memlock limit, which is
/// 64 KiB for ordinary users of many systems. What is to be told of it.
fn with_fewer_entries<T>(
    wanted: u32,
    mut make: impl FnMut(u32) -> io::Result<T>,
) -> io::Result<(T, Option<String>)> {
    let mut entries = wanted;
    let mut refused = None;
    loop {
        match make(entries) {
            Ok(made) => {
                let tell = |error| {
                    format!("{wanted} ring entries not used but {entries}: io_uring_setup: {error}")
                };
                return Ok((made, refused.map(tell)));
            }
            Err(error) if is_out_of_memory(&error) && entries > RING_ENTRIES_MIN => {
                entries = (entries / 2).max(RING_ENTRIES_MIN);
                refused = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
}

fn is_out_of_memory(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM)
}

/// Writes a block and reads it back as chunks will be.
fn try_out(
    config: &NvmeConfig,
    backend: &mut dyn Backend,
    arenas: &[Arc<Arena>],
    wake: &EventFd,
    direct: bool,
) -> Result<(), TierError> {
    let mut file = files::scratch(&config.directory, direct)?;
    backend.add_file(&mut file);
    let file = Arc::new(file);
    let memory = arenas.iter().find_map(Arena::try_take).map(Memory::Slot);
    let mut memory = memory.unwrap_or_else(|| Memory::Page(Page::zeroed()));
    let pattern: Vec<u8> = (0..=250u8).cycle().take(BLOCK_LEN).collect();
    fill(&mut memory, &pattern);
    let run = Run { file_offset: 0, memory_offset: 0, bytes: BLOCK_LEN };
    let write = Transfer::one(0, Direction::Write, Arc::clone(&file), memory, run);
    let (memory, written) = run_alone(config, backend, wake, write)?;
    let result = match written {
        // A full disk says nothing about the way; chunks may still be read from it.
        Err(error) if is_full(&error) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => {
            let mut memory = memory;
            fill(&mut memory, &[0; BLOCK_LEN]);
            let read = Transfer::one(1, Direction::Read, Arc::clone(&file), memory, run);
            let (memory, read) = run_alone(config, backend, wake, read)?;
            let same = memory.bytes().starts_with(&pattern);
            read.and_then(|()| if same { Ok(()) } else { Err(wrong_bytes(config)) })
        }
    };
    backend.remove_file(&file);
    result
}

fn fill(memory: &mut Memory, bytes: &[u8]) {
    if let Some(start) = memory.bytes_mut().and_then(|all| all.get_mut(..bytes.len())) {
        start.copy_from_slice(bytes);
    }
}

fn wrong_bytes(config: &NvmeConfig) -> TierError {
    open_error(config, "read", io::Error::other("a block read back differs from what was written"))
}

/// Runs one transfer to its end. The outer error: it did not end.
fn run_alone(
    config: &NvmeConfig,
    backend: &mut dyn Backend,
    wake: &EventFd,
    transfer: Transfer,
) -> Result<(Memory, Result<(), TierError>), TierError> {
    backend.start(transfer);
    let mut ended = Vec::new();
    wait_for(config, backend, wake, &mut ended)?;
    let Some(Ended { transfer, failure }) = ended.pop() else {
        return Err(open_error(config, "wait", io::Error::from_raw_os_error(libc::ETIMEDOUT)));
    };
    let result = failure.map_or(Ok(()), |failure| Err(super::jobs::error_of(&transfer, failure)));
    Ok((transfer.memory, result))
}

/// Waits until something ended; an error if nothing does for [`OPEN_WAIT`].
pub(super) fn wait_for(
    config: &NvmeConfig,
    backend: &mut dyn Backend,
    wake: &EventFd,
    ended: &mut Vec<Ended>,
) -> Result<(), TierError> {
    let slice = Duration::from_millis(50);
    for _ in 0..OPEN_WAIT.as_millis() / slice.as_millis() {
        backend.pump(Sending::All, ended);
        if !ended.is_empty() {
            return Ok(());
        }
        backend::wait(wake, slice);
    }
    Err(open_error(config, "wait", io::Error::from_raw_os_error(libc::ETIMEDOUT)))
}
