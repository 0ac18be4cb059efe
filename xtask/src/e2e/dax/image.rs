//! The guest's root: a cpio archive of the shell, the tools with their libraries, the modules and the test programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::packages::Parts;

const INIT: &str = include_str!("init.sh");
/// Modules that the guest loads, after those that they need.
const MODULES: &[&str] = &["nfit", "nd_pmem", "device_dax", "dax_pmem", "kmem"];
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// Writes the archive and says where. `loading` is a program that loads libraries, the others need none.
pub(super) fn make(
    home: &Path,
    parts: &Parts,
    programs: &[PathBuf],
    loading: &Path,
) -> Result<PathBuf> {
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "lib", "lib64", "modules", "proc", "run", "sys", "tmp"] {
        archive.directory(directory);
    }
    archive.file("init", INIT.as_bytes());
    archive.copy("bin/busybox", &first_of(&parts.tools, &["bin/busybox", "usr/bin/busybox"])?)?;
    let mut libraries = BTreeSet::new();
    for tool in ["ndctl", "daxctl"] {
        let path = parts.tools.join("usr/bin").join(tool);
        archive.copy(&format!("bin/{tool}"), &path)?;
        libraries.extend(libraries_of(&path, &parts.tools)?);
    }
    libraries.extend(libraries_of(loading, &parts.tools)?);
    for library in libraries {
        let name = library.file_name().context("a library has a name")?.display().to_string();
        archive.copy(&format!("lib/{name}"), &library)?;
    }
    archive.copy(LOADER.trim_start_matches('/'), Path::new(LOADER))?;
    let mut order = String::new();
    for (name, bytes) in modules(&parts.modules)? {
        archive.file(&format!("modules/{name}"), &bytes);
        order += &name;
        order.push('\n');
    }
    archive.file("modules/order", order.as_bytes());
    for program in programs.iter().map(PathBuf::as_path).chain([loading]) {
        let name = program.file_name().context("a program has a name")?.display().to_string();
        let name = name.rsplit_once('-').map_or(name.as_str(), |(name, _hash)| name);
        archive.copy(&format!("bin/{name}"), program)?;
    }
    let path = home.join("initramfs");
    fs::write(&path, archive.end()).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

fn first_of(root: &Path, names: &[&str]) -> Result<PathBuf> {
    let mut paths = names.iter().map(|name| root.join(name));
    paths.find(|path| path.is_file()).with_context(|| format!("there is no {}", names[0]))
}

/// What a program loads, from the unpacked packages where they have it, else from the host.
fn libraries_of(program: &Path, tools: &Path) -> Result<Vec<PathBuf>> {
    let places = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
    let places: Vec<String> =
        places.iter().map(|place| tools.join(place).display().to_string()).collect();
    let output = Command::new("ldd")
        .arg(program)
        .env("LD_LIBRARY_PATH", places.join(":"))
        .output()
        .context("run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && !text.contains("not found"), "{text}");
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).filter(|path| path != Path::new(LOADER)).collect())
}

/// The modules, each after those that it needs: file name and content.
fn modules(directory: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let list = directory.join("modules.dep");
    let text = fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
    let needs: BTreeMap<&str, (&str, Vec<&str>)> = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needed)| (module_name(path), (path, needed.split_whitespace().collect())))
        .collect();
    let mut order: Vec<&str> = Vec::new();
    for wanted in MODULES {
        // What the kernel has built in is not listed.
        let Some((path, needed)) = needs.get(wanted) else { continue };
        // A module comes after all that its line names, the last named first.
        for path in needed.iter().rev().chain([path]) {
            if !order.contains(path) {
                order.push(path);
            }
        }
    }
    ensure!(!order.is_empty(), "the kernel has no modules of DAX devices");
    order
        .into_iter()
        .map(|path| Ok((format!("{}.ko", module_name(path)), load(&directory.join(path))?)))
        .collect()
}

fn module_name(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split('.').next().unwrap_or(name)
}

fn load(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).with_context(|| format!("read {}", path.display()));
    }
    let output = Command::new("xz").args(["-d", "-c"]).arg(path).output().context("run xz")?;
    ensure!(output.status.success(), "xz cannot unpack {}", path.display());
    Ok(output.stdout)
}

/// A cpio archive as the kernel reads it ("newc").
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, 0o100_755, content);
    }

    fn copy(&mut self, name: &str, from: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        self.file(name, &content);
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        // inode, mode, owner, group, links, time, size, device (4 fields), length of the name, checksum
        let (size, name_size) = (content.len(), name.len() + 1);
        let inode = self.entries;
        let header = format!(
            "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_size:08x}{0:08x}",
            0, 1
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_kernel_reads() {
        let mut archive = Archive::default();
        archive.file("init", b"hello");
        let bytes = archive.end();
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with("070701000000010000"), "{text}");
        // Header of 110 bytes, name and its end padded to 116, content padded to 8.
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..124], b"hello\0\0\0");
        assert_eq!(&bytes[124..130], b"070701");
        assert!(text.contains("TRAILER!!!") && bytes.len().is_multiple_of(4));
    }

    #[test]
    fn a_module_has_one_name_however_it_is_packed() {
        for path in ["kernel/drivers/dax/kmem.ko.xz", "kmem.ko", "a/b/kmem.ko.zst"] {
            assert_eq!(module_name(path), "kmem");
        }
    }
}
