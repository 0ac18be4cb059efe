//! Where `unsafe` may stand: one named file for each reason, and nowhere else.

use super::{Finding, tree::SourceFile};

/// Each file with its reason.
const MAY_BE_UNSAFE: &[(&str, &str)] = &[
    ("kv-tiers/src/arena.rs", "hands out disjoint mutable slots of one mapping"),
    ("kv-tiers/src/nvme/ring.rs", "gives buffers and files to the kernel"),
    ("kv-cxl/src/map.rs", "maps device memory"),
    (
        "kv-cxl/tests/dax_ring.rs",
        "registers device memory with a ring, to see that a ring reads into it",
    ),
    ("kv-connector/src/python.rs", "touches buffers that belong to a Python caller"),
    ("kv-connector/tests/fork.rs", "forks, to see that a child leaves the engine alone"),
    ("kv-router/tests/allocations.rs", "a global allocator that counts"),
    ("kv-tiers/tests/arena.rs", "forks, to see that a child leaves the arena alone"),
];

/// The keyword occurs only in the named files.
pub(crate) fn only_in_named_files(file: &SourceFile, findings: &mut Vec<Finding>) {
    if MAY_BE_UNSAFE.iter().any(|(path, _)| *path == file.path) {
        return;
    }
    for (index, line) in file.code.lines().enumerate() {
        if line
            .split(|letter: char| !letter.is_alphanumeric() && letter != '_')
            .any(|word| word == "unsafe")
        {
            findings.push(Finding::new(
                &file.path,
                index + 1,
                "unsafe code outside the files that may have it",
            ));
        }
    }
}

/// A crate with no such file forbids it; one with such a file denies it everywhere else.
pub(crate) fn crate_roots_say_so(file: &SourceFile, findings: &mut Vec<Finding>) {
    let Some(package) = file.package() else { return };
    let is_root =
        ["src/lib.rs", "src/main.rs"].iter().any(|root| file.path == format!("{package}/{root}"))
            || (file.path.contains("/src/bin/") && file.path.ends_with("/main.rs"));
    let said = file.code.contains("#![forbid(unsafe_code)]")
        || file.code.contains("#![deny(unsafe_code)]");
    if is_root && !said {
        findings.push(Finding::new(&file.path, 1, "a crate root forbids (or denies) unsafe_code"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::finds;

    #[test]
    fn unsafe_outside_the_named_files_is_found() {
        let source = "// unsafe\nlet a = unsafe { b() };\n";
        finds(only_in_named_files, "kv-router/src/pool.rs", source, &[(2, "unsafe")]);
        finds(only_in_named_files, MAY_BE_UNSAFE[0].0, source, &[]);
        finds(only_in_named_files, "kv-router/src/lib.rs", "#![forbid(unsafe_code)]\n", &[]);
    }

    #[test]
    fn a_crate_root_that_does_not_forbid_it_is_found() {
        finds(crate_roots_say_so, "kv-router/src/lib.rs", "//! A crate.\n", &[(1, "forbids")]);
        finds(crate_roots_say_so, "kv-router/src/pool.rs", "//! A module.\n", &[]);
    }
}
