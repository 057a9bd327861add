//! Blocks on the `w8a8` path on an OpenCL device: the operators of [`super::Int8Blocks`] in the same order, so the same bits.
//!
//! Everything here is enqueued on one in-order queue; only [`OpenClBlocks::load`] and [`OpenClBlocks::store`] wait. Weights come
//! through [`WeightBuffers`], as they lie.

use super::scales::{CROSS_SITES, SELF_SITES, Sites};
use super::{BlockScales, Site, ffn_rows, padded};
use crate::VideoError;
use crate::engine::WeightBuffers;
use crate::model::{AttentionView, BlockView, LinearView};
use trefoil_kernels::opencl::{
    ActivationScale, Adapter, AttentionSink, Buffer, Codes, Element, Epilogue, GemmSink, Kernels, Modulation,
    OpenClError, PackedKeyValue, RotaryTable, RowSink, Rows, RowsMut, Tiled,
};
use trefoil_kernels::{Activation, AttentionScales, KernelError, Operands};

/// A buffer that grows.
#[derive(Debug)]
pub(super) struct Grown<T: Element>(Option<Buffer<T>>);

impl<T: Element> Default for Grown<T> {
    fn default() -> Grown<T> {
        Grown(None)
    }
}

impl<T: Element> Grown<T> {
    /// At least `len` elements; their values are anything where it grew.
    pub(super) fn at_least(&mut self, kernels: &Kernels, len: usize) -> Result<&mut Buffer<T>, OpenClError> {
        let buffer = match self.0.take() {
            Some(buffer) if buffer.len() >= len => buffer,
            // The old one goes first: at real sizes two would not be small change.
            old => {
                drop(old);
                kernels.zeroed(len)?
            }
        };
        Ok(self.0.insert(buffer))
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |buffer| buffer.len() * size_of::<T>())
    }
}

/// State and scratch of the path on a device; grows on first use, then allocates nothing.
#[derive(Debug, Default)]
pub struct OpenClBlocks {
    packed: PackedKeyValue,
    state: Grown<f32>,
    modulation: Grown<f32>,
    projected: Grown<f32>,
    input: Grown<i8>,
    query: Grown<i8>,
    key: Grown<i8>,
    value: Grown<i8>,
    context: Grown<i8>,
    middle: Grown<i8>,
    low_rank: LowRank,
    of_heads: [Vec<f32>; 3],
}

/// Scratch of an adapter: `x·Aᵀ` in floats, then in codes with a scale per row.
#[derive(Debug, Default)]
struct LowRank {
    floats: Grown<f32>,
    codes: Grown<i8>,
    scales: Grown<f32>,
}

/// What the blocks of one branch of one step need besides weights, as the device has it. See [`super::Conditions`].
#[derive(Debug, Clone, Copy)]
pub struct DeviceConditions<'a> {
    /// Text context, `text × d`.
    pub context: &'a Buffer<f32>,
    /// Its rows.
    pub text: usize,
    /// `[6, d]`.
    pub modulation: &'a Buffer<f32>,
    /// Positions.
    pub rotary: &'a RotaryTable,
}

/// What stays the same during a block.
struct Run<'a> {
    kernels: &'a Kernels,
    weights: &'a WeightBuffers,
    scales: &'a BlockScales,
    width: usize,
    heads: usize,
    eps: f32,
}

impl OpenClBlocks {
    /// Bytes of buffers held, the state among them.
    pub fn bytes(&self) -> usize {
        let codes =
            [&self.input, &self.query, &self.key, &self.value, &self.context, &self.middle, &self.low_rank.codes];
        let floats = [&self.state, &self.modulation, &self.projected, &self.low_rank.floats, &self.low_rank.scales];
        self.packed.bytes()
            + codes.iter().map(|buffer| buffer.bytes()).sum::<usize>()
            + floats.iter().map(|buffer| buffer.bytes()).sum::<usize>()
    }

