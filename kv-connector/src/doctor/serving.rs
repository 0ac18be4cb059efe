//! The settings of LMCache, vLLM and SGLang that bite, in the words that they are about to be started with.

use std::env;

use kv_chunk::Namespace;
use serde_json::Value;

use super::{Diagnosis, adapters, words::Words};
use crate::{Config, TierKind};

/// Fewer requests than this are pooled into small steps.
const IN_FLIGHT_LEAST: u64 = 64;
const LMCACHE_CHUNK_TOKENS: u32 = 256;
const LMCACHE_HASH: &str = "blake3";

/// Texts of command lines and configurations; each may be left out.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Serving {
    /// Arguments of `lmcache server`, or its whole command line.
    pub lmcache: Option<String>,
    /// vLLM's `--kv-transfer-config`, or its whole command line.
    pub vllm: Option<String>,
    /// SGLang's `--hicache-storage-backend-extra-config`, or its whole command line.
    pub sglang: Option<String>,
}

impl Serving {
    pub(super) fn examine(&self, diagnosis: &mut Diagnosis, config: Option<&Config>) {
        let namespace = config.and_then(|config| config.namespace.as_ref());
        if let (Some(config), Some(namespace)) = (config, namespace) {
            hash(diagnosis, config, namespace);
        }
        if let Some(text) = &self.lmcache {
            lmcache(diagnosis, &Words::new(text), namespace);
        }
        if let Some(text) = &self.vllm {
            vllm(diagnosis, text);
        }
        if let Some(text) = &self.sglang {
            sglang(diagnosis, text, namespace);
        }
    }
}

/// Chunk hashes must be the same in every process that shares the chunks.
fn hash(diagnosis: &mut Diagnosis, config: &Config, namespace: &Namespace) {
    let what = "namespace.hash_algorithm";
    let algorithm = &namespace.hash_algorithm;
    if algorithm != "builtin" {
        diagnosis.ok(what, algorithm);
        return;
    }
    let persistent = config.tiers.iter().any(|tier| tier.kind != TierKind::Memory);
    let found = "builtin, Python's own hash()";
    let fix = "start the server with --hash-algorithm blake3 (or sha256_cbor) and write that";
    if persistent {
        let why = "it differs from process to process, and these tiers outlive one: the adapter refuses it";
        diagnosis.fail(what, found, (why, fix));
    } else if env::var("PYTHONHASHSEED").is_ok_and(|seed| seed != "random" && !seed.is_empty()) {
        diagnosis.warn(
            what,
            found,
            ("processes agree only while all have this PYTHONHASHSEED", fix),
        );
    } else {
        let why = "PYTHONHASHSEED is not set: each process has hashes of its own, and finds nothing of the others";
        diagnosis.fail(what, found, (why, fix));
    }
}

fn lmcache(diagnosis: &mut Diagnosis, words: &Words, namespace: Option<&Namespace>) {
    let flag = "--l2-prefetch-max-in-flight";
    let why = "so many requests are looked up and loaded at once: no larger step can be pooled";
    match words.value(flag).map(str::parse::<u64>) {
        Some(Ok(number)) if number >= IN_FLIGHT_LEAST => {
            diagnosis.ok(lm(flag), number.to_string());
        }
        Some(value) => {
            let found = value.map_or_else(|_| "no number".to_owned(), |it| it.to_string());
            diagnosis.warn(lm(flag), found, (why, "--l2-prefetch-max-in-flight 64"));
        }
        None => diagnosis.warn(
            lm(flag),
            "not given, which is 8",
            (why, "--l2-prefetch-max-in-flight 64"),
        ),
    }
    if words.has("--no-l1-use-lazy") {
        diagnosis.ok(lm("--no-l1-use-lazy"), "given");
    } else {
        let why = "L1 grows while requests wait for it, and its memory moves";
        diagnosis.warn(lm("--no-l1-use-lazy"), "not given", (why, "--no-l1-use-lazy"));
    }
    let flag = "--l2-prefetch-policy";
    match words.value(flag) {
        Some("retain") => diagnosis.ok(lm(flag), "retain"),
        found => {
            let why = "what was loaded is dropped from L1 after one request: the next one reads the disks again";
            diagnosis.warn(
                lm(flag),
                found.unwrap_or("not given"),
                (why, "--l2-prefetch-policy retain"),
            );
        }
    }
    match words.value("--max-workers") {
        Some(number) if number.parse::<u64>().is_ok_and(|number| number > 0) => {
            diagnosis.ok(lm("--max-workers"), number);
        }
        Some(other) => {
            let why = "the server does not start, or answers nobody";
            diagnosis.fail(lm("--max-workers"), other, (why, "--max-workers 4"));
        }
        None => {
            let why = "requests of several vLLM processes wait for each other";
            diagnosis.warn(lm("--max-workers"), "not given", (why, "--max-workers 4"));
        }
    }
    let flag = "--l2-adapter";
    let namespace = adapters::lmcache(diagnosis, &lm(flag), &words.values(flag), namespace);
    agrees(diagnosis, words, namespace.as_ref());
}

