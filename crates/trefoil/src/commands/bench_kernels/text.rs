//! What `trefoil bench kernels` prints.

use super::peers::Absent;
use super::{Peaks, Row};
use crate::context;
use std::fmt::Write as _;
use trefoil_kernels::bench::Workload;
use trefoil_kernels::opencl::DeviceInfo;
use trefoil_kernels::{Isa, Kernels};
use trefoil_report::format;

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
        Workload::LayerNorm { rows, columns } => ("LayerNorm + AdaLN to codes", format!("{rows} × {columns}")),
        Workload::RmsNorm { rows, heads, head_dim } => {
            ("RMSNorm + rotary to codes", format!("{rows} × {}", heads * head_dim))
        }
        Workload::Quantise { rows, columns } => ("quantise", format!("{rows} × {columns}")),
        Workload::AttentionW8a8 { tokens, heads, head_dim } => ("w8a8 attention", attention(tokens, heads, head_dim)),
        Workload::AttentionF32 { tokens, heads, head_dim } => ("f32 attention", attention(tokens, heads, head_dim)),
    }
}

/// Kernel and shape.
pub fn describe(workload: &Workload) -> String {
    let (kernel, shape) = names(workload);
    format!("{kernel} {shape}")
}

/// Everything but the goals.
pub fn text(
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
    let headings = [
        "kernel",
        "shape",
        "engine",
        "variant",
        ">median",
        ">range",
        ">speed",
        ">of the peak",
        ">of ours",
        ">ours over it",
    ];
    let headings: Vec<String> = headings.iter().map(ToString::to_string).collect();
    let mut cells = Vec::new();
    for row in rows {
        let (kernel, shape) = names(&row.workload);
        for (at, result) in row.results.iter().enumerate() {
            let absent = || format::ABSENT.to_owned();
            let speed = result
                .gops
                .map(|gops| format!("{gops:.0} GOPS"))
                .or(result.gb_per_s.map(|rate| format!("{rate:.1} GB/s")))
                .unwrap_or_else(absent);
            let texts = [
                if at == 0 { kernel.to_owned() } else { String::new() },
                if at == 0 { shape.clone() } else { String::new() },
                result.engine.clone(),
                result.variant.clone(),
                format::time(result.median_ms),
                format::time_range(result.min_ms, result.max_ms),
                speed,
                result.fraction_of_peak.map_or_else(absent, format::percent),
                if at == 0 { absent() } else { format::percent(result.speed_of_ours) },
                if at == 0 { absent() } else { format!("{:.2}×", 1.0 / result.speed_of_ours) },
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
