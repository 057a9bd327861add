//! `aligned`, `joint` and `joint-units` against enumeration of every schedule under their own model, and the cap.

// Prices are compared with a tolerance, after an exact test that lets infinities be equal; names follow the papers.
#![allow(clippy::float_cmp, clippy::many_single_char_names, clippy::manual_midpoint)]

use proptest::prelude::*;
use trefoil_core::OperatorClass;
use trefoil_plan::{
    AlignedCosts, CapCosts, PairCosts, PairOperators, PairRules, PairStep, aligned_dp, class_index, joint_dp,
    joint_units_dp, pair_cap,
};

fn cases(default: u32) -> ProptestConfig {
    let long = std::env::var_os("TREFOIL_LONG_TESTS").is_some();
    ProptestConfig::with_cases(if long { default * 20 } else { default })
}

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()))
}

/// Costs with holes; one unit in each row always runs the operator.
fn table(n: usize, k: usize) -> impl Strategy<Value = Vec<f64>> {
    (proptest::collection::vec(0.1..10.0f64, n * k), proptest::collection::vec(0u8..5, n * k)).prop_map(
        move |(mut values, holes)| {
            for (at, value) in values.iter_mut().enumerate() {
                if holes[at] == 0 && at % k != (at / k) % k {
                    *value = f64::INFINITY;
                }
            }
            values
        },
    )
}

fn numbers(count: usize, most: f64) -> impl Strategy<Value = Vec<f64>> {
    proptest::collection::vec(0.0..most, count)
}

/// `concurrent` is `solo` times a factor per entry.
fn scaled(solo: &[f64], factors: &[f64]) -> Vec<f64> {
    solo.iter().zip(factors).map(|(solo, factor)| solo * (0.6 + factor)).collect()
}

/// Every way to advance two requests of n and m operators: lists of (first advances, second advances).
fn every_order(n: usize, m: usize) -> Vec<Vec<(bool, bool)>> {
    if n == 0 && m == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (a, b) in [(true, true), (true, false), (false, true)] {
        if (a && n == 0) || (b && m == 0) {
            continue;
        }
        for mut rest in every_order(n - usize::from(a), m - usize::from(b)) {
            rest.insert(0, (a, b));
            all.push(rest);
        }
    }
    all
}

fn every_assignment(n: usize, k: usize) -> Vec<Vec<usize>> {
    (0..k.pow(n as u32)).map(|code| (0..n).map(|i| code / k.pow(i as u32) % k).collect()).collect()
}

/// Steps of a schedule in the planner's terms.
fn steps_of(order: &[(bool, bool)], first: &[usize], second: &[usize]) -> Vec<PairStep> {
    let (mut i, mut j) = (0, 0);
    let take = |advances: bool, units: &[usize], at: &mut usize| {
        advances.then(|| {
            *at += 1;
            units[*at - 1]
        })
    };
    order.iter().map(|&(a, b)| PairStep { first: take(a, first, &mut i), second: take(b, second, &mut j) }).collect()
}

/// The literal joint price of given steps.
fn literal_price(steps: &[PairStep], w0: &[f64], c0: &[f64], w1: &[f64], c1: &[f64], k: usize) -> f64 {
    let (mut i, mut j, mut total) = (0, 0, 0.0);
    for step in steps {
        match (step.first, step.second) {
            (Some(a), Some(b)) => {
                total += if a == b { (c0[i * k + a] + c1[j * k + b]) / 2.0 } else { w0[i * k + a].max(w1[j * k + b]) };
                i += 1;
                j += 1;
            }
            (Some(a), None) => {
                total += w0[i * k + a];
                i += 1;
            }
            (None, Some(b)) => {
                total += w1[j * k + b];
                j += 1;
            }
            (None, None) => unreachable!("a step advances something"),
        }
    }
    assert!(i * k == w0.len() && j * k == w1.len(), "the steps run every operator");
    total
}

