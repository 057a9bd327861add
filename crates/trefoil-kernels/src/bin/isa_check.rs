//! Checks every instruction set of the processor it runs on: `cargo run --release -p trefoil-kernels`.
//!
//! Prints the sets, and the fingerprint of a small block on each, which is the same everywhere. The tests run it under an
//! emulator to check other architectures.

#[path = "../../tests/support/mod.rs"]
mod support;

use support::block::{fingerprint, small_run};
use support::{Random, tiled, view};
use trefoil_kernels::{
    ActivationScale, Codes, Epilogue, GemmSink, Isa, Kernels, Operands, Pool, Rows, RowsMut, Workspace,
};

/// INT8 products of random shapes against the address formula; returns how many differ.
fn mismatches(kernels: &Kernels) -> usize {
    let mut random = Random::new(11);
    let mut wrong = 0;
    for _ in 0..24 {
        let [rows, d_in, d_out] = [29, 140, 90].map(|most| 1 + random.bits() as usize % most);
        let weights = tiled(&random.normals(d_in * d_out, 1.0), d_in, d_out);
        let stride = d_in.next_multiple_of(32);
        let codes = random.codes(rows * stride);
        let mut out = vec![f32::NAN; rows * d_out];
        let input = Codes {
            codes: Rows::new("x", &codes, rows, d_in, stride).expect("fits"),
            scale: ActivationScale::Tensor(1.0),
        };
        let sink =
            GemmSink::F32 { out: RowsMut::dense("y", &mut out, rows, d_out).expect("fits"), operands: Operands::F32 };
        kernels.gemm_w8a8(&input, &view(&weights), &Epilogue::default(), sink, &mut Workspace::new()).expect("fits");
        for (row, out) in out.chunks(d_out).enumerate() {
            for (column, &got) in out.iter().enumerate() {
                let dot: i32 = (0..d_in)
                    .map(|i| {
                        i32::from(codes[row * stride + i]) * i32::from(weights.codes[weights.shape.offset(i, column)])
                    })
                    .sum();
                wrong += usize::from(got.to_bits() != (dot as f32 * weights.scales[column]).to_bits());
            }
        }
    }
    wrong
}

fn main() {
    for isa in Isa::available() {
        let kernels = Kernels::new(isa, Pool::on_caller()).expect("available");
        println!(
            "{isa} mismatches {} block {:#018x}",
            mismatches(&kernels),
            fingerprint(&small_run(&kernels, &kernels))
        );
    }
}
