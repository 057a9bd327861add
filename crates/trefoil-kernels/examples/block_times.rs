//! Where the time of a `w8a8` block at the shapes of the 1.3 B model goes, operator by operator:
//! `cargo run --release -p trefoil-kernels --example block_times -- [tokens] [cores] [runs] [instruction set]`, say `7800 0,1 3`.
//!
//! On a shared machine the processor time is steadier than the time: processor time of all threads over their number, and speeds are of that.
//! Weights are random. The last line is a fingerprint of the state after the first run: two versions of the kernels that compute the same bits
//! print the same one.

#![allow(clippy::similar_names, reason = "query, key and value everywhere")]

use std::time::Instant;
use trefoil_kernels::{
    Activation, ActivationScale, AttentionScales, AttentionSink, Codes, Epilogue, GemmSink, KernelError, Kernels,
    Modulation, Norm, NormSink, Operands, PackedKeyValue, Pool, RotaryTable, RowSink, Rows, RowsMut, Workspace, bench,
    rotary_table,
};
use trefoil_weights::TiledView;
use trefoil_weights::tile::TileShape;

const WIDTH: usize = 1536;
const HEADS: usize = 12;
const FFN: usize = 8960;
const TEXT: usize = 512;
/// Rows of the feed-forward at a time, as in `trefoil-video`.
const FFN_ROWS: usize = 1560;
/// Of weights, in bytes.
const ALIGNMENT: usize = 128;
const EPS: f32 = 1e-6;
/// Scales that keep codes in range.
const NORM: f32 = 4.0 / 127.0;
const VALUE: f32 = 3.0 / 127.0;
const OUT: f32 = 1.0 / 127.0;
const MIDDLE: f32 = 2.0 / 127.0;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let tokens: usize = arguments.next().map_or(Ok(1560), |tokens| tokens.parse())?;
    let cores: Vec<usize> =
        arguments.next().unwrap_or("0".to_string()).split(',').map(str::parse).collect::<Result<_, _>>()?;
    let runs: usize = arguments.next().map_or(Ok(3), |runs| runs.parse())?;
    let kernels = match arguments.next() {
        Some(isa) => Kernels::new(isa.parse()?, Pool::pinned(&cores)?)?,
        None => Kernels::best(&cores)?,
    };
    let mut block = Block::new(tokens)?;
    let mut table = Table::default();
    let mut peak = 0f64;
    let mut fingerprint = 0;
    for run in 0..runs.max(1) {
        peak = peak.max(bench::peak(&kernels, true, 3).unwrap_or(f64::NAN));
        block.run(&kernels, &mut table)?;
        if run == 0 {
            // FNV-1a.
            fingerprint = block.state.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, value| {
                (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
            });
        }
    }
    println!("{tokens} tokens, {} on cores {cores:?}, {runs} runs, peak {peak:.0} GOPS", kernels.isa());
    table.print(peak, cores.len());
    println!("fingerprint of the state: {fingerprint:#018x}");
    Ok(())
}

/// Times of the operators in order of appearance.
#[derive(Default)]
struct Table {
    rows: Vec<Row>,
    /// Times of this run so far.
    current: Vec<[f64; 2]>,
}

struct Row {
    name: &'static str,
    operations: f64,
    /// Time and processor time of each run.
    seconds: Vec<[f64; 2]>,
}

/// Processor time of all threads in seconds.
fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

impl Table {
    fn begin(&mut self) {
        self.current.clear();
        self.current.resize(self.rows.len(), [0.0; 2]);
        self.rows.iter_mut().for_each(|row| row.operations = 0.0);
    }

    /// Runs `work`, which is `operations`, and adds its time to the row `name`.
    fn time<T>(&mut self, name: &'static str, operations: usize, work: impl FnOnce() -> T) -> T {
        let (start, busy) = (Instant::now(), processor_time());
        let result = work();
        let elapsed = [start.elapsed().as_secs_f64(), processor_time() - busy];
        let at = self.rows.iter().position(|row| row.name == name).unwrap_or_else(|| {
            self.rows.push(Row { name, operations: 0.0, seconds: Vec::new() });
            self.current.push([0.0; 2]);
            self.rows.len() - 1
        });
        self.rows[at].operations += operations as f64;
        self.current[at][0] += elapsed[0];
        self.current[at][1] += elapsed[1];
        result
    }

