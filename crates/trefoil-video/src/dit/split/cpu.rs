//! The CPU's side of a block whose columns are divided.

use super::{Engines, Heads, Layer, Norm, Normed, Run, Source, Target};
use crate::VideoError;
use crate::dit::{Conditions, Site, codes, codes_mut, floats, floats_mut, grown, modulate, padded};
use crate::model::views::tiled;
use std::ops::Range;
use trefoil_kernels::{
    ActivationScale, Adapter, AttentionScales, AttentionSink, Codes, Epilogue, GemmSink, KernelError, Modulation,
    Operands, PackedKeyValue, RotaryTable, RowSink, Rows, RowsMut, Workspace,
};

/// Operands and scratch.
#[derive(Debug, Default)]
pub(super) struct CpuSide {
    workspace: Workspace,
    packed: PackedKeyValue,
    modulation: Vec<f32>,
    state: Vec<f32>,
    projected: Vec<f32>,
    input: Vec<i8>,
    query: Vec<i8>,
    key: Vec<i8>,
    value: Vec<i8>,
    context: Vec<i8>,
    middle: Vec<i8>,
    factors: Vec<f32>,
    factor_codes: Vec<i8>,
    factor_scales: Vec<f32>,
}

/// Columns `first ..` of rows that are `stride` apart.
fn slice<T>(
    data: &[T],
    (first, rows): (usize, usize),
    columns: usize,
    stride: usize,
) -> Result<Rows<'_, T>, KernelError> {
    Rows::new("a slice", data.get(first..).unwrap_or_default(), rows, columns, stride)
}

fn slice_mut<T>(
    data: &mut [T],
    (first, rows): (usize, usize),
    columns: usize,
    stride: usize,
) -> Result<RowsMut<'_, T>, KernelError> {
    RowsMut::new("a slice", data.get_mut(first..).unwrap_or_default(), rows, columns, stride)
}

impl CpuSide {
    pub(super) fn bytes(&self) -> usize {
        let codes = [&self.input, &self.query, &self.key, &self.value, &self.context, &self.middle, &self.factor_codes];
        let floats = [&self.modulation, &self.state, &self.projected, &self.factors, &self.factor_scales];
        self.workspace.bytes()
            + self.packed.bytes()
            + codes.iter().map(|buffer| buffer.capacity()).sum::<usize>()
            + floats.iter().map(|buffer| buffer.capacity() * size_of::<f32>()).sum::<usize>()
    }

    pub(super) fn load(&mut self, hidden: &[f32]) {
        grown(&mut self.state, hidden.len()).copy_from_slice(hidden);
    }

    pub(super) fn state(&self, len: usize) -> &[f32] {
        &self.state[..len]
    }

    pub(super) fn state_mut(&mut self) -> &mut [f32] {
        &mut self.state
    }

    pub(super) fn projected(&mut self, len: usize) -> &mut [f32] {
        grown(&mut self.projected, len)
    }

    pub(super) fn input(&mut self, len: usize) -> &mut [i8] {
        grown(&mut self.input, len)
    }

    pub(super) fn value(&mut self, len: usize) -> &mut [i8] {
        grown(&mut self.value, len)
    }

    pub(super) fn middle(&mut self, len: usize) -> &mut [i8] {
        grown(&mut self.middle, len)
    }

    pub(super) fn modulate(&mut self, table: &[f32], step: &[f32]) {
        modulate(table, step, &mut self.modulation);
    }

    pub(super) fn norm(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        rows: Range<usize>,
        norm: Norm<'_>,
        site: Site,
    ) -> Result<(), VideoError> {
        let width = run.width;
        let row = |index: usize| &self.modulation[index * width..(index + 1) * width];
        let modulation = match norm {
            Norm::Adaptive(scale, shift) => Modulation::AdaLn { scale: row(scale), shift: row(shift) },
            Norm::Affine(gain, bias) => Modulation::Affine { gain, bias },
        };
        let input = grown(&mut self.input, rows.len() * padded(width));
        let out = codes_mut("the norm", input, rows.len(), width)?;
        let sink = RowSink::Codes { out, scale: run.scales.get(site) };
        let state = floats("the state", &self.state[rows.start * width..rows.end * width], rows.len(), width)?;
        Ok(engines.cpu.layer_norm(state, run.eps, modulation, sink, &mut self.workspace)?)
    }

