//! One diffusion-transformer block (self-attention, cross-attention, feed-forward, AdaLN modulation, adapters) put together
//! from the kernels in the three numeric paths. What an engine does, in test form.

use super::{Random, tiled, view};
use trefoil_kernels::math::{MAX_CODE, largest_magnitude};
use trefoil_kernels::{
    Activation, ActivationScale, Adapter, AttentionScales, AttentionSink, Codes, Epilogue, FloatAdapter, FloatEpilogue,
    FloatWeights, GemmSink, Kernels, Modulation, Operands, PackedKeyValue, RotaryTable, RowSink, Rows, RowsMut,
    Workspace,
};
use trefoil_weights::quantise::Quantised;

pub const EPS: f32 = 1e-6;

/// Sizes of a block and its inputs.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub width: usize,
    pub heads: usize,
    pub ffn: usize,
    pub rank: usize,
    pub tokens: usize,
    pub text: usize,
}

impl Sizes {
    pub fn head_dim(&self) -> usize {
        self.width / self.heads
    }
}

/// A linear layer as stored (`[out, in]`), its INT8 form, and its adapter.
pub struct Linear {
    pub d_in: usize,
    pub d_out: usize,
    pub weights: Vec<f32>,
    pub bias: Vec<f32>,
    pub quantised: Quantised,
    pub adapter: Option<Factors>,
}

/// `A` (`[rank, in]`) and `B` (`[out, rank]`).
pub struct Factors {
    pub rank: usize,
    pub down: Vec<f32>,
    pub up: Vec<f32>,
    pub down_quantised: Quantised,
    pub up_quantised: Quantised,
}

impl Linear {
    pub fn new(weights: Vec<f32>, bias: Vec<f32>, d_in: usize, factors: Option<(Vec<f32>, Vec<f32>)>) -> Linear {
        let d_out = bias.len();
        let quantised = tiled(&weights, d_in, d_out);
        let adapter = factors.map(|(down, up)| {
            let rank = down.len() / d_in;
            let (down_quantised, up_quantised) = (tiled(&down, d_in, rank), tiled(&up, rank, d_out));
            Factors { rank, down, up, down_quantised, up_quantised }
        });
        Linear { d_in, d_out, weights, bias, quantised, adapter }
    }

    fn random(random: &mut Random, d_in: usize, d_out: usize, rank: usize) -> Linear {
        let deviation = 1.0 / (d_in as f32).sqrt();
        let factors = (rank > 0).then(|| (random.normals(rank * d_in, deviation), random.normals(d_out * rank, 0.05)));
        Linear::new(random.normals(d_in * d_out, deviation), random.normals(d_out, 0.1), d_in, factors)
    }
}

/// Projections (q, k, v, out) and the gains of the query and key norms.
pub struct Attention {
    pub projections: [Linear; 4],
    pub gain_q: Vec<f32>,
    pub gain_k: Vec<f32>,
}

/// The weights of a block.
pub struct Block {
    pub sizes: Sizes,
    pub attention: [Attention; 2],
    pub norm_gain: Vec<f32>,
    pub norm_bias: Vec<f32>,
    pub ffn: [Linear; 2],
    /// `[6, width]`.
    pub table: Vec<f32>,
}

impl Block {
    pub fn random(sizes: Sizes, seed: u64) -> Block {
        let random = &mut Random::new(seed);
        let Sizes { width, ffn, rank, .. } = sizes;
        let around_one =
            |random: &mut Random| random.normals(width, 0.1).into_iter().map(|g| 1.0 + g).collect::<Vec<_>>();
        let attention = [(); 2].map(|()| Attention {
            projections: [(); 4].map(|()| Linear::random(random, width, width, rank)),
            gain_q: around_one(random),
            gain_k: around_one(random),
        });
        Block {
            sizes,
            attention,
            norm_gain: around_one(random),
            norm_bias: random.normals(width, 0.1),
            ffn: [Linear::random(random, width, ffn, 0), Linear::random(random, ffn, width, 0)],
            table: random.normals(6 * width, 0.3),
        }
    }
}

/// Static scales of every quantised operand: `max|x|/127` of a float run.
#[derive(Debug, Clone, Default)]
pub struct Calibration {
    pub inputs: [f32; 7],
    pub query: [Vec<f32>; 2],
    pub key: [Vec<f32>; 2],
    pub value: [Vec<f32>; 2],
}

