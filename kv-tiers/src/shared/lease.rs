//! Who counts and collects: a small file that the leader rewrites, and that the others watch.
//!
//! No clock is compared between nodes. The leader writes a new beat every quarter of the time to live; who has seen the
//! same beat for the whole time to live, measured by its own waiting, takes over. Two leaders at once do no harm: each
//! removes only what nobody has touched, and both count the same files.

use std::{
    fs,
    io::{self, Write},
    path::Path,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use nix::sys::{eventfd::EventFd, statvfs::statvfs};

use super::{
    inspect::failed,
    media::{Bad, Lease},
    paths,
    pool::Message,
    publish::{Place, publish},
};
use crate::TierError;

/// Beats that a leader may miss: one more than the time to live has.
const MISSED_BEATS_MAX: u32 = 5;

/// What the leader says of the directory. Written by the tier's thread, read by the keeper.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    pub(super) round: u64,
    pub(super) used_bytes: u64,
    pub(super) chunks: u64,
}

/// What one look at the lease brought.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beat {
    pub(super) leader: bool,
    /// What the last leader counted.
    pub(super) figures: Figures,
    /// Free bytes of the file system, if it says.
    pub(super) free_bytes: Option<u64>,
    /// A later version's lease: we never lead.
    pub(super) newer: bool,
    pub(super) errno: Option<i32>,
}

#[derive(Clone, Copy, Debug)]
enum Role {
    Watching { seen: Option<(u64, u64)>, unchanged: u32 },
    Leading(Lease),
}

/// This node's part in the lease.
#[derive(Debug)]
pub(super) struct Keeper {
    place: Arc<Place>,
    ttl: Duration,
    role: Role,
    figures: Arc<Mutex<Figures>>,
}

/// What stands in the lease file.
enum Read {
    Nobody(Option<Lease>),
    Somebody(Lease),
    Newer,
}

impl Keeper {
    pub(super) fn new(place: Arc<Place>, ttl: Duration, figures: Arc<Mutex<Figures>>) -> Self {
        Self { place, ttl, role: Role::Watching { seen: None, unchanged: 0 }, figures }
    }

    /// One look, and one sign of life of a leader.
    pub(super) fn beat(&mut self) -> Beat {
        let mut beat = match self.look() {
            Ok(beat) => beat,
            Err(error) => {
                tracing::debug!(%error, "the lease cannot be kept");
                let errno = match &error {
                    TierError::Io { errno, .. } => Some(*errno),
                    _ => None,
                };
                Beat { errno, ..Beat::default() }
            }
        };
        beat.free_bytes = statvfs(&self.place.root)
            .ok()
            .map(|free| free.blocks_available().saturating_mul(free.fragment_size()));
        beat
    }

    fn look(&mut self) -> Result<Beat, TierError> {
        let found = self.read()?;
        let ours = |lease: &Lease| lease.node == self.place.node;
        let last = match &found {
            Read::Newer => {
                self.role = Role::Watching { seen: None, unchanged: 0 };
                return Ok(Beat { newer: true, ..Beat::default() });
            }
            Read::Somebody(lease) if !ours(lease) => {
                if !self.has_missed_enough(*lease) {
                    return Ok(Beat { figures: figures_of(*lease), ..Beat::default() });
                }
                tracing::info!(generation = lease.generation, "the leader is silent: taking over");
                Some(*lease)
            }
            Read::Somebody(lease) => Some(*lease),
            Read::Nobody(lease) => *lease,
        };
        let lease = self.next_lease(last);
        self.write(&lease)?;
        // Somebody may have written at the same moment; who stands there now leads.
        match self.read()? {
            Read::Somebody(now) if now == lease => {
                self.role = Role::Leading(lease);
                Ok(Beat { leader: true, figures: figures_of(lease), ..Beat::default() })
            }
            _ => {
                self.role = Role::Watching { seen: None, unchanged: 0 };
                Ok(Beat::default())
            }
        }
    }

    /// Counts how often the same beat was seen.
    fn has_missed_enough(&mut self, lease: Lease) -> bool {
        let now = (lease.generation, lease.beat);
        let unchanged = match self.role {
            Role::Watching { seen: Some(seen), unchanged } if seen == now => unchanged + 1,
            _ => 0,
        };
        self.role = Role::Watching { seen: Some(now), unchanged };
        unchanged >= MISSED_BEATS_MAX
    }