    /// Takes the state (tokens × d) over.
    ///
    /// # Errors
    /// Sizes that the device refuses.
    pub fn load(&mut self, kernels: &Kernels, hidden: &[f32]) -> Result<(), VideoError> {
        self.state.at_least(kernels, hidden.len())?.write()?[..hidden.len()].copy_from_slice(hidden);
        Ok(())
    }

    /// Waits for all blocks and gives the state back.
    ///
    /// # Errors
    /// What the device reports about the work before.
    pub fn store(&mut self, kernels: &Kernels, hidden: &mut [f32]) -> Result<(), VideoError> {
        let len = hidden.len();
        hidden.copy_from_slice(&self.state.at_least(kernels, len)?.read()?[..len]);
        Ok(())
    }

    /// Enqueues a block on the state, of which the first `tokens` rows count.
    ///
    /// # Errors
    /// Shapes that do not fit each other, weights that are not quantised, scales that are not positive numbers.
    pub fn run(
        &mut self,
        (kernels, weights): (&Kernels, &WeightBuffers),
        block: &BlockView<'_>,
        scales: &BlockScales,
        (heads, eps): (usize, f32),
        conditions: &DeviceConditions<'_>,
        tokens: usize,
    ) -> Result<(), VideoError> {
        let width = block.norm_gain.len();
        let run = Run { kernels, weights, scales, width, heads, eps };
        // Taken out so that vectors of it can be used beside the rest.
        let mut modulation = std::mem::take(&mut self.modulation);
        let sums = modulation.at_least(kernels, 6 * width)?;
        kernels.add(weights.floats(block.table)?, conditions.modulation.slice("the step", 0, 6 * width)?, sums)?;
        let sums = &*sums;
        let row = |index: usize| sums.slice("the modulation", index * width, width);
        let [self_attention, cross_attention] = &block.attention;
        // Self-attention.
        let adaptive = Modulation::AdaLn { scale: row(1)?, shift: row(0)? };
        self.norm(&run, (0, tokens), adaptive, Site::SelfIn)?;
        self.attend(&run, self_attention, (tokens, None), conditions, &SELF_SITES)?;
        self.add(&run, &self_attention.out, (tokens, Site::SelfOut), Some(row(2)?))?;
        // Cross-attention.
        let affine =
            Modulation::Affine { gain: weights.floats(block.norm_gain)?, bias: weights.floats(block.norm_bias)? };
        self.norm(&run, (0, tokens), affine, Site::CrossIn)?;
        let context = self.context.at_least(kernels, conditions.text * padded(width))?;
        let sink = RowSink::Codes { out: codes_mut(context, conditions.text, width)?, scale: scales.get(Site::Text) };
        kernels.quantise(floats(conditions.context, (0, conditions.text), width)?, sink)?;
        self.attend(&run, cross_attention, (tokens, Some(conditions.text)), conditions, &CROSS_SITES)?;
        self.add(&run, &cross_attention.out, (tokens, Site::CrossOut), None)?;
        // Feed-forward, a run of rows at a time.
        let [into, out_of] = &block.ffn;
        let ffn = into.bias.len();
        let most = ffn_rows(tokens);
        for first in (0..tokens).step_by(most) {
            let rows = most.min(tokens - first);
            self.norm(&run, (first, rows), Modulation::AdaLn { scale: row(4)?, shift: row(3)? }, Site::FfnIn)?;
            let middle = self.middle.at_least(kernels, rows * padded(ffn))?;
            let sink = GemmSink::Codes { out: codes_mut(middle, rows, ffn)?, scale: scales.get(Site::FfnMiddle) };
            let input = self.input.at_least(kernels, rows * padded(width))?;
            let from = run.codes(input, rows, width, Site::FfnIn)?;
            run.linear(&from, into, Activation::GeluTanh, sink, &mut self.low_rank)?;
            let from = run.codes(middle, rows, ffn, Site::FfnMiddle)?;
            let state = self.state.at_least(kernels, tokens * width)?;
            let sink = GemmSink::Residual {
                state: floats_mut(state, (first, rows), width)?,
                gate: Some(row(5)?),
                precision: Operands::F16,
            };
            run.linear(&from, out_of, Activation::Identity, sink, &mut self.low_rank)?;
        }
        self.modulation = modulation;
        Ok(())
    }

