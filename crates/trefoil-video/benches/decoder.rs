//! The decoder at its public size on random weights: `cargo bench -p trefoil-video --bench decoder`.
//!
//! Prints seconds of the first and of a later latent frame, operations a second, and memory predicted and held, at 240 × 416
//! pixels on one core and on two; with `TREFOIL_LONG_TESTS=1` at 480 × 832 too. The time of a frame does not depend on the
//! values, so random weights measure as trained ones do.

use std::time::Instant;
use trefoil_kernels::Kernels;
use trefoil_video::synthetic::write_vae_decoder;
use trefoil_video::vae::{Latent, VaeConfig, VaeDecoder};
use trefoil_weights::memory::peak_resident_bytes;

fn main() {
    // Cargo passes `--bench`; a listing or a test run of all benches should not take a minute.
    if std::env::args().any(|argument| argument == "--list" || argument == "--test") {
        return;
    }
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let config = VaeConfig::default();
    write_vae_decoder(scratch.path(), &config, 1).expect("space for 150 MB");
    let start = Instant::now();
    let decoder = VaeDecoder::open(scratch.path()).expect("the checkpoint just written");
    println!("read and packed in {:.1} s", start.elapsed().as_secs_f64());
    let mut sizes = vec![(30, 52)];
    if std::env::var_os("TREFOIL_LONG_TESTS").is_some() {
        sizes.push((60, 104));
    }
    for (height, width) in sizes {
        for cores in [&[0usize][..], &[0, 1]] {
            let kernels = match Kernels::best(cores) {
                Ok(kernels) => kernels,
                Err(error) => {
                    eprintln!("skipped: cores {cores:?} ({error})");
                    continue;
                }
            };
            let values =
                (0..config.z_dim * 3 * height * width).map(|at| ((at * 37 % 101) as f32 - 50.0) / 40.0).collect();
            let latent = Latent::new(config.z_dim, 3, height, width, values).expect("extents fit");
            let memory = decoder.memory(height, width, cores.len()).expect("a legal size");
            let mut session = decoder.session(height, width).expect("a legal size");
            let mut times = Vec::new();
            for frame in 0..latent.frames() {
                let start = Instant::now();
                session.push(&kernels, &latent, frame).expect("the latent fits");
                times.push(start.elapsed().as_secs_f64());
            }
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            println!(
                "{}×{} on {} core(s), {}: first latent frame {:.2} s, later {:.2} s and {:.2} s; memory predicted {:.0} MiB (weights {:.0}, history {:.0}, working {:.0}), peak of the process so far {:.0} MiB",
                height * config.spatial_scale(),
                width * config.spatial_scale(),
                cores.len(),
                kernels.isa(),
                times[0],
                times[1],
                times[2],
                mib(memory.total()),
                mib(memory.weights),
                mib(memory.history),
                mib(memory.working),
                peak_resident_bytes().map_or(f64::NAN, |bytes| mib(bytes as usize)),
            );
        }
    }
}
