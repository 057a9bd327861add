//! Seeded sample data for models that come without inputs.
//!
//! Floats are standard normal, clipped to ±3. Signed and unsigned bytes span their codes (they are images or quantised
//! data); wider integers are small (0 to 7: token ids, indices, lengths). Booleans alternate, beginning with true. Each
//! tensor's stream depends on the seed and its name only, so that inputs keep their values when others change.

use trefoil_core::{DataType, HostTensor, TensorInfo};

/// SplitMix64 (Steele, Lea and Flood 2014): tiny, seedable, and good enough for sample data.
#[derive(Debug, Clone)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller), clipped to ±3.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()).clamp(-3.0, 3.0)
    }
}

/// Whether integers of 16 bits and more are random or zero (the second try, when random indices were out of range).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Integers {
    /// Uniform in 0..8.
    Small,
    /// All zero.
    Zero,
}

/// Sample data for one input.
pub fn sample_tensor(info: &TensorInfo, seed: u64, integers: Integers) -> HostTensor {
    // FNV-1a of the name, so that streams of different inputs differ.
    let name_hash = info
        .name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let mut random = SplitMix(seed ^ name_hash);
    let mut tensor = HostTensor::zeros(info.clone());
    let small = |random: &mut SplitMix| match integers {
        Integers::Small => random.next() >> 61,
        Integers::Zero => 0,
    };
    let size = info.dtype.size().max(1) as usize;
    for (index, chunk) in tensor.bytes_mut().chunks_exact_mut(size).enumerate() {
        match info.dtype {
            DataType::F32 => chunk.copy_from_slice(&(random.normal() as f32).to_le_bytes()),
            DataType::F64 => chunk.copy_from_slice(&random.normal().to_le_bytes()),
            DataType::F16 => chunk.copy_from_slice(&half::f16::from_f64(random.normal()).to_le_bytes()),
            DataType::BF16 => chunk.copy_from_slice(&half::bf16::from_f64(random.normal()).to_le_bytes()),
            DataType::I8 | DataType::U8 => chunk[0] = (random.next() >> 56) as u8,
            DataType::Bool => chunk[0] = u8::from(index % 2 == 0),
            DataType::I16 | DataType::U16 | DataType::I32 | DataType::U32 | DataType::I64 | DataType::U64 => {
                chunk.copy_from_slice(&small(&mut random).to_le_bytes()[..size]);
            }
            DataType::Opaque => {}
        }
    }
    tensor
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact values are meant
mod tests {
    use super::*;

    #[test]
    fn data_is_seeded_by_name_and_in_range() {
        let info = TensorInfo::new("x", DataType::F32, [4096u64]);
        let tensor = sample_tensor(&info, 1, Integers::Small);
        assert_eq!(tensor.bytes(), sample_tensor(&info, 1, Integers::Small).bytes());
        assert_ne!(tensor.bytes(), sample_tensor(&info, 2, Integers::Small).bytes());
        let other = TensorInfo::new("y", DataType::F32, [4096u64]);
        assert_ne!(tensor.bytes(), sample_tensor(&other, 1, Integers::Small).bytes());
        let values = tensor.to_f64();
        let mean = values.iter().sum::<f64>() / 4096.0;
        let variance = values.iter().map(|value| value * value).sum::<f64>() / 4096.0;
        assert!(mean.abs() < 0.1 && (variance - 0.97).abs() < 0.1, "mean {mean}, variance {variance}");
        assert!(values.iter().all(|value| value.abs() <= 3.0));
    }

    #[test]
    fn every_type_has_data() {
        for dtype in [DataType::F16, DataType::BF16, DataType::F64, DataType::I8, DataType::U8, DataType::I64] {
            let values = sample_tensor(&TensorInfo::new("x", dtype, [64u64]), 3, Integers::Small).to_f64();
            assert!(values.iter().any(|value| *value != values[0]), "{dtype}");
        }
        let ids = TensorInfo::new("x", DataType::I32, [64u64]);
        assert!(sample_tensor(&ids, 3, Integers::Small).to_f64().iter().all(|id| (0.0..8.0).contains(id)));
        assert!(sample_tensor(&ids, 3, Integers::Zero).to_f64().iter().all(|id| *id == 0.0));
        let flags = sample_tensor(&TensorInfo::new("x", DataType::Bool, [3u64]), 3, Integers::Small);
        assert_eq!(flags.bytes(), [1, 0, 1]);
    }
}
