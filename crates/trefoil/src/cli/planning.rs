//! What to plan for, and the commands that plan.

use super::{GranularityArg, Shape};
use crate::error::CliError;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use trefoil_core::{Objective, UnitAddress};
use trefoil_plan::{Budget, Clock, Pin, PlanOptions, WhatIf};

/// [`Objective`] as a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveArg {
    /// Milliseconds of one inference
    Latency,
    /// Joules of one inference
    Energy,
    /// Milliseconds between items of a stream
    Throughput,
}

impl From<ObjectiveArg> for Objective {
    fn from(arg: ObjectiveArg) -> Self {
        match arg {
            ObjectiveArg::Latency => Self::Latency,
            ObjectiveArg::Energy => Self::Energy,
            ObjectiveArg::Throughput => Self::Throughput,
        }
    }
}

/// A duration: `2s`, `500ms`, `1.5m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetArg(pub Duration);

impl FromStr for BudgetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let scale = match &text[number.len()..] {
            "ms" => 1e-3,
            "s" => 1.0,
            "m" | "min" => 60.0,
            _ => return Err("write a duration with its unit: 500ms, 2s, 1m".to_owned()),
        };
        let value: f64 = number.parse().map_err(|_| format!("`{number}` is no number"))?;
        let seconds = value * scale;
        if !seconds.is_finite() || !(0.0..=1e6).contains(&seconds) {
            return Err(format!("`{text}` is no duration between 0 and {} s", 1e6));
        }
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

/// What to plan for.
#[derive(Debug, Args, Clone)]
pub struct PlanningArgs {
    /// What to minimise [default: latency; throughput with method `pipeline`]
    #[arg(long = "objective", value_enum, value_name = "OBJECTIVE")]
    pub asked_objective: Option<ObjectiveArg>,
    /// Planner; `auto` keeps the best single unit unless a mixed plan wins (`trefoil plan --list-methods` lists all)
    #[arg(long, default_value = "auto")]
    pub method: String,
    /// Keep matching operators (by name or kind) on a unit: 'Conv*=openvino:CPU' (repeatable; two that disagree on an operator are
    /// an error)
    #[arg(long = "pin", value_name = "PATTERN=UNIT")]
    pub pins: Vec<Pin>,
    /// How long anytime planners search: 500ms, 2s, 1m. Without it they take a fixed number of steps, so that equal questions
    /// get equal answers
    #[arg(long, value_name = "TIME")]
    pub budget: Option<BudgetArg>,
    /// Seed of the planners' random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

impl PlanningArgs {
    /// What to minimise.
    pub fn objective(&self) -> ObjectiveArg {
        let standard = if self.method == "pipeline" { ObjectiveArg::Throughput } else { ObjectiveArg::Latency };
        self.asked_objective.unwrap_or(standard)
    }

    /// Refuses flags that contradict each other; `units` are those given with `-u`.
    ///
    /// # Errors
    /// One line that names both.
    pub fn check(&self, units: &[UnitAddress]) -> Result<(), CliError> {
        let wrong = |reason: String| Err(CliError::Usage(reason));
        let method = self.method.as_str();
        match (method, self.asked_objective) {
            ("pipeline", Some(ObjectiveArg::Latency | ObjectiveArg::Energy)) => {
                return wrong(
                    "method `pipeline` minimises the period of a stream: give --objective throughput or none"
                        .to_owned(),
                );
            }
            ("pareto", Some(_)) => {
                return wrong(
                    "method `pareto` weighs latency, energy and memory at once: leave --objective out".to_owned(),
                );
            }
            _ => {}
        }
        let Some(single) = method.strip_prefix("single:") else { return Ok(()) };
        let unit: UnitAddress = single.parse().map_err(trefoil_plan::PlanError::from)?;
        if let Some(other) = units.iter().find(|other| **other != unit) {
            return wrong(format!(
                "method `single:{unit}` uses {unit} alone, but -u names {other}: leave one of them out"
            ));
        }
        if let Some(pin) = self.pins.iter().find(|pin| pin.unit != unit) {
            return wrong(format!(
                "method `single:{unit}` puts everything on {unit}, but pin `{pin}` names another unit"
            ));
        }
        Ok(())
    }

    /// The planners' options; a time budget starts now.
    pub fn options(&self) -> PlanOptions {
        let budget = self.budget.map(|budget| {
            let end_ms = now_ms() + budget.0.as_secs_f64() * 1e3;
            Budget::Until(Clock { now_ms, end_ms })
        });
        let standard = PlanOptions::default();
        PlanOptions { budget: budget.unwrap_or(standard.budget), seed: self.seed, ..standard }
    }
}

/// Milliseconds since the first call.
pub fn now_ms() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64() * 1e3
}

