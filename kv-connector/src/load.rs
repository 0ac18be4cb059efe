//! One load, on the caller's thread: plan, start the storage reads, copy memory meanwhile, then what arrives.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
};

use kv_chunk::{Digest, WriteId, block_count};
use kv_router::{ChunkSpec, StepPool, TierMask};
use kv_tiers::Record;

use crate::{
    Lease, MissReason, Outcome, Source, StepReport, Want,
    shared::{Reading, Shared},
    step::{Message, StepHandle},
    sync::lock_plain,
};

mod arrive;
mod hand;
mod plan;

pub use self::hand::Arrived;
use self::hand::Taker;

/// Wanted chunks with one key: read once, copied to each destination.
#[derive(Debug)]
struct Group {
    /// Places in the caller's slice; at least one.
    wants: Vec<usize>,
    /// No outcome yet.
    open: bool,
    /// Which reading of the chunk the bytes received belong to.
    attempt: u8,
    received_bytes: u64,
}

/// A load in progress.
struct Load<'a, 'w> {
    shared: &'a Shared,
    wants: &'a mut [Want<'w>],
    /// Takes what is handed over.
    taker: Taker<'a>,
    /// Places in `wants` that take what is handed over next.
    takers: Vec<usize>,
    groups: Vec<Group>,
    /// Groups without an outcome.
    open: usize,
    /// Chunks that came in pieces, to be put together for the host cache.
    to_keep: Vec<(usize, WriteId)>,
    report: StepReport,
}

/// Storage reads in progress.
struct Running<'a> {
    step: StepHandle,
    messages: Receiver<Message>,
    /// Groups, by chunk of the pool.
    groups: Vec<usize>,
    _reading: Reading<'a>,
}

type InMemory = (usize, Source, Arc<Record>);

pub(crate) fn load(
    shared: &Shared,
    lease: &Lease,
    wants: &mut [Want<'_>],
    taker: Taker<'_>,
) -> StepReport {
    let started = Instant::now();
    let _span = tracing::debug_span!("step", wanted = wants.len()).entered();
    let report = StepReport::new(wants.len(), shared.tiers.len());
    let mut load = Load {
        shared,
        wants,
        taker,
        takers: Vec::new(),
        groups: Vec::new(),
        open: 0,
        to_keep: Vec::new(),
        report,
    };
    if shared.is_usable() {
        load.run(lease, started);
    } else {
        load.wants.iter_mut().for_each(|want| want.outcome = Outcome::Miss(MissReason::Closed));
    }
    let Load { wants, mut report, .. } = load;
    wants.iter().for_each(|want| report.count(want.outcome));
    report.seconds = started.elapsed().as_secs_f64();
    if !shared.is_forked() {
        lock_plain(&shared.totals).count_step(&report);
    }
    let (hits, bytes) = (report.hits(), report.storage_bytes);
    tracing::debug!(hits, storage_bytes = bytes, seconds = report.seconds, "step done");
    report
}

impl<'a> Load<'a, '_> {
    fn run(&mut self, lease: &Lease, started: Instant) {
        let deadline = started + Duration::from_millis(self.shared.config.step_deadline_ms);
        self.group();
        // Until all of it is copied out.
        let _retrieving = self.shared.retrieving(self.wants.iter().map(|want| want.key.digest()));
        let in_memory = self.find_in_memory(lease);
        let running = self.start_reads(&in_memory);
        for (group, source, record) in in_memory {
            let copying = Instant::now();
            self.take_record(group, source, &record);
            self.report.memory_s += copying.elapsed().as_secs_f64();
            if let Some(running) = &running {
                self.take_arrived(running);
            }
        }
        if let Some(running) = running {
            self.finish_reads(&running, deadline);
        }
    }

    /// Wants with one key become one group.
    fn group(&mut self) {
        let mut by_digest: HashMap<Digest, usize> = HashMap::with_capacity(self.wants.len());
        for (index, want) in self.wants.iter_mut().enumerate() {
            want.outcome = Outcome::Miss(MissReason::NotHeld);
            let group = *by_digest.entry(want.key.digest()).or_insert(self.groups.len());
            match self.groups.get_mut(group) {
                Some(group) => group.wants.push(index),
                None => self.groups.push(Group {
                    wants: vec![index],
                    open: true,
                    attempt: 0,
                    received_bytes: 0,
                }),
            }
        }
        // Another key with the same digest stays a miss: no tier can hold both.
        for group in &mut self.groups {
            let key = self.wants[group.wants[0]].key;
            group.wants.retain(|&want| self.wants[want].key == key);
        }
        self.open = self.groups.len();
    }

    fn find_in_memory(&self, lease: &Lease) -> Vec<InMemory> {
        let find = |(index, group): (usize, &Group)| {
            let key = self.wants[group.wants[0]].key;
            let leased = || Some((Source::HostCache, Arc::clone(lease.record(key)?)));
            let (source, record) = self.shared.in_memory(key).or_else(leased)?;
            Some((index, source, record))
        };
        self.groups.iter().enumerate().filter_map(find).collect()
    }

    /// Plans and queues the reads of what memory does not hold; `None` if there are none.
    fn start_reads(&mut self, in_memory: &[InMemory]) -> Option<Running<'a>> {
        let shared = self.shared;
        let readable = shared.readable();
        let mut memory = in_memory.iter().map(|(group, ..)| *group).peekable();
        let (mut specs, mut keys, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        for group in 0..self.groups.len() {
            if memory.next_if_eq(&group).is_some() {
                continue;
            }
            match self.spec(group, readable) {
                Ok(spec) => {
                    specs.push(spec);
                    keys.push(self.wants[self.groups[group].wants[0]].key.clone());
                    groups.push(group);
                }
                Err(reason) => self.miss(group, reason),
            }
        }
        if specs.is_empty() {
            return None;
        }
        let pool = match StepPool::new(&specs, &plan::pool_config(shared)) {
            Ok(pool) => pool,
            Err(error) => {
                tracing::error!(%error, "a step could not be planned");
                groups.into_iter().for_each(|group| self.miss(group, MissReason::NotLoaded));
                return None;
            }
        };
        let (sender, messages) = channel();
        let step = StepHandle::new(pool, keys, sender);
        let _reading = Reading::new(shared);
        shared.start_step(&step);
        Some(Running { step, messages, groups, _reading })
    }

    fn spec(&self, group: usize, readable: u8) -> Result<ChunkSpec, MissReason> {
        let group = &self.groups[group];
        let wants = || group.wants.iter().map(|&want| &self.wants[want]);
        let first = &self.wants[group.wants[0]];
        let bytes = first.payload_bytes() as u64;
        if bytes > self.shared.config.chunk_bytes_max.0 {
            return Err(MissReason::WrongLength);
        }
        let held = self.shared.directory.tiers(first.key.digest());
        let allowed = wants().fold(0, |mask, want| mask | want.tiers.bits());
        match held & readable & allowed {
            0 if held == 0 => Err(MissReason::NotHeld),
            0 => Err(MissReason::TierMasked),
            tiers => Ok(ChunkSpec {
                tiers: TierMask::from_bits(tiers),
                blocks: u32::try_from(block_count(bytes)).unwrap_or(u32::MAX).max(1),
                bytes,
                rank: first.rank,
            }),
        }
    }

    fn miss(&mut self, group: usize, reason: MissReason) {
        let group = &mut self.groups[group];
        if std::mem::take(&mut group.open) {
            self.open -= 1;
            for &want in &group.wants {
                self.wants[want].outcome = Outcome::Miss(reason);
            }
        }
    }
}
