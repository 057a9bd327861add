//! Blocks on the `w8a8` path: INT8 weights and activations, static scales, state in FP16.

use super::scales::{CROSS_SITES, SELF_SITES, Sites};
use super::{BlockScales, Conditions, Site, codes, codes_mut, ffn_rows, floats, floats_mut, grown, modulate, padded};
use crate::VideoError;
use crate::model::views::tiled;
use crate::model::{AttentionView, BlockView, LinearView};
use trefoil_kernels::{
    Activation, ActivationScale, Adapter, AttentionScales, AttentionSink, Codes, Epilogue, GemmSink, Kernels,
    Modulation, Norm, NormSink, Operands, PackedKeyValue, RowSink, Rows, Workspace,
};

/// Scratch of the `w8a8` path; grows on first use, then allocates nothing.
#[derive(Debug, Default)]
pub struct Int8Blocks {
    workspace: Workspace,
    packed: PackedKeyValue,
    modulation: Vec<f32>,
    input: Vec<i8>,
    query: Vec<i8>,
    key: Vec<i8>,
    value: Vec<i8>,
    context: Vec<i8>,
    middle: Vec<i8>,
    low_rank: LowRank,
    of_heads: [Vec<f32>; 3],
}

/// Keys and values of a text for one block. They depend on prompt, expert and block and not on the step, so they are computed in the
/// first step that needs them and kept for the others.
#[derive(Debug, Default)]
pub struct TextKeyValue {
    packed: PackedKeyValue,
    is_ready: bool,
}

impl TextKeyValue {
    /// Has the next execution compute them anew: another text. The memory is kept for it.
    pub fn forget(&mut self) {
        self.is_ready = false;
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }
}

/// Scratch of an adapter: `x·Aᵀ` in floats, then in codes with a scale per row.
#[derive(Debug, Default)]
struct LowRank {
    floats: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<f32>,
}

/// What stays the same during a block.
struct Run<'a> {
    kernels: &'a Kernels,
    scales: &'a BlockScales,
    width: usize,
    heads: usize,
    eps: f32,
}

impl Int8Blocks {
    /// Bytes of scratch held.
    pub fn bytes(&self) -> usize {
        let codes =
            [&self.input, &self.query, &self.key, &self.value, &self.context, &self.middle, &self.low_rank.codes];
        let floats = [&self.modulation, &self.low_rank.floats, &self.low_rank.scales];
        self.workspace.bytes()
            + self.packed.bytes()
            + codes.iter().map(|buffer| buffer.capacity()).sum::<usize>()
            + floats.iter().map(|buffer| buffer.capacity() * size_of::<f32>()).sum::<usize>()
    }

