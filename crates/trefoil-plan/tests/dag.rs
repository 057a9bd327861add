//! The shared problem, its evaluator, exact search, bounds and `dag`, against exhaustive search by an independent simulator.

mod support;

use support::{Dice, Instance, Shape, Task, close};
use trefoil_plan::dag::{Solution, solve};
use trefoil_plan::problem::{Goal, Step};
use trefoil_plan::testing::{ProfileBuilder, graph};
use trefoil_plan::{
    Budget, PlanOptions, PlanRequest, Problem, SimulationModel, model_bound, plan, plan_with, simulate,
};

/// `TREFOIL_LONG_TESTS=1` asks for ten times as many instances.
fn rounds(count: usize) -> usize {
    if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { 10 * count } else { count }
}

fn shape(number: usize, dice: &mut Dice, jobs: usize) -> Shape {
    Shape {
        jobs,
        units: 2 + usize::from(number.is_multiple_of(3)),
        edges: [0.2, 0.5, 0.9][number % 3],
        transfers: [0.0, 0.3, 1.5][dice.below(3)],
        slowdown: number.is_multiple_of(2),
        speedup: number.is_multiple_of(8),
        shared: number.is_multiple_of(5),
        requests: 1,
    }
}

fn options(steps: u64) -> PlanOptions {
    PlanOptions { budget: Budget::Steps(steps), ..PlanOptions::default() }
}

/// A random assignment with a random order of its tasks.
fn random_schedule(instance: &Instance, dice: &mut Dice) -> (Vec<usize>, Vec<Task>, Vec<usize>) {
    let unit: Vec<usize> = instance
        .ms
        .iter()
        .map(|ms| {
            loop {
                let unit = dice.below(ms.len());
                if ms[unit].is_some() {
                    return unit;
                }
            }
        })
        .collect();
    let tasks = instance.tasks(&unit);
    let mut order: Vec<usize> = Vec::new();
    while order.len() < tasks.len() {
        let ready: Vec<usize> = (0..tasks.len())
            .filter(|task| !order.contains(task) && tasks[*task].waits.iter().all(|before| order.contains(before)))
            .collect();
        order.push(ready[dice.below(ready.len())]);
    }
    (unit, tasks, order)
}

#[test]
fn the_evaluator_agrees_with_an_independent_simulator() {
    let mut dice = Dice(11);
    for number in 0..rounds(3000) {
        let jobs = 1 + dice.below(9);
        let mut shape = shape(number, &mut dice, jobs);
        shape.requests = 1 + number % 3;
        shape.requests = shape.requests.min(jobs);
        let instance = Instance::random(shape, &mut dice);
        let problem = instance.problem();
        let (unit, tasks, order) = random_schedule(&instance, &mut dice);
        let (makespan, joules, completion) = instance.simulate(&tasks, &order);
        let found = problem.evaluate(&Instance::schedule(&unit, &tasks, &order)).unwrap();
        assert!(close(found.makespan_ms, makespan), "{number}: {} and {makespan}", found.makespan_ms);
        assert!(close(found.energy_j.unwrap(), joules), "{number}: {:?} and {joules}", found.energy_j);
        assert!(
            found.completion_ms.iter().zip(&completion).all(|(a, b)| close(*a, *b)),
            "{number}: {:?} and {completion:?}",
            found.completion_ms
        );
    }
}

/// The least value of a goal over everything that can happen, waiting included, with deadlines first: `(late, tardiness, value)`.
fn brute_force(instance: &Instance, goal: Goal) -> (f64, f64, f64) {
    let mut best = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    let mut offer = |makespan: f64, joules: f64, completion: &[f64]| {
        let (mut late, mut tardiness, mut weighted, mut weights) = (0.0, 0.0, 0.0, 0.0);
        for (&(release, deadline, weight), &end) in instance.requests.iter().zip(completion) {
            if deadline.is_some_and(|deadline| end > deadline + 1e-12) {
                late += weight;
                tardiness += weight * (end - deadline.unwrap());
            }
            weighted += weight * (end - release).max(0.0);
            weights += weight;
        }
        let value = match goal {
            Goal::Makespan => makespan,
            Goal::Energy => joules,
            Goal::WeightedCompletion => weighted / weights,
        };
        let found = (late, tardiness, value);
        let less = |a: f64, b: f64| a < b - 1e-10;
        if less(found.0, best.0)
            || (!less(best.0, found.0) && (less(found.1, best.1) || (!less(best.1, found.1) && less(found.2, best.2))))
        {
            best = found;
        }
    };
    if instance.problem().gains_by_waiting() {
        instance.all_placements(&mut |tasks| instance.every_course(tasks, &mut offer));
    } else {
        instance.all_schedules(&mut |_, tasks, order| {
            let (makespan, joules, completion) = instance.simulate(tasks, order);
            offer(makespan, joules, &completion);
        });
    }
    best
}

