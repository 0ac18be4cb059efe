//! Configuration: what is accepted, and that every refusal names the field and the fix.

use kv_connector::{ByteSize, Config, EngineError, TierKind};

const GOOD: &str = r#"
[engine]
chunk_bytes_max = "4 MiB"
host_cache = "256 MiB"
staging = 134217728
read_deadline_ms = 30000

[[tier]]
name = "fast"
kind = "nvme"
path = "fast"
capacity = "10 GiB"
segment = "64 MiB"
[tier.throttle]
bytes_per_s = "900 MB"
latency_us = 80

[[tier]]
name = "slow"
kind = "memory"
capacity = "1 GiB"
window = 4
"#;

#[test]
fn toml_and_json_are_read_alike() {
    let toml = Config::from_toml(GOOD).unwrap();
    assert_eq!(toml.engine.staging, ByteSize::mib(128));
    assert_eq!(toml.tiers[0].kind, TierKind::Nvme);
    assert_eq!(toml.tiers[0].throttle.unwrap().bytes_per_s, ByteSize(900_000_000));
    assert_eq!((toml.tiers[0].window, toml.tiers[1].window), (None, Some(4)));
    let json = r#"{"engine": {"staging": "128 MiB"},
        "tier": [{"name": "m", "kind": "memory", "capacity": "1 GiB"}]}"#;
    let json = Config::from_json(json).unwrap();
    assert_eq!(json.engine.staging, toml.engine.staging);
    assert_eq!(json.tiers[0].window, None);
}

/// Replaces one line of the good configuration and expects an error of exactly this field that says `fix`.
fn check_refused(line: &str, by: &str, expected_field: &str, expected_fix: &str) {
    assert!(GOOD.contains(line), "the example has no `{line}`");
    let text = GOOD.replacen(line, by, 1);
    match Config::from_toml(&text) {
        Err(EngineError::Config { field, problem, fix }) => {
            assert_eq!(field, expected_field, "{by}: {problem}");
            assert!(format!("{problem}; {fix}").contains(expected_fix), "{by}: {problem}; {fix}");
        }
        other => panic!("`{by}` gave {other:?}"),
    }
}

#[test]
fn a_tier_without_a_cap_is_refused() {
    check_refused("capacity = \"10 GiB\"\n", "", "tier[0].capacity", "100 GiB");
}

#[test]
fn two_tiers_on_one_directory_are_refused_whatever_it_is_called() {
    let second = "kind = \"nvme\"\npath = \"./x/../fast\"\n";
    // `x` does not exist, so this is another name; a link to an existing directory is the same one.
    let directory = tempfile::tempdir().unwrap();
    let real = directory.path().join("real");
    let link = directory.path().join("link");
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let good = GOOD.replacen("\"fast\"\ncapacity", &format!("{real:?}\ncapacity"), 1);
    let both = good.replacen("kind = \"memory\"", &format!("kind = \"nvme\"\npath = {link:?}"), 1);
    let error = Config::from_toml(&both).unwrap_err().to_string();
    assert!(error.starts_with("tier[1].path") && error.contains("its own directory"), "{error}");
    check_refused("kind = \"memory\"\n", &second.replace("x/../", ""), "tier[1].path", "its own");
}

#[test]
fn unknown_and_missing_fields_are_named() {
    check_refused("window = 4", "windw = 4", "windw", "window");
    check_refused("host_cache", "hostcache", "hostcache", "host_cache");
    check_refused("name = \"slow\"\n", "", "name", "add it");
    check_refused("latency_us", "latency_ms", "latency_ms", "latency_us");
}

#[test]
fn values_of_the_wrong_kind_name_their_line() {
    check_refused("\"4 MiB\"", "\"4 mb\"", "chunk_bytes_max", "256 MiB");
    check_refused("window = 4", "window = \"many\"", "window", "line");
    check_refused("kind = \"memory\"", "kind = \"tape\"", "kind", "memory");
    check_refused("staging = 134217728", "staging = -1", "staging", "negative");
}

