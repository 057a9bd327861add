//! Rows drawn from the core types: operators, costs per unit, segments, transfers, totals.

use crate::format;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{
    Objective, OperatorClass, OperatorGraph, OperatorId, Origin, Outcome, Plan, Profile, Samples, SpanKind, Subject,
    TaskId, TensorId, Timeline, UnitAddress, Work,
};

/// Most ranges of operator ids written out before they are only counted.
const RANGE_LIMIT: usize = 6;

/// One operator of `trefoil inspect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OperatorRow {
    /// Index in the graph.
    pub id: u32,
    /// Name.
    pub name: String,
    /// Node types.
    pub kind: String,
    /// Number of ONNX nodes in it.
    pub nodes: usize,
    /// Compute- or memory-bound.
    pub class: OperatorClass,
    /// Operations, where known.
    pub flops: Option<u64>,
    /// Bytes of constants.
    pub weight_bytes: u64,
    /// Input shapes, `1x3x224x224 f32`, comma-separated.
    pub inputs: String,
    /// Output shapes.
    pub outputs: String,
    /// Bytes of its outputs.
    pub output_bytes: u64,
    /// How many operators share its signature (itself included): they are measured once.
    pub same: usize,
}

/// Rows of `trefoil inspect`, in graph order.
pub fn operator_rows(graph: &OperatorGraph) -> Vec<OperatorRow> {
    let mut same: BTreeMap<_, usize> = BTreeMap::new();
    for operator in &graph.operators {
        *same.entry(&operator.signature).or_default() += 1;
    }
    let shapes = |tensors: &[TensorId]| {
        let texts: Vec<_> = tensors.iter().map(|&tensor| shape(graph, tensor)).collect();
        texts.join(", ")
    };
    graph
        .operators
        .iter()
        .enumerate()
        .map(|(id, operator)| OperatorRow {
            id: id as u32,
            name: operator.name.clone(),
            kind: operator.kind.clone(),
            nodes: operator.nodes.len(),
            class: operator.class,
            flops: operator.flops,
            weight_bytes: operator.weight_bytes,
            inputs: shapes(&operator.inputs),
            outputs: shapes(&operator.outputs),
            output_bytes: operator.outputs.iter().map(|&tensor| graph.tensor(tensor).bytes).sum(),
            same: same[&operator.signature],
        })
        .collect()
}

fn shape(graph: &OperatorGraph, tensor: TensorId) -> String {
    let edge = graph.tensor(tensor);
    let dims: Vec<_> = edge.shape.iter().map(ToString::to_string).collect();
    let dtype = format!("{:?}", edge.dtype).to_lowercase();
    if dims.is_empty() { format!("scalar {dtype}") } else { format!("{} {dtype}", dims.join("x")) }
}

/// What is known of one operator on one unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "result", rename_all = "kebab-case")]
pub enum HeatCell {
    /// It ran.
    Time {
        /// Median in milliseconds.
        ms: f64,
        /// Spread (p90 − p10) relative to the median.
        spread: f64,
        /// Number of samples.
        count: u32,
        /// How it was got.
        origin: Origin,
        /// Whether the spread is over the noise threshold.
        noisy: bool,
    },
    /// It did not compile, run or compute rightly.
    Failed {
        /// Why, in one line.
        reason: String,
    },
    /// Nobody tried.
    Unknown,
}

impl HeatCell {
    /// Median time, if it ran.
    pub fn ms(&self) -> Option<f64> {
        match self {
            Self::Time { ms, .. } => Some(*ms),
            _ => None,
        }
    }
}

/// One operator on every unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeatRow {
    /// Index in the graph.
    pub id: u32,
    /// Name.
    pub name: String,
    /// Node types.
    pub kind: String,
    /// One cell per unit.
    pub cells: Vec<HeatCell>,
    /// The unit the plan puts it on, as an index into [`HeatTable::units`].
    pub placed: Option<usize>,
}

