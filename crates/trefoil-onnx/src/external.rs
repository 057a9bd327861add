//! External data: finding, mapping and bounding the files that a model's constants lie in.

use crate::OnnxError;
use crate::proto::TensorProto;
use bytes::Bytes;
use memmap2::Mmap;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use trefoil_files::open_regular;

/// External files smaller than this are identified by their contents, larger ones by size and modification time:
/// hashing many gigabytes at every start would cost more than it protects from.
const HASHED_BELOW: u64 = 64 << 20;

/// Maps a file read-only as shared bytes.
pub(crate) fn map(path: &Path) -> std::io::Result<Bytes> {
    let file = open_regular(path)?;
    let metadata = file.metadata()?;
    if metadata.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private to this process. Another process that truncates the file while it is
    // mapped can make reads fail; as with every loader that maps weights, models must not be rewritten in place while in use.
    let mapped = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(mapped))
}

struct MappedFile {
    path: PathBuf,
    contents: Bytes,
    modified: u64,
}

/// The external data files of one model, each mapped once.
pub(crate) struct ExternalFiles {
    folder: PathBuf,
    files: BTreeMap<String, MappedFile>,
}

impl ExternalFiles {
    /// For a model that lies in `folder`.
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), files: BTreeMap::new() }
    }

    /// The contents of an external tensor; `want` is the length its type and shape ask for.
    pub(crate) fn slice(&mut self, tensor: &TensorProto, want: Option<u64>) -> Result<Bytes, OnnxError> {
        let name = tensor.name();
        let entry = |key: &str| {
            tensor
                .external_data
                .iter()
                .find(|entry| entry.key() == key)
                .map(super::proto::StringStringEntryProto::value)
        };
        let bad = |reason: String| OnnxError::Constant { tensor: name.to_owned(), reason };
        let number = |key: &str| match entry(key) {
            None | Some("") => Ok(None),
            Some(text) => text
                .parse::<u64>()
                .map(Some)
                .map_err(|_| bad(format!("external data {key} `{text}` is not a number of bytes"))),
        };
        let location = entry("location").ok_or_else(|| bad("is external but names no location".into()))?;
        let offset = number("offset")?.unwrap_or(0);
        let file = self.open(name, location)?;
        let size = file.contents.len() as u64;
        let length = match (number("length")?, want) {
            (Some(length), Some(want)) if length != want => {
                return Err(bad(format!(
                    "external data has {length} bytes where its type and shape {:?} need {want}",
                    tensor.dims
                )));
            }
            (Some(length), _) | (None, Some(length)) => length,
            (None, None) => size.saturating_sub(offset),
        };
        let end = offset.saturating_add(length);
        if end > size {
            return Err(OnnxError::ExternalRange {
                tensor: name.to_owned(),
                file: file.path.display().to_string(),
                offset,
                end,
                size,
            });
        }
        Ok(file.contents.slice(offset as usize..end as usize))
    }

    /// Name, size and contents (or modification time) of every file used, for the model's fingerprint.
    pub(crate) fn identify(&self, hash: &mut Sha256) {
        for (location, file) in &self.files {
            let size = file.contents.len() as u64;
            hash.update((location.len() as u64).to_le_bytes());
            hash.update(location);
            hash.update(size.to_le_bytes());
            if size < HASHED_BELOW {
                hash.update(Sha256::digest(&file.contents));
            } else {
                hash.update(file.modified.to_le_bytes());
            }
        }
    }

    /// The file a mapped slice came from, as `(location, offset)`, if it came from one.
    pub(crate) fn origin(&self, contents: &Bytes) -> Option<(&str, u64)> {
        let start = contents.as_ptr() as usize;
        self.files.iter().find_map(|(location, file)| {
            let base = file.contents.as_ptr() as usize;
            let inside = start >= base && start + contents.len() <= base + file.contents.len();
            inside.then(|| (location.as_str(), (start - base) as u64))
        })
    }

    fn open(&mut self, tensor: &str, location: &str) -> Result<&MappedFile, OnnxError> {
        if !self.files.contains_key(location) {
            let file = self.map_checked(tensor, location)?;
            self.files.insert(location.to_owned(), file);
        }
        Ok(&self.files[location])
    }

    fn map_checked(&self, tensor: &str, location: &str) -> Result<MappedFile, OnnxError> {
        let escape = || OnnxError::ExternalEscape { tensor: tensor.to_owned(), location: location.to_owned() };
        let relative = Path::new(location);
        // Lexically inside first, so that a refused path is not even looked at.
        if location.is_empty()
            || !relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
        {
            return Err(escape());
        }
        let path = self.folder.join(relative);
        let missing = |error: std::io::Error| OnnxError::ExternalMissing {
            tensor: tensor.to_owned(),
            file: path.display().to_string(),
            reason: error.to_string(),
        };
        // Then for real: a symbolic link may still lead out.
        let resolved = path.canonicalize().map_err(missing)?;
        let folder = self.folder.canonicalize().map_err(missing)?;
        if !resolved.starts_with(&folder) {
            return Err(escape());
        }
        let contents = map(&resolved).map_err(missing)?;
        let modified = std::fs::metadata(&resolved)
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
            .map_or(0, |age| age.as_nanos() as u64);
        Ok(MappedFile { path, contents, modified })
    }
}
