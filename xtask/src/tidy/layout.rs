//! What stands where: the names in the root, and what every crate brings along.

use super::{Finding, tree::Tree};
use crate::metadata::Package;

const TOP_LEVEL: &[&str] = &[
    ".cargo",
    ".ci",
    ".gitignore",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "clippy.toml",
    "deny.toml",
    "kv-chunk",
    "kv-connector",
    "kv-cxl",
    "kv-router",
    "kv-staging",
    "kv-tiers",
    "kv-writeback",
    "rustfmt.toml",
    "xtask",
];

/// The root holds these names, all of them and no other.
pub(crate) fn top_level(tree: &Tree, findings: &mut Vec<Finding>) {
    for name in &tree.top_level {
        if !TOP_LEVEL.contains(&name.as_str()) {
            findings.push(Finding::new(name, 0, "has no place in the root"));
        }
    }
    for name in TOP_LEVEL {
        if !tree.top_level.iter().any(|there| there == name) {
            findings.push(Finding::new(name, 0, "is missing from the root"));
        }
    }
}

/// Every crate has its own version, README.md and a CHANGELOG.md that knows the version.
pub(crate) fn crates(tree: &Tree, packages: &[Package], findings: &mut Vec<Finding>) {
    for package in packages {
        for name in ["README.md", "CHANGELOG.md"] {
            let path = format!("{}/{name}", package.name);
            match tree.files.iter().find(|file| file.path == path) {
                None => findings.push(Finding::new(&path, 0, "is missing")),
                Some(file) if name == "CHANGELOG.md" && !file.text.contains(&package.version) => {
                    findings.push(Finding::new(
                        &path,
                        0,
                        format!("says nothing of version {}", package.version),
                    ));
                }
                Some(_) => {}
            }
        }
        let manifest = format!("{}/Cargo.toml", package.name);
        let own = format!("\nversion = \"{}\"", package.version);
        if !tree.files.iter().any(|file| file.path == manifest && file.text.contains(&own)) {
            findings.push(Finding::new(&manifest, 0, "has no version of its own"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tree::SourceFile;

    fn package(name: &str) -> Package {
        Package {
            name: name.to_owned(),
            version: "0.2.0".to_owned(),
            published: true,
            dependencies: Vec::new(),
            benches: Vec::new(),
        }
    }

    #[test]
    fn strangers_and_gaps_in_the_root_are_found() {
        let mut top: Vec<String> = TOP_LEVEL.iter().map(|name| (*name).to_owned()).collect();
        let mut findings = Vec::new();
        top_level(&Tree { files: Vec::new(), top_level: top.clone() }, &mut findings);
        assert_eq!(findings, []);
        top[0] = "notes.txt".to_owned();
        top_level(&Tree { files: Vec::new(), top_level: top }, &mut findings);
        let found: Vec<&str> = findings.iter().map(|finding| finding.path.as_str()).collect();
        assert_eq!(found, ["notes.txt", ".cargo"]);
    }

    #[test]
    fn a_crate_without_its_papers_is_found() {
        let files = vec![
            SourceFile::new("kv-a/CHANGELOG.md", "## 0.1.0\n"),
            SourceFile::new("kv-a/Cargo.toml", "[package]\nversion.workspace = true\n"),
        ];
        let mut findings = Vec::new();
        crates(&Tree { files, top_level: Vec::new() }, &[package("kv-a")], &mut findings);
        let found: Vec<&str> = findings.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(
            found,
            ["is missing", "says nothing of version 0.2.0", "has no version of its own"]
        );
    }
}
