//! Costs of a configuration on the simulated machine, and its sequential schedules.

use super::families::Configuration;
use crate::PaperError;
use serde::Serialize;
use trefoil_core::OperatorClass;
use trefoil_plan::{best_single, sequential_dp};
use trefoil_units::UnitError;
use trefoil_units::sim::{OperatorTime, SocDescription, Workload};

/// The machine's units, in the order of every table.
pub const UNITS: [&str; 3] = ["CPU", "GPU", "NPU"];
/// Which of them hand over data (3.2.1).
pub(crate) const ACCELERATOR: [bool; 3] = [false, true, true];

/// Row-major operators × units.
#[derive(Debug, Clone)]
pub(crate) struct Costs {
    /// Milliseconds; infinite where the operator does not run.
    pub ms: Vec<f64>,
    pub h2d_ms: Vec<f64>,
    pub d2h_ms: Vec<f64>,
    pub classes: Vec<OperatorClass>,
    pub watts: [f64; 3],
    pub idle_watts: f64,
}

/// The arrays of [`sequential_dp`] in one objective's unit.
pub(crate) struct Arrays {
    pub w: Vec<f64>,
    pub h2d: Vec<f64>,
    pub d2h: Vec<f64>,
}

impl Arrays {
    /// The best single unit's cost.
    pub fn single(&self) -> f64 {
        best_single(&self.w, &self.h2d, &self.d2h, 3)
    }
}

impl Costs {
    /// From a description, as its simulated profile has them: transfers between the host and the unit for all inputs and
    /// all outputs of an operator.
    pub fn new(soc: &SocDescription, configuration: &Configuration) -> Result<Self, PaperError> {
        let missing = |name: &str| {
            PaperError::Unit(UnitError::Description {
                what: format!("simulated SoC `{}`", soc.name),
                reason: format!("there is no device {name}, which BIDENT's machine has"),
            })
        };
        let devices = UNITS.map(|name| soc.device(name));
        let host = &soc.host().name;
        let graph = &configuration.graph;
        let mut costs = Self {
            ms: Vec::with_capacity(graph.len() * 3),
            h2d_ms: Vec::with_capacity(graph.len() * 3),
            d2h_ms: Vec::with_capacity(graph.len() * 3),
            classes: graph.operators.iter().map(|operator| operator.class).collect(),
            watts: [0.0; 3],
            idle_watts: soc.idle_watts.value,
        };
        for (unit, (device, name)) in devices.iter().zip(UNITS).enumerate() {
            costs.watts[unit] = device.ok_or_else(|| missing(name))?.watts.value;
        }
        for operator in &graph.operators {
            let work = Workload::of(graph, operator);
            for (unit, (device, name)) in devices.iter().zip(UNITS).enumerate() {
                let device = device.ok_or_else(|| missing(name))?;
                let time = device.operator_time(&work).filter(|_| configuration.allowed[unit]);
                costs.ms.push(time.map_or(f64::INFINITY, OperatorTime::total_ms));
                let handed = |from: &str, to: &str, bytes: u64| {
                    if ACCELERATOR[unit] { soc.transfer_ms(from, to, bytes).unwrap_or(0.0) } else { 0.0 }
                };
                costs.h2d_ms.push(handed(host, name, work.input_bytes));
                costs.d2h_ms.push(handed(name, host, work.output_bytes));
            }
        }
        Ok(costs)
    }

    pub fn latency(&self) -> Arrays {
        Arrays { w: self.ms.clone(), h2d: self.h2d_ms.clone(), d2h: self.d2h_ms.clone() }
    }

    /// Joules: times by the power of the unit (3.3.4).
    pub fn energy(&self) -> Arrays {
        let scaled = |values: &[f64]| -> Vec<f64> {
            values.iter().enumerate().map(|(at, ms)| ms * self.watts[at % 3] / 1e3).collect()
        };
        Arrays { w: scaled(&self.ms), h2d: scaled(&self.h2d_ms), d2h: scaled(&self.d2h_ms) }
    }
}

/// Cost of an assignment by equation 1.
fn cost_of(arrays: &Arrays, assignment: &[usize]) -> f64 {
    let at = |values: &[f64], row: usize, unit: usize| values[row * 3 + unit];
    let mut total = 0.0;
    for (row, &unit) in assignment.iter().enumerate() {
        match row.checked_sub(1).map(|before| assignment[before]) {
            Some(from) if from == unit => {}
            Some(from) => total += at(&arrays.d2h, row - 1, from) + at(&arrays.h2d, row, unit),
            None => total += at(&arrays.h2d, row, unit),
        }
        total += at(&arrays.w, row, unit);
    }
    total + assignment.last().map_or(0.0, |&unit| at(&arrays.d2h, assignment.len() - 1, unit))
}

/// One configuration on the machine: single units and sequential schedules (4.2). Simulated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sequential {
    /// Configuration.
    pub name: String,
    /// Operators.
    pub operators: usize,
    /// Milliseconds on each single unit; absent where it does not run whole.
    pub single_ms: [Option<f64>; 3],
    /// Of the best single unit.
    pub best_single_ms: f64,
    /// Joules of the least-energy single unit.
    pub single_joules: f64,
    /// Of the latency-optimal schedule.
    pub sequential_ms: f64,
    /// `best_single_ms / sequential_ms`.
    pub speedup: f64,
    /// Operators of the latency-optimal schedule on each unit.
    pub placed: [usize; 3],
    /// Sum of every operator's fastest time: what free moves would give.
    pub chain_ms: f64,
    /// Reduction of energy by the energy-optimal schedule against the least-energy single unit, in percent.
    pub energy_reduction: f64,
    /// Speedup of the energy-optimal schedule.
    pub energy_speedup: f64,
    /// Reduction of energy by the latency-optimal schedule against the same baseline, in percent.
    pub latency_energy_reduction: f64,
}

/// Plans a configuration.
pub(crate) fn sequential(name: String, costs: &Costs) -> Sequential {
    let (latency, energy) = (costs.latency(), costs.energy());
    let plan = |arrays: &Arrays| sequential_dp(&arrays.w, &arrays.h2d, &arrays.d2h, &ACCELERATOR, 3);
    let (sequential_ms, fast) = plan(&latency);
    let (joules, frugal) = plan(&energy);
    let best_single_ms = latency.single();
    let baseline = energy.single();
    let rows = costs.classes.len();
    let single = |unit: usize| {
        let ms = cost_of(&latency, &vec![unit; rows]);
        (ms < f64::INFINITY).then_some(ms)
    };
    let mut placed = [0; 3];
    for &unit in &fast {
        placed[unit] += 1;
    }
    let least = |row: &[f64]| row.iter().copied().fold(f64::INFINITY, f64::min);
    Sequential {
        name,
        operators: rows,
        single_ms: [single(0), single(1), single(2)],
        best_single_ms,
        single_joules: baseline,
        sequential_ms,
        speedup: best_single_ms / sequential_ms,
        placed,
        chain_ms: costs.ms.chunks_exact(3).map(least).sum(),
        energy_reduction: 100.0 * (1.0 - joules / baseline),
        energy_speedup: best_single_ms / cost_of(&latency, &frugal),
        latency_energy_reduction: 100.0 * (1.0 - cost_of(&energy, &fast) / baseline),
    }
}
