//! Counting what test programs report: passed, failed, skipped, and which tests ran.

use std::{ops::AddAssign, process};

/// Sums over the output of one or more test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// One `<what>: <why> (<test>)` for each thing that a test could not do on this machine.
    pub(crate) skips: Vec<String>,
    /// The tests that passed, each with its program: `tests/memory.rs a_full_tier_evicts`, `kv_chunk key::tests::x`.
    pub(crate) names: Vec<String>,
    /// The tests that failed, likewise.
    pub(crate) failures: Vec<String>,
}

impl Tally {
    /// Reads the output of `cargo test -- --show-output`.
    pub(crate) fn read(log: &str) -> Self {
        let mut tally = Self::default();
        let (mut program, mut test) = ("", "");
        for line in log.lines() {
            if let Some(running) = line.trim_start().strip_prefix("Running ") {
                program = program_name(running);
            } else if let Some(crate_name) = line.trim_start().strip_prefix("Doc-tests ") {
                program = crate_name;
            } else if let Some((passed, failed)) = result_line(line) {
                tally.passed += passed;
                tally.failed += failed;
            } else if let Some(header) = output_header(line) {
                test = header;
            } else if let Some(skip) = line.trim_start().strip_prefix("SKIP ") {
                tally.skips.push(format!("{} ({program} {test})", skip.trim_end()));
            } else if let Some((name, passed)) = test_line(line) {
                let list = if passed { &mut tally.names } else { &mut tally.failures };
                list.push(format!("{program} {name}"));
            }
        }
        tally
    }

    /// How many tests with `word` in their names, or in their programs' names, passed.
    pub(crate) fn named(&self, word: &str) -> usize {
        self.names.iter().filter(|name| name.contains(word)).count()
    }

    /// Prints what failed, what was skipped and the sums; ends the process if anything failed.
    pub(crate) fn finish(&self) {
        for failure in &self.failures {
            println!("failed: {failure}");
        }
        for skip in &self.skips {
            println!("skipped: {skip}");
        }
        let (passed, failed, skipped) = (self.passed, self.failed, self.skips.len());
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if failed > 0 {
            // The line above stays the last one.
            process::exit(1);
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skips.extend(other.skips);
        self.names.extend(other.names);
        self.failures.extend(other.failures);
    }
}

/// The crate's name for unit tests, the file for others: `tests/a.rs (target/debug/deps/a-0123)`.
fn program_name(running: &str) -> &str {
    let (what, path) = running.split_once(" (").unwrap_or((running, ""));
    let binary = path.rsplit('/').next().and_then(|name| name.rsplit_once('-'));
    match binary {
        Some((name, _hash)) if what.starts_with("unittests") => name,
        _ => what,
    }
}

/// `test a::b ... ok`
fn test_line(line: &str) -> Option<(&str, bool)> {
    match line.strip_prefix("test ")?.rsplit_once(" ... ")? {
        (name, "ok") => Some((name, true)),
        (name, "FAILED") => Some((name, false)),
        _ => None,
    }
}

/// `---- a::b stdout ----`
fn output_header(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// A log without what went well: crates that compiled, tests that passed and what those printed.
pub(crate) fn trouble(log: &str) -> String {
    let mut text = String::new();
    let mut in_successes = false;
    for line in log.lines() {
        in_successes = match line {
            "successes:" => true,
            "failures:" => false,
            _ => in_successes && !line.starts_with("test result: "),
        };
        let words = ["Compiling ", "Checking ", "Fresh ", "Downloaded ", "test result: ok. "];
        let went_well = words.iter().any(|word| line.trim_start().starts_with(word));
        if !in_successes && !went_well && !matches!(test_line(line), Some((_, true))) {
            text += line;
            text.push('\n');
        }
    }
    text
}

/// `test result: ok. 12 passed; 0 failed; 0 ignored; ...`
fn result_line(line: &str) -> Option<(u64, u64)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        counts.split("; ").find_map(|part| part.strip_suffix(word)?.trim().parse().ok())
    };
    Some((count("passed")?, count("failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "
     Running unittests src/lib.rs (target/debug/deps/kv_a-0123)
running 2 tests
test a::conformance_memory ... ok
test b ... FAILED
test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
     Running tests/conformance.rs (target/debug/deps/conformance-4567)
running 1 test
test c ... ok

successes:

---- c stdout ----
SKIP io_uring: denied by seccomp

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.10s
";

    #[test]
    fn counts_every_test_program() {
        let tally = Tally::read(LOG);
        assert_eq!((tally.passed, tally.failed), (2, 1));
        let names = ["kv_a a::conformance_memory", "tests/conformance.rs c"];
        assert_eq!(tally.names, names);
        assert_eq!(tally.failures, ["kv_a b"]);
        assert_eq!(tally.named("conformance"), 2);
    }

    #[test]
    fn a_skip_is_listed_with_the_test_that_skipped() {
        assert_eq!(
            Tally::read(LOG).skips,
            ["io_uring: denied by seccomp (tests/conformance.rs c)"]
        );
    }

    #[test]
    fn trouble_is_what_did_not_pass() {
        let text = trouble(LOG);
        assert!(text.contains("test b ... FAILED") && text.contains("tests/conformance.rs"));
        assert!(!text.contains("... ok") && !text.contains("SKIP"), "{text}");
        let log = "successes:\n  a\nfailures:\n---- b stdout ----\nbroken\n";
        assert_eq!(trouble(log), "failures:\n---- b stdout ----\nbroken\n");
    }

    #[test]
    fn a_line_that_only_looks_like_a_result_counts_nothing() {
        let log = "test result: soon\nresult: ok. 3 passed; 0 failed\n";
        assert_eq!(Tally::read(log), Tally::default());
    }
}
