//! Replays a request trace through an [`Engine`](crate::Engine): what a user measures, and what the demo shows.
//!
//! A trace is cut into scheduler steps; each step looks chunks up, loads the hits, runs a modelled forward pass and
//! stores what was missing. Every payload is derived from its chunk's key, so that a chunk that was swapped, shifted or
//! left over from before is seen. [`run`] serves a trace by one [`Policy`], [`compare`] by all of them.

mod alone;
mod compare;
mod content;
mod error;
mod forward;
mod json;
mod machine;
mod policy;
mod report;
mod run;
mod schedule;
mod scratch;
mod step;
mod table;
mod trace;
mod workload;

pub use self::{
    compare::{CompareOptions, Comparison, compare},
    content::{fill, wrong_bytes},
    error::ReplayError,
    forward::Forward,
    machine::{commit, machine},
    policy::Policy,
    report::{RunReport, percentile},
    run::{Restart, RunOptions, run},
    schedule::{Schedule, ScheduleOptions, Step},
    scratch::Scratch,
    trace::{Request, Trace, TraceError, TraceLimits},
    workload::{Silent, Watch, Workload},
};
