//! `kvbraid`: replay request traces through the engine, compare policies, look inside what an engine keeps.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod demo;
mod doctor;
mod failure;
mod fsck;
mod output;
mod purge;
mod replay;
mod sim;
mod stat;
mod stat_text;
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
    /// Measure the engine on block devices of known speed; `cargo xtask bench retrieval --devices` prepares them.
    Bench(bench::Bench),
    /// Compare the policies on two tiers, paced 3:1 unless --tier names real directories.
    Demo(demo::Demo),
    /// Say whether machine, configuration and serving engine are fit for each other.
    Doctor(doctor::Doctor),
    /// Run the router over modelled devices, in virtual time: no measurement.
    Sim(sim::Sim),
    /// Print what a running engine counts, or what its directories hold.
    Stat(stat::Stat),
    /// Read and verify every chunk of every tier, while no engine runs.
    Fsck(fsck::Fsck),
    /// Remove all chunks of a model or a tenant.
    Purge(purge::Purge),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Replay(replay) => replay.run(),
        Command::Bench(bench) => bench.run(),
        Command::Demo(demo) => demo.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Sim(sim) => sim.run(),
        Command::Stat(stat) => stat.run(),
        Command::Fsck(fsck) => fsck.run(),
        Command::Purge(purge) => purge.run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
