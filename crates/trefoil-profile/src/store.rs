//! Tensor stores: how tensors travel between processes and stay on disk.
//!
//! A store is a folder of two files. `data.bin` holds raw little-endian row-major bytes, each tensor starting at a
//! multiple of [`TENSOR_ALIGNMENT`]; `index.json` says `{"format":"trefoil-tensors","version":1,"tensors":[{"name",
//! "dtype","shape","offset"}…]}`. Readers map `data.bin`, so that two processes share one copy in memory. The index
//! is written last and the folder is renamed into place, so that a store that can be opened is complete.

use crate::ProfileError;
use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use trefoil_core::tensor::TENSOR_ALIGNMENT;
use trefoil_core::{DataType, HostTensor, TensorInfo};

const FORMAT: &str = "trefoil-tensors";
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    format: String,
    version: u32,
    tensors: Vec<Entry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    #[serde(flatten)]
    info: TensorInfo,
    offset: u64,
}

/// Writes a store: tensors one by one, then [`StoreWriter::finish`]. Dropped unfinished, it leaves nothing behind.
#[derive(Debug)]
pub struct StoreWriter {
    folder: tempfile::TempDir,
    destination: PathBuf,
    data: BufWriter<File>,
    offset: u64,
    tensors: Vec<Entry>,
}

impl StoreWriter {
    /// Starts a store that will be at `destination` (a folder that does not exist yet; its parent is created).
    pub fn create(destination: &Path) -> Result<Self, ProfileError> {
        let parent = destination.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(ProfileError::io("create", parent))?;
        let folder = tempfile::Builder::new()
            .prefix(".tensors-")
            .tempdir_in(parent)
            .map_err(ProfileError::io("create a folder in", parent))?;
        let path = folder.path().join("data.bin");
        let data = BufWriter::new(File::create(&path).map_err(ProfileError::io("create", path))?);
        Ok(Self { folder, destination: destination.to_owned(), data, offset: 0, tensors: Vec::new() })
    }

    /// Appends a tensor under its own name. A name that is there already is skipped: the first one stands.
    pub fn push(&mut self, tensor: &HostTensor) -> Result<(), ProfileError> {
        self.push_as(&tensor.info().name, tensor)
    }

    /// Appends a tensor under `name`.
    pub fn push_as(&mut self, name: &str, tensor: &HostTensor) -> Result<(), ProfileError> {
        if self.tensors.iter().any(|entry| entry.info.name == name) {
            return Ok(());
        }
        let failed = |source| ProfileError::Io { action: "write", path: self.folder.path().join("data.bin"), source };
        let padding = self.offset.next_multiple_of(TENSOR_ALIGNMENT as u64) - self.offset;
        self.data.write_all(&[0; TENSOR_ALIGNMENT][..padding as usize]).map_err(failed)?;
        let offset = self.offset + padding;
        self.data.write_all(tensor.bytes()).map_err(failed)?;
        self.offset = offset + tensor.bytes().len() as u64;
        let info = TensorInfo { name: name.to_owned(), ..tensor.info().clone() };
        self.tensors.push(Entry { info, offset });
        Ok(())
    }

    /// Completes the store and moves it into place. If another process was faster, its store stands.
    pub fn finish(mut self) -> Result<TraceStore, ProfileError> {
        self.data.flush().map_err(ProfileError::io("write", self.folder.path().join("data.bin")))?;
        let index = Index { format: FORMAT.to_owned(), version: VERSION, tensors: std::mem::take(&mut self.tensors) };
        let path = self.folder.path().join("index.json");
        let text = serde_json::to_vec(&index).expect("an index serialises");
        std::fs::write(&path, text).map_err(ProfileError::io("write", path))?;
        publish_folder(self.folder, &self.destination)?;
        TraceStore::open(&self.destination)
    }
}

/// Renames a finished temporary folder to `destination`; keeps what is there if another process was faster.
pub(crate) fn publish_folder(folder: tempfile::TempDir, destination: &Path) -> Result<(), ProfileError> {
    // `TempDir` makes folders private to the user; caches may be shared by a group.
    match std::fs::rename(folder.path(), destination) {
        Ok(()) => {
            let _ = folder.keep();
            Ok(())
        }
        Err(_) if destination.is_dir() => Ok(()),
        Err(source) => Err(ProfileError::Io { action: "rename a folder to", path: destination.to_owned(), source }),
    }
}

/// A complete store, mapped for reading: a traced run's values by name, or any other named tensors.
#[derive(Debug)]
pub struct TraceStore {
    folder: PathBuf,
    entries: BTreeMap<String, Entry>,
    /// `None` when every tensor is empty (an empty file cannot be mapped).
    map: Option<Mmap>,
}

