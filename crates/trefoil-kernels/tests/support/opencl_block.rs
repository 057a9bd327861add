//! The block of `support::block` on an OpenCL device: everything it needs lives in buffers over host memory, and the whole
//! block is enqueued without waiting.

use crate::support::block::{
    Attention, Block, CROSS_IN, CROSS_OUT, Calibration, EPS, FFN_IN, FFN_MIDDLE, Factors, Inputs, Linear, SELF_IN,
    SELF_OUT, Sizes, TEXT, padded,
};
use trefoil_kernels::opencl::{
    ActivationScale, Adapter, AttentionSink, Buffer, Codes, Epilogue, GemmSink, Kernels, Modulation, PackedKeyValue,
    RotaryTable, RowSink, Rows, RowsMut, Tiled, Vector,
};
use trefoil_kernels::{Activation, AttentionScales, Operands};
use trefoil_weights::quantise::Quantised;
use trefoil_weights::tile::TileShape;

/// A quantised matrix in buffers.
struct DeviceMatrix {
    shape: TileShape,
    codes: Buffer<i8>,
    scales: Buffer<f32>,
}

impl DeviceMatrix {
    fn new(kernels: &Kernels, matrix: &Quantised) -> DeviceMatrix {
        let (codes, scales) = (kernels.copied(&matrix.codes).unwrap(), kernels.copied(&matrix.scales).unwrap());
        DeviceMatrix { shape: matrix.shape, codes, scales }
    }

    fn tiled(&self) -> Tiled<'_> {
        Tiled { shape: self.shape, codes: &self.codes, first: 0, scales: self.scales.vector() }
    }
}

struct DeviceLinear {
    matrix: DeviceMatrix,
    bias: Buffer<f32>,
    /// `A` and `B`.
    adapter: Option<[DeviceMatrix; 2]>,
}

impl DeviceLinear {
    fn new(kernels: &Kernels, linear: &Linear) -> DeviceLinear {
        let factors = |factors: &Factors| {
            [&factors.down_quantised, &factors.up_quantised].map(|matrix| DeviceMatrix::new(kernels, matrix))
        };
        DeviceLinear {
            matrix: DeviceMatrix::new(kernels, &linear.quantised),
            bias: kernels.copied(&linear.bias).unwrap(),
            adapter: linear.adapter.as_ref().map(factors),
        }
    }
}

/// A block's weights and the memory of its execution.
pub struct DeviceBlock<'k> {
    kernels: &'k Kernels,
    sizes: Sizes,
    projections: [[DeviceLinear; 4]; 2],
    gains: [[Buffer<f32>; 2]; 2],
    norm: [Buffer<f32>; 2],
    ffn: [DeviceLinear; 2],
    table: Buffer<f32>,
    rotary: RotaryTable,
    context: Buffer<f32>,
    step: Buffer<f32>,
    modulation: Buffer<f32>,
    /// The hidden state.
    pub state: Buffer<f32>,
    memory: Memory,
}

struct Memory {
    packed: PackedKeyValue,
    float: Buffer<f32>,
    codes: [Buffer<i8>; 4],
    middle: Buffer<i8>,
    context: Buffer<i8>,
    hidden: Hidden,
}

struct Hidden {
    floats: Buffer<f32>,
    codes: Buffer<i8>,
    scales: Buffer<f32>,
}

fn codes(buffer: &Buffer<i8>, rows: usize, columns: usize) -> Rows<'_, i8> {
    buffer.rows("codes", (0, rows, columns, padded(columns))).unwrap()
}

fn codes_mut(buffer: &mut Buffer<i8>, rows: usize, columns: usize) -> RowsMut<'_, i8> {
    buffer.rows_mut("codes", (0, rows, columns, padded(columns))).unwrap()
}

fn floats(buffer: &Buffer<f32>, rows: usize, columns: usize) -> Rows<'_, f32> {
    buffer.rows("floats", (0, rows, columns, columns)).unwrap()
}

fn floats_mut(buffer: &mut Buffer<f32>, rows: usize, columns: usize) -> RowsMut<'_, f32> {
    buffer.rows_mut("floats", (0, rows, columns, columns)).unwrap()
}

