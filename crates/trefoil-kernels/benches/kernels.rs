//! Kernels at the sizes of the 1.3 B model: `cargo bench -p trefoil-kernels`.
//!
//! First a table of every instruction set on one core, and the fastest on two, each next to the register-only peak of the
//! same run; then divan's own timings of the best instruction set on one core. `TREFOIL_LONG_TESTS=1` adds 7,800 tokens.

use divan::Bencher;
use divan::counter::ItemsCount;
use trefoil_kernels::bench::{Prepared, Workload, measure};
use trefoil_kernels::{Isa, Kernels, Pool};

fn main() {
    if !std::env::args().any(|argument| argument == "--list" || argument == "--test") {
        table();
    }
    divan::main();
}

fn kernels(isa: Isa, cores: &[usize]) -> Option<Kernels> {
    Pool::pinned(cores)
        .and_then(|pool| Kernels::new(isa, pool))
        .map_err(|error| eprintln!("skipped: {isa} on cores {cores:?} ({error})"))
        .ok()
}

fn table() {
    let full = std::env::var_os("TREFOIL_LONG_TESTS").is_some();
    println!(
        "{:<14} {:<50} {:>7} {:>9} {:>8} {:>8} {:>6}",
        "isa", "workload", "threads", "median ms", "GOPS", "peak", "of it"
    );
    let best = Isa::best();
    let small = [
        Workload::GemmW8a8 { m: 240, k: 1536, n: 1536 },
        Workload::GemmF32 { m: 240, k: 1536, n: 1536 },
        Workload::AttentionW8a8 { tokens: 600, heads: 4, head_dim: 128 },
    ];
    let mut runs: Vec<(Isa, &[usize], Vec<Workload>)> =
        Isa::available().into_iter().map(|isa| (isa, &[0][..], small.to_vec())).collect();
    runs.push((best, &[0], Workload::of_the_model(full)));
    runs.push((best, &[0, 1], Workload::of_the_model(false)));
    runs.push((best, &[0], Workload::of_the_decoder()));
    for (isa, cores, workloads) in runs {
        let Some(kernels) = kernels(isa, cores) else { continue };
        for workload in workloads {
            match measure(&kernels, workload, 5) {
                Ok(row) => {
                    let percent =
                        |part: Option<f64>| part.map_or("-".to_string(), |part| format!("{:.0} %", part * 100.0));
                    println!(
                        "{:<13} {:<57} {:>7} {:>9.2} {:>6.0} {:>6.0} {:>6} {:>6} {:>6}",
                        isa.name(),
                        format!("{:?}", row.workload),
                        row.threads,
                        row.median_ms,
                        row.gops,
                        row.best_gops,
                        row.peak_gops.map_or("-".to_string(), |peak| format!("{peak:.0}")),
                        percent(row.fraction_of_peak),
                        percent(row.best_fraction_of_peak),
                    );
                }
                Err(error) => println!("{isa}: {workload:?}: {error}"),
            }
        }
    }
}

fn run(bencher: Bencher<'_, '_>, workload: Workload) {
    let Some(kernels) = kernels(Isa::best(), &[0]) else { return };
    let mut prepared = Prepared::new(workload).expect("sizes above zero");
    bencher.counter(ItemsCount::new(workload.operations() as u64)).bench_local(|| prepared.run(&kernels));
}

#[divan::bench(args = [(240, 1536, 1536), (240, 1536, 8960), (240, 8960, 1536)])]
fn gemm_w8a8(bencher: Bencher<'_, '_>, (m, k, n): (usize, usize, usize)) {
    run(bencher, Workload::GemmW8a8 { m, k, n });
}

#[divan::bench]
fn gemm_w8a16(bencher: Bencher<'_, '_>) {
    run(bencher, Workload::GemmW8a16 { m: 240, k: 1536, n: 1536 });
}

#[divan::bench]
fn gemm_f32(bencher: Bencher<'_, '_>) {
    run(bencher, Workload::GemmF32 { m: 240, k: 1536, n: 1536 });
}

#[divan::bench]
fn attention_w8a8(bencher: Bencher<'_, '_>) {
    run(bencher, Workload::AttentionW8a8 { tokens: 780, heads: 2, head_dim: 128 });
}

#[divan::bench]
fn attention_f32(bencher: Bencher<'_, '_>) {
    run(bencher, Workload::AttentionF32 { tokens: 780, heads: 2, head_dim: 128 });
}

#[cfg(feature = "opencl")]
#[divan::bench(args = [(240, 1536, 1536), (240, 1536, 8960), (240, 8960, 1536)])]
fn gemm_w8a8_opencl(bencher: Bencher<'_, '_>, (m, k, n): (usize, usize, usize)) {
    on_device(bencher, Workload::GemmW8a8 { m, k, n });
}

#[cfg(feature = "opencl")]
#[divan::bench]
fn attention_w8a8_opencl(bencher: Bencher<'_, '_>) {
    on_device(bencher, Workload::AttentionW8a8 { tokens: 780, heads: 2, head_dim: 128 });
}

#[cfg(feature = "opencl")]
fn on_device(bencher: Bencher<'_, '_>, workload: Workload) {
    use trefoil_kernels::opencl::{Device, Kernels, bench::Prepared};
    match Device::open(0, Some(&[0])).and_then(|device| Kernels::best(&device, None)) {
        Ok(kernels) => {
            let mut prepared = Prepared::new(&kernels, workload).expect("sizes above zero");
            prepared.run().expect("the kernels compile");
            let operations = ItemsCount::new(workload.operations() as u64);
            bencher.counter(operations).bench_local(|| prepared.run());
        }
        Err(error) => eprintln!("skipped: OpenCL ({error})"),
    }
}

#[divan::bench(args = [(30, 52, 384), (120, 208, 192)])]
fn conv_f32(bencher: Bencher<'_, '_>, (height, width, channels): (usize, usize, usize)) {
    run(bencher, Workload::ConvF32 { height, width, frames: 3, inputs: channels, outputs: channels });
}