pub const SELF_IN: usize = 0;
pub const SELF_OUT: usize = 1;
pub const CROSS_IN: usize = 2;
pub const TEXT: usize = 3;
pub const CROSS_OUT: usize = 4;
pub const FFN_IN: usize = 5;
pub const FFN_MIDDLE: usize = 6;

fn scale_of(values: &[f32]) -> f32 {
    largest_magnitude(values).max(1e-6) / MAX_CODE
}

fn scales_of_heads(values: &[f32], sizes: Sizes) -> Vec<f32> {
    let head_dim = sizes.head_dim();
    (0..sizes.heads)
        .map(|head| {
            let of_head = |row: &[f32]| largest_magnitude(&row[head * head_dim..(head + 1) * head_dim]);
            values.chunks(sizes.width).map(of_head).fold(1e-6, f32::max) / MAX_CODE
        })
        .collect()
}

/// Inputs of a block execution.
pub struct Inputs<'a> {
    /// `text × width`.
    pub context: &'a [f32],
    /// `[6, width]`: the projected timestep, without the block's table.
    pub modulation: &'a [f32],
    pub rotary: &'a RotaryTable,
    /// Whether the adapters act.
    pub detail: bool,
}

/// Everything an execution needs besides weights, allocated once.
pub struct Buffers {
    pub workspace: Workspace,
    packed: PackedKeyValue,
    modulation: Vec<f32>,
    floats: [Vec<f32>; 4],
    middle: Vec<f32>,
    codes: [Vec<i8>; 4],
    middle_codes: Vec<i8>,
    hidden: Vec<f32>,
    hidden_codes: Vec<i8>,
    hidden_scales: Vec<f32>,
    context_codes: Vec<i8>,
    context: Vec<f32>,
}

pub fn padded(columns: usize) -> usize {
    columns.next_multiple_of(32)
}

impl Buffers {
    pub fn new(sizes: Sizes) -> Buffers {
        let rows = sizes.tokens.max(sizes.text);
        Buffers {
            workspace: Workspace::new(),
            packed: PackedKeyValue::new(),
            modulation: vec![0.0; 6 * sizes.width],
            floats: [(); 4].map(|()| vec![0.0; rows * sizes.width]),
            middle: vec![0.0; rows * sizes.ffn],
            codes: [(); 4].map(|()| vec![0; rows * padded(sizes.width)]),
            middle_codes: vec![0; rows * padded(sizes.ffn)],
            hidden: vec![0.0; rows * sizes.rank.max(1)],
            hidden_codes: vec![0; rows * padded(sizes.rank.max(1))],
            hidden_scales: vec![0.0; rows],
            context_codes: vec![0; sizes.text * padded(sizes.width)],
            context: vec![0.0; sizes.text * sizes.width],
        }
    }

    fn modulate(&mut self, block: &Block, inputs: &Inputs<'_>) {
        for ((sum, &table), &step) in self.modulation.iter_mut().zip(&block.table).zip(inputs.modulation) {
            *sum = table + step;
        }
    }
}

fn floats(data: &[f32], rows: usize, columns: usize) -> Rows<'_, f32> {
    Rows::dense("floats", data, rows, columns).expect("buffers are large enough")
}

fn floats_mut(data: &mut [f32], rows: usize, columns: usize) -> RowsMut<'_, f32> {
    RowsMut::dense("floats", data, rows, columns).expect("buffers are large enough")
}

fn codes(data: &[i8], rows: usize, columns: usize) -> Rows<'_, i8> {
    Rows::new("codes", data, rows, columns, padded(columns)).expect("buffers are large enough")
}

fn codes_mut(data: &mut [i8], rows: usize, columns: usize) -> RowsMut<'_, i8> {
    RowsMut::new("codes", data, rows, columns, padded(columns)).expect("buffers are large enough")
}

/// Which weights a float run uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatPath {
    /// Unquantised, f32.
    F32,
    /// INT8 weights, FP16 operands.
    W8a16,
}

struct FloatRun<'a> {
    kernels: &'a Kernels,
    path: FloatPath,
    detail: bool,
}