impl HeatRow {
    /// Index of the fastest unit.
    pub fn best(&self) -> Option<usize> {
        let timed = self.cells.iter().enumerate().filter_map(|(unit, cell)| Some((unit, cell.ms()?)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(unit, _)| unit)
    }

    /// Time on the fastest unit in milliseconds.
    pub fn best_ms(&self) -> Option<f64> {
        self.best().and_then(|unit| self.cells[unit].ms())
    }

    /// Slowest over fastest unit; `None` when fewer than two ran.
    pub fn contrast(&self) -> Option<f64> {
        let times: Vec<_> = self.cells.iter().filter_map(HeatCell::ms).collect();
        let best = self.best_ms().filter(|&best| best > 0.0 && times.len() > 1)?;
        Some(times.into_iter().fold(0.0, f64::max) / best)
    }
}

/// Operators × units: what was measured of each operator alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeatTable {
    /// Column names.
    pub units: Vec<String>,
    /// Rows, in graph order.
    pub rows: Vec<HeatRow>,
}

impl HeatTable {
    /// The newest measurement of every operator on `units` (all of the profile's units when empty). With a plan for
    /// this graph each row says where the plan puts the operator.
    pub fn from_profile(profile: &Profile, graph: &OperatorGraph, units: &[UnitAddress], plan: Option<&Plan>) -> Self {
        let units = units_of(profile, units);
        let index = profile.index();
        let placed = plan.map(|plan| placement(plan, graph)).unwrap_or_default();
        let rows = graph.operators.iter().enumerate().map(|(id, operator)| {
            let subject = Subject::Operator { signature: operator.signature.clone() };
            let cells = units.iter().map(|unit| match index.newest(&subject, std::slice::from_ref(unit)) {
                None => HeatCell::Unknown,
                Some(measurement) => match trefoil_core::cost::measurement_cost(measurement) {
                    Some(cost) => HeatCell::Time {
                        ms: cost.ms,
                        spread: measurement.total().map_or(0.0, Samples::spread),
                        count: measurement.total().map_or(1, |samples| samples.count),
                        origin: cost.origin,
                        noisy: measurement.is_noisy(),
                    },
                    None => HeatCell::Failed {
                        reason: measurement.failure().unwrap_or_else(|| "no time was recorded".to_owned()),
                    },
                },
            });
            HeatRow {
                id: id as u32,
                name: operator.name.clone(),
                kind: operator.kind.clone(),
                cells: cells.collect(),
                placed: placed.get(&(id as u32)).and_then(|unit| units.iter().position(|other| other == *unit)),
            }
        });
        Self { rows: rows.collect(), units: units.iter().map(ToString::to_string).collect() }
    }
}

fn units_of(profile: &Profile, units: &[UnitAddress]) -> Vec<UnitAddress> {
    if units.is_empty() { profile.units.iter().map(|unit| unit.address.clone()).collect() } else { units.to_vec() }
}

fn placement<'a>(plan: &'a Plan, graph: &OperatorGraph) -> BTreeMap<u32, &'a UnitAddress> {
    let Some(model) = plan.models.iter().position(|model| model.fingerprint == graph.fingerprint) else {
        return BTreeMap::new();
    };
    let segments = plan.segments.iter().filter(|segment| segment.model as usize == model);
    segments.flat_map(|segment| segment.operators.iter().map(|id| (id.0, &segment.unit))).collect()
}

/// Operators alone against the whole model on one unit: what does not add up is fusion and per-call overhead.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnitTotal {
    /// Unit address.
    pub unit: String,
    /// Sum of the operators measured alone, in milliseconds.
    pub operators_ms: f64,
    /// How many operators that sum holds.
    pub counted: usize,
    /// How many have no time on this unit; the sum lacks them.
    pub missing: usize,
    /// The whole model in one piece, if it ran.
    pub whole_ms: Option<f64>,
    /// Sum of the backend's own node times while the whole model ran, where it reports them.
    pub in_place_ms: Option<f64>,
    /// How the numbers were got.
    pub origin: Origin,
    /// Why the whole model did not run.
    pub failure: Option<String>,
}

