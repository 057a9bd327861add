//! BIDENT's phases against a plain re-derivation: branches by walking paths, all assignments of each branch, the paper's sum.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use support::{Dice, close};
use trefoil_core::{Objective, OperatorClass};
use trefoil_plan::phases::{PhaseCosts, Phases, phases_literal};
use trefoil_plan::testing::{ProfileBuilder, graph};
use trefoil_plan::{Factors, PlanRequest, Problem, plan};

struct Random {
    jobs: usize,
    edges: BTreeSet<(u32, u32)>,
    costs: PhaseCosts,
    factors: Factors,
    factor: Vec<Vec<f64>>,
}

fn random(dice: &mut Dice) -> Random {
    let jobs = 1 + dice.below(7);
    let units = 2 + dice.below(2);
    let mut edges = BTreeSet::new();
    for to in 1..jobs as u32 {
        for from in 0..to {
            if dice.roll() < 0.35 {
                edges.insert((from, to));
            }
        }
    }
    let mut table = |scale: f64| -> Vec<f64> { (0..jobs * units).map(|_| scale * dice.roll()).collect() };
    let (mut w, h2d, d2h) = (table(1.0), table(0.3), table(0.3));
    for job in 0..jobs {
        let keep = dice.below(units);
        for unit in (0..units).filter(|&unit| unit != keep) {
            if dice.roll() < 0.15 {
                w[job * units + unit] = f64::INFINITY;
            }
        }
    }
    let accelerator = (0..units).map(|unit| unit > 0).collect();
    let mut factors = Factors::none(units);
    let mut factor = vec![vec![1.0; units]; units];
    for (slowed, row) in factor.iter_mut().enumerate() {
        for (other, factor) in row.iter_mut().enumerate().filter(|(other, _)| *other != slowed) {
            *factor = 1.0 + dice.roll();
            factors.set_all(slowed, other, *factor);
        }
    }
    Random { jobs, edges, costs: PhaseCosts { w, h2d, d2h, accelerator }, factors, factor }
}

/// Phase of a head by recursion over everything before it.
fn phase(job: u32, before: &dyn Fn(u32) -> Vec<u32>, heads: &dyn Fn(u32) -> bool) -> usize {
    if heads(job) {
        before(job).into_iter().map(|from| phase(from, before, heads) + 1).max().unwrap_or(0)
    } else {
        phase(before(job)[0], before, heads)
    }
}

/// Branches by walking: a job heads a branch unless it has one predecessor, whose only successor it is.
fn branches(jobs: usize, edges: &BTreeSet<(u32, u32)>) -> BTreeMap<usize, Vec<Vec<u32>>> {
    let before = |job: u32| -> Vec<u32> { edges.iter().filter(|edge| edge.1 == job).map(|edge| edge.0).collect() };
    let after = |job: u32| -> Vec<u32> { edges.iter().filter(|edge| edge.0 == job).map(|edge| edge.1).collect() };
    let heads = |job: u32| before(job).len() != 1 || after(before(job)[0]).len() != 1;
    let mut result: BTreeMap<usize, Vec<Vec<u32>>> = BTreeMap::new();
    for head in (0..jobs as u32).filter(|&job| heads(job)) {
        let mut branch = vec![head];
        while let [next] = after(*branch.last().unwrap()).as_slice()
            && !heads(*next)
        {
            branch.push(*next);
        }
        result.entry(phase(head, &before, &heads)).or_default().push(branch);
    }
    result
}

