//! `kvbraid bench`: the engine on throttled block devices. `cargo xtask bench retrieval --devices` prepares the devices
//! and the cgroup, which takes root, and draws tables from the JSON that this writes.

mod bound;
mod cgroup;
mod costs;
mod counters;
mod fio;
mod handed;
mod one_device;
mod policy;
mod reader;
mod rig;
mod row;
mod scenario;
mod schedule;
mod study;

use std::{path::PathBuf, str::FromStr};

use clap::{Args, Subcommand};
use nix::sys::{prctl::set_pdeathsig, signal::Signal};

use self::{cgroup::Cgroup, reader::Reader, scenario::Scenario, study::Study};
use crate::{failure::Failure, output};

/// Measure the engine on block devices of known speed.
#[derive(Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Steps read from throttled devices by every policy, side by side; `cargo xtask bench retrieval --devices` calls
    /// this.
    Retrieval(Retrieval),
    /// Another job on a device: reads a file at a steady rate until its standard input ends.
    Reader(Reader),
}

/// Steps read from throttled devices by every policy.
#[derive(Args)]
struct Retrieval {
    /// Cgroup that throttles: of version 1 with blkio, or of version 2 with io. This process enters it.
    #[arg(long, value_name = "DIR")]
    cgroup: PathBuf,
    /// A mounted device, its number and its limit in MB/s; the faster of the two first.
    #[arg(long = "device", value_name = "NAME=PATH,MAJOR:MINOR,MBPS")]
    devices: Vec<Device>,
    /// Only this scenario; give it once for each. Default: all of them.
    #[arg(long = "scenario", value_name = "NAME")]
    scenarios: Vec<Scenario>,
    /// Repetitions of every policy.
    #[arg(long, value_name = "N", default_value_t = 5)]
    reps: usize,
    /// How long a step takes at the limits, about.
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    seconds: f64,
    /// Reads in flight on each device. One chunk of 4 MiB at a time reaches 99 % of a throttled device's rate; one more
    /// bridges what a busy machine takes to send the next. On the device without a limit it is 16 at least.
    #[arg(long, value_name = "N", default_value_t = 2)]
    window: u32,
    /// The fio command, for the comparison on one device; that is left out without it.
    #[arg(long, value_name = "FILE")]
    fio: Option<PathBuf>,
    /// Where the results go.
    #[arg(long, value_name = "FILE")]
    json: PathBuf,
    /// End when whoever started this ends, in whatever way: nobody would take the devices down.
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// A block device with a file system on it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Device {
    pub(super) name: String,
    /// Where it is mounted.
    pub(super) path: PathBuf,
    /// As cgroups name it, such as `7:0`.
    pub(super) number: String,
    pub(super) bytes_per_s: u64,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hint = || format!("`{text}` is no device; write NAME=PATH,MAJOR:MINOR,MBPS");
        let (name, rest) = text.split_once('=').ok_or_else(hint)?;
        let mut parts = rest.rsplitn(3, ',');
        let (mbps, number, path) = (parts.next(), parts.next(), parts.next());
        let mbps: u64 = mbps.and_then(|mbps| mbps.parse().ok()).ok_or_else(hint)?;
        let number = number.ok_or_else(hint)?;
        let (major, minor) = number.split_once(':').ok_or_else(hint)?;
        let numbers = [major, minor].iter().all(|part| part.parse::<u32>().is_ok());
        match path {
            Some(path) if numbers && !name.is_empty() && !path.is_empty() && mbps > 0 => Ok(Self {
                name: name.to_owned(),
                path: path.into(),
                number: number.to_owned(),
                bytes_per_s: mbps.saturating_mul(1_000_000),
            }),
            _ => Err(hint()),
        }
    }
}

impl Bench {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::Retrieval(retrieval) => retrieval.run(),
            What::Reader(reader) => reader.run(),
        }
    }
}

impl Retrieval {
    fn run(self) -> Result<(), Failure> {
        self.check()?;
        if self.with_parent {
            let set = set_pdeathsig(Signal::SIGKILL);
            set.map_err(|error| Failure::failed(format!("cannot follow the parent: {error}")))?;
        }
        let cgroup = Cgroup::open(&self.cgroup)?;
        cgroup.enter()?;
        let study = Study {
            cgroup,
            devices: self.devices,
            reps: self.reps,
            seconds: self.seconds,
            window: self.window,
            fio: self.fio,
        };
        // In their own order: the last fills one device only.
        let wanted = |it: &Scenario| self.scenarios.is_empty() || self.scenarios.contains(it);
        let scenarios: Vec<Scenario> = Scenario::ALL.into_iter().filter(wanted).collect();
        let results = study.run(&scenarios)?;
        if row::has_null(&results) {
            return Err(Failure::failed("a figure is no number: nothing is written"));
        }
        output::save(&self.json, &format!("{results:#}\n"))?;
        // What the others showed stands.
        match results["failed"].as_array().and_then(|failed| failed.first()) {
            None => Ok(()),
            Some(first) => Err(Failure::failed(format!(
                "{}: {}",
                first["scenario"].as_str().unwrap_or("?"),
                first["why"].as_str().unwrap_or("?")
            ))),
        }
    }

    fn check(&self) -> Result<(), Failure> {
        if self.devices.len() != 2 {
            let line =
                format!("--device: {} given; name two, the faster first", self.devices.len());
            return Err(Failure::usage(line));
        }
        if self.devices[0].bytes_per_s < self.devices[1].bytes_per_s {
            return Err(Failure::usage("--device: the first is the slower; name the faster first"));
        }
        if self.devices[0].number == self.devices[1].number {
            return Err(Failure::usage("--device: both have one number; give two devices"));
        }
        if self.reps == 0 || self.window == 0 {
            return Err(Failure::usage("--reps and --window: give 1 or more"));
        }
        if !(0.2..=60.0).contains(&self.seconds) {
            return Err(Failure::usage("--seconds: give 0.2 to 60"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_from_its_parts() {
        let device: Device = "fast=/mnt/a,b,7:0,300".parse().unwrap();
        assert_eq!((device.name.as_str(), device.number.as_str()), ("fast", "7:0"));
        assert_eq!((device.path, device.bytes_per_s), (PathBuf::from("/mnt/a,b"), 300_000_000));
        for text in ["", "a=/x", "a=/x,7:0", "a=/x,7,300", "a=/x,7:0,0", "=/x,7:0,1", "a=,7:0,1"] {
            assert!(text.parse::<Device>().unwrap_err().contains("MAJOR:MINOR"), "{text}");
        }
    }
}
