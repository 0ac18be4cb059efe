//! Keys and values reveal prompts: nobody else may read them.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
};

use nix::sys::stat::{Mode, umask};

use crate::common::*;

fn check(path: &Path, seen: &mut Vec<(bool, bool)>) {
    let metadata = fs::symlink_metadata(path).unwrap();
    let mode = metadata.permissions().mode() & 0o7777;
    let wanted = if metadata.is_dir() { 0o700 } else { 0o600 };
    assert_eq!(mode, wanted, "{} has mode {mode:o}", path.display());
    seen.push((metadata.is_dir(), metadata.file_type().is_socket()));
    if metadata.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| check(&entry.unwrap().path(), seen));
    }
}

#[test]
fn directories_are_0700_and_files_and_the_socket_0600_whatever_the_umask() {
    let place = Place::new();
    let socket = place.path("engine.sock");
    place.configure(&format!("socket = \"{}\"", socket.display()));
    let before = umask(Mode::empty());
    let engine = place.engine();
    umask(before);
    store(&engine, &keys("m", "", 8));
    let mut seen = Vec::new();
    ["one", "two", "engine.sock"].iter().for_each(|name| check(&place.path(name), &mut seen));
    drop(engine);
    // What the tools leave as well.
    place.json(&["fsck", "--repair"]);
    place.json(&["purge", "--model", "m"]);
    ["one", "two"].iter().for_each(|name| check(&place.path(name), &mut seen));
    let directories = seen.iter().filter(|(directory, _)| *directory).count();
    assert!(directories == 4 && seen.iter().any(|(_, socket)| *socket) && seen.len() > 8);
}