    fn end(&mut self) {
        for (row, seconds) in self.rows.iter_mut().zip(&self.current) {
            row.seconds.push(*seconds);
        }
    }

    fn print(&self, peak: f64, threads: usize) {
        let median = |row: &Row| {
            [0, 1].map(|which| {
                let mut seconds: Vec<f64> = row.seconds.iter().map(|seconds| seconds[which]).collect();
                seconds.sort_by(f64::total_cmp);
                seconds[seconds.len() / 2]
            })
        };
        let line = |name: &str, [elapsed, busy]: [f64; 2], operations: f64, total: f64| {
            let busy = busy / threads as f64;
            let gops = operations / busy / 1e9;
            let speed =
                if operations > 0.0 { format!("{gops:>6.0} {:>6.1} %", gops / peak * 100.0) } else { String::new() };
            println!(
                "{name:<30} {:>9.2} ms {:>9.2} ms {:>5.1} % {speed}",
                elapsed * 1e3,
                busy * 1e3,
                busy * threads as f64 / total * 100.0
            );
        };
        let medians: Vec<[f64; 2]> = self.rows.iter().map(median).collect();
        let total = [0, 1].map(|which| medians.iter().map(|seconds| seconds[which]).sum::<f64>());
        println!(
            "{:<30} {:>12} {:>12} {:>7} {:>6} {:>8}",
            "operator", "median", "processor", "share", "GOPS", "of peak"
        );
        for (row, &seconds) in self.rows.iter().zip(&medians) {
            line(row.name, seconds, row.operations, total[1]);
        }
        line("sum", total, self.rows.iter().map(|row| row.operations).sum(), total[1]);
    }
}

struct Linear {
    shape: TileShape,
    codes: Vec<i8>,
    /// First code.
    start: usize,
    scales: Vec<f32>,
    bias: Vec<f32>,
}

/// A small generator: the numbers need no quality.
struct Random(u32);

impl Random {
    fn next(&mut self) -> i8 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((self.0 >> 24) as u8 as i8).max(-127)
    }

    fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| f32::from(self.next()) / 127.0 * scale).collect()
    }

    fn linear(&mut self, d_in: usize, d_out: usize) -> Result<Linear, &'static str> {
        let shape = TileShape::new(d_in, d_out).ok_or("sizes above zero")?;
        // As an artefact aligns them.
        let mut codes = vec![0; shape.bytes() + ALIGNMENT];
        let start = codes.as_ptr().align_offset(ALIGNMENT);
        codes[start..start + shape.bytes()].fill_with(|| self.next());
        // Outputs about as large as inputs.
        let scale = 1.0 / (73.0 * (d_in as f32).sqrt());
        Ok(Linear { shape, codes, start, scales: vec![scale; d_out], bias: self.floats(d_out, 0.1) })
    }
}

/// Where a product goes.
enum To<'a> {
    Product(GemmSink<'a>),
    Norm(NormSink<'a>),
    Both(GemmSink<'a>, NormSink<'a>),
}

impl Linear {
    fn operations(&self, rows: usize) -> usize {
        2 * rows * self.shape.d_in * self.shape.d_out
    }

    fn run(
        &self,
        kernels: &Kernels,
        input: (&[i8], usize, f32),
        activation: Activation,
        to: To<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let (codes, rows, scale) = input;
        let codes = Rows::dense("the input", codes, rows, self.shape.d_in)?;
        let input = Codes { codes, scale: ActivationScale::Tensor(scale) };
        let weights = TiledView {
            codes: &self.codes[self.start..][..self.shape.bytes()],
            scales: &self.scales,
            shape: self.shape,
        };
        let epilogue = Epilogue { bias: Some(&self.bias), adapter: None, activation };
        match to {
            To::Product(sink) => kernels.gemm_w8a8(&input, &weights, &epilogue, sink, workspace),
            To::Norm(norm) => kernels.gemm_w8a8_norm(&input, &weights, &epilogue, norm, workspace),
            To::Both(sink, norm) => kernels.gemm_w8a8_then_norm(&input, &weights, &epilogue, sink, norm, workspace),
        }
    }
}

/// Query, key, value, out.
struct Attention {
    linear: [Linear; 4],
    gain: Vec<f32>,
}

struct Block {
    tokens: usize,
    attention: [Attention; 2],
    up: Linear,
    down: Linear,
    rotary: RotaryTable,
    modulation: Vec<f32>,
    text: Vec<f32>,
    state: Vec<f32>,
    buffers: Buffers,
}

#[derive(Default)]
struct Buffers {
    workspace: Workspace,
    packed: PackedKeyValue,
    /// Keys and values of the text, which stay for a clip.
    packed_text: PackedKeyValue,
    input: Vec<i8>,
    context: Vec<i8>,
    query: Vec<i8>,
    key: Vec<i8>,
    value: Vec<i8>,
    middle: Vec<i8>,
}

fn floats_mut(data: &mut [f32], rows: usize) -> Result<RowsMut<'_, f32>, KernelError> {
    RowsMut::dense("floats", &mut data[..rows * WIDTH], rows, WIDTH)
}