fn lm(flag: &str) -> String {
    format!("lmcache {flag}")
}

/// What both the server and the namespace say.
fn agrees(diagnosis: &mut Diagnosis, words: &Words, namespace: Option<&Namespace>) {
    let Some(namespace) = namespace else { return };
    let hash = words.value("--hash-algorithm").unwrap_or(LMCACHE_HASH);
    let tokens = words.value("--chunk-size").map(str::to_owned);
    let tokens = tokens.unwrap_or_else(|| LMCACHE_CHUNK_TOKENS.to_string());
    for (flag, field, theirs, ours) in [
        ("--hash-algorithm", "hash_algorithm", hash, namespace.hash_algorithm.clone()),
        ("--chunk-size", "chunk_tokens", &tokens, namespace.chunk_tokens.to_string()),
    ] {
        if theirs == ours {
            diagnosis.ok(lm(flag), theirs);
            continue;
        }
        let why = "the namespace decides which chunks are shared: with a wrong one others' may be taken for ours";
        let fix =
            format!("write namespace.{field} = {theirs}, or start the server with {flag} {ours}");
        diagnosis.fail(lm(flag), format!("{theirs}, and namespace.{field} is {ours}"), (why, &fix));
    }
}

fn vllm(diagnosis: &mut Diagnosis, text: &str) {
    let what = "vllm kv_load_failure_policy";
    let Some(config) = json(text, "--kv-transfer-config") else {
        let why = "vLLM does not start with it, or uses no KV connector";
        let fix = "give the JSON of --kv-transfer-config";
        diagnosis.fail("vllm --kv-transfer-config", "is no JSON, or not given", (why, fix));
        return;
    };
    match config["kv_load_failure_policy"].as_str() {
        Some("recompute") => diagnosis.ok(what, "recompute"),
        found => {
            let found = found.unwrap_or("not given, which is fail");
            let why = "a chunk that cannot be read ends its request, and all that share the block, with an error";
            let fix = "\"kv_load_failure_policy\": \"recompute\" in --kv-transfer-config";
            diagnosis.fail(what, found, (why, fix));
        }
    }
    adapters::vllm(diagnosis, &config);
}

fn sglang(diagnosis: &mut Diagnosis, text: &str, namespace: Option<&Namespace>) {
    let flag = "--hicache-storage-backend-extra-config";
    let what = format!("sglang {flag}");
    let fix = "see the quick start in the README";
    let Some(config) = json(text, flag) else {
        diagnosis.fail(what, "is no JSON, or not given", ("HiCache has no storage", fix));
        return;
    };
    if config["module_path"] != "kvbraid.sglang" {
        diagnosis.fail(
            what,
            "module_path is not kvbraid.sglang",
            ("SGLang does not use KVBraid", fix),
        );
        return;
    }
    adapters::sglang(diagnosis, &what, &config);
    if namespace.is_none() && config["weights"].as_str().is_none_or(|it| it.trim().is_empty()) {
        let why = "other weights of the same model would be taken for these: the backend refuses to start";
        diagnosis.fail(
            &what,
            "weights is missing",
            (why, "\"weights\": the revision of the weights"),
        );
    }
    match &config["interface_v1"] {
        Value::Bool(true) => diagnosis.ok(what, "interface_v1"),
        Value::Number(number) if number.as_i64() != Some(0) => diagnosis.ok(what, "interface_v1"),
        _ => {
            let why = "SGLang copies each page once more";
            diagnosis.warn(what, "interface_v1 is not set", (why, "\"interface_v1\": 1"));
        }
    }
}

/// A text that is JSON, or a command line that has it behind a flag.
fn json(text: &str, flag: &str) -> Option<Value> {
    let parsed = serde_json::from_str(text.trim()).ok();
    parsed.or_else(|| serde_json::from_str(Words::new(text).value(flag)?).ok())
}
