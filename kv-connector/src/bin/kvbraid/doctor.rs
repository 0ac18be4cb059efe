//! `kvbraid doctor`: whether machine, configuration and serving engine are fit for each other.

use std::{fs, path::PathBuf};

use clap::Args;
use kv_connector::{
    Config,
    doctor::{Serving, examine, versions},
};

use crate::{failure::Failure, output};

/// Look at kernel, memory, the directories of every tier and the settings of the serving engine, and try each tier out
/// for some seconds in a fresh directory inside its own. Run it as the user, and in the container, of the server.
///
/// Exit code 0: fit, perhaps with warnings. 1: something failed. 2: the arguments or the configuration.
#[derive(Args)]
pub(crate) struct Doctor {
    /// Engine configuration, TOML or JSON; without it only the machine is looked at.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The arguments of `lmcache server`; `@FILE` for a file that has them, such as /proc/PID/cmdline.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    lmcache_args: Option<String>,
    /// vLLM's `--kv-transfer-config`, or its command line; `@FILE` likewise.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    vllm_config: Option<String>,
    /// SGLang's `--hicache-storage-backend-extra-config`, or its command line; `@FILE` likewise.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    sglang_config: Option<String>,
    /// A Python whose serving engines are looked at.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let config = self.config.as_deref().map(Config::from_file).transpose()?;
        let mut serving = Serving::default();
        serving.lmcache = text("--lmcache-args", self.lmcache_args)?;
        serving.vllm = text("--vllm-config", self.vllm_config)?;
        serving.sglang = text("--sglang-config", self.sglang_config)?;
        let mut diagnosis = examine(config.as_ref(), &serving);
        if let Some(python) = &self.python {
            diagnosis.append(versions(python));
        }
        if self.json {
            output::print_json(&diagnosis)?;
        } else {
            output::print(&diagnosis.to_string())?;
        }
        if diagnosis.is_fit() { Ok(()) } else { Err(Failure::failed("not fit; see above")) }
    }
}

/// A text, or what stands in the file that it names.
fn text(argument: &str, given: Option<String>) -> Result<Option<String>, Failure> {
    let Some(path) = given.as_deref().and_then(|text| text.strip_prefix('@')) else {
        return Ok(given);
    };
    let read = fs::read_to_string(path);
    read.map(Some).map_err(|error| Failure::usage(format!("{argument}: {path}: {error}")))
}
