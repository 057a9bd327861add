//! Plain inputs of tables and reports: what the command line fills from a run, and the verdict drawn from it.

use crate::format;
use serde::{Deserialize, Serialize};
use trefoil_core::{Origin, Samples};

/// One line of `trefoil units`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnitRow {
    /// Unit address.
    pub unit: String,
    /// Whether it can be used here.
    pub available: bool,
    /// Whether its numbers are simulated.
    pub simulated: bool,
    /// Device name, where the backend tells one.
    pub device: Option<String>,
    /// Backend version, where available.
    pub version: Option<String>,
    /// Why it cannot be used.
    pub reason: Option<String>,
    /// What would fix that.
    pub fix: Option<String>,
}

impl UnitRow {
    /// `available`, `simulated` or `unavailable`.
    pub fn state(&self) -> &'static str {
        match (self.available, self.simulated) {
            (true, false) => "available",
            (true, true) => "simulated",
            (false, _) => "unavailable",
        }
    }
}

/// Time of the best single unit divided by a contender's time (above 1: the contender is faster), from interleaved
/// runs: the median of the paired ratios and its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// What a contender of a comparison is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContenderKind {
    /// The whole model on one unit, with all the cores it may use.
    Single,
    /// A plan.
    Plan,
    /// A paper's planner taken literally, beside the plan: shown, never the one the verdict is about.
    Literal,
}

/// One contender of a model's comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContenderRow {
    /// Unit address, or the plan's name.
    pub name: String,
    /// Single unit or plan.
    pub kind: ContenderKind,
    /// How `ms` was got.
    pub origin: Origin,
    /// Median time in milliseconds; `None` if it did not run (`note` says why).
    pub ms: Option<f64>,
    /// 10th and 90th percentile in milliseconds, when there are several samples.
    pub spread_ms: Option<(f64, f64)>,
    /// Number of samples.
    pub count: Option<u32>,
    /// What the planner predicted, in milliseconds.
    pub predicted_ms: Option<f64>,
    /// Crossings between units in one inference.
    pub crossings: Option<usize>,
    /// Against the best single unit.
    pub ratio: Option<Ratio>,
    /// Whether `run` picks it.
    pub winner: bool,
    /// What a reader should know: why it failed, what was substituted.
    pub note: Option<String>,
}

impl ContenderRow {
    /// A contender that ran.
    pub fn new(name: impl Into<String>, kind: ContenderKind, origin: Origin, samples: &Samples) -> Self {
        Self {
            name: name.into(),
            kind,
            origin,
            ms: Some(samples.median),
            spread_ms: (samples.count > 1).then_some((samples.p10, samples.p90)),
            count: Some(samples.count),
            predicted_ms: None,
            crossings: None,
            ratio: None,
            winner: false,
            note: None,
        }
    }

    /// A contender that did not run, and why.
    pub fn failed(name: impl Into<String>, kind: ContenderKind, reason: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind,
            origin: Origin::Measured,
            ms: None,
            spread_ms: None,
            count: None,
            predicted_ms: None,
            crossings: None,
            ratio: None,
            winner: false,
            note: Some(reason.into()),
        }
    }

    /// Prediction error relative to the time: +0.05 when 5% more was predicted. `None` without both numbers.
    pub fn error(&self) -> Option<f64> {
        let (predicted, ms) = (self.predicted_ms?, self.ms?);
        (ms > 0.0).then(|| predicted / ms - 1.0)
    }
}

/// One model's comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelRow {
    /// Model name.
    pub model: String,
    /// Number of operators.
    pub operators: usize,
    /// Number of distinct operators.
    pub distinct: usize,
    /// Contenders, in the order to print.
    pub contenders: Vec<ContenderRow>,
}

impl ModelRow {
    /// The fastest single unit that ran.
    pub fn best_single(&self) -> Option<&ContenderRow> {
        best(&self.contenders, ContenderKind::Single)
    }

    /// The fastest plan that ran.
    pub fn best_plan(&self) -> Option<&ContenderRow> {
        best(&self.contenders, ContenderKind::Plan)
    }
}

fn best(contenders: &[ContenderRow], kind: ContenderKind) -> Option<&ContenderRow> {
    contenders
        .iter()
        .filter(|row| row.kind == kind && row.ms.is_some())
        .min_by(|a, b| a.ms.unwrap_or(f64::MAX).total_cmp(&b.ms.unwrap_or(f64::MAX)))
}

/// Memory that something takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryRow {
    /// What.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// How it was got.
    pub origin: Origin,
    /// What a reader should know.
    pub note: Option<String>,
}

/// How a comparison ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerdictKind {
    /// The plan is faster, and the interval says so.
    PlanWins,
    /// A single unit is best.
    SingleWins,
    /// The interval contains 1, there is none to judge by, or the numbers differ in origin.
    Undecided,
    /// Only the plan runs the model.
    OnlyPlan,
    /// Nothing was compared.
    Unmeasured,
}

/// One sentence on who won and how sure that is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// How it ended.
    pub kind: VerdictKind,
    /// The sentence.
    pub text: String,
}

