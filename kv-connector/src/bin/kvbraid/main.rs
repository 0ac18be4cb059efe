//! `kvbraid`: replay request traces through the engine, compare policies, ask a running engine for its counters.

#![forbid(unsafe_code)]

mod args;
mod demo;
mod failure;
mod output;
mod replay;
mod sim;
mod stat;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Reusable KV cache of LLM serving on every storage tier of a node.
#[derive(Parser)]
#[command(name = "kvbraid", version, max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a request trace with your configuration, in fresh directories beside what is kept there.
    Replay(replay::Replay),
    /// Compare the policies on two tiers, paced 3:1 unless --tier names real directories.
    Demo(demo::Demo),
    /// Run the router over modelled devices, in virtual time: no measurement.
    Sim(sim::Sim),
    /// Print the counters of a running engine.
    Stat(stat::Stat),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Replay(replay) => replay.run(),
        Command::Demo(demo) => demo.run(),
        Command::Sim(sim) => sim.run(),
        Command::Stat(stat) => stat.run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
