//! Counting what test programs report: passed, failed, skipped, and which tests ran.

use std::ops::AddAssign;

/// Sums over the output of one or more test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// One `<what>: <why>` for each thing that a test could not do on this machine.
    pub(crate) skips: Vec<String>,
    /// Names of the tests that passed.
    pub(crate) names: Vec<String>,
}

impl Tally {
    /// Reads the output of `cargo test -- --show-output`.
    pub(crate) fn read(log: &str) -> Self {
        let mut tally = Self::default();
        for line in log.lines() {
            if let Some((passed, failed)) = result_line(line) {
                tally.passed += passed;
                tally.failed += failed;
            } else if let Some(skip) = line.trim_start().strip_prefix("SKIP ") {
                tally.skips.push(skip.trim_end().to_owned());
            } else if let Some(name) =
                line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... ok"))
            {
                tally.names.push(name.to_owned());
            }
        }
        tally
    }

    /// How many tests with `word` in their names passed.
    pub(crate) fn named(&self, word: &str) -> usize {
        self.names.iter().filter(|name| name.contains(word)).count()
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skips.extend(other.skips);
        self.names.extend(other.names);
    }
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
running 2 tests
test a::conformance_memory ... ok
test b ... FAILED
test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
---- c stdout ----
SKIP io_uring: denied by seccomp
test c ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.10s
";

    #[test]
    fn counts_every_test_program_and_lists_skips() {
        let tally = Tally::read(LOG);
        assert_eq!((tally.passed, tally.failed), (2, 1));
        assert_eq!(tally.skips, ["io_uring: denied by seccomp"]);
        assert_eq!(tally.named("conformance"), 1);
    }

    #[test]
    fn a_line_that_only_looks_like_a_result_counts_nothing() {
        assert_eq!(
            Tally::read("test result: soon\nresult: ok. 3 passed; 0 failed\n"),
            Tally::default()
        );
    }
}
