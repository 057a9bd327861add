//! A VAE decoder with random weights.

use crate::VideoError;
use crate::vae::VaeConfig;
use serde_json::json;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Name and shape of a tensor.
type Entry = (String, Vec<usize>);

/// Names and shapes of the decoder of `config`, in diffusers' names.
fn entries(config: &VaeConfig) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut conv = |stem: &str, shape: &[usize]| {
        entries.push((format!("{stem}.weight"), shape.to_vec()));
        entries.push((format!("{stem}.bias"), vec![shape[0]]));
    };
    let middle = config.base_dim * config.dim_mult[config.dim_mult.len() - 1];
    conv("post_quant_conv", &[config.z_dim, config.z_dim, 1, 1, 1]);
    conv("decoder.conv_in", &[middle, config.z_dim, 3, 3, 3]);
    conv("decoder.mid_block.attentions.0.to_qkv", &[3 * middle, middle, 1, 1]);
    conv("decoder.mid_block.attentions.0.proj", &[middle, middle, 1, 1]);
    let mut residuals: Vec<(String, usize, usize)> =
        (0..2).map(|block| (format!("decoder.mid_block.resnets.{block}"), middle, middle)).collect();
    let levels = config.dim_mult.len();
    let mut inputs = middle;
    for level in 0..levels {
        let channels = config.base_dim * config.dim_mult[levels - 1 - level];
        for block in 0..=config.num_res_blocks {
            let inputs = if block == 0 { inputs } else { channels };
            residuals.push((format!("decoder.up_blocks.{level}.resnets.{block}"), inputs, channels));
        }
        let stem = format!("decoder.up_blocks.{level}.upsamplers.0");
        if level + 1 < levels {
            conv(&format!("{stem}.resample.1"), &[channels / 2, channels, 3, 3]);
            if config.temporal_downsample[levels - 2 - level] {
                conv(&format!("{stem}.time_conv"), &[2 * channels, channels, 3, 1, 1]);
            }
        }
        inputs = channels / 2;
    }
    conv("decoder.conv_out", &[3, config.base_dim, 3, 3, 3]);
    for (stem, inputs, outputs) in &residuals {
        conv(&format!("{stem}.conv1"), &[*outputs, *inputs, 3, 3, 3]);
        conv(&format!("{stem}.conv2"), &[*outputs, *outputs, 3, 3, 3]);
        if inputs != outputs {
            conv(&format!("{stem}.conv_shortcut"), &[*outputs, *inputs, 1, 1, 1]);
        }
    }
    for (stem, inputs, outputs) in &residuals {
        entries.push((format!("{stem}.norm1.gamma"), vec![*inputs]));
        entries.push((format!("{stem}.norm2.gamma"), vec![*outputs]));
    }
    entries.push(("decoder.mid_block.attentions.0.norm.gamma".to_string(), vec![middle]));
    entries.push(("decoder.norm_out.gamma".to_string(), vec![config.base_dim]));
    entries
}

/// Writes `config.json` and bf16 decoder weights in diffusers' names into `folder`. Layers keep the size of their input, so frames
/// hold values of the usual size. The same configuration and seed give the same bytes.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_vae_decoder(folder: &Path, config: &VaeConfig, seed: u32) -> Result<(), VideoError> {
    let about = json!({
        "_class_name": "AutoencoderKLWan",
        "base_dim": config.base_dim,
        "dim_mult": config.dim_mult,
        "num_res_blocks": config.num_res_blocks,
        "attn_scales": config.attn_scales,
        "temperal_downsample": config.temporal_downsample,
        "z_dim": config.z_dim,
        "latents_mean": config.latents_mean,
        "latents_std": config.latents_std,
    });
    let path = folder.join("config.json");
    crate::tensors::write_atomically(&path, about.to_string().as_bytes())?;
    let path = folder.join("diffusion_pytorch_model.safetensors");
    // Named last: a file that was cut short is never taken for a checkpoint.
    let partial = folder.join("diffusion_pytorch_model.partial");
    let fail = |source| VideoError::Io { action: "write", path: path.clone(), source };
    File::create(&partial).and_then(|file| write_weights(file, config, seed)).map_err(fail)?;
    std::fs::rename(&partial, &path).map_err(fail)
}

fn write_weights(file: File, config: &VaeConfig, seed: u32) -> io::Result<()> {
    let entries = entries(config);
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in &entries {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
    }
    let header = serde_json::to_vec(&header)?;
    let mut out = BufWriter::new(file);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let mut state = seed | 1;
    for (name, shape) in &entries {
        let fan: usize = shape[1..].iter().product();
        for _ in 0..shape.iter().product::<usize>() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let uniform = (state >> 8) as f32 / 8_388_608.0 - 1.0;
            let value = match name.rsplit('.').next() {
                Some("gamma") => 1.0,
                Some("bias") => 0.1 * uniform,
                _ => uniform * (3.0 / fan as f32).sqrt(),
            };
            out.write_all(&((value.to_bits() >> 16) as u16).to_le_bytes())?;
        }
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vae::VaeDecoder;

    #[test]
    fn a_random_decoder_is_complete_and_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let config = VaeConfig { base_dim: 8, num_res_blocks: 1, ..VaeConfig::default() };
        write_vae_decoder(folder.path(), &config, 3).unwrap();
        let weights = folder.path().join("diffusion_pytorch_model.safetensors");
        let first = std::fs::read(&weights).unwrap();
        assert_eq!(VaeDecoder::open(folder.path()).unwrap().config(), &config);
        write_vae_decoder(folder.path(), &config, 3).unwrap();
        assert_eq!(first, std::fs::read(&weights).unwrap());
        let error = write_vae_decoder(&folder.path().join("none"), &config, 3).unwrap_err().to_string();
        assert!(error.contains("none"), "{error}");
    }
}
