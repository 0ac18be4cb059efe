//! A device in virtual time: no bytes, but honest about bandwidth, queue, capacity and protection.

use std::collections::{BTreeSet, VecDeque};

use crate::{
    ArenaView, Caps, Extent, FastTier, FastTierError, Load, Protection, Residency, ResidencyReport,
    StageEvent, StageId, Staging,
};

const NS_PER_S: u64 = 1_000_000_000;
const EIO: i32 = 5;

/// What is simulated.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimulatedConfig {
    /// Bytes of the arena.
    pub capacity_bytes: u64,
    /// Bytes of fast memory.
    pub fast_bytes: u64,
    /// Aggregate staging rate.
    pub bytes_per_s: u64,
    /// Most bytes protected at once.
    pub pin_limit_bytes: u64,
    /// Granule of staging, protection and eviction.
    pub granule_bytes: u64,
    /// From submission until a staging's first byte may move.
    pub latency_ns: u64,
    /// Stagings in flight.
    pub queue_ops_max: usize,
    /// A staging that reaches into one of these fails there with EIO.
    pub bad_extents: Vec<Extent>,
}

impl SimulatedConfig {
    /// Defaults: granules of 2 MiB, no latency, 64 stagings in flight, all fast memory may be protected.
    pub const fn new(capacity_bytes: u64, fast_bytes: u64, bytes_per_s: u64) -> Self {
        Self {
            capacity_bytes,
            fast_bytes,
            bytes_per_s,
            pin_limit_bytes: fast_bytes,
            granule_bytes: 2 << 20,
            latency_ns: 0,
            queue_ops_max: 64,
            bad_extents: Vec::new(),
        }
    }
}

/// One pipe of fixed bandwidth, first come first served, into a fast memory that evicts the granule brought in or asked
/// for longest ago. Residency is exact, protection hard, completion reported.
///
/// A granule is there when its last byte has moved. An unprotected one that finds fast memory full of protected granules
/// moves and is lost, as on a real device: done is not the same as there.
#[derive(Debug)]
pub struct Simulated {
    config: SimulatedConfig,
    caps: Caps,
    granules: Vec<Granule>,
    /// (stamp, granule) of every evictable granule, that is, resident and unprotected.
    evictable: BTreeSet<(u64, usize)>,
    stamp: u64,
    resident: u64,
    protected: u64,
    queue: VecDeque<StageOp>,
    /// Ended, and not told yet: what a call finds does not depend on how often anyone polls.
    ended: Vec<StageEvent>,
    /// When the pipe is free, and the part of a nanosecond left over, in units of 1 / `bytes_per_s`.
    pipe_free_ns: u64,
    pipe_carry: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Granule {
    /// When it was last asked for; unique.
    stamp: u64,
    resident: bool,
    protected: bool,
}

#[derive(Debug)]
struct StageOp {
    id: StageId,
    ready_ns: u64,
    granules: VecDeque<usize>,
}

impl Simulated {
    /// An idle device with nothing in fast memory.
    pub fn new(config: SimulatedConfig) -> Result<Self, FastTierError> {
        let mut caps = Caps::new(config.capacity_bytes, config.granule_bytes);
        caps.fast_bytes = Some(config.fast_bytes);
        caps.pin_limit_bytes = Some(config.pin_limit_bytes);
        caps.queue_ops_max = config.queue_ops_max;
        caps.staging = Staging::Async { completion: true };
        caps.residency = ResidencyReport::Exact;
        caps.protection = Protection::Hard;
        caps.evict = true;
        caps.validate()?;
        if config.fast_bytes < config.granule_bytes
            || !config.fast_bytes.is_multiple_of(config.granule_bytes)
        {
            return Err(FastTierError::Caps {
                field: "fast_bytes",
                fix: "a multiple of granule_bytes, at least one",
            });
        }
        if config.bytes_per_s == 0 {
            return Err(FastTierError::Caps { field: "bytes_per_s", fix: "at least 1" });
        }
        let count = config.capacity_bytes / config.granule_bytes;
        let count = usize::try_from(count).map_err(|_| FastTierError::Caps {
            field: "granule_bytes",
            fix: "larger: the granules must be countable",
        })?;
        Ok(Self {
            config,
            caps,
            granules: vec![Granule::default(); count],
            evictable: BTreeSet::new(),
            stamp: 0,
            resident: 0,
            protected: 0,
            queue: VecDeque::new(),
            ended: Vec::new(),
            pipe_free_ns: 0,
            pipe_carry: 0,
        })
    }

