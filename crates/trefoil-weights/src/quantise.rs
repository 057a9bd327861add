//! Per-column symmetric INT8 quantisation (HeteroVDiff 4.2, equation 1), straight into tiles.
//!
//! `s_j = max_i |W_ij| / 127`, `Q_ij = clip(round(W_ij / s_j), −127, 127)`, both in `f32`, rounding half to even. An
//! all-zero column has scale 1 and zero codes; so has a column so small that `max/127` underflows to zero, because its
//! codes would otherwise be infinities. NaN and infinities are errors that name their place.
//!
//! A tile column (32 outputs) is the unit of work: 32 columns of W are decoded into an `f32` scratch, measured,
//! quantised and written as one contiguous run of bytes. So memory is a few tile columns per thread, whatever the model.

use crate::tile::{GROUP, GROUP_BYTES, TILE, TILE_BYTES, TileShape};
use crate::{FloatType, WeightsError};

/// Largest code; −128 is never used, so that codes are symmetric.
pub const MAX_CODE: f32 = 127.0;

/// How the elements of W lie in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// `[out, in]` row-major, as PyTorch stores Linear weights: a column of W is contiguous.
    OutIn,
    /// `[in, out]` row-major.
    InOut,
}

/// A matrix in a checkpoint, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct MatrixSource<'a> {
    /// Name for errors.
    pub name: &'a str,
    /// Row-major little-endian elements; need not be aligned.
    pub bytes: &'a [u8],
    /// Element type.
    pub dtype: FloatType,
    /// Size of W.
    pub shape: TileShape,
    /// Which side is contiguous.
    pub orientation: Orientation,
}

impl<'a> MatrixSource<'a> {
    /// A matrix over `bytes`; the byte count must be that of the shape.
    pub fn new(
        name: &'a str,
        bytes: &'a [u8],
        dtype: FloatType,
        shape: TileShape,
        orientation: Orientation,
    ) -> Result<MatrixSource<'a>, WeightsError> {
        let want = shape.d_in.checked_mul(shape.d_out).and_then(|count| count.checked_mul(dtype.bytes()));
        if want != Some(bytes.len()) {
            return Err(WeightsError::Tensor {
                tensor: name.to_string(),
                reason: format!(
                    "a {}×{} matrix of {dtype} needs {} bytes but there are {}",
                    shape.d_in,
                    shape.d_out,
                    want.map_or_else(|| "too many".to_string(), |want| want.to_string()),
                    bytes.len()
                ),
            });
        }
        Ok(MatrixSource { name, bytes, dtype, shape, orientation })
    }

    /// Decodes up to 32 columns from `first` on into `scratch`, column after column with stride `padded_in`.
    /// Positions outside W are left as they are (zero from the caller).
    fn decode_columns(&self, first: usize, scratch: &mut [f32]) {
        let (d_in, d_out, stride, size) =
            (self.shape.d_in, self.shape.d_out, self.shape.padded_in(), self.dtype.bytes());
        let count = TILE.min(d_out - first);
        match self.orientation {
            Orientation::OutIn => {
                for (column, values) in (first..first + count).zip(scratch.chunks_mut(stride)) {
                    self.dtype
                        .decode(&self.bytes[column * d_in * size..(column + 1) * d_in * size], &mut values[..d_in]);
                }
            }
            Orientation::InOut => {
                let mut values = [0f32; TILE];
                for row in 0..d_in {
                    let at = (row * d_out + first) * size;
                    self.dtype.decode(&self.bytes[at..at + count * size], &mut values[..count]);
                    for (column, &value) in values[..count].iter().enumerate() {
                        scratch[column * stride + row] = value;
                    }
                }
            }
        }
    }
}

/// Codes in tile order and one scale per column.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantised {
    /// Size of W.
    pub shape: TileShape,
    /// [`TileShape::bytes`] codes in tile order.
    pub codes: Vec<i8>,
    /// One scale per **padded** column; padding has scale 1.
    pub scales: Vec<f32>,
}

impl Quantised {
    /// `Q_ij · s_j`, the value that the stored bytes stand for.
    pub fn dequantise(&self, row: usize, column: usize) -> f32 {
        f32::from(self.codes[self.shape.offset(row, column)]) * self.scales[column]
    }
}

