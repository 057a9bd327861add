//! The OpenCL kernels against the scalar CPU kernels, bit by bit, on every device and in every variant that it has.
//!
//! Without a device the tests say so and pass; with `TREFOIL_REQUIRE_BACKENDS=1` they fail, unless
//! `TREFOIL_TEST_WITHOUT_OPENCL=1` says that there is none on purpose.
#![cfg(feature = "opencl")]

#[path = "support/opencl.rs"]
mod devices;
mod support;

use devices::ALL;
use proptest::prelude::*;
use support::{Random, bits, tiled, view};
use trefoil_kernels::opencl::{self, OpenClError, Variant};
use trefoil_kernels::{
    Activation, ActivationScale, Adapter, AttentionScales, AttentionSink, Codes, Epilogue, GemmSink, Isa, Kernels,
    Modulation, Operands, PackedKeyValue, Pool, RotaryTable, RowSink, Rows, RowsMut, Workspace,
};
use trefoil_weights::quantise::Quantised;

fn scalar() -> Kernels {
    Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap()
}

fn cases(usual: u32) -> ProptestConfig {
    let cases = if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { usual * 20 } else { usual };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// A quantised matrix whose codes start inside a larger buffer.
struct Placed {
    codes: opencl::Buffer<i8>,
    first: usize,
    scales: opencl::Buffer<f32>,
}

impl Placed {
    fn new(kernels: &opencl::Kernels, matrix: &Quantised, first: usize) -> Placed {
        let mut codes = vec![77i8; first];
        codes.extend_from_slice(&matrix.codes);
        Placed { codes: kernels.copied(&codes).unwrap(), first, scales: kernels.copied(&matrix.scales).unwrap() }
    }

    fn tiled(&self, matrix: &Quantised) -> opencl::Tiled<'_> {
        opencl::Tiled { shape: matrix.shape, codes: &self.codes, first: self.first, scales: self.scales.vector() }
    }
}

/// What a GEMM is called with.
#[derive(Debug, Clone, Copy)]
struct GemmCase {
    m: usize,
    k: usize,
    n: usize,
    /// 0: no adapter.
    rank: usize,
    bias: bool,
    row_scales: bool,
    activation: Activation,
    /// Kind of sink.
    sink: usize,
    /// Extra columns of the rows of every matrix, times 4.
    gap: usize,
    seed: u64,
}

impl GemmCase {
    fn strategy() -> impl Strategy<Value = GemmCase> {
        let sizes = (1usize..40, 1usize..150, 1usize..110, prop_oneof![Just(0usize), 1usize..50]);
        let flags = (any::<bool>(), any::<bool>(), 0usize..3, 0usize..6, 0usize..3, any::<u64>());
        (sizes, flags).prop_map(|((m, k, n, rank), (bias, row_scales, activation, sink, gap, seed))| GemmCase {
            m,
            k,
            n,
            rank,
            bias,
            row_scales,
            activation: [Activation::Identity, Activation::GeluTanh, Activation::Silu][activation],
            sink,
            gap,
            seed,
        })
    }

