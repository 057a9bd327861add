//! How large the cache may grow, and what goes first when it is larger.
//!
//! A model of a gigabyte leaves several: the prepared copy, the traced values, every segment that was ever tried, and what backends
//! compiled from it. All of it can be made again, so what was used longest ago is removed. Measurements (the journal) stay.

use super::{compiled_path, models_path};
use crate::ProfileError;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Bytes that the cache may hold unless told otherwise: 8 GiB.
pub const DEFAULT_LIMIT: u64 = 8 << 30;

/// The environment variable with another limit, such as `500M`, `20G` or `0`.
pub const LIMIT_VARIABLE: &str = "TREFOIL_CACHE_LIMIT";

/// A limit as people write it: a number of bytes, or one with K, M, G or T (powers of 1,024).
///
/// # Errors
/// One line that says what is accepted.
pub fn parse_limit(text: &str) -> Result<u64, String> {
    let trimmed = text.trim().trim_end_matches("iB").trim_end_matches('B');
    let (digits, shift) = match trimmed.char_indices().next_back() {
        Some((at, unit)) => match unit.to_ascii_uppercase() {
            'K' => (&trimmed[..at], 10),
            'M' => (&trimmed[..at], 20),
            'G' => (&trimmed[..at], 30),
            'T' => (&trimmed[..at], 40),
            _ => (trimmed, 0),
        },
        None => (trimmed, 0),
    };
    digits
        .trim()
        .parse::<f64>()
        .ok()
        .map(|number| number * (1u64 << shift) as f64)
        .filter(|bytes| (0.0..1e19).contains(bytes))
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("`{text}` is not a size; write one such as 500M, 8G or 0"))
}

/// A use of the cache. While any process has one, no other removes anything.
#[derive(Debug)]
pub struct CacheUse {
    folder: PathBuf,
    lock: File,
}

/// What [`CacheUse::trim`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trimmed {
    /// Bytes before.
    pub before: u64,
    /// Bytes removed.
    pub removed: u64,
    /// Whether another process uses the cache, so that nothing could be removed.
    pub busy: bool,
}

/// Something that can be removed by itself.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl CacheUse {
    /// Begins to use the cache folder, which is made if need be.
    ///
    /// # Errors
    /// [`ProfileError::Io`] when the folder cannot be made or its lock file not opened.
    pub fn begin(folder: &Path) -> Result<Self, ProfileError> {
        fs::create_dir_all(folder).map_err(ProfileError::io("make the cache folder", folder))?;
        let path = folder.join("lock");
        let open = || -> io::Result<File> {
            let lock = File::options().create(true).truncate(false).write(true).open(&path)?;
            lock.lock_shared()?;
            Ok(lock)
        };
        let lock = open().map_err(ProfileError::io("lock", &path))?;
        Ok(Self { folder: folder.to_owned(), lock })
    }

    /// Removes what was used longest ago until at most `limit` bytes are left, three quarters of them so that not every run has
    /// something to remove. Removes nothing while another process uses the cache, and never a measurement.
    ///
    /// # Errors
    /// [`ProfileError::Io`] when something cannot be listed or removed.
    pub fn trim(&self, limit: u64) -> Result<Trimmed, ProfileError> {
        let mut entries = self.entries()?;
        let before: u64 = entries.iter().map(|entry| entry.bytes).sum();
        if before <= limit {
            return Ok(Trimmed { before, ..Trimmed::default() });
        }
        if self.lock.try_lock().is_err() {
            self.lock.lock_shared().map_err(ProfileError::io("lock", &self.folder))?;
            return Ok(Trimmed { before, removed: 0, busy: true });
        }
        // Another process may have removed something, or used it, before the folder was locked.
        let listed = self.entries();
        if listed.is_err() {
            self.lock.lock_shared().map_err(ProfileError::io("lock", &self.folder))?;
        }
        entries = listed?;
        let before: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.sort_by_key(|entry| entry.used);
        let mut left = before;
        let mut result = Ok(());
        for entry in entries {
            if left <= limit / 4 * 3 {
                break;
            }
            result = remove(&entry.path).map_err(ProfileError::io("remove", &entry.path));
            if result.is_err() {
                break;
            }
            left -= entry.bytes;
        }
        self.lock.lock_shared().map_err(ProfileError::io("lock", &self.folder))?;
        result.map(|()| Trimmed { before, removed: before - left, busy: false })
    }

    /// Bytes of what [`CacheUse::trim`] may remove: compiled blobs, and prepared models with their segments.
    ///
    /// # Errors
    /// [`ProfileError::Io`] when something cannot be listed.
    pub fn bytes(&self) -> Result<u64, ProfileError> {
        Ok(self.entries()?.iter().map(|entry| entry.bytes).sum())
    }

    /// Compiled blobs one by one; the segments of a model at a granularity; the rest of a prepared model.
    fn entries(&self) -> Result<Vec<Entry>, ProfileError> {
        let mut entries = Vec::new();
        for backend in children(&compiled_path(&self.folder))? {
            for blob in children(&backend)? {
                entries.push(entry(blob, &[])?);
            }
        }
        for model in children(&models_path(&self.folder))? {
            for inputs in children(&model)? {
                let folders = children(&inputs.join("segments"))?;
                let mut rest = entry(inputs, &folders)?;
                for folder in folders {
                    let segments = entry(folder, &[])?;
                    // Segments are nothing without their model, so they go before it.
                    rest.used = rest.used.max(segments.used);
                    entries.push(segments);
                }
                entries.push(rest);
            }
        }
        Ok(entries)
    }
}

