//! Kernels at the sizes of the 1.3 B model: `cargo bench -p trefoil-kernels`.
//!
//! First a table of every instruction set on one core, and the fastest on two, each next to the register-only peak of the
//! same run; then divan's own timings of the best instruction set on one core. `TREFOIL_LONG_TESTS=1` adds 7,800 tokens.

use divan::Bencher;
use divan::counter::ItemsCount;
use trefoil_kernels::bench::{Workload, measure};
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
    for (isa, cores, workloads) in runs {
        let Some(kernels) = kernels(isa, cores) else { continue };
        for workload in workloads {
            match measure(&kernels, workload, 5) {
                Ok(row) => {
                    let (peak, fraction) = match (row.peak_gops, row.fraction_of_peak) {
                        (Some(peak), Some(fraction)) => (format!("{peak:.0}"), format!("{:.0} %", fraction * 100.0)),
                        _ => ("-".to_string(), "-".to_string()),
                    };
                    let name = format!("{:?}", row.workload);
                    println!(
                        "{:<14} {name:<50} {:>7} {:>9.2} {:>8.1} {peak:>8} {fraction:>6}",
                        isa.name(),
                        row.threads,
                        row.median_ms,
                        row.gops
                    );
                }
                Err(error) => println!("{isa}: {workload:?}: {error}"),
            }
        }
    }
}

/// One sample per call of [`measure`]'s inner loop is its own statistic, so divan times whole measurements of one call.
#[divan::bench(args = [(240, 1536, 1536), (240, 1536, 8960), (240, 8960, 1536)])]
fn gemm_w8a8(bencher: Bencher<'_, '_>, (m, k, n): (usize, usize, usize)) {
    let Some(kernels) = kernels(Isa::best(), &[0]) else { return };
    let workload = Workload::GemmW8a8 { m, k, n };
    bencher.counter(ItemsCount::new(workload.operations() as u64)).bench_local(|| measure(&kernels, workload, 1));
}
