//! Models with random weights, for benches: true shapes need no download.

mod vae;

pub use vae::write_vae_decoder;

use crate::VideoError;
use crate::config::DitConfig;
use crate::noise::torch_normals;
use crate::tensors::{Tensor, write_tensors};
use serde_json::json;
use std::path::Path;

/// The widths of DCM-Wan2.1-1.3B with a few of its 30 blocks.
pub fn wan_1_3b(layers: usize) -> DitConfig {
    DitConfig { layers, heads: 12, head_dim: 128, ffn: 8960, channels: 16, text_dim: 4096, frequency: 256, eps: 1e-6 }
}

/// A model that denoises in milliseconds.
pub fn small(layers: usize) -> DitConfig {
    DitConfig { layers, heads: 4, head_dim: 32, ffn: 384, channels: 16, text_dim: 64, frequency: 256, eps: 1e-6 }
}

/// Writes `config.json` and weights of a random model in DCM's layout (`rank` > 0) or diffusers' into `folder`.
///
/// Matrices have a standard deviation of one over the root of their inputs, so that activations keep their size.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_checkpoint(folder: &Path, config: &DitConfig, rank: usize, seed: u32) -> Result<(), VideoError> {
    let mut tensors = Vec::new();
    for (number, (name, shape)) in config.sizes(rank).tensors().into_iter().enumerate() {
        let shape: Vec<usize> = shape.iter().map(|&side| side as usize).collect();
        let (len, inputs): (usize, usize) = (shape.iter().product(), shape[1..].iter().product());
        let is_gain = name.contains("norm") && name.ends_with("weight");
        let (mean, deviation) = match inputs {
            1 if is_gain => (1.0, 0.1),
            1 => (0.0, 0.1),
            inputs => (0.0, 1.0 / (inputs as f32).sqrt()),
        };
        let mut values = torch_normals(seed.wrapping_add(number as u32), len.max(16));
        values.truncate(len);
        for value in &mut values {
            *value = mean + deviation * *value;
        }
        tensors.push((name.clone(), Tensor::new(name, &shape, values)?));
    }
    let text = json!({
        "_class_name": "WanTransformer3DModel",
        "patch_size": [1, 2, 2],
        "num_attention_heads": config.heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.channels,
        "out_channels": config.channels,
        "text_dim": config.text_dim,
        "freq_dim": config.frequency,
        "ffn_dim": config.ffn,
        "num_layers": config.layers,
        "cross_attn_norm": true,
        "qk_norm": "rms_norm_across_heads",
        "eps": config.eps,
        "lora_rank": rank,
        "lora_alpha": 2 * rank,
    });
    crate::tensors::write_atomically(&folder.join("config.json"), text.to_string().as_bytes())?;
    write_tensors(&folder.join("diffusion_pytorch_model.safetensors"), &tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{CheckpointOptions, WanCheckpoint};

    #[test]
    fn a_random_checkpoint_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &small(2), 8, 1).unwrap();
        let checkpoint = WanCheckpoint::open(folder.path(), &CheckpointOptions::default()).unwrap();
        assert_eq!(checkpoint.config, small(2));
        assert!(checkpoint.has_detail_embedder && checkpoint.adapter.is_some());
        assert_eq!(wan_1_3b(30).sizes(128), trefoil_weights::shapes::WanSizes::DCM_1_3B);
    }
}