#[test]
fn literal_phases_are_the_papers_sum() {
    let mut dice = Dice(4);
    for number in 0..2000 {
        let instance = random(&mut dice);
        let units = instance.costs.accelerator.len();
        let before: Vec<Vec<u32>> = (0..instance.jobs as u32)
            .map(|job| instance.edges.iter().filter(|edge| edge.1 == job).map(|edge| edge.0).collect())
            .collect();
        let after: Vec<Vec<u32>> = (0..instance.jobs as u32)
            .map(|job| instance.edges.iter().filter(|edge| edge.0 == job).map(|edge| edge.1).collect())
            .collect();
        let order: Vec<u32> = (0..instance.jobs as u32).collect();
        let partition =
            Phases::new(&order, |job| before[job as usize].as_slice(), |job| after[job as usize].as_slice());
        let expected = branches(instance.jobs, &instance.edges);
        assert_eq!(partition.phases.len(), expected.len());
        for (found, wanted) in partition.phases.iter().zip(expected.values()) {
            let sorted = |list: &[Vec<u32>]| list.iter().cloned().collect::<BTreeSet<_>>();
            assert_eq!(sorted(found), sorted(wanted), "{number}");
        }
        let class = vec![OperatorClass::Memory; instance.jobs];
        let (claimed, unit, unslowed) = phases_literal(&partition, &instance.costs, &instance.factors, &class);
        // The path cost of a branch under an assignment, slowed by the given other units.
        let path = |branch: &[u32], assignment: &[usize], others: &BTreeSet<usize>| -> f64 {
            let at = |table: &[f64], job: u32, unit: usize| table[job as usize * units + unit];
            let pays = |table: &[f64], job: u32, unit: usize| if unit > 0 { at(table, job, unit) } else { 0.0 };
            let mut sum = pays(&instance.costs.h2d, branch[0], assignment[0]);
            for (place, (&job, &here)) in branch.iter().zip(assignment).enumerate() {
                if place > 0 && assignment[place - 1] != here {
                    sum += pays(&instance.costs.d2h, branch[place - 1], assignment[place - 1]);
                    sum += pays(&instance.costs.h2d, job, here);
                }
                let slow = others.iter().filter(|&&other| other != here).map(|&other| instance.factor[here][other]);
                sum += at(&instance.costs.w, job, here) * slow.reduce(f64::max).unwrap_or(1.0);
            }
            sum + pays(&instance.costs.d2h, *branch.last().unwrap(), *assignment.last().unwrap())
        };
        let (mut total, mut least_total) = (0.0, 0.0);
        for phase in &partition.phases {
            let own: Vec<Vec<usize>> =
                phase.iter().map(|branch| branch.iter().map(|&job| unit[job as usize] as usize).collect()).collect();
            let (mut worst, mut least_worst): (f64, f64) = (0.0, 0.0);
            for (number, (branch, assignment)) in phase.iter().zip(&own).enumerate() {
                // Each branch is mapped at its least, alone.
                let mut least = f64::INFINITY;
                for code in 0..units.pow(branch.len() as u32) {
                    let digits: Vec<usize> =
                        (0..branch.len()).map(|place| code / units.pow(place as u32) % units).collect();
                    least = least.min(path(branch, &digits, &BTreeSet::new()));
                }
                assert!(close(path(branch, assignment, &BTreeSet::new()), least), "{number}");
                let others: BTreeSet<usize> = own
                    .iter()
                    .enumerate()
                    .filter(|(other, _)| *other != number)
                    .flat_map(|(_, assignment)| assignment.iter().copied())
                    .collect();
                worst = worst.max(path(branch, assignment, &others));
                least_worst = least_worst.max(least);
            }
            total += worst;
            least_total += least_worst;
        }
        assert!(close(claimed, total), "{number}: {claimed} and {total}");
        assert!(close(unslowed, least_total), "{number}: {unslowed} and {least_total}");
    }
}

/// Two equal branches that both run best on one unit: the formula counts them as parallel, the simulator does not.
#[test]
fn branches_may_claim_the_same_unit_and_the_simulation_shows_it() {
    let graph = graph(&[1, 1, 1, 1], &[(0, 1), (0, 2), (1, 3), (2, 3)]);
    let times = |ms: f64| [Some(1.0), Some(ms), Some(ms), Some(1.0)];
    let builder =
        ProfileBuilder::new(&graph).cpus(2).transfers(&[(0, 0.0)]).operators(0, &times(4.0)).operators(1, &times(6.0));
    let request = PlanRequest::new(&builder.profile, &graph);
    let literal = plan("phases", &request).unwrap();
    assert!(close(literal.claimed, 6.0) && literal.claimed < literal.simulated_ms, "{}", literal.claimed);
    let notes = literal.notes.join("\n");
    assert!(notes.contains("3 phases, 1 of them concurrent"), "{notes}");
    let exclusive = plan("phases-exclusive", &request).unwrap();
    assert!(exclusive.simulated_ms <= 8.0 + 1e-9, "{}", exclusive.simulated_ms);
    let problem = Problem::from_request(&request).unwrap();
    assert_eq!(Phases::of(&problem).phases, vec![vec![vec![0]], vec![vec![1], vec![2]], vec![vec![3]]]);
}

#[test]
fn without_concurrent_phases_the_claim_is_sequential() {
    let graph = trefoil_plan::testing::chain(9, 1000);
    let mut dice = Dice(8);
    let mut builder = ProfileBuilder::new(&graph).cpus(3).transfers(&[(0, 0.01), (1000, 0.2)]);
    for unit in 0..3 {
        let ms: Vec<Option<f64>> = (0..9).map(|_| Some(dice.roll())).collect();
        builder = builder.operators(unit, &ms).watts(unit, 4.0 + unit as f64);
    }
    for objective in [Objective::Latency, Objective::Energy] {
        let request = PlanRequest { objective, ..PlanRequest::new(&builder.profile, &graph) };
        let (sequential, phases) = (plan("sequential", &request).unwrap(), plan("phases", &request).unwrap());
        assert!(close(sequential.claimed, phases.claimed), "{} {}", sequential.claimed, phases.claimed);
    }
}
