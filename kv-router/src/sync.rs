//! The one place that knows which atomics the crate runs on: the machine's, loom's or shuttle's.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};

#[cfg(all(test, feature = "shuttle", not(loom)))]
pub(crate) use shuttle::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};

#[cfg(not(any(loom, all(test, feature = "shuttle"))))]
pub(crate) use core::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