/// Quantises a whole matrix into memory on up to `threads` threads. See [`quantise_tile_columns`] for streaming.
pub fn quantise(source: &MatrixSource<'_>, threads: usize) -> Result<Quantised, WeightsError> {
    let shape = source.shape;
    let mut quantised = Quantised { shape, codes: vec![0; shape.bytes()], scales: vec![1.0; shape.padded_out()] };
    quantise_tile_columns(source, 0, &mut quantised.codes, &mut quantised.scales, threads)?;
    Ok(quantised)
}

/// Quantises consecutive tile columns from number `first` on.
///
/// `codes` is a multiple of [`TileShape::column_bytes`] and decides how many tile columns are done; `scales` has 32
/// entries for each. The work is split over up to `threads` threads; the result does not depend on their number.
pub fn quantise_tile_columns(
    source: &MatrixSource<'_>,
    first: usize,
    codes: &mut [i8],
    scales: &mut [f32],
    threads: usize,
) -> Result<(), WeightsError> {
    let column_bytes = source.shape.column_bytes();
    let count = codes.len() / column_bytes;
    debug_assert_eq!(codes.len(), count * column_bytes, "codes are whole tile columns");
    debug_assert_eq!(scales.len(), count * TILE, "32 scales for each tile column");
    debug_assert!(first + count <= source.shape.tile_columns(), "tile columns exist");
    let per_thread = count.div_ceil(threads.max(1)).max(1);
    if per_thread >= count {
        return quantise_run(source, first, codes, scales);
    }
    std::thread::scope(|scope| {
        let workers: Vec<_> = codes
            .chunks_mut(per_thread * column_bytes)
            .zip(scales.chunks_mut(per_thread * TILE))
            .enumerate()
            .map(|(part, (codes, scales))| {
                scope.spawn(move || quantise_run(source, first + part * per_thread, codes, scales))
            })
            .collect();
        // All are joined before the first error is returned, lowest tile column first, so that errors are deterministic.
        let results: Vec<_> =
            workers.into_iter().map(|worker| worker.join().expect("quantise does not panic")).collect();
        results.into_iter().collect()
    })
}

/// One thread's part of [`quantise_tile_columns`].
fn quantise_run(
    source: &MatrixSource<'_>,
    first: usize,
    codes: &mut [i8],
    scales: &mut [f32],
) -> Result<(), WeightsError> {
    let shape = source.shape;
    let mut scratch = vec![0f32; TILE * shape.padded_in()];
    for (part, (codes, scales)) in codes.chunks_mut(shape.column_bytes()).zip(scales.chunks_mut(TILE)).enumerate() {
        let tile_column = first + part;
        if (tile_column + 1) * TILE > shape.d_out {
            // The last tile column may be partial; what an earlier one left in the scratch must not become padding.
            scratch.fill(0.0);
        }
        source.decode_columns(tile_column * TILE, &mut scratch);
        if let Err(lane) = quantise_tile_column(&scratch, scales, codes) {
            let column = &scratch[lane * shape.padded_in()..(lane + 1) * shape.padded_in()];
            return Err(non_finite(source, tile_column * TILE + lane, column));
        }
    }
    Ok(())
}

/// The scale of a column whose largest magnitude is `largest` (finite, not negative).
#[inline]
pub fn column_scale(largest: f32) -> f32 {
    let scale = largest / MAX_CODE;
    if scale > 0.0 { scale } else { 1.0 }
}

/// The code of one weight: `clip(round_half_even(value / scale), −127, 127)`.
#[inline]
pub fn code(value: f32, scale: f32) -> i8 {
    // Clipping first is the same because the bounds are whole numbers. Adding 1.5·2²³ leaves no fraction bits, so the
    // addition itself rounds half to even and the low byte of the sum is the code in two's complement: this vectorises
    // on every instruction set, where `round_ties_even` is a library call on baseline x86-64.
    const ROUND: f32 = 12_582_912.0;
    let clipped = (value / scale).clamp(-MAX_CODE, MAX_CODE);
    (clipped + ROUND).to_bits() as i8
}

/// Largest |value|; not finite if any value is not (infinity and NaN have the largest magnitude bits).
#[inline]
fn largest_magnitude(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    // i32 comparison is right because the sign bit is cleared; lanes keep the reduction vectorisable.
    let mut largest = [0i32; LANES];
    for chunk in values.chunks(LANES) {
        for (largest, value) in largest.iter_mut().zip(chunk) {
            *largest = (*largest).max((value.to_bits() & 0x7fff_ffff) as i32);
        }
    }
    f32::from_bits(largest.into_iter().max().unwrap_or(0) as u32)
}

