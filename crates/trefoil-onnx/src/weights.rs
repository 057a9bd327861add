//! Where large constants live on disk: one aligned weights file per model, shared by everything cut out of it.
//!
//! Why not refer to the original files: ONNX Runtime 1.32 and OpenVINO 2026.4 both refuse external data outside the
//! model's folder and symbolic links that lead there; hard links they accept, but `onnx.checker` refuses those. rten 0.27
//! takes only file names ending in `.data*` or `.onnx_data*` and, mapped, only offsets aligned to the element, which
//! `raw_data` inside an `.onnx` file never promises. So every large constant of a model is written **once per folder**, page-aligned,
//! and all sub-models in that folder refer to it; a thousand segments cost one copy of the weights, not a thousand.

use crate::files::{create_folder, write_atomically};
use crate::proto::{StringStringEntryProto, TensorProto};
use crate::{OnnxError, external, tensor};
use bytes::Bytes;
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Constants of at most this many bytes are written into the model itself.
pub(crate) const INLINE_UP_TO: usize = 1024;
/// Alignment of constants in a weights file: a page, so that runtimes can map each one.
const ALIGNMENT: u64 = 4096;

/// Where the bytes of a weights file come from when it must be written.
#[derive(Debug, Clone)]
enum Source {
    /// Contents at ascending, aligned offsets.
    Parts(Vec<(u64, Bytes)>),
    /// A whole file to copy.
    File(PathBuf),
}

#[derive(Debug, Clone)]
struct WeightFile {
    name: String,
    length: u64,
    source: Source,
}

/// The weights files of a model and which constant lies where. Constants are known by their address: all clones of a
/// [`Bytes`] share it, and every constant of a loaded model lives as long as the store.
#[derive(Debug, Clone, Default)]
pub(crate) struct WeightStore {
    files: Vec<Arc<WeightFile>>,
    places: HashMap<(usize, usize), (usize, u64)>,
}

fn key(contents: &Bytes) -> (usize, usize) {
    (contents.as_ptr() as usize, contents.len())
}

/// Whether a constant goes to a weights file.
pub(crate) fn is_large(tensor: &TensorProto) -> bool {
    tensor.raw_data.as_ref().is_some_and(|raw| raw.len() > INLINE_UP_TO)
}

impl WeightStore {
    /// Adds a file `name` with every large constant of `tensors` that has no place yet. Adds nothing if there is none.
    pub(crate) fn add_file<'a>(&mut self, name: &str, tensors: impl Iterator<Item = &'a TensorProto>) {
        let mut parts = Vec::new();
        let mut end = 0u64;
        let file = self.files.len();
        for contents in tensors.filter(|tensor| is_large(tensor)).filter_map(|tensor| tensor.raw_data.as_ref()) {
            let std::collections::hash_map::Entry::Vacant(place) = self.places.entry(key(contents)) else { continue };
            let offset = end.next_multiple_of(ALIGNMENT);
            place.insert((file, offset));
            end = offset + contents.len() as u64;
            parts.push((offset, contents.clone()));
        }
        if !parts.is_empty() {
            self.files.push(Arc::new(WeightFile { name: name.to_owned(), length: end, source: Source::Parts(parts) }));
        }
    }

    /// A store over existing weights files in `folder`, for the large constants of a model that was read from there.
    pub(crate) fn existing<'a>(
        folder: &Path,
        external: &external::ExternalFiles,
        tensors: impl Iterator<Item = &'a TensorProto>,
    ) -> Result<Self, OnnxError> {
        let mut store = Self::default();
        let mut index = HashMap::new();
        for contents in tensors.filter(|tensor| is_large(tensor)).filter_map(|tensor| tensor.raw_data.as_ref()) {
            let Some((location, offset)) = external.origin(contents) else { continue };
            let file = if let Some(&file) = index.get(location) {
                file
            } else {
                let path = folder.join(location);
                let length = std::fs::metadata(&path).map_err(|error| OnnxError::io(&path, &error))?.len();
                let name = location.to_owned();
                store.files.push(Arc::new(WeightFile { name, length, source: Source::File(path) }));
                index.insert(location.to_owned(), store.files.len() - 1);
                store.files.len() - 1
            };
            store.places.insert(key(contents), (file, offset));
        }
        Ok(store)
    }

    /// Replaces the contents of large constants by references to weights files; returns which files are referred to.
    pub(crate) fn detach<'a>(&self, tensors: impl Iterator<Item = &'a mut TensorProto>) -> BTreeSet<usize> {
        let mut used = BTreeSet::new();
        for tensor in tensors {
            let Some(contents) = tensor.raw_data.as_ref().filter(|raw| raw.len() > INLINE_UP_TO) else { continue };
            let Some(&(file, offset)) = self.places.get(&key(contents)) else { continue };
            let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
            tensor.external_data = vec![
                entry("location", self.files[file].name.clone()),
                entry("offset", offset.to_string()),
                entry("length", contents.len().to_string()),
            ];
            tensor.data_location = Some(1);
            tensor.raw_data = None;
            used.insert(file);
        }
        used
    }

    /// Makes sure that the given files lie in `folder`. A file that is there with the right length is taken as it is:
    /// its name carries the fingerprint of its contents, and it appeared by a rename, complete.
    pub(crate) fn ensure(&self, folder: &Path, used: &BTreeSet<usize>) -> Result<(), OnnxError> {
        for &index in used {
            let file = &self.files[index];
            let path = folder.join(&file.name);
            if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() == file.length) {
                continue;
            }
            create_folder(folder)?;
            let failed = |error: std::io::Error| OnnxError::io(&path, &error);
            write_atomically(&path, |writer| match &file.source {
                Source::Parts(parts) => {
                    let mut at = 0u64;
                    for (offset, contents) in parts {
                        let padding = [0u8; ALIGNMENT as usize];
                        writer.write_all(&padding[..(offset - at) as usize]).map_err(failed)?;
                        writer.write_all(contents).map_err(failed)?;
                        at = offset + contents.len() as u64;
                    }
                    Ok(())
                }
                Source::File(original) => {
                    let mut original =
                        std::fs::File::open(original).map_err(|error| OnnxError::io(original, &error))?;
                    std::io::copy(&mut original, writer).map_err(failed)?;
                    Ok(())
                }
            })?;
        }
        Ok(())
    }
}

/// Digest over the contents of all large constants, for naming a weights file after what it holds.
pub(crate) fn contents_name<'a>(prefix: &str, tensors: impl Iterator<Item = &'a TensorProto>) -> String {
    let mut hash = Sha256::new();
    for tensor in tensors.filter(|tensor| is_large(tensor)) {
        hash.update(tensor::digest(tensor));
    }
    format!("{prefix}-{}.data", tensor::hex(&hash.finalize()))
}
