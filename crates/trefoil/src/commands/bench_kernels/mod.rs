//! `trefoil bench kernels`: the kernels of the video path against the peak of their own instructions, measured beside them,
//! against the OpenCL variants, and against what other libraries do with the same products.
//!
//! For each shape every contender runs on the same core, one call of each in turn, so that all meet the same clock.

mod goals;
mod peers;
mod text;

use crate::cli::BenchKernelsArgs;
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use peers::{Absent, Peer};
use serde::Serialize;
use serde_json::json;
use std::time::Instant;
use text::describe;
use trefoil_kernels::Kernels;
use trefoil_kernels::bench::{Prepared, Workload, peak};
use trefoil_kernels::opencl::{self, Device};

/// The register-only peaks, 10⁹ operations a second.
#[derive(Debug, Clone, Copy, Serialize)]
struct Peaks {
    threads: usize,
    int8_gops: Option<f64>,
    f32_gflops: Option<f64>,
}

/// One contender's times of one workload.
#[derive(Debug, Serialize)]
struct Timed {
    /// `cpu`, `opencl`, `openvino:CPU@0` …
    engine: String,
    /// Instruction set, OpenCL variant, or type of the activations that a library was given.
    variant: String,
    threads: usize,
    samples: usize,
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    /// 10⁹ operations a second, from the median; of products only, as all that is compared with a peak.
    gops: Option<f64>,
    best_gops: Option<f64>,
    /// 10⁹ bytes read and written a second, of row operators.
    gb_per_s: Option<f64>,
    fraction_of_peak: Option<f64>,
    best_fraction_of_peak: Option<f64>,
    /// Our CPU kernel's median time over this one's: above 1, this one is faster.
    speed_of_ours: f64,
}

/// One workload.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    workload: Workload,
    /// The peak of the same kind on the same core, the best of before and after.
    peak_gops: Option<f64>,
    results: Vec<Timed>,
}

/// One workload on one contender, called again and again. Gives milliseconds.
struct Contender<'c> {
    engine: String,
    variant: String,
    run: Box<dyn FnMut() -> Result<f64, CliError> + 'c>,
}

