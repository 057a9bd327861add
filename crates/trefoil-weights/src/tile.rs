//! The tile layout (HeteroVDiff 4.2, equation 2): one byte order that every engine eats as it lies.
//!
//! `W` is `d_in × d_out` (row `i` = input, column `j` = output), the **transpose** of a PyTorch Linear weight. Both
//! sides are padded with zero codes to multiples of [`TILE`]. A tile is 32 × 32 codes in 1,024 bytes: eight groups of
//! 128 bytes, each 32 columns × 4 consecutive inputs. Tiles of one column of tiles lie one after the other along the
//! input, so a *tile column* (32 outputs) is one contiguous run of `padded_in · 32` bytes:
//!
//! ```text
//! off(i,j) = (⌊j/32⌋·d_in/32 + ⌊i/32⌋)·1024 + ⌊(i mod 32)/4⌋·128 + (j mod 32)·4 + (i mod 4)
//! ```
//!
//! Four consecutive inputs of one column are one `dp4a` operand; 64 bytes are an AVX-512 VNNI operand, 128 an HVX one.

/// Side of a tile in rows and in columns.
pub const TILE: usize = 32;
/// Bytes of a tile.
pub const TILE_BYTES: usize = TILE * TILE;
/// Consecutive inputs of one column that lie in consecutive bytes (one `dp4a` operand).
pub const GROUP: usize = 4;
/// Bytes of one group row: 32 columns × 4 inputs.
pub const GROUP_BYTES: usize = TILE * GROUP;

/// The size of a matrix `W` of `d_in × d_out` and of its padded form. Units are elements, which are bytes for codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileShape {
    /// Inputs (rows of W), unpadded.
    pub d_in: usize,
    /// Outputs (columns of W), unpadded.
    pub d_out: usize,
}

impl TileShape {
    /// The shape of a `d_in × d_out` matrix, or `None` where a side is zero or the padded size overflows.
    pub fn new(d_in: usize, d_out: usize) -> Option<TileShape> {
        let padded = |side: usize| side.checked_next_multiple_of(TILE).filter(|&side| side > 0);
        padded(d_in)?.checked_mul(padded(d_out)?).filter(|&bytes| isize::try_from(bytes).is_ok())?;
        Some(TileShape { d_in, d_out })
    }

    /// Inputs rounded up to a multiple of 32.
    pub fn padded_in(self) -> usize {
        self.d_in.next_multiple_of(TILE)
    }

    /// Outputs rounded up to a multiple of 32.
    pub fn padded_out(self) -> usize {
        self.d_out.next_multiple_of(TILE)
    }

    /// Bytes of all codes, padding included. A multiple of [`TILE_BYTES`].
    pub fn bytes(self) -> usize {
        self.padded_in() * self.padded_out()
    }

    /// Bytes of one tile column (32 outputs, all inputs).
    pub fn column_bytes(self) -> usize {
        self.padded_in() * TILE
    }

    /// Number of tile columns.
    pub fn tile_columns(self) -> usize {
        self.padded_out() / TILE
    }

    /// Whether the stored form has padding.
    pub fn is_padded(self) -> bool {
        self.padded_in() != self.d_in || self.padded_out() != self.d_out
    }

    /// Byte address of the code of input `row` and output `column` (padded positions are legal).
    pub fn offset(self, row: usize, column: usize) -> usize {
        debug_assert!(column < self.padded_out(), "column {column} of {}", self.padded_out());
        off(row, column, self.padded_in())
    }
}

/// Equation 2: byte address of `Q[row][column]` in a matrix of `padded_in` inputs, which must be a multiple of 32.
///
/// It is a bijection between `0..padded_in × 0..padded_out` and `0..padded_in·padded_out`.
#[inline]
pub fn off(row: usize, column: usize, padded_in: usize) -> usize {
    debug_assert!(padded_in.is_multiple_of(TILE), "padded_in {padded_in} is not a multiple of {TILE}");
    debug_assert!(row < padded_in, "row {row} of {padded_in}");
    (column / TILE * (padded_in / TILE) + row / TILE) * TILE_BYTES
        + row % TILE / GROUP * GROUP_BYTES
        + column % TILE * GROUP
        + row % GROUP
}

/// Lays codes out in tiles. `codes` is row-major `d_in × d_out`; the result has [`TileShape::bytes`] bytes, padding zero.
pub fn tile(codes: &[i8], shape: TileShape) -> Vec<i8> {
    assert_eq!(codes.len(), shape.d_in * shape.d_out, "codes of a {}×{} matrix", shape.d_in, shape.d_out);
    let mut tiled = vec![0i8; shape.bytes()];
    for (block, rows) in codes.chunks(GROUP * shape.d_out).enumerate() {
        // Four input rows at a time: each column's four codes go to one 4-byte operand.
        let row = block * GROUP;
        for column in 0..shape.d_out {
            let at = shape.offset(row, column);
            for (byte, values) in tiled[at..at + GROUP].iter_mut().zip(rows.chunks(shape.d_out)) {
                *byte = values[column];
            }
        }
    }
    tiled
}

