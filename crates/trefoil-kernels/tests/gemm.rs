//! GEMM against plain oracles, on every instruction set of this processor, with one and two threads.

#![allow(clippy::needless_range_loop, reason = "oracles are written with the indices of the formulas")]

mod support;

use proptest::prelude::*;
use support::{Random, bits, every_kernels, name_of, tiled, view};
use trefoil_kernels::math::{code, gelu_tanh, round_f16, silu};
use trefoil_kernels::{
    Activation, ActivationScale, Adapter, Codes, Epilogue, FloatAdapter, FloatEpilogue, FloatWeights, GemmSink,
    Operands, Rows, RowsMut, Workspace,
};
use trefoil_weights::quantise::Quantised;

fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Identity => x,
        Activation::GeluTanh => gelu_tanh(x),
        Activation::Silu => silu(x),
    }
}

/// `Σ a·q`, element by element through the address formula.
fn dot(codes: &[i8], stride: usize, row: usize, weights: &Quantised, column: usize) -> i32 {
    (0..weights.shape.d_in)
        .map(|i| i32::from(codes[row * stride + i]) * i32::from(weights.codes[weights.shape.offset(i, column)]))
        .sum()
}

struct Case {
    rows: usize,
    d_in: usize,
    d_out: usize,
    rank: usize,
    activation: Activation,
    has_bias: bool,
    per_row: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    (
        // Few rows and many have ways of their own.
        prop_oneof![1usize..60, 90usize..140],
        1usize..150,
        1usize..100,
        prop_oneof![2 => Just(0usize), 1 => 1usize..40],
        0u8..3,
        any::<(bool, bool)>(),
        any::<u64>(),
    )
        .prop_map(|(rows, d_in, d_out, rank, activation, (has_bias, per_row), seed)| Case {
            rows,
            d_in,
            d_out,
            rank,
            activation: [Activation::Identity, Activation::GeluTanh, Activation::Silu][usize::from(activation)],
            has_bias,
            per_row,
            seed,
        })
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Case { rows, d_in, d_out, rank, activation, has_bias, per_row, seed } = self;
        write!(f, "{rows}×{d_in}×{d_out} rank {rank} {activation:?} bias {has_bias} per row {per_row} seed {seed}")
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn w8a8_is_the_formula_bit_for_bit(case in case()) {
        let Case { rows, d_in, d_out, rank, activation, has_bias, per_row, seed } = case;
        let mut random = Random::new(seed);
        let weights = tiled(&random.normals(d_in * d_out, 0.1), d_in, d_out);
        let stride = d_in.next_multiple_of(32) + 32 * (seed % 2) as usize;
        let codes = random.codes(rows * stride);
        let row_scales: Vec<f32> = (0..rows).map(|_| 0.01 + 0.01 * random.normal().abs()).collect();
        let bias = random.normals(d_out, 1.0);
        let gate = random.normals(d_out, 1.0);
        let state = random.normals(rows * d_out, 1.0);
        let up = (rank > 0).then(|| tiled(&random.normals(rank * d_out, 0.1), rank, d_out));
        let hidden_stride = rank.next_multiple_of(32).max(32);
        let hidden = random.codes(rows * hidden_stride);
        let hidden_scales: Vec<f32> = (0..rows).map(|_| 0.01 + 0.01 * random.normal().abs()).collect();
        let scale = if per_row { ActivationScale::Row(&row_scales) } else { ActivationScale::Tensor(0.0137) };
        let scale_of = |row: usize| if per_row { row_scales[row] } else { 0.0137 };

        let mut want = Vec::new();
        for row in 0..rows {
            for column in 0..d_out {
                let acc = dot(&codes, stride, row, &weights, column) as f32;
                let mut y = acc * (scale_of(row) * weights.scales[column]) + if has_bias { bias[column] } else { 0.0 };
                if let Some(up) = &up {
                    let delta = dot(&hidden, hidden_stride, row, up, column) as f32;
                    y += delta * (hidden_scales[row] * (2.0 * up.scales[column]));
                }
                want.push(activate(activation, y));
            }
        }
        let out_scale = 0.031f32;
        let want_codes: Vec<i8> = want.iter().map(|&y| code(y, 1.0 / out_scale)).collect();
        let want_state: Vec<f32> = state.iter().zip(&want).enumerate().map(|(at, (s, y))| round_f16(s + y * gate[at % d_out])).collect();

        let input = Codes { codes: Rows::new("x", &codes, rows, d_in, stride).unwrap(), scale };
        let epilogue = Epilogue {
            bias: has_bias.then_some(&bias[..]),
            adapter: up.as_ref().map(|up| Adapter {
                hidden: Codes { codes: Rows::new("h", &hidden, rows, rank, hidden_stride).unwrap(), scale: ActivationScale::Row(&hidden_scales) },
                up: view(up),
                factor: 2.0,
            }),
            activation,
        };
        for kernels in every_kernels() {
            let mut workspace = Workspace::new();
            let mut out = vec![f32::NAN; rows * d_out];
            let sink = GemmSink::F32 { out: RowsMut::dense("y", &mut out, rows, d_out).unwrap(), operands: Operands::F32 };
            kernels.gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace).unwrap();
            prop_assert_eq!(bits(&out), bits(&want), "{}", name_of(&kernels));

            let out_stride = d_out.next_multiple_of(32);
            let mut out = vec![99i8; rows * out_stride];
            let sink = GemmSink::Codes { out: RowsMut::new("y", &mut out, rows, d_out, out_stride).unwrap(), scale: out_scale };
            kernels.gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace).unwrap();
            for (row, out) in out.chunks(out_stride).enumerate() {
                prop_assert_eq!(&out[..d_out], &want_codes[row * d_out..(row + 1) * d_out], "{}", name_of(&kernels));
                prop_assert!(out[d_out..].iter().all(|&code| code == 0), "{} padding", name_of(&kernels));
            }

