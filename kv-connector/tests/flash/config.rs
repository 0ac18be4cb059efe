//! `kind = "flash"`: what is accepted, and that every refusal names the field and the fix.

use kv_connector::{
    ByteSize, Config, Engine, EngineError, FlashPolicy, FlashReservation, TierKind,
};

use crate::common::{config, directory};

const GOOD: &str = r#"
[[tier]]
name = "mem"
kind = "flash"
path = "kv.flash"
capacity = "1 GiB"
[tier.flash]
protected_bytes = "512 MiB"
policy = "tempo_q"
"#;

/// Replaces one line of the good configuration and expects an error of exactly this field that says `fix`.
fn check_refused(line: &str, by: &str, expected_field: &str, expected_fix: &str) {
    assert!(GOOD.contains(line), "the example has no `{line}`");
    match Config::from_toml(&GOOD.replacen(line, by, 1)) {
        Err(EngineError::Config { field, problem, fix }) => {
            assert_eq!(field, expected_field, "{by}: {problem}");
            assert!(format!("{problem}; {fix}").contains(expected_fix), "{by}: {problem}; {fix}");
        }
        other => panic!("`{by}` gave {other:?}"),
    }
}

#[test]
fn a_flash_tier_is_read_and_most_of_it_may_be_left_out() {
    let config = Config::from_toml(GOOD).unwrap();
    assert_eq!(config.tiers[0].kind, TierKind::Flash);
    let flash = config.tiers[0].flash.clone().unwrap();
    assert_eq!(flash.protected_bytes, Some(ByteSize::mib(512)));
    assert_eq!(flash.policy, FlashPolicy::TempoQ);
    assert_eq!(flash.reservation, FlashReservation::Lazy);
    Config::from_toml(GOOD.split_once("[tier.flash]").unwrap().0).unwrap();
    for policy in ["demand", "immediate", "queue1", "queue4", "static", "tempo"] {
        Config::from_toml(&GOOD.replace("tempo_q", policy)).unwrap();
    }
    Config::from_toml(&format!("{GOOD}reservation = \"eager\"\nmargin_ms = 0\n")).unwrap();
}

#[test]
fn bad_fields_are_refused_by_name() {
    check_refused("path = \"kv.flash\"\n", "", "tier[0].path", "/dev/dax0.0");
    check_refused("\"kv.flash\"", "\"\"", "tier[0].path", "kind flash");
    check_refused("\"flash\"", "\"nvme\"", "tier[0].flash", "remove it");
    check_refused("\"tempo_q\"", "\"soon\"", "policy", "tempo_q");
    check_refused("\"512 MiB\"", "\"2 GiB\"", "tier[0].flash.protected_bytes", "1 GiB or less");
    check_refused("\"512 MiB\"", "\"1 MiB\"", "tier[0].flash.protected_bytes", "hold no chunk of");
    check_refused("\"1 GiB\"", "\"1 KiB\"", "tier[0].capacity", "1024 TiB");
    check_refused("protected_bytes", "protected", "protected", "protected_bytes");
    let more = |line: &str| format!("policy = \"tempo_q\"\n{line}");
    for (line, field, fix) in [
        ("reservation = \"never\"", "reservation", "lazy"),
        ("margin_percent = 10001", "tier[0].flash.margin_percent", "0 to 10000"),
        ("margin_ms = 3600001", "tier[0].flash.margin_ms", "0 to"),
        ("quantile_percent = 0", "tier[0].flash.quantile_percent", "1 to 100"),
        ("late_price_percent = 0", "tier[0].flash.late_price_percent", "1 to"),
        ("read_threads = 65", "tier[0].flash.read_threads", "0 to 64"),
        ("claims_max = 0", "tier[0].flash.claims_max", "1 to"),
        ("claim_deadline_ms = 5", "tier[0].flash.claim_deadline_ms", "1000 to"),
        ("in_flight_bytes = 0", "tier[0].flash.in_flight_bytes", "64 MiB"),
        ("staging_bytes_per_s = 0", "tier[0].flash.staging_bytes_per_s", "64 MiB"),
    ] {
        check_refused("policy = \"tempo_q\"", &more(line), field, fix);
    }
    check_refused("capacity", "segment = \"8 MiB\"\ncapacity", "tier[0].segment", "kind nvme");
}

#[test]
fn more_locked_memory_than_there_is_is_refused() {
    let huge = GOOD.replace("\"1 GiB\"", "\"8 TiB\"");
    Config::from_toml(&huge).unwrap();
    let error = Config::from_toml(&huge.replace("512 MiB", "7 TiB")).unwrap_err().to_string();
    assert!(error.starts_with("tier[0].flash.protected_bytes"), "{error}");
}

#[test]
fn a_path_that_is_neither_a_file_nor_a_device_is_refused() {
    let directory = directory();
    for path in [directory.path().to_owned(), "/dev/null".into(), directory.path().join("no/file")]
    {
        let error = Engine::open(config(&path)).unwrap_err();
        let EngineError::Tier { name, source } = &error else { panic!("{error:?}") };
        assert_eq!(name, "f");
        assert!(source.to_string().contains(path.to_str().unwrap()), "{source}");
    }
}
