//! What stages and retrieves: in the model, two pipes.

use std::collections::VecDeque;

use fastrand::Rng;
use kv_staging::ClaimId;

use crate::workload::{GIB, Setting, lognormal, ns, whole};

/// What a device says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// So many bytes of staging moved.
    Moved(u64),
    Staged(usize),
    /// The staging of the object failed, and it is not protected.
    Failed(usize),
    /// The data of the claim are on the accelerator.
    Retrieved(ClaimId),
}

pub(crate) trait Device {
    /// Protects and brings in; answered with `Staged` or `Failed`. Returns the bytes that are to be moved for it.
    fn stage(&mut self, object: usize, now_ns: u64) -> u64;
    /// Ends protection.
    fn unprotect(&mut self, object: usize, now_ns: u64);
    /// Reads an object for `claim`, staged or not; returns the bytes that are to be staged for it first.
    fn retrieve(&mut self, claim: ClaimId, object: usize, now_ns: u64) -> u64;
    /// Whether all of it is in fast memory.
    fn is_resident(&self, object: usize) -> bool;
    /// Appends what happened; returns when to look again.
    fn poll(&mut self, now_ns: u64, events: &mut Vec<Event>) -> Option<u64>;
}

/// Staging by one pipe with noise, retrieval by another, each first come first served. What nobody protects or reads is
/// cold at once: other traffic churns the cache.
#[derive(Debug)]
pub(crate) struct Pipes {
    setting: Setting,
    rng: Rng,
    objects: Vec<Object>,
    staging: VecDeque<usize>,
    /// Object, start, end, bytes told.
    moving: Option<(usize, u64, u64, u64)>,
    retrieving: VecDeque<(ClaimId, usize)>,
    reading: Option<(ClaimId, usize, u64)>,
    told: Vec<Event>,
}

#[derive(Clone, Debug, Default)]
struct Object {
    bytes: u64,
    resident: bool,
    protected: bool,
    queued: bool,
    /// Reads that wait for it to come in, and reads in all.
    waiting: Vec<ClaimId>,
    readers: usize,
}

impl Pipes {
    pub(crate) fn new(setting: &Setting, object_bytes: &[u64], seed: u64) -> Self {
        let object = |bytes: &u64| Object { bytes: *bytes, ..Object::default() };
        Self {
            setting: setting.clone(),
            rng: Rng::with_seed(seed ^ 0x5bd1_e995),
            objects: object_bytes.iter().map(object).collect(),
            staging: VecDeque::new(),
            moving: None,
            retrieving: VecDeque::new(),
            reading: None,
            told: Vec::new(),
        }
    }

    fn queue(&mut self, object: usize, now_ns: u64) -> u64 {
        if std::mem::replace(&mut self.objects[object].queued, true) {
            return 0;
        }
        self.staging.push_back(object);
        self.begin(now_ns);
        self.objects[object].bytes
    }

    fn begin(&mut self, now_ns: u64) {
        if self.moving.is_none()
            && let Some(object) = self.staging.pop_front()
        {
            let gib_s =
                self.setting.staging_gib_s * lognormal(&mut self.rng, self.setting.staging_sigma);
            let staging_s = self.objects[object].bytes as f64 / GIB / gib_s;
            self.moving = Some((object, now_ns, now_ns + ns(staging_s), 0));
        }
        if self.reading.is_none()
            && let Some((claim, object)) = self.retrieving.pop_front()
        {
            let gib = self.objects[object].bytes as f64 / GIB;
            let end_ns = now_ns + ns(gib / self.setting.retrieval_gib_s);
            self.reading = Some((claim, object, end_ns));
        }
    }

    fn settle(&mut self, object: usize) {
        let object = &mut self.objects[object];
        object.resident &= object.protected || object.readers > 0;
    }

    fn progress(&mut self, now_ns: u64, events: &mut Vec<Event>) {
        if let Some((object, start_ns, end_ns, told)) = &mut self.moving {
            let part =
                (now_ns.min(*end_ns) - *start_ns) as f64 / (*end_ns - *start_ns).max(1) as f64;
            let moved = whole(self.objects[*object].bytes as f64 * part);
            if moved > *told {
                events.push(Event::Moved(moved - *told));
                *told = moved;
            }
        }
    }
}

impl Device for Pipes {
    fn stage(&mut self, object: usize, now_ns: u64) -> u64 {
        self.objects[object].protected = true;
        if self.objects[object].resident {
            self.told.push(Event::Staged(object));
            return 0;
        }
        self.queue(object, now_ns)
    }

    fn unprotect(&mut self, object: usize, _now_ns: u64) {
        self.objects[object].protected = false;
        self.settle(object);
    }

    fn retrieve(&mut self, claim: ClaimId, object: usize, now_ns: u64) -> u64 {
        self.objects[object].readers += 1;
        if self.objects[object].resident {
            self.retrieving.push_back((claim, object));
            self.begin(now_ns);
            return 0;
        }
        self.objects[object].waiting.push(claim);
        self.queue(object, now_ns)
    }

    fn is_resident(&self, object: usize) -> bool {
        self.objects[object].resident
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<Event>) -> Option<u64> {
        events.append(&mut self.told);
        self.progress(now_ns, events);
        if let Some((object, _, end_ns, _)) = self.moving
            && end_ns <= now_ns
        {
            self.moving = None;
            let it = &mut self.objects[object];
            (it.resident, it.queued) = (true, false);
            if it.protected {
                events.push(Event::Staged(object));
            }
            self.retrieving.extend(it.waiting.drain(..).map(|claim| (claim, object)));
            self.settle(object);
        }
        if let Some((claim, object, end_ns)) = self.reading
            && end_ns <= now_ns
        {
            self.reading = None;
            events.push(Event::Retrieved(claim));
            self.objects[object].readers -= 1;
            self.settle(object);
        }
        self.begin(now_ns);
        let ends = [self.moving.map(|it| it.2), self.reading.map(|it| it.2)];
        ends.into_iter().flatten().min()
    }
}
