//! Bounds on graphs that fork and join, where whole jobs, heads and tails count, against the exhaustive search (which has its own oracle in
//! `dag.rs`).

mod support;

use support::{Dice, Instance, Shape};
use trefoil_plan::dag::solve;
use trefoil_plan::problem::Goal;
use trefoil_plan::{PlanOptions, model_bound, thorough_bound};

/// One or two blocks of a fork, branches of one or two jobs, and a join; ends may be missing.
fn forked(dice: &mut Dice, number: usize) -> Instance {
    let shape = Shape {
        jobs: 4 + dice.below(5),
        units: 2 + usize::from(dice.roll() < 0.4),
        edges: 0.0,
        transfers: [0.0, 0.2, 0.8][dice.below(3)],
        slowdown: number.is_multiple_of(2),
        speedup: number.is_multiple_of(6),
        shared: number.is_multiple_of(5),
        requests: 1,
    };
    let mut instance = Instance::random(shape, dice);
    let last = shape.jobs - 1;
    let (fork, join) = (dice.roll() < 0.8, dice.roll() < 0.8);
    let mut readers = vec![Vec::new(); shape.jobs];
    let (mut at, mut hub) = (usize::from(fork), fork.then_some(0));
    while at < last {
        readers.iter_mut().take(hub.map_or(0, |hub| hub + 1)).skip(hub.unwrap_or(0)).for_each(|list| list.push(at));
        let long = at + 1 < last && dice.roll() < 0.4;
        let tail = if long { at + 1 } else { at };
        if long {
            readers[at].push(tail);
        }
        at = tail + 1;
        // A job in the middle that everything passes through.
        if at + 1 < last && dice.roll() < 0.15 && (hub.is_some() || tail == 0) {
            let open: Vec<usize> = (0..at).filter(|&job| readers[job].is_empty()).collect();
            for job in open {
                readers[job].push(at);
            }
            hub = Some(at);
            at += 1;
        } else if join {
            readers[tail].push(last);
        }
    }
    if !join {
        readers.iter_mut().take(hub.map_or(0, |hub| hub + 1)).skip(hub.unwrap_or(0)).for_each(|list| list.push(last));
    }
    let mut tensors = instance.tensors.into_iter().filter(|tensor| tensor.maker.is_some());
    instance.tensors = readers
        .into_iter()
        .filter_map(|mut readers| {
            readers.sort_unstable();
            readers.dedup();
            let output = readers.is_empty();
            tensors.next().map(|tensor| support::Tensor { readers, output, ..tensor })
        })
        .collect();
    if number % 4 == 3 { instance.limited(dice) } else { instance }
}

#[test]
fn no_bound_is_above_the_optimum_of_forked_graphs() {
    let mut dice = Dice(2_026);
    let rounds = if std::env::var("TREFOIL_LONG_TESTS").is_ok_and(|value| value == "1") { 6_000 } else { 250 };
    let (mut known, mut gap, mut met) = (0u32, 0.0, 0);
    for number in 0..rounds {
        let instance = forked(&mut dice, number);
        for goal in [Goal::Makespan, Goal::Energy] {
            let problem = instance.problem().with_goal(goal).unwrap();
            let found = solve(&problem, &[], &PlanOptions::default()).unwrap();
            if !found.exact || found.evaluation.score.excess_bytes > 0.0 {
                continue;
            }
            let optimum = found.evaluation.score.value;
            for bound in [model_bound(&problem), thorough_bound(&problem)] {
                assert!(
                    bound.value <= optimum * (1.0 + 1e-9) + 1e-12,
                    "{number} {goal:?}: {bound:?} above {optimum}: {instance:?}"
                );
            }
            if goal == Goal::Makespan {
                let bound = model_bound(&problem).value;
                known += 1;
                gap += optimum / bound - 1.0;
                met += u32::from(bound >= optimum * (1.0 - 1e-9));
            }
        }
    }
    let mean = 100.0 * gap / f64::from(known);
    println!("{known} optima are {mean:.2} % above the bound on average; {met} meet it");
    assert!(f64::from(known) > 0.8 * rounds as f64 && mean < 6.0, "{known} known, {mean} %");
}
