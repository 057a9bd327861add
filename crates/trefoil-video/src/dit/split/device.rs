//! The device's side of a block whose columns are divided. Everything is enqueued; the exchange waits.

use super::{Engines, Heads, Layer, Norm, Normed, Run, Source, Target};
use crate::VideoError;
use crate::dit::opencl::{Grown, codes, codes_mut, floats, floats_mut};
use crate::dit::{DeviceConditions, Site, padded};
use std::ops::Range;
use trefoil_kernels::opencl::{
    ActivationScale, Adapter, AttentionSink, Buffer, Codes, Epilogue, GemmSink, Kernels, Modulation, OpenClError,
    PackedKeyValue, RotaryTable, RowSink,
};
use trefoil_kernels::{AttentionScales, Operands};

/// Operands and scratch.
#[derive(Debug, Default)]
pub(super) struct DeviceSide {
    packed: PackedKeyValue,
    modulation: Grown<f32>,
    state: Grown<f32>,
    projected: Grown<f32>,
    input: Grown<i8>,
    query: Grown<i8>,
    key: Grown<i8>,
    value: Grown<i8>,
    context: Grown<i8>,
    middle: Grown<i8>,
    factors: Grown<f32>,
    factor_codes: Grown<i8>,
    factor_scales: Grown<f32>,
}

impl DeviceSide {
    pub(super) fn bytes(&self) -> usize {
        let codes = [&self.input, &self.query, &self.key, &self.value, &self.context, &self.middle, &self.factor_codes];
        let floats = [&self.modulation, &self.state, &self.projected, &self.factors, &self.factor_scales];
        self.packed.bytes()
            + codes.iter().map(|buffer| buffer.bytes()).sum::<usize>()
            + floats.iter().map(|buffer| buffer.bytes()).sum::<usize>()
    }

    pub(super) fn load(&mut self, kernels: &Kernels, hidden: &[f32]) -> Result<(), VideoError> {
        self.state.at_least(kernels, hidden.len())?.write()?[..hidden.len()].copy_from_slice(hidden);
        Ok(())
    }

    pub(super) fn state(
        &mut self,
        engines: &Engines<'_>,
        rows: usize,
        width: usize,
    ) -> Result<&mut Buffer<f32>, OpenClError> {
        self.state.at_least(engines.device, rows * width)
    }

    pub(super) fn projected(
        &mut self,
        engines: &Engines<'_>,
        rows: usize,
        width: usize,
    ) -> Result<&mut Buffer<f32>, OpenClError> {
        self.projected.at_least(engines.device, rows * width)
    }

    pub(super) fn input(
        &mut self,
        engines: &Engines<'_>,
        rows: usize,
        width: usize,
    ) -> Result<&mut Buffer<i8>, OpenClError> {
        self.input.at_least(engines.device, rows * padded(width))
    }

    pub(super) fn value(
        &mut self,
        engines: &Engines<'_>,
        rows: usize,
        width: usize,
    ) -> Result<&mut Buffer<i8>, OpenClError> {
        self.value.at_least(engines.device, rows * padded(width))
    }

    pub(super) fn middle(
        &mut self,
        engines: &Engines<'_>,
        rows: usize,
        width: usize,
    ) -> Result<&mut Buffer<i8>, OpenClError> {
        self.middle.at_least(engines.device, rows * padded(width))
    }

    pub(super) fn modulate(
        &mut self,
        engines: &Engines<'_>,
        table: &[f32],
        step: &Buffer<f32>,
    ) -> Result<(), VideoError> {
        let sums = self.modulation.at_least(engines.device, table.len())?;
        Ok(engines.device.add(engines.weights.floats(table)?, step.slice("the step", 0, table.len())?, sums)?)
    }

    pub(super) fn norm(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        rows: Range<usize>,
        norm: Norm<'_>,
        site: Site,
    ) -> Result<(), VideoError> {
        let (kernels, width) = (engines.device, run.width);
        let sums = self.modulation.at_least(kernels, 6 * width)?;
        let row = |index: usize| sums.slice("the modulation", index * width, width);
        let modulation = match norm {
            Norm::Adaptive(scale, shift) => Modulation::AdaLn { scale: row(scale)?, shift: row(shift)? },
            Norm::Affine(gain, bias) => {
                Modulation::Affine { gain: engines.weights.floats(gain)?, bias: engines.weights.floats(bias)? }
            }
        };
        let input = self.input.at_least(kernels, rows.len() * padded(width))?;
        let state = self.state.at_least(kernels, rows.end * width)?;
        let sink = RowSink::Codes { out: codes_mut(input, rows.len(), width)?, scale: run.scales.get(site) };
        Ok(kernels.layer_norm(floats(state, (rows.start, rows.len()), width)?, run.eps, modulation, sink)?)
    }

    pub(super) fn quantise_context(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        conditions: &DeviceConditions<'_>,
    ) -> Result<(), VideoError> {
        let context = self.context.at_least(engines.device, conditions.text * padded(run.width))?;
        let out = codes_mut(context, conditions.text, run.width)?;
        let sink = RowSink::Codes { out, scale: run.scales.get(Site::Text) };
        Ok(engines.device.quantise(floats(conditions.context, (0, conditions.text), run.width)?, sink)?)
    }

