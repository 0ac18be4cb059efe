//! `kvbraid stat`: what a running engine counts.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};

use clap::Args;

use crate::{failure::Failure, output};

const DEADLINE: Duration = Duration::from_secs(5);
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// What a running engine counts.
#[derive(Args)]
pub(crate) struct Stat {
    /// The `socket` of the engine's configuration.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Prometheus text instead of JSON.
    #[arg(long)]
    prometheus: bool,
}

impl Stat {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let answer = self.ask().map_err(|error| {
            let path = self.socket.display();
            Failure::failed(format!("no engine answers on {path}: {error}"))
        })?;
        output::print(&answer)
    }

    fn ask(&self) -> io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        stream.write_all(if self.prometheus { b"metrics\n" } else { b"stats\n" })?;
        let mut answer = String::new();
        stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
        if !answer.ends_with('\n') {
            answer.push('\n');
        }
        Ok(answer)
    }
}
