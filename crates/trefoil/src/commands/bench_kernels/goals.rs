//! The goals that the project has set its kernels, beside what was measured. A goal that is missed is printed and fails nothing.

use super::{Row, Timed, text::describe};
use serde::Serialize;
use std::fmt::Write as _;
use trefoil_kernels::bench::Workload;
use trefoil_kernels::opencl::Variant;
use trefoil_report::format;

/// What a goal compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The CPU's `w8a8` GEMM as a fraction of the register-only peak.
    Int8GemmOfPeak,
    /// The CPU's quantisation and `w8a8` GEMM against the same in OpenVINO: its time over ours.
    Int8GemmOverOpenVino,
    /// The OpenCL `x86-vnni` variant against the CPU kernel: the CPU's time over its.
    OpenClOfCpu,
    /// The CPU's INT8 attention as a fraction of the peak.
    Int8AttentionOfPeak,
    /// The CPU's kernels with f32 products as a fraction of the peak of f32 multiply-adds.
    FloatOfPeak,
}

/// One goal of one workload.
#[derive(Debug, Serialize)]
pub struct Goal {
    kind: Kind,
    workload: Workload,
    /// At least this.
    wanted: f64,
    measured: f64,
    is_met: bool,
}

impl Kind {
    const ALL: [Kind; 5] = [
        Kind::Int8GemmOfPeak,
        Kind::Int8GemmOverOpenVino,
        Kind::OpenClOfCpu,
        Kind::Int8AttentionOfPeak,
        Kind::FloatOfPeak,
    ];

    fn wanted(self) -> f64 {
        match self {
            Kind::Int8GemmOfPeak => 0.75,
            Kind::Int8GemmOverOpenVino => 1.2,
            Kind::OpenClOfCpu | Kind::FloatOfPeak => 0.7,
            Kind::Int8AttentionOfPeak => 0.5,
        }
    }

    fn sentence(self) -> &'static str {
        match self {
            Kind::Int8GemmOfPeak => "w8a8 GEMM, at least 75 % of the INT8 peak",
            Kind::Int8GemmOverOpenVino => "w8a8 quantise + GEMM, at least 1.2× OpenVINO's INT8",
            Kind::OpenClOfCpu => "OpenCL x86-vnni, at least 70 % of the CPU kernel",
            Kind::Int8AttentionOfPeak => "w8a8 attention, at least 50 % of the INT8 peak",
            Kind::FloatOfPeak => "f32 and w8a16, at least 70 % of the f32 peak",
        }
    }

    fn show(self, value: f64) -> String {
        if self == Kind::Int8GemmOverOpenVino { format!("{value:.2}×") } else { format::percent(value) }
    }

    /// What was measured of it in a row, if it is about such a row.
    fn measured(self, row: &Row) -> Option<f64> {
        let ours = row.results.first()?;
        let of_peak = |is_meant: bool| ours.fraction_of_peak.filter(|_| is_meant);
        let beside = |is_meant: &dyn Fn(&Timed) -> bool| row.results.iter().skip(1).find(|result| is_meant(result));
        match self {
            Kind::Int8GemmOfPeak => of_peak(matches!(row.workload, Workload::GemmW8a8 { .. })),
            Kind::Int8GemmOverOpenVino if matches!(row.workload, Workload::LinearW8a8 { .. }) => {
                beside(&|result| result.engine.starts_with("openvino:")).map(|peer| peer.median_ms / ours.median_ms)
            }
            Kind::Int8GemmOverOpenVino => None,
            Kind::OpenClOfCpu => {
                beside(&|result| result.engine == "opencl" && result.variant == Variant::X86Vnni.name())
                    .map(|device| ours.median_ms / device.median_ms)
            }
            Kind::Int8AttentionOfPeak => of_peak(matches!(row.workload, Workload::AttentionW8a8 { .. })),
            Kind::FloatOfPeak => of_peak(!row.workload.is_integer()),
        }
    }
}

/// The goals of all rows that are of the sizes of the model; of all where there are only small ones.
pub fn of(rows: &[Row], is_quick: bool) -> Vec<Goal> {
    let is_small = |workload: Workload| match workload {
        Workload::GemmW8a8 { m, .. }
        | Workload::LinearW8a8 { m, .. }
        | Workload::GemmW8a16 { m, .. }
        | Workload::GemmF32 { m, .. } => m < 1560,
        Workload::AttentionW8a8 { tokens, .. } | Workload::AttentionF32 { tokens, .. } => tokens < 1560,
        _ => false,
    };
    let mut goals = Vec::new();
    for kind in Kind::ALL {
        for row in rows.iter().filter(|row| is_quick || !is_small(row.workload)) {
            // Keys of one frame are packed for few queries; the goal is about a clip.
            if kind == Kind::Int8AttentionOfPeak
                && !is_quick
                && matches!(row.workload, Workload::AttentionW8a8 { tokens, .. } if tokens < 7800)
            {
                continue;
            }
            if let Some(measured) = kind.measured(row) {
                let wanted = kind.wanted();
                goals.push(Goal { kind, workload: row.workload, wanted, measured, is_met: measured >= wanted });
            }
        }
    }
    goals
}

