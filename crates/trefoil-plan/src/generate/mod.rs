//! Random operator graphs with simulated profiles, for measuring planners: seeded and deterministic.
//!
//! Units are unrelated, as real ones are: each has a dispatch time and its own speed for every kind of operator, so that none
//! is best everywhere. Operators are drawn from a catalogue of (kind, size) entries, since networks repeat their layers;
//! equal entries share a signature and so a measurement. Everything is labelled [`trefoil_core::Origin::Simulated`]; no number here
//! stands for any real machine.

mod connect;
mod records;

use crate::testing::graph;
use connect::connect;
use records::Records;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use trefoil_core::{
    Machine, OperatorClass, OperatorGraph, Profile, Resource, Signature, Unit, UnitAddress, UnitKind, UnitLimits,
};

/// How a generated graph is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// Each operator feeds the next one only.
    Chain,
    /// Series and parallel compositions, nested at random.
    SeriesParallel,
    /// Layers of random width, each operator reading one to three of the layer before.
    Layered,
    /// Blocks of one fork, 4 to 16 parallel branches of up to three operators, and a join.
    ForkJoin,
    /// A chain of transformer-like blocks: three projections, mixing, and residual connections around both halves.
    Network,
}

impl Shape {
    /// Every shape.
    pub const ALL: [Self; 5] = [Self::Chain, Self::SeriesParallel, Self::Layered, Self::ForkJoin, Self::Network];
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Chain => "chain",
            Self::SeriesParallel => "series-parallel",
            Self::Layered => "layered",
            Self::ForkJoin => "fork-join",
            Self::Network => "network",
        })
    }
}

/// What to generate; equal values give equal instances.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GraphSpec {
    /// Connections.
    pub shape: Shape,
    /// Number of operators, at least 1.
    pub operators: usize,
    /// Number of units, 1 to [`MOST_UNITS`].
    pub units: usize,
    /// Largest slowdown that one unit puts on another, above 1; 0 leaves slowdowns unmeasured.
    pub slowdown: f64,
    /// Seed of every random choice.
    pub seed: u64,
}

/// Units that [`GraphSpec::units`] may ask for.
pub const MOST_UNITS: usize = 5;

impl fmt::Display for GraphSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}x{}-{}", self.shape, self.operators, self.units, self.seed)?;
        if self.slowdown > 0.0 { f.write_str("-slowed") } else { Ok(()) }
    }
}

/// A generated model with its simulated measurements.
#[derive(Debug, Clone)]
pub struct Instance {
    /// What it was made from.
    pub spec: GraphSpec,
    /// The profile; it holds the graph too.
    pub profile: Profile,
    /// The graph.
    pub graph: OperatorGraph,
}

/// The graphs of the planning-quality bench: every shape at many sizes with 2 to 5 units, chains up to 24,917 operators and
/// graphs up to 5,000. 320 of them; `quick` keeps one of four and nothing above 600 operators.
pub fn suite(quick: bool) -> Vec<GraphSpec> {
    let mut specs = Vec::new();
    let mut seed = 1;
    let mut add = |shape: Shape, operators: usize, units: usize| {
        // Every third instance leaves slowdowns unmeasured, as most profiles do.
        let slowdown = if seed % 3 == 0 { 0.0 } else { 1.25 };
        specs.push(GraphSpec { shape, operators, units, slowdown, seed });
        seed += 1;
    };
    // Tiny ones, where exhaustive search can tell the optimum.
    for round in 0..15 {
        for shape in Shape::ALL {
            add(shape, 4 + round % 5, 2 + round % 2);
        }
    }
    for size in [12, 16, 24, 32, 48, 64, 96, 150, 240, 400, 600] {
        for shape in Shape::ALL {
            for units in 2..=MOST_UNITS {
                add(shape, size, units);
            }
        }
    }
    for (operators, units) in [(1_200, 2), (2_500, 3), (5_000, 3), (5_000, 5)] {
        for shape in Shape::ALL {
            add(shape, operators, units);
        }
    }
    for (operators, units) in [(4_595, 3), (10_000, 3), (24_917, 2), (24_917, 3), (24_917, 5)] {
        add(Shape::Chain, operators, units);
    }
    if quick {
        specs.retain(|spec| spec.operators <= 600);
        specs = specs.into_iter().step_by(4).collect();
    }
    specs
}

