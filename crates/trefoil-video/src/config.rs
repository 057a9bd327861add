//! Sizes of a Wan2.1-family diffusion transformer, from either spelling of its `config.json`.

use crate::VideoError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use trefoil_weights::shapes::WanSizes;

/// Pixels of a latent per patch side: height and width; frames are not merged.
pub const PATCH: usize = 2;
/// Widest head that the INT8 attention takes.
const MAX_HEAD_DIM: usize = 512;

/// A text-to-video diffusion transformer (Wan2.1; HeteroVDiff 2). Stored in the artefact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DitConfig {
    /// Blocks L.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of a head, a multiple of 32.
    pub head_dim: usize,
    /// Feed-forward width, a multiple of 32.
    pub ffn: usize,
    /// Channels of the latent, in and out.
    pub channels: usize,
    /// Width of the text encoder's states.
    pub text_dim: usize,
    /// Width of the timestep sinusoid, even.
    pub frequency: usize,
    /// Added to variances and mean squares in every norm.
    pub eps: f32,
}

impl DitConfig {
    /// Model width d.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of a patch, d_z: channels × 1 × 2 × 2.
    pub fn patch(&self) -> usize {
        self.channels * PATCH * PATCH
    }

    /// Sizes as `trefoil-weights` spells them; `rank` 0 is a model without adapters.
    pub fn sizes(&self, rank: usize) -> WanSizes {
        WanSizes {
            layers: self.layers as u32,
            width: self.width() as u64,
            ffn: self.ffn as u64,
            text: self.text_dim as u64,
            frequency: self.frequency as u64,
            patch: self.patch() as u64,
            rank: rank as u64,
        }
    }

    /// Multiply-accumulates of one block execution over `tokens` tokens and `text` text rows, without adapters.
    pub fn block_macs(&self, tokens: usize, text: usize) -> u64 {
        let (d, tokens, text) = (self.width() as u64, tokens as u64, text as u64);
        let linear = d * d * (6 * tokens + 2 * text) + 2 * d * self.ffn as u64 * tokens;
        linear + 2 * tokens * tokens * d + 2 * tokens * text * d
    }

    /// Reads diffusers' `transformer/config.json` or the original Wan `config.json`; unknown keys are ignored.
    ///
    /// # Errors
    /// Missing or mistyped keys, and every variant of the architecture that this crate does not compute (image
    /// conditioning, other norms, other patches, widths that are no multiples of 32).
    pub fn from_json(json: &Value) -> Result<DitConfig, VideoError> {
        let reader = Reader(json);
        let config = if json.get("num_attention_heads").is_some() {
            reader.patch_size()?;
            reader.expect("qk_norm", &Value::from("rms_norm_across_heads"))?;
            reader.expect("cross_attn_norm", &Value::from(true))?;
            for key in ["added_kv_proj_dim", "image_dim", "pos_embed_seq_len"] {
                reader.expect(key, &Value::Null)?;
            }
            let (channels, out) = (reader.size("in_channels")?, reader.size("out_channels")?);
            check_channels(channels, out)?;
            DitConfig {
                layers: reader.size("num_layers")?,
                heads: reader.size("num_attention_heads")?,
                head_dim: reader.size("attention_head_dim")?,
                ffn: reader.size("ffn_dim")?,
                channels,
                text_dim: reader.size("text_dim")?,
                frequency: reader.size("freq_dim")?,
                eps: reader.eps()?,
            }
        } else if json.get("num_heads").is_some() {
            if let Some(kind) = json.get("model_type").filter(|kind| *kind != "t2v") {
                return Err(VideoError::config(format!("model_type is {kind}; only \"t2v\" is supported")));
            }
            if json.get("patch_size").is_some() {
                reader.patch_size()?;
            }
            for key in ["qk_norm", "cross_attn_norm"] {
                reader.expect(key, &Value::from(true))?;
            }
            let (channels, out) = (reader.size("in_dim")?, reader.size("out_dim")?);
            check_channels(channels, out)?;
            let (width, heads) = (reader.size("dim")?, reader.size("num_heads")?);
            if heads == 0 || !width.is_multiple_of(heads) {
                return Err(VideoError::config(format!("dim {width} cannot be divided into num_heads {heads}")));
            }
            DitConfig {
                layers: reader.size("num_layers")?,
                heads,
                head_dim: width / heads,
                ffn: reader.size("ffn_dim")?,
                channels,
                // The original class's default; its configuration files leave it out.
                text_dim: reader.size_or("text_dim", 4096)?,
                frequency: reader.size("freq_dim")?,
                eps: reader.eps()?,
            }
        } else {
            return Err(VideoError::config(
                "it has neither `num_attention_heads` (diffusers) nor `num_heads` (original Wan), so it describes no Wan \
                 transformer; give the config.json of the transformer",
            ));
        };
        config.check()?;
        Ok(config)
    }