    /// Runs a block in place on `state` (tokens × d), with static activation scales. `text` is what earlier executions of this block left
    /// for the same context, expert and scales.
    ///
    /// # Errors
    /// Shapes that do not fit each other, weights that are not quantised, scales that are not positive numbers.
    pub fn run(
        &mut self,
        kernels: &Kernels,
        block: &BlockView<'_>,
        scales: &BlockScales,
        (heads, eps): (usize, f32),
        (conditions, text): (&Conditions<'_>, &mut TextKeyValue),
        state: &mut [f32],
    ) -> Result<(), VideoError> {
        let width = block.norm_gain.len();
        let tokens = state.len() / width;
        let run = Run { kernels, scales, width, heads, eps };
        modulate(block.table, conditions.modulation, &mut self.modulation);
        let modulation = std::mem::take(&mut self.modulation);
        let row = |index: usize| &modulation[index * width..(index + 1) * width];
        let [self_attention, cross_attention] = &block.attention;
        // Self-attention.
        let adaptive = Modulation::AdaLn { scale: row(1), shift: row(0) };
        self.norm(&run, state, adaptive, Site::SelfIn)?;
        self.attend(&run, self_attention, (tokens, None), conditions, &SELF_SITES)?;
        let affine = Modulation::Affine { gain: block.norm_gain, bias: block.norm_bias };
        self.add(&run, &self_attention.out, (Site::SelfOut, Some(row(2))), state, (affine, Site::CrossIn))?;
        // Cross-attention.
        if !text.is_ready {
            let context = grown(&mut self.context, conditions.text * padded(width));
            let out = codes_mut("the context", context, conditions.text, width)?;
            let sink = RowSink::Codes { out, scale: scales.get(Site::Text) };
            let values = floats("the text", conditions.context, conditions.text, width)?;
            kernels.quantise(values, sink, &mut self.workspace)?;
        }
        self.attend(&run, cross_attention, (tokens, Some(text)), conditions, &CROSS_SITES)?;
        let adaptive = Modulation::AdaLn { scale: row(4), shift: row(3) };
        self.add(&run, &cross_attention.out, (Site::CrossOut, None), state, (adaptive, Site::FfnIn))?;
        // Feed-forward, a run of rows at a time.
        let [first, second] = &block.ffn;
        let ffn = first.bias.len();
        let most = ffn_rows(tokens);
        let Int8Blocks { workspace, input, middle, low_rank, .. } = self;
        for (state, input) in state.chunks_mut(most * width).zip(input.chunks(most * padded(width))) {
            let rows = state.len() / width;
            let middle = grown(middle, rows * padded(ffn));
            let out = codes_mut("the middle", middle, rows, ffn)?;
            let sink = GemmSink::Codes { out, scale: scales.get(Site::FfnMiddle) };
            let from = run.codes(input, rows, width, Site::FfnIn)?;
            run.linear(&from, first, Activation::GeluTanh, To::Product(sink), low_rank, workspace)?;
            let from = run.codes(middle, rows, ffn, Site::FfnMiddle)?;
            let sink = residual(state, rows, width, Some(row(5)))?;
            run.linear(&from, second, Activation::Identity, To::Product(sink), low_rank, workspace)?;
        }
        self.modulation = modulation;
        Ok(())
    }

    /// `self.input ← codes of norm(state)`.
    fn norm(&mut self, run: &Run<'_>, state: &[f32], modulation: Modulation<'_>, site: Site) -> Result<(), VideoError> {
        let rows = state.len() / run.width;
        let input = grown(&mut self.input, rows * padded(run.width));
        let out = codes_mut("the norm", input, rows, run.width)?;
        let sink = RowSink::Codes { out, scale: run.scales.get(site) };
        let state = floats("the state", state, rows, run.width)?;
        Ok(run.kernels.layer_norm(state, run.eps, modulation, sink, &mut self.workspace)?)
    }

    /// Attention from `self.input` back into `self.input`; keys and values are its own or those of the text.
    fn attend(
        &mut self,
        run: &Run<'_>,
        attention: &AttentionView<'_>,
        (tokens, text): (usize, Option<&mut TextKeyValue>),
        conditions: &Conditions<'_>,
        sites: &Sites,
    ) -> Result<(), VideoError> {
        let Int8Blocks { workspace, packed, input, query, key, value, context, low_rank, of_heads, .. } = self;
        let width = run.width;
        let source: &[i8] = if text.is_none() { input } else { context };
        let rotary = text.is_none().then_some(conditions.rotary);
        // Whether keys and values lie there already; those of the tokens never do.
        let mut never = false;
        let (keys, packed, is_ready) = match text {
            None => (tokens, packed, &mut never),
            Some(text) => (conditions.text, &mut text.packed, &mut text.is_ready),
        };
        let projections = if *is_ready { 1 } else { 2 };
        let [query_site, key_site, value_site] = sites.operands;
        let [query_input, other_input] = sites.inputs;
        let query = grown(query, tokens * padded(width));
        let (key, value) = (grown(key, keys * padded(width)), grown(value, keys * padded(width)));
        for (linear, gain, from, from_site, rows, out, site) in [
            (&attention.query, attention.query_gain, &input[..], query_input, tokens, &mut *query, query_site),
            (&attention.key, attention.key_gain, source, other_input, keys, &mut *key, key_site),
        ]
        .into_iter()
        .take(projections)
        {
            let out = RowSink::Codes { out: codes_mut("the norm", out, rows, width)?, scale: run.scales.get(site) };
            let norm = Norm::Rms { eps: run.eps, gain, rotary };
            let from = run.codes(from, rows, width, from_site)?;
            let to = To::Norm(NormSink { norm, out });
            run.linear(&from, linear, Activation::Identity, to, low_rank, workspace)?;
        }
        if !*is_ready {
            let out = codes_mut("the values", value, keys, width)?;
            let sink = GemmSink::Codes { out, scale: run.scales.get(value_site) };
            let from = run.codes(source, keys, width, other_input)?;
            run.linear(&from, &attention.value, Activation::Identity, To::Product(sink), low_rank, workspace)?;
            let (k, v) = (codes("the keys", key, keys, width)?, codes("the values", value, keys, width)?);
            run.kernels.pack_key_value(k, v, run.heads, packed, workspace)?;
            *is_ready = true;
        }
        // One scale for all heads: a row is quantised by one call.
        for (of_heads, site) in of_heads.iter_mut().zip(sites.operands) {
            of_heads.clear();
            of_heads.resize(run.heads, run.scales.get(site));
        }
        let [query_scales, key_scales, value_scales] = of_heads;
        let scales = AttentionScales { query: query_scales, key: key_scales, value: value_scales };
        let out = codes_mut("the output", input, tokens, width)?;
        let sink = AttentionSink::Codes { out, scale: run.scales.get(sites.out) };
        let q: Rows<'_, i8> = codes("the queries", query, tokens, width)?;
        Ok(run.kernels.attention_w8a8(q, packed, scales, sink, workspace)?)
    }

    /// `state += gate·linear(self.input)`, kept in FP16 precision, and `self.input ← codes of norm(state)` for what follows.
    fn add(
        &mut self,
        run: &Run<'_>,
        linear: &LinearView<'_>,
        (site, gate): (Site, Option<&[f32]>),
        state: &mut [f32],
        (modulation, next): (Modulation<'_>, Site),
    ) -> Result<(), VideoError> {
        let tokens = state.len() / run.width;
        let Int8Blocks { workspace, input, query, low_rank, .. } = self;
        let sink = residual(state, tokens, run.width, gate)?;
        // The queries are no longer needed, and the product still reads the input.
        let codes = grown(query, tokens * padded(run.width));
        let out = RowSink::Codes { out: codes_mut("the norm", codes, tokens, run.width)?, scale: run.scales.get(next) };
        let norm = NormSink { norm: Norm::Layer { eps: run.eps, modulation }, out };
        let from = run.codes(input, tokens, run.width, site)?;
        run.linear(&from, linear, Activation::Identity, To::Both(sink, norm), low_rank, workspace)?;
        std::mem::swap(input, query);
        Ok(())
    }
}

/// Where the product of a linear layer goes.
enum To<'a> {
    Product(GemmSink<'a>),
    /// To a norm of it only.
    Norm(NormSink<'a>),
    Both(GemmSink<'a>, NormSink<'a>),
}

fn residual<'a>(
    state: &'a mut [f32],
    rows: usize,
    width: usize,
    gate: Option<&'a [f32]>,
) -> Result<GemmSink<'a>, VideoError> {
    Ok(GemmSink::Residual { state: floats_mut("the state", state, rows, width)?, gate, precision: Operands::F16 })
}

impl Run<'_> {
    fn codes<'a>(&self, data: &'a [i8], rows: usize, columns: usize, site: Site) -> Result<Codes<'a>, VideoError> {
        let scale = ActivationScale::Tensor(self.scales.get(site));
        Ok(Codes { codes: codes("the codes", data, rows, columns)?, scale })
    }

    fn linear(
        &self,
        input: &Codes<'_>,
        linear: &LinearView<'_>,
        activation: Activation,
        to: To<'_>,
        low_rank: &mut LowRank,
        workspace: &mut Workspace,
    ) -> Result<(), VideoError> {
        let mut epilogue = Epilogue { bias: Some(linear.bias), adapter: None, activation };
        if let Some(adapter) = &linear.adapter {
            let (rows, rank) = (input.codes.rows(), adapter.rank());
            let hidden = grown(&mut low_rank.floats, rows * rank);
            let sink = GemmSink::F32 { out: floats_mut("the factors", hidden, rows, rank)?, operands: Operands::F32 };
            self.kernels.gemm_w8a8(input, &tiled(&adapter.down)?, &Epilogue::default(), sink, workspace)?;
            let hidden_codes = grown(&mut low_rank.codes, rows * padded(rank));
            let out = codes_mut("the codes of the factors", hidden_codes, rows, rank)?;
            let scales = grown(&mut low_rank.scales, rows);
            let sink = RowSink::DynamicCodes { out, scales };
            self.kernels.quantise(floats("the factors", hidden, rows, rank)?, sink, workspace)?;
            let hidden = Codes {
                codes: codes("the codes of the factors", hidden_codes, rows, rank)?,
                scale: ActivationScale::Row(&low_rank.scales),
            };
            epilogue.adapter = Some(Adapter { hidden, up: tiled(&adapter.up)?, factor: adapter.factor });
        }
        let weights = tiled(&linear.weights)?;
        match to {
            To::Product(sink) => self.kernels.gemm_w8a8(input, &weights, &epilogue, sink, workspace)?,
            To::Norm(norm) => self.kernels.gemm_w8a8_norm(input, &weights, &epilogue, norm, workspace)?,
            To::Both(sink, norm) => {
                self.kernels.gemm_w8a8_then_norm(input, &weights, &epilogue, sink, norm, workspace)?;
            }
        }
        Ok(())
    }
}
