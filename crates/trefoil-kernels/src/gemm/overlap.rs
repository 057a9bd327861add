//! An INT8 product with GELU to codes on AVX-512 VNNI: a row tile finishes the one before, from its sums to the destination.
//!
//! A product needs two of the four floating-point pipes and 28 of 32 registers. Additions, conversions and chains of them cost nothing
//! beside it, and half of an epilogue with this activation is that: a register of it goes with every 32 inputs of the next product. (With the
//! other epilogues, which are a few instructions, it was tried and gains nothing.) The numbers are those of [`super::avx512::Finish`].

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::epilogue::{ColumnParameters, TILE_VALUES};
use super::int8::Gemm;
use super::{Activation, ActivationScale, GemmSink};
use crate::isa::Supported;
use crate::kernel::{STEP, TILE_ROWS, for_each_group, four, prefetch};
use crate::math::LANES;
use crate::math::vectors::{GeluPieces, codes};
use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// Registers of a tile, one for each step.
const VECTORS: usize = TILE_VALUES / LANES;

/// Computes as many rows as it can, whole tiles from the first on, and says how many: none where the epilogue is another one or the products
/// are short.
pub(super) fn run(gemm: &Gemm<'_>, (first, rows): (usize, usize), sums: &[i32], sink: &mut GemmSink<'_>) -> usize {
    let ActivationScale::Tensor(scale) = gemm.input.scale else { return 0 };
    let (Activation::GeluTanh, GemmSink::Codes { out, scale: out_scale }) = (gemm.epilogue.activation, sink) else {
        return 0;
    };
    let shape = gemm.weights.shape;
    if !gemm.isa.has_avx512_vnni()
        || gemm.epilogue.adapter.is_some()
        || !shape.d_out.is_multiple_of(TILE)
        || shape.padded_in() < VECTORS * TILE
    {
        return 0;
    }
    let rows = rows / TILE_ROWS * TILE_ROWS;
    if rows == 0 {
        return 0;
    }
    let block = Block { gemm, first, rows, sums: &sums[..rows], scale };
    let (origin, stride) = out.origin(first, rows);
    block.run(Destination { origin, stride, inverse: 1.0 / *out_scale });
    rows
}

/// Where a matrix goes: its first element and the elements from one row to the next.
#[derive(Clone, Copy)]
struct Destination {
    origin: *mut i8,
    stride: usize,
    /// Of the scale of codes.
    inverse: f32,
}

impl Destination {
    fn at(self, row: usize, column: usize) -> *mut i8 {
        self.origin.wrapping_add(row * self.stride + column)
    }
}

/// What the epilogue needs of a tile column.
#[repr(C, align(64))]
struct Column {
    /// `s_x·s_j`.
    factors: [f32; TILE],
    bias: [f32; TILE],
}

impl Column {
    const EMPTY: Column = Column { factors: [0.0; TILE], bias: [0.0; TILE] };
}

#[repr(C, align(64))]
struct Sums([i32; TILE_VALUES]);

/// A tile with its sums.
struct Tile<'a> {
    sums: &'a Sums,
    column: &'a Column,
    /// Where its first element goes.
    to: Destination,
}

impl Tile<'_> {
    /// Sixteen products with their bias: half a row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn values(&self, vector: usize) -> __m512 {
        let half = vector % 2 * LANES;
        let load = |values: &[f32; TILE]| {
            // SAFETY: sixteen values.
            unsafe { _mm512_loadu_ps(values[half..][..LANES].as_ptr()) }
        };
        // SAFETY: sixteen sums.
        let sums = unsafe { _mm512_loadu_si512(self.sums.0[vector * LANES..][..LANES].as_ptr().cast()) };
        _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), load(&self.column.factors)), load(&self.column.bias))
    }

    /// Where they go.
    #[inline]
    fn at(&self, vector: usize) -> *mut i8 {
        self.to.at(vector / 2, vector % 2 * LANES)
    }
}

impl Tile<'_> {
    /// What is done of half a row after group `group` of a step; groups come in ascending order. A product in flight fills the registers
    /// behind the 32 that have names, and a chain that is longer than they last would hold it up: so there are pieces.
    ///
    /// # Safety
    /// The processor has AVX-512 VNNI, and a tile of the destination is writable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn piece(&self, vector: usize, group: usize, state: &mut GeluPieces) {
        match group {
            0 => state.exponent(self.values(vector)),
            2 => state.remainder(),
            3 => state.divisor(),
            5 => state.reciprocal(),
            7 => {
                // The value again: a register less in between.
                let value = state.value(self.values(vector));
                let codes = codes(value, _mm512_set1_ps(self.to.inverse));
                // SAFETY: the caller's promise.
                unsafe { _mm_storeu_si128(self.at(vector).cast(), _mm512_cvtepi32_epi8(codes)) };
            }
            _ => {}
        }
    }
}

/// A block of whole row tiles.
struct Block<'a> {
    gemm: &'a Gemm<'a>,
    /// First row in the part.
    first: usize,
    rows: usize,
    /// Sums of the rows' codes.
    sums: &'a [i32],
    /// Of the input.
    scale: f32,
}

