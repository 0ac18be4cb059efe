//! Request traces: Mooncake's JSON lines, plain or gzip.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;
use serde_json::{Map, Value};
use thiserror::Error;

/// Tokens of one `hash_ids` entry in Mooncake's traces.
const BLOCK_TOKENS: u64 = 512;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival, in milliseconds since the trace began.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Ids of the prompt's *full* chunks, first to last; equal ids stand for equal prefixes.
    ///
    /// A last, partly filled chunk is left out: its content changes with the next token, so no cache keeps it.
    pub chunks: Vec<u64>,
}

/// A request trace in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// File name, for reports.
    pub name: String,
    /// Tokens in a chunk.
    pub chunk_tokens: u64,
    /// Requests in the order of the file.
    pub requests: Vec<Request>,
}

/// How much of a file is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceLimits {
    /// Requests read; the rest of the file is ignored.
    pub requests_max: usize,
    /// Longest line accepted, in bytes.
    pub line_bytes_max: u64,
    /// Chunk ids accepted in all; more is an error.
    pub chunks_max: usize,
}

impl Default for TraceLimits {
    /// A million requests, lines of 4 MiB, 64 Mi chunk ids (512 MiB of memory).
    fn default() -> Self {
        Self { requests_max: 1_000_000, line_bytes_max: 4 << 20, chunks_max: 64 << 20 }
    }
}

/// Why a trace cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{}: reading the trace failed after line {line}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Lines read before.
        line: usize,
        /// The system's words.
        source: io::Error,
    },
    /// A line is longer than allowed.
    #[error("{}, line {line}: longer than {bytes_max} bytes: is this a JSON-lines trace?", path.display())]
    LineLength {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The limit.
        bytes_max: u64,
    },
    /// A line is not a JSON object.
    #[error("{}, line {line}: not a JSON object: give one request a line", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A field is missing or has an impossible value.
    #[error("{}, line {line}: field `{field}` {problem}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// Its name.
        field: &'static str,
        /// What is wrong and what was expected.
        problem: String,
    },
    /// More chunk ids than the limit.
    #[error("{}, line {line}: more than {chunks_max} chunk ids: replay fewer requests", path.display())]
    TooManyChunks {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The limit.
        chunks_max: usize,
    },
    /// No request at all.
    #[error("{}: holds no request", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

impl Trace {
    /// Reads a Mooncake trace: `{"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}` a line,
    /// one id for each block of 512 tokens. gzip is told by its magic bytes. Unknown fields and empty lines are ignored.
    pub fn load(path: &Path, limits: TraceLimits) -> Result<Self, TraceError> {
        let read_error =
            |line| move |source| TraceError::Read { path: path.to_path_buf(), line, source };
        let mut input = open(path).map_err(read_error(0))?;
        let mut requests = Vec::new();
        let mut chunks = 0;
        let mut text = Vec::new();
        for line in 1.. {
            if requests.len() >= limits.requests_max {
                break;
            }
            text.clear();
            let mut bounded = input.by_ref().take(limits.line_bytes_max.saturating_add(1));
            let bytes = bounded.read_until(b'\n', &mut text).map_err(read_error(line - 1))?;
            if bytes == 0 {
                break;
            }
            if bytes as u64 > limits.line_bytes_max {
                let bytes_max = limits.line_bytes_max;
                return Err(TraceError::LineLength { path: path.to_path_buf(), line, bytes_max });
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            let request = parse(path, line, &text)?;
            chunks += request.chunks.len();
            if chunks > limits.chunks_max {
                let chunks_max = limits.chunks_max;
                return Err(TraceError::TooManyChunks {
                    path: path.to_path_buf(),
                    line,
                    chunks_max,
                });
            }
            requests.push(request);
        }
        if requests.is_empty() {
            return Err(TraceError::Empty { path: path.to_path_buf() });
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, chunk_tokens: BLOCK_TOKENS, requests })
    }
}

fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(File::open(path)?);
    if file.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(BufReader::new(MultiGzDecoder::new(file))));
    }
    Ok(Box::new(file))
}