/// Generates one instance.
///
/// # Panics
/// If `spec` asks for no operator, or for 0 or more than [`MOST_UNITS`] units.
pub fn instance(spec: &GraphSpec) -> Instance {
    assert!(spec.operators > 0 && (1..=MOST_UNITS).contains(&spec.units), "no such instance: {spec:?}");
    let mut random = Random::new(spec.seed);
    let edges = connect(spec.shape, spec.operators, &mut random);
    let catalogue = catalogue(spec.operators, &mut random);
    let drawn: Vec<usize> = (0..spec.operators).map(|_| random.below(catalogue.len())).collect();
    let bytes: Vec<u64> = drawn.iter().map(|&entry| catalogue[entry].bytes).collect();
    let mut graph = graph(&bytes, &edges);
    graph.model = spec.to_string();
    graph.fingerprint = format!("{:016x}{:016x}", Random::new(spec.seed ^ 0x9e37).next(), spec.operators);
    for (operator, &entry) in graph.operators.iter_mut().zip(&drawn) {
        let Entry { kind, class, weights, .. } = catalogue[entry];
        kind.clone_into(&mut operator.kind);
        operator.class = class;
        operator.weight_bytes = weights;
        operator.signature = Signature(format!("{:016x}{entry:016x}", spec.seed));
    }
    let mut profile = Profile::new(machine());
    profile.units = (0..spec.units).map(unit).collect();
    profile.notes.push("generated at random: every number is simulated and stands for no real machine".to_owned());
    profile.models.push(graph.clone());
    let used: BTreeSet<usize> = drawn.into_iter().collect();
    let mut records = Records { profile: &mut profile };
    records.operators(&catalogue, &used, spec, &mut random);
    records.transfers(&mut random);
    records.slowdowns(spec.slowdown, &mut random);
    records.powers();
    Instance { spec: *spec, profile, graph }
}

/// One (kind, size) that operators are drawn from.
#[derive(Debug, Clone, Copy)]
struct Entry {
    kind: &'static str,
    class: OperatorClass,
    /// Milliseconds on a unit of speed 1, without dispatch.
    work: f64,
    /// Output bytes.
    bytes: u64,
    weights: u64,
}

/// Kind, class, and how often it is drawn.
const KINDS: [(&str, OperatorClass, usize); 9] = [
    ("MatMul", OperatorClass::Compute, 5),
    ("Conv", OperatorClass::Compute, 3),
    ("Add", OperatorClass::Memory, 4),
    ("Mul", OperatorClass::Memory, 2),
    ("LayerNormalization", OperatorClass::Memory, 2),
    ("Softmax", OperatorClass::Memory, 2),
    ("Transpose", OperatorClass::Memory, 2),
    ("Gather", OperatorClass::Memory, 1),
    ("CumSum", OperatorClass::Memory, 1),
];

fn catalogue(operators: usize, random: &mut Random) -> Vec<Entry> {
    // Small graphs are all different; large ones repeat, as exported networks do.
    let size = (operators / 8).max(24).min(operators);
    let total: usize = KINDS.iter().map(|kind| kind.2).sum();
    (0..size)
        .map(|_| {
            let mut ticket = random.below(total);
            let (kind, class, _) = KINDS
                .into_iter()
                .find(|kind| {
                    let found = ticket < kind.2;
                    ticket = ticket.saturating_sub(kind.2);
                    found
                })
                .unwrap_or(KINDS[0]);
            let bytes = random.log_uniform(1e3, 4e6) as u64;
            let (work, weights) = match class {
                OperatorClass::Compute => (random.log_uniform(0.02, 4.0), random.log_uniform(1e4, 2e7) as u64),
                OperatorClass::Memory => (random.log_uniform(0.004, 0.5), 0),
            };
            Entry { kind, class, work, bytes, weights }
        })
        .collect()
}

fn machine() -> Machine {
    Machine {
        cpu: "generated".to_owned(),
        cores: vec![0],
        memory_bytes: 0,
        os: "none".to_owned(),
        features: Vec::new(),
        versions: BTreeMap::new(),
    }
}

