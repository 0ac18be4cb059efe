//! Tests of the provider trait: its contract, the providers, and both halves together.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod contract;
mod extents;
mod page_cache;
mod providers;
mod simulated;
mod together;