fn parse(path: &Path, line: usize, text: &[u8]) -> Result<Request, TraceError> {
    let object: Map<String, Value> = serde_json::from_slice(text)
        .map_err(|source| TraceError::Json { path: path.to_path_buf(), line, source })?;
    let fail =
        |field, problem| TraceError::Field { path: path.to_path_buf(), line, field, problem };
    let number = |field| {
        let value = object.get(field).ok_or_else(|| fail(field, "is missing".to_owned()))?;
        value.as_u64().ok_or_else(|| {
            fail(field, format!("is {}, give a whole number that is not negative", brief(value)))
        })
    };
    let input_tokens = number("input_length")?;
    let ids = object.get("hash_ids").ok_or_else(|| fail("hash_ids", "is missing".to_owned()))?;
    let ids = ids
        .as_array()
        .ok_or_else(|| fail("hash_ids", format!("is {}, give a list of ids", brief(ids))))?;
    let expected = input_tokens.div_ceil(BLOCK_TOKENS);
    if ids.len() as u64 != expected {
        let problem = format!(
            "has {} ids for {input_tokens} tokens, give {expected} (one for each {BLOCK_TOKENS} tokens)",
            ids.len()
        );
        return Err(fail("hash_ids", problem));
    }
    let full = usize::try_from(input_tokens / BLOCK_TOKENS).unwrap_or(usize::MAX);
    let chunks = ids.iter().take(full).map(|id| {
        id.as_u64()
            .ok_or_else(|| fail("hash_ids", format!("holds {}, give whole numbers", brief(id))))
    });
    Ok(Request {
        timestamp_ms: number("timestamp")?,
        input_tokens,
        output_tokens: number("output_length")?,
        chunks: chunks.collect::<Result<_, _>>()?,
    })
}

/// A value in an error message: short, whatever the file holds.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use tempfile::NamedTempFile;

    use super::*;

    const TWO: &str = r#"{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}

{"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [0, 7], "extra": null}
"#;

    fn load(text: &[u8], limits: TraceLimits) -> Result<Trace, TraceError> {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        Trace::load(file.path(), limits)
    }

    #[track_caller]
    fn refused(text: &str, words: &[&str]) {
        let message = load(text.as_bytes(), TraceLimits::default()).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} does not name {word:?}");
        }
    }

    #[test]
    fn plain_and_gzip_read_alike_and_partial_chunks_are_left_out() {
        let plain = load(TWO.as_bytes(), TraceLimits::default()).unwrap();
        assert_eq!(plain.requests.len(), 2);
        assert_eq!(plain.requests[0].chunks, [0, 1], "1100 tokens fill two chunks of 512");
        assert_eq!(plain.requests[1].chunks, [0, 7]);
        assert_eq!(plain.requests[1].timestamp_ms, 3000);
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(TWO.as_bytes()).unwrap();
        let zipped = load(&encoder.finish().unwrap(), TraceLimits::default()).unwrap();
        assert_eq!(zipped.requests, plain.requests);
    }

    #[test]
    fn errors_name_line_and_field() {
        refused("", &["holds no request"]);
        refused("\n[1]", &["line 2", "not a JSON object"]);
        refused(
            r#"{"input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
            &["line 1", "`timestamp`"],
        );
        refused(
            r#"{"timestamp": -3, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
            &["`timestamp`", "-3"],
        );
        refused(
            r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}"#,
            &["line 1", "`hash_ids`", "600 tokens", "give 2"],
        );
        refused(
            r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": ["x", 2]}"#,
            &["`hash_ids`", "\"x\""],
        );
    }

    #[test]
    fn limits_bound_lines_requests_and_chunks() {
        let limits = TraceLimits { line_bytes_max: 20, ..TraceLimits::default() };
        assert!(matches!(
            load(TWO.as_bytes(), limits),
            Err(TraceError::LineLength { line: 1, .. })
        ));
        let limits = TraceLimits { requests_max: 1, ..TraceLimits::default() };
        assert_eq!(load(TWO.as_bytes(), limits).unwrap().requests.len(), 1);
        let limits = TraceLimits { chunks_max: 3, ..TraceLimits::default() };
        assert!(matches!(
            load(TWO.as_bytes(), limits),
            Err(TraceError::TooManyChunks { line: 3, .. })
        ));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Trace::load(Path::new("/nonexistent/trace.jsonl"), TraceLimits::default());
        assert!(error.unwrap_err().to_string().contains("/nonexistent/trace.jsonl"));
    }
}