/// Runs the command.
pub fn run(args: &BenchKernelsArgs) -> Result<(), CliError> {
    let machine = trefoil_units::machine();
    let Some(&first) = machine.cores.first() else {
        return Err(CliError::Failed("this process may use no core".to_owned()));
    };
    let core = args.core.unwrap_or(first);
    if !machine.cores.contains(&core) {
        let have = trefoil_units::cores_text(&machine.cores);
        return Err(CliError::Usage(format!("core {core} is not among those that this process may use ({have})")));
    }
    // Before anything else calls the library: its threads inherit the core.
    let device = Device::open(args.opencl, Some(&[core as usize]));
    let failed = |error: trefoil_kernels::KernelError| CliError::Failed(error.to_string());
    let kernels = Kernels::best(&[core as usize]).map_err(failed)?;
    let mut peaks = vec![peaks_of(&kernels)];
    if let Some(&other) = machine.cores.iter().find(|&&other| other != core) {
        peaks.push(peaks_of(&Kernels::best(&[core as usize, other as usize]).map_err(failed)?));
    }
    let cache = context::cache_dir(args.cache.as_deref()).join("opencl");
    let on_device: Vec<Result<opencl::Kernels, String>> = match &device {
        Ok(device) => {
            let variants = device.info().variants.iter();
            variants
                .map(|&variant| opencl::Kernels::new(device, variant, Some(&cache)).map_err(|error| error.to_string()))
                .collect()
        }
        Err(error) => vec![Err(error.to_string())],
    };
    let mut absent: Vec<Absent> =
        on_device.iter().filter_map(|kernels| kernels.as_ref().err()).map(|why| Absent::new("opencl", why)).collect();
    let devices: Vec<&opencl::Kernels> = on_device.iter().flatten().collect();
    let line = ProgressLine::new("bench kernels", args.json);
    let folder = tempfile::tempdir().map_err(|source| CliError::File {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let mut rows = Vec::new();
    for (workload, with_variants) in workloads(args.quick) {
        if context::stop_flag().load(std::sync::atomic::Ordering::SeqCst) {
            break;
        }
        line.step(&describe(&workload));
        let peers = if args.no_peers { Vec::new() } else { peers::of(workload, core, folder.path(), &mut absent) };
        rows.push(measure(workload, &kernels, (&devices, with_variants), peers, usize::from(args.samples))?);
    }
    drop(line);
    let device = device.as_ref().ok().map(Device::info);
    if args.json {
        return print_json(&json!({
            "machine": machine,
            "origin": "measured",
            "core": core,
            "isa": kernels.isa(),
            "peaks": peaks,
            "opencl": device,
            "absent": absent,
            "rows": rows,
            "goals": goals::of(&rows, args.quick),
        }));
    }
    let goals = goals::text(&goals::of(&rows, args.quick), args.quick);
    print(&(text::text(&machine, &kernels, &peaks, device, &absent, &rows) + &goals))
}

fn peaks_of(kernels: &Kernels) -> Peaks {
    const TRIES: usize = 20;
    Peaks {
        threads: kernels.pool().threads(),
        int8_gops: peak(kernels, true, TRIES),
        f32_gflops: peak(kernels, false, TRIES),
    }
}

/// What is measured, and whether on every OpenCL variant (the slow ones only on small shapes).
fn workloads(quick: bool) -> Vec<(Workload, bool)> {
    let shapes = [(1536, 1536), (1536, 8960), (8960, 1536)];
    let mut all = vec![
        (Workload::GemmW8a8 { m: 240, k: 1536, n: 1536 }, true),
        (Workload::AttentionW8a8 { tokens: 600, heads: 4, head_dim: 128 }, true),
    ];
    let rows: &[usize] = if quick { &[240] } else { &[1560, 7800] };
    for &m in rows {
        for (k, n) in shapes {
            all.push((Workload::GemmW8a8 { m, k, n }, false));
            all.push((Workload::LinearW8a8 { m, k, n }, false));
        }
        let (tokens, heads) = if quick { (600, 4) } else { (m, 12) };
        all.push((Workload::AttentionW8a8 { tokens, heads, head_dim: 128 }, false));
    }
    let (m, heads) = if quick { (240, 4) } else { (1560, 12) };
    all.extend(Workload::of_the_rows(m).map(|workload| (workload, false)));
    all.push((Workload::GemmW8a16 { m, k: 1536, n: 1536 }, false));
    for (k, n) in shapes {
        all.push((Workload::GemmF32 { m, k, n }, false));
    }
    all.push((Workload::AttentionF32 { tokens: m, heads, head_dim: 128 }, false));
    // A shape that was measured with every variant need not be measured again.
    let mut seen: Vec<Workload> = Vec::new();
    all.retain(|(workload, _)| {
        let is_new = !seen.contains(workload);
        seen.push(*workload);
        is_new
    });
    all
}

/// Times every contender, one call of each in turn, with the peak before and after.
fn measure(
    workload: Workload,
    kernels: &Kernels,
    (devices, with_variants): (&[&opencl::Kernels], bool),
    peers: Vec<Peer>,
    samples: usize,
) -> Result<Row, CliError> {
    const PEAK_TRIES: usize = 5;
    let mut contenders = vec![on_cpu(workload, kernels)?];
    if workload.has_opencl() {
        let most = if with_variants { devices.len() } else { 1 };
        for kernels in devices.iter().take(most) {
            contenders.push(on_device(workload, kernels)?);
        }
    }
    contenders.extend(peers.into_iter().map(|peer| Contender {
        engine: peer.engine().to_owned(),
        variant: peer.variant().to_owned(),
        run: Box::new(move || peer.time()),
    }));
    // Buffers grow, kernels compile, weights are packed.
    for contender in &mut contenders {
        (contender.run)()?;
    }
    let peak = || workload.bytes().map_or_else(|| peak(kernels, workload.is_integer(), PEAK_TRIES), |_| None);
    let before = peak();
    let mut times: Vec<Vec<f64>> = contenders.iter().map(|_| Vec::with_capacity(samples)).collect();
    for _ in 0..samples {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            times.push((contender.run)()?);
        }
    }
    let after = peak();
    let peak_gops = before.zip(after).map(|(before, after)| before.max(after));
    let is_product = workload.bytes().is_none();
    let mut results: Vec<Timed> = Vec::with_capacity(contenders.len());
    for (contender, mut times) in contenders.into_iter().zip(times) {
        times.sort_by(f64::total_cmp);
        let (median, fastest) = (times[times.len() / 2], times[0]);
        let gops = |ms: f64| is_product.then(|| workload.operations() / ms / 1e6);
        let (gops, best_gops) = (gops(median), gops(fastest));
        let of_peak = |gops: Option<f64>| gops.zip(peak_gops).map(|(gops, peak)| gops / peak);
        results.push(Timed {
            engine: contender.engine,
            variant: contender.variant,
            threads: 1,
            samples: times.len(),
            median_ms: median,
            min_ms: fastest,
            max_ms: times[times.len() - 1],
            gops,
            best_gops,
            gb_per_s: workload.bytes().map(|bytes| bytes / median / 1e6),
            fraction_of_peak: of_peak(gops),
            best_fraction_of_peak: of_peak(best_gops),
            speed_of_ours: results.first().map_or(median, |ours| ours.median_ms) / median,
        });
    }
    Ok(Row { workload, peak_gops, results })
}

/// Milliseconds of a call.
fn timed<E: std::fmt::Display>(call: impl FnOnce() -> Result<(), E>) -> Result<f64, CliError> {
    let start = Instant::now();
    call().map_err(|error| CliError::Failed(error.to_string()))?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn on_cpu(workload: Workload, kernels: &Kernels) -> Result<Contender<'_>, CliError> {
    let mut prepared = Prepared::new(workload).map_err(|error| CliError::Failed(error.to_string()))?;
    Ok(Contender {
        engine: "cpu".to_owned(),
        variant: kernels.isa().to_string(),
        run: Box::new(move || timed(|| prepared.run(kernels))),
    })
}

fn on_device(workload: Workload, kernels: &opencl::Kernels) -> Result<Contender<'_>, CliError> {
    let mut prepared =
        opencl::bench::Prepared::new(kernels, workload).map_err(|error| CliError::Failed(error.to_string()))?;
    Ok(Contender {
        engine: "opencl".to_owned(),
        variant: kernels.variant().to_string(),
        run: Box::new(move || timed(|| prepared.run())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_every_shape_once() {
        for quick in [false, true] {
            let all = workloads(quick);
            for (at, (workload, _)) in all.iter().enumerate() {
                assert!(all[at + 1..].iter().all(|(other, _)| other != workload), "{workload:?} twice");
            }
        }
        let all = workloads(false);
        for m in [1560, 7800] {
            for (k, n) in [(1536, 1536), (1536, 8960), (8960, 1536)] {
                assert!(all.iter().any(|(workload, _)| *workload == Workload::GemmW8a8 { m, k, n }));
            }
        }
        let attention = Workload::AttentionW8a8 { tokens: 7800, heads: 12, head_dim: 128 };
        assert!(all.iter().any(|(workload, _)| *workload == attention));
    }
}