/// One line per kind, and one per shape that misses it.
pub fn text(goals: &[Goal], is_quick: bool) -> String {
    let mut text = "\nGoals, by the medians above".to_owned();
    text += if is_quick { " (they are set for 1,560 and 7,800 rows; these shapes are smaller)\n" } else { "\n" };
    for kind in Kind::ALL {
        let of_kind: Vec<&Goal> = goals.iter().filter(|goal| goal.kind == kind).collect();
        let missed: Vec<&&Goal> = of_kind.iter().filter(|goal| !goal.is_met).collect();
        let word = match (of_kind.len(), missed.len()) {
            (0, _) => "unknown",
            (_, 0) => "met",
            (all, some) if all == some => "missed",
            _ => "partly",
        };
        let _ = write!(text, "  {word:<8} {}", kind.sentence());
        let values = of_kind.iter().map(|goal| goal.measured);
        let (low, high) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max));
        let _ = match of_kind.len() {
            0 => writeln!(text, ": not measured here"),
            count => {
                writeln!(text, ": {} of {count} ({} to {})", count - missed.len(), kind.show(low), kind.show(high))
            }
        };
        for goal in missed {
            let _ = writeln!(text, "           {} for {}", kind.show(goal.measured), describe(&goal.workload));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(engine: &str, variant: &str, median_ms: f64, fraction_of_peak: Option<f64>) -> Timed {
        Timed {
            engine: engine.to_owned(),
            variant: variant.to_owned(),
            threads: 1,
            samples: 1,
            median_ms,
            min_ms: median_ms,
            max_ms: median_ms,
            gops: None,
            best_gops: None,
            gb_per_s: None,
            fraction_of_peak,
            best_fraction_of_peak: fraction_of_peak,
            speed_of_ours: 1.0,
        }
    }

    fn row(workload: Workload, results: Vec<Timed>) -> Row {
        Row { workload, peak_gops: None, results }
    }

    #[test]
    fn goals_compare_what_they_say() {
        let (m, k, n) = (1560, 1536, 8960);
        let rows = [
            row(Workload::GemmW8a8 { m: 240, k, n }, vec![timed("cpu", "avx512-vnni", 1.0, Some(0.1))]),
            row(
                Workload::GemmW8a8 { m, k, n },
                vec![timed("cpu", "avx512-vnni", 8.0, Some(0.8)), timed("opencl", "x86-vnni", 10.0, Some(0.64))],
            ),
            row(
                Workload::LinearW8a8 { m, k, n },
                vec![
                    timed("cpu", "avx512-vnni", 10.0, Some(0.7)),
                    timed("opencl", "vectors", 20.0, None),
                    timed("openvino:CPU@0", "u8", 11.0, None),
                    timed("ort:CPU@0", "u8", 30.0, None),
                ],
            ),
            row(
                Workload::AttentionW8a8 { tokens: m, heads: 12, head_dim: 128 },
                vec![timed("cpu", "avx512-vnni", 1.0, Some(0.4))],
            ),
            row(Workload::GemmF32 { m, k, n }, vec![timed("cpu", "avx512-vnni", 1.0, Some(0.7))]),
            row(Workload::Quantise { rows: m, columns: k }, vec![timed("cpu", "avx512-vnni", 1.0, None)]),
        ];
        let goals = of(&rows, false);
        let found: Vec<(Kind, f64, bool)> = goals.iter().map(|goal| (goal.kind, goal.measured, goal.is_met)).collect();
        assert_eq!(
            found,
            [
                (Kind::Int8GemmOfPeak, 0.8, true),
                (Kind::Int8GemmOverOpenVino, 1.1, false),
                (Kind::OpenClOfCpu, 0.8, true),
                (Kind::FloatOfPeak, 0.7, true),
            ]
        );
        let text = text(&goals, false);
        assert!(text.contains("missed   w8a8 quantise + GEMM, at least 1.2× OpenVINO's INT8: 0 of 1"), "{text}");
        assert!(text.contains("1.10× for w8a8 quantise + GEMM 1560 × 1536 × 8960"), "{text}");
        assert!(text.contains("unknown  w8a8 attention, at least 50 % of the INT8 peak: not measured here"), "{text}");
    }
}
