//! Sizes of a umT5 encoder, from `config.json` where there is one, else from the tensors.

use super::TextError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The configuration in transformers' words. Keys that encoding does not need are ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextConfig {
    /// Tokens that have an embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Width of a head.
    pub d_kv: usize,
    /// Width of the feed-forward layer.
    pub d_ff: usize,
    /// Layers.
    pub num_layers: usize,
    /// Heads.
    pub num_heads: usize,
    /// Buckets of the relative position bias.
    #[serde(default = "buckets")]
    pub relative_attention_num_buckets: usize,
    /// Distance from which on all positions share the last bucket.
    #[serde(default = "distance")]
    pub relative_attention_max_distance: usize,
    /// ε of the norms.
    #[serde(default = "epsilon")]
    pub layer_norm_epsilon: f32,
    /// Feed-forward kind; must be `gated-gelu`.
    #[serde(default = "feed_forward")]
    pub feed_forward_proj: String,
    /// Padding token.
    #[serde(default)]
    pub pad_token_id: u32,
    /// End-of-sequence token.
    #[serde(default = "eos")]
    pub eos_token_id: u32,
    /// Rows of the encoder's result: the transformer's text length.
    #[serde(default = "text_len")]
    pub text_len: usize,
}

fn buckets() -> usize {
    32
}
pub(super) fn distance() -> usize {
    128
}
pub(super) fn epsilon() -> f32 {
    1e-6
}
pub(super) fn feed_forward() -> String {
    "gated-gelu".to_string()
}
pub(super) fn eos() -> u32 {
    1
}
pub(super) fn text_len() -> usize {
    512
}

/// Far above any model and far below overflow.
const MAX_SIZE: usize = 1 << 24;
pub(super) const MAX_LAYERS: usize = 1024;

impl TextConfig {
    /// Reads a parsed `config.json`; `path` is named in errors.
    ///
    /// # Errors
    /// Fields missing or of the wrong type, another model type, another feed-forward kind, sizes that make no encoder.
    pub fn from_json(value: &serde_json::Value, path: &Path) -> Result<TextConfig, TextError> {
        if let Some(kind) = value.get("model_type").and_then(serde_json::Value::as_str)
            && kind != "umt5"
        {
            return Err(TextError::config(path, format!("the text encoder is a {kind}; only umt5 is encoded")));
        }
        let config: TextConfig = serde_json::from_value(value.clone())
            .map_err(|error| TextError::config(path, format!("no umt5 config ({error})")))?;
        config.check().map_err(|reason| TextError::config(path, reason))?;
        Ok(config)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("d_kv", self.d_kv),
            ("d_ff", self.d_ff),
            ("num_heads", self.num_heads),
            ("text_len", self.text_len),
        ];
        if let Some((name, size)) = sizes.into_iter().find(|&(_, size)| size == 0 || size > MAX_SIZE) {
            return Err(format!("{name} is {size}; it must be 1 to {MAX_SIZE}"));
        }
        if self.num_layers > MAX_LAYERS || self.d_kv * self.num_heads > MAX_SIZE || self.text_len > 1 << 16 {
            return Err(format!(
                "{} layers, {} heads of {} and {} tokens are beyond what is supported",
                self.num_layers, self.num_heads, self.d_kv, self.text_len
            ));
        }
        if self.feed_forward_proj != "gated-gelu" {
            return Err(format!("feed_forward_proj is {}; only gated-gelu is supported", self.feed_forward_proj));
        }
        let buckets = self.relative_attention_num_buckets;
        if buckets < 4 || !buckets.is_multiple_of(4) || self.relative_attention_max_distance <= buckets / 4 {
            return Err(format!(
                "{buckets} position buckets up to distance {}; there must be a multiple of 4, and more distance than a quarter of them",
                self.relative_attention_max_distance
            ));
        }
        if !(self.layer_norm_epsilon > 0.0 && self.layer_norm_epsilon < 1.0) {
            return Err(format!("layer_norm_epsilon is {}; it must be between 0 and 1", self.layer_norm_epsilon));
        }
        Ok(())
    }

    /// Bucket of key position minus query position (T5's, bidirectional): half of the buckets are for later keys; of each
    /// half, half are exact distances and the rest grow logarithmically to the largest distance.
    pub fn bucket(&self, relative: i64) -> usize {
        let half = self.relative_attention_num_buckets / 2;
        let exact = half / 2;
        let side = if relative > 0 { half } else { 0 };
        let distance = relative.unsigned_abs() as usize;
        if distance < exact {
            return side + distance;
        }
        // In f32, as the reference computes it: the truncation must fall the same way.
        let ratio = (distance as f32 / exact as f32).ln();
        let span = (self.relative_attention_max_distance as f32 / exact as f32).ln();
        let step = (ratio / span * (half - exact) as f32) as usize;
        side + (exact + step).min(half - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn configurations_that_make_no_encoder_are_refused() {
        let sizes = json!({ "vocab_size": 8, "d_model": 4, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_heads": 2 });
        let parse = |key: &str, value: serde_json::Value| {
            let mut config = sizes.clone();
            config[key] = value;
            TextConfig::from_json(&config, Path::new("c.json")).map_err(|error| error.to_string())
        };
        let config = parse("model_type", json!("umt5")).unwrap();
        assert_eq!((config.text_len, config.eos_token_id, config.relative_attention_max_distance), (512, 1, 128));
        for (key, value, expected) in [
            ("model_type", json!("bert"), "c.json: the text encoder is a bert; only umt5 is encoded"),
            ("d_model", json!(null), "no umt5 config"),
            ("d_kv", json!(0), "d_kv is 0"),
            ("num_heads", json!(1u64 << 40), "num_heads is"),
            ("feed_forward_proj", json!("relu"), "only gated-gelu"),
            ("relative_attention_num_buckets", json!(2), "2 position buckets"),
            ("layer_norm_epsilon", json!(0.0), "layer_norm_epsilon is 0"),
            ("num_layers", json!(5000), "5000 layers"),
        ] {
            let message = parse(key, value).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