/// Measures and quantises 32 columns of `padded_in` values (stride `padded_in`) into one tile column.
///
/// # Errors
/// The first lane (column within the tile) that holds a NaN or an infinity.
fn quantise_tile_column(values: &[f32], scales: &mut [f32], codes: &mut [i8]) -> Result<(), usize> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { quantise_tile_column_avx2(values, scales, codes) };
    }
    quantise_tile_column_portable(values, scales, codes)
}

/// [`quantise_tile_column_portable`] compiled for AVX2. Same source, same bits: nothing in it may be contracted.
///
/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn quantise_tile_column_avx2(values: &[f32], scales: &mut [f32], codes: &mut [i8]) -> Result<(), usize> {
    quantise_tile_column_portable(values, scales, codes)
}

#[inline(always)]
#[allow(clippy::inline_always, reason = "it must be compiled inside each target_feature function")]
fn quantise_tile_column_portable(values: &[f32], scales: &mut [f32], codes: &mut [i8]) -> Result<(), usize> {
    let stride = values.len() / TILE;
    debug_assert_eq!(codes.len(), stride * TILE, "a tile column has 32 codes per input");
    debug_assert_eq!(scales.len(), TILE, "a tile column has 32 scales");
    for (lane, (scale, column)) in scales.iter_mut().zip(values.chunks_exact(stride)).enumerate() {
        let largest = largest_magnitude(column);
        if !largest.is_finite() {
            return Err(lane);
        }
        *scale = column_scale(largest);
    }
    for (tile_row, tile) in codes.chunks_exact_mut(TILE_BYTES).enumerate() {
        for (lane, (&scale, column)) in scales.iter().zip(values.chunks_exact(stride)).enumerate() {
            let mut quantised = [0i8; TILE];
            for (code_of, &value) in quantised.iter_mut().zip(&column[tile_row * TILE..(tile_row + 1) * TILE]) {
                *code_of = code(value, scale);
            }
            for (group, four) in quantised.as_chunks::<GROUP>().0.iter().enumerate() {
                let at = group * GROUP_BYTES + lane * GROUP;
                tile[at..at + GROUP].copy_from_slice(four);
            }
        }
    }
    Ok(())
}

