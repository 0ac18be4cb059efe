//! Rules about the text of one file.

use super::{Finding, tree::SourceFile};

/// Written by people, so held to the rules of prose and layout; data and licences are not.
fn is_written(file: &SourceFile) -> bool {
    let is_data = ["xtask/data/", "kv-chunk/tests/golden/"]
        .iter()
        .any(|folder| file.path.starts_with(folder));
    let ends = [".rs", ".toml", ".md", ".py", ".pyi", ".sh", ".ci/run"];
    !is_data && ends.iter().any(|end| file.path.ends_with(end))
}

fn each_line(
    file: &SourceFile,
    findings: &mut Vec<Finding>,
    judge: impl Fn(&str) -> Option<String>,
) {
    for (index, line) in file.text.lines().enumerate() {
        if let Some(what) = judge(line) {
            findings.push(Finding::new(&file.path, index + 1, what));
        }
    }
}

/// Sources are ASCII: what the eye cannot tell apart does not get in.
pub(crate) fn ascii(file: &SourceFile, findings: &mut Vec<Finding>) {
    if is_written(file) {
        each_line(file, findings, |line| {
            line.chars()
                .find(|letter| !letter.is_ascii())
                .map(|letter| format!("`{}` is not ASCII", letter.escape_unicode()))
        });
    }
}

/// No blanks at the end of a line, and one line break at the end of a file.
pub(crate) fn whitespace(file: &SourceFile, findings: &mut Vec<Finding>) {
    if !is_written(file) {
        return;
    }
    each_line(file, findings, |line| {
        line.ends_with([' ', '\t', '\r']).then(|| "blanks at the end of the line".to_owned())
    });
    if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
        findings.push(Finding::new(&file.path, 0, "ends with exactly one line break"));
    }
}

/// Nothing knows the machine on which it was written.
pub(crate) fn machine_paths(file: &SourceFile, findings: &mut Vec<Finding>) {
    // Taken apart, so that this file passes.
    let roots = [concat!("/", "work/"), concat!("/", "home/"), concat!("/", "root/")];
    each_line(file, findings, |line| {
        roots
            .iter()
            .find(|root| has_absolute(line, root))
            .map(|root| format!("names a place of one machine, {root}"))
    });
}

/// Whether `path` occurs in `line` other than as the middle of a longer path.
fn has_absolute(line: &str, path: &str) -> bool {
    let in_middle = |before: &str| {
        before.ends_with(|letter: char| letter.is_alphanumeric() || "._-}>)*".contains(letter))
    };
    line.match_indices(path).any(|(at, _)| !in_middle(&line[..at]))
}

/// Where packages come from is the builder's business, and the lock file names only the public index.
pub(crate) fn registry_hosts(file: &SourceFile, findings: &mut Vec<Finding>) {
    let is_lock = file.path == "Cargo.lock";
    let hosts = [
        "index.crates",
        "static.crates",
        "pypi.",
        "pythonhosted",
        "proxy.golang",
        "npmjs",
        "artifactory",
        "replace-with",
    ];
    each_line(file, findings, |line| {
        let foreign =
            line.starts_with("source = ") && !line.contains("github.com/rust-lang/crates.io-index");
        let named =
            hosts.iter().any(|host| line.contains(host)) && file.path != "xtask/src/tidy/text.rs";
        (if is_lock { foreign } else { named }).then(|| "names a package registry".to_owned())
    });
}

/// What is in the tree is done; tests run.
pub(crate) fn unfinished(file: &SourceFile, findings: &mut Vec<Finding>) {
    for (index, line) in file.code.lines().enumerate() {
        for word in ["todo!", "unimplemented!", "dbg!", "#[ignore", "#[should_panic"] {
            if line.contains(word) {
                findings.push(Finding::new(
                    &file.path,
                    index + 1,
                    format!("`{word}` has no place here"),
                ));
            }
        }
    }
    if is_written(file) {
        let marks = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")];
        let is_marked = |line: &str| {
            line.split(|letter: char| !letter.is_alphanumeric()).any(|word| marks.contains(&word))
        };
        each_line(file, findings, |line| is_marked(line).then(|| "unfinished business".to_owned()));
    }
}

