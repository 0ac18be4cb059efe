//! Where `unsafe` may stand: one named file for each reason, and nowhere else.

use super::{Finding, tree::SourceFile};

const MAY_BE_UNSAFE: &[&str] = &[
    "kv-tiers/src/arena.rs",
    "kv-tiers/src/nvme/ring.rs",
    "kv-cxl/src/map.rs",
    "kv-connector/src/python.rs",
];

/// The keyword occurs only in the named files.
pub(crate) fn only_in_named_files(file: &SourceFile, findings: &mut Vec<Finding>) {
    if MAY_BE_UNSAFE.contains(&file.path.as_str()) {
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
        finds(only_in_named_files, "kv-tiers/src/arena.rs", source, &[]);
        finds(only_in_named_files, "kv-router/src/lib.rs", "#![forbid(unsafe_code)]\n", &[]);
    }

    #[test]
    fn a_crate_root_that_does_not_forbid_it_is_found() {
        finds(crate_roots_say_so, "kv-router/src/lib.rs", "//! A crate.\n", &[(1, "forbids")]);
        finds(crate_roots_say_so, "kv-router/src/pool.rs", "//! A module.\n", &[]);
    }
}
