//! Attention and row operators against f64 oracles and, on the INT8 path, against their formulas bit for bit.

#![allow(clippy::needless_range_loop, reason = "oracles are written with the indices of the formulas")]

mod support;

use proptest::prelude::*;
use support::{Random, bits, every_kernels, name_of};
use trefoil_kernels::math::{MAX_CODE, code, exp2, fold_lanes, recip, round_f16, rsqrt};
use trefoil_kernels::{
    AttentionScales, AttentionSink, KEY_BLOCK, Modulation, Operands, PackedKeyValue, RowSink, Rows, RowsMut, Workspace,
    rotary_table,
};

/// Attention in f64.
fn attention_oracle(q: &[f64], k: &[f64], v: &[f64], heads: usize, width: usize) -> Vec<f64> {
    let (queries, keys, head_dim) = (q.len() / width, k.len() / width, width / heads);
    let mut out = vec![0f64; q.len()];
    for query in 0..queries {
        for head in 0..heads {
            let at = head * head_dim;
            let scores: Vec<f64> = (0..keys)
                .map(|key| {
                    (0..head_dim).map(|dim| q[query * width + at + dim] * k[key * width + at + dim]).sum::<f64>()
                        / (head_dim as f64).sqrt()
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            for dim in 0..head_dim {
                out[query * width + at + dim] =
                    (0..keys).map(|key| weights[key] * v[key * width + at + dim]).sum::<f64>() / total;
            }
        }
    }
    out
}

/// The documented formulas of INT8 attention, one element after the other.
fn int8_attention_oracle(q: &[i8], k: &[i8], v: &[i8], heads: usize, width: usize, scales: [&[f32]; 3]) -> Vec<f32> {
    let (queries, keys, head_dim) = (q.len() / width, k.len() / width, width / heads);
    let mut out = vec![0f32; q.len()];
    let per_root = (f64::from(std::f32::consts::LOG2_E) / (head_dim as f64).sqrt()) as f32;
    for query in 0..queries {
        for head in 0..heads {
            let at = head * head_dim;
            let sigma = (scales[0][head] * scales[1][head]) * per_root;
            let mut state = vec![0f32; head_dim];
            let (mut total, mut maximum) = (0f32, None);
            for first in (0..keys).step_by(KEY_BLOCK) {
                let block = first..keys.min(first + KEY_BLOCK);
                let scores: Vec<i32> = block
                    .clone()
                    .map(|key| {
                        (0..head_dim)
                            .map(|dim| i32::from(q[query * width + at + dim]) * i32::from(k[key * width + at + dim]))
                            .sum()
                    })
                    .collect();
                let largest = *scores.iter().max().unwrap();
                let codes: Vec<i32> = scores
                    .iter()
                    .map(|score| (exp2((score - largest) as f32 * sigma) * MAX_CODE).round_ties_even() as i32)
                    .collect();
                let running = maximum.map_or(largest, |maximum: i32| maximum.max(largest));
                let old = maximum.map_or(0.0, |maximum| exp2((maximum - running) as f32 * sigma));
                let new = exp2((largest - running) as f32 * sigma);
                total = total * old + codes.iter().sum::<i32>() as f32 * new;
                for (dim, state) in state.iter_mut().enumerate() {
                    let sum: i32 =
                        block.clone().zip(&codes).map(|(key, code)| code * i32::from(v[key * width + at + dim])).sum();
                    *state = *state * old + sum as f32 * new;
                }
                maximum = Some(running);
            }
            let factor = recip(total) * scales[2][head];
            for (out, state) in out[query * width + at..].iter_mut().zip(state) {
                *out = state * factor;
            }
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn int8_attention_is_the_formula_bit_for_bit(queries in 1usize..150, keys in prop_oneof![1usize..100, 250usize..600], heads in 1usize..3, tiles in 1usize..5, spread in 0.1f32..6.0, seed in any::<u64>()) {
        let mut random = Random::new(seed);
        let width = heads * tiles * 32;
        let (q, k, v) = (random.codes(queries * width), random.codes(keys * width), random.codes(keys * width));
        let scales: [Vec<f32>; 3] = [(); 3].map(|()| (0..heads).map(|_| 0.002 + 0.004 * spread * random.normal().abs()).collect());
        let [sq, sk, sv] = &scales;
        let want = int8_attention_oracle(&q, &k, &v, heads, width, [sq, sk, sv]);
        let out_scale = 0.01f32;
        for kernels in every_kernels() {
            let mut workspace = Workspace::new();
            let mut packed = PackedKeyValue::new();
            let rows = |data, rows| Rows::dense("codes", data, rows, width).unwrap();
            kernels.pack_key_value(rows(&k[..], keys), rows(&v[..], keys), heads, &mut packed, &mut workspace).unwrap();
            let scales = AttentionScales { query: sq, key: sk, value: sv };
            let mut out = vec![f32::NAN; queries * width];
            let sink = AttentionSink::F32 { out: RowsMut::dense("y", &mut out, queries, width).unwrap(), operands: Operands::F32 };
            kernels.attention_w8a8(rows(&q[..], queries), &packed, scales, sink, &mut workspace).unwrap();
            prop_assert_eq!(bits(&out), bits(&want), "{}", name_of(&kernels));
            let mut out = vec![0i8; queries * width];
            let sink = AttentionSink::Codes { out: RowsMut::dense("y", &mut out, queries, width).unwrap(), scale: out_scale };
            kernels.attention_w8a8(rows(&q[..], queries), &packed, scales, sink, &mut workspace).unwrap();
            prop_assert_eq!(&out, &want.iter().map(|&y| code(y, 1.0 / out_scale)).collect::<Vec<_>>());
        }
        // The formula itself is near exact attention of the same codes: probabilities have 7 bits.
        let wide = |codes: &[i8], scales: &[f32]| codes.iter().enumerate().map(|(at, &c)| f64::from(c) * f64::from(scales[at % width / (width / heads)])).collect::<Vec<f64>>();
        let exact = attention_oracle(&wide(&q, sq), &wide(&k, sk), &wide(&v, sv), heads, width);
        for (at, (&got, &want)) in want.iter().zip(&exact).enumerate() {
            // Each code is off by at most half a step of its block's largest probability, so the weights of N keys are
            // off by at most N/(2·127) of the largest; relative to their sum that is at most N/254, and at most 2 in all.
            let bound = (keys as f64 / 254.0).min(2.0) * 127.0 * f64::from(sv[at % width / (width / heads)]) * 2.0 + 1e-4;
            prop_assert!((f64::from(got) - want).abs() <= bound, "{} {}", got, want);
        }
    }

    #[test]
    fn float_attention_matches_f64(queries in 1usize..60, keys in prop_oneof![1usize..100, 250usize..600], heads in 1usize..3, tiles in 1usize..3, spread in 0.1f32..4.0, seed in any::<u64>()) {
        let mut random = Random::new(seed);
        let width = heads * tiles * 32;
        let half = |values: Vec<f32>| values.into_iter().map(round_f16).collect::<Vec<_>>();
        let (q, k, v) = (half(random.normals(queries * width, spread)), half(random.normals(keys * width, spread)), half(random.normals(keys * width, 1.0)));
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let want = attention_oracle(&wide(&q), &wide(&k), &wide(&v), heads, width);
        for kernels in every_kernels() {
            for (operands, bound) in [(Operands::F32, 1e-4), (Operands::F16, 4e-3)] {
                let mut out = vec![f32::NAN; queries * width];
                let sink = AttentionSink::F32 { out: RowsMut::dense("y", &mut out, queries, width).unwrap(), operands: Operands::F32 };
                let rows = |data, rows| Rows::dense("floats", data, rows, width).unwrap();
                kernels.attention_f32(rows(&q[..], queries), rows(&k[..], keys), rows(&v[..], keys), heads, operands, sink, &mut Workspace::new()).unwrap();
                for (&got, &want) in out.iter().zip(&want) {
                    prop_assert!((f64::from(got) - want).abs() <= bound, "{} {:?} {} {}", name_of(&kernels), operands, got, want);
                }
            }
        }
    }

    #[test]
    fn row_operators_are_their_formulas(rows in 1usize..40, columns in 1usize..200, seed in any::<u64>()) {
        let mut random = Random::new(seed);
        let x = random.normals(rows * columns, 3.0);
        let (gain, shift) = (random.normals(columns, 1.0), random.normals(columns, 1.0));
        let eps = 1e-6f32;
        let lanes = |values: &[f32]| {
            let mut lanes = [0f32; 16];
            for (at, value) in values.iter().enumerate() {
                lanes[at % 16] += value;
            }
            fold_lanes(lanes)
        };
        let (mut ada, mut affine, mut plain, mut rms, mut ada_wide, mut rms_wide, mut soft_wide) = (vec![], vec![], vec![], vec![], vec![], vec![], vec![]);
        for row in x.chunks(columns) {
            let per_column = 1.0 / columns as f32;
            let mean = lanes(row) * per_column;
            let squares: Vec<f32> = row.iter().map(|x| (x - mean) * (x - mean)).collect();
            let factor = rsqrt(lanes(&squares) * per_column + eps);
            let rms_factor = rsqrt(lanes(&row.iter().map(|x| x * x).collect::<Vec<_>>()) * per_column + eps);
            let wide: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
            let wide_mean = wide.iter().sum::<f64>() / columns as f64;
            let wide_root = (wide.iter().map(|x| (x - wide_mean).powi(2)).sum::<f64>() / columns as f64 + f64::from(eps)).sqrt();
            let wide_rms = (wide.iter().map(|x| x * x).sum::<f64>() / columns as f64 + f64::from(eps)).sqrt();
            let largest = wide.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = wide.iter().map(|x| (x - largest).exp()).sum();
            for column in 0..columns {
                let n = (row[column] - mean) * factor;
                plain.push(n);
                ada.push(n * (1.0 + gain[column]) + shift[column]);
                affine.push(n * gain[column] + shift[column]);
                rms.push((row[column] * rms_factor) * gain[column]);
                ada_wide.push((wide[column] - wide_mean) / wide_root);
                rms_wide.push(wide[column] / wide_rms * f64::from(gain[column]));
                soft_wide.push((wide[column] - largest).exp() / total);
            }
        }
        if columns > 1 {
            for (got, want) in plain.iter().zip(&ada_wide) {
                prop_assert!((f64::from(*got) - want).abs() < 1e-4, "{} {}", got, want);
            }
        }
        for (got, want) in rms.iter().zip(&rms_wide) {
            prop_assert!((f64::from(*got) - want).abs() < 1e-5 * want.abs().max(1.0), "{} {}", got, want);
        }
        let input = Rows::dense("x", &x, rows, columns).unwrap();
        let padded = columns.next_multiple_of(32);
        for kernels in every_kernels() {
            let mut workspace = Workspace::new();
            for (modulation, want) in [
                (Modulation::None, &plain),
                (Modulation::AdaLn { scale: &gain, shift: &shift }, &ada),
                (Modulation::Affine { gain: &gain, bias: &shift }, &affine),
            ] {
                let mut out = vec![f32::NAN; rows * columns];
                let sink = RowSink::F32 { out: RowsMut::dense("y", &mut out, rows, columns).unwrap(), operands: Operands::F32 };
                kernels.layer_norm(input, eps, modulation, sink, &mut workspace).unwrap();
                prop_assert_eq!(bits(&out), bits(want), "{}", name_of(&kernels));
                let mut out = vec![99i8; rows * padded];
                let sink = RowSink::Codes { out: RowsMut::new("y", &mut out, rows, columns, padded).unwrap(), scale: 0.02 };
                kernels.layer_norm(input, eps, modulation, sink, &mut workspace).unwrap();
                for (row, out) in out.chunks(padded).enumerate() {
                    for (column, &got) in out.iter().enumerate() {
                        let want = if column < columns { code(want[row * columns + column], 1.0 / 0.02) } else { 0 };
                        prop_assert_eq!(got, want);
                    }
                }
            }
            let mut out = vec![f32::NAN; rows * columns];
            let sink = RowSink::F32 { out: RowsMut::dense("y", &mut out, rows, columns).unwrap(), operands: Operands::F16 };
            kernels.rms_norm(input, eps, &gain, None, sink, &mut workspace).unwrap();
            prop_assert_eq!(bits(&out), bits(&rms.iter().map(|&x| round_f16(x)).collect::<Vec<_>>()), "{}", name_of(&kernels));
            let mut out = vec![99i8; rows * padded];
            let sink = RowSink::Codes { out: RowsMut::new("y", &mut out, rows, columns, padded).unwrap(), scale: 0.02 };
            kernels.rms_norm(input, eps, &gain, None, sink, &mut workspace).unwrap();
            for (row, out) in out.chunks(padded).enumerate() {
                for (column, &got) in out.iter().enumerate() {
                    let want = if column < columns { code(rms[row * columns + column], 1.0 / 0.02) } else { 0 };
                    prop_assert_eq!(got, want, "{} row {} column {}", name_of(&kernels), row, column);
                }
            }
            let mut out = vec![f32::NAN; rows * columns];
            let sink = RowSink::F32 { out: RowsMut::dense("y", &mut out, rows, columns).unwrap(), operands: Operands::F32 };
            kernels.softmax(input, sink, &mut workspace).unwrap();
            for (got, want) in out.iter().zip(&soft_wide) {
                prop_assert!((f64::from(*got) - want).abs() < 1e-5 * want + 1e-12, "{} {}", got, want);
            }
            let (mut codes, mut scales) = (vec![99i8; rows * padded], vec![0f32; rows]);
            let sink = RowSink::DynamicCodes { out: RowsMut::new("y", &mut codes, rows, columns, padded).unwrap(), scales: &mut scales };
            kernels.quantise(input, sink, &mut workspace).unwrap();
            for (row, (codes, scale)) in codes.chunks(padded).zip(&scales).enumerate() {
                for (column, &got) in codes.iter().enumerate() {
                    let want = if column < columns { x[row * columns + column] } else { 0.0 };
                    prop_assert!((f32::from(got) * scale - want).abs() <= scale * 0.5001, "{} {}", got, want);
                }
            }
        }
    }
}

#[test]
fn rotary_positions_turn_adjacent_pairs() {
    let (rows, heads, head_dim) = (24, 2, 32);
    let width = heads * head_dim;
    let table = rotary_table([2, 3, 4], head_dim).unwrap();
    let x = Random::new(1).normals(rows * width, 1.0);
    let gain = vec![1f32; width];
    let mut plain = vec![0f32; rows * width];
    let input = Rows::dense("x", &x, rows, width).unwrap();
    let all = every_kernels();
    let sink = RowSink::F32 { out: RowsMut::dense("y", &mut plain, rows, width).unwrap(), operands: Operands::F32 };
    all[0].rms_norm(input, 1e-6, &gain, None, sink, &mut Workspace::new()).unwrap();
    let mut want = plain.clone();
    for (row, values) in want.chunks_mut(width).enumerate() {
        for (pair, values) in values.chunks_mut(2).enumerate() {
            let (cos, sin) =
                (table.cos[row * table.pairs + pair % table.pairs], table.sin[row * table.pairs + pair % table.pairs]);
            let (a, b) = (values[0], values[1]);
            values[0] = a * cos - b * sin;
            values[1] = a * sin + b * cos;
        }
    }
    for kernels in &all {
        let mut out = vec![0f32; rows * width];
        let sink = RowSink::F32 { out: RowsMut::dense("y", &mut out, rows, width).unwrap(), operands: Operands::F32 };
        kernels.rms_norm(input, 1e-6, &gain, Some(&table), sink, &mut Workspace::new()).unwrap();
        assert_eq!(bits(&out), bits(&want), "{}", name_of(kernels));
    }
    let short = rotary_table([1, 3, 4], head_dim).unwrap();
    let mut out = vec![0f32; rows * width];
    let sink = RowSink::F32 { out: RowsMut::dense("y", &mut out, rows, width).unwrap(), operands: Operands::F32 };
    let error = all[0].rms_norm(input, 1e-6, &gain, Some(&short), sink, &mut Workspace::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rms_norm: the input is 24×64 but the rotary table is 12 positions of 16 pairs; there must be a position per row, and whole heads in a row"
    );
}

/// Heads that do and do not fill registers, more than one head, and rows that no group of rows divides.
#[test]
fn rotary_codes_are_those_of_the_turned_values() {
    for (grid, heads, head_dim) in [([2, 3, 4], 2, 32), ([1, 3, 3], 3, 48), ([1, 1, 7], 1, 128), ([1, 5, 1], 2, 20)] {
        let (rows, width) = (grid.iter().product(), heads * head_dim);
        let table = rotary_table(grid, head_dim).unwrap();
        let mut random = Random::new(2);
        let (x, gain) = (random.normals(rows * width, 1.0), random.normals(width, 1.0));
        let input = Rows::dense("x", &x, rows, width).unwrap();
        let (padded, scale) = (width.next_multiple_of(32), 0.017f32);
        for kernels in every_kernels() {
            let mut values = vec![0f32; rows * width];
            let sink =
                RowSink::F32 { out: RowsMut::dense("y", &mut values, rows, width).unwrap(), operands: Operands::F32 };
            kernels.rms_norm(input, 1e-6, &gain, Some(&table), sink, &mut Workspace::new()).unwrap();
            let mut codes = vec![99i8; rows * padded];
            let sink = RowSink::Codes { out: RowsMut::new("y", &mut codes, rows, width, padded).unwrap(), scale };
            kernels.rms_norm(input, 1e-6, &gain, Some(&table), sink, &mut Workspace::new()).unwrap();
            for (row, codes) in codes.chunks(padded).enumerate() {
                for (column, &got) in codes.iter().enumerate() {
                    let want = if column < width { code(values[row * width + column], 1.0 / scale) } else { 0 };
                    assert_eq!(got, want, "{} {grid:?} × {head_dim}, row {row}, column {column}", name_of(&kernels));
                }
            }
        }
    }
}

#[test]
fn attention_refuses_what_does_not_fit() {
    let kernels = &every_kernels()[0];
    let codes = [1i8; 4 * 96];
    let mut packed = PackedKeyValue::new();
    let mut workspace = Workspace::new();
    let rows = |count, columns| Rows::dense("codes", &codes[..count * columns], count, columns).unwrap();
    let error = kernels.pack_key_value(rows(4, 96), rows(4, 96), 2, &mut packed, &mut workspace).unwrap_err();
    assert_eq!(
        error.to_string(),
        "pack_key_value: a row is 96 columns but its heads is 2; every head must have the same multiple of 32 columns"
    );
    assert!(kernels.pack_key_value(rows(4, 96), rows(3, 96), 3, &mut packed, &mut workspace).is_err());
    kernels.pack_key_value(rows(4, 96), rows(4, 96), 3, &mut packed, &mut workspace).unwrap();
    let mut out = [0f32; 4 * 96];
    let mut attend = |query: Rows<'_, i8>, scales: &[f32]| {
        let out = RowsMut::dense("y", &mut out, 4, 96).unwrap();
        let scales = AttentionScales { query: scales, key: &[1.0; 3], value: &[1.0; 3] };
        let sink = AttentionSink::F32 { out, operands: Operands::F32 };
        kernels.attention_w8a8(query, &packed, scales, sink, &mut workspace).map_err(|error| error.to_string())
    };
    attend(rows(4, 96), &[1.0; 3]).unwrap();
    assert!(attend(rows(4, 96), &[1.0; 2]).unwrap_err().contains("one scale per head"));
    assert!(attend(rows(4, 96), &[f32::NAN; 3]).unwrap_err().contains("above 0"));
    assert!(attend(rows(4, 64), &[1.0; 3]).unwrap_err().contains("same number of columns"));
}
