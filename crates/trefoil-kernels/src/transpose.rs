//! Rows to panels: the right-hand operand of a product with rows, 32 of them side by side.

use crate::Rows;
use trefoil_weights::tile::TILE;

/// Rows that are read together. Four values of four rows are four 128-bit registers either way round.
const TOGETHER: usize = 4;

/// Columns at a time: 256 bytes of a row are worth a miss, and the 8 KiB written stay in the first-level cache.
const COLUMNS: usize = 64;

/// `panel[i][lane] = source[row + lane][column + i]` for every whole row of 32 in `panel`; zero where there is no such row.
///
/// Compiled for the baseline on purpose: with AVX-512 the compiler scatters, which is several times slower than shuffles and
/// plain stores.
pub(crate) fn transpose(source: Rows<'_, f32>, row: usize, column: usize, panel: &mut [f32]) {
    let panel = panel.as_chunks_mut::<TILE>().0;
    for (chunk, panel) in panel.chunks_mut(COLUMNS).enumerate() {
        let column = column + chunk * COLUMNS;
        for lane in (0..TILE).step_by(TOGETHER) {
            let first = row + lane;
            if first + TOGETHER <= source.rows() {
                let rows = std::array::from_fn(|at| &source.row(first + at)[column..][..panel.len()]);
                interleave(rows, lane, panel);
                continue;
            }
            for lane in lane..lane + TOGETHER {
                if row + lane < source.rows() {
                    for (out, &value) in panel.iter_mut().zip(&source.row(row + lane)[column..]) {
                        out[lane] = value;
                    }
                } else {
                    for out in &mut *panel {
                        out[lane] = 0.0;
                    }
                }
            }
        }
    }
}

/// `panel[i][lane .. lane + 4] = (rows[0][i], …, rows[3][i])`.
fn interleave(rows: [&[f32]; TOGETHER], lane: usize, panel: &mut [[f32; TILE]]) {
    let (blocks, rest) = panel.as_chunks_mut::<TOGETHER>();
    let [(zeroth, end), (first, _), (second, _), (third, _)] = rows.map(<[f32]>::as_chunks::<TOGETHER>);
    debug_assert_eq!(end.len(), rest.len(), "rows as long as the panel");
    for ((((out, zeroth), first), second), third) in blocks.iter_mut().zip(zeroth).zip(first).zip(second).zip(third) {
        // SAFETY: SSE is part of x86-64, and no other version asks for anything.
        let columns = unsafe { square([*zeroth, *first, *second, *third]) };
        for (out, column) in out.iter_mut().zip(columns) {
            out[lane..lane + TOGETHER].copy_from_slice(&column);
        }
    }
    let done = blocks.len() * TOGETHER;
    for (at, out) in rest.iter_mut().enumerate() {
        for (out, row) in out[lane..].iter_mut().zip(rows) {
            *out = row[done + at];
        }
    }
}

/// A 4 × 4 matrix turned. The compiler moves single values where it is left to itself.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "sse")]
fn square(rows: [[f32; TOGETHER]; TOGETHER]) -> [[f32; TOGETHER]; TOGETHER] {
    use std::arch::x86_64::{
        __m128, _mm_loadu_ps, _mm_movehl_ps, _mm_movelh_ps, _mm_storeu_ps, _mm_unpackhi_ps, _mm_unpacklo_ps,
    };
    // SAFETY: each row has the four values that are read.
    let [zeroth, first, second, third] = rows.each_ref().map(|row| -> __m128 { unsafe { _mm_loadu_ps(row.as_ptr()) } });
    let (low, low_next) = (_mm_unpacklo_ps(zeroth, first), _mm_unpacklo_ps(second, third));
    let (high, high_next) = (_mm_unpackhi_ps(zeroth, first), _mm_unpackhi_ps(second, third));
    let columns = [
        _mm_movelh_ps(low, low_next),
        _mm_movehl_ps(low_next, low),
        _mm_movelh_ps(high, high_next),
        _mm_movehl_ps(high_next, high),
    ];
    columns.map(|column| {
        let mut values = [0f32; TOGETHER];
        // SAFETY: room for the four values that are written.
        unsafe { _mm_storeu_ps(values.as_mut_ptr(), column) };
        values
    })
}

/// A 4 × 4 matrix turned.
///
/// # Safety
/// None; as the other one.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
unsafe fn square(rows: [[f32; TOGETHER]; TOGETHER]) -> [[f32; TOGETHER]; TOGETHER] {
    std::array::from_fn(|column| rows.map(|row| row[column]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]
        #[test]
        fn every_value_lands_in_its_lane(rows in 1usize..70, columns in 1usize..150, gap in 0usize..5, row in 0usize..70, column in 0usize..150) {
            let (row, column) = (row % rows, column % columns);
            let data: Vec<f32> = (0..rows * (columns + gap)).map(|at| at as f32 + 1.0).collect();
            let source = Rows::new("source", &data, rows, columns, columns + gap).unwrap();
            let mut panel = vec![-1.0; (columns - column) * TILE];
            transpose(source, row, column, &mut panel);
            for (at, &value) in panel.iter().enumerate() {
                let (input, lane) = (at / TILE, at % TILE);
                let want = if row + lane < rows { source.row(row + lane)[column + input] } else { 0.0 };
                prop_assert_eq!(value.to_bits(), want.to_bits(), "input {} lane {}", input, lane);
            }
        }
    }
}
