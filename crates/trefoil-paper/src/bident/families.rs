//! The ten model families of BIDENT's Table 1 as graphs of fused operators, from their public architectures.
//!
//! The paper's text gives few sizes. What it gives is kept (a LLaMA-7B decode layer, Mamba-370M, ViT-B/16, ResNet-50, ten
//! denoising steps); every other size is assumed and stated here. Mamba has 4 of its 48 equal layers: after LLaMA's layer
//! ends the paper has 39 of Mamba's operators left (4.3), so its graph is about this small.

// q, k, v, x and z are what the architectures' own papers call them.
#![allow(clippy::many_single_char_names)]

use super::builder::{Attention, Builder, Width};
use trefoil_core::{OperatorGraph, TensorId};

/// A configuration: a family at a precision.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// Family.
    pub family: &'static str,
    /// Precision; π0.5's is mixed (4.1: an INT8 vision encoder, the rest in FP16).
    pub width: Width,
    /// Operators.
    pub graph: OperatorGraph,
    /// Units it may use, of CPU, GPU, NPU.
    pub allowed: [bool; 3],
    /// Where sizes come from.
    pub source: &'static str,
}

impl Configuration {
    /// `kan_int8`, `pi05`.
    pub fn name(&self) -> String {
        if self.family == "pi05" { self.family.to_owned() } else { format!("{}_{}", self.family, self.width.name()) }
    }
}

/// The 19 configurations: nine families at two precisions, and π0.5.
pub fn configurations() -> Vec<Configuration> {
    type Build = fn(Width) -> OperatorGraph;
    let families: [(&'static str, Build, &'static str); 9] = [
        ("resnet50", resnet50, "public: torchvision's ResNet-50 at 224 x 224"),
        ("vit_b16", vit_b16, "public: torchvision's ViT-B/16 at 224 x 224"),
        ("llama7b_1l", llama7b_1l, "public: one decode layer of LLaMA-7B; 511 cached tokens assumed"),
        ("mamba370m", mamba370m, "public: Mamba-370M's width; 4 of 48 layers and 64 tokens assumed"),
        ("hyena", hyena, "public: order-2 Hyena operator; width 768, 1,024 tokens, 2 layers assumed"),
        ("kan", kan, "public: efficient-kan; 784-256-64-10, batch 64 assumed"),
        ("snn_vgg9", snn_vgg9, "public: VGG9 with leaky integrate-and-fire; 32 x 32, 6 time steps assumed"),
        ("lavish", lavish, "public: LAVISH adapters on a shared ViT; width 768, 4 blocks assumed"),
        ("bitnet", bitnet, "public: one BitNet b1.58 block; width 1536, 32 tokens assumed"),
    ];
    let mut all = Vec::new();
    for (family, build, source) in families {
        for width in [Width::Fp16, Width::Int8] {
            // KAN's refusal by the NPU is the machine's (BitwiseAnd), not stated here.
            all.push(Configuration { family, width, graph: build(width), allowed: [true; 3], source });
        }
    }
    all.push(Configuration {
        family: "pi05",
        width: Width::Int8,
        graph: pi05(),
        // 4.1: the prefix-cache and denoising stages exceed GPU memory.
        allowed: [true, false, true],
        source: "public: SigLIP So400m, Gemma 2B and the 300M action expert of pi0; 288 prefix tokens, horizon 50 assumed",
    });
    all
}

fn resnet50(width: Width) -> OperatorGraph {
    let mut net = Builder::new(&format!("resnet50_{}", width.name()), width);
    let image = net.input("image", &[1, 3, 224, 224]);
    let mut x = net.conv(image, 64, 7, 2, 1, "Relu");
    x = net.op("MaxPool", &[x], &[1, 64, 56, 56], 0, 0);
    for (stage, blocks) in [3u64, 4, 6, 3].into_iter().enumerate() {
        let inner = 64 << stage;
        for block in 0..blocks {
            let stride = if block == 0 && stage > 0 { 2 } else { 1 };
            let mut y = net.conv(x, inner, 1, 1, 1, "Relu");
            y = net.conv(y, inner, 3, stride, 1, "Relu");
            y = net.conv(y, 4 * inner, 1, 1, 1, "");
            let skip = if block == 0 { net.conv(x, 4 * inner, 1, stride, 1, "") } else { x };
            x = net.each("Add+Relu", &[y, skip]);
        }
    }
    x = net.op("ReduceMean", &[x], &[1, 2048], 0, 0);
    let logits = net.linear(x, 1000, "Add");
    net.finish(&[logits])
}

