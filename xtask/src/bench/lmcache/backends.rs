//! What is compared: ours, and LMCache's own back ends, each as well set up as its options allow.

use std::{fs::File, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// With SSD offload. Of LMCache it is the in-process connector: its server's adapter is made of an extension,
/// `lmcache_mooncake`, that no wheel of LMCache 0.5.6 has.
pub(super) const MOONCAKE: &str = "mooncake";
pub(super) const LMCACHE: [&str; 7] = [
    "kvbraid",
    "fs_native",
    "raw_block",
    "two_stock",
    "local_disk_sync",
    "local_disk_async",
    MOONCAKE,
];
pub(super) const HICACHE: [&str; 3] = ["kvbraid", "hicache_file", MOONCAKE];
pub(super) const CHUNK_BYTES: u64 = 4 << 20;
pub(super) const REQUESTS: u64 = 16;
/// Threads that read for a stock back end.
const THREADS: u64 = 8;
/// Of a raw block store, at its begin.
const RAW_BLOCK_INDEX: u64 = 256 << 20;
const HEADER: u64 = 4096;

/// Where the file systems of the two devices are.
pub(super) struct Mounts<'a> {
    pub(super) fast: &'a Path,
    pub(super) slow: &'a Path,
}

/// Whether it has both devices to read from: only then it can be faster than the fast one.
pub(super) fn is_ours(name: &str) -> bool {
    name == "kvbraid"
}

/// How often the chunks of a step on one tier lie on the fast device, with these back ends: some share what was stored.
pub(super) fn stores(names: &[&str]) -> u64 {
    let shared = |name: &&str| match *name {
        "two_stock" => names.contains(&"fs_native"),
        "local_disk_async" => names.contains(&"local_disk_sync"),
        _ => false,
    };
    names.iter().filter(|name| !is_ours(name) && !shared(name)).count() as u64
}

/// How a worker opens a back end of SGLang's HiCache, for so many pages.
pub(super) fn hicache(name: &str, mounts: &Mounts<'_>, chunks: u64) -> Value {
    let mut order = json!({
        "do": "open", "chunk_bytes": CHUNK_BYTES, "chunks": chunks, "requests": REQUESTS,
        "paths": paths(mounts),
    });
    let (kind, extra) = match name {
        "kvbraid" => (
            "dynamic",
            json!({"backend_name": "kvbraid", "module_path": "kvbraid.sglang",
                "class_name": "HiCache", "interface_v1": 1, "weights": "none",
                "config": configuration(mounts, chunks)}),
        ),
        MOONCAKE => {
            order["mooncake"] = json!(mounts.fast.join("mooncake"));
            // The worker adds where its master is.
            ("mooncake", json!({}))
        }
        _ => ("file", json!({"file_storage_path": mounts.fast.join("hicache_file")})),
    };
    order["hicache"] = json!(kind);
    order["extra"] = extra;
    order
}

fn paths(mounts: &Mounts<'_>) -> [String; 2] {
    [mounts.fast, mounts.slow].map(|it| it.display().to_string())
}

/// How a worker opens a back end of LMCache, for so many chunks.
pub(super) fn lmcache(name: &str, mounts: &Mounts<'_>, chunks: u64) -> Result<Value> {
    let mut order = json!({
        "do": "open", "chunk_bytes": CHUNK_BYTES, "chunks": chunks, "requests": REQUESTS,
        "paths": paths(mounts),
    });
    // Files of one name and content: what one back end stored the other finds, or writes again.
    let files = |mount: &Path| {
        json!({"type": "fs_native", "base_path": mount.join("fs_native"), "num_workers": THREADS,
            "use_odirect": true})
    };
    match name {
        "kvbraid" => order["adapters"] = json!([ours(mounts, chunks)]),
        "fs_native" => order["adapters"] = json!([files(mounts.fast)]),
        "two_stock" => order["adapters"] = json!([files(mounts.fast), files(mounts.slow)]),
        "raw_block" => order["adapters"] = json!([raw_block(mounts.fast, chunks)?]),
        MOONCAKE => order["mooncake"] = json!(mounts.fast.join("mooncake")),
        _ => {
            order["local_disk"] = json!(format!("{}/", mounts.fast.join("local_disk").display()));
            order["threads"] = json!(THREADS);
            order["async"] = json!(name == "local_disk_async");
        }
    }
    Ok(order)
}

