//! Element types of checkpoints that become weights, and their exact widening to `f32`.

use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fmt;

/// A floating-point element type that this crate widens. Widening is exact for all three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl FloatType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::Bf16 => 2,
        }
    }

    /// Widens little-endian `bytes` into `values`; `bytes.len()` must be `values.len() · self.bytes()`. No alignment needed.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) {
        debug_assert_eq!(bytes.len(), values.len() * self.bytes(), "bytes of {} {self}", values.len());
        match self {
            FloatType::F32 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            FloatType::Bf16 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
                }
            }
            FloatType::F16 => {
                // In batches, because the conversion instruction is detected at run time for each slice.
                let mut batch = [f16::ZERO; 256];
                for (values, bytes) in values.chunks_mut(batch.len()).zip(bytes.chunks(batch.len() * 2)) {
                    let batch = &mut batch[..values.len()];
                    for (half, bytes) in batch.iter_mut().zip(bytes.as_chunks::<2>().0) {
                        *half = f16::from_bits(u16::from_le_bytes(*bytes));
                    }
                    batch.convert_to_f32_slice(values);
                }
            }
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            FloatType::F32 => "f32",
            FloatType::F16 => "f16",
            FloatType::Bf16 => "bf16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_value_widens_exactly() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        // An odd start checks that no alignment is assumed.
        let mut shifted = vec![0u8];
        shifted.extend(&bytes);
        let mut values = vec![0f32; bits.len()];
        for (dtype, oracle) in [
            (FloatType::F16, (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32),
            (FloatType::Bf16, |bits| half::bf16::from_bits(bits).to_f32()),
        ] {
            dtype.decode(&shifted[1..], &mut values);
            for (&bits, &value) in bits.iter().zip(&values) {
                let want = oracle(bits);
                assert!(value.to_bits() == want.to_bits() || (value.is_nan() && want.is_nan()), "{dtype} {bits:#06x}");
            }
        }
    }
}