    /// Runs on the CPU and on `others`; the destinations must have the same bytes, gaps included.
    fn check(self, others: &[opencl::Kernels]) {
        let GemmCase { m, k, n, rank, bias, row_scales, activation, sink, gap, seed } = self;
        let random = &mut Random::new(seed);
        let weights = tiled(&random.normals(n * k, 0.1), k, n);
        let up = (rank > 0).then(|| tiled(&random.normals(n * rank, 0.1), rank, n));
        let stride = |columns: usize| columns.next_multiple_of(32) + 4 * gap;
        // Padding and gaps hold anything.
        let input = random.codes(m * stride(k));
        let hidden = random.codes(m * stride(rank));
        let scales: Vec<f32> = random.normals(m, 0.01).into_iter().map(|scale| scale.abs() + 0.001).collect();
        let bias = bias.then(|| random.normals(n, 0.5));
        let gate = random.normals(n, 1.0);
        let operands = if sink % 2 == 0 { Operands::F32 } else { Operands::F16 };
        let (float_stride, code_stride) = (n + gap, stride(n));
        let start = random.normals(m * float_stride, 1.0);
        let start_codes = random.codes(m * code_stride);

        let (mut floats, mut codes) = (start.clone(), start_codes.clone());
        let codes_of = |data, columns| Rows::new("codes", data, m, columns, stride(columns)).unwrap();
        let scale = if row_scales { ActivationScale::Row(&scales) } else { ActivationScale::Tensor(0.02) };
        let hidden_scale = if row_scales { ActivationScale::Tensor(0.03) } else { ActivationScale::Row(&scales) };
        let epilogue = Epilogue {
            bias: bias.as_deref(),
            adapter: up.as_ref().map(|up| Adapter {
                hidden: Codes { codes: codes_of(&hidden, rank), scale: hidden_scale },
                up: view(up),
                factor: 2.0,
            }),
            activation,
        };
        let to = match sink {
            0 | 1 => GemmSink::F32 { out: RowsMut::new("out", &mut floats, m, n, float_stride).unwrap(), operands },
            2 | 3 => GemmSink::Codes { out: RowsMut::new("out", &mut codes, m, n, code_stride).unwrap(), scale: 0.05 },
            _ => GemmSink::Residual {
                state: RowsMut::new("out", &mut floats, m, n, float_stride).unwrap(),
                gate: (gap != 1).then_some(&gate[..]),
                precision: operands,
            },
        };
        let input_codes = Codes { codes: codes_of(&input, k), scale };
        scalar().gemm_w8a8(&input_codes, &view(&weights), &epilogue, to, &mut Workspace::new()).unwrap();

        for kernels in others {
            let name = kernels.variant();
            let placed = Placed::new(kernels, &weights, 1024);
            let placed_up = up.as_ref().map(|up| Placed::new(kernels, up, 4));
            let (device_input, device_hidden) = (kernels.copied(&input).unwrap(), kernels.copied(&hidden).unwrap());
            let device_scales = kernels.copied(&scales).unwrap();
            let device_bias = bias.as_ref().map(|bias| kernels.copied(bias).unwrap());
            let device_gate = kernels.copied(&gate).unwrap();
            let (mut out, mut out_codes) = (kernels.copied(&start).unwrap(), kernels.copied(&start_codes).unwrap());
            let rows = opencl::ActivationScale::Row(device_scales.vector());
            let tensor = opencl::ActivationScale::Tensor;
            let epilogue = opencl::Epilogue {
                bias: device_bias.as_ref().map(opencl::Buffer::vector),
                adapter: up.as_ref().zip(placed_up.as_ref()).map(|(up, placed)| opencl::Adapter {
                    hidden: opencl::Codes {
                        codes: device_hidden.rows("hidden", (0, m, rank, stride(rank))).unwrap(),
                        scale: if row_scales { tensor(0.03) } else { rows },
                    },
                    up: placed.tiled(up),
                    factor: 2.0,
                }),
                activation,
            };
            let to = match sink {
                0 | 1 => opencl::GemmSink::F32 { out: out.rows_mut("out", (0, m, n, float_stride)).unwrap(), operands },
                2 | 3 => opencl::GemmSink::Codes {
                    out: out_codes.rows_mut("out", (0, m, n, code_stride)).unwrap(),
                    scale: 0.05,
                },
                _ => opencl::GemmSink::Residual {
                    state: out.rows_mut("out", (0, m, n, float_stride)).unwrap(),
                    gate: (gap != 1).then(|| device_gate.vector()),
                    precision: operands,
                },
            };
            let input_codes = opencl::Codes {
                codes: device_input.rows("input", (0, m, k, stride(k))).unwrap(),
                scale: if row_scales { rows } else { tensor(0.02) },
            };
            kernels.gemm_w8a8(&input_codes, &placed.tiled(&weights), &epilogue, to).unwrap();
            assert!(bits(&out.read().unwrap()) == bits(&floats), "floats of {name} differ: {self:?}");
            assert!(out_codes.read().unwrap()[..] == codes[..], "codes of {name} differ: {self:?}");
        }
    }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn gemm_has_the_bits_of_the_scalar_kernel(case in GemmCase::strategy()) {
        case.check(&ALL);
    }
}