/// Solves and compares with exhaustive search.
fn check_exact(instance: &Instance, goal: Goal, what: &str) -> Solution {
    let problem = instance.problem().with_goal(goal).unwrap();
    let found = solve(&problem, &[], &options(2_000_000)).unwrap();
    let (late, tardiness, value) = brute_force(instance, goal);
    let score = found.evaluation.score;
    assert!(found.exact && found.exact_at_once, "{what}: not exact");
    let same = close(score.late, late) && close(score.tardiness_ms, tardiness) && close(score.value, value);
    assert!(same, "{what} {goal:?}: {score:?} and ({late}, {tardiness}, {value})\n{instance:?}");
    let bound = model_bound(&problem).value;
    assert!(bound <= value * (1.0 + 1e-9) + 1e-12, "{what} {goal:?}: bound {bound} above {value}");
    let again = problem.evaluate(&found.schedule).unwrap();
    assert_eq!(again.score, score);
    found
}

#[test]
fn small_problems_are_solved_exactly() {
    let mut dice = Dice(5);
    let (mut bounds_met, mut waits) = (0, 0);
    for number in 0..rounds(1500) {
        let jobs = 1 + dice.below(3);
        let instance = Instance::random(shape(number, &mut dice, jobs), &mut dice);
        let found = check_exact(&instance, Goal::Makespan, &number.to_string());
        bounds_met += usize::from(close(model_bound(&instance.problem()).value, found.evaluation.score.value));
        // What orders alone can express.
        let mut least = f64::INFINITY;
        instance.all_schedules(&mut |_, tasks, order| least = least.min(instance.simulate(tasks, order).0));
        assert!(found.evaluation.score.value <= least * (1.0 + 1e-9), "{number}: {least}");
        waits += usize::from(found.evaluation.score.value < least * (1.0 - 1e-9));
        if number.is_multiple_of(3) {
            check_exact(&instance, Goal::Energy, &number.to_string());
        }
    }
    println!(
        "the bound alone proves {bounds_met} of {} optimal; in {waits} something waits that could start",
        rounds(1500)
    );
    assert!(waits > 0);
}

#[test]
fn four_jobs_are_solved_exactly() {
    let mut dice = Dice(77);
    for number in 0..rounds(60) {
        let mut shape = shape(number, &mut dice, 4);
        shape.units = 2;
        let instance = Instance::random(shape, &mut dice);
        check_exact(&instance, Goal::Makespan, &number.to_string());
    }
}

#[test]
fn requests_with_arrivals_and_deadlines_are_solved_exactly() {
    let mut dice = Dice(123);
    for number in 0..rounds(400) {
        let jobs = 2 + dice.below(2);
        let mut shape = shape(number, &mut dice, jobs);
        shape.requests = 2;
        let instance = Instance::random(shape, &mut dice);
        check_exact(&instance, Goal::Makespan, &number.to_string());
        check_exact(&instance, Goal::WeightedCompletion, &number.to_string());
    }
}

#[test]
fn bounds_hold_for_random_schedules_of_larger_problems() {
    let mut dice = Dice(9);
    for number in 0..rounds(300) {
        let jobs = 10 + dice.below(50);
        let mut shape = shape(number, &mut dice, jobs);
        shape.edges = [0.02, 0.1, 0.4][number % 3];
        let instance = Instance::random(shape, &mut dice);
        let problem = instance.problem();
        let bound = model_bound(&problem).value;
        let energy = problem.clone().with_goal(Goal::Energy).unwrap();
        let energy_bound = model_bound(&energy).value;
        let found = solve(&problem, &[], &options(30_000)).unwrap();
        let score = found.evaluation.score.value;
        assert!(bound <= score * (1.0 + 1e-9), "{number}: bound {bound} above {score}");
        for _ in 0..5 {
            let (unit, tasks, order) = random_schedule(&instance, &mut dice);
            let schedule = Instance::schedule(&unit, &tasks, &order);
            let value = energy.evaluate(&schedule).unwrap();
            assert!(bound <= value.makespan_ms && energy_bound <= value.score.value * (1.0 + 1e-9), "{number}");
            assert!(
                found.evaluation.score.value <= value.makespan_ms * (1.0 + 1e-9),
                "{number}: random {} beats dag {}",
                value.makespan_ms,
                found.evaluation.score.value
            );
        }
    }
}