impl Block<'_> {
    fn run(&self, to: Destination) {
        let Gemm { isa, input, weights, epilogue, first, .. } = self.gemm;
        let (shape, bytes) = (weights.shape, weights.shape.column_bytes());
        // Those of the tile before stay until the next one is done.
        let (mut sums, mut columns) =
            ([Sums([0; TILE_VALUES]), Sums([0; TILE_VALUES])], [Column::EMPTY, Column::EMPTY]);
        let (mut now, mut before): (usize, Option<Destination>) = (0, None);
        for column in 0..shape.tile_columns() {
            let builder = ColumnParameters::columns(column * TILE, TILE);
            columns.swap(0, 1);
            columns[0] = Column {
                factors: builder.lift(Some(weights.scales), 1.0).map(|scale| self.scale * scale),
                bias: builder.lift(epilogue.bias, 0.0),
            };
            for row in (0..self.rows).step_by(TILE_ROWS) {
                let at = to.at(row, column * TILE);
                for row in 0..TILE_ROWS {
                    prefetch(at.wrapping_add(row * to.stride).cast_const(), TILE);
                }
                let [even, odd] = &mut sums;
                let (sums, sums_before) = if now == 0 { (even, &*odd) } else { (odd, &*even) };
                // The first tile of a column finishes the last one of the column before.
                let column_before = &columns[usize::from(row == 0)];
                let before_tile = before.map(|to| Tile { sums: sums_before, column: column_before, to });
                let codes = input.codes.starting_at(first + self.first + row);
                let operands = Operand {
                    codes,
                    stride: input.codes.stride(),
                    weights: &weights.codes[column * bytes..(column + 1) * bytes],
                    sums: self.sums[row..].first_chunk().expect("a sum for each row"),
                };
                operands.check(shape.padded_in());
                // SAFETY: `run` asked for the instruction set; just checked; `origin` vouches for the destination.
                unsafe { dot(*isa, &operands, before_tile.as_ref(), sums) };
                before = Some(Destination { origin: at, ..to });
                now = 1 - now;
            }
        }
        if let Some(to) = before {
            let tile = Tile { sums: &sums[1 - now], column: &columns[0], to };
            // SAFETY: as above.
            unsafe { finish_tile(&tile) };
        }
    }
}

/// Operands of a tile of all rows.
struct Operand<'a> {
    codes: &'a [i8],
    stride: usize,
    /// A tile column.
    weights: &'a [i8],
    sums: &'a [i32; TILE_ROWS],
}

impl Operand<'_> {
    fn check(&self, k: usize) {
        assert!(self.codes.len() >= (TILE_ROWS - 1) * self.stride + k, "activations of the tile");
        assert!(self.weights.len() == k * TILE && k.is_multiple_of(TILE), "weights of the tile");
    }
}

/// The sums of a tile, and meanwhile the rest of the one before.
///
/// # Safety
/// The processor has AVX-512 VNNI, the operands passed their check, they are at least [`VECTORS`] steps, and the destination of the tile
/// before is writable.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn dot(_: Supported, operands: &Operand<'_>, before: Option<&Tile<'_>>, out: &mut Sums) {
    let flip = _mm512_set1_epi8(-128);
    let mut sums = [[_mm512_setzero_si512(); 2]; TILE_ROWS];
    for (sums, &of_row) in sums.iter_mut().zip(operands.sums) {
        *sums = [_mm512_set1_epi32(of_row.wrapping_mul(-128)); 2];
    }
    let stride = operands.stride;
    let mut weights = operands.weights.as_ptr();
    // Three rows share a pointer, at strides 0, 1 and 2: few enough registers that no address is spilled.
    let mut rows: [*const i8; 4] = [operands.codes.as_ptr(); 4];
    for (triple, pointer) in rows.iter_mut().enumerate() {
        *pointer = pointer.wrapping_add(triple * 3 * stride);
    }
    // Written out wherever it is used: sums stay in registers only where nothing else refers to them.
    macro_rules! group {
        ($at:ident) => {
            // SAFETY: the caller's promise: a step has eight groups of 128 bytes.
            let (low, high) = unsafe {
                let weights = weights.add($at * GROUP_BYTES);
                (_mm512_loadu_si512(weights.cast()), _mm512_loadu_si512(weights.add(GROUP_BYTES / 2).cast()))
            };
            let (low, high) = (_mm512_xor_si512(low, flip), _mm512_xor_si512(high, flip));
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above, for every row.
                let codes = _mm512_set1_epi32(unsafe { four(rows[row / 3].add(row % 3 * stride + $at * GROUP)) });
                sums[0] = _mm512_dpbusd_epi32(sums[0], low, codes);
                sums[1] = _mm512_dpbusd_epi32(sums[1], high, codes);
            }
        };
    }
    macro_rules! advance {
        () => {
            weights = weights.wrapping_add(STEP * GROUP_BYTES);
            for pointer in &mut rows {
                *pointer = pointer.wrapping_add(TILE);
            }
        };
    }
    let mut steps = operands.weights.len() / (TILE * TILE);
    if let Some(before) = before {
        steps -= VECTORS;
        for vector in 0..VECTORS {
            let mut state = GeluPieces::new();
            for_each_group!(AT => {
                group!(AT);
                // What is loaded for a group stays with it: the compiler would load ahead what registers cannot hold.
                compiler_fence(Ordering::SeqCst);
                // SAFETY: the caller's promise.
                unsafe { before.piece(vector, AT, &mut state) };
                compiler_fence(Ordering::SeqCst);
            });
            advance!();
        }
    }
    for _ in 0..steps {
        for group in 0..STEP {
            group!(group);
        }
        advance!();
    }
    for (out, sums) in out.0.as_chunks_mut::<TILE>().0.iter_mut().zip(sums) {
        // SAFETY: 32 elements.
        unsafe {
            _mm512_storeu_si512(out.as_mut_ptr().cast(), sums[0]);
            _mm512_storeu_si512(out.as_mut_ptr().add(LANES).cast(), sums[1]);
        }
    }
}

/// Finishes a tile that no other one follows.
///
/// # Safety
/// As [`Tile::piece`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn finish_tile(tile: &Tile<'_>) {
    for vector in 0..VECTORS {
        let mut state = GeluPieces::new();
        for group in 0..STEP {
            // SAFETY: the caller's promise.
            unsafe { tile.piece(vector, group, &mut state) };
        }
    }
}
