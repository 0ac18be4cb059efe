//! Rust text with comments and literals blanked out, so that braces and words can be trusted.

/// `source` with every byte of comments, strings and characters replaced by a space; line breaks stay.
pub(crate) fn mask(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = opaque_end(bytes, at).unwrap_or(at);
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Where the comment or literal that begins at `at` ends; none if none begins there.
fn opaque_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    match rest {
        [b'/', b'/', ..] => {
            Some(at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()))
        }
        [b'/', b'*', ..] => Some(at + block_comment(rest)),
        [b'"', ..] => Some(at + quoted(rest)),
        [b'r', b'"' | b'#', ..] if starts_literal(bytes, at) => {
            raw_string(rest).map(|length| at + length)
        }
        [b'\'', b'\\', ..] => Some(at + quoted(rest)),
        [b'\'', next, ..] => {
            // A lifetime has no closing quote right after its first character.
            let width = utf8_width(*next);
            (rest.get(1 + width) == Some(&b'\'')).then_some(at + width + 2)
        }
        _ => None,
    }
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// The length of a string or character that begins with its quote, escapes honoured.
fn quoted(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != rest[0] {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

fn raw_string(rest: &[u8]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
    if rest.get(1 + hashes) != Some(&b'"') {
        return None; // a raw identifier
    }
    let close: Vec<u8> = [b'"'].into_iter().chain(std::iter::repeat_n(b'#', hashes)).collect();
    let body = &rest[hashes + 2..];
    let length = body.windows(close.len()).position(|window| window == close).unwrap_or(body.len());
    Some((hashes + 2 + length + close.len()).min(rest.len()))
}

/// Whether an `r` at `at` may open a raw string: no identifier before it, but perhaps the `b` or `c` of its prefix.
fn starts_literal(bytes: &[u8], at: usize) -> bool {
    let is_word = |index: usize| bytes[index].is_ascii_alphanumeric() || bytes[index] == b'_';
    let before = if at > 0 && matches!(bytes[at - 1], b'b' | b'c') { at - 1 } else { at };
    before == 0 || !is_word(before - 1)
}

fn utf8_width(first: u8) -> usize {
    match first {
        0xF0.. => 4,
        0xE0.. => 3,
        0xC0.. => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::mask;

    #[track_caller]
    fn check(source: &str, expected: &str) {
        assert_eq!(mask(source), expected);
    }

    #[test]
    fn comments_vanish_and_lines_stay() {
        check("a // {\nb", "a     \nb");
        check("a /* { /* } */ \n */ b", "a              \n    b");
    }

    #[test]
    fn strings_and_characters_vanish() {
        check(r#"f("{\"}", '{', '\'', b'}')"#, "f(      ,    ,     , b   )");
        check("r#\"{\"#; r\"}\"; br\"{\" x", "      ;     ; b     x");
    }

    #[test]
    fn lifetimes_and_raw_identifiers_stay() {
        check("fn r#fn<'a>(x: &'a str) {}", "fn r#fn<'a>(x: &'a str) {}");
        check("for\"x\"", "for   ");
    }
}