/// A pre-norm transformer block on [1, tokens, width].
fn vit_block(net: &mut Builder, x: TensorId, heads: u64, mlp: u64) -> TensorId {
    let shape = net.shape(x);
    let (tokens, width) = (shape[1], shape[2]);
    let normed = net.each("LayerNormalization", &[x]);
    let attended = attention(net, normed, normed, heads, tokens, tokens, width);
    let x = net.each("Add", &[x, attended]);
    let normed = net.each("LayerNormalization", &[x]);
    let hidden = net.linear(normed, mlp, "Add+Gelu");
    let out = net.linear(hidden, width, "Add");
    net.each("Add", &[x, out])
}

fn attention(
    net: &mut Builder,
    x: TensorId,
    context: TensorId,
    heads: u64,
    rows: u64,
    keys: u64,
    width: u64,
) -> TensorId {
    let (q, k, v) = (net.linear(x, width, "Add"), net.linear(context, width, "Add"), net.linear(context, width, "Add"));
    let mixed = net.attend([q, k, v], Attention { heads, rows, keys, head: width / heads });
    net.linear(mixed, width, "Add")
}

fn vit_b16(width: Width) -> OperatorGraph {
    let mut net = Builder::new(&format!("vit_b16_{}", width.name()), width);
    let image = net.input("image", &[1, 3, 224, 224]);
    let patches = net.conv(image, 768, 16, 16, 1, "");
    let mut x = net.op("Reshape+Transpose+Concat+Add", &[patches], &[1, 197, 768], 0, 2 * 197 * 768);
    for _ in 0..12 {
        x = vit_block(&mut net, x, 12, 3072);
    }
    x = net.each("LayerNormalization", &[x]);
    x = net.op("Gather", &[x], &[1, 768], 0, 0);
    let logits = net.linear(x, 1000, "Add");
    net.finish(&[logits])
}

fn llama7b_1l(width: Width) -> OperatorGraph {
    const PAST: u64 = 511;
    let mut net = Builder::new(&format!("llama7b_1l_{}", width.name()), width);
    let x = net.input("hidden", &[1, 1, 4096]);
    let (past_k, past_v) = (net.input("past_k", &[1, 32, PAST, 128]), net.input("past_v", &[1, 32, PAST, 128]));
    let normed = net.each("RMSNormalization", &[x]);
    let (q, k, v) = (net.linear(normed, 4096, ""), net.linear(normed, 4096, ""), net.linear(normed, 4096, ""));
    let (q, k) = (net.each("RotaryEmbedding", &[q]), net.each("RotaryEmbedding", &[k]));
    let keys = net.op("Concat", &[past_k, k], &[1, 32, PAST + 1, 128], 0, 0);
    let values = net.op("Concat", &[past_v, v], &[1, 32, PAST + 1, 128], 0, 0);
    let mixed = net.attend([q, keys, values], Attention { heads: 32, rows: 1, keys: PAST + 1, head: 128 });
    let out = net.linear(mixed, 4096, "");
    let x = net.each("Add", &[x, out]);
    let normed = net.each("RMSNormalization", &[x]);
    let (gate, up) = (net.linear(normed, 11_008, ""), net.linear(normed, 11_008, ""));
    let gate = net.each("Silu", &[gate]);
    let hidden = net.each("Mul", &[gate, up]);
    let down = net.linear(hidden, 4096, "");
    let x = net.each("Add", &[x, down]);
    net.finish(&[x, keys, values])
}

