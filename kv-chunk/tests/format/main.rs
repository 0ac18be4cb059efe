//! Tests of the bytes: keys, headers, golden files, hostile input, sizes.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod golden;
mod header;
mod keys;
mod layout;
mod mutation;
mod oracle;