#[test]
fn a_large_gemm_is_cut_into_dispatches_with_the_same_bits() {
    let case = GemmCase {
        m: 1300,
        k: 1024,
        n: 1056,
        rank: 0,
        bias: true,
        row_scales: false,
        activation: Activation::GeluTanh,
        sink: 2,
        gap: 0,
        seed: 5,
    };
    assert!(case.m * case.k * case.n > opencl::DISPATCH_MULTIPLY_ADDS);
    // The slow variants are compared on small shapes.
    let fast = ALL.iter().position(|kernels| matches!(kernels.variant(), Variant::X86Vnni | Variant::Dot4x8Packed));
    if let Some(fast) = fast {
        case.check(&ALL[fast..=fast]);
    }
}

/// A row operator on the CPU and on a device: the same arguments, destinations compared as bits.
fn check_rows(
    (rows, columns, seed): (usize, usize, u64),
    cpu: impl Fn(&Kernels, Rows<'_, f32>, RowSink<'_>, &mut Workspace),
    device: impl Fn(&opencl::Kernels, opencl::Rows<'_, f32>, opencl::RowSink<'_>),
) {
    let random = &mut Random::new(seed);
    let stride = columns + (seed % 3) as usize;
    let code_stride = columns.next_multiple_of(32) + 4;
    let mut input = random.normals(rows * stride, 2.0);
    // A row of zeros and one that is far from the others.
    input[..columns].fill(0.0);
    if rows > 1 {
        input[stride..stride + columns].iter_mut().for_each(|value| *value = *value * 1e-3 + 100.0);
    }
    let view = Rows::new("input", &input, rows, columns, stride).unwrap();
    let (start, start_codes) = (random.normals(rows * stride, 1.0), random.codes(rows * code_stride));
    for sink in 0..4 {
        let (mut floats, mut codes, mut scales) = (start.clone(), start_codes.clone(), vec![0f32; rows]);
        let operands = if sink == 0 { Operands::F32 } else { Operands::F16 };
        let to = match sink {
            0 | 1 => RowSink::F32 { out: RowsMut::new("out", &mut floats, rows, columns, stride).unwrap(), operands },
            2 => RowSink::Codes {
                out: RowsMut::new("out", &mut codes, rows, columns, code_stride).unwrap(),
                scale: 0.03,
            },
            _ => RowSink::DynamicCodes {
                out: RowsMut::new("out", &mut codes, rows, columns, code_stride).unwrap(),
                scales: &mut scales,
            },
        };
        cpu(&scalar(), view, to, &mut Workspace::new());
        for kernels in &*ALL {
            let device_input = kernels.copied(&input).unwrap();
            let (mut out, mut out_codes) = (kernels.copied(&start).unwrap(), kernels.copied(&start_codes).unwrap());
            let mut out_scales = kernels.zeroed::<f32>(rows).unwrap();
            let to = match sink {
                0 | 1 => {
                    opencl::RowSink::F32 { out: out.rows_mut("out", (0, rows, columns, stride)).unwrap(), operands }
                }
                2 => opencl::RowSink::Codes {
                    out: out_codes.rows_mut("out", (0, rows, columns, code_stride)).unwrap(),
                    scale: 0.03,
                },
                _ => opencl::RowSink::DynamicCodes {
                    out: out_codes.rows_mut("out", (0, rows, columns, code_stride)).unwrap(),
                    scales: &mut out_scales,
                },
            };
            device(kernels, device_input.rows("input", (0, rows, columns, stride)).unwrap(), to);
            let at = format!("{} in {rows}×{columns}, sink {sink}", kernels.variant());
            assert!(bits(&out.read().unwrap()) == bits(&floats), "floats differ: {at}");
            assert!(out_codes.read().unwrap()[..] == codes[..], "codes differ: {at}");
            assert!(bits(&out_scales.read().unwrap()) == bits(&scales), "scales differ: {at}");
        }
    }
}