#[derive(Debug, Clone)]
struct Pair {
    k: usize,
    w0: Vec<f64>,
    c0: Vec<f64>,
    w1: Vec<f64>,
    c1: Vec<f64>,
}

fn pairs() -> impl Strategy<Value = Pair> {
    (0..=3usize, 0..=3usize, 1..=3usize).prop_flat_map(|(n, m, k)| {
        (table(n, k), numbers(n * k, 2.0), table(m, k), numbers(m * k, 2.0)).prop_map(move |(w0, f0, w1, f1)| {
            let (c0, c1) = (scaled(&w0, &f0), scaled(&w1, &f1));
            Pair { k, w0, c0, w1, c1 }
        })
    })
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn joint_agrees_with_every_schedule(pair in pairs()) {
        let Pair { k, w0, c0, w1, c1 } = &pair;
        let (n, m) = (w0.len() / k, w1.len() / k);
        let mut best = f64::INFINITY;
        for order in every_order(n, m) {
            for first in every_assignment(n, *k) {
                for second in every_assignment(m, *k) {
                    best = best.min(literal_price(&steps_of(&order, &first, &second), w0, c0, w1, c1, *k));
                }
            }
        }
        let (cost, steps) = joint_dp(
            PairCosts { solo: w0, concurrent: c0 },
            PairCosts { solo: w1, concurrent: c1 },
            *k,
        );
        prop_assert!(close(cost, best), "{cost} instead of {best}");
        prop_assert!(close(literal_price(&steps, w0, c0, w1, c1, *k), cost), "the steps do not cost what is claimed");
        let alone = |w: &[f64]| (0..*k).map(|u| w.iter().skip(u).step_by(*k).sum()).fold(f64::INFINITY, f64::min);
        let cap = pair_cap(
            CapCosts { solo: w0, concurrent: c0, alone: alone(w0) },
            CapCosts { solo: w1, concurrent: c1, alone: alone(w1) },
            *k,
        );
        prop_assert!(cap.literal_bound <= cost * (1.0 + 1e-9), "{cap:?} above {cost}");
    }
}

#[derive(Debug, Clone)]
struct Aligned {
    k: usize,
    solo: Vec<f64>,
    together: Vec<f64>,
    enter: Vec<f64>,
    leave: Vec<f64>,
}

fn aligned() -> impl Strategy<Value = Aligned> {
    (1..=3usize, 1..=3usize).prop_flat_map(|(n, k)| {
        (table(n, k), numbers(n * k, 2.0), numbers(n * k, 3.0), numbers(n * k, 3.0)).prop_map(
            move |(solo, factors, enter, leave)| {
                let together = scaled(&solo, &factors);
                Aligned { k, solo, together, enter, leave }
            },
        )
    })
}

fn aligned_price(instance: &Aligned, first: &[usize], second: &[usize]) -> f64 {
    let Aligned { k, solo, together, enter, leave } = instance;
    let last = first.len() - 1;
    let moved = |units: &[usize], i: usize| match i {
        0 => enter[units[0]],
        _ if units[i - 1] == units[i] => 0.0,
        _ => leave[(i - 1) * k + units[i - 1]] + enter[i * k + units[i]],
    };
    let mut total = leave[last * k + first[last]].max(leave[last * k + second[last]]);
    for (i, (&a, &b)) in first.iter().zip(second).enumerate() {
        total += moved(first, i).max(moved(second, i));
        total += if a == b { together[i * k + a] } else { solo[i * k + a].max(solo[i * k + b]) };
    }
    total
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn aligned_agrees_with_every_assignment(instance in aligned()) {
        let Aligned { k, solo, together, enter, leave } = &instance;
        let every = every_assignment(solo.len() / k, *k);
        let best = every
            .iter()
            .flat_map(|a| every.iter().map(|b| aligned_price(&instance, a, b)).collect::<Vec<_>>())
            .fold(f64::INFINITY, f64::min);
        let (cost, steps) = aligned_dp(AlignedCosts { solo, together, enter, leave }, *k);
        prop_assert!(close(cost, best), "{cost} instead of {best}");
        let units = |of: fn(&PairStep) -> Option<usize>| steps.iter().filter_map(of).collect::<Vec<_>>();
        let (first, second) = (units(|step| step.first), units(|step| step.second));
        prop_assert_eq!(first.len(), solo.len() / k);
        prop_assert!(close(aligned_price(&instance, &first, &second), cost));
    }
}

