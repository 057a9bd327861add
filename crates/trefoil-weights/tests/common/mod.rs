//! What the integration tests share: small checkpoints written by hand, and where the reference data is.

#![allow(dead_code, reason = "every test binary uses its own part")]

use std::path::{Path, PathBuf};

/// One tensor of a checkpoint: name, safetensors type, shape, bytes.
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

pub fn f32_tensor(name: &str, shape: &[u64], values: &[f32]) -> Tensor {
    assert_eq!(shape.iter().product::<u64>() as usize, values.len(), "{name}");
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor { name: name.to_string(), dtype: "F32", shape: shape.to_vec(), bytes }
}

pub fn bf16_tensor(name: &str, shape: &[u64], values: &[f32]) -> Tensor {
    let bytes = values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect();
    Tensor { name: name.to_string(), dtype: "BF16", shape: shape.to_vec(), bytes }
}

pub fn f16_tensor(name: &str, shape: &[u64], values: &[f32]) -> Tensor {
    let bytes = values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect();
    Tensor { name: name.to_string(), dtype: "F16", shape: shape.to_vec(), bytes }
}

/// Pseudo-random values in −1..1 that differ by name.
pub fn values(name: &str, count: usize) -> Vec<f32> {
    let mut state = name.bytes().fold(2_166_136_261u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}

/// A tensor of pseudo-random values.
pub fn random(name: &str, shape: &[u64]) -> Tensor {
    f32_tensor(name, shape, &values(name, shape.iter().product::<u64>() as usize))
}

/// Writes a safetensors file: length, JSON header, data.
pub fn write_safetensors(path: &Path, tensors: &[Tensor]) {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let entry =
            serde_json::json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(tensor.name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

/// The tensors of a tiny Wan-like model in diffusers names: two blocks, width 40 (padded to 64), feed-forward 72.
pub fn tiny_wan() -> Vec<Tensor> {
    let (width, ffn) = (40u64, 72u64);
    let mut tensors = vec![
        random("patch_embedding.weight", &[width, 4, 1, 2, 2]),
        random("proj_out.bias", &[16]),
        random("scale_shift_table", &[1, 2, width]),
    ];
    for block in 0..2 {
        for attention in ["attn1", "attn2"] {
            for projection in ["to_q", "to_k", "to_v", "to_out.0"] {
                let stem = format!("blocks.{block}.{attention}.{projection}");
                tensors.push(random(&format!("{stem}.weight"), &[width, width]));
                tensors.push(random(&format!("{stem}.bias"), &[width]));
                tensors.push(random(&format!("{stem}.lora_A.weight"), &[8, width]));
                tensors.push(random(&format!("{stem}.lora_B.weight"), &[width, 8]));
            }
            tensors.push(random(&format!("blocks.{block}.{attention}.norm_q.weight"), &[width]));
        }
        tensors.push(random(&format!("blocks.{block}.ffn.net.0.proj.weight"), &[ffn, width]));
        tensors.push(random(&format!("blocks.{block}.ffn.net.0.proj.bias"), &[ffn]));
        tensors.push(random(&format!("blocks.{block}.ffn.net.2.weight"), &[width, ffn]));
        tensors.push(random(&format!("blocks.{block}.scale_shift_table"), &[1, 6, width]));
    }
    tensors
}

/// The reference tensors beside the repository, or `None` with a message.
pub fn golden() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden");
    if folder.join("MANIFEST.json").exists() {
        return Some(folder);
    }
    eprintln!("skipped: no reference tensors at {}", folder.display());
    None
}
