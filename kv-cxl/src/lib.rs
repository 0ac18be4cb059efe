//! kv-cxl