fn codes_mut(data: &mut [i8], rows: usize, columns: usize) -> Result<RowsMut<'_, i8>, KernelError> {
    RowsMut::dense("codes", &mut data[..rows * columns], rows, columns)
}

impl Block {
    fn new(tokens: usize) -> Result<Block, Box<dyn std::error::Error>> {
        let mut random = Random(7);
        let mut attention = || -> Result<Attention, &'static str> {
            let mut linear = || random.linear(WIDTH, WIDTH);
            let linear = [linear()?, linear()?, linear()?, linear()?];
            Ok(Attention { linear, gain: random.floats(WIDTH, 1.0) })
        };
        let attention = [attention()?, attention()?];
        let rows = tokens.max(TEXT);
        Ok(Block {
            tokens,
            attention,
            up: random.linear(WIDTH, FFN)?,
            down: random.linear(FFN, WIDTH)?,
            rotary: rotary_table([1, 1, tokens], WIDTH / HEADS)?,
            modulation: random.floats(6 * WIDTH, 0.3),
            text: random.floats(TEXT * WIDTH, 1.0),
            state: random.floats(tokens * WIDTH, 2.0),
            buffers: Buffers {
                input: vec![0; rows * WIDTH],
                context: vec![0; TEXT * WIDTH],
                query: vec![0; rows * WIDTH],
                key: vec![0; rows * WIDTH],
                value: vec![0; rows * WIDTH],
                middle: vec![0; FFN_ROWS * FFN],
                ..Buffers::default()
            },
        })
    }

    fn run(&mut self, kernels: &Kernels, table: &mut Table) -> Result<(), KernelError> {
        table.begin();
        let modulation = std::mem::take(&mut self.modulation);
        let row = |index: usize| &modulation[index * WIDTH..(index + 1) * WIDTH];
        self.norm(kernels, table, Modulation::AdaLn { scale: row(1), shift: row(0) })?;
        let affine = Modulation::Affine { gain: row(1), bias: row(0) };
        self.attend(kernels, table, 0, (Some(row(2)), affine))?;
        let Buffers { workspace, context, packed_text, .. } = &mut self.buffers;
        if packed_text.keys() == 0 {
            let text = Rows::dense("the text", &self.text, TEXT, WIDTH)?;
            let sink = RowSink::Codes { out: codes_mut(context, TEXT, WIDTH)?, scale: NORM };
            table.time("once: text", 0, || kernels.quantise(text, sink, workspace))?;
        }
        self.attend(kernels, table, 1, (None, Modulation::AdaLn { scale: row(4), shift: row(3) }))?;
        let Buffers { workspace, input, middle, .. } = &mut self.buffers;
        for (state, input) in self.state.chunks_mut(FFN_ROWS * WIDTH).zip(input.chunks(FFN_ROWS * WIDTH)) {
            let rows = state.len() / WIDTH;
            let sink = GemmSink::Codes { out: codes_mut(middle, rows, FFN)?, scale: MIDDLE };
            table.time("feed-forward up, GELU, codes", self.up.operations(rows), || {
                let to = To::Product(sink);
                self.up.run(kernels, (&input[..rows * WIDTH], rows, NORM), Activation::GeluTanh, to, workspace)
            })?;
            let sink =
                GemmSink::Residual { state: floats_mut(state, rows)?, gate: Some(row(5)), precision: Operands::F16 };
            table.time("feed-forward down, residual", self.down.operations(rows), || {
                let to = To::Product(sink);
                self.down.run(kernels, (&middle[..rows * FFN], rows, MIDDLE), Activation::Identity, to, workspace)
            })?;
        }
        self.modulation = modulation;
        table.end();
        Ok(())
    }

    fn norm(&mut self, kernels: &Kernels, table: &mut Table, modulation: Modulation<'_>) -> Result<(), KernelError> {
        let Buffers { workspace, input, .. } = &mut self.buffers;
        let sink = RowSink::Codes { out: codes_mut(input, self.tokens, WIDTH)?, scale: NORM };
        let from = Rows::dense("the state", &self.state, self.tokens, WIDTH)?;
        table.time("layer norms to codes", 0, || kernels.layer_norm(from, EPS, modulation, sink, workspace))
    }

    /// Self-attention (0) or cross-attention (1), added to the state, and the norm after it.
    fn attend(
        &mut self,
        kernels: &Kernels,
        table: &mut Table,
        which: usize,
        (gate, modulation): (Option<&[f32]>, Modulation<'_>),
    ) -> Result<(), KernelError> {
        let tokens = self.tokens;
        let Buffers { workspace, packed, packed_text, input, context, query, key, value, .. } = &mut self.buffers;
        let [to_query, to_key, to_value, to_out] = &self.attention[which].linear;
        let is_self = which == 0;
        let (source, keys) = if is_self { (&input[..], tokens) } else { (&context[..], TEXT) };
        let packed = if is_self { packed } else { packed_text };
        // Those of the text are there from the second step of a clip on.
        let is_ready = !is_self && packed.keys() > 0;
        let rotary = is_self.then_some(&self.rotary);
        let linear = if is_self { "self: query, key, norms, rotary" } else { "cross: query, norm" };
        let gain = &self.attention[which].gain;
        for (weights, from, rows, out, name) in [
            (to_query, &input[..], tokens, &mut *query, linear),
            (to_key, source, keys, &mut *key, if is_self { linear } else { "once: text" }),
        ]
        .into_iter()
        .take(if is_ready { 1 } else { 2 })
        {
            let out = RowSink::Codes { out: codes_mut(out, rows, WIDTH)?, scale: NORM };
            let to = To::Norm(NormSink { norm: Norm::Rms { eps: EPS, gain, rotary }, out });
            table.time(name, weights.operations(rows), || {
                weights.run(kernels, (&from[..rows * WIDTH], rows, NORM), Activation::Identity, to, workspace)
            })?;
        }
        if !is_ready {
            let sink = GemmSink::Codes { out: codes_mut(value, keys, WIDTH)?, scale: VALUE };
            let name = if is_self { "self: value to codes" } else { "once: text" };
            table.time(name, to_value.operations(keys), || {
                let from = (&source[..keys * WIDTH], keys, NORM);
                to_value.run(kernels, from, Activation::Identity, To::Product(sink), workspace)
            })?;
            let k = Rows::dense("keys", &key[..keys * WIDTH], keys, WIDTH)?;
            let v = Rows::dense("values", &value[..keys * WIDTH], keys, WIDTH)?;
            let name = if is_self { "self: pack keys and values" } else { "once: text" };
            table.time(name, 0, || kernels.pack_key_value(k, v, HEADS, packed, workspace))?;
        }
        let (norm, of_value) = ([NORM; HEADS], [VALUE; HEADS]);
        let scales = AttentionScales { query: &norm, key: &norm, value: &of_value };
        let q = Rows::dense("queries", &query[..tokens * WIDTH], tokens, WIDTH)?;
        let sink = AttentionSink::Codes { out: codes_mut(input, tokens, WIDTH)?, scale: OUT };
        let name = if is_self { "self-attention" } else { "cross-attention" };
        table.time(name, 4 * tokens * keys * WIDTH, || kernels.attention_w8a8(q, packed, scales, sink, workspace))?;
        let sink = GemmSink::Residual { state: floats_mut(&mut self.state, tokens)?, gate, precision: Operands::F16 };
        let out = RowSink::Codes { out: codes_mut(query, tokens, WIDTH)?, scale: NORM };
        let to = To::Both(sink, NormSink { norm: Norm::Layer { eps: EPS, modulation }, out });
        table.time("attention out, residual, norm", to_out.operations(tokens), || {
            to_out.run(kernels, (&input[..tokens * WIDTH], tokens, OUT), Activation::Identity, to, workspace)
        })?;
        std::mem::swap(input, query);
        Ok(())
    }
}