impl<'k> DeviceBlock<'k> {
    pub fn new(kernels: &'k Kernels, block: &Block, inputs: &Inputs<'_>, state: &[f32]) -> DeviceBlock<'k> {
        let sizes = block.sizes;
        let rows = sizes.tokens.max(sizes.text);
        let rank = sizes.rank.max(1);
        let copied = |values: &[f32]| kernels.copied(values).unwrap();
        let code_buffer = |columns: usize| kernels.zeroed::<i8>(rows * padded(columns)).unwrap();
        let linears = |attention: &Attention| attention.projections.each_ref().map(|l| DeviceLinear::new(kernels, l));
        DeviceBlock {
            kernels,
            sizes,
            projections: block.attention.each_ref().map(linears),
            gains: block.attention.each_ref().map(|a| [copied(&a.gain_q), copied(&a.gain_k)]),
            norm: [copied(&block.norm_gain), copied(&block.norm_bias)],
            ffn: block.ffn.each_ref().map(|linear| DeviceLinear::new(kernels, linear)),
            table: copied(&block.table),
            rotary: kernels.rotary_table(inputs.rotary).unwrap(),
            context: copied(inputs.context),
            step: copied(inputs.modulation),
            modulation: kernels.zeroed(6 * sizes.width).unwrap(),
            state: copied(state),
            memory: Memory {
                packed: PackedKeyValue::new(),
                float: kernels.zeroed(rows * sizes.width).unwrap(),
                codes: [(); 4].map(|()| code_buffer(sizes.width)),
                middle: code_buffer(sizes.ffn),
                context: code_buffer(sizes.width),
                hidden: Hidden {
                    floats: kernels.zeroed(rows * rank).unwrap(),
                    codes: code_buffer(rank),
                    scales: kernels.zeroed(rows).unwrap(),
                },
            },
        }
    }

    /// Enqueues one execution on the state.
    pub fn run(&mut self, calibration: &Calibration, detail: bool) {
        let DeviceBlock {
            kernels,
            sizes,
            projections,
            gains,
            norm,
            ffn,
            table,
            rotary,
            context,
            step,
            modulation,
            state,
            memory,
        } = self;
        let Memory { packed, float, codes: [a, q, k, v], middle, context: context_codes, hidden } = memory;
        let (width, tokens) = (sizes.width, sizes.tokens);
        kernels.add(table.vector(), step.vector(), modulation).unwrap();
        let row = |index: usize| modulation.slice("modulation", index * width, width).unwrap();
        let run = Run { kernels, detail };
        for index in 0..2 {
            let is_self = index == 0;
            let (scale_in, scale_out) = if is_self {
                (calibration.inputs[SELF_IN], calibration.inputs[SELF_OUT])
            } else {
                (calibration.inputs[CROSS_IN], calibration.inputs[CROSS_OUT])
            };
            let modulate = if is_self {
                Modulation::AdaLn { scale: row(1), shift: row(0) }
            } else {
                Modulation::Affine { gain: norm[0].vector(), bias: norm[1].vector() }
            };
            let sink = RowSink::Codes { out: codes_mut(a, tokens, width), scale: scale_in };
            kernels.layer_norm(floats(state, tokens, width), EPS, modulate, sink).unwrap();
            let keys = if is_self { tokens } else { sizes.text };
            let scale_source = if is_self { scale_in } else { calibration.inputs[TEXT] };
            if !is_self {
                let sink = RowSink::Codes { out: codes_mut(context_codes, sizes.text, width), scale: scale_source };
                kernels.quantise(floats(context, sizes.text, width), sink).unwrap();
            }
            let source: &Buffer<i8> = if is_self { a } else { context_codes };
            let [to_q, to_k, to_v, to_out] = &projections[index];
            let whole = |scales: &[f32]| scales.iter().copied().fold(0.0, f32::max);
            let (scale_q, scale_k, scale_v) =
                (whole(&calibration.query[index]), whole(&calibration.key[index]), whole(&calibration.value[index]));
            let [gain_q, gain_k] = &gains[index];
            for (linear, gain, input, rows, out, scale) in [
                (to_q, gain_q, (&*a, scale_in), tokens, &mut *q, scale_q),
                (to_k, gain_k, (source, scale_source), keys, &mut *k, scale_k),
            ] {
                let sink = GemmSink::F32 { out: floats_mut(float, rows, width), operands: Operands::F32 };
                run.linear(input, rows, linear, Activation::Identity, sink, hidden);
                let sink = RowSink::Codes { out: codes_mut(out, rows, width), scale };
                let positions = is_self.then_some(&*rotary);
                kernels.rms_norm(floats(float, rows, width), EPS, gain.vector(), positions, sink).unwrap();
            }
            let sink = GemmSink::Codes { out: codes_mut(v, keys, width), scale: scale_v };
            run.linear((source, scale_source), keys, to_v, Activation::Identity, sink, hidden);
            kernels.pack_key_value(codes(k, keys, width), codes(v, keys, width), sizes.heads, packed).unwrap();
            let of_heads = [scale_q, scale_k, scale_v].map(|scale| vec![scale; sizes.heads]);
            let [query, key, value] = &of_heads;
            let scales = AttentionScales { query, key, value };
            let sink = AttentionSink::Codes { out: codes_mut(a, tokens, width), scale: scale_out };
            kernels.attention_w8a8(codes(q, tokens, width), packed, scales, sink).unwrap();
            let gate: Option<Vector<'_>> = is_self.then(|| row(2));
            let sink = GemmSink::Residual { state: floats_mut(state, tokens, width), gate, precision: Operands::F16 };
            run.linear((&*a, scale_out), tokens, to_out, Activation::Identity, sink, hidden);
        }
        let modulate = Modulation::AdaLn { scale: row(4), shift: row(3) };
        let sink = RowSink::Codes { out: codes_mut(a, tokens, width), scale: calibration.inputs[FFN_IN] };
        kernels.layer_norm(floats(state, tokens, width), EPS, modulate, sink).unwrap();
        let scale = calibration.inputs[FFN_MIDDLE];
        let sink = GemmSink::Codes { out: codes_mut(middle, tokens, sizes.ffn), scale };
        run.linear((&*a, calibration.inputs[FFN_IN]), tokens, &ffn[0], Activation::GeluTanh, sink, hidden);
        let sink = GemmSink::Residual {
            state: floats_mut(state, tokens, width),
            gate: Some(row(5)),
            precision: Operands::F16,
        };
        run.linear((&*middle, scale), tokens, &ffn[1], Activation::Identity, sink, hidden);
    }
}

