//! `kvbraid sim`: the router over modelled devices, in virtual time.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kv_connector::sim::{Profile, Study, StudyOptions};

use crate::{failure::Failure, output};

/// The router over modelled devices, in virtual time.
#[derive(Args)]
pub(crate) struct Sim {
    #[command(subcommand)]
    model: Model,
}

#[derive(Subcommand)]
enum Model {
    /// How long steps take against their bound: every policy, device and size, for several seeds.
    Retrieval(Retrieval),
}

/// How long steps take against their bound.
#[derive(Args)]
struct Retrieval {
    /// Independent repetitions.
    #[arg(long, value_name = "N", default_value_t = StudyOptions::default().seeds)]
    seeds: u64,
    /// The first repetition's seed.
    #[arg(long, value_name = "N", default_value_t = StudyOptions::default().first_seed)]
    first_seed: u64,
    /// Chunks that each repetition reads at least.
    #[arg(long, value_name = "N", default_value_t = StudyOptions::default().chunks)]
    chunks: usize,
    /// Only this device; give it once for each. Default: all of them.
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
    /// Write the results as JSON, too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Sim {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Model::Retrieval(retrieval) = self.model;
        retrieval.run()
    }
}

impl Retrieval {
    fn run(self) -> Result<(), Failure> {
        if let Some(name) = self.devices.iter().find(|name| Profile::named(name, 1).is_none()) {
            let known: Vec<_> = Profile::all(1).iter().map(|profile| profile.name).collect();
            let line = format!("--device: `{name}` is no device; give one of {}", known.join(", "));
            return Err(Failure::usage(line));
        }
        if self.seeds == 0 || self.chunks == 0 {
            return Err(Failure::usage("--seeds and --chunks: give 1 or more"));
        }
        let mut options = StudyOptions::default();
        options.seeds = self.seeds;
        options.first_seed = self.first_seed;
        options.chunks = self.chunks;
        options.devices = self.devices;
        let study = Study::run(options);
        output::print(&study.to_table())?;
        match self.json {
            Some(path) => output::save(&path, &format!("{:#}\n", study.to_json())),
            None => Ok(()),
        }
    }
}
