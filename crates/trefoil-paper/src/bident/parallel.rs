//! BIDENT's Table 3: the intra-model schedules of 3.2.2 and 3.3.2, on the simulated machine.
//!
//! The literal planner maps the branches between forks and joins one by one and slows them afterwards; nothing keeps two branches
//! of a phase from claiming one unit and still counting as parallel. So each configuration has two numbers: what the formula
//! claims, and what the simulator says of the same placement with exclusive units and every crossing tensor paid.

use super::families::Configuration;
use super::machine::{Sequential, UNITS};
use super::pairs::geometric_mean;
use crate::Relation::Simulates;
use crate::{Interval, PaperError, PublishedNumbers, Section};
use serde::Serialize;
use trefoil_core::{Objective, OperatorGraph, UnitAddress};
use trefoil_plan::phases::Phases;
use trefoil_plan::{PlanRequest, plan};

/// One configuration in phases. Simulated; gains are reductions of time against the sequential schedule, as Table 3 has them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parallel {
    /// Configuration.
    pub name: String,
    /// Phases.
    pub phases: usize,
    /// Phases with two or more branches.
    pub concurrent_phases: usize,
    /// Milliseconds by the paper's formula.
    pub literal_ms: f64,
    /// Best single unit over that.
    pub literal_speedup: f64,
    /// Reduction of the sequential schedule's time, in percent.
    pub literal_gain: f64,
    /// Milliseconds of the same placement on exclusive units with every crossing paid.
    pub exclusive_ms: f64,
    /// Reduction of the sequential schedule's time by the formula, in percent, if that is what it really takes.
    pub exclusive_gain: f64,
    /// Reduction of energy by the energy-optimal phases of the formula against the least-energy single unit, in percent.
    pub energy_reduction: f64,
}

/// Plans every configuration in phases.
pub(super) fn parallel(
    machine: &str,
    configurations: &[Configuration],
    sequential: &[Sequential],
) -> Result<Vec<Parallel>, PaperError> {
    configurations
        .iter()
        .zip(sequential)
        .map(|(configuration, sequential)| one(machine, configuration, sequential))
        .collect()
}

fn one(machine: &str, configuration: &Configuration, sequential: &Sequential) -> Result<Parallel, PaperError> {
    let units: Vec<UnitAddress> = UNITS
        .iter()
        .zip(configuration.allowed)
        .filter(|(_, allowed)| *allowed)
        .map(|(unit, _)| UnitAddress::new("sim", format!("{machine}/{unit}")))
        .collect();
    let profile = trefoil_units::sim::simulated_profile(&configuration.graph, &units, "1970-01-01T00:00:00Z")?;
    let request = PlanRequest::new(&profile, &configuration.graph);
    let fast = plan("phases", &request)?;
    let energy = PlanRequest { objective: Objective::Energy, ..request };
    let frugal = plan("phases", &energy)?;
    // The baseline's energy is that of the sequential section.
    let baseline = sequential.single_joules;
    let partition = partition(&configuration.graph);
    let claimed = |plan: &trefoil_core::Plan| plan.own.as_ref().map_or(plan.claimed, |own| own.value);
    let literal_ms = claimed(&fast);
    let gain = |ms: f64| 100.0 * (1.0 - ms / sequential.sequential_ms);
    Ok(Parallel {
        name: configuration.name(),
        phases: partition.phases.len(),
        concurrent_phases: partition.concurrent(),
        literal_ms,
        literal_speedup: sequential.best_single_ms / literal_ms,
        literal_gain: gain(literal_ms),
        exclusive_ms: fast.simulated_ms,
        exclusive_gain: gain(fast.simulated_ms),
        energy_reduction: 100.0 * (1.0 - claimed(&frugal) / baseline),
    })
}

fn partition(graph: &OperatorGraph) -> Phases {
    let numbers = |ids: Vec<trefoil_core::OperatorId>| ids.into_iter().map(|id| id.0).collect::<Vec<u32>>();
    let before: Vec<Vec<u32>> = graph.ids().map(|id| numbers(graph.predecessors(id))).collect();
    let after: Vec<Vec<u32>> = graph.ids().map(|id| numbers(graph.successors(id))).collect();
    let order: Vec<u32> = (0..graph.len() as u32).collect();
    Phases::new(&order, |at| &before[at as usize], |at| &after[at as usize])
}

/// Table 3 as far as the text repeats it.
pub(super) fn section(numbers: &PublishedNumbers, all: &[Parallel]) -> Result<Section, PaperError> {
    let mut section = Section::new("Table 3: intra-model phases, simulated (4.3)");
    let how = "phases, literal, on sim:lunar-lake";
    let find = |name: &str| all.iter().find(|result| result.name == name);
    for (published, name) in [("parallel_vit", "vit_b16_fp16"), ("parallel_pi05", "pi05")] {
        let found = find(name).map_or(f64::NAN, |result| result.literal_speedup);
        section.compare(numbers, published, Simulates, found, how)?;
    }
    let most = all.iter().map(|result| result.literal_speedup).fold(0.0, f64::max);
    section.compare(numbers, "parallel_most", Simulates, most, how)?;
    for (gain, phases, name) in [
        ("parallel_vit_gain", "phases_vit", "vit_b16_fp16"),
        ("parallel_pi05_gain", "phases_pi05", "pi05"),
        ("parallel_mamba_gain", "phases_mamba", "mamba370m_fp16"),
        ("parallel_lavish_gain", "phases_lavish", "lavish_fp16"),
        ("parallel_bitnet_gain", "phases_bitnet", "bitnet_fp16"),
    ] {
        let Some(result) = find(name) else { continue };
        let how = format!("{how}; {:.1}% with exclusive units and every crossing paid", result.exclusive_gain);
        section.compare(numbers, gain, Simulates, result.literal_gain, &how)?;
        section.compare(numbers, phases, Simulates, result.concurrent_phases as f64, "forks and joins of our graph")?;
    }
    for (what, name) in [("KAN", "kan_fp16"), ("LLaMA", "llama7b_1l_fp16")] {
        let Some(result) = find(name) else { continue };
        section.derive(
            &format!("parallel_{name}"),
            &format!("{what}, gain over sequential (published: at most 3, from 2 or 3 concurrent phases)"),
            "%",
            result.literal_gain,
            &format!("{how}, {} concurrent phases of our graph (simulated)", result.concurrent_phases),
        );
    }
    let mean = all.iter().map(|result| result.energy_reduction).sum::<f64>() / all.len().max(1) as f64;
    section.compare(
        numbers,
        "parallel_energy",
        Simulates,
        mean,
        "energy-optimal phases, literal: a phase counts its costliest branch only; assumed powers",
    )?;
    let range = |of: fn(&Parallel) -> f64| {
        let values = all.iter().map(of);
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        Interval::new(low, high)
    };
    section.derive(
        "parallel_gains",
        "range of the gains by the formula",
        "%",
        range(|result| result.literal_gain),
        how,
    );
    section.derive(
        "parallel_exclusive_gains",
        "range of the same placements' gains on exclusive units",
        "%",
        range(|result| result.exclusive_gain),
        "the simulator, every crossing paid (simulated)",
    );
    section.derive(
        "parallel_mean",
        "geometric mean speedup by the formula",
        "x",
        geometric_mean(all.iter().map(|result| result.literal_speedup)),
        how,
    );
    section.note("the formula lets branches share a unit and still count as parallel (3.3.2), so its gains are above what exclusive units give; both are printed");
    section.note("concurrent phases depend on how the backend fuses: ours are those of our graphs, not of OpenVINO's, so that their number need not agree");
    Ok(section)
}