/// The inverse of [`tile`]: row-major `d_in × d_out` codes, padding dropped.
pub fn detile(tiled: &[i8], shape: TileShape) -> Vec<i8> {
    assert_eq!(tiled.len(), shape.bytes(), "tiled codes of a {}×{} matrix", shape.d_in, shape.d_out);
    let mut codes = vec![0i8; shape.d_in * shape.d_out];
    for (row, values) in codes.chunks_mut(shape.d_out).enumerate() {
        for (column, value) in values.iter_mut().enumerate() {
            *value = tiled[shape.offset(row, column)];
        }
    }
    codes
}

/// Codes as the bytes that are stored.
pub fn code_bytes(codes: &[i8]) -> &[u8] {
    // SAFETY: i8 and u8 have the same size and alignment and no invalid values; the lifetime is that of `codes`.
    unsafe { std::slice::from_raw_parts(codes.as_ptr().cast::<u8>(), codes.len()) }
}

/// Stored bytes as codes.
pub fn codes_of(bytes: &[u8]) -> &[i8] {
    // SAFETY: as in `code_bytes`.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<i8>(), bytes.len()) }
}

/// Sums of every padded column's codes, Σ_i Q_ij: what an unsigned-activation kernel subtracts 128 times of.
pub fn column_sums(tiled: &[i8], shape: TileShape) -> Vec<i32> {
    assert_eq!(tiled.len(), shape.bytes(), "tiled codes of a {}×{} matrix", shape.d_in, shape.d_out);
    let mut sums = vec![0i32; shape.padded_out()];
    for (sums, column) in sums.chunks_mut(TILE).zip(tiled.chunks(shape.column_bytes())) {
        for group in column.chunks(GROUP_BYTES) {
            for (sum, codes) in sums.iter_mut().zip(group.chunks(GROUP)) {
                *sum += codes.iter().map(|&code| i32::from(code)).sum::<i32>();
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The formula, written without this module's constants.
    fn oracle(i: usize, j: usize, d_in: usize) -> usize {
        ((j / 32) * (d_in / 32) + i / 32) * 1024 + ((i % 32) / 4) * 128 + (j % 32) * 4 + (i % 4)
    }

    #[test]
    fn first_bytes_are_four_inputs_of_column_zero() {
        assert_eq!((0..4).map(|row| off(row, 0, 64)).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(off(0, 1, 64), 4);
        assert_eq!(off(4, 0, 64), 128);
        assert_eq!(off(32, 0, 64), 1024);
        assert_eq!(off(0, 32, 64), 2048);
    }

    #[test]
    fn degenerate_shapes_are_refused() {
        assert_eq!(TileShape::new(0, 4), None);
        assert_eq!(TileShape::new(4, 0), None);
        assert_eq!(TileShape::new(usize::MAX, 1), None);
        assert_eq!(TileShape::new(usize::MAX / 8, 64), None);
    }

    proptest! {
        #[test]
        fn layout_is_the_formula_and_a_bijection(tiles_in in 1usize..4, tiles_out in 1usize..4) {
            let (d_in, d_out) = (tiles_in * 32, tiles_out * 32);
            let mut seen = vec![false; d_in * d_out];
            for row in 0..d_in {
                for column in 0..d_out {
                    let at = off(row, column, d_in);
                    prop_assert_eq!(at, oracle(row, column, d_in));
                    prop_assert!(!std::mem::replace(&mut seen[at], true));
                }
            }
            prop_assert!(seen.into_iter().all(|hit| hit));
        }

        #[test]
        fn tiling_round_trips_and_pads_with_zero(d_in in 1usize..100, d_out in 1usize..100, seed in any::<u32>()) {
            let shape = TileShape::new(d_in, d_out).unwrap();
            let codes: Vec<i8> = (0..d_in * d_out).map(|n| ((n as u32).wrapping_mul(2_654_435_761) ^ seed) as i8).collect();
            let tiled = tile(&codes, shape);
            for row in 0..shape.padded_in() {
                for column in 0..shape.padded_out() {
                    let want = if row < d_in && column < d_out { codes[row * d_out + column] } else { 0 };
                    prop_assert_eq!(tiled[oracle(row, column, shape.padded_in())], want);
                }
            }
            prop_assert_eq!(&detile(&tiled, shape), &codes);
            let sums = column_sums(&tiled, shape);
            for (column, sum) in sums.iter().enumerate() {
                let want: i32 = if column < d_out { (0..d_in).map(|row| i32::from(codes[row * d_out + column])).sum() } else { 0 };
                prop_assert_eq!(*sum, want);
            }
        }
    }
}
