//! A configuration of two tiers, the command over it, and children that are denied something.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

use nix::sys::resource::{Resource, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use serde_json::Value;

/// Set in a child: what it is denied before it starts the command.
const CHILD: &str = "KVBRAID_DOCTOR_DENIED";
const IO_URING_SETUP: i64 = 425;

pub(crate) fn config(directory: &Path) -> String {
    format!(
        r#"
[engine]
chunk_bytes_max = "1 MiB"
host_cache = "8 MiB"
staging = "16 MiB"
[[tier]]
name = "fast"
kind = "nvme"
path = "{0}/fast"
capacity = "64 MiB"
[[tier]]
name = "all"
kind = "shared"
path = "{0}/all"
capacity = "64 MiB"
[namespace]
model = "m"
weights = "1"
dtype = "bfloat16"
layout = "2LTD"
chunk_tokens = 256
serde = "raw"
hash_algorithm = "blake3"
hash_seed = "none"
tensor_parallel = 1
pipeline_parallel = 1
context_parallel = 1
engine = "vllm"
engine_major = 0
"#,
        directory.display()
    )
}

/// The same without a disk: looked at in no time.
pub(crate) fn in_memory(directory: &Path) -> String {
    let whole = config(directory);
    let (engine, rest) = whole.split_once("[[tier]]").unwrap();
    let namespace = &rest[rest.find("[namespace]").unwrap()..];
    format!("{engine}[[tier]]\nname = \"m\"\nkind = \"memory\"\ncapacity = \"8 MiB\"\n{namespace}")
}

const README: &str = include_str!("../../../README.md");

/// What a quick start of the README says from `begin` to `end`, over the configuration of these tests.
pub(crate) fn quick_start(directory: &Path, title: &str, begin: &str, end: &str) -> String {
    let section = README.split_once(&format!("\n## {title}\n")).expect("the section").1;
    let start = section.find(begin).expect("the command");
    let text = &section[start..][..section[start..].find(end).expect("its end")];
    let path = directory.join("kvbraid.toml").display().to_string();
    text.replace("/etc/kvbraid.toml", &path).replace("/etc/kvbraid-vllm.toml", &path)
}

pub(crate) fn lmcache(directory: &Path) -> String {
    quick_start(directory, "LMCache", "lmcache server", "\nvllm serve")
}

pub(crate) fn vllm(directory: &Path) -> String {
    quick_start(directory, "vLLM", "PYTHONHASHSEED", "\n```")
}

pub(crate) fn sglang(directory: &Path) -> String {
    quick_start(directory, "SGLang", "python -m sglang", "\n```")
}

/// Directories of both tiers, mode 0700.
pub(crate) fn directories(directory: &Path) {
    for name in ["fast", "all"] {
        let path = directory.join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
    }
}

pub(crate) fn doctor(directory: &Path, config: &str, arguments: &[&str]) -> Output {
    let path = directory.join("kvbraid.toml");
    fs::write(&path, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbraid"));
    command.args(["doctor", "--config"]).arg(path).args(arguments);
    command.env_remove("PYTHONHASHSEED").output().unwrap()
}

/// The lines of a diagnosis, and the exit code.
fn lines(output: &Output) -> (Vec<Value>, i32) {
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let json: Value =
        serde_json::from_str(&text).unwrap_or_else(|it| panic!("{it}: {text}{error}"));
    (json["lines"].as_array().unwrap().clone(), output.status.code().unwrap())
}

pub(crate) fn diagnose(directory: &Path, config: &str, arguments: &[&str]) -> (Vec<Value>, i32) {
    lines(&doctor(directory, config, &[arguments, &["--json"]].concat()))
}

/// The one line about `what` that has `words`, and its verdict.
#[track_caller]
pub(crate) fn expect(lines: &[Value], what: &str, verdict: &str, words: &str) {
    let about: Vec<_> = lines.iter().filter(|line| line["what"] == what).collect();
    let found =
        about.iter().any(|line| line["verdict"] == verdict && line.to_string().contains(words));
    assert!(found, "no `{verdict}` of {what} that says `{words}` in {about:#?}");
    for line in about.iter().filter(|line| line["verdict"] != "ok") {
        assert!(line["found"].as_str().is_some_and(|it| !it.is_empty()), "{line}");
    }
}

pub(crate) fn failures(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| line["verdict"] == "fail").collect()
}

/// Runs this test again as nobody, who is denied something before the command starts; the lines are the child's.
pub(crate) fn in_denied_child(test: &str, denied: &str) -> Option<Vec<Value>> {
    use std::os::unix::process::CommandExt;
    if let Some(root) = env::var_os(CHILD) {
        deny(denied);
        let output = doctor(root.as_ref(), &config(root.as_ref()), &["--json"]);
        let (lines, code) = lines(&output);
        println!("{}", serde_json::to_string(&(lines, code)).unwrap());
        return None;
    }
    const NOBODY: u32 = 65_534;
    let root = tempfile::tempdir().unwrap();
    directories(root.path());
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, root.path());
    if nix::unistd::geteuid().is_root() {
        for path in ["", "fast", "all"] {
            std::os::unix::fs::chown(root.path().join(path), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            println!("SKIP {test}: {error}");
            return None;
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("[[{"));
    let line = line.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    let (lines, code): (Vec<Value>, i32) = serde_json::from_str(line).unwrap();
    assert_eq!((failures(&lines), code), (vec![], 0), "it works without, slower");
    Some(lines)
}

/// Holds for all processes that come.
fn deny(what: &str) {
    if what == "memlock" {
        setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, 64 << 10).unwrap();
        return;
    }
    let errno = u32::try_from(nix::errno::Errno::EPERM as i32).unwrap();
    let arch = TargetArch::try_from(env::consts::ARCH).unwrap();
    let rules = [(IO_URING_SETUP, Vec::new())].into();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno), arch);
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}
