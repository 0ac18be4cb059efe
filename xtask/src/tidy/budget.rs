//! Budgets of size: what a reader can hold in the head at once.

use super::{
    Finding,
    tree::{SourceFile, Tree},
};

const FILE_LINES_AIM: usize = 400;
const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
const LIB_LINES_MAX: usize = 80;

/// A Rust file, tests included, has at most 600 lines.
pub(crate) fn file_lines(file: &SourceFile, findings: &mut Vec<Finding>) {
    let lines = file.text.lines().count();
    if file.is_rust() && lines > FILE_LINES_MAX {
        findings.push(Finding::new(
            &file.path,
            0,
            format!("{lines} lines; at most {FILE_LINES_MAX}: one idea a file"),
        ));
    }
}

/// Files above the aim, which are worth a look but no failure.
pub(crate) fn notes(tree: &Tree) -> Vec<String> {
    let long = |file: &&SourceFile| file.is_rust() && file.text.lines().count() > FILE_LINES_AIM;
    let note = |file: &SourceFile| {
        format!("{}: {} lines, aim {FILE_LINES_AIM}", file.path, file.text.lines().count())
    };
    tree.files.iter().filter(long).map(note).collect()
}

/// `lib.rs` says what a crate is; it is no place for code.
pub(crate) fn lib_lines(file: &SourceFile, findings: &mut Vec<Finding>) {
    let lines = file.text.lines().count();
    if file.path.ends_with("/src/lib.rs") && lines > LIB_LINES_MAX {
        findings.push(Finding::new(
            &file.path,
            0,
            format!("{lines} lines; a lib.rs has at most {LIB_LINES_MAX}"),
        ));
    }
}

/// A function, from its `fn` to its closing brace, has at most 70 lines.
pub(crate) fn function_lines(file: &SourceFile, findings: &mut Vec<Finding>) {
    for function in functions(&file.code) {
        if function.lines > FUNCTION_LINES_MAX {
            let what = format!(
                "`{}` has {} lines; at most {FUNCTION_LINES_MAX}",
                function.name, function.lines
            );
            findings.push(Finding::new(&file.path, function.line, what));
        }
    }
}

struct Function<'a> {
    name: &'a str,
    line: usize,
    lines: usize,
}

/// The functions with bodies in masked code.
fn functions(code: &str) -> Vec<Function<'_>> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if at > 0 && is_word(code.as_bytes()[at - 1]) {
            continue;
        }
        let rest = &code[at + 3..];
        let name = &rest[..rest.bytes().take_while(|byte| is_word(*byte) || *byte == b'#').count()];
        if name.is_empty() {
            continue;
        }
        if let Some(end) = body_end(rest) {
            let line = 1 + code[..at].matches('\n').count();
            found.push(Function { name, line, lines: 1 + rest[..end].matches('\n').count() });
        }
    }
    found
}

/// Where the body of the function whose signature begins `rest` ends; none if it has no body.
fn body_end(rest: &str) -> Option<usize> {
    let (mut nested, mut braces) = (0_usize, 0_usize);
    for (at, byte) in rest.bytes().enumerate() {
        match byte {
            b'(' | b'[' if braces == 0 => nested += 1,
            b')' | b']' if braces == 0 => nested = nested.checked_sub(1)?,
            b';' if braces == 0 && nested == 0 => return None,
            b'{' if nested == 0 => braces += 1,
            b'}' if nested == 0 => {
                braces = braces.checked_sub(1)?;
                if braces == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::finds;

    #[test]
    fn a_long_file_is_found() {
        finds(file_lines, "kv-chunk/src/a.rs", &"\n".repeat(601), &[(0, "601 lines")]);
        finds(file_lines, "kv-chunk/src/a.rs", &"\n".repeat(600), &[]);
        finds(file_lines, "README.md", &"\n".repeat(601), &[]);
    }

    #[test]
    fn a_long_lib_is_found() {
        finds(lib_lines, "kv-chunk/src/lib.rs", &"\n".repeat(81), &[(0, "81 lines")]);
    }

    #[test]
    fn a_long_function_is_found_whatever_its_signature_and_strings() {
        let body = "    x('{', \"{\", [0; 3]); // {\n".repeat(69);
        let long =
            format!("\npub fn long<T>(a: [u8; {{ 2 }}]) -> u8\nwhere T: Copy\n{{\n{body}}}\n");
        finds(function_lines, "a.rs", &long, &[(2, "`long` has 73 lines")]);
        finds(
            function_lines,
            "a.rs",
            &format!("fn fits() {{\n{}}}\n", "    y();\n".repeat(68)),
            &[],
        );
    }

    #[test]
    fn functions_without_bodies_and_function_pointers_are_no_functions() {
        let source = format!("trait T {{ fn a(&self, f: fn (u8)); {} }}", "\n".repeat(90));
        finds(function_lines, "a.rs", &source, &[]);
    }

    #[test]
    fn a_method_ends_at_its_own_brace() {
        let source = format!("impl A {{\nfn a() {{ if b {{ c }} }}\n{}}}\n", "// d\n".repeat(90));
        finds(function_lines, "a.rs", &source, &[]);
    }
}