fn mamba370m(width: Width) -> OperatorGraph {
    const TOKENS: u64 = 64;
    let mut net = Builder::new(&format!("mamba370m_{}", width.name()), width);
    let mut x = net.input("hidden", &[1, TOKENS, 1024]);
    for _ in 0..4 {
        let normed = net.each("RMSNormalization", &[x]);
        let both = net.linear(normed, 4096, "");
        let u = net.op("Split+Transpose", &[both], &[1, 2048, 1, TOKENS], 0, 0);
        let z = net.op("Split+Silu", &[both], &[1, TOKENS, 2048], 0, 0);
        let u = net.conv(u, 2048, 2, 1, 2048, "Silu");
        let u = net.op("Transpose", &[u], &[1, TOKENS, 2048], 0, 0);
        let parts = net.linear(u, 96, "");
        let dt = net.op("Split", &[parts], &[1, TOKENS, 64], 0, 0);
        let dt = net.linear(dt, 2048, "Add+Softplus");
        let state = [1, TOKENS, 2048, 16];
        let decay = net.op("Unsqueeze+Mul", &[dt], &state, 0, 2 * 2048 * 16);
        let input = net.op("Unsqueeze+Mul+Mul", &[dt, u, parts], &state, 0, 0);
        let summed = net.op("CumSum", &[decay], &state, 0, 0);
        let decayed = net.each("Exp", &[summed]);
        let weighted = net.each("Mul", &[input, decayed]);
        let scanned = net.op("CumSum", &[weighted], &state, 0, 0);
        let hidden = net.each("Clip+Div", &[scanned, decayed]);
        let y = net.op("Mul+ReduceSum", &[hidden, parts], &[1, TOKENS, 2048], 0, 0);
        let y = net.each("Mul+Add+Mul", &[y, u, z]);
        let out = net.linear(y, 1024, "");
        x = net.each("Add", &[x, out]);
    }
    let x = net.each("RMSNormalization", &[x]);
    net.finish(&[x])
}

fn hyena(width: Width) -> OperatorGraph {
    const TOKENS: u64 = 1024;
    const WIDTH: u64 = 768;
    let mut net = Builder::new(&format!("hyena_{}", width.name()), width);
    let mut x = net.input("hidden", &[1, TOKENS, WIDTH]);
    let positions = net.input("positions", &[1, TOKENS, 3]);
    for _ in 0..2 {
        let normed = net.each("LayerNormalization", &[x]);
        let z = net.linear(normed, 3 * WIDTH, "Add");
        let z = net.op("Transpose", &[z], &[1, 3 * WIDTH, 1, TOKENS], 0, 0);
        let z = net.conv(z, 3 * WIDTH, 2, 1, 3 * WIDTH, "");
        let gate = net.op("Split", &[z], &[1, WIDTH, 1, TOKENS], 0, 0);
        let v = net.op("Split+Mul", &[z], &[1, WIDTH, 1, TOKENS], 0, 0);
        let mut filter = positions;
        for _ in 0..3 {
            filter = net.linear(filter, 64, "Add");
            filter = net.each("Mul+Sin", &[filter]);
        }
        let filter = net.linear(filter, WIDTH, "Mul");
        let filter = net.op("Transpose+Pad", &[filter], &[1, WIDTH, 2 * TOKENS], 0, 0);
        // Complex halves of a real transform.
        let spectrum = [1, WIDTH, TOKENS + 1, 2];
        let filter = net.op("DFT", &[filter], &spectrum, 0, 0);
        let padded = net.op("Pad", &[v], &[1, WIDTH, 2 * TOKENS], 0, 0);
        let signal = net.op("DFT", &[padded], &spectrum, 0, 0);
        let signal = net.each("Mul", &[signal, filter]);
        let y = net.op("DFT", &[signal], &[1, WIDTH, 2 * TOKENS], 0, 0);
        let y = net.op("Slice+Mul+Add", &[y, v], &[1, WIDTH, 1, TOKENS], 0, 2 * WIDTH);
        let y = net.each("Mul", &[y, gate]);
        let y = net.op("Transpose", &[y], &[1, TOKENS, WIDTH], 0, 0);
        let y = net.linear(y, WIDTH, "Add");
        x = net.each("Add", &[x, y]);
        let normed = net.each("LayerNormalization", &[x]);
        let hidden = net.linear(normed, 4 * WIDTH, "Add+Gelu");
        let out = net.linear(hidden, WIDTH, "Add");
        x = net.each("Add", &[x, out]);
    }
    net.finish(&[x])
}

fn kan(width: Width) -> OperatorGraph {
    const BATCH: u64 = 64;
    // Grid of 5 intervals, splines of order 3: 11 knot intervals, 8 basis functions.
    const KNOTS: u64 = 11;
    let mut net = Builder::new(&format!("kan_{}", width.name()), width);
    let mut x = net.input("x", &[BATCH, 784]);
    for (input, output) in [(784u64, 256u64), (256, 64), (64, 10)] {
        let base = net.each("Silu", &[x]);
        let base = net.linear(base, output, "");
        let knots = |count: u64| [BATCH, input, count];
        let above = net.op("GreaterOrEqual", &[x], &knots(KNOTS), 0, 2 * input * KNOTS);
        let below = net.op("Less", &[x], &knots(KNOTS), 0, 2 * input * KNOTS);
        let inside = net.each("BitwiseAnd", &[above, below]);
        let mut basis = net.each("Cast", &[inside]);
        for order in 1..=3u64 {
            let count = KNOTS - order;
            let grid = 2 * input * count;
            let left = net.op("Gather", &[basis], &knots(count), 0, 0);
            let right = net.op("Gather", &[basis], &knots(count), 0, 0);
            let rising = net.op("Sub+Div+Mul", &[x, left], &knots(count), 0, 2 * grid);
            let falling = net.op("Sub+Div+Mul", &[x, right], &knots(count), 0, 2 * grid);
            basis = net.each("Add", &[rising, falling]);
        }
        let flat = net.op("Reshape", &[basis], &[BATCH, input * (KNOTS - 3)], 0, 0);
        let spline = net.linear(flat, output, "");
        x = net.each("Add", &[base, spline]);
    }
    net.finish(&[x])
}

