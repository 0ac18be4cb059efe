//! The modelled devices.
//!
//! Each tier shares its rate equally among the reads in flight, up to a limit for each read; each
//! read's work is lognormal about its bytes; a slow drift scales the rate; some reads stall for a time
//! that does not depend on their size. Rates 2.0 : 0.625 : 1.2 : 0.3 GB/s at 12, 4, 8 and 2 in flight.

/// A size-independent delay that some reads meet before their transfer begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stall {
    /// How probable it is for each read.
    pub probability: f64,
    /// Its mean length in seconds.
    pub mean_s: f64,
    /// Sigma of its lognormal length.
    pub sigma: f64,
}

impl Stall {
    const NONE: Self = Self { probability: 0.0, mean_s: 0.0, sigma: 0.0 };
}

/// One tier's device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierProfile {
    /// Nominal rate.
    pub bytes_per_s: f64,
    /// Reads in flight at the knee.
    pub window: u16,
    /// Sigma of a read's lognormal work; 0 for none.
    pub jitter: f64,
    /// Sigma of the lognormal rate factor; 0 for none.
    pub drift: f64,
    /// Mean time for which a rate factor holds, in seconds.
    pub drift_s: f64,
    /// The most that one read gets of the device's rate: 1 over the window makes the window's places
    /// independent of each other, 1 lets a single read have it all.
    pub share_max: f64,
    /// Fixed cost of a read, in seconds at its largest share.
    pub latency_s: f64,
    /// Stalls.
    pub stall: Stall,
}

/// A set of tiers, the fastest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// A letter.
    pub name: &'static str,
    /// What is special about it.
    pub about: &'static str,
    /// The tiers.
    pub tiers: Vec<TierProfile>,
}

const BYTES_PER_S: [f64; 4] = [2.0e9, 0.625e9, 1.2e9, 0.3e9];
const WINDOWS: [u16; 4] = [12, 4, 8, 2];
const LATENCIES_S: [f64; 4] = [1e-4, 2e-3, 2e-3, 1e-3];
const OFTEN: Stall = Stall { probability: 0.03, mean_s: 0.4, sigma: 0.7 };
const SELDOM: Stall = Stall { probability: 0.01, mean_s: 0.3, sigma: 0.7 };

/// What the tiers of a profile have in common; `sharing` times the window's reciprocal is the largest
/// share of one read.
struct Kind {
    name: &'static str,
    about: &'static str,
    jitter: f64,
    drift: f64,
    sharing: f64,
    latencies_s: [f64; 4],
    stall: Stall,
}

impl Kind {
    const fn new(
        name: &'static str,
        about: &'static str,
        [jitter, drift, sharing]: [f64; 3],
    ) -> Self {
        Self { name, about, jitter, drift, sharing, latencies_s: LATENCIES_S, stall: Stall::NONE }
    }
}

const KINDS: [Kind; 9] = [
    Kind::new("A", "calm, places independent", [0.3, 0.1, 1.0]),
    Kind::new("B", "heavy-tailed reads, places independent", [0.85, 0.25, 1.0]),
    Kind::new("C", "heavy-tailed reads, rate shared", [0.85, 0.25, 4.0]),
    Kind::new("D", "heavy-tailed reads, strong drift", [0.85, 0.5, 1.0]),
    Kind {
        stall: OFTEN,
        ..Kind::new("E", "stalls of 400 ms in 3 % of reads, places independent", [0.3, 0.1, 1.0])
    },
    Kind {
        stall: OFTEN,
        ..Kind::new("F", "stalls of 400 ms in 3 % of reads, rate shared", [0.3, 0.1, 3.0])
    },
    Kind::new("G", "very calm, places independent", [0.15, 0.08, 1.0]),
    Kind::new("H", "calm, rate shared", [0.3, 0.1, 2.0]),
    Kind {
        stall: SELDOM,
        latencies_s: [1e-3; 4],
        ..Kind::new("S", "stalls of 300 ms in 1 % of reads, rate shared", [0.3, 0.1, 2.0])
    },
];

impl Profile {
    /// Every profile, on its first `tiers` tiers (1 to 4).
    #[must_use]
    pub fn all(tiers: usize) -> Vec<Self> {
        KINDS.iter().map(|kind| Self::new(kind, tiers)).collect()
    }

    /// The profile of this name.
    #[must_use]
    pub fn named(name: &str, tiers: usize) -> Option<Self> {
        KINDS.iter().find(|kind| kind.name == name).map(|kind| Self::new(kind, tiers))
    }

    /// The sum of the nominal rates.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.tiers.iter().map(|tier| tier.bytes_per_s).sum()
    }

    fn new(kind: &Kind, tiers: usize) -> Self {
        let tier = |i: usize| TierProfile {
            bytes_per_s: BYTES_PER_S[i],
            window: WINDOWS[i],
            jitter: kind.jitter,
            drift: kind.drift,
            drift_s: 1.0,
            share_max: (kind.sharing / f64::from(WINDOWS[i])).min(1.0),
            latency_s: kind.latencies_s[i],
            stall: kind.stall,
        };
        let tiers = (0..tiers.min(WINDOWS.len())).map(tier).collect();
        Self { name: kind.name, about: kind.about, tiers }
    }
}