    /// Checks what kernels and layouts need.
    ///
    /// # Errors
    /// Sizes of zero, widths that are no multiples of 32, an odd frequency.
    pub fn check(&self) -> Result<(), VideoError> {
        let sizes = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("channels", self.channels),
            ("text width", self.text_dim),
            ("frequency", self.frequency),
        ];
        if let Some((name, size)) = sizes.into_iter().find(|&(_, size)| size == 0 || size > 1 << 20) {
            return Err(VideoError::config(format!("{name} is {size}; it must lie in 1..=1048576")));
        }
        for (name, size) in [("head width", self.head_dim), ("feed-forward width", self.ffn)] {
            if size == 0 || !size.is_multiple_of(32) || size > 131_072 {
                return Err(VideoError::config(format!(
                    "{name} is {size}; it must be a multiple of 32 (and at most 131072), as weights are stored in 32×32 tiles"
                )));
            }
        }
        if self.head_dim > MAX_HEAD_DIM {
            return Err(VideoError::config(format!(
                "head width is {}; at most {MAX_HEAD_DIM} is supported",
                self.head_dim
            )));
        }
        if !self.frequency.is_multiple_of(2) {
            return Err(VideoError::config(format!("freq_dim is {}; it must be even", self.frequency)));
        }
        if !(self.eps.is_normal() && self.eps > 0.0) {
            return Err(VideoError::config(format!("eps is {}; it must be a small number above 0", self.eps)));
        }
        Ok(())
    }
}

fn check_channels(channels: usize, out: usize) -> Result<(), VideoError> {
    if channels == out {
        return Ok(());
    }
    Err(VideoError::config(format!(
        "{channels} input channels and {out} output channels: conditioning on images is not supported, give a text-to-video model"
    )))
}

/// Typed access to a JSON object.
struct Reader<'a>(&'a Value);

impl Reader<'_> {
    fn size(&self, key: &str) -> Result<usize, VideoError> {
        match self.0.get(key) {
            None => Err(VideoError::config(format!("`{key}` is missing"))),
            Some(value) => value
                .as_u64()
                .and_then(|value| usize::try_from(value).ok())
                .ok_or_else(|| VideoError::config(format!("`{key}` is {value}, not a whole number"))),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, VideoError> {
        if self.0.get(key).is_none() { Ok(default) } else { self.size(key) }
    }

    fn eps(&self) -> Result<f32, VideoError> {
        match self.0.get("eps") {
            None => Ok(1e-6),
            Some(value) => value
                .as_f64()
                .map(|eps| eps as f32)
                .ok_or_else(|| VideoError::config(format!("`eps` is {value}, not a number"))),
        }
    }

    fn patch_size(&self) -> Result<(), VideoError> {
        self.expect("patch_size", &serde_json::json!([1, 2, 2]))
    }

    /// An absent key has the default, which is the expected value.
    fn expect(&self, key: &str, want: &Value) -> Result<(), VideoError> {
        match self.0.get(key) {
            Some(have) if have != want => {
                Err(VideoError::config(format!("`{key}` is {have}; only {want} is supported")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn diffusers() -> Value {
        json!({"patch_size": [1,2,2], "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16,
            "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30,
            "cross_attn_norm": true, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "added_kv_proj_dim": null,
            "image_dim": null, "rope_max_seq_len": 1024, "lora_rank": 128})
    }

    #[test]
    fn both_spellings_give_the_same_sizes() {
        let original = json!({"_class_name": "WanModel", "model_type": "t2v", "dim": 1536, "ffn_dim": 8960,
            "freq_dim": 256, "in_dim": 16, "out_dim": 16, "num_heads": 12, "num_layers": 30, "text_len": 512, "eps": 1e-6});
        let config = DitConfig::from_json(&diffusers()).unwrap();
        assert_eq!(config, DitConfig::from_json(&original).unwrap());
        assert_eq!((config.width(), config.patch()), (1536, 64));
        assert_eq!(config.sizes(128), WanSizes::DCM_1_3B);
        // 154.8 GFLOP at 1,560 tokens and 512 text rows, as the reference measurements count.
        assert!((config.block_macs(1560, 512) as f64 * 2.0 / 154.8e9 - 1.0).abs() < 0.01);
    }

    #[test]
    fn what_is_not_computed_is_refused_with_its_key() {
        for (key, value, want) in [
            ("qk_norm", json!("rms_norm"), "`qk_norm` is \"rms_norm\""),
            ("patch_size", json!([2, 2, 2]), "only [1,2,2]"),
            ("image_dim", json!(1280), "`image_dim` is 1280"),
            ("in_channels", json!(36), "36 input channels and 16 output"),
            ("ffn_dim", json!(100), "feed-forward width is 100"),
            ("attention_head_dim", json!(48), "head width is 48"),
            ("num_layers", json!(0), "layers is 0"),
            ("num_layers", json!(1.5), "`num_layers` is 1.5"),
            ("eps", json!(0.0), "eps is 0"),
        ] {
            let mut config = diffusers();
            config[key] = value;
            let error = DitConfig::from_json(&config).unwrap_err().to_string();
            assert!(error.contains(want), "{key}: {error}");
        }
        let mut config = diffusers();
        config.as_object_mut().unwrap().remove("ffn_dim");
        assert!(DitConfig::from_json(&config).unwrap_err().to_string().contains("`ffn_dim` is missing"));
        assert!(DitConfig::from_json(&json!({})).unwrap_err().to_string().contains("no Wan transformer"));
        assert!(DitConfig::from_json(&json!([1])).is_err());
    }
}