    /// `self.input ← codes of norm(rows of the state)`.
    fn norm(
        &mut self,
        run: &Run<'_>,
        (first, rows): (usize, usize),
        modulation: Modulation<'_>,
        site: Site,
    ) -> Result<(), VideoError> {
        let state = self.state.at_least(run.kernels, (first + rows) * run.width)?;
        let input = self.input.at_least(run.kernels, rows * padded(run.width))?;
        let sink = RowSink::Codes { out: codes_mut(input, rows, run.width)?, scale: run.scales.get(site) };
        Ok(run.kernels.layer_norm(floats(state, (first, rows), run.width)?, run.eps, modulation, sink)?)
    }

    /// `self.input ← codes of attention`, over the tokens themselves or over `self.context`.
    fn attend(
        &mut self,
        run: &Run<'_>,
        attention: &AttentionView<'_>,
        (tokens, text): (usize, Option<usize>),
        conditions: &DeviceConditions<'_>,
        sites: &Sites,
    ) -> Result<(), VideoError> {
        let OpenClBlocks { packed, projected, input, query, key, value, context, low_rank, of_heads, .. } = self;
        let (kernels, width) = (run.kernels, run.width);
        let keys = text.unwrap_or(tokens);
        let rotary = text.is_none().then_some(conditions.rotary);
        let [query_site, key_site, value_site] = sites.operands;
        let [query_input, other_input] = sites.inputs;
        let projected = projected.at_least(kernels, tokens.max(keys) * width)?;
        let query = query.at_least(kernels, tokens * padded(width))?;
        let key = key.at_least(kernels, keys * padded(width))?;
        let value = value.at_least(kernels, keys * padded(width))?;
        let input = input.at_least(kernels, tokens * padded(width))?;
        let source = match text {
            None => &*input,
            Some(text) => &*context.at_least(kernels, text * padded(width))?,
        };
        for (linear, gain, from, from_site, rows, out, site) in [
            (&attention.query, attention.query_gain, &*input, query_input, tokens, &mut *query, query_site),
            (&attention.key, attention.key_gain, source, other_input, keys, &mut *key, key_site),
        ] {
            let sink = GemmSink::F32 { out: floats_mut(projected, (0, rows), width)?, operands: Operands::F32 };
            let from = run.codes(from, rows, width, from_site)?;
            run.linear(&from, linear, Activation::Identity, sink, low_rank)?;
            let sink = RowSink::Codes { out: codes_mut(out, rows, width)?, scale: run.scales.get(site) };
            let from = floats(projected, (0, rows), width)?;
            kernels.rms_norm(from, run.eps, run.weights.floats(gain)?, rotary, sink)?;
        }
        let sink = GemmSink::Codes { out: codes_mut(value, keys, width)?, scale: run.scales.get(value_site) };
        let from = run.codes(source, keys, width, other_input)?;
        run.linear(&from, &attention.value, Activation::Identity, sink, low_rank)?;
        kernels.pack_key_value(codes(key, keys, width)?, codes(value, keys, width)?, run.heads, packed)?;
        // One scale for all heads: a row is quantised by one call.
        for (of_heads, site) in of_heads.iter_mut().zip(sites.operands) {
            of_heads.clear();
            of_heads.resize(run.heads, run.scales.get(site));
        }
        let [query_scales, key_scales, value_scales] = of_heads;
        let scales = AttentionScales { query: query_scales, key: key_scales, value: value_scales };
        let sink = AttentionSink::Codes { out: codes_mut(input, tokens, width)?, scale: run.scales.get(sites.out) };
        Ok(kernels.attention_w8a8(codes(query, tokens, width)?, packed, scales, sink)?)
    }

