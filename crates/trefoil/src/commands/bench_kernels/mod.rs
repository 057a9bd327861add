//! `trefoil bench kernels`: the kernels of the video path against the peak of their own instructions, measured beside them,
//! against the OpenCL variants, and against what other libraries do with the same products.
//!
//! For each shape every contender runs on the same core, one call of each in turn, so that all meet the same clock.

mod peers;

use crate::cli::BenchKernelsArgs;
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use peers::{Absent, Peer};
use serde::Serialize;
use serde_json::json;
use std::fmt::Write as _;
use std::time::Instant;
use trefoil_kernels::bench::{Prepared, Workload, peak};
use trefoil_kernels::opencl::{self, Device, DeviceInfo};
use trefoil_kernels::{Isa, Kernels};
use trefoil_report::format;

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
    gops: f64,
    best_gops: f64,
    fraction_of_peak: Option<f64>,
    best_fraction_of_peak: Option<f64>,
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
        }));
    }
    print(&text(&machine, &kernels, &peaks, device, &absent, &rows))
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
    all.push((Workload::GemmW8a16 { m, k: 1536, n: 1536 }, false));
    all.push((Workload::GemmF32 { m, k: 1536, n: 1536 }, false));
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
    let has_opencl =
        matches!(workload, Workload::GemmW8a8 { .. } | Workload::LinearW8a8 { .. } | Workload::AttentionW8a8 { .. });
    if has_opencl {
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
    let before = peak(kernels, workload.is_integer(), PEAK_TRIES);
    let mut times: Vec<Vec<f64>> = contenders.iter().map(|_| Vec::with_capacity(samples)).collect();
    for _ in 0..samples {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            times.push((contender.run)()?);
        }
    }
    let after = peak(kernels, workload.is_integer(), PEAK_TRIES);
    let peak_gops = before.zip(after).map(|(before, after)| before.max(after));
    let results = contenders.into_iter().zip(times).map(|(contender, mut times)| {
        times.sort_by(f64::total_cmp);
        let (median, fastest) = (times[times.len() / 2], times[0]);
        let (gops, best_gops) = (workload.operations() / median / 1e6, workload.operations() / fastest / 1e6);
        Timed {
            engine: contender.engine,
            variant: contender.variant,
            threads: 1,
            samples: times.len(),
            median_ms: median,
            min_ms: fastest,
            max_ms: times[times.len() - 1],
            gops,
            best_gops,
            fraction_of_peak: peak_gops.map(|peak| gops / peak),
            best_fraction_of_peak: peak_gops.map(|peak| best_gops / peak),
        }
    });
    Ok(Row { workload, peak_gops, results: results.collect() })
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

/// `w8a8 GEMM`, `1560 × 1536 × 8960`.
fn names(workload: &Workload) -> (&'static str, String) {
    let gemm = |m: usize, k: usize, n: usize| format!("{m} × {k} × {n}");
    let attention =
        |tokens: usize, heads: usize, head_dim: usize| format!("{tokens} tokens, {heads} heads of {head_dim}");
    match *workload {
        Workload::GemmW8a8 { m, k, n } => ("w8a8 GEMM", gemm(m, k, n)),
        Workload::LinearW8a8 { m, k, n } => ("w8a8 quantise + GEMM", gemm(m, k, n)),
        Workload::GemmW8a16 { m, k, n } => ("w8a16 GEMM", gemm(m, k, n)),
        Workload::GemmF32 { m, k, n } => ("f32 GEMM", gemm(m, k, n)),
        Workload::ConvF32 { height, width, frames, inputs, outputs } => {
            ("f32 convolution", format!("{height} × {width}, {frames} × {inputs} → {outputs} channels"))
        }
        Workload::AttentionW8a8 { tokens, heads, head_dim } => ("w8a8 attention", attention(tokens, heads, head_dim)),
        Workload::AttentionF32 { tokens, heads, head_dim } => ("f32 attention", attention(tokens, heads, head_dim)),
    }
}

fn describe(workload: &Workload) -> String {
    let (kernel, shape) = names(workload);
    format!("{kernel} {shape}")
}

fn text(
    machine: &trefoil_core::Machine,
    kernels: &Kernels,
    peaks: &[Peaks],
    device: Option<&DeviceInfo>,
    absent: &[Absent],
    rows: &[Row],
) -> String {
    let mut text = String::new();
    let versions = machine.versions.iter().map(|(name, version)| format!("{name} {version}")).collect::<Vec<_>>();
    let _ = writeln!(text, "{}, {} core(s); {}", machine.cpu, machine.cores.len(), versions.join(", "));
    if let Some(device) = device {
        let _ = writeln!(text, "OpenCL device {}: {}, {}", device.index, device.name, device.platform_version);
    }
    let gops = |value: Option<f64>| value.map_or_else(|| format::ABSENT.to_owned(), |value| format!("{value:.0}"));
    for peaks in peaks {
        let _ = writeln!(
            text,
            "peak of {} on registers only, {}: {} GOPS INT8, {} GFLOPS f32",
            kernels.isa(),
            format::plural(peaks.threads, "core"),
            gops(peaks.int8_gops),
            gops(peaks.f32_gflops)
        );
    }
    let headings =
        ["kernel", "shape", "engine", "variant", ">median", ">range", ">GOPS", ">of the peak", ">time / ours"];
    let headings: Vec<String> = headings.iter().map(ToString::to_string).collect();
    let mut cells = Vec::new();
    for row in rows {
        let (kernel, shape) = names(&row.workload);
        for (at, result) in row.results.iter().enumerate() {
            let fraction = result.fraction_of_peak.map_or_else(|| format::ABSENT.to_owned(), format::percent);
            let ratio = if at == 0 {
                format::ABSENT.to_owned()
            } else {
                format!("{:.2}", result.median_ms / row.results[0].median_ms)
            };
            let texts = [
                if at == 0 { kernel.to_owned() } else { String::new() },
                if at == 0 { shape.clone() } else { String::new() },
                result.engine.clone(),
                result.variant.clone(),
                format::time(result.median_ms),
                format::time_range(result.min_ms, result.max_ms),
                format!("{:.0}", result.gops),
                fraction,
                ratio,
            ];
            cells.push(texts.into_iter().map(|text| (text, false)).collect());
        }
    }
    let title = "Kernels on one core (measured; every engine of a shape in turn)";
    text.push('\n');
    text += &trefoil_report::text_table(title, &headings, cells)
        .render(trefoil_report::TableFormat::Text, context::width());
    for Absent { engine, reason } in absent {
        let _ = writeln!(text, "without {engine}: {reason}");
    }
    if kernels.isa() == Isa::Scalar {
        text += "the scalar kernels have no peak loop\n";
    }
    text
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