            let mut out = state.clone();
            let sink = GemmSink::Residual { state: RowsMut::dense("x", &mut out, rows, d_out).unwrap(), gate: Some(&gate), precision: Operands::F16 };
            kernels.gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace).unwrap();
            prop_assert_eq!(bits(&out), bits(&want_state), "{}", name_of(&kernels));
        }
    }

    #[test]
    fn float_gemm_is_close_and_w8a16_is_exact(case in case()) {
        let Case { rows, d_in, d_out, rank, activation, has_bias, per_row: is_plain, seed } = case;
        // Past one panel of inputs too.
        let d_in = if seed % 3 == 0 { d_in + 256 } else { d_in };
        let mut random = Random::new(seed);
        let plain = random.normals(d_in * d_out, 0.1);
        let weights = tiled(&plain, d_in, d_out);
        let x: Vec<f32> = random.normals(rows * d_in, 1.0).into_iter().map(round_f16).collect();
        let bias = random.normals(d_out, 1.0);
        let up_plain = random.normals(rank * d_out, 0.1);
        let up = (rank > 0).then(|| tiled(&up_plain, rank, d_out));
        let hidden: Vec<f32> = random.normals(rows * rank, 1.0).into_iter().map(round_f16).collect();
        let float_weights = if is_plain {
            FloatWeights::OutIn(Rows::dense("w", &plain, d_out, d_in).unwrap())
        } else {
            FloatWeights::Tiled(view(&weights))
        };
        let epilogue = FloatEpilogue {
            bias: has_bias.then_some(&bias[..]),
            adapter: up.as_ref().map(|up| FloatAdapter {
                hidden: Rows::dense("h", &hidden, rows, rank).unwrap(),
                up: if is_plain { FloatWeights::OutIn(Rows::dense("u", &up_plain, d_out, rank).unwrap()) } else { FloatWeights::Tiled(view(up)) },
                factor: 2.0,
            }),
            activation,
        };
        for operands in [Operands::F32, Operands::F16] {
            let round = |value: f32| if operands == Operands::F16 { round_f16(value) } else { value };
            let weight = |i: usize, j: usize| round(if is_plain { plain[j * d_in + i] } else { weights.dequantise(i, j) });
            let up_weight = |i: usize, j: usize| round(if is_plain { up_plain[j * rank + i] } else { up.as_ref().unwrap().dequantise(i, j) });
            let mut exact_order: Option<Vec<u32>> = None;
            for kernels in every_kernels() {
                let mut out = vec![f32::NAN; rows * d_out];
                let sink = GemmSink::F32 { out: RowsMut::dense("y", &mut out, rows, d_out).unwrap(), operands: Operands::F32 };
                kernels.gemm_f32(Rows::dense("x", &x, rows, d_in).unwrap(), &float_weights, operands, &epilogue, sink, &mut Workspace::new()).unwrap();
                for row in 0..rows {
                    for column in 0..d_out {
                        let base: f64 = (0..d_in).map(|i| f64::from(x[row * d_in + i]) * f64::from(weight(i, column))).sum();
                        let magnitude: f64 = (0..d_in).map(|i| (f64::from(x[row * d_in + i]) * f64::from(weight(i, column))).abs()).sum();
                        let delta: f64 = (0..rank).map(|i| f64::from(hidden[row * rank + i]) * f64::from(up_weight(i, column))).sum();
                        let sum = base + 2.0 * delta + if has_bias { f64::from(bias[column]) } else { 0.0 };
                        let want = f64::from(activate(activation, sum as f32));
                        // Rounding errors of a long sum, and a slope of the activations below 1.2.
                        let bound = (magnitude + 10.0) * (d_in + rank + 8) as f64 * 6e-8 * 1.2;
                        let got = f64::from(out[row * d_out + column]);
                        prop_assert!((got - want).abs() <= bound, "{} {:?} {} {}", name_of(&kernels), operands, got, want);
                    }
                }
                if operands == Operands::F16 {
                    let exact = exact_order.get_or_insert_with(|| bits(&out));
                    prop_assert_eq!(&bits(&out), exact, "{}", name_of(&kernels));
                }
            }
        }
    }
}

