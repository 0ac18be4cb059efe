//! Results to standard output and to files.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use serde::Serialize;

use crate::failure::Failure;

/// Prints results.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Whoever read us has enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| Failure::failed(format!("cannot print: {error}"))),
    }
}

/// Prints results for machines.
pub(crate) fn print_json(results: &impl Serialize) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(results);
    print(&(json.map_err(|error| Failure::failed(error.to_string()))? + "\n"))
}

/// Writes a file whole.
pub(crate) fn save(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text)
        .map_err(|error| Failure::failed(format!("cannot write {}: {error}", path.display())))
}

/// Fails unless every byte was right and nothing failed.
pub(crate) fn verdict(wrong_bytes: u64, problems: u64) -> Result<(), Failure> {
    match (wrong_bytes, problems) {
        (0, 0) => Ok(()),
        (0, _) => Err(Failure::failed(format!("{problems} operations failed; see above"))),
        _ => Err(Failure::failed(format!("{wrong_bytes} bytes were WRONG"))),
    }
}
