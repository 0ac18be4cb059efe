//! `kvbraid doctor`: good and bad machines, configurations and settings, through the command.

#[cfg(test)]
mod common;

#[cfg(test)]
use std::{fs, os::unix::fs::PermissionsExt};

#[cfg(test)]
use common::{
    config, diagnose, directories, doctor, expect, failures, in_denied_child, in_memory, lmcache,
    quick_start, sglang, vllm,
};

#[test]
fn a_machine_that_is_fit_is_told_so_and_nothing_is_left_behind() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    directories(directory.path());
    let (lines, code) = diagnose(directory.path(), &config(directory.path()), &[]);
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
    let policy = r#"{"kv_connector": "LMCacheMPConnector", "kv_load_failure_policy": "recompute"}"#;
    fs::write(&path, format!("vllm\0serve\0--kv-transfer-config\0{policy}\0")).unwrap();
    let path = format!("@{}", path.display());
    let (lines, _) = diagnose(directory.path(), &text, &["--vllm-config", &path]);
    expect(&lines, "vllm kv_load_failure_policy", "ok", "recompute");
    let (lines, _) = diagnose(directory.path(), &text, &["--python", "/nowhere/python"]);
    expect(&lines, "python", "fail", "/nowhere/python");
}

#[test]
fn the_quick_starts_of_the_readme_have_every_setting_that_bites() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let over_lmcache = quick_start(root, "LMCache", "vllm serve", "\n```");
    for (engine, (flag, text)) in [
        ("lmcache", ("--lmcache-args", lmcache(root))),
        ("vllm", ("--vllm-config", vllm(root))),
        ("vllm", ("--vllm-config", over_lmcache)),
        ("sglang", ("--sglang-config", sglang(root))),
    ] {
        let (lines, _) = diagnose(root, &in_memory(root), &[flag, &text]);
        let about: Vec<_> =
            lines.iter().filter(|it| it["what"].as_str().unwrap().starts_with(engine)).collect();
        assert!(about.len() >= 2, "{about:#?}");
        let good = about.iter().all(|line| line["verdict"] == "ok");
        assert!(good, "{text} has {about:#?}");
    }
}

#[test]
fn what_an_adapter_refuses_at_start_fails_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let refused = |flag: &str, text: &str, from: &str, to: &str, words: &str| {
        assert!(text.contains(from), "`{from}` is not in {text}");
        let (lines, code) = diagnose(root, &in_memory(root), &[flag, &text.replacen(from, to, 1)]);
        let failed = failures(&lines);
        let said = failed.iter().any(|line| line.to_string().contains(words));
        assert!(code == 1 && said, "`{to}` for `{from}`: {code}, {failed:#?}");
    };
    let path = root.join("kvbraid.toml").display().to_string();
    let other = r#"other", "was": ""#;
    for (flag, text, class) in [
        ("--lmcache-args", lmcache(root), "L2Adapter"),
        ("--vllm-config", vllm(root), "Tier\""),
        ("--sglang-config", sglang(root), "HiCache"),
    ] {
        refused(flag, &text, class, &class.replace(char::is_alphanumeric, "x"), "is not loaded");
        refused(flag, &text, &path, "/nowhere/kvbraid.toml", "/nowhere/kvbraid.toml");
        refused(flag, &text, "\"config\"", "\"konfig\"", "config is missing");
        refused(flag, &text, "kvbraid.", other, "does not use KVBraid");
    }
    refused("--lmcache-args", &lmcache(root), "plugin", "native_plugin", "type is");
    refused("--lmcache-args", &lmcache(root), "--max-workers 4", "--max-workers no", "no");
    let namespace = r#""namespace": {"model": "m"}, "config""#;
    refused("--lmcache-args", &lmcache(root), "\"config\"", namespace, "weights");
    refused("--vllm-config", &vllm(root), "spec_name", "spec", "spec_name is not given");
    refused(
        "--sglang-config",
        &sglang(root),
        "\"config\"",
        "\"ranks\": 0, \"config\"",
        "ranks is 0",
    );
    // LMCache's has no namespace of its own.
    let whole = in_memory(root);
    let bare = whole.split("[namespace]").next().unwrap();
    let (lines, code) = diagnose(root, bare, &["--lmcache-args", &lmcache(root)]);
    assert_eq!(code, 1);
    expect(&lines, "lmcache --l2-adapter", "fail", "namespace is missing");
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