impl TraceStore {
    /// Opens and checks a store.
    ///
    /// # Errors
    /// [`ProfileError::Io`] when a file is missing, [`ProfileError::Format`] when it is damaged.
    pub fn open(folder: &Path) -> Result<Self, ProfileError> {
        let index_path = folder.join("index.json");
        let text = std::fs::read(&index_path).map_err(ProfileError::io("read", &index_path))?;
        let broken =
            |reason: String| ProfileError::Format { path: index_path.clone(), what: "tensor store index", reason };
        let index: Index = serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
        if index.format != FORMAT || index.version != VERSION {
            return Err(broken(format!("it says {} version {}", index.format, index.version)));
        }
        let data_path = folder.join("data.bin");
        let file = File::open(&data_path).map_err(ProfileError::io("read", &data_path))?;
        let length = file.metadata().map_err(ProfileError::io("read", &data_path))?.len();
        let map = if length == 0 {
            None
        } else {
            // SAFETY: stores are complete before they get their name and are never changed afterwards (only removed
            // as a whole, which keeps the mapping alive), so nobody truncates the file under the mapping.
            Some(unsafe { Mmap::map(&file) }.map_err(ProfileError::io("map", &data_path))?)
        };
        let mut entries = BTreeMap::new();
        for entry in index.tensors {
            let end = entry.offset.checked_add(entry.info.bytes());
            if end.is_none_or(|end| end > length && entry.info.bytes() > 0) {
                return Err(broken(format!("tensor {} lies past the end of data.bin ({length} bytes)", entry.info)));
            }
            entries.insert(entry.info.name.clone(), entry);
        }
        Ok(Self { folder: folder.to_owned(), entries, map })
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Names of its tensors, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it holds no tensor.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Type and shape of a tensor.
    pub fn describe(&self, name: &str) -> Option<&TensorInfo> {
        self.entries.get(name).map(|entry| &entry.info)
    }

    /// The mapped bytes of a tensor; aligned to [`TENSOR_ALIGNMENT`].
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let entry = self.entries.get(name)?;
        let length = entry.info.bytes() as usize;
        let offset = entry.offset as usize;
        match &self.map {
            Some(map) if length > 0 => map.get(offset..offset + length),
            _ => Some(&[]),
        }
    }

    /// A copy of a tensor in memory of its own.
    pub fn load(&self, name: &str) -> Option<HostTensor> {
        let info = self.describe(name)?.clone();
        if info.dtype == DataType::Opaque {
            return None;
        }
        HostTensor::from_bytes(info, self.bytes(name)?).ok()
    }
}

impl trefoil_onnx::Values for TraceStore {
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.describe(name).cloned()
    }

    fn tensor(&self, name: &str) -> Option<HostTensor> {
        self.load(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(folder: &Path) -> TraceStore {
        let mut writer = StoreWriter::create(&folder.join("store")).unwrap();
        writer.push(&HostTensor::from_f32("odd", [3u64], &[1.0, -2.0, f32::NAN])).unwrap();
        writer.push(&HostTensor::zeros(TensorInfo::new("none", DataType::I64, [0u64, 4]))).unwrap();
        writer.push(&HostTensor::from_i64("ids", [2u64, 1], &[7, -1])).unwrap();
        writer.push(&HostTensor::from_i64("ids", [1u64], &[9])).unwrap();
        writer.finish().unwrap()
    }

    #[test]
    fn tensors_come_back_aligned_and_bit_exact() {
        let folder = tempfile::tempdir().unwrap();
        let store = sample(folder.path());
        assert_eq!(store.names().collect::<Vec<_>>(), ["ids", "none", "odd"]);
        let odd = store.load("odd").unwrap();
        assert_eq!(odd.bytes(), HostTensor::from_f32("x", [3u64], &[1.0, -2.0, f32::NAN]).bytes());
        assert_eq!(store.load("ids").unwrap().to_f64(), [7.0, -1.0], "the first tensor of a name stands");
        assert_eq!(store.describe("none").unwrap().shape, [0, 4]);
        assert!(store.load("none").unwrap().bytes().is_empty());
        for name in ["odd", "ids"] {
            assert_eq!(store.bytes(name).unwrap().as_ptr() as usize % TENSOR_ALIGNMENT, 0);
        }
        assert!(store.load("absent").is_none());
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["store"], "no temporary folder is left");
    }

    #[test]
    fn damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = sample(folder.path()).folder().to_owned();
        let data = path.join("data.bin");
        let bytes = std::fs::read(&data).unwrap();
        std::fs::write(&data, &bytes[..bytes.len() - 8]).unwrap();
        let error = TraceStore::open(&path).unwrap_err().to_string();
        assert!(error.contains("ids i64[2, 1]") && error.contains("past the end"), "{error}");
        std::fs::write(path.join("index.json"), "{").unwrap();
        assert!(TraceStore::open(&path).unwrap_err().to_string().contains("no tensor store index"));
        assert!(TraceStore::open(&folder.path().join("nowhere")).unwrap_err().to_string().starts_with("cannot read"));
    }

    #[test]
    fn an_unfinished_store_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = StoreWriter::create(&folder.path().join("store")).unwrap();
        writer.push(&HostTensor::from_i64("x", [1u64], &[1])).unwrap();
        drop(writer);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_faster_of_two_writers_wins() {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().join("store");
        let mut first = StoreWriter::create(&destination).unwrap();
        let mut second = StoreWriter::create(&destination).unwrap();
        first.push(&HostTensor::from_i64("x", [1u64], &[1])).unwrap();
        second.push(&HostTensor::from_i64("x", [1u64], &[2])).unwrap();
        first.finish().unwrap();
        assert_eq!(second.finish().unwrap().load("x").unwrap().to_f64(), [1.0]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
