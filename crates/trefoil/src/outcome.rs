//! What a finished job looks like: rows for tables, a model's part of the report, and the JSON of the command contract.

use crate::pipeline::{FASTEST, Job, PLAN, SEQUENTIAL};
use serde_json::{Value, json};
use trefoil_core::{Origin, Plan};
use trefoil_report::{ContenderKind, ContenderRow, MemoryRow, ModelReport, ModelRow, Ratio, Table, format};
use trefoil_run::ContenderResult;

/// One line a model: best single unit, plan, both predictions' errors, ratios. Times are medians over fresh processes. The
/// error is of the prediction made beforehand; the paired error is of the cost model when its parts are measured anew right before
/// each round, so it leaves out how the machine drifted meanwhile.
pub fn summary(jobs: &[SummaryRow]) -> Table {
    let headings = [
        "model",
        ">operators",
        ">distinct",
        "best single unit",
        ">its time (measured)",
        "plan",
        ">plan time (measured)",
        ">predicted",
        ">error",
        ">paired error",
        ">crossings",
        "× best single, interval",
        ">BIDENT sequential: ×",
        ">its error",
        "chosen",
    ];
    let headings: Vec<String> = headings.map(str::to_owned).to_vec();
    let rows = jobs.iter().map(|row| row.0.iter().map(|text| (text.clone(), false)).collect()).collect();
    trefoil_report::text_table("Models", &headings, rows)
}

/// A line of [`summary`].
#[derive(Debug)]
pub struct SummaryRow([String; 15]);

impl SummaryRow {
    /// The line of a finished job.
    pub fn of(job: &Job) -> Self {
        let absent = || format::ABSENT.to_owned();
        let time = |result: Option<&ContenderResult>| {
            result
                .and_then(|result| result.measured.as_ref())
                .map_or_else(absent, |samples| format::time(samples.median))
        };
        let error = |result: Option<&ContenderResult>| {
            result.and_then(Job::prediction_error).map_or_else(absent, format::signed_percent)
        };
        let best = job.comparison.best_baseline();
        let plan = job.plan_result();
        let sequential = job.comparison.contenders.iter().find(|contender| contender.name == SEQUENTIAL);
        let ratio = job.speed_up(PLAN).map_or_else(absent, |ratio| {
            format!("{} ({})", format::ratio(ratio.median), format::interval(ratio.low, ratio.high))
        });
        Self([
            job.name.clone(),
            job.graph.len().to_string(),
            job.graph.distinct().to_string(),
            best.map_or_else(|| "none runs it".to_owned(), |best| best.name.clone()),
            time(best),
            job.plan_text(),
            time(plan),
            plan.map_or_else(absent, |plan| format::time(plan.predicted_ms)),
            error(plan),
            plan.and_then(|plan| plan.paired_error).map_or_else(absent, format::signed_percent),
            job.plan.crossings().to_string(),
            ratio,
            job.speed_up(SEQUENTIAL).map_or_else(absent, |ratio| format::ratio(ratio.median)),
            error(sequential),
            job.verdict.choice.clone().unwrap_or_default(),
        ])
    }
}

impl Job {
    fn plan_of(&self, contender: &ContenderResult) -> Option<&Plan> {
        match contender.name.as_str() {
            PLAN => Some(&self.plan),
            SEQUENTIAL => self.sequential.as_ref(),
            FASTEST => self.fastest.as_ref(),
            _ => None,
        }
    }

    /// The contender that stands for the plan: itself, or the single unit that the planner chose.
    pub fn plan_result(&self) -> Option<&ContenderResult> {
        let find = |name: &str| self.comparison.contenders.iter().find(|contender| contender.name == name);
        find(PLAN).or_else(|| find(&self.plan.segments.first()?.unit.to_string()))
    }

    /// Speed-up of the refined plan over the best single unit; above 1 the plan is faster.
    pub fn speed_up(&self, name: &str) -> Option<Ratio> {
        let interval = self.comparison.ratio(name)?.interval;
        Some(Ratio { median: 1.0 / interval.median, low: 1.0 / interval.high, high: 1.0 / interval.low })
    }

    /// Signed relative error of a contender's prediction; `None` without a prediction or a time.
    pub fn prediction_error(contender: &ContenderResult) -> Option<f64> {
        let measured = contender.measured.as_ref()?.median;
        (contender.predicted_ms > 0.0 && measured > 0.0).then(|| contender.predicted_ms / measured - 1.0)
    }

    /// The plan in a word: the unit it leaves everything to, or how many segments it has on which units.
    pub fn plan_text(&self) -> String {
        match self.plan.segments.as_slice() {
            [] => "nothing to run".to_owned(),
            [segment] => format!("{} alone", segment.unit),
            segments => {
                let units: Vec<_> = self.plan.units_used().into_iter().map(ToString::to_string).collect();
                format!("{} segments on {}", segments.len(), units.join(", "))
            }
        }
    }

    /// Rows of the comparison.
    pub fn row(&self) -> ModelRow {
        let contenders = self.comparison.contenders.iter().map(|contender| {
            let chosen = self.verdict.choice.as_deref() == Some(contender.name.as_str());
            let kind = match contender.baseline {
                true => ContenderKind::Single,
                false if contender.name == PLAN || chosen => ContenderKind::Plan,
                false => ContenderKind::Literal,
            };
            let name = match contender.name.as_str() {
                SEQUENTIAL => "sequential (BIDENT, isolated costs)".to_owned(),
                PLAN => self.plan.method.clone(),
                unit => unit.to_owned(),
            };
            let mut row = match (&contender.measured, &contender.failure) {
                (Some(samples), _) => ContenderRow::new(name, kind, Origin::Measured, samples),
                (None, reason) => ContenderRow::failed(name, kind, reason.clone().unwrap_or_default()),
            };
            row.predicted_ms = Some(contender.predicted_ms).filter(|&ms| ms > 0.0);
            row.crossings = self.plan_of(contender).map(Plan::crossings);
            row.ratio = if contender.baseline { None } else { self.speed_up(&contender.name) };
            row.winner = chosen;
            row
        });
        ModelRow {
            model: self.name.clone(),
            operators: self.graph.len(),
            distinct: self.graph.distinct(),
            contenders: contenders.collect(),
        }
    }

