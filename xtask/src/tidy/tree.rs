//! The files of the repository, read once.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::mask::mask;

/// A text file, its path relative to the root with `/` between the parts.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
    /// For Rust: the text with comments and literals blanked out, same length; else empty.
    pub(crate) code: String,
}

impl SourceFile {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let code = if path.ends_with(".rs") { mask(text) } else { String::new() };
        Self { path: path.to_owned(), text: text.to_owned(), code }
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The crate's directory, if the file lies in one of ours.
    pub(crate) fn package(&self) -> Option<&str> {
        let (first, _) = self.path.split_once('/')?;
        (first == "xtask" || first.starts_with("kv-")).then_some(first)
    }

    /// The lines of the code before the first `#[cfg(test)]`, counted from one.
    pub(crate) fn product_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let is_product =
            self.package().is_some_and(|package| self.path[package.len()..].starts_with("/src/"));
        let lines = self.code.lines().enumerate().map(|(index, line)| (index + 1, line));
        lines.take_while(move |(_, line)| {
            is_product && !line.trim_start().starts_with("#[cfg(test)]")
        })
    }
}

/// Everything that is not ignored and is text.
pub(crate) struct Tree {
    pub(crate) files: Vec<SourceFile>,
    /// Names in the root, directories included.
    pub(crate) top_level: Vec<String>,
}

impl Tree {
    /// Reads the tree below `root`, without what the root's `.gitignore` names.
    ///
    /// # Errors
    /// If a directory or file cannot be read.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let ignored = fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
        let mut tree = Self { files: Vec::new(), top_level: Vec::new() };
        tree.walk(root, "", &ignored.lines().collect::<Vec<_>>())?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        tree.top_level.sort();
        Ok(tree)
    }

    fn walk(&mut self, root: &Path, below: &str, ignored: &[&str]) -> Result<()> {
        let directory = root.join(below);
        for entry in
            fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?
        {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if below.is_empty() { name.clone() } else { format!("{below}/{name}") };
            if name == ".git" || ignored.contains(&format!("/{path}").as_str()) {
                continue;
            }
            if below.is_empty() {
                self.top_level.push(name);
            }
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.walk(root, &path, ignored)?;
            } else if kind.is_file()
                && let Ok(text) = String::from_utf8(
                    fs::read(entry.path()).with_context(|| format!("read {path}"))?,
                )
            {
                self.files.push(SourceFile::new(&path, &text));
            }
        }
        Ok(())
    }
}