    /// `state += gate·linear(self.input)`, kept in FP16 precision.
    fn add(
        &mut self,
        run: &Run<'_>,
        linear: &LinearView<'_>,
        (tokens, site): (usize, Site),
        gate: Option<trefoil_kernels::opencl::Vector<'_>>,
    ) -> Result<(), VideoError> {
        let state = self.state.at_least(run.kernels, tokens * run.width)?;
        let input = self.input.at_least(run.kernels, tokens * padded(run.width))?;
        let sink =
            GemmSink::Residual { state: floats_mut(state, (0, tokens), run.width)?, gate, precision: Operands::F16 };
        let from = run.codes(input, tokens, run.width, site)?;
        run.linear(&from, linear, Activation::Identity, sink, &mut self.low_rank)
    }
}

pub(super) fn floats(
    buffer: &Buffer<f32>,
    (first, rows): (usize, usize),
    width: usize,
) -> Result<Rows<'_, f32>, KernelError> {
    buffer.rows("the floats", (first * width, rows, width, width))
}

pub(super) fn floats_mut(
    buffer: &mut Buffer<f32>,
    (first, rows): (usize, usize),
    width: usize,
) -> Result<RowsMut<'_, f32>, KernelError> {
    buffer.rows_mut("the floats", (first * width, rows, width, width))
}

pub(super) fn codes(buffer: &Buffer<i8>, rows: usize, columns: usize) -> Result<Rows<'_, i8>, KernelError> {
    buffer.rows("the codes", (0, rows, columns, padded(columns)))
}

pub(super) fn codes_mut(buffer: &mut Buffer<i8>, rows: usize, columns: usize) -> Result<RowsMut<'_, i8>, KernelError> {
    buffer.rows_mut("the codes", (0, rows, columns, padded(columns)))
}

impl Run<'_> {
    fn codes<'b>(
        &self,
        buffer: &'b Buffer<i8>,
        rows: usize,
        columns: usize,
        site: Site,
    ) -> Result<Codes<'b>, VideoError> {
        Ok(Codes { codes: codes(buffer, rows, columns)?, scale: ActivationScale::Tensor(self.scales.get(site)) })
    }

    fn linear(
        &self,
        input: &Codes<'_>,
        linear: &LinearView<'_>,
        activation: Activation,
        sink: GemmSink<'_>,
        low_rank: &mut LowRank,
    ) -> Result<(), VideoError> {
        let (kernels, weights) = (self.kernels, self.weights);
        let tiled: Tiled<'_> = weights.tiled(&linear.weights)?;
        let mut epilogue = Epilogue { bias: Some(weights.floats(linear.bias)?), adapter: None, activation };
        if let Some(adapter) = &linear.adapter {
            let ((rows, _), rank) = (input.codes.size(), adapter.rank());
            let hidden = low_rank.floats.at_least(kernels, rows * rank)?;
            let sink = GemmSink::F32 { out: floats_mut(hidden, (0, rows), rank)?, operands: Operands::F32 };
            kernels.gemm_w8a8(input, &weights.tiled(&adapter.down)?, &Epilogue::default(), sink)?;
            let hidden_codes = low_rank.codes.at_least(kernels, rows * padded(rank))?;
            let scales = low_rank.scales.at_least(kernels, rows)?;
            let sink = RowSink::DynamicCodes { out: codes_mut(hidden_codes, rows, rank)?, scales };
            kernels.quantise(floats(hidden, (0, rows), rank)?, sink)?;
            let hidden = Codes {
                codes: codes(hidden_codes, rows, rank)?,
                scale: ActivationScale::Row(scales.slice("the scales", 0, rows)?),
            };
            epilogue.adapter = Some(Adapter { hidden, up: weights.tiled(&adapter.up)?, factor: adapter.factor });
        }
        Ok(kernels.gemm_w8a8(input, &tiled, &epilogue, sink)?)
    }
}