proptest! {
    #![proptest_config(cases(6))]

    #[test]
    fn row_operators_have_the_bits_of_the_scalar_kernels(
        rows in 1usize..9, columns in 1usize..140, seed in any::<u64>(), pairs in 1usize..20, heads in 1usize..4,
    ) {
        let size = (rows, columns, seed);
        check_rows(size, |k, i, s, w| k.quantise(i, s, w).unwrap(), |k, i, s| k.quantise(i, s).unwrap());
        check_rows(size, |k, i, s, w| k.softmax(i, s, w).unwrap(), |k, i, s| k.softmax(i, s).unwrap());
        let random = &mut Random::new(seed ^ 1);
        let (first, second) = (random.normals(columns, 1.0), random.normals(columns, 1.0));
        check_rows(
            size,
            |k, i, s, w| k.layer_norm(i, 1e-6, Modulation::None, s, w).unwrap(),
            |k, i, s| k.layer_norm(i, 1e-6, opencl::Modulation::None, s).unwrap(),
        );
        check_rows(
            size,
            |k, i, s, w| k.layer_norm(i, 1e-6, Modulation::Affine { gain: &first, bias: &second }, s, w).unwrap(),
            |k, i, s| {
                let (gain, bias) = (k.copied(&first).unwrap(), k.copied(&second).unwrap());
                k.layer_norm(i, 1e-6, opencl::Modulation::Affine { gain: gain.vector(), bias: bias.vector() }, s).unwrap();
                k.finish().unwrap();
            },
        );
        check_rows(
            size,
            |k, i, s, w| k.layer_norm(i, 1e-5, Modulation::AdaLn { scale: &first, shift: &second }, s, w).unwrap(),
            |k, i, s| {
                let (scale, shift) = (k.copied(&first).unwrap(), k.copied(&second).unwrap());
                k.layer_norm(i, 1e-5, opencl::Modulation::AdaLn { scale: scale.vector(), shift: shift.vector() }, s).unwrap();
            },
        );
        check_rows(
            size,
            |k, i, s, w| k.rms_norm(i, 1e-6, &first, None, s, w).unwrap(),
            |k, i, s| k.rms_norm(i, 1e-6, k.copied(&first).unwrap().vector(), None, s).unwrap(),
        );
        let columns = pairs * 2 * heads;
        let gain = random.normals(columns, 1.0);
        let angles = random.normals(rows * pairs, 1.0);
        let table = RotaryTable { cos: angles.iter().map(|a| a.cos()).collect(), sin: angles.iter().map(|a| a.sin()).collect(), positions: rows, pairs };
        check_rows(
            (rows, columns, seed),
            |k, i, s, w| k.rms_norm(i, 1e-6, &gain, Some(&table), s, w).unwrap(),
            |k, i, s| k.rms_norm(i, 1e-6, k.copied(&gain).unwrap().vector(), Some(&k.rotary_table(&table).unwrap()), s).unwrap(),
        );
    }
}

/// Attention on the CPU and on `others`: the same arguments, destinations compared as bits.
fn check_attention(
    (queries, keys, heads, head_dim): (usize, usize, usize, usize),
    (cpu, in_codes, seed): (&Kernels, bool, u64),
    others: &[opencl::Kernels],
) {
    let width = heads * head_dim;
    let random = &mut Random::new(seed);
    let [query, key, value] = [queries, keys, keys].map(|rows| random.codes(rows * width));
    let scales: Vec<Vec<f32>> =
        (0..3).map(|_| random.normals(heads, 0.02).into_iter().map(|s| s.abs() + 0.002).collect()).collect();
    let scales = AttentionScales { query: &scales[0], key: &scales[1], value: &scales[2] };
    let (mut floats, mut codes) = (vec![0f32; queries * width], vec![0i8; queries * width]);
    let (mut packed, mut workspace) = (PackedKeyValue::new(), Workspace::new());
    let rows = |data, rows| Rows::dense("operand", data, rows, width).unwrap();
    cpu.pack_key_value(rows(&key, keys), rows(&value, keys), heads, &mut packed, &mut workspace).unwrap();
    let sink = if in_codes {
        AttentionSink::Codes { out: RowsMut::dense("out", &mut codes, queries, width).unwrap(), scale: 0.01 }
    } else {
        AttentionSink::F32 { out: RowsMut::dense("out", &mut floats, queries, width).unwrap(), operands: Operands::F32 }
    };
    cpu.attention_w8a8(rows(&query, queries), &packed, scales, sink, &mut workspace).unwrap();
    for kernels in others {
        let [query, key, value] = [&query, &key, &value].map(|data| kernels.copied(data).unwrap());
        let dense = |rows: usize| (0, rows, width, width);
        let mut packed = opencl::PackedKeyValue::new();
        let (key, value) = (key.rows("key", dense(keys)).unwrap(), value.rows("value", dense(keys)).unwrap());
        kernels.pack_key_value(key, value, heads, &mut packed).unwrap();
        let mut out = kernels.zeroed::<f32>(queries * width).unwrap();
        let mut out_codes = kernels.zeroed::<i8>(queries * width).unwrap();
        let sink = if in_codes {
            opencl::AttentionSink::Codes { out: out_codes.rows_mut("out", dense(queries)).unwrap(), scale: 0.01 }
        } else {
            opencl::AttentionSink::F32 { out: out.rows_mut("out", dense(queries)).unwrap(), operands: Operands::F32 }
        };
        kernels.attention_w8a8(query.rows("query", dense(queries)).unwrap(), &packed, scales, sink).unwrap();
        let at = format!("{} with {queries} queries, {keys} keys, {heads} × {head_dim}", kernels.variant());
        assert!(bits(&out.read().unwrap()) == bits(&floats), "floats differ: {at}");
        assert!(out_codes.read().unwrap()[..] == codes[..], "codes differ: {at}");
    }
}

