//! `kvbraid stat`: what a running engine counts, or what its directories hold while none runs.

use std::{io, path::PathBuf, time::Duration};

use clap::Args;
use kv_connector::{
    Config,
    inspect::{Offline, ask},
};
use serde_json::Value;

use crate::{failure::Failure, output, stat_text};

const DEADLINE: Duration = Duration::from_secs(5);

/// What a running engine counts, or what its directories hold.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("from").required(true).args(["socket", "config"]))]
pub(crate) struct Stat {
    /// The `socket` of a running engine.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The engine's configuration: its socket is asked; if no engine runs, its directories are looked at.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// JSON instead of text.
    #[arg(long, conflicts_with = "prometheus")]
    json: bool,
    /// Prometheus text, of a running engine.
    #[arg(long)]
    prometheus: bool,
}

impl Stat {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let config = self.config.as_deref().map(Config::from_file).transpose()?;
        let socket = self.socket.clone();
        let socket = socket.or_else(|| config.as_ref().and_then(|it| it.engine.socket.clone()));
        let request = if self.prometheus { "metrics" } else { "stats" };
        let answer = socket.as_deref().map(|socket| (socket, ask(socket, request, DEADLINE)));
        match (answer, config) {
            (Some((_, Ok(answer))), _) => self.show(&answer),
            (Some((socket, Err(error))), None) => {
                let path = socket.display();
                Err(Failure::failed(format!("no engine answers on {path}: {error}")))
            }
            // Something is there, and may be an engine: its directories would tell half of it.
            (Some((socket, Err(error))), Some(_)) if !is_nobody(&error) => {
                Err(Failure::failed(format!("no answer on {}: {error}", socket.display())))
            }
            (_, Some(config)) => self.offline(config),
            (None, None) => Err(Failure::usage("give --socket or --config")),
        }
    }

    fn offline(&self, config: Config) -> Result<(), Failure> {
        if self.prometheus {
            return Err(Failure::failed("no engine runs: there are no metrics"));
        }
        let offline =
            Offline::open(config.clone()).map_err(|error| Failure::held(error, &config))?;
        let json = serde_json::to_string(&offline.stats());
        self.show(&json.map_err(|error| Failure::failed(error.to_string()))?)
    }

    fn show(&self, answer: &str) -> Result<(), Failure> {
        if self.prometheus {
            return output::print(answer);
        }
        let value: Value = serde_json::from_str(answer)
            .map_err(|error| Failure::failed(format!("the engine's answer is no JSON: {error}")))?;
        if self.json {
            let pretty = serde_json::to_string_pretty(&value);
            return output::print(&(pretty.unwrap_or_else(|_| answer.to_owned()) + "\n"));
        }
        output::print(&stat_text::render(&value))
    }
}

/// Nobody listens on the socket, and nobody is kept from us.
fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
