//! Asking a running engine.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Sends one line to the socket of a running engine and gives what it answers, waiting at most `deadline` for each part:
/// `stats` (JSON), `metrics` (Prometheus text) or `purge` with a [`PurgeRequest`](super::PurgeRequest) as JSON.
///
/// # Errors
/// If nobody answers there.
pub fn ask(socket: &Path, request: &str, deadline: Duration) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(deadline))?;
    stream.set_write_timeout(Some(Duration::from_secs(5).min(deadline)))?;
    stream.write_all(format!("{request}\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if !answer.ends_with('\n') {
        answer.push('\n');
    }
    Ok(answer)
}
