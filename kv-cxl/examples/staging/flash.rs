//! A file behind the page cache as the device, and the reads of an accelerator from it.

use std::{
    cell::RefCell,
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Instant,
};

use kv_cxl::{
    Extent, FastTier, FastTierError, FileMedium, Medium, PageCacheConfig, PageCacheFlash,
    Residency, StageEvent, StageId,
};
use kv_staging::ClaimId;

use crate::{
    device::{Device, Event},
    serve::Clock,
};

/// How often a device that works is looked at.
const LOOK_NS: u64 = 1_000_000;
const READ_BYTES: usize = 1 << 20;
/// So old may an answer to what is resident be.
const RESIDENT_NS: u64 = 20_000_000;

/// Time since it was made.
pub(crate) struct Real(pub(crate) Instant);

impl Real {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Clock for Real {
    fn wait_until(&mut self, at_ns: u64) -> u64 {
        let left_ns = at_ns.saturating_sub(self.now_ns());
        if left_ns > 0 {
            thread::sleep(std::time::Duration::from_nanos(left_ns));
        }
        self.now_ns()
    }
}

/// The word at a byte offset of the file.
pub(crate) fn word(offset: u64) -> u64 {
    let value = (offset ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value ^ (value >> 29)
}

struct Read {
    claim: ClaimId,
    extent: Extent,
}

/// Staged by `PageCacheFlash`, read through its medium by a thread for each slot.
pub(crate) struct Flash {
    tier: PageCacheFlash,
    extents: Vec<Extent>,
    /// Bytes told as moving, and as moved.
    staging: Vec<(usize, u64)>,
    queued_bytes: u64,
    reads: Sender<Read>,
    done: Receiver<Result<Read, String>>,
    reading: usize,
    told: Vec<Event>,
    now_ns: u64,
    /// When each object was looked at, and whether it was resident: looking costs time.
    resident: RefCell<Vec<Option<(u64, bool)>>>,
}

impl Flash {
    /// Nothing of the file is cached.
    pub(crate) fn open(
        path: &Path,
        object_bytes: &[u64],
        pin_limit_bytes: u64,
        slots: usize,
    ) -> Result<Self, FastTierError> {
        let mut tier = PageCacheFlash::open(PageCacheConfig::new(path, pin_limit_bytes))?;
        let mut offset = 0;
        let extents: Vec<Extent> = object_bytes
            .iter()
            .map(|bytes| {
                offset += bytes;
                Extent { offset: offset - bytes, bytes: *bytes }
            })
            .collect();
        tier.evict_hint(&extents, 0)?;
        let (reads, todo) = channel();
        let (tell, done) = channel();
        let todo = Arc::new(Mutex::new(todo));
        for _ in 0..slots {
            let (todo, tell, medium) = (Arc::clone(&todo), tell.clone(), tier.medium());
            thread::spawn(move || read_all(&todo, &tell, &medium));
        }
        Ok(Self {
            resident: RefCell::new(vec![None; extents.len()]),
            tier,
            extents,
            staging: Vec::new(),
            queued_bytes: 0,
            reads,
            done,
            reading: 0,
            told: Vec::new(),
            now_ns: 0,
        })
    }

    fn missing(&self, object: usize) -> u64 {
        let extent = self.extents[object];
        match self.tier.residency(&[extent]) {
            Ok(Residency::Bytes(bytes)) => extent.bytes - bytes,
            _ => extent.bytes,
        }
    }

    /// What was staged counts when it is all there.
    fn staged(&mut self, event: &StageEvent, now_ns: u64, events: &mut Vec<Event>) {
        let (StageEvent::Done(id) | StageEvent::Failed(id, _)) = event;
        let object = usize::try_from(id.0).expect("ids are objects");
        self.staging.retain(|(staging, _)| *staging != object);
        if matches!(event, StageEvent::Done(_)) && self.missing(object) == 0 {
            events.push(Event::Staged(object));
        } else {
            let _ = self.tier.unprotect(&[self.extents[object]], now_ns);
            events.push(Event::Failed(object));
        }
    }
}

impl Device for Flash {
    fn stage(&mut self, object: usize, now_ns: u64) -> u64 {
        let extent = [self.extents[object]];
        let missing = self.missing(object);
        let protected = self.tier.protect(&extent, now_ns);
        if protected
            .and_then(|()| self.tier.submit_stage(StageId(object as u64), &extent, now_ns))
            .is_err()
        {
            let _ = self.tier.unprotect(&extent, now_ns);
            self.told.push(Event::Failed(object));
            return 0;
        }
        self.staging.push((object, missing));
        self.queued_bytes += missing;
        missing
    }

    fn unprotect(&mut self, object: usize, now_ns: u64) {
        self.tier.unprotect(&[self.extents[object]], now_ns).expect("it was protected");
    }

    fn retrieve(&mut self, claim: ClaimId, object: usize, _now_ns: u64) -> u64 {
        self.reading += 1;
        let read = Read { claim, extent: self.extents[object] };
        self.reads.send(read).expect("readers live as long as this");
        0
    }

    fn is_resident(&self, object: usize) -> bool {
        let mut resident = self.resident.borrow_mut();
        match resident[object] {
            Some((looked_ns, is_resident)) if self.now_ns < looked_ns + RESIDENT_NS => is_resident,
            _ => {
                let is_resident = self.missing(object) == 0;
                resident[object] = Some((self.now_ns, is_resident));
                is_resident
            }
        }
    }

    fn poll(&mut self, now_ns: u64, events: &mut Vec<Event>) -> Option<u64> {
        self.now_ns = now_ns;
        events.append(&mut self.told);
        let mut ended = Vec::new();
        self.tier.poll(now_ns, &mut ended);
        // One after the other, so all that is missing now was missing of those that are still coming in.
        let left: u64 = self.tier.load().queued_bytes.unwrap_or(0).min(self.queued_bytes);
        if left < self.queued_bytes {
            events.push(Event::Moved(self.queued_bytes - left));
            self.queued_bytes = left;
        }
        ended.iter().for_each(|event| self.staged(event, now_ns, events));
        while let Ok(read) = self.done.try_recv() {
            self.reading -= 1;
            match read {
                Ok(read) => events.push(Event::Retrieved(read.claim)),
                Err(error) => panic!("{error}"),
            }
        }
        (self.reading > 0 || !self.staging.is_empty()).then_some(now_ns + LOOK_NS)
    }
}

fn read_all(
    todo: &Mutex<Receiver<Read>>,
    tell: &Sender<Result<Read, String>>,
    medium: &FileMedium,
) {
    let mut bytes = vec![0; READ_BYTES];
    loop {
        let next = todo.lock().expect("no reader panics").recv();
        let Ok(read) = next else { return };
        let result = check(&read, medium, &mut bytes).map(|()| read);
        if tell.send(result).is_err() {
            return;
        }
    }
}

/// Reads, and looks at every byte.
fn check(read: &Read, medium: &FileMedium, bytes: &mut [u8]) -> Result<(), String> {
    let (mut offset, end) = (read.extent.offset, read.extent.offset + read.extent.bytes);
    while offset < end {
        medium.read(offset, bytes).map_err(|error| error.to_string())?;
        for (at, chunk) in (0_u64..).step_by(8).zip(bytes.as_chunks::<8>().0) {
            if u64::from_le_bytes(*chunk) != word(offset + at) {
                return Err(format!("wrong bytes at offset {}", offset + at));
            }
        }
        offset += bytes.len() as u64;
    }
    Ok(())
}
