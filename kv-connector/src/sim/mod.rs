//! Step retrieval in virtual time: the router that the engine runs, over modelled devices.
//!
//! *Is*: stochastic device [`Profile`]s, an event loop that drives the *same* [`StepPool`],
//! [`TierQueue`] and [`Window`] as the engine, the fluid bound of each step, and the rival policies.
//! Single-threaded, without a clock: the same seed gives the same result. Reads that lost a race are
//! not recalled, and steps run back to back, so that they are paid for.
//!
//! *Is not*: a measurement. The devices are models with parameters of our own.
//!
//! ```
//! use kv_connector::sim::{Case, Policy, Profile, Schedule};
//!
//! let stalls_often = Profile::named("F", 2).expect("a known profile");
//! let rates = stalls_often.calibrate();
//! let case = Case { chunks: 64, ranks: 1, schedule: Schedule { warm_up: 1, steps: 20 } };
//! let ours = case.run(&stalls_often, &rates, Policy::Kvbraid, 1);
//! let window = case.run(&stalls_often, &rates, Policy::Window, 1);
//! assert!(ours.gap() < window.gap());
//! ```
//!
//! [`StepPool`]: kv_router::StepPool
//! [`TierQueue`]: kv_router::TierQueue
//! [`Window`]: kv_router::Window

mod bound;
mod calibrate;
mod case;
mod device;
mod drift;
mod json;
mod machine;
mod policy;
mod profile;
mod random;
mod statistics;
mod study;
mod table;
mod targets;
#[cfg(test)]
mod tests;

pub use self::{
    bound::fluid_s,
    case::{CHUNK_BLOCKS, CHUNK_BYTES, Case, Outcome, Schedule},
    policy::Policy,
    profile::{Profile, Stall, TierProfile},
    statistics::Summary,
    study::{Row, Study, StudyOptions},
    targets::Verdict,
};