#[derive(Debug, Clone)]
struct Units {
    k: usize,
    tables: [[Vec<f64>; 3]; 2],
    classes: [Vec<OperatorClass>; 2],
    rules: PairRules,
}

fn class() -> impl Strategy<Value = OperatorClass> {
    any::<bool>().prop_map(|memory| if memory { OperatorClass::Memory } else { OperatorClass::Compute })
}

fn units() -> impl Strategy<Value = Units> {
    (0..=3usize, 0..=2usize, 1..=3usize).prop_flat_map(|(n, m, k)| {
        let request = |count: usize| {
            (
                table(count, k),
                numbers(count * k, 3.0),
                numbers(count * k, 3.0),
                proptest::collection::vec(class(), count),
            )
        };
        let factors = proptest::collection::vec(0.8..1.6f64, 4 * k * k);
        let prices = (proptest::collection::vec(0.5..2.0f64, k), proptest::collection::vec(0.5..3.0f64, k * k));
        (request(n), request(m), factors, prices, proptest::collection::vec(0u8..4, k * k), any::<bool>()).prop_map(
            move |(first, second, factors, (solo, overlap), shared, latency)| {
                let shares = |a: usize, b: usize| a == b || shared[a.min(b) * k + a.max(b)] == 0;
                let part = |at: usize| factors[at * k * k..(at + 1) * k * k].to_vec();
                let rules = PairRules {
                    disjoint: (0..k * k).map(|at| !shares(at / k, at % k)).collect(),
                    slowdown: [[part(0), part(1)], [part(2), part(3)]],
                    solo: if latency { vec![1.0; k] } else { solo },
                    // Symmetric, as powers are.
                    overlap: (0..k * k)
                        .map(|at| if latency { 1.0 } else { overlap[(at / k).min(at % k) * k + (at / k).max(at % k)] })
                        .collect(),
                };
                Units {
                    k,
                    tables: [[first.0, first.1, first.2], [second.0, second.1, second.2]],
                    classes: [first.3, second.3],
                    rules,
                }
            },
        )
    })
}

