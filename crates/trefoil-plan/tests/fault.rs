//! Whose fault the gap of `dag` to its bound is on wide graphs: the plan's, or the bound's. Graphs of 9 to 14
//! operators, some too large for the exhaustive search that `dag` makes itself, are searched until nothing is left; then the optimum lies between the two.

use trefoil_plan::dag::{search_everything, solve};
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::{Budget, PlanOptions, PlanRequest, Problem, model_bound, thorough_bound};

/// Sums of relative distances.
#[derive(Default)]
struct Shares {
    graphs: u32,
    unknown: u32,
    /// Plan over bound, plan over optimum, optimum over bound and over the quick bound.
    gap: f64,
    plan: f64,
    bound: f64,
    quick: f64,
    worst: [f64; 2],
}

fn long() -> bool {
    std::env::var("TREFOIL_LONG_TESTS").is_ok_and(|value| value == "1")
}

#[test]
fn the_optimum_lies_between_bound_and_plan() {
    let (seeds, nodes, steps) = if long() { (6, 20_000_000, 1_000_000) } else { (1, 400_000, 100_000) };
    let mut known = 0;
    for shape in [Shape::ForkJoin, Shape::Layered, Shape::SeriesParallel] {
        for units in 2..=4 {
            let mut shares = Shares::default();
            for seed in 0..seeds {
                let operators = 9 + seed as usize % 6;
                let spec = GraphSpec {
                    shape,
                    operators,
                    units,
                    slowdown: if seed % 3 == 0 { 0.0 } else { 1.25 },
                    seed: 900 + seed,
                };
                let made = instance(&spec);
                let problem = Problem::from_request(&PlanRequest::new(&made.profile, &made.graph)).unwrap();
                let options = PlanOptions { budget: Budget::Steps(steps), ..PlanOptions::default() };
                let planned = solve(&problem, &[], &options).unwrap();
                let best = search_everything(&problem, &planned, nodes).unwrap();
                let bound = thorough_bound(&problem).value;
                let (plan, optimum) = (planned.evaluation.makespan_ms, best.evaluation.makespan_ms);
                assert!(
                    bound <= optimum * (1.0 + 1e-9) && optimum <= plan * (1.0 + 1e-9),
                    "{spec}: {bound} {optimum} {plan}"
                );
                if !best.exact {
                    shares.unknown += 1;
                    continue;
                }
                shares.graphs += 1;
                shares.gap += plan / bound - 1.0;
                shares.plan += plan / optimum - 1.0;
                shares.bound += optimum / bound - 1.0;
                shares.quick += optimum / model_bound(&problem).value - 1.0;
                shares.worst = [shares.worst[0].max(plan / optimum - 1.0), shares.worst[1].max(optimum / bound - 1.0)];
            }
            known += shares.graphs;
            let mean = |sum: f64| 100.0 * sum / f64::from(shares.graphs.max(1));
            println!(
                "{shape} on {units}: {} graphs ({} not searched to the end): plan over bound {:.2} %, plan over optimum {:.2} % ({:.1} %), optimum over bound {:.2} % ({:.1} %), over the quick one {:.2} %",
                shares.graphs,
                shares.unknown,
                mean(shares.gap),
                mean(shares.plan),
                100.0 * shares.worst[0],
                mean(shares.bound),
                100.0 * shares.worst[1],
                mean(shares.quick),
            );
        }
    }
    assert!(known > 0);
}

/// Larger graphs, whose optimum nobody knows: what a search many times as long still gains is the plan's fault at least, and what
/// is left above the bound is the bound's fault at least as far as longer searches gain nothing.
#[test]
fn longer_searches_gain_little_of_the_gap() {
    let (seeds, short, far) = if long() { (3, 4_000_000, 80_000_000) } else { (1, 50_000, 100_000) };
    for shape in [Shape::ForkJoin, Shape::Layered] {
        for operators in [40, 120] {
            let (mut gap, mut gained) = (0.0, 0.0);
            for seed in 0..seeds {
                let spec =
                    GraphSpec { shape, operators, units: 3, slowdown: [0.0, 1.25][seed % 2], seed: 700 + seed as u64 };
                let made = instance(&spec);
                let problem = Problem::from_request(&PlanRequest::new(&made.profile, &made.graph)).unwrap();
                let within = |steps| PlanOptions { budget: Budget::Steps(steps), ..PlanOptions::default() };
                let value = |steps| solve(&problem, &[], &within(steps)).unwrap().evaluation.makespan_ms;
                let (first, later) = (value(short), value(far));
                let bound = thorough_bound(&problem).value;
                assert!(bound <= later.min(first) * (1.0 + 1e-9), "{spec}: {bound}, {first}, {later}");
                gap += first / bound - 1.0;
                gained += first / later - 1.0;
            }
            let mean = |sum: f64| 100.0 * sum / seeds as f64;
            // Steps are counted, so this is the same everywhere; 1.5 % was seen.
            assert!(mean(gained) < 3.0, "{shape} of {operators}: {gained}");
            println!(
                "{shape} of {operators} on 3: plan over bound {:.2} %, plan over that of a search {} times as long {:.2} %",
                mean(gap),
                far / short,
                mean(gained)
            );
        }
    }
}
