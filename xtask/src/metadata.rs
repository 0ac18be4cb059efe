//! What cargo knows about the workspace: its packages, their dependencies and targets.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::run;

/// One crate of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Whether it is meant for others at all.
    pub(crate) published: bool,
    pub(crate) dependencies: Vec<Dependency>,
    /// Names of the `[[bench]]` targets.
    pub(crate) benches: Vec<String>,
}

/// One line of a `[dependencies]` table.
#[derive(Debug)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `normal`, `dev` or `build`.
    pub(crate) kind: String,
}

/// All crates of the workspace, from the bottom up: each comes after those that it depends on.
///
/// # Errors
/// If `cargo metadata` fails or says something we do not understand.
pub(crate) fn packages() -> Result<Vec<Package>> {
    let output = run::cargo()
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .output()
        .context("run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    let all: Value = serde_json::from_slice(&output.stdout).context("parse cargo metadata")?;
    let packages = all["packages"].as_array().context("cargo metadata has no packages")?;
    Ok(bottom_up(packages.iter().map(package).collect()))
}

/// Names of the crates that depend on this one.
pub(crate) fn dependents(packages: Vec<Package>, on: &str) -> Vec<String> {
    let depends = |package: &Package| package.dependencies.iter().any(|other| other.name == on);
    packages.into_iter().filter(depends).map(|package| package.name).collect()
}

fn package(value: &Value) -> Package {
    let list = |key: &str| value[key].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value, default: &str| value.as_str().unwrap_or(default).to_owned();
    let is_bench = |target: &&Value| {
        target["kind"].as_array().is_some_and(|kinds| kinds.contains(&Value::from("bench")))
    };
    Package {
        name: text(&value["name"], ""),
        version: text(&value["version"], ""),
        // null is anywhere, a list of registries those alone: an empty one is `publish = false`.
        published: value["publish"].as_array().is_none_or(|registries| !registries.is_empty()),
        dependencies: list("dependencies")
            .iter()
            .map(|dependency| Dependency {
                name: text(&dependency["name"], ""),
                kind: text(&dependency["kind"], "normal"),
            })
            .collect(),
        benches: list("targets")
            .iter()
            .filter(is_bench)
            .map(|target| text(&target["name"], ""))
            .collect(),
    }
}

fn bottom_up(mut waiting: Vec<Package>) -> Vec<Package> {
    let mut sorted = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let names: Vec<String> = waiting.iter().map(|package| package.name.clone()).collect();
        let free = |package: &Package| {
            package.dependencies.iter().all(|dependency| !names.contains(&dependency.name))
        };
        // A cycle cannot be built, so cargo reports it; here it only must not hang.
        let next = waiting.iter().position(free).unwrap_or(0);
        sorted.push(waiting.remove(next));
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_come_after_those_they_depend_on() {
        let packages = packages().unwrap();
        let position =
            |name: &str| packages.iter().position(|package| package.name == name).unwrap();
        assert!(position("kv-chunk") < position("kv-tiers"));
        assert!(position("kv-tiers") < position("kv-writeback"));
        assert!(position("kv-writeback") < position("kv-connector"));
    }
}
