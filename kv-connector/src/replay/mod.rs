//! Replays a request trace through an engine: what a user measures and what the demo shows.
//!
//! A trace is turned into scheduler steps, each step into the chunks it looks up, loads and stores. Every payload is
//! derived from its chunk's key, so that a chunk that was swapped, shifted or left over from before is seen.

mod content;
mod schedule;
mod summary;
mod trace;

pub use self::{
    content::{fill, wrong_bytes},
    schedule::{Schedule, ScheduleOptions, Step},
    summary::percentile,
    trace::{Request, Trace, TraceError, TraceLimits},
};
