//! A unix socket that answers while the engine lives, on a thread that never does data I/O.
//!
//! A client connects, may send one line (`stats`, `metrics`, or `purge` and what;
//! nothing means `stats`), and reads the answer to its end:
//! one JSON object, or Prometheus text.

use std::{
    fmt::Display,
    fs, io,
    os::{
        fd::AsFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream as BlockingStream,
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::sys::stat::{Mode, fchmod};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixSocket, UnixStream},
    sync::{Semaphore, oneshot},
    time::timeout,
};

use crate::{EngineError, inspect::PurgeRequest, shared::Shared, sync::lock_plain};

const CLIENTS_MAX: usize = 8;
const REQUEST_BYTES_MAX: usize = 16 << 10;
/// Read at a time.
const PART_BYTES: usize = 512;
const DISCARDED_BYTES_MAX: u64 = 64 << 10;
const REQUEST_WAIT: Duration = Duration::from_millis(250);
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Ends the thread and removes the socket when dropped.
#[derive(Debug)]
pub(crate) struct StatsSocket {
    path: PathBuf,
    /// Device and inode of what was bound: somebody else's may stand there by the end.
    file: Option<(u64, u64)>,
    end: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

impl StatsSocket {
    pub(crate) fn open(shared: &Arc<Shared>, path: &Path) -> Result<Self, EngineError> {
        let error = |source| EngineError::system(format!("socket {}", path.display()), source);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(error)?;
        let listener = runtime.block_on(async { listen(path) }).map_err(error)?;
        let file = file_at(path);
        let (end, ended) = oneshot::channel();
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new()
            .name("kvb-stats".to_owned())
            .spawn(move || {
                runtime.spawn(async move { serve(listener, &shared).await });
                let _ = runtime.block_on(ended);
                // A client may be in the middle of its answer: it is cut off.
                runtime.shutdown_background();
            })
            .map_err(error)?;
        Ok(Self { path: path.to_owned(), file, end: Mutex::new(Some((end, thread))) })
    }

    /// Ends the thread, which has nothing to wait for, and removes the socket. Later calls do nothing.
    pub(crate) fn close(&self) {
        let Some((end, thread)) = lock_plain(&self.end).take() else { return };
        let _ = end.send(());
        // A panic there was told where it happened.
        let _ = thread.join();
        if file_at(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// What stands there, whatever its name.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Binds with mode 0600 from the first moment; the socket that a killed engine left is replaced.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Ok(found) = fs::symlink_metadata(path) {
        let in_the_way = |what| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
        if !found.file_type().is_socket() {
            return in_the_way("something else stands there: choose another path");
        }
        if BlockingStream::connect(path).is_ok() {
            return in_the_way("an engine answers there: choose another path");
        }
        fs::remove_file(path)?;
    }
    let socket = UnixSocket::new_stream()?;
    fchmod(socket.as_fd(), Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket.bind(path)?;
    socket.listen(CLIENTS_MAX.try_into().unwrap_or(8))
}

async fn serve(listener: UnixListener, shared: &Arc<Shared>) {
    let clients = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&clients).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let shared = Arc::clone(shared);
                tokio::spawn(async move {
                    let _ = answer(stream, shared).await;
                    drop(permit);
                });
            }
            // Out of file descriptors, as a rule: it passes.
            Err(_) => tokio::time::sleep(REQUEST_WAIT).await,
        }
    }
}

async fn answer(mut stream: UnixStream, shared: Arc<Shared>) -> io::Result<()> {
    let request = timeout(ANSWER_WAIT, read_request(&mut stream)).await?;
    // A purge waits for tiers, within a deadline of its own.
    let answer = tokio::task::spawn_blocking(move || answer_to(&request, &shared)).await?;
    timeout(ANSWER_WAIT, send(stream, &answer)).await?
}

fn answer_to(request: &[u8], shared: &Shared) -> String {
    let request = request.trim_ascii();
    if let Some(body) = request.strip_prefix(b"purge ") {
        return answer_to_purge(body, shared) + "\n";
    }
    match request {
        b"" | b"stats" => {
            serde_json::to_string(&shared.stats()).unwrap_or_else(|why| error(&why)) + "\n"
        }
        b"metrics" => shared.stats().prometheus(),
        _ => error(&"unknown request: send `stats`, `metrics` or `purge {..}`") + "\n",
    }
}

fn answer_to_purge(body: &[u8], shared: &Shared) -> String {
    let request = match serde_json::from_slice::<PurgeRequest>(body) {
        Ok(request) => request,
        Err(why) => return error(&why),
    };
    match shared.purge(&request) {
        Ok(report) => serde_json::to_string(&report).unwrap_or_else(|why| error(&why)),
        Err(refused) => error(&refused),
    }
}

fn error(why: &dyn Display) -> String {
    serde_json::json!({ "error": why.to_string() }).to_string()
}

async fn send(mut stream: UnixStream, answer: &str) -> io::Result<()> {
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    // Closing with bytes unread would reset the connection under the answer.
    let mut rest = stream.take(DISCARDED_BYTES_MAX);
    tokio::io::copy(&mut rest, &mut tokio::io::sink()).await.map(|_| ())
}

/// One line, or what came before the client stopped sending.
async fn read_request(stream: &mut UnixStream) -> Vec<u8> {
    let mut request = Vec::new();
    let mut part = [0; PART_BYTES];
    while request.len() < REQUEST_BYTES_MAX && !request.contains(&b'\n') {
        match timeout(REQUEST_WAIT, stream.read(&mut part)).await {
            Ok(Ok(bytes)) if bytes > 0 => request.extend_from_slice(&part[..bytes]),
            _ => break,
        }
    }
    request
}