/// Long reductions over whole tile columns have a way of their own, in which a tile finishes the one before: more than one column and block
/// of rows, a last tile of a few rows, every activation and destination.
#[test]
fn long_products_are_the_formula_bit_for_bit() {
    for (rows, d_in, tiles, activation, seed) in [
        (12, 768, 1, Activation::Identity, 1),
        (31, 801, 3, Activation::Identity, 2),
        (25, 790, 2, Activation::GeluTanh, 3),
        (24, 768, 2, Activation::Silu, 4),
        (260, 3000, 2, Activation::GeluTanh, 5),
        (260, 3000, 2, Activation::Identity, 6),
    ] {
        let d_out = tiles * 32;
        let mut random = Random::new(seed);
        let weights = tiled(&random.normals(d_in * d_out, 0.1), d_in, d_out);
        let stride = d_in.next_multiple_of(32);
        let codes = random.codes(rows * stride);
        let [bias, gate] = [(); 2].map(|()| random.normals(d_out, 1.0));
        let state = random.normals(rows * d_out, 1.0);
        let (scale, out_scale) = (0.0007f32, 0.013f32);
        let want: Vec<f32> = (0..rows * d_out)
            .map(|at| {
                let (row, column) = (at / d_out, at % d_out);
                let sum = dot(&codes, stride, row, &weights, column) as f32;
                activate(activation, sum * (scale * weights.scales[column]) + bias[column])
            })
            .collect();
        let want_codes: Vec<i8> = want.iter().map(|&y| code(y, 1.0 / out_scale)).collect();
        let of_state = |gate: Option<&[f32]>| {
            let gated = |at: usize| gate.map_or(want[at], |gate| want[at] * gate[at % d_out]);
            (0..want.len()).map(|at| round_f16(state[at] + gated(at))).collect::<Vec<f32>>()
        };
        let input =
            Codes { codes: Rows::new("x", &codes, rows, d_in, stride).unwrap(), scale: ActivationScale::Tensor(scale) };
        let epilogue = Epilogue { bias: Some(&bias), adapter: None, activation };
        for kernels in every_kernels() {
            let (mut out, mut workspace) = (vec![f32::NAN; rows * d_out], Workspace::new());
            let sink =
                GemmSink::F32 { out: RowsMut::dense("y", &mut out, rows, d_out).unwrap(), operands: Operands::F32 };
            kernels.gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace).unwrap();
            assert_eq!(bits(&out), bits(&want), "{} {rows}×{d_in}×{d_out} {activation:?}", name_of(&kernels));
            let mut out = vec![99i8; rows * d_out];
            let sink = GemmSink::Codes { out: RowsMut::dense("y", &mut out, rows, d_out).unwrap(), scale: out_scale };
            kernels.gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace).unwrap();
            assert_eq!(out, want_codes, "{} {rows}×{d_in}×{d_out} {activation:?}", name_of(&kernels));
            for gate in [Some(&gate[..]), None] {
                let mut out = state.clone();
                let sink = GemmSink::Residual {
                    state: RowsMut::dense("x", &mut out, rows, d_out).unwrap(),
                    gate,
                    precision: Operands::F16,
                };
                kernels.gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace).unwrap();
                assert_eq!(
                    bits(&out),
                    bits(&of_state(gate)),
                    "{} {rows}×{d_in}×{d_out} {activation:?}",
                    name_of(&kernels)
                );
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors_with_both_shapes() {
    let kernels = &every_kernels()[0];
    let weights = tiled(&[0.5; 40 * 24], 40, 24);
    let codes = [1i8; 3 * 64];
    let mut workspace = Workspace::new();
    let mut out = vec![0f32; 3 * 24];
    let mut run = |columns: usize,
                   stride: usize,
                   buffer: &[i8],
                   scale: ActivationScale<'_>,
                   epilogue: Epilogue<'_>,
                   out_columns: usize| {
        let input = Codes { codes: Rows::new("x", buffer, 3, columns, stride)?, scale };
        let sink = GemmSink::F32 { out: RowsMut::dense("y", &mut out, 3, out_columns)?, operands: Operands::F32 };
        kernels
            .gemm_w8a8(&input, &view(&weights), &epilogue, sink, &mut workspace)
            .map_err(|error| error.to_string())?;
        Ok::<(), Box<dyn std::error::Error>>(())
    };
    let one = ActivationScale::Tensor(1.0);
    run(40, 64, &codes, one, Epilogue::default(), 24).unwrap();
    let message = |result: Result<(), Box<dyn std::error::Error>>| result.unwrap_err().to_string();
    assert_eq!(
        message(run(41, 64, &codes, one, Epilogue::default(), 24)),
        "gemm_w8a8: the input is 3×41 but the weights is 40×24; columns of the input must be rows of the weights"
    );
    assert_eq!(
        message(run(40, 64, &codes, one, Epilogue::default(), 23)),
        "gemm_w8a8: the product is 3×24 but the destination is 3×23; they must have the same shape"
    );
    assert!(
        message(run(40, 40, &codes[..120], one, Epilogue::default(), 24)).contains("readable up to a multiple of 32")
    );
    assert!(
        message(run(40, 64, &codes, ActivationScale::Row(&[1.0; 2]), Epilogue::default(), 24))
            .contains("one scale per row")
    );
    assert!(message(run(40, 64, &codes, ActivationScale::Tensor(0.0), Epilogue::default(), 24)).contains("above 0"));
    let bias = Epilogue { bias: Some(&[0.0; 23]), ..Epilogue::default() };
    assert_eq!(
        message(run(40, 64, &codes, one, bias, 24)),
        "gemm_w8a8: bias is 23 values but the matrix is 24 columns; there must be at least one value per column"
    );
}