fn snn_vgg9(width: Width) -> OperatorGraph {
    const STEPS: u64 = 6;
    let mut net = Builder::new(&format!("snn_vgg9_{}", width.name()), width);
    let image = net.input("image", &[1, 3, 32, 32]);
    // Channels of the convolutions; 0 is a pooling.
    let layers = [64u64, 64, 0, 128, 128, 0, 256, 256, 256, 0];
    let coded = net.conv(image, 64, 3, 1, 1, "Mul");
    let mut membranes: Vec<Option<TensorId>> = vec![None; layers.len() + 1];
    let mut total: Option<TensorId> = None;
    let fire = |net: &mut Builder, current: TensorId, membrane: &mut Option<TensorId>| {
        let inputs: Vec<TensorId> = [Some(current), *membrane].into_iter().flatten().collect();
        let spikes = net.each("Mul+Add+Greater+Cast", &inputs);
        *membrane = Some(net.each("Mul+Sub", &[current, spikes]));
        spikes
    };
    for _ in 0..STEPS {
        let mut x = coded;
        for (at, &channels) in layers.iter().enumerate() {
            if channels == 0 {
                let shape = net.shape(x);
                x = net.op("AveragePool", &[x], &[1, shape[1], shape[2] / 2, shape[3] / 2], 0, 0);
                continue;
            }
            if at > 0 {
                x = net.conv(x, channels, 3, 1, 1, "Mul");
            }
            x = fire(&mut net, x, &mut membranes[at]);
        }
        let flat = net.op("Reshape", &[x], &[1, 4096], 0, 0);
        let hidden = net.linear(flat, 1024, "Add");
        let spikes = fire(&mut net, hidden, &mut membranes[layers.len()]);
        let out = net.linear(spikes, 10, "Add");
        total = Some(match total {
            None => out,
            Some(sum) => net.each("Add", &[sum, out]),
        });
    }
    let rate = net.each("Div", &[total.unwrap_or(coded)]);
    net.finish(&[rate])
}

/// A LAVISH adapter: two latent tokens gather the other modality, then a grouped bottleneck.
fn adapter(net: &mut Builder, x: TensorId, y: TensorId) -> TensorId {
    let (shape, other) = (net.shape(x), net.shape(y));
    let (tokens, width, others) = (shape[1], shape[2], other[1]);
    let scores = net.product(y, y, 1, 2, width, others);
    let weights = net.each("Mul+Softmax", &[scores]);
    let latents = net.product(weights, y, 1, 2, others, width);
    let scores = net.product(x, latents, 1, tokens, width, 2);
    let weights = net.each("Mul+Softmax", &[scores]);
    let mixed = net.product(weights, latents, 1, tokens, 2, width);
    let x = net.each("Mul+Add", &[x, mixed]);
    let map = net.op("Transpose+Unsqueeze", &[x], &[1, width, tokens, 1], 0, 0);
    let down = net.conv(map, width / 8, 1, 1, 2, "Relu");
    let up = net.conv(down, width, 1, 1, 2, "Mul");
    net.op("Squeeze+Transpose", &[up], &shape, 0, 0)
}

