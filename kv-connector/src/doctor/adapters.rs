//! Which adapter a serving engine is told to load, and from which configuration: what an adapter refuses at start, before
//! it starts.

use std::path::Path;

use kv_chunk::Namespace;
use serde_json::{Map, Value};

use super::Diagnosis;
use crate::Config;

const QUICK_START: &str = "see the quick start in the README";
const SGLANG_FIELDS: [&str; 9] = [
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "file_storage_path",
    "config",
    "weights",
    "model",
    "ranks",
];

/// LMCache's `--l2-adapter`, all that are given; the namespace that chunks will have. `machine` is that of the
/// configuration that is looked at.
pub(super) fn lmcache(
    diagnosis: &mut Diagnosis,
    what: &str,
    specs: &[&str],
    machine: Option<&Namespace>,
) -> Option<Namespace> {
    let mut ours = None;
    for spec in specs {
        match serde_json::from_str::<Value>(spec) {
            Ok(spec) if spec["module_path"] == "kvbraid.lmcache" => ours = Some(spec),
            Ok(_) => {}
            Err(error) => {
                let found = format!("is no JSON: {error}");
                diagnosis.fail(what, found, ("the server does not start", QUICK_START));
                return machine.cloned();
            }
        }
    }
    let Some(spec) = ours else {
        let why = "LMCache does not use KVBraid";
        diagnosis.fail(what, "none has module_path kvbraid.lmcache", (why, QUICK_START));
        return machine.cloned();
    };
    let named = is(diagnosis, what, &spec, "type", "plugin")
        & is(diagnosis, what, &spec, "class_name", "L2Adapter");
    let none = Map::new();
    let params = spec["adapter_params"].as_object().unwrap_or(&none);
    let known = only(diagnosis, what, params, &["config", "namespace"]);
    let config = configuration(diagnosis, what, params.get("config"));
    let namespace = match params.get("namespace").filter(|it| !it.is_null()) {
        Some(given) => match serde_json::from_value::<Namespace>(given.clone()) {
            Ok(namespace) => Some(namespace),
            Err(error) => {
                let found = format!("adapter_params.namespace: {error}");
                diagnosis.fail(what, found, ("the server does not start", QUICK_START));
                return None;
            }
        },
        None => config.as_ref().and_then(|config| config.namespace.clone()),
    };
    if config.is_some() && namespace.is_none() {
        let why = "it is mandatory for LMCache: the server does not start";
        let fix = "write [namespace] into that configuration";
        diagnosis.fail(what, "namespace is missing", (why, fix));
    }
    if named && known && config.is_some() && namespace.is_some() {
        diagnosis.ok(what, "kvbraid.lmcache");
    }
    let serde = spec["serde"]["type"].as_str().unwrap_or("raw");
    if let Some(ours) = namespace.as_ref().map(|it| &it.serde).filter(|ours| *ours != serde) {
        let found = format!("serde {serde}, and namespace.serde is {ours}");
        let fix = format!("write namespace.serde = \"{serde}\"");
        let why = "chunks of another serialisation may be taken for these";
        diagnosis.fail(what, found, (why, &fix));
    }
    namespace
}

/// vLLM's `--kv-transfer-config`.
pub(super) fn vllm(diagnosis: &mut Diagnosis, transfer: &Value) {
    let what = "vllm secondary_tiers";
    let Some((extra, tier)) = secondary_tier(transfer) else {
        if transfer.to_string().contains("LMCache") {
            diagnosis.ok("vllm kv_connector", "LMCache's: see its server's settings");
            return;
        }
        let found = "none has module_path kvbraid.vllm, and no connector is LMCache's";
        diagnosis.fail(what, found, ("vLLM does not use KVBraid", QUICK_START));
        return;
    };
    let named = is(diagnosis, what, tier, "type", "Tier");
    let has_spec = extra["spec_name"].is_string();
    if !has_spec {
        let why = "vLLM's usual offloading has no secondary tiers: KVBraid is not used";
        let fix = "\"spec_name\": \"TieringOffloadingSpec\" beside secondary_tiers";
        diagnosis.fail(what, "spec_name is not given", (why, fix));
    }
    let path = tier["config"].as_str().map(|path| path.replace("{data_parallel_index}", "0"));
    let given = path.map_or_else(|| tier["config"].clone(), Value::String);
    if configuration(diagnosis, what, Some(&given)).is_some() && named && has_spec {
        diagnosis.ok(what, "kvbraid.vllm");
    }
}

/// SGLang's `--hicache-storage-backend-extra-config`.
pub(super) fn sglang(diagnosis: &mut Diagnosis, what: &str, extra: &Value) {
    let named = is(diagnosis, what, extra, "class_name", "HiCache");
    let none = Map::new();
    let known = only(diagnosis, what, extra.as_object().unwrap_or(&none), &SGLANG_FIELDS);
    if !extra["ranks"].is_null() && extra["ranks"].as_u64().is_none_or(|ranks| ranks == 0) {
        let why = "the backend refuses to start";
        diagnosis.fail(what, format!("ranks is {}", extra["ranks"]), (why, "leave it out"));
    }
    if configuration(diagnosis, what, extra.get("config")).is_some() && named && known {
        diagnosis.ok(what, "kvbraid.sglang");
    }
}

/// Wherever it stands, also below a connector of several.
fn secondary_tier(value: &Value) -> Option<(&Value, &Value)> {
    let mut tiers = value["secondary_tiers"].as_array().into_iter().flatten();
    if let Some(tier) = tiers.find(|tier| tier["module_path"] == "kvbraid.vllm") {
        return Some((value, tier));
    }
    match value {
        Value::Object(fields) => fields.values().find_map(secondary_tier),
        Value::Array(values) => values.iter().find_map(secondary_tier),
        _ => None,
    }
}

/// Whether a field has the one value that loads the adapter.
fn is(diagnosis: &mut Diagnosis, what: &str, object: &Value, field: &str, value: &str) -> bool {
    let is_so = object[field] == value;
    if !is_so {
        let found = format!("{field} is {}", object[field]);
        let fix = format!("\"{field}\": \"{value}\"");
        diagnosis.fail(what, found, ("the adapter is not loaded", &fix));
    }
    is_so
}

/// Whether there are no other fields, which adapters refuse.
fn only(
    diagnosis: &mut Diagnosis,
    what: &str,
    object: &Map<String, Value>,
    fields: &[&str],
) -> bool {
    let unknown: Vec<_> = object.keys().filter(|key| !fields.contains(&key.as_str())).collect();
    for key in &unknown {
        let fix = format!("there are {}", fields.join(", "));
        diagnosis.fail(what, format!("{key}: no such field"), ("the adapter refuses it", &fix));
    }
    unknown.is_empty()
}

/// The configuration that an adapter is given: a path, or the configuration itself.
fn configuration(diagnosis: &mut Diagnosis, what: &str, given: Option<&Value>) -> Option<Config> {
    let read = match given {
        Some(Value::String(path)) if !path.is_empty() => Config::from_file(Path::new(path)),
        Some(Value::Object(fields)) if !fields.is_empty() => {
            Config::from_json(&Value::Object(fields.clone()).to_string())
        }
        _ => {
            let fix = "\"config\": the path of a KVBraid configuration";
            diagnosis.fail(what, "config is missing", ("the adapter refuses to start", fix));
            return None;
        }
    };
    read.inspect_err(|error| {
        let why = "the adapter refuses to start; doctor reads it as the server will";
        diagnosis.fail(what, format!("config: {error}"), (why, QUICK_START));
    })
    .ok()
}
