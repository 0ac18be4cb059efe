//! A thread that makes blocking staging calls, so that the caller of a provider never waits for the device.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread,
    time::Duration,
};

use crate::{Extent, FastTierError, Load, StageEvent, StageId, total_bytes};

/// How often a caller should look while something is in flight.
const LOOK_EVERY_NS: u64 = 1_000_000;
/// How long a drop waits for a call that the thread is in.
const END_WAIT: Duration = Duration::from_secs(10);
/// A rate is measured over at least so much busy time.
const RATE_NS_MIN: u64 = 5_000_000;

type BringIn = dyn Fn(Extent) -> Result<(), FastTierError> + Send;

/// Stagings in order of submission, in pieces, one call at a time.
pub(crate) struct Stager {
    jobs: Option<Sender<Job>>,
    news: Receiver<News>,
    in_flight: VecDeque<StageId>,
    queue_ops_max: usize,
    queued_bytes: u64,
    /// Written by the drop, read by the thread between two pieces; nothing else depends on it, so relaxed.
    abandon: Arc<AtomicBool>,
    rate: Rate,
    thread: Option<thread::JoinHandle<()>>,
}

struct Job {
    id: StageId,
    extents: Vec<Extent>,
}

enum News {
    /// So many bytes were dealt with.
    Moved(u64),
    Ended(StageEvent),
}