impl FloatRun<'_> {
    fn operands(&self) -> Operands {
        if self.path == FloatPath::W8a16 { Operands::F16 } else { Operands::F32 }
    }

    fn weights<'w>(&self, plain: &'w [f32], quantised: &'w Quantised) -> FloatWeights<'w> {
        match self.path {
            FloatPath::F32 => FloatWeights::OutIn(floats(plain, quantised.shape.d_out, quantised.shape.d_in)),
            FloatPath::W8a16 => FloatWeights::Tiled(view(quantised)),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "a test helper")]
    fn linear(
        &self,
        input: &[f32],
        rows: usize,
        linear: &Linear,
        activation: Activation,
        sink: GemmSink<'_>,
        hidden: &mut [f32],
        workspace: &mut Workspace,
    ) {
        let input = floats(input, rows, linear.d_in);
        let factors = linear.adapter.as_ref().filter(|_| self.detail);
        if let Some(factors) = factors {
            let down = self.weights(&factors.down, &factors.down_quantised);
            let sink = GemmSink::F32 { out: floats_mut(hidden, rows, factors.rank), operands: self.operands() };
            self.kernels
                .gemm_f32(input, &down, self.operands(), &FloatEpilogue::default(), sink, workspace)
                .expect("shapes fit");
        }
        let epilogue = FloatEpilogue {
            bias: Some(&linear.bias),
            adapter: factors.map(|factors| FloatAdapter {
                hidden: floats(hidden, rows, factors.rank),
                up: self.weights(&factors.up, &factors.up_quantised),
                factor: 2.0,
            }),
            activation,
        };
        let weights = self.weights(&linear.weights, &linear.quantised);
        self.kernels.gemm_f32(input, &weights, self.operands(), &epilogue, sink, workspace).expect("shapes fit");
    }
}

/// A block on a float path; `state` is `tokens × width`, updated in place. Records scales where asked.
pub fn run_float(
    kernels: &Kernels,
    path: FloatPath,
    block: &Block,
    inputs: &Inputs<'_>,
    state: &mut [f32],
    buffers: &mut Buffers,
    mut record: Option<&mut Calibration>,
) {
    let sizes = block.sizes;
    let (width, tokens) = (sizes.width, sizes.tokens);
    let run = FloatRun { kernels, path, detail: inputs.detail };
    let operands = run.operands();
    buffers.modulate(block, inputs);
    let Buffers { workspace, modulation, floats: [a, q, k, v], middle, hidden, context, .. } = buffers;
    let row = |index: usize| &modulation[index * width..(index + 1) * width];
    for (index, attention) in block.attention.iter().enumerate() {
        let is_self = index == 0;
        let modulate = if is_self {
            Modulation::AdaLn { scale: row(1), shift: row(0) }
        } else {
            Modulation::Affine { gain: &block.norm_gain, bias: &block.norm_bias }
        };
        let sink = RowSink::F32 { out: floats_mut(a, tokens, width), operands };
        kernels.layer_norm(floats(state, tokens, width), EPS, modulate, sink, workspace).expect("shapes fit");
        let keys = if is_self { tokens } else { sizes.text };
        if !is_self {
            let sink = RowSink::F32 { out: floats_mut(context, sizes.text, width), operands };
            kernels.quantise(floats(inputs.context, sizes.text, width), sink, workspace).expect("shapes fit");
        }
        let source: &[f32] = if is_self { a } else { context };
        let [to_q, to_k, to_v, to_out] = &attention.projections;
        // The projections of queries and keys go through `v`'s buffer, because a norm needs its input whole.
        for (linear, gain, input, rows, out) in
            [(to_q, &attention.gain_q, &a[..], tokens, &mut *q), (to_k, &attention.gain_k, source, keys, &mut *k)]
        {
            let sink = GemmSink::F32 { out: floats_mut(v, rows, width), operands: Operands::F32 };
            run.linear(input, rows, linear, Activation::Identity, sink, hidden, workspace);
            let sink = RowSink::F32 { out: floats_mut(out, rows, width), operands };
            let rotary = is_self.then_some(inputs.rotary);
            kernels.rms_norm(floats(v, rows, width), EPS, gain, rotary, sink, workspace).expect("shapes fit");
        }
        let sink = GemmSink::F32 { out: floats_mut(v, keys, width), operands };
        run.linear(source, keys, to_v, Activation::Identity, sink, hidden, workspace);
        if let Some(record) = record.as_deref_mut() {
            record.inputs[if is_self { SELF_IN } else { CROSS_IN }] = scale_of(&a[..tokens * width]);
            if !is_self {
                record.inputs[TEXT] = scale_of(&context[..keys * width]);
            }
            record.query[index] = scales_of_heads(&q[..tokens * width], sizes);
            record.key[index] = scales_of_heads(&k[..keys * width], sizes);
            record.value[index] = scales_of_heads(&v[..keys * width], sizes);
        }
        let sink = AttentionSink::F32 { out: floats_mut(a, tokens, width), operands };
        let (query, key, value) = (floats(q, tokens, width), floats(k, keys, width), floats(v, keys, width));
        kernels.attention_f32(query, key, value, sizes.heads, operands, sink, workspace).expect("shapes fit");
        if let Some(record) = record.as_deref_mut() {
            record.inputs[if is_self { SELF_OUT } else { CROSS_OUT }] = scale_of(&a[..tokens * width]);
        }
        let gate = is_self.then(|| row(2));
        let sink = GemmSink::Residual { state: floats_mut(state, tokens, width), gate, precision: Operands::F32 };
        run.linear(a, tokens, to_out, Activation::Identity, sink, hidden, workspace);
    }
    let modulate = Modulation::AdaLn { scale: row(4), shift: row(3) };
    let sink = RowSink::F32 { out: floats_mut(a, tokens, width), operands };
    kernels.layer_norm(floats(state, tokens, width), EPS, modulate, sink, workspace).expect("shapes fit");
    let sink = GemmSink::F32 { out: floats_mut(middle, tokens, sizes.ffn), operands };
    run.linear(a, tokens, &block.ffn[0], Activation::GeluTanh, sink, hidden, workspace);
    if let Some(record) = record {
        record.inputs[FFN_IN] = scale_of(&a[..tokens * width]);
        record.inputs[FFN_MIDDLE] = scale_of(&middle[..tokens * sizes.ffn]);
    }
    let sink =
        GemmSink::Residual { state: floats_mut(state, tokens, width), gate: Some(row(5)), precision: Operands::F32 };
    run.linear(middle, tokens, &block.ffn[1], Activation::Identity, sink, hidden, workspace);
}

