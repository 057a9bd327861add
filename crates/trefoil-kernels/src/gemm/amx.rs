//! An INT8 product on AMX: 32 rows × 32 columns at a time, and meanwhile the epilogue of the 32 × 32 before.
//!
//! A tile product keeps the tile unit busy for 16 cycles and the rest of the core for one. So a product is cut into pieces with some rows
//! of the epilogue between them; what is done of the epilogue, GELU included, is hidden as long as it is shorter than the product. The epilogue
//! and the adapter's product are those of AVX-512.

use super::GemmSink;
use super::avx512::Finish;
use super::epilogue::{ColumnParameters, TILE_VALUES, prefetch_tile};
use super::int8::{Gemm, GemmScratch, Place};
use crate::kernel::amx::{PRODUCT_ROWS, Product, STEP_INPUTS, Tiles, pack_rows};
use crate::kernel::{TILE_ROWS, even_step_of};
use crate::math::LANES;
use crate::workspace::{LINE, lines};
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use trefoil_weights::tile::TILE;

/// Rows that the epilogue finishes together.
const TOGETHER: usize = 4;
const PIECES: usize = PRODUCT_ROWS / TOGETHER;

/// Fewer rows are quicker without the tile unit.
const LEAST_ROWS: usize = TILE_ROWS + 1;

/// Rows of sums: those of a product, and as many more as the epilogue wants to see of a row tile.
const SUM_ROWS: usize = PRODUCT_ROWS + TILE_ROWS;
const SUMS: usize = SUM_ROWS * TILE;

/// Computes all rows of the part, or none where the product is too small, and says which.
pub(super) fn run(gemm: &Gemm<'_>, sink: &mut GemmSink<'_>, scratch: &mut GemmScratch<'_>) -> bool {
    let k = gemm.weights.shape.padded_in();
    if gemm.isa.isa() != crate::Isa::AmxInt8 || gemm.rows < LEAST_ROWS || !k.is_multiple_of(STEP_INPUTS) {
        return false;
    }
    // SAFETY: `isa` vouches for the instruction set.
    let tiles = unsafe { Tiles::configure() };
    let step = even_step_of(gemm.rows, rows_of_block(k), PRODUCT_ROWS);
    let integers = lines(scratch.sums, 4 * SUMS + step + TILE_ROWS);
    let (sums, hidden_sums) = integers.split_at_mut(4 * SUMS);
    let mut state = State::new(sums);
    let packed = lines(scratch.codes, step * k);
    for first in (0..gemm.rows).step_by(step) {
        let rows = step.min(gemm.rows - first);
        gemm.sum_hidden(first, &mut hidden_sums[..rows]);
        for (row, packed) in (0..rows).step_by(PRODUCT_ROWS).zip(packed.chunks_exact_mut(PRODUCT_ROWS * k)) {
            let codes = gemm.input.codes.starting_at(gemm.first + first + row);
            pack_rows(codes, gemm.input.codes.stride(), (PRODUCT_ROWS.min(rows - row), k), packed);
        }
        for column in 0..gemm.weights.shape.tile_columns() {
            let valid = TILE.min(gemm.weights.shape.d_out - column * TILE);
            let parameters = gemm.parameters(column, valid, sink);
            let mut ahead = Ahead::of(gemm, column + 1, rows.div_ceil(PRODUCT_ROWS) * PIECES);
            for (row, packed) in (0..rows).step_by(PRODUCT_ROWS).zip(packed.chunks_exact(PRODUCT_ROWS * k)) {
                let count = PRODUCT_ROWS.min(rows - row);
                let at = Place { row: first + row, count, column, valid };
                state.product((gemm, &tiles), at, packed, &mut ahead, (&parameters, &hidden_sums[row..]), sink);
            }
        }
    }
    state.finish(gemm, sink);
    true
}

/// Rows whose codes stay in the second-level cache, which is larger on processors with AMX, beside a column of weights.
fn rows_of_block(k: usize) -> usize {
    const CACHE: usize = 1536 * 1024;
    const MOST: usize = 512;
    (CACHE / k / PRODUCT_ROWS * PRODUCT_ROWS).clamp(2 * PRODUCT_ROWS, MOST)
}

/// The column of weights that follows, which is asked for while this one is in use: they come from memory, and are multiplied in less time
/// than the wait for them would be.
struct Ahead {
    at: *const i8,
    /// Bytes of a piece.
    step: usize,
    left: usize,
}