fn unit(index: usize) -> Unit {
    let (name, kind) = [
        ("CPU", UnitKind::Cpu),
        ("GPU", UnitKind::Gpu),
        ("NPU", UnitKind::Npu),
        ("DSP", UnitKind::Npu),
        ("GPU.1", UnitKind::Gpu),
    ][index];
    let address = UnitAddress::new("sim", format!("generated/{name}"));
    Unit {
        resources: BTreeSet::from([Resource::Device(address.to_string())]),
        address,
        kind,
        limits: UnitLimits::default(),
        simulated: true,
        description: Some("generated at random".to_owned()),
    }
}

/// SplitMix64: small, seedable with anything, and the same everywhere.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `[0, 1)`.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    fn log_uniform(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }

    /// In `0..count`; 0 when `count` is 0.
    fn below(&mut self, count: usize) -> usize {
        ((self.unit() * count as f64) as usize).min(count.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::Origin;

    fn spec(shape: Shape, operators: usize, units: usize, seed: u64) -> GraphSpec {
        GraphSpec { shape, operators, units, slowdown: 1.2, seed }
    }

    #[test]
    fn every_shape_and_size_is_a_valid_plannable_instance() {
        for shape in Shape::ALL {
            for operators in [1, 2, 3, 4, 5, 7, 13, 14, 100] {
                for units in 1..=MOST_UNITS {
                    let made = instance(&spec(shape, operators, units, 7));
                    assert_eq!(made.graph.len(), operators, "{shape}");
                    made.profile.validate().unwrap();
                    let request = crate::PlanRequest::new(&made.profile, &made.graph);
                    let plan = crate::plan("sequential", &request).unwrap();
                    assert!(plan.claimed > 0.0 && plan.timeline.origin == Origin::Simulated, "{shape} {operators}");
                }
            }
        }
    }

    #[test]
    fn equal_specs_give_equal_instances_and_other_seeds_do_not() {
        let make = |seed| instance(&spec(Shape::SeriesParallel, 60, 3, seed));
        assert_eq!(make(1).profile, make(1).profile);
        assert_ne!(make(1).profile.measurements, make(2).profile.measurements);
    }

    #[test]
    fn graphs_are_connected_in_the_shape_asked_for() {
        let chain = instance(&spec(Shape::Chain, 50, 2, 3)).graph;
        assert!(chain.ids().all(|id| chain.predecessors(id).len() <= 1 && chain.successors(id).len() <= 1));
        for shape in [Shape::SeriesParallel, Shape::ForkJoin, Shape::Network, Shape::Layered] {
            let graph = instance(&spec(shape, 200, 2, 3)).graph;
            let forks = graph.ids().filter(|&id| graph.successors(id).len() > 1).count();
            let joins = graph.ids().filter(|&id| graph.predecessors(id).len() > 1).count();
            assert!(forks > 5 && joins > 5, "{shape}: {forks} forks, {joins} joins");
        }
    }

    #[test]
    fn units_are_unrelated_and_some_operators_are_unsupported() {
        let made = instance(&spec(Shape::Layered, 400, 4, 5));
        let view = crate::view::CostView::new(&crate::PlanRequest::new(&made.profile, &made.graph)).unwrap();
        let ms = |id, unit| view.table.cost(id, unit).map_or(f64::INFINITY, |cost| cost.ms);
        let mut best = [0; 4];
        for id in made.graph.ids() {
            best[(0..4).min_by(|&a, &b| ms(id, a).total_cmp(&ms(id, b))).unwrap()] += 1;
        }
        assert!(best.iter().filter(|&&count| count > 20).count() >= 3, "{best:?}");
        assert!(made.graph.ids().any(|id| ms(id, 2).is_infinite()));
    }

    #[test]
    fn the_suite_is_large_enough_and_holds_the_large_ones() {
        let specs = suite(false);
        assert!(specs.len() >= 300, "{}", specs.len());
        assert!(specs.iter().any(|spec| spec.operators == 24_917 && spec.shape == Shape::Chain));
        assert!(specs.iter().any(|spec| spec.operators == 5_000 && spec.units == 5));
        let seeds: BTreeSet<u64> = specs.iter().map(|spec| spec.seed).collect();
        assert_eq!(seeds.len(), specs.len());
        let quick = suite(true);
        assert!(quick.len() > 50 && quick.iter().all(|spec| spec.operators <= 600));
    }
}
