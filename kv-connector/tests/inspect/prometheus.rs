//! The Prometheus text, against the rules of its exposition format and its naming.

use std::collections::{BTreeMap, BTreeSet};

use kv_connector::{EngineStats, TierStatus};

use crate::common::*;

/// `name{label="value",..} number`, taken apart.
fn sample(line: &str) -> (String, Vec<(String, String)>, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
    let Some((name, labels)) = series.split_once('{') else {
        return (series.to_owned(), Vec::new(), value);
    };
    let mut rest = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
    let mut parsed = Vec::new();
    while !rest.is_empty() {
        let (label, behind) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
        let mut text = String::new();
        let mut letters = behind.char_indices();
        let end = loop {
            match letters.next().unwrap_or_else(|| panic!("{line}")) {
                (_, '\\') => match letters.next().unwrap().1 {
                    'n' => text.push('\n'),
                    escaped @ ('\\' | '"') => text.push(escaped),
                    other => panic!("escape {other} in {line}"),
                },
                (at, '"') => break at,
                (_, letter) => text.push(letter),
            }
        };
        parsed.push((label.to_owned(), text));
        rest = behind[end + 1..].strip_prefix(',').unwrap_or(&behind[end + 1..]);
    }
    (name.to_owned(), parsed, value)
}

fn is_name(text: &str) -> bool {
    let first = text.starts_with(|c: char| c.is_ascii_lowercase());
    first && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

fn check(text: &str) -> BTreeMap<String, String> {
    let (mut types, mut helps, mut series) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
    let mut family = String::new();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(!words.is_empty() && helps.insert(name.to_owned()), "{line}");
            family = name.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(name, family, "the help is of another family: {line}");
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}");
        } else {
            let (name, labels, value) = sample(line);
            assert_eq!(name, family, "a sample outside its family: {line}");
            assert!(value.is_finite() && value >= 0.0, "{line}");
            assert!(labels.iter().all(|(label, _)| is_name(label)), "{line}");
            assert!(series.insert((name, labels)), "twice: {line}");
        }
    }
    for (name, kind) in &types {
        assert!(is_name(name) && name.starts_with("kvbraid_"), "{name}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        let base = name.trim_end_matches("_total");
        let odd = ["_ms", "_ns", "_us", "_mib", "_kib", "_gib", "_percent", "_time"];
        assert!(!odd.iter().any(|unit| base.ends_with(unit)), "{name}: not a base unit");
    }
    types
}

#[test]
fn names_types_and_units_follow_the_conventions() {
    let place = Place::new();
    let engine = place.engine();
    store(&engine, &keys("m", "", 3));
    served(&engine, &keys("m", "", 5));
    let types = check(&engine.stats().prometheus());
    assert!(types.len() > 20, "{types:?}");
    for name in [
        "kvbraid_tier_used_bytes",
        "kvbraid_tier_busy_seconds_total",
        "kvbraid_tier_read_bytes_total",
    ] {
        assert!(types.contains_key(name), "{name}");
    }
}

#[test]
fn label_values_are_escaped_and_come_back() {
    let name = "a\\b\"c\nd{}=,";
    let mut tier = TierStatus::default();
    tier.name = name.to_owned();
    let mut stats = EngineStats::default();
    stats.tiers.push(tier);
    let text = stats.prometheus();
    check(&text);
    let labels: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("kvbraid_tier_"))
        .flat_map(|line| sample(line).1)
        .collect();
    assert!(!labels.is_empty() && labels.iter().all(|(_, value)| value == name), "{labels:?}");
}
