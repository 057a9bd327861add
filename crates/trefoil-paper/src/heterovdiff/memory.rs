//! Table 3 and 6.3 from tensor sizes.

use super::LAYERS;
use crate::Relation::{Follows, Models};
use crate::{PaperError, PublishedNumbers, Section};

const MIB: f64 = 1_048_576.0;
/// Width, feed-forward width, heads, adapter rank, tokens and latent patch width at 49 frames (sections 2.1 and 3).
const WIDTH: f64 = 1536.0;
const FFN: f64 = 8960.0;
const HEADS: f64 = 12.0;
const RANK: f64 = 128.0;
const TOKENS: f64 = 20_280.0;
const PATCH: f64 = 64.0;
/// Projections of self- and cross-attention.
const PROJECTIONS: f64 = 8.0;

pub(super) fn section(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let mut section = Section::new("Memory (6.3, Table 3)");
    let layers = f64::from(LAYERS);
    let attention = layers * (PROJECTIONS * WIDTH * WIDTH + PROJECTIONS * WIDTH * 4.0) / MIB;
    let ffn = layers * 2.0 * WIDTH * FFN / MIB;
    let scales = layers * (PROJECTIONS * WIDTH + FFN + WIDTH) * 4.0 / MIB;
    let factors = layers * PROJECTIONS * (2.0 * WIDTH * RANK + (WIDTH + RANK) * 4.0) / MIB;
    let artefact = attention + ffn + scales + factors;
    let widened = 2.0 * WIDTH * FFN * 2.0 / MIB;
    let staged = 2.0 * WIDTH * FFN / MIB;
    let merged = artefact - factors + attention;
    section.compare(numbers, "mem_attention", Follows, attention, "30 x 8 x 1536 x 1536 INT8 and FP32 biases")?;
    section.compare(numbers, "mem_ffn", Follows, ffn, "30 x 2 x 1536 x 8960 INT8")?;
    section.compare(numbers, "mem_scales", Follows, scales, "one FP32 per output column")?;
    section.compare(
        numbers,
        "mem_factors",
        Follows,
        factors,
        "INT8 factors with FP32 column scales; FP16 factors would be 180 MiB",
    )?;
    section.compare(numbers, "t3_heterovdiff_base", Follows, artefact, "their sum")?;
    section.compare(
        numbers,
        "mem_per_block",
        Follows,
        (artefact - scales) / layers,
        "the sum without scales over 30",
    )?;
    section.compare(numbers, "mem_artefact", Follows, artefact / 1024.0, "their sum")?;
    section.compare(numbers, "mem_merged", Follows, merged / 1024.0, "a second attention base instead of factors")?;
    section.compare(numbers, "t3_merged_base", Follows, 2.0 * merged, "two of those")?;
    section.compare(numbers, "t3_dp_base", Follows, 2.0 * artefact, "two artefacts")?;
    section.compare(numbers, "t3_npu_only_transient", Follows, widened, "one block's feed-forward pair in FP16")?;
    section.compare(
        numbers,
        "t3_heterovdiff_transient",
        Follows,
        widened + staged,
        "that and the GPU's INT8 copy of a pair",
    )?;
    section.compare(numbers, "mem_added", Follows, staged, "one block's feed-forward pair in INT8")?;
    for name in ["merged", "npu_only", "dp", "ht", "heterovdiff"] {
        let part = |part: &str| numbers.interval(&format!("t3_{name}_{part}"));
        let total = (part("base")? + part("transient")?) / 1024.0;
        section.compare(numbers, &format!("t3_{name}_total"), Follows, total, "base and transient of the row")?;
    }
    section.compare(numbers, "t3_fp16_total", Follows, numbers.interval("t3_fp16_base")? / 1024.0, "the row's base")?;
    section.compare(
        numbers,
        "t3_gpu_only_total",
        Models,
        numbers.interval("t3_gpu_only_base")? / 1024.0,
        "the row's base",
    )?;
    section.compare(
        numbers,
        "t3_gpu_only_base",
        Models,
        artefact,
        "one artefact; the paper does not say what the other 89 MiB are",
    )?;
    let share = numbers.interval("t3_heterovdiff_total")? / numbers.interval("t3_dp_total")?;
    section.compare(numbers, "saving", Follows, (share - 1.0) * -100.0, "1 - 1.47 / 2.83")?;
    let (params, text) = parameters();
    section.compare(numbers, "base_params", Follows, params / 1e6, "Wan2.1-1.3B's public tensor shapes")?;
    section.compare(
        numbers,
        "lora_params",
        Follows,
        layers * PROJECTIONS * 2.0 * WIDTH * RANK / 1e6,
        "30 x 8 x 2 x 1536 x 128",
    )?;
    section.compare(
        numbers,
        "fp16_copy",
        Models,
        (params - text) * 2.0 / 1e9,
        "FP16 of all but the text embedder, which prompts embedded offline do not need",
    )?;
    section.compare(numbers, "fp16_two", Follows, numbers.interval("fp16_copy")? * 2.0, "two of those")?;
    section.compare(
        numbers,
        "t3_fp16_base",
        Follows,
        (params - text) * 4.0 / MIB,
        "two FP16 copies, the adapter not counted",
    )?;
    section.compare(
        numbers,
        "mem_handoff",
        Follows,
        TOKENS * (WIDTH + PATCH) * 4.0 / 1e6,
        "20,280 x (1,536 + 64) FP32",
    )?;
    section.compare(numbers, "mem_carrier", Follows, TOKENS * WIDTH * 2.0 / MIB, "20,280 x 1,536 FP16")?;
    section.compare(
        numbers,
        "mem_scores",
        Models,
        HEADS * 256.0 * TOKENS * 3.0 / MIB,
        "12 heads x 256 x 20,280, FP16 scores and INT8 probabilities",
    )?;
    section.compare(
        numbers,
        "mem_private",
        Models,
        attention * MIB / 1e6,
        "the attention base in MB; 540 is its MiB",
    )?;
    section.note(
        "Table 3's DP row counts two artefacts of 1,423 MiB, though its GPU arm alone (the GPU-only row) holds 1,512",
    );
    section.note("the hidden state crosses in FP32 (129.8 MB), though 4.4 keeps it in FP16 on the GPU: a hand-off in FP16 would be half");
    Ok(section)
}

/// Parameters of Wan2.1-1.3B's transformer, and of its text embedder.
fn parameters() -> (f64, f64) {
    let linear = |input: f64, output: f64| input * output + output;
    let norms = 4.0 * WIDTH + 2.0 * WIDTH;
    let block = PROJECTIONS * linear(WIDTH, WIDTH) + linear(WIDTH, FFN) + linear(FFN, WIDTH) + 6.0 * WIDTH + norms;
    let text = linear(4096.0, WIDTH) + linear(WIDTH, WIDTH);
    let time = linear(256.0, WIDTH) + linear(WIDTH, WIDTH) + linear(WIDTH, 6.0 * WIDTH);
    let patch = linear(16.0 * 4.0, WIDTH);
    let head = linear(WIDTH, PATCH) + 2.0 * WIDTH;
    (f64::from(LAYERS) * block + text + time + patch + head, text)
}
