//! Starting a command, keeping what it says, and saying little while it succeeds.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result};

use crate::tally;

/// The directory of the root `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// The cargo that runs us, so that one toolchain does everything.
pub(crate) fn cargo() -> Command {
    let program = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// What became of a command that ran.
pub(crate) struct Finished {
    pub(crate) success: bool,
    /// Standard output and standard error, interleaved as they came.
    pub(crate) log: String,
}

/// Runs `command` to its end; its output goes to `target/xtask/<name>.log`, and what of it is trouble
/// to the screen if it fails.
///
/// # Errors
/// If the command cannot be started or its log cannot be written; a command that fails is not an error here.
pub(crate) fn logged(name: &str, command: &mut Command) -> Result<Finished> {
    let directory = root().join("target/xtask");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let path = directory.join(format!("{}.log", name.replace(' ', "-")));
    let (success, log) = capture(command).with_context(|| format!("run {command:?}"))?;
    fs::write(&path, &log).with_context(|| format!("write {}", path.display()))?;
    if !success {
        println!(
            "{}\nfailed: {command:?}\n(all of its output: {})",
            tally::trouble(&log),
            path.display()
        );
    }
    Ok(Finished { success, log })
}

/// Runs `command` with the terminal as it is.
///
/// # Errors
/// If the command cannot be started or does not succeed.
pub(crate) fn shown(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    anyhow::ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

fn capture(command: &mut Command) -> Result<(bool, String)> {
    // One pipe for both streams keeps their order.
    let (reader, writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn()?;
    // The command holds our writing ends until it is told otherwise; without this the reader never sees the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let log = thread::spawn(move || read_lines(BufReader::new(reader)));
    let status = child.wait()?;
    let log = log.join().map_err(|_| anyhow::anyhow!("the log reader panicked"))??;
    Ok((status.success(), log))
}

fn read_lines(mut reader: impl BufRead) -> Result<String> {
    let mut log = Vec::new();
    let mut shown_dots = false;
    loop {
        let before = log.len();
        if reader.read_until(b'\n', &mut log)? == 0 {
            break;
        }
        // A sign of life on long builds, on one line.
        if log[before..].trim_ascii_start().starts_with(b"Compiling") {
            shown_dots = true;
            print!(".");
            std::io::stdout().flush()?;
        }
    }
    if shown_dots {
        println!();
    }
    Ok(String::from_utf8_lossy(&log).into_owned())
}