/// `trefoil plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Profile written by `trefoil profile`; several plan their models at once. With --on, ONNX models
    #[arg(value_name = "PROFILE.json", required_unless_present = "list_methods")]
    pub profiles: Vec<PathBuf>,
    /// Plan models for a simulated machine instead, like sim:lunar-lake (nothing is measured; every number is simulated)
    #[arg(long, value_name = "sim:SOC")]
    pub on: Option<String>,
    /// With --on: static shape of an input whose extents are symbolic (repeatable)
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224", requires = "on")]
    pub shapes: Vec<Shape>,
    /// With --on: how nodes are grouped into operators
    #[arg(long, value_enum, default_value_t = GranularityArg::Fused, requires = "on")]
    pub granularity: GranularityArg,
    /// What to plan for
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Use only these units (repeatable; all of the profile's by default)
    #[arg(short, long = "unit", value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// Take the placement from a file instead: JSON object, operator name or index → unit
    #[arg(long, value_name = "SPLIT.json", conflicts_with = "method")]
    pub import: Option<PathBuf>,
    /// Arrivals, rates, deadlines, weights, linked stages and repeats of the profiles' models, as a JSON file (see the page on
    /// file formats), for method `concurrent`
    #[arg(long, value_name = "WORKLOAD.json", conflicts_with_all = ["import", "what_if"])]
    pub workload: Option<PathBuf>,
    /// Where to write the plan
    #[arg(short, long, value_name = "PLAN.json")]
    pub output: Option<PathBuf>,
    /// Also write what `trefoil-check` needs to verify the plan and its lower bound
    #[arg(long, value_name = "CERTIFICATE.json")]
    pub certificate: Option<PathBuf>,
    /// Replay the plan, and plan anew, as if a unit were slower, gone or busy at the start: slow:UNIT=1.5, without:UNIT,
    /// busy:UNIT=4 (milliseconds) (repeatable: all at once)
    #[arg(long = "what-if", value_name = "CHANGE", conflicts_with_all = ["import", "certificate", "diff"])]
    pub what_if: Vec<WhatIf>,
    /// Compare another plan of the same model(s) with this one
    #[arg(long, value_name = "OTHER_PLAN.json")]
    pub diff: Option<PathBuf>,
    /// Print the plan as JSON
    #[arg(long)]
    pub json: bool,
    /// List the planners and stop
    #[arg(long)]
    pub list_methods: bool,
}

/// `trefoil pipeline`.
#[derive(Debug, Args)]
pub struct PipelineArgs {
    /// Time of a block on the first engine, of a block on the second, and of the decoder (on the second), in one unit of time
    #[arg(long, value_name = "T_G,T_N,T_V", allow_hyphen_values = true)]
    pub rates: Option<String>,
    /// Block executions of one video: steps times blocks of the model
    #[arg(long, value_name = "B", default_value = "180", allow_hyphen_values = true)]
    pub blocks: String,
    /// Evaluate this cut instead of the best one
    #[arg(long, value_name = "K", allow_hyphen_values = true)]
    pub cut: Option<String>,
    /// A general stream instead: units, blocks, handoffs, limits and deadline as a JSON file (see the page on file formats)
    #[arg(long, value_name = "STREAM.json", conflicts_with_all = ["rates", "cut", "blocks"])]
    pub problem: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil paper`.
#[derive(Debug, Args)]
pub struct PaperArgs {
    /// Which
    #[arg(value_enum)]
    pub paper: PaperArg,
    /// Also vary every assumed number of the simulated machine by 20% (bident)
    #[arg(long)]
    pub sensitivity: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The papers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PaperArg {
    /// HeteroVDiff: cuts, idle times, throughput, memory
    Heterovdiff,
    /// BIDENT: ten model families and 190 pairs on a simulated Lunar Lake
    Bident,
}

/// `trefoil explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Profile written by `trefoil profile`
    #[arg(value_name = "PROFILE.json")]
    pub profile: PathBuf,
    /// Operator: its index, name, or a pattern like 'Conv*'; without one, the operators where the choice matters most
    #[arg(value_name = "OPERATOR")]
    pub operator: Option<String>,
    /// What to plan for
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Explain this plan instead of planning
    #[arg(long, value_name = "PLAN.json", conflicts_with_all = ["method", "asked_objective", "budget", "seed"])]
    pub plan: Option<PathBuf>,
    /// Instead: which kind of operator that some unit does not run would be worth porting to it, and the gain
    #[arg(long, conflicts_with_all = ["operator", "plan"])]
    pub ports: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil bench plan`.
#[derive(Debug, Args)]
pub struct BenchPlanArgs {
    /// Also measure quality on every profile (*.json) of this folder
    #[arg(long, value_name = "DIR")]
    pub profiles: Option<PathBuf>,
    /// A quarter of the generated graphs, none above 600 operators, and shorter searches
    #[arg(long)]
    pub quick: bool,
    /// Append each generated graph's result to this file, and skip those that it holds: an interrupted run goes on
    #[arg(long, value_name = "RESULTS.jsonl")]
    pub resume: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_parse_with_their_unit() {
        for (text, ms) in [("2s", 2_000), ("500ms", 500), ("1.5m", 90_000), ("0s", 0)] {
            assert_eq!(text.parse::<BudgetArg>().unwrap().0, Duration::from_millis(ms));
        }
        for text in ["", "2", "2h", "-1s", "s", "nans", "1e9s", "é"] {
            assert!(text.parse::<BudgetArg>().is_err(), "{text}");
        }
    }
}