#[test]
fn equal_seeds_give_equal_schedules() {
    let mut dice = Dice(3);
    let mut shape = shape(2, &mut dice, 220);
    shape.edges = 0.02;
    let problem = Instance::random(shape, &mut dice).problem();
    let first = solve(&problem, &[], &options(200_000)).unwrap();
    let second = solve(&problem, &[], &options(200_000)).unwrap();
    assert_eq!(first.schedule, second.schedule);
}

/// A random graph with a profile: units with one resource each, some operators missing somewhere, transfers, slowdown.
fn profile(jobs: usize, units: usize, edges: f64, number: u64) -> (trefoil_core::OperatorGraph, ProfileBuilder) {
    let mut dice = Dice(number * 7 + 1);
    let mut pairs = Vec::new();
    for from in 0..jobs as u32 {
        for to in from + 1..jobs as u32 {
            if dice.roll() < edges {
                pairs.push((from, to));
            }
        }
    }
    let bytes: Vec<u64> = (0..jobs).map(|_| 1 + (1e6 * dice.roll()) as u64).collect();
    let graph = graph(&bytes, &pairs);
    let price = 0.4 * dice.roll();
    let mut builder = ProfileBuilder::new(&graph).cpus(units).transfers(&[(0, price * 0.1), (1_000_000, price)]);
    for unit in 0..units {
        let ms: Vec<Option<f64>> =
            (0..jobs).map(|_| (unit == 0 || dice.roll() < 0.9).then(|| 0.1 + dice.roll())).collect();
        builder = builder.operators(unit, &ms);
    }
    for slowed in 0..units {
        for other in (0..units).filter(|&other| other != slowed) {
            if number.is_multiple_of(2) {
                builder = builder.slowdown(slowed, other, 1.0 + 0.3 * dice.roll());
            }
        }
    }
    (graph, builder)
}

#[test]
fn a_schedule_costs_what_the_simulator_says_of_its_plan() {
    let mut dice = Dice(21);
    for number in 0..rounds(300) as u64 {
        let (jobs, units) = (1 + dice.below(10), 2 + dice.below(2));
        let (graph, builder) = profile(jobs, units, 0.25, number);
        let request = PlanRequest::new(&builder.profile, &graph);
        let problem = Problem::from_request(&request).unwrap();
        let unit: Vec<u32> = problem
            .jobs()
            .iter()
            .map(|job| {
                loop {
                    let unit = dice.below(units);
                    if job.ms[unit].is_finite() {
                        return unit as u32;
                    }
                }
            })
            .collect();
        let schedule = trefoil_plan::Schedule::from_jobs(&problem, unit, problem.topological());
        let value = problem.evaluate(&schedule).unwrap();
        let apart = problem.plan(&request, &schedule, "test", false).unwrap();
        apart.check(&[&graph]).unwrap();
        apart.check_costs(&builder.profile.index()).unwrap();
        assert!(close(apart.simulated_ms, value.makespan_ms), "{number}: {} {}", apart.simulated_ms, value.makespan_ms);
        assert!(close(apart.claimed, value.makespan_ms));
        let index = builder.profile.index();
        let model = SimulationModel::new(&index, &[&graph], &apart).unwrap();
        assert!(close(simulate(&apart, &model).unwrap().makespan_ms, value.makespan_ms));
        let merged = problem.plan(&request, &schedule, "test", true).unwrap();
        merged.check(&[&graph]).unwrap();
        merged.check_costs(&builder.profile.index()).unwrap();
        assert!(
            merged.simulated_ms <= apart.simulated_ms * (1.0 + 1e-9) && merged.segments.len() <= apart.segments.len()
        );
    }
}