impl Verdict {
    /// Judges a comparison. The plan wins only if the whole interval of its ratio lies above 1.
    pub fn of(contenders: &[ContenderRow]) -> Self {
        let verdict = |kind, text| Self { kind, text };
        let single = best(contenders, ContenderKind::Single);
        let plan = best(contenders, ContenderKind::Plan);
        match (single, plan) {
            (None, None) => {
                let predicted = contenders
                    .iter()
                    .find(|row| row.kind == ContenderKind::Plan)
                    .and_then(|row| row.predicted_ms)
                    .map_or_else(String::new, |ms| format!("; the plan takes {}, predicted", format::time(ms)));
                verdict(VerdictKind::Unmeasured, format!("Not compared yet{predicted}."))
            }
            (None, Some(plan)) => {
                let tried = contenders.iter().filter(|row| row.kind == ContenderKind::Single).count();
                let singles =
                    if tried == 0 { "No single unit was compared" } else { "No single unit here runs this model" };
                let text = format!("{singles}; the plan ({}) takes {}, {}.", plan.name, written(plan), plan.origin);
                verdict(VerdictKind::OnlyPlan, text)
            }
            (Some(single), None) => verdict(
                VerdictKind::SingleWins,
                format!(
                    "{} alone is best here: {}, {}; no split was found that could beat it.",
                    single.name,
                    written(single),
                    single.origin
                ),
            ),
            (Some(single), Some(plan)) => Self::between(single, plan),
        }
    }

    fn between(single: &ContenderRow, plan: &ContenderRow) -> Self {
        if single.origin != plan.origin {
            let text = format!(
                "The plan ({}) comes to {}, {}, and {} alone to {}, {}: numbers of different origin decide nothing.",
                plan.name,
                written(plan),
                plan.origin,
                single.name,
                written(single),
                single.origin
            );
            return Self { kind: VerdictKind::Undecided, text };
        }
        let origin = plan.origin;
        let Some(ratio) = plan.ratio else {
            return Self {
                kind: VerdictKind::Undecided,
                text: format!(
                    "The plan ({}) takes {} and {} alone {}, {origin}; not run interleaved, so no interval and no winner.",
                    plan.name,
                    written(plan),
                    single.name,
                    written(single)
                ),
            };
        };
        let interval = format!("interval {}, {origin}", format::interval(ratio.low, ratio.high));
        let median = format::ratio(ratio.median);
        let (kind, text) = if ratio.low > 1.0 {
            let text = format!(
                "The plan ({}) is {median} faster than the best single unit ({}), {interval}.",
                plan.name, single.name
            );
            (VerdictKind::PlanWins, text)
        } else if ratio.high < 1.0 {
            let text = format!(
                "{} alone is best here: {}, {}; the plan ({}) runs at {median} its speed, {interval}.",
                single.name,
                written(single),
                single.origin,
                plan.name,
            );
            (VerdictKind::SingleWins, text)
        } else {
            let text = format!(
                "No difference shown between the plan ({}) and {} alone: ratio {median}, {interval}.",
                plan.name, single.name
            );
            (VerdictKind::Undecided, text)
        };
        Self { kind, text }
    }
}

fn written(row: &ContenderRow) -> String {
    format::optional_time(row.ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(ratio: Option<Ratio>) -> Vec<ContenderRow> {
        let single = ContenderRow::new("ort:CPU", ContenderKind::Single, Origin::Measured, &Samples::exactly(10.0));
        let mut plan = ContenderRow::new("interval", ContenderKind::Plan, Origin::Measured, &Samples::exactly(9.4));
        plan.ratio = ratio;
        vec![single, plan]
    }

    #[test]
    fn a_win_needs_the_whole_interval_above_one() {
        let kind = |low, high| Verdict::of(&pair(Some(Ratio { median: f64::midpoint(low, high), low, high }))).kind;
        assert_eq!(kind(1.05, 1.09), VerdictKind::PlanWins);
        assert_eq!(kind(0.99, 1.09), VerdictKind::Undecided);
        assert_eq!(kind(0.90, 0.99), VerdictKind::SingleWins);
        assert_eq!(Verdict::of(&pair(None)).kind, VerdictKind::Undecided);
    }

    #[test]
    fn sentences_carry_ratio_interval_and_origin() {
        assert_eq!(
            Verdict::of(&pair(Some(Ratio { median: 1.07, low: 1.05, high: 1.09 }))).text,
            "The plan (interval) is 1.07× faster than the best single unit (ort:CPU), interval 1.05–1.09, measured."
        );
        assert_eq!(
            Verdict::of(&pair(Some(Ratio { median: 0.94, low: 0.91, high: 0.96 }))).text,
            "ort:CPU alone is best here: 10.0 ms, measured; the plan (interval) runs at 0.94× its speed, \
             interval 0.91–0.96, measured."
        );
        let mut rows = pair(None);
        rows[1].origin = Origin::Simulated;
        let mixed = Verdict::of(&rows);
        assert_eq!(mixed.kind, VerdictKind::Undecided);
        assert!(mixed.text.contains("simulated") && mixed.text.contains("decide nothing"), "{}", mixed.text);
        rows.remove(0);
        assert_eq!(Verdict::of(&rows).kind, VerdictKind::OnlyPlan);
        assert_eq!(Verdict::of(&[]).kind, VerdictKind::Unmeasured);
    }

    #[test]
    fn prediction_error_is_signed_and_needs_both_numbers() {
        let mut row = pair(None).remove(0);
        assert_eq!(row.error(), None);
        row.predicted_ms = Some(10.5);
        assert!((row.error().unwrap() - 0.05).abs() < 1e-12);
    }
}
