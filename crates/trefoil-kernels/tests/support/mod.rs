//! What the integration tests share: random data, quantised matrices, plain oracles.
#![allow(dead_code, reason = "every test uses a part of it")]
#![allow(clippy::many_single_char_names, reason = "the letters of the formulas")]

pub mod block;

use trefoil_kernels::{Isa, Kernels, Pool};
use trefoil_weights::TiledView;
use trefoil_weights::quantise::{MatrixSource, Orientation, Quantised, quantise};
use trefoil_weights::tile::TileShape;

/// A small deterministic generator.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// Roughly normal with standard deviation 1: a sum of four uniforms.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.bits() >> 8) as f32 / 16_777_216.0 - 0.5).sum();
        sum * 1.732
    }

    pub fn normals(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal() * deviation).collect()
    }

    pub fn codes(&mut self, len: usize) -> Vec<i8> {
        (0..len).map(|_| ((self.bits() >> 24) as u8 as i8).max(-127)).collect()
    }
}

/// Quantises `[d_out, d_in]` weights.
pub fn tiled(weights: &[f32], d_in: usize, d_out: usize) -> Quantised {
    let bytes: Vec<u8> = weights.iter().flat_map(|value| value.to_le_bytes()).collect();
    let shape = TileShape::new(d_in, d_out).expect("a legal shape");
    let source =
        MatrixSource::new("w", &bytes, trefoil_weights::FloatType::F32, shape, Orientation::OutIn).expect("bytes fit");
    quantise(&source, 1).expect("finite weights")
}

/// The view that kernels take.
pub fn view(quantised: &Quantised) -> TiledView<'_> {
    TiledView { shape: quantised.shape, codes: &quantised.codes, scales: &quantised.scales }
}

/// Every instruction set of this processor with one and with two threads; fails if another set would run.
pub fn every_kernels() -> Vec<Kernels> {
    let mut all = Vec::new();
    for isa in Isa::available() {
        let kernels = Kernels::new(isa, Pool::on_caller()).expect("available");
        assert_eq!(kernels.isa(), isa);
        all.push(kernels);
        match Pool::pinned(&[0, 1]) {
            Ok(pool) => all.push(Kernels::new(isa, pool).expect("available")),
            Err(error) => eprintln!("skipped: two threads ({error})"),
        }
    }
    all
}

pub fn name_of(kernels: &Kernels) -> String {
    format!("{} on {} threads", kernels.isa(), kernels.pool().threads())
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Root mean square of the difference over that of the expected values, and the largest difference.
pub fn errors(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let (mut square, mut reference, mut largest) = (0f64, 0f64, 0f64);
    for (&got, &want) in got.iter().zip(want) {
        let difference = f64::from(got) - f64::from(want);
        square += difference * difference;
        reference += f64::from(want) * f64::from(want);
        largest = largest.max(difference.abs());
    }
    ((square / reference).sqrt(), largest)
}