    /// Lets time pass up to `now_ns`; returns when something happens next.
    fn advance(&mut self, now_ns: u64) -> Option<u64> {
        loop {
            match self.work(now_ns)? {
                Ok(event) => self.ended.push(event),
                Err(wake_ns) => return Some(wake_ns),
            }
        }
    }

    /// The granules of checked `extents`, each once, ascending.
    fn indices(&self, extents: &[Extent]) -> BTreeSet<usize> {
        let granule =
            |byte: u64| usize::try_from(byte / self.config.granule_bytes).expect("it was checked");
        extents
            .iter()
            .flat_map(|extent| granule(extent.offset)..granule(extent.offset + extent.bytes))
            .collect()
    }

    fn extent(&self, granule: usize) -> Extent {
        let bytes = self.config.granule_bytes;
        Extent { offset: granule as u64 * bytes, bytes }
    }

    /// Changes a granule, and the set of evictable ones with it.
    fn update(&mut self, index: usize, change: impl FnOnce(&mut Granule)) {
        let granule = &mut self.granules[index];
        self.evictable.remove(&(granule.stamp, index));
        let before = *granule;
        change(granule);
        let after = *granule;
        if after.resident && !after.protected {
            self.evictable.insert((after.stamp, index));
        }
        let step = |count: u64, was: bool, is: bool| count + u64::from(is) - u64::from(was);
        self.resident = step(self.resident, before.resident, after.resident);
        self.protected = step(self.protected, before.protected, after.protected);
    }

    /// The granule's last byte has moved. Protected granules that are still to come have no room set aside here: they
    /// evict unprotected ones when they arrive, and there are always enough, since protection is bounded.
    fn arrive(&mut self, index: usize) {
        if self.resident * self.config.granule_bytes >= self.config.fast_bytes {
            let Some((_, victim)) = self.evictable.pop_first() else { return };
            self.update(victim, |granule| granule.resident = false);
        }
        self.update(index, |granule| granule.resident = true);
    }

    fn ask(&mut self, index: usize) {
        self.stamp += 1;
        let stamp = self.stamp;
        self.update(index, |granule| granule.stamp = stamp);
    }

    /// When a granule that starts at `start_ns` has moved, and what is left of a nanosecond.
    fn moved(&self, start_ns: u64) -> (u64, u64) {
        let carry = if start_ns == self.pipe_free_ns { self.pipe_carry } else { 0 };
        let units =
            u128::from(self.config.granule_bytes) * u128::from(NS_PER_S) + u128::from(carry);
        let rate = u128::from(self.config.bytes_per_s);
        let narrow = |value: u128| u64::try_from(value).unwrap_or(u64::MAX);
        (start_ns.saturating_add(narrow(units / rate)), narrow(units % rate))
    }