/// The price of given steps, by playing them through second by second.
fn units_price(instance: &Units, steps: &[PairStep]) -> f64 {
    let Units { k, tables, classes, rules } = instance;
    let mut at = [0usize; 2];
    let mut on = [None::<usize>; 2];
    let mut total = 0.0;
    for step in steps {
        let mut left = [0.0f64; 2];
        for (who, unit) in [step.first, step.second].into_iter().enumerate() {
            let Some(unit) = unit else { continue };
            let [ms, enter, leave] = &tables[who];
            if on[who] != Some(unit) {
                total += enter[at[who] * k + unit];
                if let Some(old) = on[who] {
                    total += leave[(at[who] - 1) * k + old];
                }
            }
            left[who] = ms[at[who] * k + unit];
            on[who] = Some(unit);
        }
        if let (Some(a), Some(b)) = (step.first, step.second) {
            if !rules.disjoint[a * k + b] {
                return f64::INFINITY;
            }
            let (x, y) = (class_index(classes[0][at[0]]), class_index(classes[1][at[1]]));
            let rates = [1.0 / rules.slowdown[x][y][a * k + b], 1.0 / rules.slowdown[y][x][b * k + a]];
            let time = (left[0] / rates[0]).min(left[1] / rates[1]);
            if time.is_infinite() {
                return f64::INFINITY;
            }
            total += time * rules.overlap[a * k + b];
            left = [left[0] - time * rates[0], left[1] - time * rates[1]];
        }
        for (who, unit) in [step.first, step.second].into_iter().enumerate() {
            if let Some(unit) = unit {
                total += left[who] * rules.solo[unit];
                at[who] += 1;
            }
        }
    }
    for who in 0..2 {
        if let Some(unit) = on[who] {
            total += tables[who][2][(at[who] - 1) * k + unit];
        }
        assert_eq!(at[who], classes[who].len(), "the steps run every operator");
    }
    total
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn joint_units_agrees_with_every_schedule(instance in units()) {
        let Units { k, tables, classes, rules } = &instance;
        let (n, m) = (classes[0].len(), classes[1].len());
        let mut best = f64::INFINITY;
        for order in every_order(n, m) {
            for first in every_assignment(n, *k) {
                for second in every_assignment(m, *k) {
                    best = best.min(units_price(&instance, &steps_of(&order, &first, &second)));
                }
            }
        }
        let request = |who: usize| {
            let [ms, enter, leave] = &tables[who];
            PairOperators { ms, enter, leave, classes: &classes[who] }
        };
        let (cost, steps) = joint_units_dp(request(0), request(1), rules, *k);
        prop_assert!(close(cost, best), "{cost} instead of {best}");
        prop_assert!(close(units_price(&instance, &steps), cost), "the steps do not cost what is claimed");
    }

    /// Exclusive units, no speed-ups of each other, latency: nothing beats the cap.
    #[test]
    fn the_cap_holds(mut instance in units()) {
        instance.rules.solo.iter_mut().chain(&mut instance.rules.overlap).for_each(|price| *price = 1.0);
        instance.rules.slowdown.iter_mut().flatten().flatten().for_each(|factor| *factor = factor.max(1.0));
        let Units { k, tables, classes, rules } = &instance;
        let request = |who: usize| {
            let [ms, enter, leave] = &tables[who];
            PairOperators { ms, enter, leave, classes: &classes[who] }
        };
        let (cost, _) = joint_units_dp(request(0), request(1), rules, *k);
        let costs = |who: usize| CapCosts { solo: &tables[who][0], concurrent: &[], alone: 1.0 };
        let cap = pair_cap(costs(0), costs(1), *k);
        prop_assert!(cap.bound <= cost * (1.0 + 1e-9), "{cap:?} above {cost}");
    }
}

/// What the paper's state leaves out: a move that costs more than it gains, and two operators on one unit at once.
#[test]
fn the_gaps_of_the_literal_search_show() {
    let solo = [1.0, 9.0, 9.0, 1.0];
    let concurrent: Vec<f64> = solo.iter().map(|ms| 2.0 * ms).collect();
    let costs = PairCosts { solo: &solo, concurrent: &concurrent };
    let (literal, _) = joint_dp(costs, PairCosts { solo: &[], concurrent: &[] }, 2);
    assert!(close(literal, 2.0), "free moves: {literal}");
    let classes = [OperatorClass::Memory; 2];
    let operators =
        PairOperators { ms: &solo, enter: &[0.0, 5.0, 0.0, 5.0], leave: &[0.0, 5.0, 0.0, 5.0], classes: &classes };
    let none = PairOperators { ms: &[], enter: &[], leave: &[], classes: &[] };
    let ones = vec![1.0; 4];
    let rules = PairRules {
        disjoint: vec![false, true, true, false],
        slowdown: std::array::from_fn(|_| std::array::from_fn(|_| ones.clone())),
        solo: vec![1.0; 2],
        overlap: ones.clone(),
    };
    let (paid, _) = joint_units_dp(operators, none, &rules, 2);
    assert!(close(paid, 10.0), "staying on unit 0 is best: {paid}");
}

