//! `cargo xtask demo`: a real request trace through the real engine, one table at the end.

use anyhow::Result;

use crate::run;

/// Arguments of the demo; all of them go to `kvbraid demo`, behind the trace that the repository holds.
#[derive(clap::Args)]
pub(crate) struct Demo {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

impl Demo {
    /// A demo with these arguments.
    pub(crate) fn with(rest: Vec<String>) -> Self {
        Self { rest }
    }

    pub(crate) fn run(self) -> Result<()> {
        println!("building, if need be: 5 to 15 minutes the first time");
        let mut command = run::cargo();
        command.args([
            "run",
            "--release",
            "--quiet",
            "--package",
            "kv-connector",
            "--bin",
            "kvbraid",
            "--",
            "demo",
            // What is given again in `rest` replaces these.
            "--trace",
            "xtask/data/mooncake_conversation_slice.jsonl.gz",
            "--dir",
            "target/demo",
        ]);
        run::shown(command.args(self.rest))
    }
}
