//! `sequential` against slow obvious oracles: all assignments, and Bellman-Ford on BIDENT's explicit graph.

use proptest::prelude::*;
use trefoil_core::{Objective, Outcome, Samples, UnitKind};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{PlanRequest, plan, sequential_dp};

/// A random instance: row-major n × k arrays.
#[derive(Debug, Clone)]
struct Instance {
    k: usize,
    w: Vec<f64>,
    h2d: Vec<f64>,
    d2h: Vec<f64>,
    accelerator: Vec<bool>,
}

fn instances(most: usize, units: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Instance> {
    (1..=most, units).prop_flat_map(|(n, k)| {
        let number = || proptest::collection::vec(0.0..10.0f64, n * k);
        let absent = proptest::collection::vec(0u8..5, n * k);
        (number(), absent, number(), number(), proptest::collection::vec(any::<bool>(), k)).prop_map(
            move |(mut w, absent, h2d, d2h, accelerator)| {
                for (at, value) in w.iter_mut().enumerate() {
                    // One unit in each row always runs it.
                    if absent[at] == 0 && at % k != (at / k) % k {
                        *value = f64::INFINITY;
                    }
                }
                Instance { k, w, h2d, d2h, accelerator }
            },
        )
    })
}

/// The cost of one assignment by the letter of eq. 1.
fn cost_of(instance: &Instance, assignment: &[usize]) -> f64 {
    let Instance { k, w, h2d, d2h, accelerator } = instance;
    let last = assignment.len() - 1;
    let mut total = 0.0;
    for (i, &j) in assignment.iter().enumerate() {
        if i == 0 && accelerator[j] {
            total += h2d[j];
        }
        if i > 0 && assignment[i - 1] != j {
            let from = assignment[i - 1];
            if accelerator[j] {
                total += h2d[i * k + j];
            }
            if accelerator[from] {
                total += d2h[(i - 1) * k + from];
            }
        }
        total += w[i * k + j];
        if i == last && accelerator[j] {
            total += d2h[i * k + j];
        }
    }
    total
}

fn every_assignment(n: usize, k: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..k.pow(n as u32)).map(move |code| (0..n).map(|i| code / k.pow(i as u32) % k).collect())
}

/// BIDENT's graph written out: start, n·k nodes, end; edges relaxed until nothing changes.
fn bellman_ford(instance: &Instance) -> f64 {
    let Instance { k, w, h2d, d2h, accelerator } = instance;
    let n = w.len() / k;
    let node = |i: usize, j: usize| 1 + i * k + j;
    let end = 1 + n * k;
    let mut edges: Vec<(usize, usize, f64)> = Vec::new();
    for j in 0..*k {
        edges.push((0, node(0, j), if accelerator[j] { h2d[j] } else { 0.0 } + w[j]));
        edges.push((node(n - 1, j), end, if accelerator[j] { d2h[(n - 1) * k + j] } else { 0.0 }));
    }
    for i in 1..n {
        for from in 0..*k {
            for to in 0..*k {
                let mut weight = w[i * k + to];
                if from != to && accelerator[to] {
                    weight += h2d[i * k + to];
                }
                if from != to && accelerator[from] {
                    weight += d2h[(i - 1) * k + from];
                }
                edges.push((node(i - 1, from), node(i, to), weight));
            }
        }
    }
    let mut distance = vec![f64::INFINITY; end + 1];
    distance[0] = 0.0;
    loop {
        let mut changed = false;
        for &(from, to, weight) in &edges {
            if distance[from] + weight < distance[to] {
                distance[to] = distance[from] + weight;
                changed = true;
            }
        }
        if !changed {
            return distance[end];
        }
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()))
}

