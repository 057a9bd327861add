//! The HTML report: one file that opens offline, prints, and follows the reader's light or dark scheme.

mod chart;
pub(crate) mod escape;
mod heat;
mod lanes;
mod page;
pub(crate) mod pairs;

use crate::collect::{HeatTable, UnitTotal, unit_totals};
use crate::planned::{PlanSummary, SegmentRow, TaskDetail, TransferRow, segment_rows, task_details, transfer_rows};
use crate::rows::{MemoryRow, ModelRow, UnitRow};
use escape::escape;
use serde::Serialize;
use std::collections::BTreeMap;
use trefoil_core::{Machine, OperatorGraph, Origin, Plan, Profile, Timeline, UnitAddress};

/// Colour classes `u0`…`u7` belong to units.
const UNIT_COLORS: usize = 8;
/// Colour class of plans.
const PLAN_COLOR: usize = 8;
/// Colour class of transfers, waits and the host.
const NEUTRAL_COLOR: usize = 9;

/// Everything a report shows. Fill what is known: absent parts leave no hole in the page.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ReportInput {
    /// Page title.
    pub title: String,
    /// The command that made it.
    pub command: Option<String>,
    /// When, as text (RFC 3339 UTC).
    pub generated_at: Option<String>,
    /// A warning across the whole page, such as that its numbers are made up for an example.
    pub banner: Option<String>,
    /// Where the numbers were taken, with the versions of everything.
    pub machine: Option<Machine>,
    /// Units of the machine.
    pub units: Vec<UnitRow>,
    /// Models, in the order to show.
    pub models: Vec<ModelReport>,
    /// Notes for all models.
    pub notes: Vec<String>,
}

/// One model's part of the report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelReport {
    /// Name, sizes and the comparison.
    pub row: ModelRow,
    /// The plan in a few numbers.
    pub plan: Option<PlanSummary>,
    /// Operators alone on each unit.
    pub heat: Option<HeatTable>,
    /// Operators alone against the whole model.
    pub unit_totals: Vec<UnitTotal>,
    /// The plan's segments.
    pub segments: Vec<SegmentRow>,
    /// The plan's transfers.
    pub transfers: Vec<TransferRow>,
    /// Details of the plan's tasks, which the timelines' spans refer to.
    pub tasks: Vec<TaskDetail>,
    /// The plan's timeline.
    pub predicted: Option<Timeline>,
    /// The run's trace.
    pub measured: Option<Timeline>,
    /// Duration of the traced run as its caller saw it, in milliseconds; totals then have an `other` part.
    pub wall_ms: Option<f64>,
    /// Memory by purpose.
    pub memory: Vec<MemoryRow>,
    /// Notes on this model: verification, substitutions, noise.
    pub notes: Vec<String>,
}

impl ModelReport {
    /// A report of a comparison alone.
    pub fn new(row: ModelRow) -> Self {
        Self {
            row,
            plan: None,
            heat: None,
            unit_totals: Vec::new(),
            segments: Vec::new(),
            transfers: Vec::new(),
            tasks: Vec::new(),
            predicted: None,
            measured: None,
            wall_ms: None,
            memory: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds the heat table and per-unit totals (all of the profile's units when `units` is empty); with a plan for the
    /// same graph, where it places each operator.
    #[must_use]
    pub fn with_profile(
        mut self,
        profile: &Profile,
        graph: &OperatorGraph,
        units: &[UnitAddress],
        plan: Option<&Plan>,
    ) -> Self {
        self.heat = Some(HeatTable::from_profile(profile, graph, units, plan));
        self.unit_totals = unit_totals(profile, graph, units);
        self.notes.extend(profile.notes.iter().cloned());
        self
    }

    /// Adds a plan, its timeline, and the trace of its run if there is one. `graphs` are in the order of
    /// [`Plan::models`]; `model` is this report's index among them.
    #[must_use]
    pub fn with_plan(mut self, plan: &Plan, model: u32, graphs: &[&OperatorGraph], trace: Option<&Timeline>) -> Self {
        self.plan = Some(PlanSummary::of(plan));
        if let Some(graph) = graphs.get(model as usize) {
            self.segments = segment_rows(plan, model, graph, trace);
            self.transfers = transfer_rows(plan, model, graph, trace);
        }
        self.tasks = task_details(plan, graphs);
        self.predicted = Some(plan.timeline.clone());
        self.measured = trace.cloned();
        self
    }
}

/// The report as one HTML document: inline style, script and SVG, no reference to anything outside.
pub fn html(input: &ReportInput) -> String {
    page::page(input)
}

/// A visible label of how a number was got.
pub(crate) fn badge(origin: Origin) -> String {
    format!("<span class=\"badge b-{origin}\">{origin}</span>")
}

/// Colours of units, the same across the report: by backend and device, whatever the cores.
struct Palette(BTreeMap<String, usize>);

impl Palette {
    fn of(input: &ReportInput) -> Self {
        let mut palette = Self(BTreeMap::new());
        for unit in input.units.iter().filter(|unit| unit.available) {
            palette.add(&unit.unit);
        }
        for model in &input.models {
            let singles = model.row.contenders.iter().filter(|row| row.kind == crate::rows::ContenderKind::Single);
            singles.for_each(|row| palette.add(&row.name));
            model.segments.iter().for_each(|segment| palette.add(&segment.unit));
            model.heat.iter().flat_map(|heat| &heat.units).for_each(|unit| palette.add(unit));
            let timelines = model.predicted.iter().chain(&model.measured);
            timelines.flat_map(|timeline| &timeline.lanes).for_each(|lane| palette.add(&lane.name));
        }
        palette
    }

    fn key(unit: &str) -> &str {
        unit.split(['@', '+']).next().unwrap_or(unit)
    }

    fn add(&mut self, unit: &str) {
        let next = self.0.len() % UNIT_COLORS;
        self.0.entry(Self::key(unit).to_owned()).or_insert(next);
    }

    fn index(&self, unit: &str) -> usize {
        match unit {
            "plan" => PLAN_COLOR,
            _ => self.0.get(Self::key(unit)).copied().unwrap_or(NEUTRAL_COLOR),
        }
    }
}

fn paragraph(text: &str) -> String {
    format!("<p>{}</p>", escape(text))
}
