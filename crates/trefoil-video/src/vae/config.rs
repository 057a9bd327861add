//! `vae/config.json`: the sizes of the decoder and the statistics of its latents.

use super::VaeError;
use serde::Deserialize;
use std::path::Path;

/// Most values of a factor list, and most channels; far above any model and far below overflow.
const MAX_LEVELS: usize = 8;
const MAX_CHANNELS: usize = 1 << 12;

/// The VAE's configuration in diffusers' words. Keys that decoding does not need are ignored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct VaeConfig {
    /// Channels at full resolution.
    #[serde(default = "base_dim")]
    pub base_dim: usize,
    /// Channels of each resolution as a multiple of `base_dim`, full resolution first.
    #[serde(default = "dim_mult")]
    pub dim_mult: Vec<usize>,
    /// Residual blocks of an encoder level; a decoder level has one more.
    #[serde(default = "num_res_blocks")]
    pub num_res_blocks: usize,
    /// Resolutions with attention besides the middle; must be empty.
    #[serde(default)]
    pub attn_scales: Vec<f64>,
    /// Whether the step from each resolution to the next coarser one also halves the frame rate (the key's name is misspelt
    /// in the public files).
    #[serde(default = "temporal_downsample", rename = "temperal_downsample", alias = "temporal_downsample")]
    pub temporal_downsample: Vec<bool>,
    /// Channels of a latent.
    #[serde(default = "z_dim")]
    pub z_dim: usize,
    /// Mean of each latent channel.
    #[serde(default = "latents_mean")]
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each latent channel.
    #[serde(default = "latents_std")]
    pub latents_std: Vec<f32>,
}

fn base_dim() -> usize {
    96
}
fn dim_mult() -> Vec<usize> {
    vec![1, 2, 4, 4]
}
fn num_res_blocks() -> usize {
    2
}
fn temporal_downsample() -> Vec<bool> {
    vec![false, true, true]
}
fn z_dim() -> usize {
    16
}
/// Statistics of Wan2.1's latents, the same in the original code and in diffusers.
fn latents_mean() -> Vec<f32> {
    vec![
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
        -0.9497, 0.2503, -0.2921,
    ]
}
fn latents_std() -> Vec<f32> {
    vec![
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
        2.8251, 1.9160,
    ]
}

impl Default for VaeConfig {
    /// Wan2.1's VAE.
    fn default() -> VaeConfig {
        VaeConfig {
            base_dim: base_dim(),
            dim_mult: dim_mult(),
            num_res_blocks: num_res_blocks(),
            attn_scales: Vec::new(),
            temporal_downsample: temporal_downsample(),
            z_dim: z_dim(),
            latents_mean: latents_mean(),
            latents_std: latents_std(),
        }
    }
}

/// Channels of one level of the decoder, coarsest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    pub(super) inputs: usize,
    pub(super) channels: usize,
    /// Rows and columns double after it.
    pub(super) is_upsampled: bool,
    /// The frame rate doubles too.
    pub(super) is_time_upsampled: bool,
}

