//! Chunks on memory: the tier contract, crashes at every point, and what stands on the medium.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod chunks;
mod conformance;
mod crash;
mod golden;
mod open;
mod readers;