proptest! {
    #[test]
    fn agrees_with_all_assignments(instance in instances(5, 1..=5)) {
        let n = instance.w.len() / instance.k;
        let best = every_assignment(n, instance.k).map(|a| cost_of(&instance, &a)).fold(f64::INFINITY, f64::min);
        let (cost, assignment) =
            sequential_dp(&instance.w, &instance.h2d, &instance.d2h, &instance.accelerator, instance.k);
        prop_assert!(close(cost, best), "{cost} instead of {best}");
        prop_assert!(close(cost_of(&instance, &assignment), cost), "the assignment does not cost what is claimed");
    }

    #[test]
    fn agrees_with_bellman_ford(instance in instances(40, 1..=6)) {
        let (cost, assignment) =
            sequential_dp(&instance.w, &instance.h2d, &instance.d2h, &instance.accelerator, instance.k);
        prop_assert!(close(cost, bellman_ford(&instance)));
        prop_assert!(close(cost_of(&instance, &assignment), cost));
    }

    /// Through the profile: h2d and d2h as measured parts, latency and energy.
    #[test]
    fn plans_claim_the_papers_sum(
        w in proptest::collection::vec(0.1..10.0f64, 12),
        h2d in proptest::collection::vec(0.0..3.0f64, 12),
        d2h in proptest::collection::vec(0.0..3.0f64, 12),
        watts in proptest::collection::vec(1.0..30.0f64, 3),
        energy in any::<bool>(),
    ) {
        let graph = chain(4, 64);
        let mut builder = ProfileBuilder::new(&graph).unit("a:CPU", UnitKind::Cpu).unit("a:GPU", UnitKind::Gpu).unit("a:NPU", UnitKind::Npu);
        for unit in 0..3 {
            let column: Vec<_> = (0..4).map(|i| Some(w[i * 3 + unit])).collect();
            builder = builder.operators(unit, &column).watts(unit, watts[unit]);
        }
        builder = builder.transfers(&[(0, 0.5)]);
        for measurement in &mut builder.profile.measurements {
            let trefoil_core::Subject::Operator { signature } = &measurement.subject else { continue };
            let row = u32::from_str_radix(&signature.0, 16).unwrap() as usize;
            let unit = ["a:CPU", "a:GPU", "a:NPU"].iter().position(|u| *u == measurement.units[0].to_string()).unwrap();
            if let Outcome::Ok { timing, .. } = &mut measurement.outcome && unit > 0 {
                timing.h2d = Some(Samples::exactly(h2d[row * 3 + unit]));
                timing.d2h = Some(Samples::exactly(d2h[row * 3 + unit]));
            }
        }
        let objective = if energy { Objective::Energy } else { Objective::Latency };
        let request = PlanRequest { objective, ..PlanRequest::new(&builder.profile, &graph) };
        let found = plan("sequential", &request).unwrap();
        let scaled = |values: &[f64]| -> Vec<f64> {
            values.iter().enumerate().map(|(at, v)| if energy { v * watts[at % 3] / 1e3 } else { *v }).collect()
        };
        let instance = Instance { k: 3, w: scaled(&w), h2d: scaled(&h2d), d2h: scaled(&d2h), accelerator: vec![false, true, true] };
        let best = every_assignment(4, 3).map(|a| cost_of(&instance, &a)).fold(f64::INFINITY, f64::min);
        prop_assert!(close(found.claimed, best), "{} instead of {best}", found.claimed);
        let own = found.own.as_ref().unwrap();
        prop_assert!(own.exact && own.gap == Some(0.0));
        found.check(&[&graph]).unwrap();
        found.check_costs(&builder.profile.index()).unwrap();
    }
}

#[test]
fn no_unit_for_an_operator_is_infinite() {
    let inf = f64::INFINITY;
    assert_eq!(sequential_dp(&[1.0, 1.0, inf, inf], &[0.0; 4], &[0.0; 4], &[false; 2], 2), (inf, Vec::new()));
    assert_eq!(sequential_dp(&[], &[], &[], &[false; 3], 3), (0.0, Vec::new()));
}

#[test]
fn ties_keep_the_unit() {
    let (cost, assignment) = sequential_dp(&[1.0; 8], &[0.0; 8], &[0.0; 8], &[false; 2], 2);
    assert_eq!((cost, assignment), (4.0, vec![0; 4]));
}

/// A host-less pair of accelerators and a backend that tells no h2d: the profile's transfers stand in.
#[test]
fn untold_transfers_come_from_the_profile() {
    let graph = chain(2, 100);
    let builder = ProfileBuilder::new(&graph)
        .unit("a:CPU", UnitKind::Cpu)
        .unit("a:GPU", UnitKind::Gpu)
        .operators(0, &[Some(9.0), Some(1.0)])
        .operators(1, &[Some(1.0), Some(9.0)])
        .transfer(0, 1, 0, 0.25)
        .transfer(1, 0, 0, 0.5);
    let found = plan("sequential", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    // H2D of the input (0.25), op0 on the GPU, D2H (0.5), op1 on the CPU.
    assert!(close(found.claimed, 2.75), "{}", found.claimed);
    assert_eq!(found.segments.len(), 2);
}

/// The paper lets skip connections ride free; the plan's own price does not.
#[test]
fn the_claim_hides_skips_and_the_simulation_shows_them() {
    let graph = graph(&[10, 10, 10], &[(0, 1), (1, 2), (0, 2)]);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(1.0), Some(1.0), Some(9.0)])
        .operators(1, &[Some(9.0), Some(9.0), Some(1.0)])
        .transfers(&[(10, 0.5)]);
    let found = plan("sequential", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    assert!(close(found.claimed, 3.0), "two CPUs: the paper's transfers are free, {}", found.claimed);
    assert_eq!(found.crossings(), 2);
    let transfers: f64 = found.tasks.iter().map(|task| task.cost.ms).sum();
    assert!(close(found.simulated_ms, transfers));
    assert!(found.simulated_ms > 3.0);
}
