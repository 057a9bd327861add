//! Raw results as safetensors.

use super::atomic::AtomicFile;
use super::{ClipMetadata, OutputError, VideoFrame};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// An f32 tensor to be written.
#[derive(Debug, Clone, Copy)]
pub struct NamedTensor<'a> {
    /// Key.
    pub name: &'a str,
    /// Extents.
    pub shape: &'a [usize],
    /// Elements, row-major.
    pub values: &'a [f32],
}

/// The header of a file of f32 tensors: 8 bytes of length, JSON, padding to 8 bytes.
fn header(tensors: &[(&str, &[usize])], metadata: &[(&str, String)]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let strings: serde_json::Map<_, _> =
        metadata.iter().map(|(key, value)| ((*key).to_string(), serde_json::Value::from(value.clone()))).collect();
    entries.insert("__metadata__".to_string(), strings.into());
    let mut start = 0;
    for (name, shape) in tensors {
        let end = start + shape.iter().product::<usize>() * size_of::<f32>();
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] });
        entries.insert((*name).to_string(), entry);
        start = end;
    }
    let mut json = serde_json::Value::from(entries).to_string().into_bytes();
    // Padded with spaces so that the data is aligned.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

/// Writes tensors and string metadata.
///
/// # Errors
/// A file that cannot be written, a tensor whose values are not as many as its shape says.
pub fn write_tensors(path: &Path, tensors: &[NamedTensor<'_>], metadata: &[(&str, String)]) -> Result<(), OutputError> {
    if let Some(tensor) = tensors.iter().find(|tensor| tensor.shape.iter().product::<usize>() != tensor.values.len()) {
        let reason = format!("tensor `{}` of {:?} has {} values", tensor.name, tensor.shape, tensor.values.len());
        return Err(OutputError::format(path, reason));
    }
    let file = AtomicFile::create(path)?;
    let mut out = std::io::BufWriter::new(file.handle()?);
    let shapes: Vec<_> = tensors.iter().map(|tensor| (tensor.name, tensor.shape)).collect();
    let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(OutputError::io("write", path));
    write(&header(&shapes, metadata))?;
    for tensor in tensors {
        for values in tensor.values.chunks(1 << 14) {
            write(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())?;
        }
    }
    out.flush().map_err(OutputError::io("write", path))?;
    drop(out);
    file.commit()
}

/// Frames being written as tensor `frames`, `[1, 3, frames, height, width]`, clamped to −1..1.
#[derive(Debug)]
pub(super) struct FrameTensor {
    file: AtomicFile,
    out: File,
    start: u64,
    plane: u64,
    frames: usize,
    written: usize,
}

impl FrameTensor {
    pub(super) fn create(
        path: &Path,
        (height, width): (usize, usize),
        frames: usize,
        metadata: &ClipMetadata,
    ) -> Result<FrameTensor, OutputError> {
        let file = AtomicFile::create(path)?;
        let mut out = file.handle()?;
        let header = header(&[("frames", &[1, 3, frames, height, width])], &metadata.entries());
        let plane = (height * width * size_of::<f32>()) as u64;
        let fail = |source| OutputError::Io { action: "write", path: path.to_path_buf(), source };
        out.write_all(&header).map_err(fail)?;
        // The whole length now: a full disk is found before the work where the file system reserves, and at the end else.
        out.set_len(header.len() as u64 + plane * 3 * frames as u64).map_err(fail)?;
        Ok(FrameTensor { file, out, start: header.len() as u64, plane, frames, written: 0 })
    }

    pub(super) fn push(&mut self, frame: &VideoFrame) -> Result<(), OutputError> {
        for channel in 0..3 {
            let bytes: Vec<u8> = frame.plane(channel).flat_map(f32::to_le_bytes).collect();
            let at = self.start + (channel * self.frames + self.written) as u64 * self.plane;
            self.out
                .seek(SeekFrom::Start(at))
                .and_then(|_| self.out.write_all(&bytes))
                .map_err(OutputError::io("write", self.file.path()))?;
        }
        self.written += 1;
        Ok(())
    }

    pub(super) fn finish(self) -> Result<(), OutputError> {
        drop(self.out);
        self.file.commit()
    }
}
