//! Three-axis rotary positions (frames, height, width), adjacent pairs.

use crate::KernelError;

/// Cosines and sines of every position and pair, shared by all heads.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryTable {
    /// `positions × pairs`, row-major.
    pub cos: Vec<f32>,
    /// As [`RotaryTable::cos`].
    pub sin: Vec<f32>,
    /// Positions: frames · height · width, width fastest.
    pub positions: usize,
    /// Pairs of a head: half its dimension.
    pub pairs: usize,
}

impl RotaryTable {
    /// Cosines and sines of a position.
    #[inline]
    pub(crate) fn row(&self, position: usize) -> (&[f32], &[f32]) {
        let at = position * self.pairs;
        (&self.cos[at..at + self.pairs], &self.sin[at..at + self.pairs])
    }
}

/// The table of a patch grid `[frames, height, width]` for heads of `head_dim` (even).
///
/// With `D = head_dim`, height and width have `2·⌊D/6⌋` dimensions each and frames the rest. An axis of n dimensions at
/// position p has the angles `p·10000^(−2j/n)`, j = 0 .. n/2. Pairs of a head are those of frames, height, width in this
/// order. Angles are `f64`, entries are rounded to `f32` once.
///
/// # Errors
/// An odd or zero `head_dim`.
pub fn rotary_table(grid: [usize; 3], head_dim: usize) -> Result<RotaryTable, KernelError> {
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(KernelError::value("rotary_table", "head_dim", head_dim, "pairs need an even head dimension"));
    }
    let spatial = 2 * (head_dim / 6);
    let widths = [head_dim - 2 * spatial, spatial, spatial];
    let [frames, height, width] = grid;
    let positions = frames * height * width;
    let pairs = head_dim / 2;
    let mut table = RotaryTable {
        cos: Vec::with_capacity(positions * pairs),
        sin: Vec::with_capacity(positions * pairs),
        positions,
        pairs,
    };
    for frame in 0..frames {
        for y in 0..height {
            for x in 0..width {
                for (position, axis_width) in [frame, y, x].into_iter().zip(widths) {
                    for pair in 0..axis_width / 2 {
                        let exponent = -2.0 * pair as f64 / axis_width as f64;
                        let angle = position as f64 * 10_000f64.powf(exponent);
                        table.cos.push(angle.cos() as f32);
                        table.sin.push(angle.sin() as f32);
                    }
                }
            }
        }
    }
    Ok(table)
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "cosines and sines of zero are exact")]
mod tests {
    use super::*;

    #[test]
    fn axes_have_the_widths_of_the_model() {
        let table = rotary_table([2, 3, 4], 128).unwrap();
        assert_eq!((table.positions, table.pairs), (24, 64));
        // Position (1, 0, 0): only the 22 pairs of frames turn.
        let (cos, sin) = table.row(12);
        assert_eq!(sin[0].to_bits(), (1f64.sin() as f32).to_bits());
        assert!(sin[..22].iter().all(|&s| s > 0.0) && sin[22..].iter().all(|&s| s == 0.0));
        assert!(cos[22..].iter().all(|&c| c == 1.0));
        assert!(rotary_table([1, 1, 1], 7).is_err());
    }
}
