//! Rows drawn from graphs and profiles: operators, and what each costs on each unit.

use serde::Serialize;
use std::collections::BTreeMap;
use trefoil_core::{
    OperatorClass, OperatorGraph, Origin, Outcome, Plan, Profile, Samples, Subject, TensorId, UnitAddress,
};

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
