//! kvbraid
fn main() {}
