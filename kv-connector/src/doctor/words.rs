//! The words of a command line, as a shell would cut them, and the flags among them.

/// A command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Words(Vec<String>);

impl Words {
    /// Cuts at blanks outside of quotes; at NULs if there are any, as in `/proc/PID/cmdline`.
    pub(super) fn new(text: &str) -> Self {
        if text.contains('\0') {
            return Self(text.split('\0').filter(|it| !it.is_empty()).map(str::to_owned).collect());
        }
        let (mut words, mut word) = (Vec::new(), None::<String>);
        let mut quote = None;
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match (c, quote) {
                ('\\', None | Some('"')) => match chars.next() {
                    Some('\n') | None => {}
                    Some(next) => word.get_or_insert_default().push(next),
                },
                ('\'' | '"', None) => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (_, Some(open)) if c == open => quote = None,
                (_, None) if c.is_whitespace() => words.extend(word.take()),
                _ => word.get_or_insert_default().push(c),
            }
        }
        words.extend(word);
        Self(words)
    }

    /// Whether a flag stands there.
    pub(super) fn has(&self, flag: &str) -> bool {
        self.0.iter().any(|word| word == flag || value_in(word, flag).is_some())
    }

    /// The last value of a flag.
    pub(super) fn value(&self, flag: &str) -> Option<&str> {
        self.values(flag).pop()
    }

    /// All values of a flag that may be repeated.
    pub(super) fn values(&self, flag: &str) -> Vec<&str> {
        let at = |(place, word): (usize, &'_ String)| -> Option<usize> {
            (word == flag && place + 1 < self.0.len()).then_some(place + 1)
        };
        let words = self.0.iter().enumerate();
        words
            .filter_map(|(place, word)| {
                value_in(word, flag).or_else(|| at((place, word)).map(|next| &*self.0[next]))
            })
            .collect()
    }
}

/// The value in `--flag=value`.
fn value_in<'a>(word: &'a str, flag: &str) -> Option<&'a str> {
    word.strip_prefix(flag)?.strip_prefix('=')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_cut_as_a_shell_does() {
        let words =
            Words::new("lmcache server --a 1 \\\n --b='{\"x\": \"y z\"}' --c \"q\\\"r\" --d");
        assert_eq!(words.value("--a"), Some("1"));
        assert_eq!(words.value("--b"), Some("{\"x\": \"y z\"}"));
        assert_eq!(words.value("--c"), Some("q\"r"));
        assert!(words.has("--d") && words.value("--d").is_none());
        assert!(!words.has("--e") && !words.has("--"));
    }

    #[test]
    fn a_running_command_line_is_cut_at_its_nuls() {
        let words = Words::new("lmcache\0--a\0one two\0--a\0three\0");
        assert_eq!(words.values("--a"), ["one two", "three"]);
    }
}