    pub(super) fn linear(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        rows: usize,
        layer: &Layer<'_>,
        from: Source,
        to: Target,
    ) -> Result<(), VideoError> {
        let (kernels, weights) = (engines.device, engines.weights);
        let tiled = weights.tiled(&layer.view.weights)?;
        let (d_in, columns, stride) = (tiled.shape.d_in, tiled.shape.d_out, padded(layer.width));
        let DeviceSide { modulation, state, projected, input, value, context, middle, .. } = self;
        // The middle is a source of one layer and the destination of another, never of the same.
        let (source, middle, site) = match from {
            Source::Input(site) => (input, Some(middle), site),
            Source::Context(site) => (context, Some(middle), site),
            Source::Middle(site) => (middle, None, site),
        };
        let source = &*source.at_least(kernels, rows * padded(d_in))?;
        let scale = ActivationScale::Tensor(run.scales.get(site));
        let input = Codes { codes: codes(source, rows, d_in)?, scale };
        let at = layer.first;
        let sink = match (to, middle) {
            (Target::Projected, _) => {
                let out = projected.at_least(kernels, rows * layer.width)?;
                let out = out.rows_mut("a slice", (at, rows, columns, layer.width))?;
                GemmSink::F32 { out, operands: Operands::F32 }
            }
            (Target::Value(site), _) => {
                let out = value.at_least(kernels, rows * stride)?.rows_mut("a slice", (at, rows, columns, stride))?;
                GemmSink::Codes { out, scale: run.scales.get(site) }
            }
            (Target::Middle(site), Some(middle)) => {
                let out = middle.at_least(kernels, rows * stride)?.rows_mut("a slice", (at, rows, columns, stride))?;
                GemmSink::Codes { out, scale: run.scales.get(site) }
            }
            (Target::Middle(_), None) => unreachable!("no layer reads what it writes"),
            (Target::State(first, gate), _) => {
                let sums = &*modulation.at_least(kernels, 6 * run.width)?;
                let gate = match gate {
                    Some(row) => Some(sums.slice("the gate", row * run.width + at, columns)?),
                    None => None,
                };
                let state = state.at_least(kernels, (first + rows) * run.width)?;
                let state = state.rows_mut("a slice", (first * run.width + at, rows, columns, run.width))?;
                GemmSink::Residual { state, gate, precision: Operands::F16 }
            }
        };
        let bias = Some(weights.floats(layer.view.bias)?);
        let mut epilogue = Epilogue { bias, adapter: None, activation: layer.activation };
        if let Some(adapter) = &layer.view.adapter {
            let rank = adapter.rank();
            let hidden = self.factors.at_least(kernels, rows * rank)?;
            let into = GemmSink::F32 { out: floats_mut(hidden, (0, rows), rank)?, operands: Operands::F32 };
            kernels.gemm_w8a8(&input, &weights.tiled(&adapter.down)?, &Epilogue::default(), into)?;
            let hidden_codes = self.factor_codes.at_least(kernels, rows * padded(rank))?;
            let scales = self.factor_scales.at_least(kernels, rows)?;
            let into = RowSink::DynamicCodes { out: codes_mut(hidden_codes, rows, rank)?, scales };
            kernels.quantise(floats(hidden, (0, rows), rank)?, into)?;
            let hidden = Codes {
                codes: codes(hidden_codes, rows, rank)?,
                scale: ActivationScale::Row(scales.slice("the scales", 0, rows)?),
            };
            epilogue.adapter = Some(Adapter { hidden, up: weights.tiled(&adapter.up)?, factor: adapter.factor });
        }
        Ok(kernels.gemm_w8a8(&input, &tiled, &epilogue, sink)?)
    }

    #[allow(clippy::too_many_arguments, reason = "a norm and its place in the block")]
    pub(super) fn rms_norm(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        rows: usize,
        normed: Normed,
        gain: &[f32],
        rotary: Option<&RotaryTable>,
        site: Site,
    ) -> Result<(), VideoError> {
        let kernels = engines.device;
        let out = match normed {
            Normed::Query => &mut self.query,
            Normed::Key => &mut self.key,
        };
        let out = codes_mut(out.at_least(kernels, rows * padded(run.width))?, rows, run.width)?;
        let sink = RowSink::Codes { out, scale: run.scales.get(site) };
        let projected = self.projected.at_least(kernels, rows * run.width)?;
        let from = floats(projected, (0, rows), run.width)?;
        Ok(kernels.rms_norm(from, run.eps, engines.weights.floats(gain)?, rotary, sink)?)
    }

    pub(super) fn attend(&mut self, engines: &Engines<'_>, run: &Run<'_>, part: &Heads) -> Result<(), VideoError> {
        let kernels = engines.device;
        let (heads, head_dim, stride) = (part.range.len(), run.width / run.heads, padded(run.width));
        let (first, columns) = (part.range.start * head_dim, heads * head_dim);
        let [query_site, key_site, value_site, out_site] = part.sites;
        let key = self.key.at_least(kernels, part.keys * stride)?;
        let value = self.value.at_least(kernels, part.keys * stride)?;
        let of_keys = (first, part.keys, columns, stride);
        kernels.pack_key_value(
            key.rows("a slice", of_keys)?,
            value.rows("a slice", of_keys)?,
            heads,
            &mut self.packed,
        )?;
        let [query, key, value] = [query_site, key_site, value_site].map(|site| vec![run.scales.get(site); heads]);
        let scales = AttentionScales { query: &query, key: &key, value: &value };
        let of_queries = (first, part.queries, columns, stride);
        let out = self.input.at_least(kernels, part.queries * stride)?.rows_mut("a slice", of_queries)?;
        let sink = AttentionSink::Codes { out, scale: run.scales.get(out_site) };
        let query = self.query.at_least(kernels, part.queries * stride)?.rows("a slice", of_queries)?;
        Ok(kernels.attention_w8a8(query, &self.packed, scales, sink)?)
    }
}
