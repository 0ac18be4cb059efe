//! fio reading the engine's own files: the yardstick on one device.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use super::rig::Shot;
use crate::failure::Failure;

/// What fio reads and how.
#[derive(Debug)]
pub(super) struct Fio<'a> {
    pub(super) program: &'a Path,
    /// Written everywhere, of one length, and read one after another.
    pub(super) files: Vec<PathBuf>,
    /// Length of each.
    pub(super) file_bytes: u64,
    /// Of one request.
    pub(super) request_bytes: u64,
    /// Requests in flight.
    pub(super) depth: u64,
}

impl Fio<'_> {
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments: Vec<String> = [
            "--name=one",
            "--rw=read",
            "--direct=1",
            "--ioengine=io_uring",
            "--fixedbufs",
            "--registerfiles",
            "--nonvectored=1",
            "--iomem=mmaphuge",
            "--readonly",
            "--thread",
            "--file_service_type=sequential",
            "--output-format=json",
        ]
        .map(str::to_owned)
        .into();
        // fio takes a colon for the end of a name.
        let name = |file: &PathBuf| file.display().to_string().replace(':', "\\:");
        let names: Vec<String> = self.files.iter().map(name).collect();
        arguments.push(format!("--filename={}", names.join(":")));
        arguments.push(format!("--bs={}", self.request_bytes));
        arguments.push(format!("--iodepth={}", self.depth));
        let file_bytes = self.file_bytes / self.request_bytes * self.request_bytes;
        arguments.push(format!("--filesize={file_bytes}"));
        arguments.push(format!("--size={}", file_bytes * self.files.len() as u64));
        arguments
    }

    /// Reads the files once.
    pub(super) fn read(&self) -> Result<Shot, Failure> {
        let output =
            Command::new(self.program).args(self.arguments()).output().map_err(|error| {
                Failure::failed(format!("start {}: {error}", self.program.display()))
            })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let said = || {
            let error = String::from_utf8_lossy(&output.stderr);
            Failure::failed(format!("fio: {}", error.lines().next().unwrap_or("no result")))
        };
        if !output.status.success() {
            return Err(said());
        }
        parse(&text).ok_or_else(said)
    }
}

/// Lines of warnings can stand before the JSON.
fn parse(text: &str) -> Option<Shot> {
    let value: Value = serde_json::from_str(&text[text.find('{')?..]).ok()?;
    let job = value["jobs"].get(0)?;
    if job["error"] != 0 {
        return None;
    }
    let bytes = job["read"]["io_bytes"].as_u64()?;
    // In milliseconds of which the rate's are finer.
    let seconds = bytes as f64 / job["read"]["bw_bytes"].as_f64()?;
    let runtime_s = job["job_runtime"].as_f64()? / 1e3;
    let cpu = job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?;
    (bytes > 0).then(|| Shot {
        seconds,
        bytes,
        tier_bytes: vec![bytes],
        tier_busy_s: vec![seconds],
        cpu_s: cpu / 100.0 * runtime_s,
        ..Shot::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_bytes_and_cpu_are_read_from_the_json() {
        let text = "note: a warning\n{\"jobs\": [{\"error\": 0, \"job_runtime\": 2000, \"usr_cpu\": 5.0, \"sys_cpu\": 10.0,
            \"read\": {\"io_bytes\": 2000000000, \"bw_bytes\": 1000000000, \"runtime\": 2000}}]}";
        let shot = parse(text).unwrap();
        assert_eq!((shot.bytes, shot.seconds), (2_000_000_000, 2.0));
        assert!((shot.cpu_s - 0.3).abs() < 1e-12);
        assert!(parse(&text.replace("\"error\": 0", "\"error\": 5")).is_none());
        assert!(parse("fio: no such file").is_none());
    }

    #[test]
    fn requests_are_as_large_and_as_many_as_asked() {
        let fio = Fio {
            program: Path::new("fio"),
            files: vec!["/mnt/a:b".into(), "/mnt/c".into()],
            file_bytes: 10_000_000,
            request_bytes: 1_052_672,
            depth: 16,
        };
        let arguments = fio.arguments();
        for due in [
            "--bs=1052672",
            "--iodepth=16",
            "--filename=/mnt/a\\:b:/mnt/c",
            "--filesize=9474048",
            "--size=18948096",
            "--iomem=mmaphuge",
        ] {
            assert!(arguments.iter().any(|argument| argument == due), "{due}");
        }
    }
}
