//! What was found, line by line.

use std::fmt;

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, and costs something that the line names.
    Warn,
    /// It does not work, or not as intended.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Line {
    /// How bad it is.
    pub verdict: Verdict,
    /// What was looked at.
    pub what: String,
    /// What was found.
    pub found: String,
    /// Why it matters; empty if all is well.
    pub why: String,
    /// What to do; empty if all is well.
    pub fix: String,
}

/// All lines, in the order in which things were looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// One for each thing.
    pub lines: Vec<Line>,
}

impl Diagnosis {
    /// Whether nothing failed.
    pub fn is_fit(&self) -> bool {
        self.count(Verdict::Fail) == 0
    }

    /// Lines of one kind.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.lines.iter().filter(|line| line.verdict == verdict).count()
    }

    /// Adds the lines of another.
    pub fn append(&mut self, mut other: Self) {
        self.lines.append(&mut other.lines);
    }

    pub(super) fn ok(&mut self, what: impl Into<String>, found: impl Into<String>) {
        self.add(Verdict::Ok, what, found, ("", ""));
    }

    /// `advice`: why it matters, and the fix.
    pub(super) fn warn(
        &mut self,
        what: impl Into<String>,
        found: impl Into<String>,
        advice: (&str, &str),
    ) {
        self.add(Verdict::Warn, what, found, advice);
    }

    /// `advice`: why it matters, and the fix.
    pub(super) fn fail(
        &mut self,
        what: impl Into<String>,
        found: impl Into<String>,
        advice: (&str, &str),
    ) {
        self.add(Verdict::Fail, what, found, advice);
    }

    fn add(
        &mut self,
        verdict: Verdict,
        what: impl Into<String>,
        found: impl Into<String>,
        (why, fix): (&str, &str),
    ) {
        let (what, found) = (what.into(), found.into());
        self.lines.push(Line { verdict, what, found, why: why.to_owned(), fix: fix.to_owned() });
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok  ",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        })
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{}  {}: {}", line.verdict, line.what, line.found)?;
            if !line.why.is_empty() {
                writeln!(f, "        why: {}", line.why)?;
            }
            if !line.fix.is_empty() {
                writeln!(f, "        fix: {}", line.fix)?;
            }
        }
        let (warnings, failures) = (self.count(Verdict::Warn), self.count(Verdict::Fail));
        match (failures, warnings) {
            (0, 0) => writeln!(f, "fit"),
            (0, 1) => writeln!(f, "fit, with a warning"),
            (0, _) => writeln!(f, "fit, with {warnings} warnings"),
            _ => writeln!(f, "NOT FIT: failures {failures}, warnings {warnings}"),
        }
    }
}