impl VaeConfig {
    /// Reads a parsed `config.json`; `path` is named in errors.
    ///
    /// # Errors
    /// Fields of the wrong type, sizes that make no decoder, attention outside the middle.
    pub fn from_json(value: &serde_json::Value, path: &Path) -> Result<VaeConfig, VaeError> {
        if let Some(class) = value.get("_class_name").and_then(serde_json::Value::as_str)
            && class != "AutoencoderKLWan"
        {
            return Err(VaeError::config(path, format!("the VAE is a {class}; only AutoencoderKLWan is decoded")));
        }
        let config: VaeConfig = serde_json::from_value(value.clone())
            .map_err(|error| VaeError::config(path, format!("no VAE config ({error})")))?;
        config.check().map_err(|reason| VaeError::config(path, reason))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let levels = self.dim_mult.len();
        if !(1..=MAX_LEVELS).contains(&levels) || self.temporal_downsample.len() + 1 != levels {
            return Err(format!(
                "{levels} factors in dim_mult and {} in temperal_downsample; there must be 1 to {MAX_LEVELS} and one less",
                self.temporal_downsample.len()
            ));
        }
        let widest = self.dim_mult.iter().max().copied().unwrap_or(0).checked_mul(self.base_dim);
        if self.base_dim == 0
            || !self.base_dim.is_multiple_of(2)
            || self.dim_mult.contains(&0)
            || widest.is_none_or(|widest| widest > MAX_CHANNELS)
            || self.z_dim == 0
            || self.z_dim > MAX_CHANNELS
            || self.num_res_blocks > 64
        {
            return Err(format!(
                "base_dim {}, dim_mult {:?}, z_dim {}, num_res_blocks {}: sizes must be even and at most {MAX_CHANNELS} channels",
                self.base_dim, self.dim_mult, self.z_dim, self.num_res_blocks
            ));
        }
        if !self.attn_scales.is_empty() {
            return Err(format!(
                "attention at scales {:?}; only the middle's attention is supported",
                self.attn_scales
            ));
        }
        for (name, values) in [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)] {
            if values.len() != self.z_dim || values.iter().any(|value| !value.is_finite()) {
                return Err(format!(
                    "{name} has {} values; there must be a finite one for each of {} channels",
                    values.len(),
                    self.z_dim
                ));
            }
        }
        if self.latents_std.iter().any(|&deviation| deviation <= 0.0) {
            return Err("latents_std holds a value that is not above 0".to_string());
        }
        Ok(())
    }

    /// Channels of the decoder's middle.
    pub(super) fn middle(&self) -> usize {
        self.base_dim * self.dim_mult.last().copied().unwrap_or(1)
    }

    /// Levels of the decoder, coarsest first. After the first level the input has half the channels of the level before,
    /// because its upsampling convolution halves them.
    pub(super) fn levels(&self) -> Vec<Level> {
        let count = self.dim_mult.len();
        let mut inputs = self.middle();
        let mut levels = Vec::with_capacity(count);
        for level in 0..count {
            let channels = self.base_dim * self.dim_mult[count - 1 - level];
            let is_upsampled = level + 1 < count;
            // Upsampling in time mirrors the encoder's steps.
            let is_time_upsampled = is_upsampled && self.temporal_downsample[count - 2 - level];
            levels.push(Level { inputs, channels, is_upsampled, is_time_upsampled });
            inputs = if is_upsampled { channels / 2 } else { channels };
        }
        levels
    }

    /// Pixels per latent pixel, along each side.
    pub fn spatial_scale(&self) -> usize {
        1 << (self.dim_mult.len() - 1)
    }

    /// Frames per latent frame after the first.
    pub fn temporal_scale(&self) -> usize {
        1 << self.temporal_downsample.iter().filter(|&&is_halved| is_halved).count()
    }

    /// Frames that `latent_frames` decode to.
    pub fn frames(&self, latent_frames: usize) -> usize {
        if latent_frames == 0 { 0 } else { 1 + (latent_frames - 1) * self.temporal_scale() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: &serde_json::Value) -> Result<VaeConfig, String> {
        VaeConfig::from_json(value, Path::new("vae/config.json")).map_err(|error| error.to_string())
    }

    #[test]
    fn the_public_configuration_has_the_published_levels() {
        let config = parse(&json!({ "_class_name": "AutoencoderKLWan", "dropout": 0.0 })).unwrap();
        assert_eq!(config, VaeConfig::default());
        let widths: Vec<_> = config.levels().iter().map(|level| (level.inputs, level.channels)).collect();
        assert_eq!(widths, [(384, 384), (192, 384), (192, 192), (96, 96)]);
        let time: Vec<_> = config.levels().iter().map(|level| level.is_time_upsampled).collect();
        assert_eq!(time, [true, true, false, false]);
        assert_eq!((config.spatial_scale(), config.temporal_scale()), (8, 4));
        assert_eq!([0, 1, 2, 4, 13].map(|latents| config.frames(latents)), [0, 1, 5, 13, 49]);
    }

    #[test]
    fn configurations_that_make_no_decoder_are_refused() {
        let message = parse(&json!({ "_class_name": "AutoencoderKL" })).unwrap_err();
        assert_eq!(message, "vae/config.json: the VAE is a AutoencoderKL; only AutoencoderKLWan is decoded");
        for (value, expected) in [
            (json!({ "base_dim": "many" }), "no VAE config"),
            (json!({ "base_dim": 0 }), "base_dim 0"),
            (json!({ "base_dim": 100_000 }), "base_dim 100000"),
            (json!({ "dim_mult": [] }), "0 factors"),
            (json!({ "dim_mult": [1, 2] }), "2 factors in dim_mult and 3"),
            (json!({ "attn_scales": [0.5] }), "attention at scales"),
            (json!({ "latents_mean": [0.0] }), "latents_mean has 1 values"),
            (json!({ "latents_std": vec![0; 16] }), "not above 0"),
            (json!("x"), "no VAE config"),
        ] {
            let message = parse(&value).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
