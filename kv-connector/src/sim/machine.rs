//! The engine's part in virtual time: windows, queues and steps over modelled devices.

use std::rc::Rc;

use kv_router::{
    ChunkSpec, Claim, Duplicates, PoolConfig, StepPool, StepReport, TierId, TierQueue, Window,
};

use super::{bound::pathwise_s, device::Device, profile::Profile};

/// The tiers of one node. What a step leaves in flight is there when the next one begins.
pub(super) struct Machine {
    tiers: Vec<Tier>,
    pub(super) now_s: f64,
}

struct Tier {
    device: Device<Read>,
    window: Window,
    queue: TierQueue<Rc<StepPool>>,
    /// Bytes asked of the device and bytes that it delivered, losers included.
    started: u64,
    ended: u64,
}

struct Read {
    step: Rc<StepPool>,
    claim: Claim,
}

/// At most as many steps are in the queues at once.
const STEPS_MAX: usize = 4;

impl Machine {
    pub(super) fn new(profile: &Profile, seed: u64) -> Self {
        let tier = |(i, tier): (usize, _)| Tier {
            device: Device::new(tier, seed, i),
            window: Window::new(u32::from(tier.window)),
            queue: TierQueue::new(TierId(u8::try_from(i).unwrap_or(u8::MAX)), STEPS_MAX),
            started: 0,
            ended: 0,
        };
        let tiers = profile.tiers.iter().copied().enumerate().map(tier).collect();
        Self { tiers, now_s: 0.0 }
    }

    /// Reads one step to its end, and gives what its pool reports.
    pub(super) fn run(&mut self, chunks: &[ChunkSpec], config: &PoolConfig) -> StepReport {
        let step = StepPool::new(chunks, config).expect("policies build valid steps");
        let step = Rc::new(step);
        for tier in &mut self.tiers {
            tier.queue.push(Rc::clone(&step)).expect("earlier steps are finished");
        }
        self.fill();
        while !step.is_finished() {
            self.advance();
            self.fill();
        }
        step.report()
    }

    /// Lets time pass without any new read.
    pub(super) fn wait(&mut self, seconds: f64) {
        let until_s = self.now_s + seconds;
        while self.next().1 <= until_s {
            self.advance();
        }
        self.now_s = until_s;
    }

    /// The time in which tiers of these rates would have moved `bytes` from `from_s` on.
    pub(super) fn bound_s(&mut self, rates: &[f64], from_s: f64, bytes: f64) -> f64 {
        let mut drifts: Vec<_> = self.tiers.iter_mut().map(|tier| &mut tier.device.drift).collect();
        pathwise_s(&mut drifts, rates, from_s, bytes)
    }

    /// The mean of each tier's rate factor between `from_s` and now.
    pub(super) fn drift_since(&mut self, from_s: f64) -> Vec<f64> {
        let now_s = self.now_s;
        self.tiers.iter_mut().map(|tier| tier.device.drift.mean(from_s, now_s)).collect()
    }

    /// Bytes that the devices were asked for and bytes that they delivered so far.
    #[cfg(test)]
    pub(super) fn moved(&self) -> (u64, u64) {
        let sum = |bytes: fn(&Tier) -> u64| self.tiers.iter().map(bytes).sum();
        (sum(|tier| tier.started), sum(|tier| tier.ended))
    }

    /// Reads in flight.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> u32 {
        self.tiers.iter().map(|tier| tier.window.in_flight()).sum()
    }

    fn fill(&mut self) {
        for tier in &mut self.tiers {
            while tier.window.room() > 0 {
                let Some((step, claim)) = tier.queue.claim(Duplicates::Allowed) else { break };
                let (bytes, step) = (claim.bytes, Rc::clone(step));
                let _ = tier.window.start();
                tier.started += bytes;
                tier.device.start(self.now_s, bytes as f64, Read { step, claim });
            }
        }
    }

    fn next(&mut self) -> (usize, f64) {
        let times = self.tiers.iter_mut().map(|tier| tier.device.next_s()).enumerate();
        times.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, f64::INFINITY))
    }

    fn advance(&mut self) {
        let (at, time_s) = self.next();
        assert!(time_s.is_finite(), "a step waits and nothing is in flight");
        self.now_s = time_s;
        let tier = &mut self.tiers[at];
        if let Some(Read { step, claim }) = tier.device.advance() {
            tier.window.end();
            tier.ended += claim.bytes;
            // Late or not, the router counts it.
            let _ = step.complete(claim);
        }
    }
}
