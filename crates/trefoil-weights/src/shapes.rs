//! Tensor names and shapes of Wan-family diffusion transformers, for planning, tests and benches without a checkpoint.

/// Sizes of a Wan2.1 transformer (`transformer/config.json`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WanSizes {
    /// Blocks.
    pub layers: u32,
    /// Model width d.
    pub width: u64,
    /// Feed-forward width.
    pub ffn: u64,
    /// Width of the text encoder's states.
    pub text: u64,
    /// Sinusoid width of the timestep embedding.
    pub frequency: u64,
    /// Latent channels times patch volume.
    pub patch: u64,
    /// Rank of the detail expert's adapter, or 0 for a model with one expert.
    pub rank: u64,
}

impl WanSizes {
    /// DCM-Wan2.1-1.3B with its detail expert.
    pub const DCM_1_3B: WanSizes =
        WanSizes { layers: 30, width: 1536, ffn: 8960, text: 4096, frequency: 256, patch: 64, rank: 128 };

    /// All tensors of the dual-expert checkpoint (base wrapped by the adapter library), with shapes as stored, in file
    /// order: embedders, blocks, head, then the detail expert's own embedders and head.
    pub fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let d = self.width;
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[u64]| tensors.push((name, shape.to_vec()));
        let experts: &[&str] = if self.rank > 0 { &["", "_lora"] } else { &[""] };
        add("patch_embedding.weight".into(), &[d, self.patch / 4, 1, 2, 2]);
        add("patch_embedding.bias".into(), &[d]);
        for expert in experts {
            let layers = [
                ("time_embedder.linear_1", d, self.frequency),
                ("time_embedder.linear_2", d, d),
                ("time_proj", 6 * d, d),
                ("text_embedder.linear_1", d, self.text),
                ("text_embedder.linear_2", d, d),
            ];
            for (layer, out, inputs) in layers {
                add(format!("condition_embedder{expert}.{layer}.weight"), &[out, inputs]);
                add(format!("condition_embedder{expert}.{layer}.bias"), &[out]);
            }
            add(format!("proj_out{expert}.weight"), &[self.patch, d]);
            add(format!("proj_out{expert}.bias"), &[self.patch]);
        }
        add("scale_shift_table".into(), &[1, 2, d]);
        for block in 0..self.layers {
            for attention in ["attn1", "attn2"] {
                for projection in ["to_q", "to_k", "to_v", "to_out.0"] {
                    let stem = format!("blocks.{block}.{attention}.{projection}");
                    let base = if self.rank > 0 { format!("{stem}.base_layer") } else { stem.clone() };
                    add(format!("{base}.weight"), &[d, d]);
                    add(format!("{base}.bias"), &[d]);
                    if self.rank > 0 {
                        add(format!("{stem}.lora_A.lora1.weight"), &[self.rank, d]);
                        add(format!("{stem}.lora_B.lora1.weight"), &[d, self.rank]);
                    }
                }
                for norm in ["norm_q", "norm_k"] {
                    add(format!("blocks.{block}.{attention}.{norm}.weight"), &[d]);
                }
            }
            add(format!("blocks.{block}.norm2.weight"), &[d]);
            add(format!("blocks.{block}.norm2.bias"), &[d]);
            add(format!("blocks.{block}.ffn.net.0.proj.weight"), &[self.ffn, d]);
            add(format!("blocks.{block}.ffn.net.0.proj.bias"), &[self.ffn]);
            add(format!("blocks.{block}.ffn.net.2.weight"), &[d, self.ffn]);
            add(format!("blocks.{block}.ffn.net.2.bias"), &[d]);
            add(format!("blocks.{block}.scale_shift_table"), &[1, 6, d]);
        }
        tensors
    }
}
