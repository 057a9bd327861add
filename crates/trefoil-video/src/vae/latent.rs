//! Latents: what the transformer leaves and what the decoder takes.

use super::{VaeConfig, VaeError};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use trefoil_kernels::Frame;
use trefoil_weights::checkpoint::{Checkpoint, SourceType};

/// Most values of a latent: 16 channels, 256 latent frames at 1,024 × 1,024.
const MAX_VALUES: u64 = 1 << 32;

/// A latent clip `[channels][frames][height][width]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Latent {
    channels: usize,
    frames: usize,
    height: usize,
    width: usize,
    values: Vec<f32>,
}

impl Latent {
    /// A latent from its values, channels slowest.
    ///
    /// # Errors
    /// A number of values that is not the product of the extents, or an empty extent.
    pub fn new(
        channels: usize,
        frames: usize,
        height: usize,
        width: usize,
        values: Vec<f32>,
    ) -> Result<Latent, VaeError> {
        let latent = Latent { channels, frames, height, width, values };
        let need =
            [channels, frames, height, width].iter().try_fold(1usize, |product, &side| product.checked_mul(side));
        if need != Some(latent.values.len()) || latent.values.is_empty() {
            let reason = format!("{} values; there must be one per element and at least one", latent.values.len());
            return Err(VaeError::Latent { what: format!("of {}", latent.shape()), reason });
        }
        Ok(latent)
    }

    /// Reads tensor `key` of a safetensors file: `[channels, frames, height, width]`, with a leading 1 or without.
    ///
    /// # Errors
    /// Files that cannot be read, an unknown key (with the keys there are), another number of extents, values that are no
    /// numbers.
    pub fn read(path: &Path, key: &str) -> Result<Latent, VaeError> {
        let what = format!("`{key}` of {}", path.display());
        let fail = |reason: String| VaeError::Latent { what: what.clone(), reason };
        let checkpoint = Checkpoint::open(path, &[])?;
        let Some(tensor) = checkpoint.tensor(key) else {
            let keys: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name.as_str()).take(12).collect();
            return Err(fail(format!("there is no such tensor; the file has {}", keys.join(", "))));
        };
        let sides: Vec<usize> = tensor.shape.iter().map(|&side| side as usize).collect();
        let (&[channels, frames, height, width] | &[1, channels, frames, height, width]) = sides.as_slice() else {
            return Err(fail(format!(
                "its shape is {sides:?}; it must be [channels, frames, height, width], a leading 1 allowed"
            )));
        };
        let SourceType::Float(dtype) = &tensor.dtype else {
            return Err(fail(format!("its elements are {:?}; they must be f32, f16 or bf16", tensor.dtype)));
        };
        if tensor.elements() > MAX_VALUES {
            return Err(fail(format!("{} values are more than {MAX_VALUES}", tensor.elements())));
        }
        let mut values = vec![0f32; tensor.elements() as usize];
        dtype.decode(checkpoint.window(tensor, 0, tensor.bytes)?.bytes(), &mut values);
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(fail(format!(
                "it holds {} at element {at}; the denoiser failed or the file is damaged",
                values[at]
            )));
        }
        Latent::new(channels, frames, height, width, values)
    }

    /// String metadata of a safetensors file, such as `prompt` and `seed`; empty where there is none or the file cannot be
    /// read.
    pub fn notes(path: &Path) -> BTreeMap<String, String> {
        read_notes(path).unwrap_or_default()
    }

    /// Channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Latent frames.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Latent rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Latent columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All values, channels slowest.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// `channels×frames×height×width`, for messages.
    pub fn shape(&self) -> String {
        format!("{}×{}×{}×{}", self.channels, self.frames, self.height, self.width)
    }

    /// From what the transformer works on to what the decoder takes: `z·std + mean` for each channel.
    ///
    /// # Errors
    /// Another number of channels than the VAE's.
    pub fn denormalise(mut self, config: &VaeConfig) -> Result<Latent, VaeError> {
        if self.channels != config.z_dim {
            return Err(VaeError::Latent {
                what: format!("of {}", self.shape()),
                reason: format!("this VAE's latents have {} channels", config.z_dim),
            });
        }
        let plane = self.frames * self.height * self.width;
        let statistics = config.latents_std.iter().zip(&config.latents_mean);
        for (values, (&deviation, &mean)) in self.values.chunks_exact_mut(plane).zip(statistics) {
            for value in values {
                *value = *value * deviation + mean;
            }
        }
        Ok(self)
    }

    /// One latent frame, channels last.
    pub(super) fn frame(&self, frame: usize) -> Result<Frame, VaeError> {
        if frame >= self.frames {
            return Err(VaeError::Latent {
                what: format!("of {}", self.shape()),
                reason: format!("it has no frame {frame}"),
            });
        }
        let plane = self.height * self.width;
        let start = |channel: usize| (channel * self.frames + frame) * plane;
        Ok(Frame::from_planes(self.height, self.width, self.channels, |channel| {
            &self.values[start(channel)..][..plane]
        })?)
    }

    /// The rows and columns of a tile, all frames.
    pub(super) fn tile(&self, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Latent {
        let lines = self.values.chunks_exact(self.width).enumerate();
        let values = lines
            .filter(|(line, _)| rows.contains(&(line % self.height)))
            .flat_map(|(_, line)| line[columns.clone()].iter().copied())
            .collect();
        Latent { channels: self.channels, frames: self.frames, height: rows.len(), width: columns.len(), values }
    }
}

/// Longest header that is looked through for notes.
const MAX_HEADER: u64 = 32 << 20;

fn read_notes(path: &Path) -> Option<BTreeMap<String, String>> {
    let mut file = File::open(path).ok()?;
    let mut length = [0u8; 8];
    file.read_exact(&mut length).ok()?;
    let length = u64::from_le_bytes(length);
    let mut header = Vec::new();
    file.take(length.min(MAX_HEADER)).read_to_end(&mut header).ok()?;
    let mut header: serde_json::Value = serde_json::from_slice(&header).ok()?;
    serde_json::from_value(header.get_mut("__metadata__")?.take()).ok()
}
