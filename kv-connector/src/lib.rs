//! kv-connector