struct Run<'k> {
    kernels: &'k Kernels,
    detail: bool,
}

impl Run<'_> {
    fn linear(
        &self,
        (input, scale): (&Buffer<i8>, f32),
        rows: usize,
        linear: &DeviceLinear,
        activation: Activation,
        sink: GemmSink<'_>,
        hidden: &mut Hidden,
    ) {
        let input =
            Codes { codes: codes(input, rows, linear.matrix.shape.d_in), scale: ActivationScale::Tensor(scale) };
        let adapter = linear.adapter.as_ref().filter(|_| self.detail);
        if let Some([down, _]) = adapter {
            let rank = down.shape.d_out;
            let sink = GemmSink::F32 { out: floats_mut(&mut hidden.floats, rows, rank), operands: Operands::F32 };
            self.kernels.gemm_w8a8(&input, &down.tiled(), &Epilogue::default(), sink).unwrap();
            let sink =
                RowSink::DynamicCodes { out: codes_mut(&mut hidden.codes, rows, rank), scales: &mut hidden.scales };
            self.kernels.quantise(floats(&hidden.floats, rows, rank), sink).unwrap();
        }
        let epilogue = Epilogue {
            bias: Some(linear.bias.vector()),
            adapter: adapter.map(|[_, up]| Adapter {
                hidden: Codes {
                    codes: codes(&hidden.codes, rows, up.shape.d_in),
                    scale: ActivationScale::Row(hidden.scales.vector()),
                },
                up: up.tiled(),
                factor: 2.0,
            }),
            activation,
        };
        self.kernels.gemm_w8a8(&input, &linear.matrix.tiled(), &epilogue, sink).unwrap();
    }
}
