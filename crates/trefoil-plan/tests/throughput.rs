//! Pipelines of a model against every assignment of small chains, and the period's bound.

use proptest::prelude::*;
use trefoil_core::Objective;
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::testing::{ProfileBuilder, chain};
use trefoil_plan::{PlanRequest, plan};

/// The shortest period of a chain over all assignments: the busiest unit's work for one item.
fn brute_force(ms: &[Vec<f64>], transfer: f64) -> f64 {
    let (count, units) = (ms[0].len(), ms.len());
    (0..units.pow(count as u32))
        .map(|code| {
            let unit = |at: usize| code / units.pow(at as u32) % units;
            let mut load = vec![0.0; units];
            for at in 0..count {
                let moved = if at > 0 && unit(at) != unit(at - 1) { transfer } else { 0.0 };
                load[unit(at)] += ms[unit(at)][at] + moved;
            }
            load.into_iter().fold(0.0, f64::max)
        })
        .fold(f64::INFINITY, f64::min)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn periods_lie_between_the_bound_and_one_unit_and_near_the_best(
        count in 2usize..8,
        numbers in proptest::collection::vec(0.5..5.0f64, 16),
        transfer in 0.0..0.5f64,
    ) {
        // The last operator takes no time: dispatch is free, and segments cost their operators' sum.
        let ms: Vec<Vec<f64>> = (0..2).map(|unit| [&numbers[unit * 8..][..count], &[0.0]].concat()).collect();
        let graph = chain(count + 1, 64);
        let mut builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(64, transfer)]);
        for (unit, row) in ms.iter().enumerate() {
            builder = builder.operators(unit, &row.iter().copied().map(Some).collect::<Vec<_>>());
        }
        let request = PlanRequest { objective: Objective::Throughput, ..PlanRequest::new(&builder.profile, &graph) };
        let found = plan("pipeline", &request).unwrap();
        let best = brute_force(&ms, transfer);
        let alone = ms.iter().map(|row| row.iter().sum::<f64>()).fold(f64::INFINITY, f64::min);
        prop_assert!(found.model_bound.unwrap() <= best * (1.0 + 1e-9));
        prop_assert!(found.claimed <= alone * (1.0 + 1e-9), "{} and {alone}", found.claimed);
        prop_assert!(found.claimed <= best * 1.1 + 1e-9, "{} and {best}", found.claimed);
        prop_assert!(found.claimed >= found.model_bound.unwrap() * (1.0 - 1e-9));
    }
}

#[test]
fn streams_are_planned_on_every_shape() {
    for shape in Shape::ALL {
        let made = instance(&GraphSpec { shape, operators: 120, units: 3, slowdown: 1.2, seed: 9 });
        let request = PlanRequest { objective: Objective::Throughput, ..PlanRequest::new(&made.profile, &made.graph) };
        let found = plan("auto", &request).unwrap();
        assert_eq!(found.objective, Objective::Throughput);
        assert!(found.claimed < found.simulated_ms, "{shape}: units work on different items");
        assert!(found.gap.is_some_and(|gap| gap < 2.6), "{shape}: {:?}", found.gap);
    }
}
