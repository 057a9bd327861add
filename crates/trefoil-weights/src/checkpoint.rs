//! Reading checkpoints: safetensors, one file or several with an index, in windows.
//!
//! Only headers are read eagerly. Tensor bytes are read in windows that are given back, so reading a model costs the
//! memory of one window. Names, lengths and offsets of the files are untrusted and checked before use. Nothing is mapped: a file
//! that another process cuts short or writes to while it is read is an error ([`WeightsError::Changed`]).
//!
//! PyTorch's own files (`.pth`) are read too, without running what is in them.

mod torch;

use crate::files::{Stamp, open_regular, read_at};
use crate::{FloatType, WeightsError};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

/// Directories of a pipeline checkpoint that hold the denoiser.
const PIPELINE_FOLDERS: [&str; 1] = ["transformer"];
/// Largest header of a safetensors file, in bytes; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// Largest shard index file that is read, in bytes.
const MAX_SHARD_INDEX: u64 = 64 << 20;

/// Element type of a tensor in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceType {
    /// A type that can be quantised or widened.
    Float(FloatType),
    /// Anything else: kept as bytes under its safetensors name.
    Raw {
        /// Name as in the file, lowercase (`i64`, `bool`, …).
        name: String,
    },
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone)]
pub struct SourceTensor {
    /// Name as in the file.
    pub name: String,
    /// Element type.
    pub dtype: SourceType,
    /// Shape as in the file.
    pub shape: Vec<u64>,
    /// Bytes of the elements.
    pub bytes: u64,
    file: usize,
    offset: u64,
}

impl SourceTensor {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        // Validated against the byte count when the header was read.
        self.shape.iter().product()
    }
}

/// A file of a checkpoint, and how it was when it was opened.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
}