impl UnitTotal {
    /// `whole − operators`: negative where fusion saves more than calls cost.
    pub fn other_ms(&self) -> Option<f64> {
        self.whole_ms.map(|whole| whole - self.operators_ms)
    }
}

/// Totals of a profile per unit (all of the profile's units when `units` is empty).
pub fn unit_totals(profile: &Profile, graph: &OperatorGraph, units: &[UnitAddress]) -> Vec<UnitTotal> {
    let units = units_of(profile, units);
    let heat = HeatTable::from_profile(profile, graph, &units, None);
    let index = profile.index();
    let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
    let total = |(column, unit): (usize, &UnitAddress)| {
        let times: Vec<_> = heat.rows.iter().filter_map(|row| row.cells[column].ms()).collect();
        let whole = index.newest(&subject, std::slice::from_ref(unit));
        let in_place = whole.and_then(|measurement| match &measurement.outcome {
            Outcome::Ok { nodes, .. } if !nodes.is_empty() => Some(nodes.iter().map(|node| node.ms).sum()),
            _ => None,
        });
        let cell_origin = heat.rows.iter().find_map(|row| match &row.cells[column] {
            HeatCell::Time { origin, .. } => Some(*origin),
            _ => None,
        });
        UnitTotal {
            unit: unit.to_string(),
            operators_ms: times.iter().sum(),
            counted: times.len(),
            missing: heat.rows.len() - times.len(),
            whole_ms: whole.and_then(|measurement| measurement.total()).map(|samples| samples.median),
            in_place_ms: in_place,
            origin: cell_origin.or_else(|| whole.map(|m| m.origin)).unwrap_or(Origin::Measured),
            failure: whole.and_then(trefoil_core::Measurement::failure),
        }
    };
    units.iter().enumerate().map(total).collect()
}

/// A plan in a few numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanSummary {
    /// Planner.
    pub method: String,
    /// What it minimises.
    pub objective: Objective,
    /// What the planner claims, in the objective's unit.
    pub claimed: f64,
    /// The simulator's makespan in milliseconds.
    pub simulated_ms: f64,
    /// How the plan's times were got as a whole.
    pub origin: Origin,
    /// Lower bound under the same cost model.
    pub model_bound: Option<f64>,
    /// `claimed / model_bound − 1`.
    pub gap: Option<f64>,
    /// Proven optimal under its cost model.
    pub exact: bool,
    /// Every segment's cost was measured whole.
    pub all_measured: bool,
    /// Crossings between units.
    pub crossings: usize,
    /// The planner's notes.
    pub notes: Vec<String>,
}

impl PlanSummary {
    /// Summarises `plan`.
    pub fn of(plan: &Plan) -> Self {
        Self {
            method: plan.method.clone(),
            objective: plan.objective,
            claimed: plan.claimed,
            simulated_ms: plan.simulated_ms,
            // A composed time is a prediction even when each part was measured.
            origin: match plan.timeline.origin {
                Origin::Measured => Origin::Predicted,
                other => other,
            },
            model_bound: plan.model_bound,
            gap: plan.gap,
            exact: plan.exact,
            all_measured: plan.all_measured,
            crossings: plan.crossings(),
            notes: plan.notes.clone(),
        }
    }
}

/// One segment of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentRow {
    /// Index in the plan.
    pub id: u32,
    /// Unit address.
    pub unit: String,
    /// Operator ids as ranges.
    pub operators: String,
    /// How many operators.
    pub count: usize,
    /// The commonest node types: `12 Conv+Relu, 3 Add`.
    pub kinds: String,
    /// Cost in the plan, in milliseconds.
    pub ms: f64,
    /// How that was got.
    pub origin: Origin,
    /// Energy in joules, where powers are known.
    pub joules: Option<f64>,
    /// Tensors it reads that another unit wrote.
    pub crossings: usize,
    /// Their bytes.
    pub crossing_bytes: u64,
    /// Time in the run's trace, in milliseconds (one execution).
    pub traced_ms: Option<f64>,
    /// How the trace was got.
    pub traced_origin: Option<Origin>,
}