fn lavish(width: Width) -> OperatorGraph {
    const WIDTH: u64 = 768;
    let mut net = Builder::new(&format!("lavish_{}", width.name()), width);
    let (image, sound) = (net.input("image", &[1, 3, 224, 224]), net.input("spectrogram", &[1, 1, 128, 192]));
    let mut streams = [(image, 196u64), (sound, 96)].map(|(input, tokens)| {
        let patches = net.conv(input, WIDTH, 16, 16, 1, "");
        net.op("Reshape+Transpose+Add", &[patches], &[1, tokens, WIDTH], 0, 2 * tokens * WIDTH)
    });
    for _ in 0..4 {
        for attend in [true, false] {
            let adapted = [adapter(&mut net, streams[0], streams[1]), adapter(&mut net, streams[1], streams[0])];
            for (stream, adapted) in streams.iter_mut().zip(adapted) {
                let tokens = net.shape(*stream)[1];
                let normed = net.each("LayerNormalization", &[*stream]);
                let out = if attend {
                    attention(&mut net, normed, normed, 12, tokens, tokens, WIDTH)
                } else {
                    let hidden = net.linear(normed, 3072, "Add+Gelu");
                    net.linear(hidden, WIDTH, "Add")
                };
                *stream = net.each("Add+Add", &[*stream, out, adapted]);
            }
        }
    }
    let pooled = streams.map(|stream| net.op("LayerNormalization+ReduceMean", &[stream], &[1, WIDTH], 0, 0));
    let joined = net.op("Concat", &pooled, &[1, 2 * WIDTH], 0, 0);
    let hidden = net.linear(joined, WIDTH, "Add+Relu");
    let logits = net.linear(hidden, 29, "Add");
    net.finish(&[logits])
}

fn bitnet(width: Width) -> OperatorGraph {
    const TOKENS: u64 = 32;
    let mut net = Builder::new(&format!("bitnet_{}", width.name()), width);
    // A ternary product: absmax quantisation of its input, the product, the scales.
    let bit_linear = |net: &mut Builder, x: TensorId, out: u64| {
        let codes = net.each("RMSNormalization+Abs+ReduceMax+Mul+Round+Clip", &[x]);
        net.linear(codes, out, "Mul")
    };
    let x = net.input("hidden", &[1, TOKENS, 1536]);
    let normed = net.each("RMSNormalization", &[x]);
    let (q, k, v) =
        (bit_linear(&mut net, normed, 1536), bit_linear(&mut net, normed, 1536), bit_linear(&mut net, normed, 1536));
    let mixed = net.attend([q, k, v], Attention { heads: 16, rows: TOKENS, keys: TOKENS, head: 96 });
    let out = bit_linear(&mut net, mixed, 1536);
    let x = net.each("Add", &[x, out]);
    let normed = net.each("RMSNormalization", &[x]);
    let (gate, up) = (bit_linear(&mut net, normed, 4096), bit_linear(&mut net, normed, 4096));
    let hidden = net.each("Relu+Pow+Mul", &[gate, up]);
    let down = bit_linear(&mut net, hidden, 1536);
    let x = net.each("Add", &[x, down]);
    net.finish(&[x])
}

/// One Gemma layer on [1, tokens, width] with one key-value head; `past` are cached keys and values. Returns the result and
/// this layer's keys and values.
fn gemma_layer(
    net: &mut Builder,
    x: TensorId,
    mlp: u64,
    past: Option<(TensorId, TensorId)>,
    condition: Option<TensorId>,
) -> (TensorId, TensorId, TensorId) {
    const HEADS: u64 = 8;
    const HEAD: u64 = 256;
    let shape = net.shape(x);
    let (tokens, width) = (shape[1], shape[2]);
    // Adaptive norms scale and gate by the denoising time.
    let norm = |net: &mut Builder, x: TensorId| match condition {
        None => (net.each("RMSNormalization", &[x]), None),
        Some(condition) => {
            let modulation = net.linear(condition, 3 * width, "Add");
            (net.each("RMSNormalization+Mul+Add", &[x, modulation]), Some(modulation))
        }
    };
    let residual = |net: &mut Builder, x: TensorId, y: TensorId, gate: Option<TensorId>| match gate {
        None => net.each("Add", &[x, y]),
        Some(gate) => net.each("Mul+Add", &[x, y, gate]),
    };
    let (normed, gate) = norm(net, x);
    let (q, k, v) = (net.linear(normed, HEADS * HEAD, ""), net.linear(normed, HEAD, ""), net.linear(normed, HEAD, ""));
    let (q, k) = (net.each("RotaryEmbedding", &[q]), net.each("RotaryEmbedding", &[k]));
    let (keys, values, count) = match past {
        None => (k, v, tokens),
        Some((past_k, past_v)) => {
            let count = tokens + net.shape(past_k)[1];
            (
                net.op("Concat", &[past_k, k], &[1, count, HEAD], 0, 0),
                net.op("Concat", &[past_v, v], &[1, count, HEAD], 0, 0),
                count,
            )
        }
    };
    let mixed = net.attend([q, keys, values], Attention { heads: HEADS, rows: tokens, keys: count, head: HEAD });
    let out = net.linear(mixed, width, "");
    let x = residual(net, x, out, gate);
    let (normed, gate) = norm(net, x);
    let (activated, up) = (net.linear(normed, mlp, "Gelu"), net.linear(normed, mlp, ""));
    let hidden = net.each("Mul", &[activated, up]);
    let down = net.linear(hidden, width, "");
    (residual(net, x, down, gate), k, v)
}

