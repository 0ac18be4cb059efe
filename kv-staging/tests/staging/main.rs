//! Tests through the public interface: states, estimators, the controller's rules, and random runs of it.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod by_chance;
mod cancel;
mod claim;
mod controller;
mod decode;
mod estimators;
mod random;