struct Int8Run<'a> {
    kernels: &'a Kernels,
    detail: bool,
}

impl Int8Run<'_> {
    #[allow(clippy::too_many_arguments, reason = "a test helper")]
    fn linear(
        &self,
        (input, scale): (&[i8], f32),
        rows: usize,
        linear: &Linear,
        activation: Activation,
        sink: GemmSink<'_>,
        (hidden, hidden_codes, hidden_scales): (&mut [f32], &mut [i8], &mut [f32]),
        workspace: &mut Workspace,
    ) {
        let input = Codes { codes: codes(input, rows, linear.d_in), scale: ActivationScale::Tensor(scale) };
        let factors = linear.adapter.as_ref().filter(|_| self.detail);
        if let Some(factors) = factors {
            let rank = factors.rank;
            let sink = GemmSink::F32 { out: floats_mut(hidden, rows, rank), operands: Operands::F32 };
            let down = view(&factors.down_quantised);
            self.kernels.gemm_w8a8(&input, &down, &Epilogue::default(), sink, workspace).expect("shapes fit");
            let sink = RowSink::DynamicCodes { out: codes_mut(hidden_codes, rows, rank), scales: hidden_scales };
            self.kernels.quantise(floats(hidden, rows, rank), sink, workspace).expect("shapes fit");
        }
        let epilogue = Epilogue {
            bias: Some(&linear.bias),
            adapter: factors.map(|factors| Adapter {
                hidden: Codes {
                    codes: codes(hidden_codes, rows, factors.rank),
                    scale: ActivationScale::Row(hidden_scales),
                },
                up: view(&factors.up_quantised),
                factor: 2.0,
            }),
            activation,
        };
        self.kernels.gemm_w8a8(&input, &view(&linear.quantised), &epilogue, sink, workspace).expect("shapes fit");
    }
}