/// An open checkpoint: one or more safetensors files.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<OpenFile>,
    tensors: BTreeMap<String, SourceTensor>,
    config: Option<serde_json::Value>,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a `*.safetensors.index.json`, or a directory holding either (a pipeline directory
    /// with a `transformer/` folder too). `extra` names further checkpoints, such as adapters in a file of their own.
    pub fn open(source: &Path, extra: &[PathBuf]) -> Result<Checkpoint, WeightsError> {
        let mut checkpoint = Checkpoint { files: Vec::new(), tensors: BTreeMap::new(), config: None };
        for (number, path) in std::iter::once(source).chain(extra.iter().map(PathBuf::as_path)).enumerate() {
            let (files, folder) = locate(path)?;
            for file in files {
                checkpoint.add_file(&file)?;
            }
            if number == 0 {
                checkpoint.config = read_config(&folder, path);
            }
        }
        Ok(checkpoint)
    }

    /// Another handle on the same open files, for somebody who reads tensors later.
    ///
    /// # Errors
    /// A process that may open no more files.
    pub fn try_clone(&self) -> Result<Checkpoint, WeightsError> {
        let files = self.files.iter().map(|OpenFile { path, file, stamp }| {
            let file = file.try_clone().map_err(WeightsError::io("open", path))?;
            Ok(OpenFile { path: path.clone(), file, stamp: *stamp })
        });
        Ok(Checkpoint {
            files: files.collect::<Result<_, WeightsError>>()?,
            tensors: self.tensors.clone(),
            config: self.config.clone(),
        })
    }

    /// Tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = &SourceTensor> {
        self.tensors.values()
    }

    /// A tensor by its name in the file.
    pub fn tensor(&self, name: &str) -> Option<&SourceTensor> {
        self.tensors.get(name)
    }

    /// The files, in the order read.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The `config.json` beside the weights, if there is one and it is JSON.
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// Whether the open files are as they were when they were opened. Writing to them or cutting them is noticed by their length and
    /// time of change (so not within a tick of the file system's clock); another file under their name is none of theirs.
    ///
    /// # Errors
    /// [`WeightsError::Changed`] with the first that is not.
    pub fn check_unchanged(&self) -> Result<(), WeightsError> {
        self.files.iter().try_for_each(|OpenFile { path, file, stamp }| stamp.check(path, file))
    }

    /// Reads `len` bytes of a tensor from byte `start` of it on.
    ///
    /// # Errors
    /// A window outside the tensor, a file that became shorter, whatever the system refuses.
    pub fn window(&self, tensor: &SourceTensor, start: u64, len: u64) -> Result<TensorWindow, WeightsError> {
        let OpenFile { path, file, .. } = &self.files[tensor.file];
        if start.checked_add(len).is_none_or(|end| end > tensor.bytes) {
            return Err(WeightsError::Tensor {
                tensor: tensor.name.clone(),
                reason: format!("a window of {len} bytes at {start} does not lie in its {} bytes", tensor.bytes),
            });
        }
        read_at(path, file, tensor.offset + start, len as usize).map(TensorWindow)
    }

    /// Reads the header of one file and adds its tensors.
    fn add_file(&mut self, path: &Path) -> Result<(), WeightsError> {
        let file = open_regular(path)?;
        let stamp = Stamp::of(path, &file)?;
        if path.extension().is_some_and(|extension| extension == "pth" || extension == "pt" || extension == "bin") {
            let number = self.files.len();
            for torch::TorchTensor { name, dtype, shape, bytes, offset } in torch::read(path, &file)? {
                self.add(path, SourceTensor { name, dtype, shape, bytes, file: number, offset })?;
            }
            self.files.push(OpenFile { path: path.to_path_buf(), file, stamp });
            return Ok(());
        }
        let length = stamp.bytes();
        let (data_start, metadata) = read_header(path, &file, length)?;
        let number = self.files.len();
        for (name, info) in metadata.tensors() {
            let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
            let fits = data_start.checked_add(end).is_some_and(|stop| stop <= length) && begin <= end;
            if !fits {
                return Err(WeightsError::checkpoint(path, format!("tensor `{name}` lies outside the file")));
            }
            let tensor = SourceTensor {
                name: name.clone(),
                dtype: match info.dtype {
                    Dtype::F32 => SourceType::Float(FloatType::F32),
                    Dtype::F16 => SourceType::Float(FloatType::F16),
                    Dtype::BF16 => SourceType::Float(FloatType::Bf16),
                    other => SourceType::Raw { name: format!("{other:?}").to_lowercase() },
                },
                shape: info.shape.iter().map(|&side| side as u64).collect(),
                bytes: end - begin,
                file: number,
                offset: data_start + begin,
            };
            self.add(path, tensor)?;
        }
        self.files.push(OpenFile { path: path.to_path_buf(), file, stamp });
        Ok(())
    }

    fn add(&mut self, path: &Path, tensor: SourceTensor) -> Result<(), WeightsError> {
        let name = tensor.name.clone();
        if let Some(twin) = self.tensors.insert(name.clone(), tensor) {
            let other = self.files.get(twin.file).map_or(path, |file| file.path.as_path());
            return Err(WeightsError::checkpoint(
                path,
                format!("tensor `{name}` is also in {}; give each tensor once", other.display()),
            ));
        }
        Ok(())
    }
}

/// Where the data of a safetensors file of `length` bytes begins, and what tensors it has.
fn read_header(path: &Path, file: &File, length: u64) -> Result<(u64, Metadata), WeightsError> {
    let invalid = |reason: String| {
        WeightsError::checkpoint(path, format!("not a valid safetensors file ({reason}); download or convert it again"))
    };
    if length < 8 {
        return Err(WeightsError::checkpoint(path, format!("{length} bytes are no safetensors file")));
    }
    let size = read_at(path, file, 0, 8)?.try_into().map_or(u64::MAX, u64::from_le_bytes);
    if size > MAX_HEADER || size + 8 > length {
        return Err(invalid(format!("a header of {size} bytes in {length}")));
    }
    let text = read_at(path, file, 8, size as usize)?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
    let (start, data) = (size + 8, metadata.data_len() as u64);
    if start.checked_add(data) != Some(length) {
        return Err(invalid(format!("its tensors take {data} bytes and {} are there", length - start)));
    }
    Ok((start, metadata))
}

/// A piece of a tensor.
#[derive(Debug)]
pub struct TensorWindow(Vec<u8>);

