//! Just-in-time staging of memory whose data sleep on flash: a cache hit is recorded as a [`Claim`] that costs
//! nothing, and fast memory is reserved for it only when the time until use falls to the time until ready.
//!
//! *Is*: the claim's state machine; [`TimeToUse`] and [`TimeToReady`] with a simple estimator each; a [`Budget`] of
//! protected bytes that also integrates them over time; policies; and the [`Controller`] that puts them together.
//!
//! *Is not*: I/O, a device, a clock, or threads. Time is an argument (nanoseconds of one monotonic origin); what is to
//! be done comes back as [`Effect`]s, and whoever does it answers.
//!
//! ```
//! use kv_staging::{Controller, ControllerOptions, Effect, Object, ObjectId, RateModel, RateOptions, Retrieval};
//! use kv_staging::{ProjectionOptions, SlotProjection, policy::Tempo};
//!
//! let mut controller = Controller::new(ControllerOptions::new(1 << 30), Tempo::default());
//! let mut uses = SlotProjection::new(ProjectionOptions::new(1));
//! let ready = RateModel::new(RateOptions::new(1 << 30)); // 1 GiB/s
//! let prefix = Object { id: ObjectId(7), bytes: 512 << 20 };
//! let mut effects = Vec::new();
//!
//! // A request that runs for 10 s, and a hit queued behind it.
//! let first = controller.record(&[])?;
//! uses.enqueue(first, 10_000_000_000);
//! uses.start(first, 0);
//! let claim = controller.record(&[prefix])?;
//! uses.enqueue(claim, 1_000_000_000);
//!
//! controller.tick(0, &uses, &ready, &mut effects);
//! assert!(!effects.contains(&Effect::Stage(prefix))); // 10 s until use, 0.5 s until ready: too early
//!
//! effects.clear();
//! controller.tick(9_500_000_000, &uses, &ready, &mut effects);
//! assert_eq!(effects, [Effect::Stage(prefix)]); // now protect and stage it
//! controller.object_staged(prefix.id, 9_990_000_000, &mut effects)?;
//! assert_eq!(controller.begin_retrieval(claim, 10_000_000_000)?, Retrieval::Protected);
//! # Ok::<(), kv_staging::StagingError>(())
//! ```

#![forbid(unsafe_code)]

mod budget;
mod claim;
mod controller;
mod decode;
mod error;
mod lengths;
mod objects;
pub mod policy;
mod report;
mod time_to_ready;
mod time_to_use;
mod turns;

pub use crate::{
    budget::{Blocked, Budget},
    claim::{Claim, ClaimId, ClaimState, Move, Object, ObjectId},
    controller::{Controller, ControllerOptions, Effect, Reservation, Retrieval},
    decode::{DecodeOptions, DecodeProjection, Work},
    error::StagingError,
    lengths::Outputs,
    report::Report,
    time_to_ready::{RateModel, RateOptions, StagingNeed, TimeToReady},
    time_to_use::{ProjectionOptions, SlotProjection, TimeToUse},
};
