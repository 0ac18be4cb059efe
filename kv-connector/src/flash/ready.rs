//! How long staging takes: bytes that are not there yet, over the rate at which such bytes came lately.

use std::{cell::RefCell, collections::HashMap};

use kv_cxl::{FastTier, Places, Residency};
use kv_staging::{Object, ObjectId, RateModel, RateOptions, StagingNeed, TimeToReady};

use super::books::digest_of;

/// How long an answer of the device is believed.
const BELIEVED_NS: u64 = 500_000_000;
/// Objects asked about between two looks at the claims: each costs a system call.
const ASKED_MAX: usize = 16;
const NS_PER_S: u128 = 1_000_000_000;

/// Estimates from measured rates and from residency, as far as that is known by now: what was not asked yet counts as
/// absent, and is asked about before the next look.
#[derive(Debug)]
pub(super) struct Ready {
    rate: RateModel,
    in_flight_bytes: u64,
    /// Bytes absent of an object, and when that was asked.
    absent: HashMap<ObjectId, (u64, u64)>,
    unknown: RefCell<Vec<Object>>,
}

impl Ready {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self {
            rate: RateModel::new(RateOptions::new(bytes_per_s)),
            in_flight_bytes: 0,
            absent: HashMap::new(),
            unknown: RefCell::default(),
        }
    }

    pub(super) fn submitted(&mut self, bytes: u64, now_ns: u64) {
        self.in_flight_bytes += bytes;
        self.rate.submitted(bytes, now_ns);
    }

    /// Of what was submitted so much is there, or is given up.
    pub(super) fn ended(&mut self, bytes: u64, is_there: bool, now_ns: u64) {
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
        if is_there {
            self.rate.completed(bytes, now_ns);
        } else {
            self.rate.abandoned(bytes, now_ns);
        }
    }

    pub(super) fn bytes_per_s(&self) -> u64 {
        self.rate.bytes_per_s()
    }

    /// Asks the device about what the last look at the claims did not know.
    pub(super) fn ask(&mut self, memory: &dyn FastTier, places: &Places, now_ns: u64) {
        self.absent.retain(|_, (_, asked_ns)| now_ns < *asked_ns + BELIEVED_NS);
        for object in self.unknown.take() {
            let place = places.get(digest_of(object.id));
            let there = place.map(|place| memory.residency(&[place.extent]));
            let absent = match there {
                Some(Ok(Residency::Bytes(there))) => object.bytes.saturating_sub(there),
                _ => object.bytes,
            };
            self.absent.insert(object.id, (absent, now_ns));
        }
    }

    fn missing(&self, object: &Object) -> u64 {
        if let Some((absent, _)) = self.absent.get(&object.id) {
            return *absent;
        }
        let mut unknown = self.unknown.borrow_mut();
        if unknown.len() < ASKED_MAX && !unknown.contains(object) {
            unknown.push(*object);
        }
        object.bytes
    }
}

impl TimeToReady for Ready {
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, _now_ns: u64) -> u64 {
        let missing: u128 = need.cold.iter().map(|object| u128::from(self.missing(object))).sum();
        // What is there needs no turn in the queue.
        let coming = if missing > 0 || need.in_flight_bytes > 0 { self.in_flight_bytes } else { 0 };
        let ns = (missing + u128::from(coming)) * NS_PER_S / u128::from(self.bytes_per_s());
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}
