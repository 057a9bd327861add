//! The 190 pairs: BIDENT's pair searches, ours with units in the state, and the cap.

use super::machine::{Arrays, Costs};
use serde::Serialize;
use trefoil_plan::{
    AlignedCosts, CapCosts, PairCap, PairCosts, PairOperators, PairRules, aligned_dp, joint_dp, joint_units_dp,
    pair_cap,
};
use trefoil_units::sim::SocDescription;

/// How much longer operators take when both requests run on one unit at once: the unit takes turns. Assumed; the paper
/// measured it and does not print it.
pub const SHARING: f64 = 2.0;
/// Products of operator counts above which energy is planned by the paper's search only.
const MOST_ENERGY_CELLS: usize = 1_000_000;

/// Two requests at once. Times in milliseconds, simulated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pair {
    /// First configuration.
    pub first: String,
    /// Second configuration.
    pub second: String,
    /// `aligned` for two requests of one configuration, else `joint`.
    pub method: &'static str,
    /// Both on their best single units, one after the other.
    pub serial_ms: f64,
    /// The paper's search under its own rules.
    pub literal_ms: f64,
    /// `serial_ms / literal_ms`.
    pub literal_speedup: f64,
    /// With units in the state, slowdowns and exclusive units.
    pub units_ms: Option<f64>,
    /// `serial_ms / units_ms`.
    pub units_speedup: Option<f64>,
    /// What the best conceivable overlap could give.
    pub cap: PairCap,
    /// Energy reduction of the paper's energy search under its own rules (the larger of two energies, not their sum), percent.
    pub literal_energy_reduction: f64,
    /// Energy reduction with units in the state and package power counted once, percent.
    pub units_energy_reduction: Option<f64>,
}

/// What to plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PairOptions {
    /// Also with units in the state.
    pub units: bool,
    /// See [`SHARING`].
    pub sharing: f64,
}

fn scaled(values: &[f64], factor: f64) -> Vec<f64> {
    values.iter().map(|value| value * factor).collect()
}

/// The paper's search: `aligned` for one model, `joint` for two.
fn literal(first: &Arrays, second: &Arrays, same: bool, sharing: f64) -> f64 {
    let together = scaled(&first.w, sharing);
    if same {
        let costs = AlignedCosts { solo: &first.w, together: &together, enter: &first.h2d, leave: &first.d2h };
        return aligned_dp(costs, 3).0;
    }
    let other = scaled(&second.w, sharing);
    let (one, two) =
        (PairCosts { solo: &first.w, concurrent: &together }, PairCosts { solo: &second.w, concurrent: &other });
    joint_dp(one, two, 3).0
}

/// Slowdowns of the machine, for every class alike (the paper does not tell classes apart).
fn rules(soc: &SocDescription, solo: [f64; 3], overlap: impl Fn(usize, usize) -> f64) -> PairRules {
    let names = super::machine::UNITS;
    let factors: Vec<f64> = (0..9).map(|at| soc.slowdown(names[at / 3], names[at % 3])).collect();
    PairRules {
        disjoint: (0..9).map(|at| at / 3 != at % 3).collect(),
        slowdown: std::array::from_fn(|_| std::array::from_fn(|_| factors.clone())),
        solo: solo.to_vec(),
        overlap: (0..9).map(|at| overlap(at / 3, at % 3)).collect(),
    }
}

/// All pairs of configurations, each with itself too.
pub(crate) fn pairs(soc: &SocDescription, all: &[(String, Costs)], options: PairOptions) -> Vec<Pair> {
    let latency: Vec<Arrays> = all.iter().map(|(_, costs)| costs.latency()).collect();
    let energy: Vec<Arrays> = all.iter().map(|(_, costs)| costs.energy()).collect();
    let alone: Vec<f64> = latency.iter().map(Arrays::single).collect();
    let joules: Vec<f64> = energy.iter().map(Arrays::single).collect();
    let time_rules = rules(soc, [1.0; 3], |_, _| 1.0);
    let mut found = Vec::with_capacity(all.len() * (all.len() + 1) / 2);
    for i in 0..all.len() {
        for j in i..all.len() {
            let (one, two) = (&all[i], &all[j]);
            let serial_ms = alone[i] + alone[j];
            let literal_ms = literal(&latency[i], &latency[j], i == j, options.sharing);
            let literal_j = literal(&energy[i], &energy[j], i == j, options.sharing);
            let units_ms = options.units.then(|| units_cost(&one.1, &latency[i], &two.1, &latency[j], &time_rules));
            let small = one.1.classes.len() * two.1.classes.len() <= MOST_ENERGY_CELLS;
            let units_j = (options.units && small).then(|| {
                let watts = one.1.watts;
                let price = |watts: f64| watts / 1e3;
                let power = rules(soc, watts.map(price), |a, b| price(watts[a] + watts[b] - one.1.idle_watts));
                units_cost(&one.1, &energy[i], &two.1, &energy[j], &power)
            });
            let concurrent = [scaled(&latency[i].w, options.sharing), scaled(&latency[j].w, options.sharing)];
            let cap = pair_cap(
                CapCosts { solo: &latency[i].w, concurrent: &concurrent[0], alone: alone[i] },
                CapCosts { solo: &latency[j].w, concurrent: &concurrent[1], alone: alone[j] },
                3,
            );
            let reduction = |cost: f64| 100.0 * (1.0 - cost / (joules[i] + joules[j]));
            found.push(Pair {
                first: one.0.clone(),
                second: two.0.clone(),
                method: if i == j { "aligned" } else { "joint" },
                serial_ms,
                literal_ms,
                literal_speedup: serial_ms / literal_ms,
                units_ms,
                units_speedup: units_ms.map(|ms| serial_ms / ms),
                cap,
                literal_energy_reduction: reduction(literal_j),
                units_energy_reduction: units_j.map(reduction),
            });
        }
    }
    found
}

fn units_cost(one: &Costs, first: &Arrays, two: &Costs, second: &Arrays, rules: &PairRules) -> f64 {
    let first = PairOperators { ms: &one.ms, enter: &first.h2d, leave: &first.d2h, classes: &one.classes };
    let second = PairOperators { ms: &two.ms, enter: &second.h2d, leave: &second.d2h, classes: &two.classes };
    joint_units_dp(first, second, rules, 3).0
}

/// Geometric mean.
pub(crate) fn geometric_mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value.ln(), count + 1));
    if count == 0 { 1.0 } else { (sum / count as f64).exp() }
}
