//! kv-tiers