fn ours(mounts: &Mounts<'_>, chunks: u64) -> Value {
    let mut config = configuration(mounts, chunks);
    config["namespace"] = json!({"model": "bench/model", "weights": "none", "dtype": "bfloat16",
        "layout": "2LTD", "chunk_tokens": 256, "serde": "raw", "hash_algorithm": "blake3", "hash_seed": "none",
        "tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "engine": "vllm",
        "engine_major": 0});
    json!({"type": "plugin", "module_path": "kvbraid.lmcache", "class_name": "L2Adapter",
        "adapter_params": {"config": config}})
}

fn configuration(mounts: &Mounts<'_>, chunks: u64) -> Value {
    // Below its high watermark a tier drops nothing.
    let capacity = (chunks * 4 / 3 + 128) * (CHUNK_BYTES + 2 * HEADER);
    let tier = |name: &str, mount: &Path| {
        json!({"name": name, "kind": "nvme", "path": mount.join("kvbraid"),
            "capacity": format!("{capacity} B"), "segment": "256 MiB"})
    };
    json!({
        "engine": {"chunk_bytes_max": format!("{CHUNK_BYTES} B"), "host_cache": "0 B",
            "staging": "256 MiB", "write_max_age_ms": 20},
        "queue": {"memory": "512 MiB"},
        "tier": [tier("fast", mounts.fast), tier("slow", mounts.slow)],
    })
}

/// It takes a device or a file of its size.
fn raw_block(mount: &Path, chunks: u64) -> Result<Value> {
    let path = mount.join("raw_block.img");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let bytes = (chunks + 16) * (CHUNK_BYTES + HEADER) + 2 * RAW_BLOCK_INDEX;
    file.set_len(bytes).with_context(|| format!("size {}", path.display()))?;
    Ok(json!({"type": "raw_block", "device_path": path, "slot_bytes": CHUNK_BYTES + HEADER,
        "meta_total_bytes": RAW_BLOCK_INDEX, "io_engine": "io_uring", "use_odirect": true,
        "num_load_workers": THREADS, "load_checkpoint_on_init": false}))
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    #[test]
    fn back_ends_that_read_the_same_files_need_room_once() {
        assert_eq!(stores(&LMCACHE), 4);
        assert_eq!(stores(&HICACHE), 2);
        assert_eq!(stores(&["two_stock"]), 1);
        assert_eq!(stores(&["kvbraid"]), 0);
    }

    #[test]
    fn mooncake_is_on_the_fast_device() {
        let (fast, slow) = (env::temp_dir(), env::temp_dir().join("slow"));
        let mounts = Mounts { fast: &fast, slow: &slow };
        let place = json!(fast.join("mooncake"));
        let order = lmcache(MOONCAKE, &mounts, 10).unwrap();
        assert_eq!(order["mooncake"], place);
        assert!(order["adapters"].is_null() && order["local_disk"].is_null());
        let order = hicache(MOONCAKE, &mounts, 10);
        assert_eq!((&order["mooncake"], &order["hicache"]), (&place, &json!("mooncake")));
    }

    #[test]
    fn stock_back_ends_read_the_fast_device_without_the_page_cache() {
        let (fast, slow) = (env::temp_dir(), env::temp_dir().join("slow"));
        let mounts = Mounts { fast: &fast, slow: &slow };
        let order = |name| lmcache(name, &mounts, 10).unwrap();
        let files = order("fs_native")["adapters"][0].clone();
        assert_eq!(files["use_odirect"], true);
        assert_eq!(files["base_path"], fast.join("fs_native").display().to_string());
        assert_eq!(order("two_stock")["adapters"][0], files);
        assert_eq!(order("kvbraid")["adapters"][0]["type"], "plugin");
        assert_eq!(order("local_disk_async")["async"], true);
        assert_eq!(order("local_disk_sync")["async"], false);
    }
}
