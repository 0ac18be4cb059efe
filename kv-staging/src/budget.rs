//! How many bytes of fast memory are protected, never more than allowed, and for how long.

use thiserror::Error;

/// The bytes asked for do not fit now.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{asked_bytes} bytes asked, {free_bytes} of {capacity_bytes} free")]
pub struct Blocked {
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// The whole budget.
    pub capacity_bytes: u64,
}

/// Protected bytes, bounded, and their integral over time.
///
/// The integral, C, is what protection costs everyone else: ten GiB held for a second cost as much as one GiB for ten.
/// It is exact, in byte-nanoseconds. Time does not run backwards: an earlier `now_ns` counts as the latest one seen.
#[derive(Clone, Debug)]
pub struct Budget {
    capacity_bytes: u64,
    protected_bytes: u64,
    peak_bytes: u64,
    integral_byte_ns: u128,
    last_ns: u64,
}

impl Budget {
    /// An empty budget of `capacity_bytes` from `now_ns` on.
    pub const fn new(capacity_bytes: u64, now_ns: u64) -> Self {
        Self {
            capacity_bytes,
            protected_bytes: 0,
            peak_bytes: 0,
            integral_byte_ns: 0,
            last_ns: now_ns,
        }
    }

    /// Takes `bytes` from now on, all or nothing.
    pub fn reserve(&mut self, bytes: u64, now_ns: u64) -> Result<(), Blocked> {
        let free_bytes = self.free_bytes();
        if bytes > free_bytes {
            return Err(Blocked {
                asked_bytes: bytes,
                free_bytes,
                capacity_bytes: self.capacity_bytes,
            });
        }
        self.advance(now_ns);
        self.protected_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.protected_bytes);
        Ok(())
    }

    /// Gives back `bytes` that were reserved.
    ///
    /// # Panics
    /// If fewer are reserved: the caller's books are wrong, and with them every later answer.
    pub fn release(&mut self, bytes: u64, now_ns: u64) {
        self.advance(now_ns);
        let left = self.protected_bytes.checked_sub(bytes);
        self.protected_bytes = left.expect("no more is released than was reserved");
    }

    /// The bound.
    pub const fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes protected now.
    pub const fn protected_bytes(&self) -> u64 {
        self.protected_bytes
    }

    /// Most bytes ever protected at once.
    pub const fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// Bytes that may still be reserved.
    pub const fn free_bytes(&self) -> u64 {
        self.capacity_bytes - self.protected_bytes
    }

    /// C up to `now_ns`, in byte-nanoseconds.
    pub fn integral_byte_ns(&self, now_ns: u64) -> u128 {
        let held_ns = now_ns.saturating_sub(self.last_ns);
        self.integral_byte_ns + u128::from(self.protected_bytes) * u128::from(held_ns)
    }

    fn advance(&mut self, now_ns: u64) {
        self.integral_byte_ns = self.integral_byte_ns(now_ns);
        self.last_ns = self.last_ns.max(now_ns);
    }
}