impl Stager {
    /// Starts the thread; `bring_in` is called for pieces of at most `piece_bytes`.
    pub(crate) fn start(
        name: &str,
        queue_ops_max: usize,
        piece_bytes: u64,
        bring_in: Box<BringIn>,
    ) -> std::io::Result<Self> {
        let (jobs, todo) = channel();
        let (tell, news) = channel();
        let abandon = Arc::new(AtomicBool::new(false));
        let abandoned = Arc::clone(&abandon);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&todo, &tell, piece_bytes.max(1), &*bring_in, &abandoned))?;
        Ok(Self {
            jobs: Some(jobs),
            news,
            in_flight: VecDeque::new(),
            queue_ops_max,
            queued_bytes: 0,
            abandon,
            rate: Rate::default(),
            thread: Some(thread),
        })
    }

    /// Queues checked extents.
    pub(crate) fn submit(
        &mut self,
        id: StageId,
        extents: Vec<Extent>,
        now_ns: u64,
    ) -> Result<(), FastTierError> {
        let queue_ops_max = self.queue_ops_max;
        if self.in_flight.contains(&id) {
            return Err(FastTierError::DuplicateId { id });
        }
        if self.in_flight.len() >= queue_ops_max {
            return Err(FastTierError::QueueFull { queue_ops_max });
        }
        let bytes = total_bytes(&extents);
        let jobs = self.jobs.as_ref().ok_or(FastTierError::Stopped)?;
        jobs.send(Job { id, extents }).map_err(|_| FastTierError::Stopped)?;
        if self.in_flight.is_empty() {
            self.rate.begin(now_ns);
        }
        self.in_flight.push_back(id);
        self.queued_bytes += bytes;
        Ok(())
    }

    pub(crate) fn poll(&mut self, now_ns: u64, events: &mut Vec<StageEvent>) -> Option<u64> {
        loop {
            match self.news.try_recv() {
                Ok(News::Moved(bytes)) => {
                    self.queued_bytes = self.queued_bytes.saturating_sub(bytes);
                    self.rate.moved(bytes);
                }
                Ok(News::Ended(event)) => {
                    let (StageEvent::Done(id) | StageEvent::Failed(id, _)) = &event;
                    self.in_flight.retain(|waiting| waiting != id);
                    events.push(event);
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    let lost = self.in_flight.drain(..);
                    events.extend(lost.map(|id| StageEvent::Failed(id, FastTierError::Stopped)));
                    break;
                }
            }
        }
        self.rate.look(now_ns, self.in_flight.is_empty());
        if self.in_flight.is_empty() {
            self.queued_bytes = 0;
            return None;
        }
        Some(now_ns.saturating_add(LOOK_EVERY_NS))
    }

    pub(crate) fn load(&self) -> Load {
        Load { queued_bytes: Some(self.queued_bytes), bytes_per_s: self.rate.bytes_per_s }
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stager").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Drop for Stager {
    fn drop(&mut self) {
        self.abandon.store(true, Ordering::Relaxed);
        self.jobs = None;
        // The thread ends at its next piece. If the device holds it longer, it is left behind: it owns what it uses.
        loop {
            match self.news.recv_timeout(END_WAIT) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // What it used is free again only when it has ended.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(
    todo: &Receiver<Job>,
    tell: &Sender<News>,
    piece_bytes: u64,
    bring_in: &BringIn,
    abandon: &AtomicBool,
) {
    while let Ok(Job { id, extents }) = todo.recv() {
        let mut failure = None;
        for piece in extents.iter().flat_map(|extent| pieces(*extent, piece_bytes)) {
            if abandon.load(Ordering::Relaxed) {
                return;
            }
            if failure.is_none() {
                failure = bring_in(piece).err();
            }
            let _ = tell.send(News::Moved(piece.bytes));
        }
        let event = match failure {
            None => StageEvent::Done(id),
            Some(error) => StageEvent::Failed(id, error),
        };
        if tell.send(News::Ended(event)).is_err() {
            return;
        }
    }
}

fn pieces(extent: Extent, piece_bytes: u64) -> impl Iterator<Item = Extent> {
    (0..extent.bytes.div_ceil(piece_bytes)).map(move |piece| {
        let start = piece * piece_bytes;
        Extent { offset: extent.offset + start, bytes: piece_bytes.min(extent.bytes - start) }
    })
}

/// Bytes over busy time, smoothed.
#[derive(Debug, Default)]
struct Rate {
    bytes_per_s: Option<u64>,
    bytes: u64,
    since_ns: u64,
}

impl Rate {
    fn begin(&mut self, now_ns: u64) {
        (self.bytes, self.since_ns) = (0, now_ns);
    }

    fn moved(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    fn look(&mut self, now_ns: u64, idle: bool) {
        let busy_ns = now_ns.saturating_sub(self.since_ns);
        if self.bytes == 0 || busy_ns == 0 || (busy_ns < RATE_NS_MIN && !idle) {
            return;
        }
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(busy_ns);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        // A quarter of what is new.
        self.bytes_per_s = Some(self.bytes_per_s.map_or(rate, |old| old - old / 4 + rate / 4));
        self.begin(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_an_extent_once() {
        let extent = Extent { offset: 100, bytes: 25 };
        let cut: Vec<Extent> = pieces(extent, 10).collect();
        let expected = [(100, 10), (110, 10), (120, 5)];
        assert_eq!(cut, expected.map(|(offset, bytes)| Extent { offset, bytes }));
    }

    #[test]
    fn a_thread_that_dies_fails_what_is_in_flight() {
        let mut stager = Stager::start("test", 4, 10, Box::new(|_| panic!("as asked"))).unwrap();
        stager.submit(StageId(7), vec![Extent { offset: 0, bytes: 1 }], 0).unwrap();
        let mut events = Vec::new();
        while stager.poll(0, &mut events).is_some() {
            thread::yield_now();
        }
        assert_eq!(events, [StageEvent::Failed(StageId(7), FastTierError::Stopped)]);
        let refused = stager.submit(StageId(8), vec![], 0);
        assert_eq!(refused, Err(FastTierError::Stopped));
    }

    #[test]
    fn the_rate_is_that_of_busy_time() {
        let mut rate = Rate::default();
        rate.begin(1_000_000_000);
        rate.moved(1 << 20);
        rate.look(1_010_000_000, false);
        assert_eq!(rate.bytes_per_s, Some(100 << 20));
    }
}
