//! kv-writeback
