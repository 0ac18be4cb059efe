//! The `kvbraid` command: what it prints, and its exit codes.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

const TRACE: &str = r#"{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 9000, "input_length": 1600, "output_length": 9, "hash_ids": [0, 1, 3, 4]}
"#;

const CONFIG: &str = r#"
[engine]
chunk_bytes_max = "64 KiB"
host_cache = "1 MiB"
staging = "4 MiB"
[[tier]]
name = "memory"
kind = "memory"
capacity = "64 MiB"
"#;

const REPLAY: [&str; 5] = ["replay", "--config", "kvbraid.toml", "--trace", "trace.jsonl"];

fn kvbraid(directory: &Path, arguments: &[&str]) -> Output {
    fs::write(directory.join("trace.jsonl"), TRACE).expect("a fresh directory");
    fs::write(directory.join("kvbraid.toml"), CONFIG).expect("a fresh directory");
    let program = env!("CARGO_BIN_EXE_kvbraid");
    Command::new(program)
        .current_dir(directory)
        .args(arguments)
        .output()
        .expect("the command starts")
}

/// One line on standard error that holds `words`, and this exit code.
#[track_caller]
fn fails(arguments: &[&str], code: i32, words: &[&str]) {
    let directory = tempfile::tempdir().expect("a directory");
    let output = kvbraid(directory.path(), arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    let line = error.lines().last().unwrap_or_default();
    assert!(line.starts_with("kvbraid: "), "{error}");
    assert!(words.iter().all(|word| line.contains(word)), "{error}");
}

#[test]
fn a_replay_prints_what_it_served_and_saves_json() {
    let directory = tempfile::tempdir().unwrap();
    let output = kvbraid(directory.path(), &[&REPLAY[..], &["--json", "out.json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    // Of the second prompt's three full chunks two are the first's.
    assert!(text.contains("kvbraid: 2 of 5 lookups served"), "{text}");
    let json = fs::read_to_string(directory.path().join("out.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["rows"][0]["bytes_verified"], 2 * 65536);
    assert_eq!(json["rows"][0]["bytes_wrong"], 0);
}

#[test]
fn what_the_caller_can_mend_exits_2_with_the_name_of_the_thing() {
    fails(
        &["replay", "--config", "none.toml", "--trace", "trace.jsonl"],
        2,
        &["none.toml", "No such file"],
    );
    fails(
        &["replay", "--config", "kvbraid.toml", "--trace", "kvbraid.toml"],
        2,
        &["kvbraid.toml, line 2", "not a JSON object"],
    );
    let with = |more: &[&'static str]| [&REPLAY[..], more].concat();
    fails(&with(&["--policy", "static:0.5,0.5"]), 2, &["--policy", "2 shares for 1 tiers"]);
    fails(&with(&["--chunk-bytes", "1 MiB"]), 2, &["--chunk-bytes", "chunk_bytes_max"]);
    fails(&["demo", "--trace", "trace.jsonl", "--tier", "nvme"], 2, &["--tier", "NAME=PATH"]);
}

#[test]
fn unknown_arguments_exit_2() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(kvbraid(directory.path(), &["replay", "--nonsense"]).status.code(), Some(2));
}

#[test]
fn a_bench_on_impossible_devices_exits_2_with_the_option_and_the_fix() {
    let bench = ["bench", "retrieval", "--cgroup", ".", "--json", "out.json"];
    let with = |more: &[&'static str]| [&bench[..], more].concat();
    let fast = ["--device", "fast=.,7:0,300"];
    fails(&with(&fast), 2, &["--device", "1 given", "name two"]);
    let both = |slow| [&with(&fast)[..], &["--device", slow]].concat();
    fails(&both("slow=.,7:1,400"), 2, &["--device", "the faster first"]);
    fails(&both("slow=.,7:0,100"), 2, &["--device", "one number"]);
    let both = both("slow=.,7:1,100");
    fails(&[&both[..], &["--seconds", "0"]].concat(), 2, &["--seconds", "0.2 to 60"]);
    fails(&[&both[..], &["--reps", "0"]].concat(), 2, &["--reps", "1 or more"]);
    fails(&both, 2, &["--cgroup", "neither", "io.max"]);
}

#[test]
fn stat_prints_what_a_running_engine_counts() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = kv_connector::Config::from_toml(CONFIG).unwrap();
    config.engine.socket = Some(directory.path().join("engine.sock"));
    let engine = kv_connector::Engine::open(config).unwrap();
    let output = kvbraid(directory.path(), &["stat", "--socket", "engine.sock", "--json"]);
    let stats: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(stats["tiers"][0]["name"], "memory");
    let output = kvbraid(directory.path(), &["stat", "--socket", "engine.sock", "--prometheus"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("# TYPE"), "{text}");
    drop(engine);
}

#[test]
fn stat_without_an_engine_exits_1() {
    fails(&["stat", "--socket", "none.sock"], 1, &["no engine answers", "none.sock"]);
}
