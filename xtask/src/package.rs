//! Whether the crates build from what would be published: their packages, unpacked, and nothing else.
//!
//! Not by cargo's own verification: it unpacks a package under its name and version into the user's registry and takes
//! what lies there already, so that a second run with changed sources checks the first run's.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{metadata::Package, run};

/// Packages all crates that can be published and checks what the packages hold.
///
/// # Errors
/// If a file cannot be written or a command not be started; packages that do not build are `false`.
pub(crate) fn check(packages: &[Package]) -> Result<bool> {
    let published: Vec<&Package> = packages.iter().filter(|package| package.published).collect();
    // Dirty trees are packaged too, so that the check can run before the commit.
    let mut package = run::cargo();
    package.args(["package", "--locked", "--no-verify", "--allow-dirty"]);
    package.args(published.iter().map(|package| format!("--package={}", package.name)));
    if !run::logged("package", &mut package)?.success {
        return Ok(false);
    }
    let target = run::root().join("target/package");
    let unpacked = target.join("unpacked");
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked).with_context(|| format!("remove {}", unpacked.display()))?;
    }
    fs::create_dir_all(&unpacked).with_context(|| format!("create {}", unpacked.display()))?;
    for package in &published {
        let file = target.join(format!("{}.crate", folder(package)));
        let mut tar = Command::new("tar");
        // Files in packages are all of one time: cargo would take changed ones for what it built before.
        tar.arg("--extract")
            .arg("--touch")
            .arg("--gzip")
            .arg("--file")
            .arg(file)
            .current_dir(&unpacked);
        run::shown(&mut tar)?;
    }
    write_workspace(&unpacked, &published)?;
    let mut check = run::cargo();
    // Offline, so that the lock file only loses what nobody needs.
    // The directory of the other builds: what they built of others' crates is not built again.
    check
        .args(["check", "--offline", "--workspace"])
        .arg("--target-dir")
        .arg(run::root().join("target"))
        .current_dir(&unpacked);
    Ok(run::logged("package check", &mut check)?.success)
}

fn folder(package: &Package) -> String {
    format!("{}-{}", package.name, package.version)
}

/// A workspace of the unpacked crates, in which each finds the others here; versions of the rest are those of ours.
fn write_workspace(directory: &Path, packages: &[&Package]) -> Result<()> {
    let root = run::root();
    let ours = fs::read_to_string(root.join("Cargo.toml")).context("read Cargo.toml")?;
    let profiles = ours.find("[profile.").map_or("", |start| &ours[start..]);
    let mut manifest = String::from("[workspace]\nresolver = \"3\"\nmembers = [\n");
    for package in packages {
        manifest += &format!("    \"{}\",\n", folder(package));
    }
    manifest += "]\n\n[patch.crates-io]\n";
    for package in packages {
        manifest += &format!("{} = {{ path = \"{}\" }}\n", package.name, folder(package));
    }
    manifest += &format!("\n{profiles}");
    let path = directory.join("Cargo.toml");
    fs::write(&path, manifest).with_context(|| format!("write {}", path.display()))?;
    let lock = directory.join("Cargo.lock");
    fs::copy(root.join("Cargo.lock"), &lock)
        .map(|_| ())
        .with_context(|| format!("write {}", lock.display()))
}