/// A block on the `w8a8` path, state in FP16 precision.
pub fn run_w8a8(
    kernels: &Kernels,
    block: &Block,
    calibration: &Calibration,
    inputs: &Inputs<'_>,
    state: &mut [f32],
    buffers: &mut Buffers,
) {
    let sizes = block.sizes;
    let (width, tokens) = (sizes.width, sizes.tokens);
    let run = Int8Run { kernels, detail: inputs.detail };
    buffers.modulate(block, inputs);
    let Buffers {
        workspace,
        packed,
        modulation,
        floats: [float, ..],
        codes: [a, q, k, v],
        middle_codes,
        hidden,
        hidden_codes,
        hidden_scales,
        context_codes,
        ..
    } = buffers;
    let row = |index: usize| &modulation[index * width..(index + 1) * width];
    for (index, attention) in block.attention.iter().enumerate() {
        let is_self = index == 0;
        let (scale_in, scale_out) = if is_self {
            (calibration.inputs[SELF_IN], calibration.inputs[SELF_OUT])
        } else {
            (calibration.inputs[CROSS_IN], calibration.inputs[CROSS_OUT])
        };
        let modulate = if is_self {
            Modulation::AdaLn { scale: row(1), shift: row(0) }
        } else {
            Modulation::Affine { gain: &block.norm_gain, bias: &block.norm_bias }
        };
        let sink = RowSink::Codes { out: codes_mut(a, tokens, width), scale: scale_in };
        kernels.layer_norm(floats(state, tokens, width), EPS, modulate, sink, workspace).expect("shapes fit");
        let keys = if is_self { tokens } else { sizes.text };
        let scale_source = if is_self { scale_in } else { calibration.inputs[TEXT] };
        if !is_self {
            let sink = RowSink::Codes { out: codes_mut(context_codes, sizes.text, width), scale: scale_source };
            kernels.quantise(floats(inputs.context, sizes.text, width), sink, workspace).expect("shapes fit");
        }
        let source: &[i8] = if is_self { a } else { context_codes };
        let [to_q, to_k, to_v, to_out] = &attention.projections;
        // One scale for all heads: the codes of a row come from one call.
        let whole = |scales: &[f32]| scales.iter().copied().fold(0.0, f32::max);
        let (scale_q, scale_k, scale_v) =
            (whole(&calibration.query[index]), whole(&calibration.key[index]), whole(&calibration.value[index]));
        for (linear, gain, input, rows, out, scale) in [
            (to_q, &attention.gain_q, (&a[..], scale_in), tokens, &mut *q, scale_q),
            (to_k, &attention.gain_k, (source, scale_source), keys, &mut *k, scale_k),
        ] {
            let sink = GemmSink::F32 { out: floats_mut(float, rows, width), operands: Operands::F32 };
            let scratch = (&mut hidden[..], &mut hidden_codes[..], &mut hidden_scales[..]);
            run.linear(input, rows, linear, Activation::Identity, sink, scratch, workspace);
            let sink = RowSink::Codes { out: codes_mut(out, rows, width), scale };
            let rotary = is_self.then_some(inputs.rotary);
            kernels.rms_norm(floats(float, rows, width), EPS, gain, rotary, sink, workspace).expect("shapes fit");
        }
        let sink = GemmSink::Codes { out: codes_mut(v, keys, width), scale: scale_v };
        let scratch = (&mut hidden[..], &mut hidden_codes[..], &mut hidden_scales[..]);
        run.linear((source, scale_source), keys, to_v, Activation::Identity, sink, scratch, workspace);
        let (key, value) = (codes(k, keys, width), codes(v, keys, width));
        kernels.pack_key_value(key, value, sizes.heads, packed, workspace).expect("shapes fit");
        let mut of_heads = [[0f32; 16]; 3];
        for (scales, scale) in of_heads.iter_mut().zip([scale_q, scale_k, scale_v]) {
            scales.fill(scale);
        }
        let [query, key, value] = &of_heads;
        let scales =
            AttentionScales { query: &query[..sizes.heads], key: &key[..sizes.heads], value: &value[..sizes.heads] };
        let sink = AttentionSink::Codes { out: codes_mut(a, tokens, width), scale: scale_out };
        kernels.attention_w8a8(codes(q, tokens, width), packed, scales, sink, workspace).expect("shapes fit");
        let gate = is_self.then(|| row(2));
        let sink = GemmSink::Residual { state: floats_mut(state, tokens, width), gate, precision: Operands::F16 };
        let scratch = (&mut hidden[..], &mut hidden_codes[..], &mut hidden_scales[..]);
        run.linear((a, scale_out), tokens, to_out, Activation::Identity, sink, scratch, workspace);
    }
    let modulate = Modulation::AdaLn { scale: row(4), shift: row(3) };
    let sink = RowSink::Codes { out: codes_mut(a, tokens, width), scale: calibration.inputs[FFN_IN] };
    kernels.layer_norm(floats(state, tokens, width), EPS, modulate, sink, workspace).expect("shapes fit");
    let scale = calibration.inputs[FFN_MIDDLE];
    let sink = GemmSink::Codes { out: codes_mut(middle_codes, tokens, sizes.ffn), scale };
    let scratch = (&mut hidden[..], &mut hidden_codes[..], &mut hidden_scales[..]);
    let input = (&a[..], calibration.inputs[FFN_IN]);
    run.linear(input, tokens, &block.ffn[0], Activation::GeluTanh, sink, scratch, workspace);
    let sink =
        GemmSink::Residual { state: floats_mut(state, tokens, width), gate: Some(row(5)), precision: Operands::F16 };
    let scratch = (&mut hidden[..], &mut hidden_codes[..], &mut hidden_scales[..]);
    run.linear((middle_codes, scale), tokens, &block.ffn[1], Activation::Identity, sink, scratch, workspace);
}