/// The segments that `plan` makes of its `model`-th model.
pub fn segment_rows(plan: &Plan, model: u32, graph: &OperatorGraph, trace: Option<&Timeline>) -> Vec<SegmentRow> {
    let mine = || plan.segments.iter().enumerate().filter(|(_, segment)| segment.model == model);
    let mut producer: BTreeMap<TensorId, &UnitAddress> = BTreeMap::new();
    for (_, segment) in mine() {
        producer.extend(segment.outputs.iter().map(|&tensor| (tensor, &segment.unit)));
    }
    let traced = traced_times(trace);
    mine()
        .map(|(id, segment)| {
            let crossing: Vec<_> = segment
                .inputs
                .iter()
                .filter(|tensor| producer.get(tensor).is_some_and(|unit| **unit != segment.unit))
                .collect();
            let task = plan
                .tasks
                .iter()
                .position(|task| matches!(task.work, Work::Segment { segment } if segment.0 as usize == id));
            let traced_ms = task.and_then(|task| traced.get(&TaskId(task as u32)).copied());
            SegmentRow {
                id: id as u32,
                unit: segment.unit.to_string(),
                operators: operator_ranges(&segment.operators),
                count: segment.operators.len(),
                kinds: kinds(graph, &segment.operators),
                ms: segment.cost.ms,
                origin: segment.cost.origin,
                joules: segment.cost.joules,
                crossings: crossing.len(),
                crossing_bytes: crossing
                    .iter()
                    .filter_map(|tensor| graph.tensors.get(tensor.index()))
                    .map(|edge| edge.bytes)
                    .sum(),
                traced_ms,
                traced_origin: traced_ms.and(trace).map(|trace| trace.origin),
            }
        })
        .collect()
}

fn operator_ranges(operators: &[OperatorId]) -> String {
    format::ranges(&operators.iter().map(|id| id.0).collect::<Vec<_>>(), RANGE_LIMIT)
}

fn kinds(graph: &OperatorGraph, operators: &[OperatorId]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for operator in operators.iter().filter_map(|id| graph.operators.get(id.index())) {
        *counts.entry(&operator.kind).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|&(kind, count)| (std::cmp::Reverse(count), kind));
    let mut parts: Vec<_> = counts.iter().take(4).map(|(kind, count)| format!("{count} {kind}")).collect();
    if counts.len() > 4 {
        parts.push(format!("{} more kinds", counts.len() - 4));
    }
    parts.join(", ")
}

/// Busy time of each task in a trace, waits left out.
fn traced_times(trace: Option<&Timeline>) -> BTreeMap<TaskId, f64> {
    let mut times = BTreeMap::new();
    for span in trace.iter().flat_map(|trace| &trace.lanes).flat_map(|lane| &lane.spans) {
        if span.kind != SpanKind::Wait {
            *times.entry(span.task).or_insert(0.0) += span.end_ms - span.start_ms;
        }
    }
    times
}

/// One tensor handed from unit to unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TransferRow {
    /// Tensor name.
    pub tensor: String,
    /// Its size; `None` if the graph does not know the tensor.
    pub bytes: Option<u64>,
    /// Unit it comes from, or `host`.
    pub from: String,
    /// Unit it goes to.
    pub to: String,
    /// Cost in the plan, in milliseconds.
    pub ms: f64,
    /// How that was got.
    pub origin: Origin,
    /// Time in the run's trace, in milliseconds.
    pub traced_ms: Option<f64>,
    /// How the trace was got.
    pub traced_origin: Option<Origin>,
}