impl TensorWindow {
    /// The bytes, little-endian elements without any alignment promise.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Finds the safetensors files of a path, and the folder they lie in.
fn locate(path: &Path) -> Result<(Vec<PathBuf>, PathBuf), WeightsError> {
    let kind = std::fs::metadata(path).map_err(WeightsError::io("open", path))?;
    if !kind.is_dir() {
        // Neither waited for nor read, whatever its name ends in.
        open_regular(path)?;
        let folder = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
        let is_index = path.extension().is_some_and(|extension| extension == "json");
        return Ok((if is_index { shards(path)? } else { vec![path.to_path_buf()] }, folder));
    }
    let mut names: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(path).map_err(WeightsError::io("list", path))? {
        names.push(entry.map_err(WeightsError::io("list", path))?.path());
    }
    names.sort();
    let ends = |suffix: &str| -> Vec<&PathBuf> {
        names.iter().filter(|name| name.to_string_lossy().ends_with(suffix)).collect()
    };
    let list = |paths: &[&PathBuf]| {
        paths
            .iter()
            .filter_map(|path| path.file_name())
            .map(|name| name.to_string_lossy())
            .collect::<Vec<_>>()
            .join(", ")
    };
    match (ends(".safetensors.index.json").as_slice(), ends(".safetensors").as_slice()) {
        ([index], _) => Ok((shards(index)?, path.to_path_buf())),
        ([], [file]) => Ok((vec![(*file).clone()], path.to_path_buf())),
        ([], []) => {
            for folder in PIPELINE_FOLDERS {
                let inner = path.join(folder);
                if inner.is_dir() {
                    return locate(&inner);
                }
            }
            Err(WeightsError::checkpoint(
                path,
                "the directory holds no .safetensors file; name the file or its directory",
            ))
        }
        ([], files) => Err(WeightsError::checkpoint(
            path,
            format!("several safetensors files and no index ({}); name one of them", list(files)),
        )),
        (indexes, _) => {
            Err(WeightsError::checkpoint(path, format!("several index files ({}); name one of them", list(indexes))))
        }
    }
}

/// The files that a shard index names, each once. Every tensor it lists must be in the file it names.
fn shards(index: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    #[derive(serde::Deserialize)]
    struct ShardIndex {
        weight_map: BTreeMap<String, String>,
    }
    let file = open_regular(index)?;
    let length = file.metadata().map_err(WeightsError::io("inspect", index))?.len();
    if length > MAX_SHARD_INDEX {
        return Err(WeightsError::checkpoint(index, format!("an index of {length} bytes is above {MAX_SHARD_INDEX}")));
    }
    let text = read_at(index, &file, 0, length as usize)?;
    let parsed: ShardIndex = serde_json::from_slice(&text)
        .map_err(|error| WeightsError::checkpoint(index, format!("not a safetensors index ({error})")))?;
    let folder = index.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in &parsed.weight_map {
        by_file.entry(file).or_default().push(tensor);
    }
    let mut files = Vec::new();
    for (name, tensors) in by_file {
        let relative = Path::new(name);
        if relative.components().count() != 1 || !matches!(relative.components().next(), Some(Component::Normal(_))) {
            return Err(WeightsError::checkpoint(index, format!("shard `{name}` is not a plain file name")));
        }
        let path = folder.join(relative);
        let mut shard = Checkpoint { files: Vec::new(), tensors: BTreeMap::new(), config: None };
        shard.add_file(&path)?;
        if let Some(missing) = tensors.iter().find(|tensor| shard.tensor(tensor).is_none()) {
            return Err(WeightsError::checkpoint(
                &path,
                format!(
                    "tensor `{missing}` is missing although {} lists it; download the shard again",
                    index.display()
                ),
            ));
        }
        files.push(path);
    }
    if files.is_empty() {
        return Err(WeightsError::checkpoint(index, "the index lists no tensor"));
    }
    Ok(files)
}

/// `config.json` beside the weights, or `NAME.config.json` beside `NAME.*.safetensors`. Absent or unreadable is no error:
/// packing does not need it.
fn read_config(folder: &Path, source: &Path) -> Option<serde_json::Value> {
    let stem = source.file_name().and_then(|name| name.to_str()).and_then(|name| name.split('.').next());
    let named = stem.map(|stem| folder.join(format!("{stem}.config.json")));
    [Some(folder.join("config.json")), named].into_iter().flatten().find_map(|path| {
        let file = open_regular(&path).ok()?;
        let length = file.metadata().ok()?.len();
        let text = (length <= 1 << 20).then(|| read_at(&path, &file, 0, length as usize))?.ok()?;
        serde_json::from_slice(&text).ok()
    })
}
