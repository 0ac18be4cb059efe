//! Who asks for what, and when.

use std::f64::consts::TAU;

use fastrand::Rng;

pub(crate) const GIB: f64 = (1_u64 << 30) as f64;

/// What is served, and by what.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Most protected bytes, GiB.
    pub(crate) budget_gib: f64,
    /// Staging rate, GiB/s, and the sigma of its lognormal noise, drawn for each staging.
    pub(crate) staging_gib_s: f64,
    pub(crate) staging_sigma: f64,
    /// From fast memory to the accelerator, GiB/s.
    pub(crate) retrieval_gib_s: f64,
    pub(crate) slots: usize,
    pub(crate) objects: usize,
    /// A prefix before its size is drawn, GiB; the sigma of sizes, of which a factor of 0.5 to 1.3 is kept.
    pub(crate) object_gib: f64,
    pub(crate) object_sigma: f64,
    pub(crate) prefill_s: f64,
    pub(crate) iteration_s: f64,
    pub(crate) iteration_s_per_request: f64,
    pub(crate) output_tokens: f64,
    pub(crate) output_sigma: f64,
    pub(crate) requests: usize,
}

impl Setting {
    /// Prefixes of 40 thousand tokens of an 8-billion-parameter model, all of which is cached.
    pub(crate) fn homogeneous() -> Self {
        Self {
            budget_gib: 100.0,
            staging_gib_s: 11.0,
            staging_sigma: 0.15,
            retrieval_gib_s: 22.0,
            slots: 4,
            objects: 12,
            object_gib: 5.0,
            object_sigma: 0.2,
            prefill_s: 0.06,
            iteration_s: 0.008,
            iteration_s_per_request: 0.0035,
            output_tokens: 128.0,
            output_sigma: 0.25,
            requests: 200,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) arrival_ns: u64,
    pub(crate) object: usize,
    pub(crate) tokens: u64,
}

/// Sizes of the objects, and requests for them.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) object_bytes: Vec<u64>,
    pub(crate) requests: Vec<Request>,
    /// Outputs of an earlier hour, which a server would know.
    pub(crate) history: Vec<u64>,
}

impl Workload {
    /// Requests by a Poisson process of `per_s`; every seed has sizes of its own.
    pub(crate) fn draw(setting: &Setting, per_s: f64, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let object_bytes = (0..setting.objects)
            .map(|_| {
                let factor = lognormal(&mut rng, setting.object_sigma).clamp(0.5, 1.3);
                bytes(setting.object_gib * factor)
            })
            .collect();
        let mut arrival_s = 0.0;
        let requests = (0..setting.requests)
            .map(|_| {
                arrival_s += exponential(&mut rng, 1.0 / per_s);
                Request {
                    arrival_ns: ns(arrival_s),
                    object: rng.usize(..setting.objects),
                    tokens: tokens(&mut rng, setting),
                }
            })
            .collect();
        let history = (0..64).map(|_| tokens(&mut rng, setting)).collect();
        Self { object_bytes, requests, history }
    }
}

fn tokens(rng: &mut Rng, setting: &Setting) -> u64 {
    whole(setting.output_tokens * lognormal(rng, setting.output_sigma)).max(2)
}

/// A lognormal factor of mean 1.
pub(crate) fn lognormal(rng: &mut Rng, sigma: f64) -> f64 {
    (sigma * normal(rng) - sigma * sigma / 2.0).exp()
}

fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.f64()).ln()
}

fn normal(rng: &mut Rng) -> f64 {
    (-2.0 * (1.0 - rng.f64()).ln()).sqrt() * (TAU * rng.f64()).cos()
}

pub(crate) fn ns(seconds: f64) -> u64 {
    whole(seconds * 1e9)
}

pub(crate) fn bytes(gib: f64) -> u64 {
    whole(gib * GIB)
}

#[expect(clippy::cast_possible_truncation, reason = "figures of a model, far below 2^53")]
pub(crate) fn whole(value: f64) -> u64 {
    value as u64
}
