//! kv-router