fn pi05() -> OperatorGraph {
    const LAYERS: usize = 18;
    let mut net = Builder::new("pi05", Width::Fp16);
    let (tokens, image) = (net.input("tokens", &[1, 32]), net.input("image", &[1, 3, 224, 224]));
    let (noise, time) = (net.input("noise", &[1, 50, 32]), net.input("time", &[1, 1024]));
    let text = net.op("Gather", &[tokens], &[1, 32, 2048], 0, 2 * 32 * 2048);
    let text = net.each("Mul", &[text]);
    net.width = Width::Int8;
    let patches = net.conv(image, 1152, 14, 14, 1, "");
    let mut vision = net.op("Reshape+Transpose+Add", &[patches], &[1, 256, 1152], 0, 2 * 256 * 1152);
    for _ in 0..27 {
        vision = vit_block(&mut net, vision, 16, 4304);
    }
    let vision = net.each("LayerNormalization", &[vision]);
    let vision = net.linear(vision, 2048, "Add");
    net.width = Width::Fp16;
    let mut x = net.op("Concat", &[vision, text], &[1, 288, 2048], 0, 0);
    let mut cache = Vec::with_capacity(LAYERS);
    for _ in 0..LAYERS {
        let (result, k, v) = gemma_layer(&mut net, x, 16_384, None, None);
        x = result;
        cache.push((k, v));
    }
    let mut actions = noise;
    for _ in 0..10 {
        let embedded = net.each("Mul+Sin+Cos", &[time]);
        let condition = net.linear(embedded, 1024, "Add+Silu");
        let condition = net.linear(condition, 1024, "Add+Silu");
        let mut x = net.linear(actions, 1024, "Add");
        for &past in &cache {
            x = gemma_layer(&mut net, x, 4096, Some(past), Some(condition)).0;
        }
        let modulation = net.linear(condition, 3072, "Add");
        let x = net.each("RMSNormalization+Mul+Add", &[x, modulation]);
        let velocity = net.linear(x, 32, "Add");
        actions = net.each("Mul+Sub", &[actions, velocity]);
    }
    net.finish(&[actions])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_graphs_are_sound_and_of_the_known_sizes() {
        let all = configurations();
        assert_eq!(all.len(), 19);
        for configuration in &all {
            configuration.graph.validate().unwrap();
            assert!(configuration.source.contains("public"));
        }
        let find = |name: &str| &all.iter().find(|configuration| configuration.name() == name).unwrap().graph;
        let operations = |name: &str| find(name).operators.iter().filter_map(|op| op.flops).sum::<u64>() as f64 / 1e9;
        // Public counts, multiply and add apart: ResNet-50 4.09 GMAC, ViT-B/16 17.6 GMAC.
        assert!((operations("resnet50_fp16") / 8.18 - 1.0).abs() < 0.01, "{}", operations("resnet50_fp16"));
        assert!((operations("vit_b16_fp16") / 35.1 - 1.0).abs() < 0.02, "{}", operations("vit_b16_fp16"));
        // A LLaMA-7B layer has 202 M weights.
        let weights = |name: &str| find(name).operators.iter().map(|op| op.weight_bytes).sum::<u64>();
        assert!((weights("llama7b_1l_int8") as f64 / 202.4e6 - 1.0).abs() < 0.01);
        assert_eq!(weights("llama7b_1l_fp16"), 2 * weights("llama7b_1l_int8"));
        let counts: BTreeMap<String, usize> = all.iter().map(|c| (c.name(), c.graph.len())).collect();
        assert_eq!(counts["resnet50_fp16"], 72);
        assert!((3_500..5_000).contains(&counts["pi05"]), "{counts:?}");
        let conv = find("snn_vgg9_fp16").operators.iter().filter(|op| op.kind.starts_with("Conv")).count();
        assert_eq!(conv, 37);
        assert!(find("kan_fp16").operators.iter().any(|op| op.kind == "BitwiseAnd"));
    }
}
