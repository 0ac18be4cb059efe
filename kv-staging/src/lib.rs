//! kv-staging