/// What is in a folder; nothing if there is none.
fn children(folder: &Path) -> Result<Vec<PathBuf>, ProfileError> {
    let list = || -> io::Result<Vec<PathBuf>> { fs::read_dir(folder)?.map(|child| Ok(child?.path())).collect() };
    match list() {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(Vec::new()),
        listed => listed.map_err(ProfileError::io("list", folder)),
    }
}

/// A file or folder with all below it, but for what is an entry of its own.
fn entry(path: PathBuf, except: &[PathBuf]) -> Result<Entry, ProfileError> {
    let mut found = Entry { bytes: 0, used: SystemTime::UNIX_EPOCH, path };
    let mut waiting = vec![found.path.clone()];
    while let Some(path) = waiting.pop() {
        if except.contains(&path) {
            continue;
        }
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => waiting.extend(children(&path)?),
            Ok(metadata) => {
                found.bytes += on_disk(&metadata);
                // Most file systems note the first reading after a change, which is when it matters.
                let times = [metadata.modified(), metadata.accessed()];
                found.used = times.into_iter().flatten().fold(found.used, SystemTime::max);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(ProfileError::io("look at", &path)(error)),
        }
    }
    Ok(found)
}

/// A file's share of the disk: one that has several names counts once over all of them.
fn on_disk(metadata: &Metadata) -> u64 {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        metadata.blocks() * 512 / metadata.nlink().max(1)
    }
    #[cfg(not(unix))]
    metadata.len()
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A file of 40 KiB, last used that many days ago.
    fn put(root: &Path, name: &str, days: u64) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, vec![1u8; 40 << 10]).unwrap();
        let time = SystemTime::now() - Duration::from_secs(days * 86_400);
        let times = fs::FileTimes::new().set_modified(time).set_accessed(time);
        File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
    }

    fn filled() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, days) in [
            ("compiled/openvino/old/model.blob", 9),
            ("compiled/openvino/new/model.blob", 1),
            ("models/one/inputs/prepared/model.onnx", 99),
            ("models/one/inputs/segments/fused/a.onnx", 7),
            ("models/two/inputs/prepared/model.onnx", 2),
            ("journal.jsonl", 99),
            ("video/artefact.trefoil", 99),
        ] {
            put(folder.path(), name, days);
        }
        folder
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_measurements_stay() {
        let folder = filled();
        let at = |name: &str| folder.path().join(name).exists();
        let cache = CacheUse::begin(folder.path()).unwrap();
        let total = 5 * (40 << 10);
        assert_eq!(cache.bytes().unwrap(), total);
        assert_eq!(cache.trim(total).unwrap(), Trimmed { before: total, removed: 0, busy: false });
        // One byte too many: down to three quarters, so two of five go.
        assert_eq!(cache.trim(total - 1).unwrap().removed, 2 * (40 << 10));
        assert!(!at("compiled/openvino/old") && !at("models/one/inputs/segments/fused"));
        assert!(at("models/one/inputs/prepared/model.onnx"), "a model is used as long as its segments are");
        assert!(at("compiled/openvino/new/model.blob") && at("models/two/inputs/prepared/model.onnx"));
        assert_eq!(cache.trim(3 * (40 << 10) - 1).unwrap().removed, 40 << 10);
        assert!(!at("models/one/inputs") && at("models/two/inputs"));
        cache.trim(0).unwrap();
        assert_eq!(cache.bytes().unwrap(), 0);
        assert!(at("journal.jsonl") && at("video/artefact.trefoil"));
    }

    #[test]
    fn nothing_is_removed_while_another_uses_it() {
        let folder = filled();
        let (mine, other) = (CacheUse::begin(folder.path()).unwrap(), CacheUse::begin(folder.path()).unwrap());
        let trimmed = mine.trim(0).unwrap();
        assert!(trimmed.busy && trimmed.removed == 0 && mine.bytes().unwrap() == trimmed.before);
        drop(other);
        assert!(!mine.trim(0).unwrap().busy);
        // The lock is shared again afterwards.
        let _second = CacheUse::begin(folder.path()).unwrap();
    }

    #[test]
    fn an_empty_or_missing_cache_is_fine() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CacheUse::begin(&folder.path().join("not/yet")).unwrap();
        assert_eq!(cache.trim(0).unwrap(), Trimmed::default());
    }

    #[test]
    fn sizes_as_people_write_them() {
        assert_eq!(parse_limit("0"), Ok(0));
        assert_eq!(parse_limit("500M"), Ok(500 << 20));
        assert_eq!(parse_limit("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_limit("12"), Ok(12));
        for bad in ["", "G", "-1", "ten", "1e30T", "NaN"] {
            assert!(parse_limit(bad).unwrap_err().contains("is not a size"), "{bad}");
        }
    }
}