proptest! {
    #![proptest_config(cases(8))]

    #[test]
    fn attention_has_the_bits_of_the_scalar_kernel(
        (queries, keys, heads, tiles) in (1usize..300, 1usize..600, 1usize..4, 1usize..4),
        in_codes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        check_attention((queries, keys, heads, tiles * 32), (&scalar(), in_codes, seed), &ALL);
    }
}

#[test]
fn attention_of_many_heads_and_keys_is_cut_into_dispatches_with_the_same_bits() {
    // More heads than a dispatch takes, fewer rows than a tile.
    check_attention((5, 40, 35, 32), (&scalar(), true, 1), &ALL);
    // More products than a dispatch takes: the fast variants, against the fastest instruction set, whose bits are the scalar one's.
    let (queries, keys, heads, head_dim) = (409, 5003, 3, 128);
    assert!(2 * queries * keys * heads * head_dim > opencl::DISPATCH_MULTIPLY_ADDS);
    let cpu = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    if let Some(fast) = ALL.iter().position(|kernels| kernels.variant() == Variant::X86Vnni) {
        check_attention((queries, keys, heads, head_dim), (&cpu, false, 2), &ALL[fast..=fast]);
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_with_both_shapes() {
    for kernels in &*ALL {
        let matrix = tiled(&vec![0.5; 64 * 32], 32, 64);
        let placed = Placed::new(kernels, &matrix, 0);
        let codes = kernels.zeroed::<i8>(4 * 68).unwrap();
        let mut out = kernels.zeroed::<f32>(4 * 64).unwrap();
        let mut gemm = |first: usize, columns: usize, stride: usize, rows: usize| -> Result<(), OpenClError> {
            let input = opencl::Codes {
                codes: codes.rows("input", (first, 3, columns, stride))?,
                scale: opencl::ActivationScale::Tensor(0.1),
            };
            let out = out.rows_mut("out", (0, rows, 64, 64))?;
            let sink = opencl::GemmSink::F32 { out, operands: Operands::F32 };
            kernels.gemm_w8a8(&input, &placed.tiled(&matrix), &opencl::Epilogue::default(), sink)
        };
        gemm(4, 32, 64, 3).unwrap();
        let text = |result: Result<(), OpenClError>| result.unwrap_err().to_string();
        assert!(text(gemm(0, 40, 64, 3)).contains("the input is 3×40 but the weights is 32×64"));
        assert!(text(gemm(1, 32, 64, 3)).contains("must be a multiple of 4"));
        assert!(text(gemm(0, 32, 66, 3)).contains("must be a multiple of 4"));
        assert!(text(gemm(0, 32, 64, 2)).contains("the product is 3×64 but the destination is 2×64"));
        assert!(text(gemm(200, 32, 64, 3)).contains("input of 3×32"));
        let error = kernels.add(placed.scales.vector(), out.vector(), &mut kernels.zeroed(4).unwrap()).unwrap_err();
        assert!(error.to_string().contains("the same length"), "{error}");
    }
}
