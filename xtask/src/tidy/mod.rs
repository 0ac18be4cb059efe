//! `cargo xtask tidy`: the rules of the house, checked by reading the tree; also an ordinary test.
//!
//! Each rule is a function from a file (or from the whole tree) to findings. Rules read text, not syntax trees: they are
//! simple enough to be believed, and `tests` below shows each of them failing on a bad sample.

mod arrows;
mod budget;
mod layout;
mod mask;
mod text;
mod tree;
mod unsafety;

use anyhow::{Result, ensure};

use self::tree::{SourceFile, Tree};
use crate::{metadata, run};

/// One broken rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    path: String,
    /// Counted from one; zero is the file as a whole.
    line: usize,
    what: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

type FileRule = fn(&SourceFile, &mut Vec<Finding>);

const FILE_RULES: &[FileRule] = &[
    budget::file_lines,
    budget::function_lines,
    budget::lib_lines,
    text::ascii,
    text::whitespace,
    text::machine_paths,
    text::registry_hosts,
    text::unfinished,
    text::module_docs,
    text::loom_tests_are_found,
    text::clocks,
    unsafety::only_in_named_files,
    unsafety::crate_roots_say_so,
];

/// Checks the whole tree and prints what is wrong.
///
/// # Errors
/// If any rule is broken, or the tree cannot be read.
pub(crate) fn run() -> Result<()> {
    let (findings, notes) = check()?;
    for note in &notes {
        println!("note: {note}");
    }
    for finding in &findings {
        println!("{}:{}: {}", finding.path, finding.line, finding.what);
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    println!("tidy: {} rules hold", FILE_RULES.len() + 3);
    Ok(())
}

/// Findings (which fail) and notes (which do not).
fn check() -> Result<(Vec<Finding>, Vec<String>)> {
    let tree = Tree::read(&run::root())?;
    let packages = metadata::packages()?;
    let mut findings = Vec::new();
    for file in &tree.files {
        for rule in FILE_RULES {
            rule(file, &mut findings);
        }
    }
    layout::top_level(&tree, &mut findings);
    layout::crates(&tree, &packages, &mut findings);
    arrows::check(&packages, &mut findings);
    findings.sort();
    Ok((findings, budget::notes(&tree)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let (findings, _) = check().unwrap();
        assert!(findings.is_empty(), "{findings:#?}");
    }

    #[track_caller]
    pub(super) fn finds(rule: FileRule, path: &str, text: &str, expected: &[(usize, &str)]) {
        let mut findings = Vec::new();
        rule(&SourceFile::new(path, text), &mut findings);
        let found: Vec<(usize, &str)> =
            findings.iter().map(|finding| (finding.line, finding.what.as_str())).collect();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for ((line, what), (expected_line, part)) in found.iter().zip(expected) {
            assert_eq!(line, expected_line, "{what}");
            assert!(what.contains(part), "`{what}` does not say `{part}`");
        }
    }
}