    fn next_lease(&self, last: Option<Lease>) -> Lease {
        let figures = *self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        let ttl_ms = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
        let last = last.unwrap_or_default();
        match self.role {
            Role::Leading(ours) => Lease {
                beat: ours.beat.wrapping_add(1),
                ttl_ms,
                round: figures.round,
                used_bytes: figures.used_bytes,
                chunks: figures.chunks,
                ..ours
            },
            Role::Watching { .. } => Lease {
                node: self.place.node,
                generation: last.generation.wrapping_add(1),
                beat: 0,
                ttl_ms,
                ..last
            },
        }
    }

    fn read(&self) -> Result<Read, TierError> {
        let path = self.place.root.join(paths::LEASE);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Read::Nobody(None)),
            Err(error) => return Err(failed("read", &path, 0, 0)(error)),
        };
        Ok(match Lease::parse(&bytes) {
            Ok(lease) if lease.node == 0 => Read::Nobody(Some(lease)),
            Ok(lease) => Read::Somebody(lease),
            Err(Bad::Newer(_)) => Read::Newer,
            Err(Bad::Damaged) => Read::Nobody(None),
        })
    }

    fn write(&self, lease: &Lease) -> Result<(), TierError> {
        let path = self.place.root.join(paths::LEASE);
        replace(&self.place, "lease", &path, &lease.encode())
    }

    /// Leaves in order: the next one need not wait, and knows what was counted.
    fn release(&mut self) {
        if let Role::Leading(_) = self.role
            && let Ok(Read::Somebody(found)) = self.read()
            && found.node == self.place.node
        {
            let _ = self.write(&Lease { node: 0, ..self.next_lease(Some(found)) });
        }
    }

    /// Beats on a thread of its own until the returned sender is dropped or sent to; then it leaves in order.
    pub(super) fn run(
        mut self,
        messages: mpsc::Sender<Message>,
        wake: Arc<EventFd>,
    ) -> io::Result<(mpsc::Sender<()>, thread::JoinHandle<()>)> {
        let (stop, stopped) = mpsc::channel();
        let thread =
            thread::Builder::new().name("kv-shared-lease".to_owned()).spawn(move || {
                while let Err(mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(self.ttl / 4)
                {
                    let beat = self.beat();
                    if messages.send(Message::Beat(beat)).is_err() {
                        break;
                    }
                    let _ = wake.write(1);
                }
                self.release();
            })?;
        Ok((stop, thread))
    }
}

fn figures_of(lease: Lease) -> Figures {
    Figures { round: lease.round, used_bytes: lease.used_bytes, chunks: lease.chunks }
}

fn write_temporary(place: &Place, path: &Path, bytes: &[u8]) -> Result<(), TierError> {
    let _ = fs::remove_file(path);
    let mut file = place.make_file(path).map_err(failed("open", path, 0, 0))?;
    let length = bytes.len() as u64;
    file.write_all(bytes).map_err(failed("write", path, 0, length))?;
    file.sync_data().map_err(failed("fdatasync", path, 0, length))?;
    nix::unistd::close(file).map_err(|errno| failed("close", path, 0, length)(errno.into()))
}

/// Writes a small file at once or not at all; the last writer wins.
fn replace(place: &Place, what: &str, path: &Path, bytes: &[u8]) -> Result<(), TierError> {
    let temporary = paths::root_temporary(&place.root, what, place.node);
    write_temporary(place, &temporary, bytes)?;
    fs::rename(&temporary, path).map_err(failed("rename", &temporary, 0, 0))
}

/// Writes a small file at once unless it is there; the first writer wins.
pub(super) fn write_once(
    place: &Place,
    what: &str,
    path: &Path,
    bytes: &[u8],
) -> Result<(), TierError> {
    let temporary = paths::root_temporary(&place.root, what, place.node);
    write_temporary(place, &temporary, bytes)?;
    let published = publish(place.publish, &temporary, path);
    let _ = fs::remove_file(&temporary);
    match published {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("publish", path, 0, bytes.len() as u64)(error))
        }
        _ => Ok(()),
    }
}