/// The transfer tasks of the plan's `model`-th model.
pub fn transfer_rows(plan: &Plan, model: u32, graph: &OperatorGraph, trace: Option<&Timeline>) -> Vec<TransferRow> {
    let traced = traced_times(trace);
    let tasks = plan.tasks.iter().enumerate();
    tasks
        .filter_map(|(index, task)| match &task.work {
            Work::Transfer { model: of, tensor, from } if *of == model => {
                let edge = graph.tensors.get(tensor.index());
                let traced_ms = traced.get(&TaskId(index as u32)).copied();
                Some(TransferRow {
                    tensor: edge.map_or_else(|| format!("tensor {}", tensor.0), |edge| edge.name.clone()),
                    bytes: edge.map(|edge| edge.bytes),
                    from: from.as_ref().map_or_else(|| "host".to_owned(), ToString::to_string),
                    to: task.unit.to_string(),
                    ms: task.cost.ms,
                    origin: task.cost.origin,
                    traced_ms,
                    traced_origin: traced_ms.and(trace).map(|trace| trace.origin),
                })
            }
            _ => None,
        })
        .collect()
}

/// What a timeline's spans refer to, for tooltips and trace arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TaskDetail {
    /// `segment 3`, ``transfer of `t12` ``, `blocks 4-9`.
    pub what: String,
    /// Unit address.
    pub unit: String,
    /// Operator ids as ranges and the node types; empty for transfers.
    pub operators: String,
    /// How the task's cost in the plan was got.
    pub origin: Origin,
    /// Tasks it waits for.
    pub after: Vec<TaskId>,
}

/// Details of every task of a plan. `graphs` are in the order of [`Plan::models`]; a missing graph costs its names.
pub fn task_details(plan: &Plan, graphs: &[&OperatorGraph]) -> Vec<TaskDetail> {
    let several = plan.models.len() > 1;
    let of_model = |model: u32| match plan.models.get(model as usize) {
        Some(planned) if several => format!(" of {}", planned.name),
        _ => String::new(),
    };
    let detail = |task: &trefoil_core::Task| {
        let (what, operators) = match &task.work {
            Work::Segment { segment } => match plan.segments.get(segment.0 as usize) {
                Some(found) => {
                    let kinds = graphs.get(found.model as usize).map(|graph| kinds(graph, &found.operators));
                    let ranges = operator_ranges(&found.operators);
                    let text = match kinds {
                        Some(kinds) if !kinds.is_empty() => format!("{ranges}: {kinds}"),
                        _ => ranges,
                    };
                    (format!("segment {}{}", segment.0, of_model(found.model)), text)
                }
                None => (format!("segment {}", segment.0), String::new()),
            },
            Work::Transfer { model, tensor, .. } => {
                let edge = graphs.get(*model as usize).and_then(|graph| graph.tensors.get(tensor.index()));
                let name = edge.map_or_else(
                    || format!("tensor {}", tensor.0),
                    |edge| format!("`{}`, {}", edge.name, format::bytes(edge.bytes)),
                );
                (format!("transfer of {name}{}", of_model(*model)), String::new())
            }
            Work::Blocks { first, count } => (format!("blocks {first}-{}", (first + count).saturating_sub(1)), String::new()),
        };
        TaskDetail { what, unit: task.unit.to_string(), operators, origin: task.cost.origin, after: task.after.clone() }
    };
    plan.tasks.iter().map(detail).collect()
}

/// A part of a total.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TotalRow {
    /// What the machine was doing.
    pub name: String,
    /// The unit it concerns, when it is exactly one.
    pub unit: Option<String>,
    /// Milliseconds.
    pub ms: f64,
}

/// A timeline's wall-clock time cut into disjoint parts, so that the parts add up to the total.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Totals {
    /// How the times were got.
    pub origin: Origin,
    /// Parts; the last, `other`, is what nothing was recorded for.
    pub rows: Vec<TotalRow>,
    /// The total in milliseconds.
    pub total_ms: f64,
}

