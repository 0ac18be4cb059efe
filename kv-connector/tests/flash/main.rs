//! A tier on memory in front of flash, and claims on it.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod claims;
mod common;
mod config;
mod faults;
mod schedule;
mod store;
#[path = "../../src/testing.rs"]
mod testing;
mod together;
mod tools;