#[test]
fn json_of_one_line_names_the_field_as_well() {
    for (json, field) in [
        (r#"{"engine": {"staging": "64 MiB", "host_cache": "4 mib"}}"#, "host_cache"),
        (r#"{"engine": {"staging": 1}, "tier": [{"name": "m", "kind": "tape"}]}"#, "kind"),
        (r#"{"tier": [{"name": "m", "kind": "memory", "window": [1]}]}"#, "window"),
        ("{\"engine\":\n{\"lock_memory\":\n\"no\"}}", "lock_memory"),
    ] {
        let error = Config::from_json(json).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{field}: ")), "{json}: {error}");
    }
}

#[test]
fn absurd_values_are_refused() {
    check_refused("\"4 MiB\"", "\"4 GiB\"", "engine.chunk_bytes_max", "512 MiB");
    check_refused("\"4 MiB\"", "0", "engine.chunk_bytes_max", "4 KiB");
    check_refused("\"256 MiB\"", "\"64 TiB\"", "engine.host_cache", "memory");
    check_refused("134217728", "4096", "engine.staging", "at least");
    check_refused("30000", "0", "engine.read_deadline_ms", "1 ms");
    check_refused("30000", "99999999999", "engine.read_deadline_ms", "1 hour");
    check_refused("\"10 GiB\"", "0", "tier[0].capacity", "64 MiB");
    check_refused("\"10 GiB\"", "\"9999 TiB\"", "tier[0].capacity", "1024 TiB");
    check_refused("\"64 MiB\"", "\"1 MiB\"", "tier[0].segment", "at least");
    check_refused("window = 4", "window = 0", "tier[1].window", "1 to");
    check_refused("window = 4", "window = 4000", "tier[1].window", "1 to");
    check_refused("window = 4", "window_max = 0", "tier[1].window_max", "1 to");
    check_refused("window = 4", "window = 4\nwindow_max = 8", "tier[1].window_max", "remove");
    check_refused("\"900 MB\"", "0", "tier[0].throttle.bytes_per_s", "1 GB");
    check_refused("\"slow\"", "\"fast\"", "tier[1].name", "its own");
    check_refused("\"slow\"", "\"sl ow\"", "tier[1].name", "letters");
    check_refused("path = \"fast\"\n", "", "tier[0].path", "directory");
    check_refused("kind = \"memory\"", "kind = \"memory\"\npath = \"x\"", "tier[1].path", "remove");
}

#[test]
fn the_space_of_an_nvme_tier_is_refused_by_field() {
    let refused = |line: &str, field: &str, fix: &str| {
        let segment = "segment = \"64 MiB\"";
        check_refused(segment, &format!("{segment}\n{line}"), &format!("tier[0].{field}"), fix);
    };
    refused("min_free_bytes = \"2000 TiB\"", "min_free_bytes", "1024 TiB");
    let segment = "segment = \"64 MiB\"";
    check_refused(segment, "min_free_bytes = \"much\"", "min_free_bytes", "line");
    refused("high_watermark_permille = 0", "high_watermark_permille", "1 to 1000");
    refused("high_watermark_permille = 1001", "high_watermark_permille", "1 to 1000");
    refused("low_watermark_permille = 0", "low_watermark_permille", "1 to 1000");
    let crossed = "high_watermark_permille = 900\nlow_watermark_permille = 901";
    refused(crossed, "low_watermark_permille", "or less");
    // What only a tier of kind nvme has.
    for (line, field) in [
        ("min_free_bytes = 1", "min_free_bytes"),
        ("high_watermark_permille = 990", "high_watermark_permille"),
        ("low_watermark_permille = 980", "low_watermark_permille"),
    ] {
        let by = format!("window = 4\n{line}");
        check_refused("window = 4", &by, &format!("tier[1].{field}"), "remove it");
    }
    let shared = "kind = \"shared\"\npath = \"x\"\nmin_free_bytes = 1";
    check_refused("kind = \"memory\"", shared, "tier[1].min_free_bytes", "[tier.shared]");
}

#[test]
fn watermarks_and_the_floor_are_read_and_one_mark_alone_is_enough() {
    let text = |lines: &str| GOOD.replacen("segment =", &format!("{lines}\nsegment ="), 1);
    for lines in ["high_watermark_permille = 5", "low_watermark_permille = 1000", ""] {
        Config::from_toml(&text(lines)).unwrap();
    }
    let lines =
        "min_free_bytes = \"20 GiB\"\nhigh_watermark_permille = 900\nlow_watermark_permille = 800";
    let tier = Config::from_toml(&text(lines)).unwrap().tiers.swap_remove(0);
    assert_eq!(tier.min_free_bytes, Some(ByteSize::gib(20)));
    assert_eq!((tier.high_watermark_permille, tier.low_watermark_permille), (Some(900), Some(800)));
}

#[test]
fn no_tiers_and_too_many_tiers_are_refused() {
    assert!(Config::from_toml("").unwrap_err().to_string().starts_with("tier: 0 tiers"));
    let one = "[[tier]]\nname = \"mX\"\nkind = \"memory\"\ncapacity = \"1 GiB\"\n";
    let nine: String = (0..9).map(|n| one.replace('X', &n.to_string())).collect();
    assert!(Config::from_toml(&nine).unwrap_err().to_string().starts_with("tier: 9 tiers"));
}

#[test]
fn each_rank_of_a_node_gets_its_part() {
    let mut text = GOOD.replace("write_window", "");
    text += "[[tier]]\nname = \"all\"\nkind = \"shared\"\npath = \"/all\"\ncapacity = \"1 TiB\"\nwindow = 9\n";
    let mut whole = Config::from_toml(&text).unwrap();
    whole.engine.socket = Some("/run/kv.sock".into());
    let part = whole.clone().for_rank(3, 4).unwrap();
    let tiers = &part.tiers;
    assert_eq!(tiers[0].path.as_deref().unwrap().to_str(), Some("fast/rank-3"));
    assert_eq!(tiers[0].capacity, Some(ByteSize::mib(2560)));
    assert_eq!(tiers[0].throttle.unwrap().bytes_per_s, ByteSize(225_000_000));
    assert!(
        tiers[0].window.is_none() && tiers[0].window_max.is_some_and(|it| (1..=8).contains(&it))
    );
    assert_eq!((tiers[1].window, tiers[1].write_window), (Some(1), 1));
    assert_eq!(tiers[2].path, whole.tiers[2].path, "one directory for all");
    assert_eq!((tiers[2].capacity, tiers[2].window), (whole.tiers[2].capacity, Some(2)));
    assert_eq!(part.engine.staging, ByteSize::mib(32));
    assert_eq!(part.engine.socket.unwrap().to_str(), Some("/run/rank-3.kv.sock"));
    let error = whole.clone().for_rank(0, 1000).unwrap_err().to_string();
    assert!(
        error.starts_with("tier[0].capacity") && error.ends_with("for each of 1000 ranks"),
        "{error}"
    );
    assert!(whole.for_rank(0, 0).is_err());
}