#[test]
fn dag_is_never_worse_than_the_other_planners() {
    let (mut strict, mut all) = (0, 0);
    for number in 0..rounds(160) as u64 {
        let jobs = 2 + (number as usize * 7) % 24;
        let (graph, mut builder) =
            profile(jobs, 2 + number as usize % 2, [0.08, 0.2, 0.5][number as usize % 3], number);
        if number.is_multiple_of(4) {
            builder = builder.whole(0, jobs as f64 * 0.4);
        }
        let request = PlanRequest::new(&builder.profile, &graph);
        let ours = plan_with("dag", &request, &options(100_000)).unwrap();
        ours.check(&[&graph]).unwrap();
        ours.check_costs(&builder.profile.index()).unwrap();
        let bound = ours.model_bound.unwrap();
        assert!(bound <= ours.simulated_ms * (1.0 + 1e-9), "{number}: bound {bound} above {}", ours.simulated_ms);
        let mut best = f64::INFINITY;
        for method in ["sequential", "phases", "phases-exclusive", "interval", "single:a:CPU", "single:b:CPU"] {
            if let Ok(other) = plan_with(method, &request, &options(100_000)) {
                assert!(
                    ours.simulated_ms <= other.simulated_ms * (1.0 + 1e-9),
                    "{number}: {method} {} beats dag {}",
                    other.simulated_ms,
                    ours.simulated_ms
                );
                assert!(bound <= other.simulated_ms * (1.0 + 1e-9), "{number}: {method} beats the bound {bound}");
                best = best.min(other.simulated_ms);
            }
        }
        all += 1;
        strict += usize::from(ours.simulated_ms < best * (1.0 - 1e-9));
    }
    println!("dag strictly better than every other planner on {strict} of {all} graphs, never worse");
    assert!(strict * 3 > all);
}

#[test]
fn energy_plans_are_never_worse_than_sequential_ones() {
    for number in 0..rounds(60) as u64 {
        let (graph, builder) = profile(2 + number as usize % 12, 2 + number as usize % 2, 0.25, number);
        let mut builder = builder.watts(0, 5.0).watts(1, 12.0);
        if builder.profile.units.len() > 2 {
            builder = builder.watts(2, 8.0);
        }
        if number.is_multiple_of(2) {
            builder.profile.declared_watts.insert("idle".to_owned(), 2.0);
        }
        let request =
            PlanRequest { objective: trefoil_core::Objective::Energy, ..PlanRequest::new(&builder.profile, &graph) };
        let ours = plan_with("dag", &request, &options(60_000)).unwrap();
        for method in ["sequential", "phases", "interval", "single:a:CPU"] {
            let Ok(other) = plan(method, &request) else { continue };
            let index = builder.profile.index();
            let mut model = SimulationModel::new(&index, &[&graph], &other).unwrap();
            model.idle_watts = Some(model.idle_watts.unwrap_or(0.0));
            let joules = simulate(&other, &model).unwrap().energy_j.unwrap();
            assert!(ours.claimed <= joules * (1.0 + 1e-9), "{number}: {method} {joules} beats {}", ours.claimed);
        }
    }
}

/// Without idle power and slowdown energy is a sum, whatever overlaps: on two units a minimum cut, which is also the bound.
#[test]
fn energy_without_idling_is_a_minimum_cut() {
    for number in 0..rounds(80) as u64 {
        let (graph, builder) = profile(5 + number as usize % 60, 2, 0.1, 2 * number + 1);
        let builder = builder.watts(0, 5.0).watts(1, 12.0);
        let problem = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
        let (millijoules, _) = trefoil_plan::mincut::minimum_cut(&problem, &[5.0, 12.0]).unwrap();
        let found = solve(&problem.with_goal(Goal::Energy).unwrap(), &[], &options(10_000)).unwrap();
        let value = found.evaluation.score.value;
        assert!(found.exact && close(value, millijoules / 1e3), "{number}: {value} and {}", millijoules / 1e3);
    }
}

#[test]
fn minimum_cuts_are_the_least_sums() {
    let mut dice = Dice(31);
    for number in 0..rounds(1500) {
        let jobs = 1 + dice.below(7);
        let mut shape = shape(number, &mut dice, jobs);
        (shape.units, shape.slowdown, shape.shared) = (2, false, false);
        let instance = Instance::random(shape, &mut dice);
        let problem = instance.problem();
        let price = [0.5 + dice.roll(), 0.5 + dice.roll()];
        let (value, unit) = trefoil_plan::mincut::minimum_cut(&problem, &price).unwrap();
        let cost = |unit: &[usize]| -> f64 { instance.tasks(unit).iter().map(|task| task.ms * price[task.unit]).sum() };
        let mut best = f64::INFINITY;
        for code in 0..1usize << jobs {
            let unit: Vec<usize> = (0..jobs).map(|job| code >> job & 1).collect();
            if unit.iter().zip(&instance.ms).all(|(&unit, ms)| ms[unit].is_some()) {
                best = best.min(cost(&unit));
            }
        }
        assert!(close(value, best), "{number}: {value} and {best}");
        let unit: Vec<usize> = unit.into_iter().map(|unit| unit as usize).collect();
        assert!(close(cost(&unit), best), "{number}");
    }
}

