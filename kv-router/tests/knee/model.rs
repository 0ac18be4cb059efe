//! A device in virtual time: its rate is shared among the reads in flight, up to a limit for each.

use kv_router::{Knee, KneeConfig, KneeProbe, Window};

pub(crate) const CHUNK_BYTES: u64 = 4 << 20;

/// What a device is like; `CALM` has a knee of 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    pub(crate) bytes_per_s: f64,
    /// Reads in flight that reach the rate, as far as sharing goes.
    pub(crate) places: f64,
    /// Time before a read's bytes begin to flow; reads overlap in it.
    pub(crate) latency_s: f64,
    /// Sigma of a read's lognormal work.
    pub(crate) jitter: f64,
    /// Sigma of the lognormal rate, which changes about once a second.
    pub(crate) drift: f64,
    /// How probable a stall of 300 ms is for a read.
    pub(crate) stalls: f64,
}

pub(crate) const CALM: Profile =
    Profile { bytes_per_s: 2e9, places: 1.0, latency_s: 0.0, jitter: 0.0, drift: 0.0, stalls: 0.0 };

/// splitmix64 with the distributions that are needed.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Mean 1.
    fn lognormal(&mut self, sigma: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.unit()).cos();
        (sigma * normal - sigma * sigma / 2.0).exp()
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
}

#[derive(Debug)]
struct Read {
    /// Bytes begin to flow at this time.
    from_s: f64,
    left: f64,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) profile: Profile,
    random: Random,
    /// Its own, so that devices of one seed drift alike whatever is read.
    drift: Random,
    now_s: f64,
    factor: f64,
    factor_until_s: f64,
    reads: Vec<Read>,
}

impl Device {
    pub(crate) fn new(profile: Profile, seed: u64) -> Self {
        Self {
            profile,
            random: Random(seed),
            drift: Random(!seed),
            now_s: 0.0,
            factor: 1.0,
            factor_until_s: 0.0,
            reads: Vec::new(),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "minutes")]
    pub(crate) fn now_ns(&self) -> u64 {
        (self.now_s * 1e9) as u64
    }

    fn start(&mut self) {
        let stalls = self.random.unit() < self.profile.stalls;
        let stall_s = if stalls { 0.3 * self.random.lognormal(0.7) } else { 0.0 };
        let from_s = self.now_s + self.profile.latency_s + stall_s;
        let left = CHUNK_BYTES as f64 * self.random.lognormal(self.profile.jitter);
        self.reads.push(Read { from_s, left });
    }

    /// Goes on until a read ends; the number that ended at that moment.
    fn advance(&mut self) -> u32 {
        loop {
            let flowing = self.reads.iter().filter(|read| read.from_s <= self.now_s).count();
            let share = (1.0 / flowing.max(1) as f64).min(1.0 / self.profile.places);
            let rate = self.profile.bytes_per_s * self.factor * share;
            let mut until_s = self.factor_until_s;
            for read in &self.reads {
                let at_s = if read.from_s > self.now_s {
                    read.from_s
                } else {
                    self.now_s + read.left / rate
                };
                until_s = until_s.min(at_s);
            }
            let moved = rate * (until_s - self.now_s);
            let before = self.reads.len();
            for read in self.reads.iter_mut().filter(|read| read.from_s <= self.now_s) {
                read.left -= moved;
            }
            self.now_s = until_s;
            if until_s >= self.factor_until_s {
                self.factor = self.drift.lognormal(self.profile.drift);
                self.factor_until_s += self.drift.exponential(1.0).max(1e-3);
            }
            self.reads.retain(|read| read.left > 1.0);
            let ended = before - self.reads.len();
            if ended > 0 {
                return u32::try_from(ended).expect("windows are small");
            }
        }
    }
}

/// A tier's thread: a device, a window, and steps of so many reads one after the other, each waiting for its last.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) device: Device,
    window: Window,
    pub(crate) knee: Option<Knee>,
    step_reads: u32,
    left: u32,
    /// Moves of the learner's base so far.
    pub(crate) moves: u32,
    base: u32,
    pub(crate) reads: u64,
    /// Reads by window at completion.
    pub(crate) at_limit: Vec<u64>,
}

impl Tier {
    pub(crate) fn fixed(profile: Profile, seed: u64, window: u32) -> Self {
        Self {
            device: Device::new(profile, seed),
            window: Window::new(window),
            knee: None,
            step_reads: u32::MAX,
            left: u32::MAX,
            moves: 0,
            base: window,
            reads: 0,
            at_limit: vec![0; 200],
        }
    }

    pub(crate) fn learning(profile: Profile, seed: u64, start: u32) -> Self {
        let knee = Knee::new(KneeConfig { min: 1, max: 64, start });
        Self { knee: Some(knee), ..Self::fixed(profile, seed, start) }
    }

    pub(crate) fn in_steps_of(self, reads: u32) -> Self {
        Self { step_reads: reads, left: reads, ..self }
    }

    pub(crate) fn knee(&self) -> &Knee {
        self.knee.as_ref().expect("a learning tier")
    }

    /// Bytes a second over `seconds` from now on.
    pub(crate) fn run(&mut self, seconds: f64) -> f64 {
        let (from_s, from) = (self.device.now_s, self.reads);
        self.refill();
        while self.device.now_s < from_s + seconds {
            let ended = self.device.advance();
            self.at_limit[self.window.limit() as usize] += u64::from(ended);
            for _ in 0..ended {
                self.window.end();
                if let Some(knee) = &mut self.knee {
                    knee.completed(CHUNK_BYTES, self.device.now_ns());
                }
            }
            self.reads += u64::from(ended);
            self.refill();
        }
        ((self.reads - from) * CHUNK_BYTES) as f64 / (self.device.now_s - from_s)
    }

    fn refill(&mut self) {
        if self.left == 0 && self.window.is_idle() {
            self.left = self.step_reads;
        }
        if let Some(knee) = &self.knee {
            self.moves += u32::from(knee.base() != self.base);
            self.base = knee.base();
            self.window.set_limit(knee.limit());
        }
        while self.left > 0 && self.window.start() {
            self.left -= u32::from(self.step_reads != u32::MAX);
            self.device.start();
        }
        if let Some(knee) = &mut self.knee {
            knee.refilled(self.window.in_flight(), true);
        }
    }
}

/// A probe of an idle device: what it finds, and how many reads it took.
pub(crate) fn probe(profile: Profile, seed: u64, reads_max: u64) -> (Option<u32>, u64) {
    let mut device = Device::new(profile, seed);
    let mut probe = KneeProbe::new(64);
    let mut window = Window::new(1);
    let mut reads = 0;
    while !probe.is_finished() && reads < reads_max {
        window.set_limit(probe.limit());
        while window.start() {
            device.start();
        }
        probe.refilled(window.in_flight());
        for _ in 0..device.advance() {
            window.end();
            probe.completed(CHUNK_BYTES, device.now_ns());
            reads += 1;
        }
    }
    (probe.window(), reads)
}