    /// Joules beside times, when energy was asked for.
    pub fn energy_table(&self) -> Option<Table> {
        let (energies, origin) = self.energy.as_ref()?;
        let heading = format!(">energy ({origin} watts, measured times)");
        let headings = ["contender", ">time (measured)", &heading, ">predicted", ">× least"].map(str::to_owned);
        let least = energies.iter().map(|energy| energy.joules).fold(f64::INFINITY, f64::min);
        let rows = energies.iter().map(|energy| {
            let contender = self.comparison.contenders.iter().find(|contender| contender.name == energy.name);
            let ms = contender.and_then(|contender| contender.measured.as_ref()).map(|samples| samples.median);
            let strong = self.verdict.choice.as_deref() == Some(energy.name.as_str());
            let cells = [
                energy.name.clone(),
                format::optional_time(ms),
                format::joules(energy.joules),
                energy.predicted.map_or_else(|| format::ABSENT.to_owned(), format::joules),
                format::ratio(energy.joules / least),
            ];
            cells.into_iter().map(|cell| (cell, strong)).collect()
        });
        Some(trefoil_report::text_table("Energy of an inference", &headings, rows.collect()))
    }

    /// This model's part of the report. Lanes and segments are those of the plan that was executed.
    pub fn report(&self) -> ModelReport {
        let mut report = ModelReport::new(self.row())
            .with_profile(&self.profile, &self.graph, &[], Some(&self.executed))
            .with_plan(&self.executed, 0, &[&self.graph], Some(&self.trace));
        report.wall_ms = Some(self.trace.end_ms());
        let memory = |name: &str, bytes: usize, note: Option<String>| MemoryRow {
            name: name.to_owned(),
            bytes: bytes as u64,
            origin: Origin::Measured,
            note,
        };
        let reuse = format!("{} bytes without reuse", self.memory.bytes_without_reuse);
        report.memory = vec![
            memory("tensors between segments", self.memory.arena_bytes, Some(reuse)),
            memory("model inputs and outputs", self.memory.port_bytes, None),
        ];
        report.notes.insert(0, self.verdict.message.clone());
        report.notes.extend(self.notes.iter().cloned());
        report.notes.extend(self.memory.copied.iter().map(|port| format!("copied, not shared: {port}")));
        if let Some(verification) = &self.verification {
            report.notes.push(format!("verify: {}", verification.summary()));
        }
        report.notes.dedup();
        report
    }

    /// The JSON of `run --json`.
    pub fn json(&self) -> Value {
        let result = self.plan_result();
        let baselines: serde_json::Map<String, Value> = self
            .comparison
            .contenders
            .iter()
            .filter(|contender| contender.baseline)
            .map(|contender| (contender.name.clone(), json!(contender.measured.as_ref().map(|samples| samples.median))))
            .collect();
        let segments: Vec<_> = self
            .plan
            .segments
            .iter()
            .map(|segment| {
                json!({
                    "unit": segment.unit,
                    "operators": segment.operators,
                    "predicted_ms": segment.cost.ms,
                    "origin": segment.cost.origin,
                    "measurements": segment.cost.measurements,
                })
            })
            .collect();
        let ratio = |name: &str| {
            self.speed_up(name).map(|ratio| json!({ "median": ratio.median, "low": ratio.low, "high": ratio.high }))
        };
        let sequential = self.comparison.contenders.iter().find(|contender| contender.name == SEQUENTIAL);
        json!({
            "model": self.name,
            "fingerprint": self.graph.fingerprint,
            "operators": self.graph.len(),
            "distinct": self.graph.distinct(),
            "baselines": baselines,
            "plan": {
                "method": self.plan.method,
                "objective": self.plan.objective,
                "predicted_ms": self.plan.simulated_ms,
                "measured_ms": result.and_then(|result| result.measured.as_ref()).map(|samples| samples.median),
                "prediction_error": result.and_then(Self::prediction_error),
                "paired_error": result.and_then(|result| result.paired_error),
                "model_bound_ms": self.plan.model_bound,
                "gap": self.plan.gap,
                "exact": self.plan.exact,
                "all_measured": self.plan.all_measured,
                "estimates_were_lower_bounds": self.lower_bounds,
                "crossings": self.plan.crossings(),
                "speed_up": ratio(PLAN),
                "segments": segments,
            },
            "sequential": sequential.map(|result| json!({
                "predicted_ms": result.predicted_ms,
                "measured_ms": result.measured.as_ref().map(|samples| samples.median),
                "prediction_error": Self::prediction_error(result),
                "speed_up": ratio(SEQUENTIAL),
            })),
            "energy": self.energy.as_ref().map(|(energies, origin)| json!({ "watts": origin, "contenders": energies })),
            "winner": self.verdict.choice,
            "verdict": self.verdict,
            "executed": self.executed.segments.iter().map(|segment| segment.unit.to_string()).collect::<Vec<_>>(),
            "verify": self.verification,
            "memory": self.memory,
            "comparison": self.comparison.contenders,
            "notes": self.notes,
        })
    }
}
