//! What stands behind vLLM: nothing, its own file tier, LMCache with its own files, and ours in both places.

use std::path::Path;

use serde_json::{Value, json};

pub(super) const RECOMPUTE: &str = "recompute";
pub(super) const ALL: [&str; 5] = [RECOMPUTE, "fs", "fs_native", "kvbraid_lmcache", "kvbraid_vllm"];
/// Many heads and little else: per byte of keys and values there is as little to compute as attention allows. In single
/// precision the processor is faster, and greedy tokens depend less on who shares a batch.
const LAYERS: u64 = 2;
const HEADS: u64 = 4;
const HEAD: u64 = 256;
/// Of keys and values.
pub(super) const TOKEN_BYTES: u64 = 2 * LAYERS * HEADS * HEAD * 4;
const CHUNK_TOKENS: u64 = 32;
pub(super) const CHUNK_BYTES: u64 = CHUNK_TOKENS * TOKEN_BYTES;
/// Memory between the devices and vLLM: some requests' prefixes at once, and little of what was read before.
const BUFFER_BYTES: u64 = 192 << 20;
const THREADS: u64 = 8;

/// Whether it is one of ours, and so has both devices.
pub(super) fn is_ours(name: &str) -> bool {
    name.starts_with("kvbraid")
}

/// Where everything is.
pub(super) struct Places<'a> {
    pub(super) home: &'a Path,
    pub(super) trace: &'a Path,
    pub(super) mounts: [&'a Path; 2],
}

/// How much of the trace is used, and how much a device holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Requests whose prompts are stored before anything is measured.
    pub(super) before: u32,
    /// Requests of a cell.
    pub(super) requests: u32,
    /// Of each of ours, on each device.
    pub(super) capacity: u64,
}

/// How a worker opens it.
pub(super) fn open(name: &str, places: &Places<'_>, load: &Load) -> Value {
    let [fast, slow] = places.mounts;
    let mut order = json!({
        "do": "open", "name": name, "home": places.home,
        "paths": [fast, slow],
        "primary": BUFFER_BYTES, "l1_gb": BUFFER_BYTES as f64 / f64::from(1 << 30),
        "model": {"num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 256,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD},
        "engine": {"dtype": "float32", "max_model_len": 2304, "max_num_seqs": 8,
            "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 384 << 20},
        "load": {"trace": places.trace, "blocks_max": 64, "before": load.before,
            "requests": load.requests},
    });
    let fresh = |kind: &str| json!(fast.join(kind));
    match name {
        "fs" => {
            order["tier"] = json!({"type": "fs", "root_dir": fast.join(name)});
            order["fresh"] = fresh(name);
        }
        "fs_native" => {
            order["adapter"] = json!({"type": "fs_native", "base_path": fast.join(name),
                "num_workers": THREADS, "use_odirect": true});
            order["fresh"] = fresh(name);
        }
        "kvbraid_lmcache" => {
            let mut config = configuration(name, places, load.capacity);
            config["namespace"] = json!({"model": "bench/model", "weights": "none", "dtype": "float32",
                "layout": "LBHNC", "chunk_tokens": CHUNK_TOKENS, "serde": "raw",
                "hash_algorithm": "blake3", "hash_seed": "none", "tensor_parallel": 1,
                "pipeline_parallel": 1, "context_parallel": 1, "engine": "vllm", "engine_major": 0});
            order["adapter"] = json!({"type": "plugin", "module_path": "kvbraid.lmcache",
                "class_name": "L2Adapter", "adapter_params": {"config": config}});
        }
        "kvbraid_vllm" => {
            order["tier"] = json!({"type": "Tier", "module_path": "kvbraid.vllm",
                "config": configuration(name, places, load.capacity)});
        }
        _ => {}
    }
    order
}

/// No host cache: what was read before is read again, as by the others.
fn configuration(name: &str, places: &Places<'_>, capacity: u64) -> Value {
    let tier = |tier: &str, mount: &Path| {
        json!({"name": tier, "kind": "nvme", "path": mount.join(name),
            "capacity": format!("{capacity} B"), "segment": "64 MiB"})
    };
    json!({
        "engine": {"chunk_bytes_max": format!("{CHUNK_BYTES} B"), "host_cache": "0 B",
            "cache_stores": false, "staging": "128 MiB", "write_max_age_ms": 20},
        "queue": {"memory": "256 MiB"},
        "tier": [tier("fast", places.mounts[0]), tier("slow", places.mounts[1])],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stock_back_ends_have_the_fast_device_and_ours_both() {
        let [home, trace, fast, slow] = ["/h", "/t", "/fast", "/slow"].map(Path::new);
        let places = Places { home, trace, mounts: [fast, slow] };
        let load = Load { before: 1, requests: 1, capacity: 1 << 30 };
        for name in ALL {
            let mut order = open(name, &places, &load);
            // Whose pages are dropped.
            order["paths"] = json!([]);
            let said = order.to_string();
            assert_eq!(said.contains("/slow"), is_ours(name), "{said}");
            assert_eq!(said.contains("/fast"), name != RECOMPUTE, "{said}");
        }
        assert_eq!(open("fs_native", &places, &load)["adapter"]["use_odirect"], true);
    }
}
