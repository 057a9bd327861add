//! Tensors in safetensors files: reading `FILE:KEY`, writing results.

use crate::VideoError;
use crate::checkpoint::read_values;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use trefoil_weights::checkpoint::Checkpoint;

/// A dense f32 tensor and where it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Name for errors: `noise`, or file and key.
    pub origin: String,
    /// Extents.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub values: Vec<f32>,
}

impl Tensor {
    /// A tensor; `values` must be as many as `shape` says.
    ///
    /// # Errors
    /// Another number of values.
    pub fn new(origin: impl Into<String>, shape: &[usize], values: Vec<f32>) -> Result<Tensor, VideoError> {
        let origin = origin.into();
        let want = shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side));
        if want != Some(values.len()) {
            let reason = format!("{} values do not fill {shape:?}", values.len());
            return Err(VideoError::Input { what: origin, reason });
        }
        Ok(Tensor { origin, shape: shape.to_vec(), values })
    }

    /// An error about this tensor.
    pub(crate) fn refuse(&self, reason: String) -> VideoError {
        VideoError::Input { what: self.origin.clone(), reason }
    }
}

/// `FILE.safetensors:KEY`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPath {
    /// File.
    pub file: PathBuf,
    /// Name of the tensor in it.
    pub key: String,
}

impl FromStr for TensorPath {
    type Err = String;

    fn from_str(text: &str) -> Result<TensorPath, String> {
        match text.rsplit_once(':') {
            Some((file, key)) if !file.is_empty() && !key.is_empty() => {
                Ok(TensorPath { file: PathBuf::from(file), key: key.to_string() })
            }
            _ => Err("write FILE.safetensors:KEY".to_string()),
        }
    }
}

impl TensorPath {
    /// Reads the tensor (f32, f16 or bf16) as f32.
    ///
    /// # Errors
    /// A file that cannot be read, a key that is not in it (with those that are), another element type, NaN or infinity.
    pub fn read(&self) -> Result<Tensor, VideoError> {
        let file = Checkpoint::open(&self.file, &[])?;
        let origin = format!("{}:{}", self.file.display(), self.key);
        let Some(tensor) = file.tensor(&self.key) else {
            let mut names: Vec<&str> = file.tensors().map(|tensor| tensor.name.as_str()).collect();
            let count = names.len();
            names.truncate(8);
            let more = if count > names.len() { ", …" } else { "" };
            let reason = format!("there is no such tensor; the file has {}{more}", names.join(", "));
            return Err(VideoError::Input { what: origin, reason });
        };
        let values = read_values(&self.file, &file, tensor)?;
        let shape: Vec<usize> = tensor.shape.iter().map(|&side| side as usize).collect();
        Tensor::new(origin, &shape, values)
    }
}

/// Names of the tensors of a safetensors file, ascending.
///
/// # Errors
/// A file that cannot be read.
pub fn tensor_names(file: &Path) -> Result<Vec<String>, VideoError> {
    Ok(Checkpoint::open(file, &[])?.tensors().map(|tensor| tensor.name.clone()).collect())
}

/// Writes tensors to a safetensors file that appears only when it is complete.
///
/// # Errors
/// A folder that cannot be written, a full disk.
pub fn write_tensors(output: &Path, tensors: &[(String, Tensor)]) -> Result<(), VideoError> {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, tensor)| tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, tensor), bytes)| Ok((name.clone(), TensorView::new(Dtype::F32, tensor.shape.clone(), bytes)?)))
        .collect::<Result<HashMap<String, TensorView<'_>>, safetensors::SafeTensorError>>();
    let refuse = |error: safetensors::SafeTensorError| VideoError::Input {
        what: output.display().to_string(),
        reason: format!("the tensors cannot be written ({error})"),
    };
    let text = safetensors::serialize(views.map_err(refuse)?, None).map_err(refuse)?;
    write_atomically(output, &text)
}

/// Writes a file under a temporary name beside `output`, then renames it.
pub(crate) fn write_atomically(output: &Path, bytes: &[u8]) -> Result<(), VideoError> {
    trefoil_files::write_atomically(output, |mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    })
    .map_err(VideoError::io("write", output))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_come_back_and_wrong_keys_list_the_right_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        let tensor = Tensor::new("x", &[2, 3], vec![1.0, -2.0, 3.5, 0.0, 1e-30, 7.0]).unwrap();
        write_tensors(&path, &[("latent.0".to_string(), tensor.clone())]).unwrap();
        let spec = format!("{}:latent.0", path.display()).parse::<TensorPath>().unwrap();
        let read = spec.read().unwrap();
        assert_eq!((read.shape, read.values), (tensor.shape, tensor.values));
        let wrong = TensorPath { key: "noise".to_string(), ..spec };
        assert!(wrong.read().unwrap_err().to_string().ends_with("there is no such tensor; the file has latent.0"));
        // Only the finished file is left.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!("file.safetensors".parse::<TensorPath>().is_err() && ":key".parse::<TensorPath>().is_err());
        assert!(Tensor::new("x", &[2], vec![]).is_err() && Tensor::new("x", &[usize::MAX, 4], vec![]).is_err());
    }
}