impl Totals {
    /// Cuts `timeline`. At every moment the time belongs to the set of lanes that compute; if none does, to the
    /// transfers; if none, to recorded waits; else to `other`. `wall_ms` is the run's duration as its caller saw it; the
    /// timeline's end when `None`. O(spans · log spans + spans · lanes).
    pub fn of(timeline: &Timeline, wall_ms: Option<f64>) -> Self {
        const RANK: [SpanKind; 3] = [SpanKind::Compute, SpanKind::Transfer, SpanKind::Wait];
        let mut edges = Vec::new();
        for (lane, spans) in timeline.lanes.iter().enumerate() {
            for span in spans.spans.iter().filter(|span| span.end_ms > span.start_ms) {
                let rank = RANK.iter().position(|kind| *kind == span.kind).unwrap_or(0);
                edges.push((span.start_ms, 1_i32, rank, lane));
                edges.push((span.end_ms, -1, rank, lane));
            }
        }
        edges.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut active = vec![[0_i32; 3]; timeline.lanes.len()];
        let mut parts: BTreeMap<(usize, BTreeSet<usize>), f64> = BTreeMap::new();
        for (index, &(at, change, rank, lane)) in edges.iter().enumerate() {
            active[lane][rank] += change;
            let Some(next) = edges.get(index + 1).map(|edge| edge.0).filter(|&next| next > at) else { continue };
            let busy = (0..3).find_map(|rank| {
                let lanes: BTreeSet<_> = (0..active.len()).filter(|&lane| active[lane][rank] > 0).collect();
                (!lanes.is_empty()).then_some((rank, lanes))
            });
            if let Some(key) = busy {
                *parts.entry(key).or_insert(0.0) += next - at;
            }
        }
        let total_ms = wall_ms.unwrap_or_else(|| timeline.end_ms());
        let covered: f64 = parts.values().sum();
        let mut rows: Vec<_> = parts
            .into_iter()
            .map(|((rank, lanes), ms)| {
                let names: Vec<_> = lanes.iter().map(|&lane| timeline.lanes[lane].name.as_str()).collect();
                let joined = names.join(" + ");
                TotalRow {
                    name: match (rank, names.len()) {
                        (0, 1) => format!("compute on {joined} alone"),
                        (0, _) => format!("compute on {joined} at once"),
                        (1, _) => format!("transfer on {joined}, nothing computing"),
                        _ => format!("waiting on {joined}"),
                    },
                    unit: (names.len() == 1).then(|| joined.clone()),
                    ms,
                }
            })
            .collect();
        rows.push(TotalRow { name: "other".to_owned(), unit: None, ms: total_ms - covered });
        Self { origin: timeline.origin, rows, total_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{Lane, Span};

    fn lane(name: &str, spans: &[(f64, f64, SpanKind)]) -> Lane {
        let span = |&(start_ms, end_ms, kind)| Span { task: TaskId(0), label: String::new(), kind, start_ms, end_ms };
        Lane { name: name.into(), spans: spans.iter().map(span).collect() }
    }

    #[test]
    fn totals_are_disjoint_and_add_up() {
        let timeline = Timeline {
            origin: Origin::Measured,
            lanes: vec![
                lane("a", &[(0.0, 4.0, SpanKind::Compute), (6.0, 8.0, SpanKind::Compute)]),
                lane("b", &[(3.0, 5.0, SpanKind::Compute), (5.0, 5.5, SpanKind::Transfer), (7.0, 7.5, SpanKind::Transfer)]),
            ],
        };
        let totals = Totals::of(&timeline, Some(9.0));
        let get = |name: &str| totals.rows.iter().find(|row| row.name == name).map(|row| row.ms);
        assert_eq!(get("compute on a alone"), Some(5.0));
        assert_eq!(get("compute on a + b at once"), Some(1.0));
        assert_eq!(get("compute on b alone"), Some(1.0));
        assert_eq!(get("transfer on b, nothing computing"), Some(0.5));
        assert_eq!(get("other"), Some(1.5));
        assert!((totals.rows.iter().map(|row| row.ms).sum::<f64>() - 9.0).abs() < 1e-12);
    }

    #[test]
    fn an_empty_timeline_is_all_other() {
        let totals = Totals::of(&Timeline { origin: Origin::Predicted, lanes: Vec::new() }, Some(2.0));
        assert_eq!(totals.rows, [TotalRow { name: "other".into(), unit: None, ms: 2.0 }]);
    }
}