mod through_profiles {
    use super::*;
    use trefoil_core::{Objective, UnitKind};
    use trefoil_plan::testing::{ProfileBuilder, chain};
    use trefoil_plan::{PAIR_METHODS, PlanRequest, pair_cap_of, plan_pair};

    fn builder(count: usize, fast: usize) -> ProfileBuilder {
        let mut graph = chain(count, 64);
        graph.fingerprint = format!("{count:032x}");
        let column = |unit: usize| vec![Some(if unit == fast { 1.0 } else { 3.0 }); count];
        ProfileBuilder::new(&graph)
            .cpus(2)
            .operators(0, &column(0))
            .operators(1, &column(1))
            .transfers(&[(0, 0.25)])
            .slowdown(0, 1, 1.5)
            .watts(0, 10.0)
            .watts(1, 20.0)
    }

    #[test]
    fn complementary_models_overlap() {
        let (one, other) = (builder(4, 0), builder(3, 1));
        let (first, second) = (
            PlanRequest::new(&one.profile, &one.profile.models[0]),
            PlanRequest::new(&other.profile, &other.profile.models[0]),
        );
        let graphs = [first.graph, second.graph];
        let joint = plan_pair("joint", &first, &second).unwrap();
        assert!(close(joint.claimed, 4.0), "{}", joint.claimed);
        joint.check(&graphs).unwrap();
        assert!(joint.simulated_ms > joint.claimed, "the paper leaves out the slowdown");
        let units = plan_pair("joint-units", &first, &second).unwrap();
        units.check(&graphs).unwrap();
        // Three steps in which the first is slowed by 1.5 for 1 ms of the second: 1 + 1/3 each; then one alone.
        assert!(close(units.claimed, 3.0 * (1.0 + 1.0 / 3.0) + 1.0), "{}", units.claimed);
        assert!(units.simulated_ms <= units.claimed + 1e-9);
        let cap = pair_cap_of(&first, &second).unwrap();
        assert!(close(cap.serial, 7.0) && close(cap.bound, 4.0), "{cap:?}");
        let error = plan_pair("aligned", &first, &second).unwrap_err().to_string();
        assert!(error.contains("two requests of one model") && error.contains("synthetic"), "{error}");
    }

    #[test]
    fn two_requests_of_one_model() {
        let one = builder(3, 0);
        let request = PlanRequest::new(&one.profile, &one.profile.models[0]);
        let aligned = plan_pair("aligned", &request, &request).unwrap();
        aligned.check(&[request.graph, request.graph]).unwrap();
        // Sharing unit 0 costs 2 a step, two units cost 3.
        assert!(close(aligned.claimed, 6.0), "{}", aligned.claimed);
        for method in PAIR_METHODS {
            let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
            let plan = plan_pair(method.name, &energy, &energy).unwrap();
            assert!(plan.claimed > 0.0 && plan.own.as_ref().unwrap().exact, "{}", method.name);
        }
        // Unit 0 does everything for 10 W: 6 ms.
        let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
        assert!(close(plan_pair("joint-units", &energy, &energy).unwrap().claimed, 0.06));
    }

    #[test]
    fn misfits_are_named() {
        let one = builder(3, 0);
        let request = PlanRequest::new(&one.profile, &one.profile.models[0]);
        let fewer = PlanRequest { units: vec!["a:CPU".parse().unwrap()], ..request.clone() };
        let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
        let gpu = ProfileBuilder::new(&chain(1, 4)).unit("a:GPU", UnitKind::Gpu).operators(0, &[Some(1.0)]);
        let other = PlanRequest::new(&gpu.profile, &gpu.profile.models[0]);
        for (method, first, second, want) in [
            ("joint", &request, &fewer, "different units"),
            ("joint", &request, &other, "a:GPU"),
            ("joint", &request, &energy, "objectives"),
            ("both", &request, &request, "joint-units"),
        ] {
            let error = plan_pair(method, first, second).unwrap_err().to_string();
            assert!(error.contains(want) && !error.contains('\n'), "{error}");
        }
    }
}