    /// Works on the oldest staging up to `now_ns`: its end, or when to look again.
    fn work(&mut self, now_ns: u64) -> Option<Result<StageEvent, u64>> {
        let op = self.queue.front()?;
        let (id, ready_ns) = (op.id, op.ready_ns);
        while let Some(&index) = self.queue.front().and_then(|op| op.granules.front()) {
            if !self.granules[index].resident {
                let (moved_ns, carry) = self.moved(self.pipe_free_ns.max(ready_ns));
                if moved_ns > now_ns {
                    return Some(Err(moved_ns));
                }
                (self.pipe_free_ns, self.pipe_carry) = (moved_ns, carry);
                let extent = self.extent(index);
                if self.config.bad_extents.iter().any(|bad| bad.overlaps(extent)) {
                    self.queue.pop_front();
                    return Some(Ok(StageEvent::Failed(
                        id,
                        FastTierError::Device { errno: EIO, extent },
                    )));
                }
                self.arrive(index);
            }
            self.queue.front_mut().expect("it is being worked on").granules.pop_front();
        }
        if ready_ns > now_ns {
            return Some(Err(ready_ns));
        }
        self.queue.pop_front();
        Some(Ok(StageEvent::Done(id)))
    }
}

impl FastTier for Simulated {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn arena(&self) -> ArenaView {
        ArenaView { bytes: self.config.capacity_bytes, base_address: None }
    }

    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError> {
        self.caps.check(extents)?;
        let resident = self
            .indices(extents)
            .into_iter()
            .filter(|&index| self.granules[index].resident)
            .count();
        Ok(Residency::Bytes(resident as u64 * self.config.granule_bytes))
    }

    fn submit_stage(
        &mut self,
        id: StageId,
        extents: &[Extent],
        now_ns: u64,
    ) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        self.advance(now_ns);
        let queue_ops_max = self.config.queue_ops_max;
        if self.queue.len() + self.ended.len() >= queue_ops_max {
            return Err(FastTierError::QueueFull { queue_ops_max });
        }
        let untold = self.ended.iter().map(|event| match event {
            StageEvent::Done(id) | StageEvent::Failed(id, _) => *id,
        });
        if self.queue.iter().map(|op| op.id).chain(untold).any(|taken| taken == id) {
            return Err(FastTierError::DuplicateId { id });
        }
        let granules: VecDeque<usize> = self.indices(extents).into_iter().collect();
        granules.iter().for_each(|&index| self.ask(index));
        self.queue.push_back(StageOp {
            id,
            ready_ns: now_ns.saturating_add(self.config.latency_ns),
            granules,
        });
        Ok(())
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<StageEvent>) -> Option<u64> {
        let wake_ns = self.advance(now_ns);
        events.append(&mut self.ended);
        wake_ns
    }

    fn protect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        self.advance(now_ns);
        let fresh: Vec<usize> = self
            .indices(extents)
            .into_iter()
            .filter(|&index| !self.granules[index].protected)
            .collect();
        let asked_bytes = fresh.len() as u64 * self.config.granule_bytes;
        let free_bytes = self.config.pin_limit_bytes - self.protected * self.config.granule_bytes;
        if asked_bytes > free_bytes {
            return Err(FastTierError::NoCapacity { asked_bytes, free_bytes });
        }
        fresh.into_iter().for_each(|index| self.update(index, |granule| granule.protected = true));
        Ok(())
    }

    fn unprotect(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        self.advance(now_ns);
        for index in self.indices(extents) {
            self.update(index, |granule| granule.protected = false);
        }
        Ok(())
    }

    fn evict_hint(&mut self, extents: &[Extent], now_ns: u64) -> Result<(), FastTierError> {
        self.caps.check(extents)?;
        self.advance(now_ns);
        for index in self.indices(extents) {
            self.update(index, |granule| granule.resident &= granule.protected);
        }
        Ok(())
    }

    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError> {
        self.caps.check(extents)
    }

    fn load(&self) -> Load {
        let waiting = self.queue.iter().flat_map(|op| &op.granules);
        let absent: BTreeSet<usize> =
            waiting.copied().filter(|&index| !self.granules[index].resident).collect();
        let queued_bytes = Some(absent.len() as u64 * self.config.granule_bytes);
        Load { queued_bytes, bytes_per_s: Some(self.config.bytes_per_s) }
    }
}