/// Every module says what it is for.
pub(crate) fn module_docs(file: &SourceFile, findings: &mut Vec<Finding>) {
    if file.is_rust() && !file.text.lines().any(|line| line.starts_with("//!")) {
        findings.push(Finding::new(
            &file.path,
            1,
            "a module begins with a `//!` comment that says what it is for",
        ));
    }
}

/// `cargo xtask loom` picks tests by that word in their path: a loom test elsewhere would never run.
pub(crate) fn loom_tests_are_found(file: &SourceFile, findings: &mut Vec<Finding>) {
    let runs_loom =
        file.code.contains("loom::model(") || file.code.contains("Builder::new().check(");
    let is_found = file.path.ends_with("loom_tests.rs")
        || file.path.contains("/loom_tests/")
        || file.code.contains("mod loom_tests {");
    if runs_loom && file.path.contains("/src/") && !is_found {
        findings.push(Finding::new(&file.path, 0, "loom tests live in `mod loom_tests`"));
    }
}

/// Time is an argument: only `kv-connector` and this tool read a clock.
pub(crate) fn clocks(file: &SourceFile, findings: &mut Vec<Finding>) {
    if matches!(file.package(), None | Some("kv-connector" | "xtask")) {
        return;
    }
    for (line, code) in file.product_lines() {
        if code.contains("Instant::now") || code.contains("SystemTime::now") {
            findings.push(Finding::new(
                &file.path,
                line,
                "reads a clock; below kv-connector, time is an argument",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::finds;

    #[test]
    fn letters_beyond_ascii_are_found_in_sources_only() {
        finds(ascii, "kv-chunk/src/a.rs", "a\n// \u{2192}\n", &[(2, "2192")]);
        finds(ascii, "xtask/data/a.md", "\u{2192}\n", &[]);
    }

    #[test]
    fn blanks_at_line_ends_and_missing_line_breaks_are_found() {
        finds(whitespace, "a.md", "a \nb", &[(1, "blanks"), (0, "line break")]);
        finds(whitespace, "a.md", "a\n\n", &[(0, "line break")]);
        finds(whitespace, "a.md", "a\n", &[]);
    }

    #[test]
    fn machine_paths_are_found_and_relative_paths_are_not() {
        let bad = concat!("see /", "home/me/x\n");
        finds(machine_paths, "a.md", bad, &[(1, "place of one machine")]);
        finds(machine_paths, "a.md", concat!("target/", "work/x\n"), &[]);
    }

    #[test]
    fn registries_are_found() {
        finds(
            registry_hosts,
            "a.toml",
            concat!("[source.x]\nreplace", "-with = \"y\"\n"),
            &[(2, "registry")],
        );
        finds(
            registry_hosts,
            "Cargo.lock",
            "source = \"registry+https://example.org/index\"\n",
            &[(1, "registry")],
        );
    }

    #[test]
    fn unfinished_work_is_found_outside_strings() {
        finds(unfinished, "a.rs", "fn a() { todo!() }\n", &[(1, "todo!")]);
        finds(unfinished, "a.rs", "const A: &str = \"todo!\";\n", &[]);
        finds(unfinished, "a.md", concat!("FIX", "ME later\n"), &[(1, "unfinished")]);
    }

    #[test]
    fn a_module_without_a_doc_comment_is_found() {
        finds(module_docs, "a.rs", "use std::fmt;\n", &[(1, "//!")]);
        finds(module_docs, "a.rs", "#![forbid(unsafe_code)]\n//! Said.\n", &[]);
    }

    #[test]
    fn a_loom_test_that_would_not_run_is_found() {
        finds(
            loom_tests_are_found,
            "kv-a/src/a.rs",
            "mod tests { fn a() { loom::model(|| {}) } }",
            &[(0, "loom_tests")],
        );
        finds(
            loom_tests_are_found,
            "kv-a/src/a.rs",
            "mod loom_tests { fn a() { loom::model(|| {}) } }",
            &[],
        );
    }

    #[test]
    fn a_clock_below_the_connector_is_found_outside_tests() {
        let source =
            "let t = Instant::now();\n#[cfg(test)]\nmod tests { let t = Instant::now(); }\n";
        finds(clocks, "kv-tiers/src/a.rs", source, &[(1, "argument")]);
        finds(clocks, "kv-tiers/tests/a.rs", source, &[]);
        finds(clocks, "kv-connector/src/a.rs", source, &[]);
    }
}
