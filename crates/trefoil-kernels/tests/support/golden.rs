//! The reference tensors of a small model, where they are beside the repository.

#![allow(dead_code, reason = "every test uses a part of it")]

use crate::support::block::{Attention, Block, Linear, Sizes};
use safetensors::SafeTensors;
use std::path::PathBuf;

/// The reference tensors, if they are beside the repository.
pub struct Golden {
    pub weights: Vec<u8>,
    pub io: Vec<u8>,
    pub trace: Vec<u8>,
}

/// Reads them, or says why not.
pub fn golden() -> Option<Golden> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden");
    let read = |name: &str| {
        std::fs::read(folder.join(name))
            .map_err(|error| eprintln!("skipped: {} ({error})", folder.join(name).display()))
            .ok()
    };
    Some(Golden {
        weights: read("dit_a.dcm.safetensors")?,
        io: read("dit_a.io.safetensors")?,
        trace: read("dit_a.trace.safetensors")?,
    })
}

/// A tensor as f32.
pub fn tensor(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    match view.dtype() {
        safetensors::Dtype::F32 => {
            view.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
        }
        safetensors::Dtype::BF16 => {
            view.data().as_chunks::<2>().0.iter().map(|&bytes| half::bf16::from_le_bytes(bytes).to_f32()).collect()
        }
        other => panic!("{name} is {other:?}"),
    }
}

/// Sizes of the reference model.
pub const DIT_A: Sizes = Sizes { width: 128, heads: 2, ffn: 320, rank: 32, tokens: 72, text: 512 };
/// Its patch grid.
pub const DIT_A_GRID: [usize; 3] = [3, 4, 6];

/// A block of the reference model.
pub fn golden_block(file: &SafeTensors<'_>, number: usize) -> Block {
    let stem = format!("blocks.{number}");
    let linear = |name: &str, d_in: usize| {
        let get = |suffix: &str| tensor(file, &format!("{stem}.{name}.{suffix}"));
        Linear::new(get("weight"), get("bias"), d_in, None)
    };
    let adapted = |name: String| {
        let get = |suffix: &str| tensor(file, &format!("{stem}.{name}.{suffix}"));
        let factors = (get("lora_A.lora1.weight"), get("lora_B.lora1.weight"));
        Linear::new(get("base_layer.weight"), get("base_layer.bias"), DIT_A.width, Some(factors))
    };
    let attention = |name: &str| Attention {
        projections: ["to_q", "to_k", "to_v", "to_out.0"].map(|projection| adapted(format!("{name}.{projection}"))),
        gain_q: tensor(file, &format!("{stem}.{name}.norm_q.weight")),
        gain_k: tensor(file, &format!("{stem}.{name}.norm_k.weight")),
    };
    Block {
        sizes: DIT_A,
        attention: [attention("attn1"), attention("attn2")],
        norm_gain: tensor(file, &format!("{stem}.norm2.weight")),
        norm_bias: tensor(file, &format!("{stem}.norm2.bias")),
        ffn: [linear("ffn.net.0.proj", DIT_A.width), linear("ffn.net.2", DIT_A.ffn)],
        table: tensor(file, &format!("{stem}.scale_shift_table")),
    }
}

/// What one step of the reference feeds its blocks.
pub struct Step {
    pub start: Vec<f32>,
    pub context: Vec<f32>,
    pub modulation: Vec<f32>,
}

/// The inputs of a step named as in the trace.
pub fn step(trace: &SafeTensors<'_>, step: &str) -> Step {
    let channels_first = tensor(trace, &format!("{step}.patch_embedding_conv"));
    let mut start = vec![0f32; DIT_A.tokens * DIT_A.width];
    for (channel, values) in channels_first.chunks(DIT_A.tokens).enumerate() {
        for (token, &value) in values.iter().enumerate() {
            start[token * DIT_A.width + channel] = value;
        }
    }
    Step {
        start,
        context: tensor(trace, &format!("{step}.text_context")),
        modulation: tensor(trace, &format!("{step}.timestep_proj")),
    }
}
