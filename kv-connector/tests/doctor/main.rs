//! `kvbraid doctor`: good and bad machines, configurations and settings, through the command.

#[cfg(test)]
mod common;

#[cfg(test)]
use std::{fs, os::unix::fs::PermissionsExt};

#[cfg(test)]
use common::{
    LMCACHE, SGLANG, VLLM, config, diagnose, directories, doctor, expect, failures, in_denied_child,
};

#[test]
fn a_machine_that_is_fit_is_told_so_and_nothing_is_left_behind() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    directories(directory.path());
    let settings = ["--lmcache-args", LMCACHE, "--vllm-config", VLLM, "--sglang-config", SGLANG];
    let (lines, code) = diagnose(directory.path(), &config(directory.path()), &settings);
    assert_eq!((failures(&lines), code), (vec![], 0));
    for tier in ["fast", "all"] {
        expect(&lines, &format!("tier {tier} speed"), "ok", "MB/s read (all verified)");
        let left: Vec<_> = fs::read_dir(directory.path().join(tier)).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
    expect(&lines, "tier all", "ok", "the first writer wins");
    for what in ["kernel", "memory", "huge pages", "io_uring", "locked memory"] {
        assert!(lines.iter().any(|line| line["what"] == what), "nothing about {what}");
    }
    let flags = ["--l2-prefetch-max-in-flight", "--no-l1-use-lazy", "--l2-prefetch-policy"];
    for flag in [&flags[..], &["--max-workers", "--hash-algorithm", "--chunk-size"]].concat() {
        expect(&lines, &format!("lmcache {flag}"), "ok", "");
    }
    let text = doctor(directory.path(), &config(directory.path()), &[]).stdout;
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(
        text.contains("ok    kernel: ") && text.lines().last().unwrap().starts_with("fit"),
        "{text}"
    );
}

#[test]
fn a_directory_that_is_missing_or_no_directory_fails() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::write(directory.path().join("all"), "a file").unwrap();
    let (lines, code) = diagnose(directory.path(), &config(directory.path()), &[]);
    assert_eq!(code, 1);
    expect(&lines, "tier fast", "fail", "mkdir -p -m 700");
    expect(&lines, "tier all", "fail", "is no directory");
    assert!(!directory.path().join("fast").exists(), "it was made");
}

#[test]
fn a_configuration_that_is_wrong_is_the_callers() {
    let directory = tempfile::tempdir().unwrap();
    let output = doctor(directory.path(), "[engine]\nstaging = 1\n", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("staging"), "{output:?}");
    let output =
        doctor(directory.path(), &config(directory.path()), &["--lmcache-args", "@/nowhere"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn memory_for_a_disk_and_open_permissions_are_warned_of() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIP tmpfs: /dev/shm cannot be written");
        return;
    };
    directories(directory.path());
    let fast = directory.path().join("fast");
    fs::set_permissions(fast, fs::Permissions::from_mode(0o755)).unwrap();
    let text = config(directory.path()).replacen("64 MiB", "900 TiB", 1);
    let (lines, code) = diagnose(directory.path(), &text, &[]);
    assert_eq!((failures(&lines), code), (vec![], 0));
    expect(&lines, "tier fast", "warn", "tmpfs");
    expect(&lines, "tier fast", "warn", "chmod 700");
    expect(&lines, "tier fast", "warn", "before the cap is reached");
    expect(&lines, "tier all", "warn", "no other node sees");
}

#[test]
fn a_memory_limit_below_what_is_wanted_fails() {
    let directory = tempfile::tempdir().unwrap();
    // No machine has that much free, and the configuration may still be read.
    let total = fs::read_to_string("/proc/meminfo").unwrap();
    let total: u64 = total.split_whitespace().nth(1).unwrap().parse().unwrap();
    let text = format!(
        "[engine]\nhost_cache = {}\n[[tier]]\nname = \"m\"\nkind = \"memory\"\ncapacity = \"100 TiB\"\n",
        total * 1024 / 2
    );
    let (lines, _) = diagnose(directory.path(), &text, &[]);
    let about = lines.iter().find(|line| line["what"] == "memory").unwrap();
    assert_ne!(about["verdict"], "ok", "{about}");
}

#[test]
fn settings_that_bite_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let text = config(directory.path()).replace("\"blake3\"", "\"builtin\"");
    let bare = "--hash-algorithm=sha256_cbor --chunk-size 512 --l2-prefetch-max-in-flight 8";
    let settings = ["--lmcache-args", bare, "--vllm-config", "{}", "--sglang-config", "{}"];
    let (lines, code) = diagnose(directory.path(), &text, &settings);
    assert_eq!(code, 1);
    expect(&lines, "namespace.hash_algorithm", "fail", "blake3");
    expect(&lines, "lmcache --hash-algorithm", "fail", "sha256_cbor");
    expect(&lines, "lmcache --chunk-size", "fail", "namespace.chunk_tokens is 256");
    expect(&lines, "lmcache --l2-prefetch-max-in-flight", "warn", "64");
    for flag in ["--no-l1-use-lazy", "--l2-prefetch-policy", "--max-workers"] {
        expect(&lines, &format!("lmcache {flag}"), "warn", "not given");
    }
    expect(&lines, "lmcache --l2-adapter", "fail", "kvbraid.lmcache");
    expect(&lines, "vllm kv_load_failure_policy", "fail", "recompute");
    expect(&lines, "sglang --hicache-storage-backend-extra-config", "fail", "kvbraid.sglang");
    // A running server's command line.
    let path = directory.path().join("cmdline");
    fs::write(&path, format!("vllm\0serve\0--kv-transfer-config\0{VLLM}\0")).unwrap();
    let path = format!("@{}", path.display());
    let (lines, _) = diagnose(directory.path(), &text, &["--vllm-config", &path]);
    expect(&lines, "vllm kv_load_failure_policy", "ok", "recompute");
    let (lines, _) = diagnose(directory.path(), &text, &["--python", "/nowhere/python"]);
    expect(&lines, "python", "fail", "/nowhere/python");
}

#[test]
fn a_seccomp_filter_against_io_uring_is_named() {
    let lines = in_denied_child("a_seccomp_filter_against_io_uring_is_named", "ring");
    let Some(lines) = lines else { return };
    expect(&lines, "tier fast io", "warn", "io_uring not used");
    expect(&lines, "tier fast io", "warn", "seccomp");
    expect(&lines, "tier fast speed", "ok", "MB/s read");
}

#[test]
fn a_small_limit_of_locked_memory_is_named() {
    let lines = in_denied_child("a_small_limit_of_locked_memory_is_named", "memlock");
    let Some(lines) = lines else { return };
    expect(&lines, "locked memory", "warn", "64 KiB");
    expect(&lines, "tier fast io", "warn", "memlock");
}
