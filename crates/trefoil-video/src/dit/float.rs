//! Blocks on the float paths: `f32` and `w8a16`.

use super::{BlockScales, Conditions, Site, ffn_rows, floats, floats_mut, grown, modulate};
use crate::VideoError;
use crate::model::{AttentionView, BlockView, LinearView};
use trefoil_kernels::{
    Activation, AttentionSink, FloatAdapter, FloatEpilogue, GemmSink, Kernels, Modulation, Operands, RowSink, Rows,
    Workspace,
};

/// Scratch of the float paths; grows on first use, then allocates nothing.
#[derive(Debug, Default)]
pub struct FloatBlocks {
    workspace: Workspace,
    modulation: Vec<f32>,
    input: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    context: Vec<f32>,
    middle: Vec<f32>,
    hidden: Vec<f32>,
}

/// What stays the same during a block.
struct Run<'a> {
    kernels: &'a Kernels,
    operands: Operands,
    width: usize,
    heads: usize,
    eps: f32,
}

impl FloatBlocks {
    /// Bytes of scratch held.
    pub fn bytes(&self) -> usize {
        let buffers = [
            &self.modulation,
            &self.input,
            &self.query,
            &self.key,
            &self.value,
            &self.context,
            &self.middle,
            &self.hidden,
        ];
        self.workspace.bytes() + buffers.iter().map(|buffer| buffer.capacity() * size_of::<f32>()).sum::<usize>()
    }

    /// Runs a block in place on `state` (tokens × d). With [`Operands::F16`] every GEMM operand is rounded to FP16 (`w8a16`).
    /// `record` widens the ranges of the operands to what was seen.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    #[allow(clippy::too_many_arguments, reason = "a block, its sizes, its conditions and its state")]
    pub fn run(
        &mut self,
        kernels: &Kernels,
        operands: Operands,
        block: &BlockView<'_>,
        (heads, eps): (usize, f32),
        conditions: &Conditions<'_>,
        state: &mut [f32],
        mut record: Option<&mut BlockScales>,
    ) -> Result<(), VideoError> {
        let width = block.norm_gain.len();
        let tokens = state.len() / width;
        let run = Run { kernels, operands, width, heads, eps };
        modulate(block.table, conditions.modulation, &mut self.modulation);
        let modulation = std::mem::take(&mut self.modulation);
        let row = |index: usize| &modulation[index * width..(index + 1) * width];
        // Self-attention.
        let input = grown(&mut self.input, tokens * width);
        let sink = RowSink::F32 { out: floats_mut("the norm", input, tokens, width)?, operands };
        let adaptive = Modulation::AdaLn { scale: row(1), shift: row(0) };
        kernels.layer_norm(floats("the state", state, tokens, width)?, eps, adaptive, sink, &mut self.workspace)?;
        if let Some(record) = record.as_deref_mut() {
            record.observe(Site::SelfIn, input);
        }
        let [self_attention, cross_attention] = &block.attention;
        let sites = [Site::SelfQuery, Site::SelfKey, Site::SelfValue, Site::SelfOut];
        self.attend(&run, self_attention, (tokens, None), conditions, sites, record.as_deref_mut())?;
        let gate = Some(row(2));
        self.add(&run, &self_attention.out, tokens, gate, state)?;
        // Cross-attention.
        let input = grown(&mut self.input, tokens * width);
        let sink = RowSink::F32 { out: floats_mut("the norm", input, tokens, width)?, operands };
        let affine = Modulation::Affine { gain: block.norm_gain, bias: block.norm_bias };
        kernels.layer_norm(floats("the state", state, tokens, width)?, eps, affine, sink, &mut self.workspace)?;
        let context = grown(&mut self.context, conditions.text * width);
        let sink = RowSink::F32 { out: floats_mut("the context", context, conditions.text, width)?, operands };
        let text = floats("the text", conditions.context, conditions.text, width)?;
        kernels.quantise(text, sink, &mut self.workspace)?;
        if let Some(record) = record.as_deref_mut() {
            record.observe(Site::CrossIn, input);
            record.observe(Site::Text, context);
        }
        let sites = [Site::CrossQuery, Site::CrossKey, Site::CrossValue, Site::CrossOut];
        self.attend(&run, cross_attention, (tokens, Some(conditions.text)), conditions, sites, record.as_deref_mut())?;
        self.add(&run, &cross_attention.out, tokens, None, state)?;
        // Feed-forward, a run of rows at a time.
        let [first, second] = &block.ffn;
        let ffn = first.bias.len();
        for state in state.chunks_mut(ffn_rows(tokens) * width) {
            let rows = state.len() / width;
            let input = grown(&mut self.input, rows * width);
            let sink = RowSink::F32 { out: floats_mut("the norm", input, rows, width)?, operands };
            let adaptive = Modulation::AdaLn { scale: row(4), shift: row(3) };
            kernels.layer_norm(floats("the state", state, rows, width)?, eps, adaptive, sink, &mut self.workspace)?;
            let middle = grown(&mut self.middle, rows * ffn);
            let sink = GemmSink::F32 { out: floats_mut("the middle", middle, rows, ffn)?, operands };
            let input = floats("the norm", input, rows, width)?;
            run.linear(input, first, Activation::GeluTanh, sink, &mut self.hidden, &mut self.workspace)?;
            if let Some(record) = record.as_deref_mut() {
                record.observe(Site::FfnIn, &self.input[..rows * width]);
                record.observe(Site::FfnMiddle, middle);
            }
            let sink = residual(state, rows, width, Some(row(5)))?;
            let input = floats("the middle", middle, rows, ffn)?;
            run.linear(input, second, Activation::Identity, sink, &mut self.hidden, &mut self.workspace)?;
        }
        self.modulation = modulation;
        Ok(())
    }