    pub(super) fn quantise_context(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        conditions: &Conditions<'_>,
    ) -> Result<(), VideoError> {
        let context = grown(&mut self.context, conditions.text * padded(run.width));
        let out = codes_mut("the context", context, conditions.text, run.width)?;
        let sink = RowSink::Codes { out, scale: run.scales.get(Site::Text) };
        let text = floats("the text", conditions.context, conditions.text, run.width)?;
        Ok(engines.cpu.quantise(text, sink, &mut self.workspace)?)
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
        let CpuSide { workspace, modulation, state, projected, input, value, context, middle, .. } = self;
        let weights = tiled(&layer.view.weights)?;
        let (d_in, columns, stride) = (weights.shape.d_in, weights.shape.d_out, padded(layer.width));
        // The middle is a source of one layer and the destination of another, never of the same.
        let (source, middle, site): (&[i8], Option<&mut Vec<i8>>, _) = match from {
            Source::Input(site) => (&input[..], Some(middle), site),
            Source::Context(site) => (&context[..], Some(middle), site),
            Source::Middle(site) => (&middle[..], None, site),
        };
        let codes_in = codes("the operand", source, rows, d_in)?;
        let input = Codes { codes: codes_in, scale: ActivationScale::Tensor(run.scales.get(site)) };
        let at = (layer.first, rows);
        let sink = match (to, middle) {
            (Target::Projected, _) => {
                let out = grown(projected, rows * layer.width);
                GemmSink::F32 { out: slice_mut(out, at, columns, layer.width)?, operands: Operands::F32 }
            }
            (Target::Value(site), _) => {
                let out = grown(value, rows * stride);
                GemmSink::Codes { out: slice_mut(out, at, columns, stride)?, scale: run.scales.get(site) }
            }
            (Target::Middle(site), Some(middle)) => {
                let out = grown(middle, rows * stride);
                GemmSink::Codes { out: slice_mut(out, at, columns, stride)?, scale: run.scales.get(site) }
            }
            (Target::Middle(_), None) => unreachable!("no layer reads what it writes"),
            (Target::State(first, gate), _) => {
                let gate = gate.map(|row| &modulation[row * run.width + layer.first..][..columns]);
                let at = (first * run.width + layer.first, rows);
                let state = slice_mut(state, at, columns, run.width)?;
                GemmSink::Residual { state, gate, precision: Operands::F16 }
            }
        };
        let mut epilogue = Epilogue { bias: Some(layer.view.bias), adapter: None, activation: layer.activation };
        if let Some(adapter) = &layer.view.adapter {
            let rank = adapter.rank();
            let hidden = grown(&mut self.factors, rows * rank);
            let into = GemmSink::F32 { out: floats_mut("the factors", hidden, rows, rank)?, operands: Operands::F32 };
            engines.cpu.gemm_w8a8(&input, &tiled(&adapter.down)?, &Epilogue::default(), into, workspace)?;
            let hidden_codes = grown(&mut self.factor_codes, rows * padded(rank));
            let scales = grown(&mut self.factor_scales, rows);
            let out = codes_mut("the codes of the factors", hidden_codes, rows, rank)?;
            let hidden = floats("the factors", hidden, rows, rank)?;
            engines.cpu.quantise(hidden, RowSink::DynamicCodes { out, scales }, workspace)?;
            let hidden = Codes {
                codes: codes("the codes of the factors", hidden_codes, rows, rank)?,
                scale: ActivationScale::Row(&self.factor_scales),
            };
            epilogue.adapter = Some(Adapter { hidden, up: tiled(&adapter.up)?, factor: adapter.factor });
        }
        Ok(engines.cpu.gemm_w8a8(&input, &weights, &epilogue, sink, workspace)?)
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
        let out = match normed {
            Normed::Query => &mut self.query,
            Normed::Key => &mut self.key,
        };
        let out = codes_mut("the norm", grown(out, rows * padded(run.width)), rows, run.width)?;
        let sink = RowSink::Codes { out, scale: run.scales.get(site) };
        let from = floats("the projection", &self.projected, rows, run.width)?;
        Ok(engines.cpu.rms_norm(from, run.eps, gain, rotary, sink, &mut self.workspace)?)
    }

    pub(super) fn attend(&mut self, engines: &Engines<'_>, run: &Run<'_>, part: &Heads) -> Result<(), VideoError> {
        let (heads, head_dim, stride) = (part.range.len(), run.width / run.heads, padded(run.width));
        let (first, columns) = (part.range.start * head_dim, heads * head_dim);
        let [query_site, key_site, value_site, out_site] = part.sites;
        let key = slice(&self.key, (first, part.keys), columns, stride)?;
        let value = slice(&self.value, (first, part.keys), columns, stride)?;
        engines.cpu.pack_key_value(key, value, heads, &mut self.packed, &mut self.workspace)?;
        let [query, key, value] = [query_site, key_site, value_site].map(|site| vec![run.scales.get(site); heads]);
        let scales = AttentionScales { query: &query, key: &key, value: &value };
        let out = slice_mut(grown(&mut self.input, part.queries * stride), (first, part.queries), columns, stride)?;
        let sink = AttentionSink::Codes { out, scale: run.scales.get(out_site) };
        let query = slice(&self.query, (first, part.queries), columns, stride)?;
        Ok(engines.cpu.attention_w8a8(query, &self.packed, scales, sink, &mut self.workspace)?)
    }
}
