//! The project's own commands: `cargo xtask test`, `e2e`, `demo`, `bench`, `loom`, `fuzz`, `wheel`, `tidy`.
//!
//! It links none of the crates it drives: it starts cargo and reads what comes back, so it builds in seconds and its
//! checks cannot be bent by the code that they judge.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool speaks on standard output")]

mod bench;
mod demo;
mod e2e;
mod engines;
mod fuzz;
mod loom;
mod metadata;
mod package;
mod run;
mod shuttle;
mod tally;
mod test;
mod tidy;
mod wheel;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "KVBraid's own commands", max_term_width = 110)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay a real request trace through the engine and print one table; everything after it goes to `kvbraid demo`.
    Demo(demo::Demo),
    /// Everything that must pass before a change lands. Needs nothing but a Rust toolchain.
    Test(test::Test),
    /// Suites that need installs, root or time: real file systems, a real network file system, a real LMCache.
    E2e(e2e::E2e),
    /// The quick set of all benches; writes `target/bench/<name>.json`.
    Bench(bench::Bench),
    /// Explore every interleaving of the lock-free parts with loom.
    Loom(loom::Loom),
    /// Feed mutated bytes to the parsers for a bounded time.
    Fuzz(fuzz::Fuzz),
    /// Build the Python package into `target/wheels`; installs what it needs below the target directory.
    Wheel(wheel::Wheel),
    /// Check the rules of the house: arrows between crates, budgets, texts.
    Tidy,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Demo(demo) => demo.run(),
        Command::Test(test) => test.run(),
        Command::E2e(e2e) => e2e.run(),
        Command::Bench(bench) => bench.run(),
        Command::Loom(loom) => loom.run(),
        Command::Fuzz(fuzz) => fuzz.run(),
        Command::Wheel(wheel) => wheel.run(),
        Command::Tidy => tidy::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Arguments;

    #[test]
    fn no_two_options_are_in_each_others_way() {
        Arguments::command().debug_assert();
    }
}