/// The error for the first NaN or infinity of a column.
#[cold]
fn non_finite(source: &MatrixSource<'_>, column: usize, values: &[f32]) -> WeightsError {
    let row = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
    WeightsError::NonFinite {
        tensor: source.name.to_string(),
        value: values[row],
        row: row as u64,
        column: column as u64,
        d_in: source.shape.d_in as u64,
        d_out: source.shape.d_out as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Equations 1 and 2 for every element, one after the other, in the plainest code.
    fn oracle(weights: &[f32], d_in: usize, d_out: usize) -> (Vec<i8>, Vec<f32>) {
        let (padded_in, padded_out) = (d_in.div_ceil(32) * 32, d_out.div_ceil(32) * 32);
        let mut codes = vec![0i8; padded_in * padded_out];
        let mut scales = vec![1f32; padded_out];
        for j in 0..d_out {
            let largest = (0..d_in).map(|i| weights[i * d_out + j].abs()).fold(0f32, f32::max);
            if largest / 127.0 > 0.0 {
                scales[j] = largest / 127.0;
            }
            for i in 0..d_in {
                let at = ((j / 32) * (padded_in / 32) + i / 32) * 1024 + ((i % 32) / 4) * 128 + (j % 32) * 4 + (i % 4);
                codes[at] = (weights[i * d_out + j] / scales[j]).round_ties_even().clamp(-127.0, 127.0) as i8;
            }
        }
        (codes, scales)
    }

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
    }

    /// Weights that exercise ties, zero columns, tiny and huge magnitudes.
    fn weight() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => -1f32..1f32,
            2 => (-254i32..=254).prop_map(|half| half as f32 / 2.0),
            1 => Just(0f32),
            1 => Just(-0f32),
            1 => any::<u32>().prop_map(|bits| f32::from_bits(bits & 0x807f_ffff)),
            1 => -3e38f32..3e38,
        ]
    }

    fn matrix() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
        (1usize..80, 1usize..80).prop_flat_map(|(d_in, d_out)| {
            (
                Just(d_in),
                Just(d_out),
                prop::collection::vec(weight(), d_in * d_out),
                prop::collection::vec(prop_oneof![3 => Just(1f32), 1 => Just(0f32)], d_out),
            )
                .prop_map(|(d_in, d_out, mut weights, keep)| {
                    for row in weights.chunks_mut(d_out) {
                        for (value, keep) in row.iter_mut().zip(&keep) {
                            *value *= keep;
                        }
                    }
                    (d_in, d_out, weights)
                })
        })
    }

    proptest! {
        #[test]
        fn matches_the_equations((d_in, d_out, weights) in matrix(), threads in 1usize..4) {
            let shape = TileShape::new(d_in, d_out).unwrap();
            let (codes, scales) = oracle(&weights, d_in, d_out);
            for orientation in [Orientation::InOut, Orientation::OutIn] {
                let stored = match orientation {
                    Orientation::InOut => weights.clone(),
                    Orientation::OutIn => transpose(&weights, d_in, d_out),
                };
                let bytes = bytes_of(&stored);
                let source = MatrixSource::new("w", &bytes, FloatType::F32, shape, orientation).unwrap();
                let quantised = quantise(&source, threads).unwrap();
                prop_assert_eq!(&quantised.codes, &codes);
                prop_assert_eq!(quantised.scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>(), scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>());
            }
        }

        #[test]
        fn code_rounds_half_to_even_and_clips(value in prop_oneof![-200f32..200.0, (-400i32..400).prop_map(|half| half as f32 / 2.0)]) {
            prop_assert_eq!(code(value, 1.0), value.round_ties_even().clamp(-127.0, 127.0) as i8);
        }

        #[test]
        fn the_first_non_finite_weight_is_named((d_in, d_out, mut weights) in matrix(), at in any::<prop::sample::Index>(), bad in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)], threads in 1usize..4) {
            let at = at.index(weights.len());
            weights[at] = bad;
            let bytes = bytes_of(&weights);
            let source = MatrixSource::new("blocks.7.w", &bytes, FloatType::F32, TileShape::new(d_in, d_out).unwrap(), Orientation::InOut).unwrap();
            let error = quantise(&source, threads).unwrap_err();
            let WeightsError::NonFinite { tensor, row, column, .. } = &error else { panic!("{error}") };
            prop_assert_eq!((tensor.as_str(), *row as usize, *column as usize), ("blocks.7.w", at / d_out, at % d_out));
        }
    }

    #[test]
    fn a_column_below_the_scale_s_range_is_zero_with_scale_one() {
        let tiny = f32::from_bits(3);
        assert_eq!(column_scale(tiny).to_bits(), 1f32.to_bits());
        assert_eq!(code(tiny, column_scale(tiny)), 0);
        // 190 · 2⁻¹⁴⁹ / 127 rounds to 2⁻¹⁴⁹: the quotient 190 is clipped.
        assert_eq!(code(f32::from_bits(190), column_scale(f32::from_bits(190))), 127);
    }

    #[test]
    fn every_compiled_variant_gives_the_same_bits() {
        type Variant = fn(&[f32], &mut [f32], &mut [i8]) -> Result<(), usize>;
        let mut state = 7u32;
        let values: Vec<f32> = (0..TILE * 96)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Any finite bit pattern: the top exponent is cleared.
                f32::from_bits(state & 0xbfff_ffff)
            })
            .collect();
        let run = |variant: Variant| {
            let (mut scales, mut codes) = (vec![0f32; TILE], vec![0i8; TILE * 96]);
            variant(&values, &mut scales, &mut codes).unwrap();
            (scales, codes)
        };
        assert_eq!(run(quantise_tile_column), run(quantise_tile_column_portable));
    }

    #[test]
    fn a_byte_count_that_does_not_fit_is_refused() {
        let error = MatrixSource::new("w", &[0; 12], FloatType::F32, TileShape::new(2, 2).unwrap(), Orientation::InOut)
            .unwrap_err();
        assert_eq!(error.to_string(), "tensor `w`: a 2×2 matrix of f32 needs 16 bytes but there are 12");
    }
}