/// FNV-1a of the bits of values.
pub fn fingerprint(values: &[f32]) -> u64 {
    values
        .iter()
        .flat_map(|value| value.to_bits().to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A block small enough for every instruction set, with padding and more than one block of keys.
pub const SMALL: Sizes = Sizes { width: 192, heads: 3, ffn: 400, rank: 40, tokens: 336, text: 45 };
/// Its patch grid.
pub const SMALL_GRID: [usize; 3] = [2, 12, 14];

/// The small block, its inputs and the state before.
pub struct SmallCase {
    pub block: Block,
    pub context: Vec<f32>,
    pub modulation: Vec<f32>,
    pub rotary: RotaryTable,
    pub calibration: Calibration,
    pub start: Vec<f32>,
}

impl SmallCase {
    pub fn fixed() -> SmallCase {
        let sizes = SMALL;
        let mut random = Random::new(8);
        SmallCase {
            block: Block::random(sizes, 7),
            context: random.normals(sizes.text * sizes.width, 1.0),
            modulation: random.normals(6 * sizes.width, 0.3),
            rotary: trefoil_kernels::rotary_table(SMALL_GRID, sizes.head_dim()).expect("an even head dimension"),
            // Fixed scales: the arithmetic under test must not depend on a float run.
            calibration: Calibration {
                inputs: [0.05, 0.02, 0.04, 0.03, 0.02, 0.05, 0.03],
                query: [(); 2].map(|()| vec![0.03; sizes.heads]),
                key: [(); 2].map(|()| vec![0.03; sizes.heads]),
                value: [(); 2].map(|()| vec![0.03; sizes.heads]),
            },
            start: random.normals(sizes.tokens * sizes.width, 1.0),
        }
    }

    pub fn inputs(&self, detail: bool) -> Inputs<'_> {
        Inputs { context: &self.context, modulation: &self.modulation, rotary: &self.rotary, detail }
    }

    /// One execution on the CPU.
    pub fn run(&self, kernels: &Kernels, detail: bool, state: &mut [f32], buffers: &mut Buffers) {
        run_w8a8(kernels, &self.block, &self.calibration, &self.inputs(detail), state, buffers);
    }
}

/// Two block executions (the second with the adapters) on `w8a8`; returns the state.
pub fn small_run(first: &Kernels, second: &Kernels) -> Vec<f32> {
    let case = SmallCase::fixed();
    let (mut state, mut buffers) = (case.start.clone(), Buffers::new(SMALL));
    case.run(first, false, &mut state, &mut buffers);
    case.run(second, true, &mut state, &mut buffers);
    state
}

/// Bits of [`small_run`]: the arithmetic is the same on every machine, so this is a constant of the product. It changes
/// only with the arithmetic, on purpose.
pub const SMALL_FINGERPRINT: u64 = 0x4abe_14aa_4137_03e8;