/// Two units that each hold half of the weights, of which one would run everything faster.
#[test]
fn memory_limits_are_obeyed() {
    let mut graph = graph(&[1; 6], &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]);
    graph.operators.iter_mut().for_each(|operator| operator.weight_bytes = 100);
    let mut builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .transfers(&[(0, 0.1)])
        .operators(0, &[Some(1.0); 6])
        .operators(1, &[Some(3.0); 6]);
    builder.profile.units[0].limits.memory_bytes = Some(300);
    let request = PlanRequest::new(&builder.profile, &graph);
    let problem = Problem::from_request(&request).unwrap();
    let found = solve(&problem, &[], &options(100_000)).unwrap();
    let held = |unit: u32| found.schedule.unit.iter().filter(|&&here| here == unit).count();
    assert!(found.exact && found.evaluation.score.excess_bytes == 0.0 && held(0) == 3, "{found:?}");
    assert!(close(found.evaluation.makespan_ms, 3.0 + 9.0 + 0.1), "{}", found.evaluation.makespan_ms);
}

#[test]
fn malformed_problems_name_the_operator() {
    let instance = Instance::random(
        Shape {
            jobs: 3,
            units: 2,
            edges: 1.0,
            transfers: 1.0,
            slowdown: false,
            speedup: false,
            shared: false,
            requests: 1,
        },
        &mut Dice(1),
    );
    let sound = instance.problem();
    let again = |jobs: Vec<trefoil_plan::problem::Job>, tensors: Vec<trefoil_plan::problem::ProblemTensor>| {
        let error = Problem::new(
            sound.units().to_vec(),
            sound.resources().to_vec(),
            jobs,
            tensors,
            sound.requests().to_vec(),
            sound.factors().clone(),
            None,
        )
        .unwrap_err()
        .to_string();
        assert!(!error.contains('\n'), "{error}");
        error
    };
    let jobs = |change: &dyn Fn(&mut trefoil_plan::problem::Job)| {
        let mut jobs = sound.jobs().to_vec();
        change(&mut jobs[1]);
        again(jobs, sound.tensors().to_vec())
    };
    for error in [
        jobs(&|job| job.ms[0] = f64::NAN),
        jobs(&|job| job.ms[1] = -1.0),
        jobs(&|job| job.ms.fill(f64::INFINITY)),
        jobs(&|job| job.request = 7),
        jobs(&|job| job.ms.truncate(1)),
    ] {
        assert!(error.contains("operator `op1`"), "{error}");
    }
    let tensors = |change: &dyn Fn(&mut trefoil_plan::problem::ProblemTensor)| {
        let mut tensors = sound.tensors().to_vec();
        change(&mut tensors[2]);
        again(sound.jobs().to_vec(), tensors)
    };
    assert!(tensors(&|tensor| tensor.transfer_ms[1] = f64::NAN).contains("made by operator `op2`"));
    assert!(tensors(&|tensor| tensor.consumers = vec![0]).contains("waits for jobs that wait for it"));
    assert!(tensors(&|tensor| tensor.consumers = vec![9]).contains("op2"));
}

#[test]
fn broken_schedules_are_refused() {
    let mut dice = Dice(40);
    let mut shape = shape(1, &mut dice, 6);
    shape.transfers = 1.0;
    let instance = Instance::random(shape, &mut dice);
    let problem = instance.problem();
    let (unit, tasks, order) = random_schedule(&instance, &mut dice);
    let sound = Instance::schedule(&unit, &tasks, &order);
    problem.evaluate(&sound).unwrap();
    let refuse = |change: &dyn Fn(&mut trefoil_plan::Schedule)| {
        let mut broken = sound.clone();
        change(&mut broken);
        let error = problem.evaluate(&broken).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.starts_with("the plan cannot run"), "{error}");
    };
    refuse(&|schedule| schedule.order.truncate(2));
    refuse(&|schedule| schedule.order.reverse());
    refuse(&|schedule| schedule.order.push(schedule.order[0]));
    refuse(&|schedule| schedule.unit[0] = 9);
    refuse(&|schedule| schedule.after.push((Step::Job(5), Step::Job(0))));
    refuse(&|schedule| schedule.after.push((Step::Job(0), Step::Job(77))));
}

#[test]
fn budgets_of_nothing_still_give_a_schedule() {
    let mut dice = Dice(2);
    let shape = shape(4, &mut dice, 40);
    let problem = Instance::random(shape, &mut dice).problem();
    let found = solve(&problem, &[], &options(0)).unwrap();
    assert!(found.evaluation.makespan_ms.is_finite() && found.gap().is_some());
}
