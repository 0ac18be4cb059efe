//! Why a command ends without success: one line and an exit code.

use std::{error::Error, fmt::Display, io::Write, process::ExitCode};

use kv_connector::{Config, EngineError, replay::ReplayError};
use kv_tiers::TierError;

/// The line to print and the code to exit with: 2 if the caller can mend it, else 1.
#[derive(Debug)]
pub(crate) struct Failure {
    line: String,
    code: u8,
}

impl Failure {
    /// The caller gave something impossible.
    pub(crate) fn usage(line: impl Display) -> Self {
        Self { line: line.to_string(), code: 2 }
    }

    /// The command was right and what it did was not.
    pub(crate) fn failed(line: impl Display) -> Self {
        Self { line: line.to_string(), code: 1 }
    }

    /// The directories cannot be opened; if an engine has them, says where it does not answer.
    pub(crate) fn held(error: EngineError, config: &Config) -> Self {
        let hint = match &config.engine.socket {
            Some(socket) => format!("nobody answers on its socket {}", socket.display()),
            None => "its configuration names no socket to ask it on".to_owned(),
        };
        Self::locked(error, &format!("{hint}: close the engine first"))
    }

    /// Likewise, of a command that needs the directories for itself, whoever answers.
    pub(crate) fn busy(error: EngineError, config: &Config) -> Self {
        let socket = config.engine.socket.as_ref();
        let socket = socket.map(|path| format!(" (its socket: {})", path.display()));
        Self::locked(error, &format!("close the engine first{}", socket.unwrap_or_default()))
    }

    fn locked(error: EngineError, hint: &str) -> Self {
        let EngineError::Tier { source: TierError::Locked { .. }, .. } = &error else {
            return error.into();
        };
        Self::usage(format!("{}; {hint}", chain(&error)))
    }

    /// What to print.
    pub(crate) fn line(&self) -> &str {
        &self.line
    }

    pub(crate) fn report(self) -> ExitCode {
        // A closed standard error leaves the exit code to speak.
        let _ = writeln!(std::io::stderr(), "kvbraid: {}", self.line.replace('\n', " "));
        ExitCode::from(self.code)
    }
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        Self { code: if error.is_usage() { 2 } else { 1 }, line: chain(&error) }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        ReplayError::from(error).into()
    }
}

/// An error and what caused it, in one line.
fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line
}