    /// Attention from `self.input` (and the context, where `keys` is the text's length) back into `self.input`.
    fn attend(
        &mut self,
        run: &Run<'_>,
        attention: &AttentionView<'_>,
        (tokens, text): (usize, Option<usize>),
        conditions: &Conditions<'_>,
        [query_site, key_site, value_site, out_site]: [Site; 4],
        record: Option<&mut BlockScales>,
    ) -> Result<(), VideoError> {
        let FloatBlocks { workspace, input, query, key, value, context, hidden, .. } = self;
        let (width, operands) = (run.width, run.operands);
        let keys = text.unwrap_or(tokens);
        let rotary = text.is_none().then_some(conditions.rotary);
        let input = grown(input, tokens * width);
        let (query, key) = (grown(query, tokens * width), grown(key, keys * width));
        let value = grown(value, tokens.max(keys) * width);
        let source: &[f32] = if text.is_none() { input } else { context };
        // Queries and keys go through the buffer of the values, because a norm needs whole rows.
        for (linear, gain, from, rows, out) in [
            (&attention.query, attention.query_gain, &*input, tokens, &mut *query),
            (&attention.key, attention.key_gain, source, keys, &mut *key),
        ] {
            let out_rows = &mut value[..rows * width];
            let sink =
                GemmSink::F32 { out: floats_mut("the projection", out_rows, rows, width)?, operands: Operands::F32 };
            run.linear(floats("the input", from, rows, width)?, linear, Activation::Identity, sink, hidden, workspace)?;
            let sink = RowSink::F32 { out: floats_mut("the norm", out, rows, width)?, operands };
            let projected = floats("the projection", value, rows, width)?;
            run.kernels.rms_norm(projected, run.eps, gain, rotary, sink, workspace)?;
        }
        let sink = GemmSink::F32 { out: floats_mut("the values", value, keys, width)?, operands };
        let from = floats("the input", source, keys, width)?;
        run.linear(from, &attention.value, Activation::Identity, sink, hidden, workspace)?;
        let sink = AttentionSink::F32 { out: floats_mut("the output", input, tokens, width)?, operands };
        let (q, k, v) = (
            floats("the queries", query, tokens, width)?,
            floats("the keys", key, keys, width)?,
            floats("the values", value, keys, width)?,
        );
        run.kernels.attention_f32(q, k, v, run.heads, operands, sink, workspace)?;
        if let Some(record) = record {
            record.observe(query_site, query);
            record.observe(key_site, key);
            record.observe(value_site, &value[..keys * width]);
            record.observe(out_site, input);
        }
        Ok(())
    }

    /// `state += gate·linear(self.input)`.
    fn add(
        &mut self,
        run: &Run<'_>,
        linear: &LinearView<'_>,
        tokens: usize,
        gate: Option<&[f32]>,
        state: &mut [f32],
    ) -> Result<(), VideoError> {
        let sink = residual(state, tokens, run.width, gate)?;
        let input = floats("the output", &self.input, tokens, run.width)?;
        run.linear(input, linear, Activation::Identity, sink, &mut self.hidden, &mut self.workspace)
    }
}

fn residual<'a>(
    state: &'a mut [f32],
    rows: usize,
    width: usize,
    gate: Option<&'a [f32]>,
) -> Result<GemmSink<'a>, VideoError> {
    Ok(GemmSink::Residual { state: floats_mut("the state", state, rows, width)?, gate, precision: Operands::F32 })
}

impl Run<'_> {
    fn linear(
        &self,
        input: Rows<'_, f32>,
        linear: &LinearView<'_>,
        activation: Activation,
        sink: GemmSink<'_>,
        hidden: &mut Vec<f32>,
        workspace: &mut Workspace,
    ) -> Result<(), VideoError> {
        let mut epilogue = FloatEpilogue { bias: Some(linear.bias), adapter: None, activation };
        if let Some(adapter) = &linear.adapter {
            let (rows, rank) = (input.rows(), adapter.rank());
            let hidden = grown(hidden, rows * rank);
            let sink = GemmSink::F32 { out: floats_mut("the factors", hidden, rows, rank)?, operands: self.operands };
            self.kernels.gemm_f32(input, &adapter.down, self.operands, &FloatEpilogue::default(), sink, workspace)?;
            let hidden = floats("the factors", hidden, rows, rank)?;
            epilogue.adapter = Some(FloatAdapter { hidden, up: adapter.up, factor: adapter.factor });
        }
        Ok(self.kernels.gemm_f32(input, &linear.weights, self.operands, &epilogue, sink, workspace)?)
    }
}
