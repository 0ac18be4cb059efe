//! Who may depend on whom: the arrows of ARCHITECTURE.md.

use super::Finding;
use crate::metadata::Package;

/// Each crate with all of ours that it may name, in any kind of dependency.
const ARROWS: &[(&str, &[&str])] = &[
    ("kv-chunk", &[]),
    ("kv-router", &[]),
    ("kv-staging", &[]),
    ("kv-tiers", &["kv-chunk"]),
    ("kv-cxl", &["kv-chunk", "kv-tiers", "kv-staging"]),
    ("kv-writeback", &["kv-chunk", "kv-tiers"]),
    (
        "kv-connector",
        &["kv-chunk", "kv-router", "kv-staging", "kv-tiers", "kv-cxl", "kv-writeback"],
    ),
    // It drives the others from outside; linking them would make every command wait for their build.
    ("xtask", &[]),
];

/// Packages that only some of ours may use outside tests: runtimes, Python and system calls stay at the edge.
const KEPT: &[(&str, &[&str])] = &[
    ("tokio", &["kv-connector"]),
    ("pyo3", &["kv-connector"]),
    ("glommio", &["kv-tiers"]),
    ("io-uring", &["kv-tiers"]),
    ("libc", &["kv-tiers", "kv-cxl"]),
    ("nix", &["kv-tiers", "kv-cxl", "kv-connector", "xtask"]),
    ("memmap2", &["kv-tiers", "kv-cxl"]),
    ("anyhow", &["kv-connector", "xtask"]),
];

/// Checks every dependency of every crate.
pub(crate) fn check(packages: &[Package], findings: &mut Vec<Finding>) {
    for package in packages {
        let manifest = format!("{}/Cargo.toml", package.name);
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == package.name) else {
            findings.push(Finding::new(
                &manifest,
                0,
                "a new crate: draw its arrows in ARCHITECTURE.md and in tidy",
            ));
            continue;
        };
        for dependency in &package.dependencies {
            let name = dependency.name.as_str();
            let is_ours = ARROWS.iter().any(|(ours, _)| *ours == name);
            if is_ours && !allowed.contains(&name) {
                findings.push(Finding::new(&manifest, 0, format!("must not depend on {name}")));
            }
            let kept = KEPT.iter().find(|(kept, _)| *kept == name);
            if let Some((_, users)) = kept
                && dependency.kind != "dev"
                && !users.contains(&package.name.as_str())
            {
                findings.push(Finding::new(
                    &manifest,
                    0,
                    format!("only {} may use {name}", users.join(" and ")),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Dependency;

    fn package(name: &str, dependency: &str, kind: &str) -> Package {
        let dependency = Dependency { name: dependency.to_owned(), kind: kind.to_owned() };
        Package {
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            published: true,
            dependencies: vec![dependency],
            benches: Vec::new(),
        }
    }

    #[track_caller]
    fn check_one(name: &str, dependency: &str, kind: &str, expected: Option<&str>) {
        let mut findings = Vec::new();
        check(&[package(name, dependency, kind)], &mut findings);
        let found: Vec<&str> = findings.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
        assert!(expected.is_none_or(|part| found[0].contains(part)), "{found:?}");
    }

    #[test]
    fn an_arrow_against_the_drawing_is_found_in_every_kind_of_dependency() {
        check_one("kv-router", "kv-chunk", "normal", Some("must not depend on kv-chunk"));
        check_one("kv-chunk", "kv-tiers", "dev", Some("must not depend on kv-tiers"));
        check_one("kv-tiers", "kv-chunk", "normal", None);
    }

    #[test]
    fn a_runtime_below_the_edge_is_found() {
        check_one("kv-writeback", "tokio", "normal", Some("only kv-connector may use tokio"));
        check_one("kv-connector", "tokio", "normal", None);
        check_one("kv-router", "libc", "dev", None);
    }

    #[test]
    fn an_unknown_crate_is_found() {
        check_one("kv-new", "serde", "normal", Some("draw its arrows"));
    }
}