impl Ahead {
    fn of(gemm: &Gemm<'_>, column: usize, pieces: usize) -> Ahead {
        let bytes = gemm.weights.shape.column_bytes();
        let left = if column < gemm.weights.shape.tile_columns() { bytes } else { 0 };
        let at = gemm.weights.codes.as_ptr().wrapping_add(column * bytes);
        Ahead { at, step: left.div_ceil(pieces).next_multiple_of(LINE), left }
    }

    #[inline]
    fn piece(&mut self) {
        let bytes = self.step.min(self.left);
        for offset in (0..bytes).step_by(LINE) {
            // SAFETY: a hint; it neither reads nor faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(offset)) };
        }
        self.at = self.at.wrapping_add(bytes);
        self.left -= bytes;
    }
}

/// Sums of a product and of its adapter.
struct Sums<'s> {
    of_input: &'s mut [i32],
    of_hidden: &'s mut [i32],
}

/// A product whose sums are there.
struct Before {
    at: Place,
    parameters: ColumnParameters,
}

/// Two products: the sums of one are made while the other one's are finished.
struct State<'s> {
    sums: [Sums<'s>; 2],
    /// Whose sums are made next.
    now: usize,
    before: Option<Before>,
}

impl<'s> State<'s> {
    fn new(sums: &'s mut [i32]) -> State<'s> {
        let mut quarters = sums.chunks_exact_mut(SUMS);
        let mut quarter = || quarters.next().expect("four buffers of sums");
        let mut pair = || Sums { of_input: quarter(), of_hidden: quarter() };
        State { sums: [pair(), pair()], now: 0, before: None }
    }

    fn product(
        &mut self,
        (gemm, tiles): (&Gemm<'_>, &Tiles),
        at: Place,
        codes: &[i8],
        ahead: &mut Ahead,
        (parameters, hidden_sums): (&ColumnParameters, &[i32]),
        sink: &mut GemmSink<'_>,
    ) {
        let [even, odd] = &mut self.sums;
        let (now, before) = if self.now == 0 { (even, &*odd) } else { (odd, &*even) };
        prefetch_tile((at.row, at.count), (at.column * TILE, at.valid), sink);
        gemm.dot_hidden_rows(at, hidden_sums, now.of_hidden);
        let shape = gemm.weights.shape;
        let (k, bytes) = (shape.padded_in(), shape.column_bytes());
        let weights = &gemm.weights.codes[at.column * bytes..(at.column + 1) * bytes];
        assert!(codes.len() == k * PRODUCT_ROWS && weights.len() == k * TILE, "operands of a product");
        let steps = k / STEP_INPUTS;
        // SAFETY: the operands were just checked; there is room for all sums; the tiles are used by one product at a time.
        unsafe {
            let mut product = Product::new(tiles, codes.as_ptr(), weights.as_ptr());
            match &self.before {
                Some(tile) => {
                    for piece in 0..PIECES {
                        product.steps(steps * (piece + 1) / PIECES - steps * piece / PIECES);
                        ahead.piece();
                        tile.piece(gemm, before, piece, sink);
                    }
                }
                None => product.steps(steps),
            }
            product.store(now.of_input.as_mut_ptr(), TILE);
        }
        self.now = 1 - self.now;
        self.before = Some(Before { at, parameters: *parameters });
    }

    fn finish(&mut self, gemm: &Gemm<'_>, sink: &mut GemmSink<'_>) {
        if let Some(before) = self.before.take() {
            for piece in 0..PIECES {
                before.piece(gemm, &self.sums[1 - self.now], piece, sink);
            }
        }
    }
}

impl Before {
    /// Some rows from their sums to the destination.
    #[inline]
    fn piece(&self, gemm: &Gemm<'_>, sums: &Sums<'_>, piece: usize, sink: &mut GemmSink<'_>) {
        let first = piece * TOGETHER;
        if first >= self.at.count {
            return;
        }
        let at = Place { row: self.at.row + first, count: TOGETHER.min(self.at.count - first), ..self.at };
        let [row_scales, delta_row_scales] = gemm.row_scales(at);
        let tile = Finish {
            acc: of_rows(sums.of_input, first),
            delta: gemm.epilogue.adapter.is_some().then(|| of_rows(sums.of_hidden, first)),
            row_scales,
            delta_row_scales,
            parameters: &self.parameters,
            activation: gemm.epilogue.activation,
            at,
        };
        // SAFETY: `isa` vouches for the instruction set.
        unsafe { tile.store::<{ TOGETHER * TILE / LANES }>(sink) };
    }
}

/// The sums of a row tile from `row` on.
fn of_rows(sums: &[i32], row: usize) -> &[i32; TILE_VALUES] {
    sums[row * TILE..].first_chunk().expect("the sums of a row tile")
}
