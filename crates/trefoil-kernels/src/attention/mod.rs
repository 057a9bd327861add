//! Attention without an M × M matrix: blocks of query rows against blocks of keys with a running maximum.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float;
mod int8;
mod pack;

pub use int8::AttentionScales;
#[cfg(feature = "opencl")]
pub(crate) use int8::check_scales;
#[cfg(feature = "opencl")]
pub(crate) use pack::MAX_HEAD_DIM;
pub use pack::PackedKeyValue;

use crate::isa::Supported;
use crate::math::{code, round_f16};
use crate::multiversion::multiversion;
use crate::rows::{Operands, check_codes};
use crate::{KernelError, RowsMut};
use trefoil_weights::tile::TILE;

/// Keys of a block. It is part of the arithmetic: maxima, sums and roundings are per block.
pub const KEY_BLOCK: usize = 256;

/// Where attention's output goes, all heads side by side.
#[derive(Debug)]
pub enum AttentionSink<'a> {
    /// Floats.
    F32 {
        /// `M × d`.
        out: RowsMut<'a, f32>,
        /// Rounding on store.
        operands: Operands,
    },
    /// INT8 codes for the output projection.
    Codes {
        /// `M × d`.
        out: RowsMut<'a, i8>,
        /// Static scale of the projection's input.
        scale: f32,
    },
}

impl<'a> AttentionSink<'a> {
    fn check(&mut self, operator: &'static str, queries: usize, width: usize) -> Result<(), KernelError> {
        let (have, shape) = match self {
            AttentionSink::F32 { out, .. } => ((out.rows(), out.columns()), out.shape()),
            AttentionSink::Codes { out, .. } => ((out.rows(), out.columns()), out.shape()),
        };
        if have != (queries, width) {
            return Err(KernelError::shapes(
                operator,
                ("the query", format!("{queries}×{width}")),
                ("the destination", shape),
                "they must have the same shape",
            ));
        }
        match self {
            AttentionSink::F32 { .. } => Ok(()),
            AttentionSink::Codes { out, scale } => check_codes(operator, out, Some(*scale)),
        }
    }

    fn take_rows(&mut self, count: usize) -> AttentionSink<'a> {
        match self {
            AttentionSink::F32 { out, operands } => {
                AttentionSink::F32 { out: out.take_rows(count), operands: *operands }
            }
            AttentionSink::Codes { out, scale } => AttentionSink::Codes { out: out.take_rows(count), scale: *scale },
        }
    }

    /// Stores one head of one row, times `factor`.
    fn store(&mut self, isa: Supported, row: usize, first: usize, values: &mut [f32], factor: f32) {
        match self {
            AttentionSink::F32 { out, operands } => {
                multiply_row(isa, values, factor);
                if *operands == Operands::F16 {
                    round_values(isa, values);
                }
                out.row_mut(row)[first..first + values.len()].copy_from_slice(values);
            }
            AttentionSink::Codes { out, scale } => {
                code_products(isa, values, factor, 1.0 / *scale, &mut out.row_mut(row)[first..first + values.len()]);
            }
        }
    }
}

multiversion! {
    fn round_values(values: &mut [f32]) {
        for value in values {
            *value = round_f16(*value);
        }
    }
}

multiversion! {
    fn multiply_row(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

multiversion! {
    fn code_products(values: &[f32], factor: f32, inverse: f32, codes: &mut [i8]) {
        for (out, &value) in codes.iter_mut().zip(values) {
            *out = code(value * factor, inverse);
        }
    }
}

/// Heads must be whole tiles wide and fill a row.
pub(crate) fn check_heads(operator: &'static str, width: usize, heads: usize) -> Result<usize, KernelError> {
    if heads == 0 || !width.is_multiple_of(heads) || !(width / heads).is_multiple_of(TILE) || width == 0 {
        return Err(KernelError::shapes(
            operator,
            ("a row", format!("{width} columns")),
            ("its heads", heads.to_string()),
            "every head must have the same multiple of 32 columns",
        ));
    }
    Ok(width / heads)
}

/// At least one key.
pub(crate) fn check_keys(operator: &'static str, keys: usize) -> Result<(), KernelError> {
    if keys == 0 {
        return Err(KernelError::value(operator, "the number of keys", 0, "attention needs at least one"));
    }
    Ok(())
}
