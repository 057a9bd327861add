//! The transformer: what the host computes around the blocks ([`Host`]) and the blocks on every numeric path.

mod float;
mod host;
mod int8;
mod opencl;
pub mod patches;
mod scales;
mod split;

pub use float::FloatBlocks;
pub use host::{Host, TimeEmbedding};
pub use int8::{Int8Blocks, TextKeyValue};
pub use opencl::{DeviceConditions, OpenClBlocks};
pub use scales::{BlockScales, SCALE_COUNT, Site};
pub use split::{EXCHANGES_PER_BLOCK, Engines as SplitEngines, SplitBlocks, SplitConditions};

use crate::VideoError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use trefoil_kernels::{KernelError, RotaryTable, Rows, RowsMut};
use trefoil_weights::tile::TILE;

/// Most rows of the feed-forward that are in memory at a time, those of a latent frame at 832 × 480 pixels: at real sizes its middle is
/// six times as wide as the state.
const MOST_FFN_ROWS: usize = 1560;

/// Rows of the feed-forward at a time: as few runs as [`MOST_FFN_ROWS`] allows, of about the same size, because a last one of a few rows
/// would read all weights again; whole row tiles of every kernel. Rows do not depend on each other, so this changes no value.
fn ffn_rows(tokens: usize) -> usize {
    /// A multiple of the rows of every kernel's tile.
    const TILES: usize = 24;
    const { assert!(MOST_FFN_ROWS.is_multiple_of(TILES)) };
    let runs = tokens.div_ceil(MOST_FFN_ROWS).max(1);
    tokens.div_ceil(runs).next_multiple_of(TILES).max(TILES)
}

/// How numbers are stored and multiplied. Every result names its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumericPath {
    /// Unquantised reference.
    F32,
    /// INT8 weights widened, GEMM operands rounded to FP16, f32 accumulation and state (the paper's NPU path).
    W8a16,
    /// INT8 weights and activations, static activation scales, state in FP16 (the paper's GPU path). The same bits whatever the cut,
    /// the engine and the number of threads.
    W8a8,
}

impl NumericPath {
    /// All paths.
    pub const ALL: [NumericPath; 3] = [NumericPath::F32, NumericPath::W8a16, NumericPath::W8a8];

    /// The name used in commands and results.
    pub fn as_str(self) -> &'static str {
        match self {
            NumericPath::F32 => "f32",
            NumericPath::W8a16 => "w8a16",
            NumericPath::W8a8 => "w8a8",
        }
    }
}

impl fmt::Display for NumericPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

impl FromStr for NumericPath {
    type Err = VideoError;

    fn from_str(text: &str) -> Result<NumericPath, VideoError> {
        NumericPath::ALL.into_iter().find(|path| path.as_str() == text).ok_or_else(|| VideoError::Input {
            what: format!("path `{text}`"),
            reason: "choose f32, w8a16 or w8a8".to_string(),
        })
    }
}

/// What the blocks of one branch of one step need besides weights.
#[derive(Debug, Clone, Copy)]
pub struct Conditions<'a> {
    /// Text context of the step's expert, `text × d`.
    pub context: &'a [f32],
    /// Rows of the context.
    pub text: usize,
    /// `[6, d]`: the projected timestep, without the block's table.
    pub modulation: &'a [f32],
    /// Rotary positions of the tokens.
    pub rotary: &'a RotaryTable,
}

/// `table + step`, the six rows of a block's modulation.
fn modulate(table: &[f32], step: &[f32], out: &mut Vec<f32>) {
    out.clear();
    out.extend(table.iter().zip(step).map(|(table, step)| table + step));
}

/// At least `len` elements.
fn grown<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

fn padded(columns: usize) -> usize {
    columns.next_multiple_of(TILE)
}

fn floats<'a>(what: &'static str, data: &'a [f32], rows: usize, columns: usize) -> Result<Rows<'a, f32>, KernelError> {
    Rows::dense(what, data, rows, columns)
}

fn floats_mut<'a>(
    what: &'static str,
    data: &'a mut [f32],
    rows: usize,
    columns: usize,
) -> Result<RowsMut<'a, f32>, KernelError> {
    RowsMut::dense(what, data, rows, columns)
}

fn codes<'a>(what: &'static str, data: &'a [i8], rows: usize, columns: usize) -> Result<Rows<'a, i8>, KernelError> {
    Rows::new(what, data, rows, columns, padded(columns))
}

fn codes_mut<'a>(
    what: &'static str,
    data: &'a mut [i8],
    rows: usize,
    columns: usize,
) -> Result<RowsMut<'a, i8>, KernelError> {
    RowsMut::new(what, data, rows, columns, padded(columns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_feed_forward_runs_over_few_and_even_rows() {
        for (tokens, want) in [(0, 24), (1, 24), (1560, 1560), (1561, 792), (7800, 1560), (32_760, 1560)] {
            assert_eq!(ffn_rows(tokens), want, "{tokens} tokens");
        }
        for tokens in 1..8000 {
            let rows = ffn_rows(tokens);
            assert!(
                rows <= MOST_FFN_ROWS && tokens.div_ceil(rows) == tokens.div_ceil(MOST_FFN_ROWS),
                "{tokens} tokens"
            );
        }
    }

    #[test]
    fn paths_have_names() {
        for path in NumericPath::ALL {
            assert_eq!(path.to_string().parse::<NumericPath>().unwrap(), path);
        }
        assert_eq!("w4a4".parse::<NumericPath>().unwrap_err().to_string(), "path `w4a4`: choose f32, w8a16 or w8a8");
    }
}
