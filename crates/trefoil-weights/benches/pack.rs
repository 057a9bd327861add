//! Throughput of the stages of packing: `cargo bench -p trefoil-weights`.

use divan::Bencher;
use divan::counter::BytesCount;
use trefoil_weights::FloatType;
use trefoil_weights::quantise::{MatrixSource, Orientation, quantise};
use trefoil_weights::tile::TileShape;

fn main() {
    divan::main();
}

/// Quantises and tiles one feed-forward matrix of the 1.3 B model; bytes are those of the source.
#[divan::bench(args = [(FloatType::F32, 1), (FloatType::F32, 2), (FloatType::Bf16, 1), (FloatType::F16, 1)])]
fn quantise_ffn_matrix(bencher: Bencher<'_, '_>, (dtype, threads): (FloatType, usize)) {
    let shape = TileShape::new(1536, 8960).expect("a legal shape");
    let mut state = 1u32;
    let bytes: Vec<u8> = (0..shape.d_in * shape.d_out)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Finite in every type: exponents are kept in the middle.
            let value = (state >> 8) as f32 / 16_777_216.0 - 0.5;
            match dtype {
                FloatType::F32 => value.to_le_bytes().to_vec(),
                FloatType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                FloatType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            }
        })
        .collect();
    let source = MatrixSource::new("w", &bytes, dtype, shape, Orientation::OutIn).expect("bytes fit the shape");
    bencher.counter(BytesCount::new(bytes.len())).bench_local(|| quantise(&source, threads));
}
