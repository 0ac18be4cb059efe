//! Tests of the provider trait: its contract, the simulated device, and both halves together.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod contract;
mod extents;
mod simulated;
mod together;
