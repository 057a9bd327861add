//! `pipeline`: HeteroVDiff's cut from its rates, and the general search against enumeration of every placement.

// Published numbers are compared with results that are exact in binary.
#![allow(clippy::float_cmp)]

use proptest::prelude::*;
use std::collections::BTreeSet;
use trefoil_plan::stream::{
    StreamBlock, StreamProblem, StreamUnit, VideoRates, crossing, cut_at, one_cut, period_with_solo_rest, plan_stream,
};

fn cases(default: u32) -> ProptestConfig {
    let long = std::env::var_os("TREFOIL_LONG_TESTS").is_some();
    ProptestConfig::with_cases(if long { default * 20 } else { default })
}

fn rates(first: f64, second: f64, decoder: f64) -> VideoRates {
    VideoRates { first, second, decoder }
}

/// HeteroVDiff Table 5's rates: 676 s for 51 blocks, 675 s for 129 blocks and a decode of 267 s.
fn deployed() -> VideoRates {
    rates(676.0 / 51.0, (675.0 - 267.0) / 129.0, 267.0)
}

#[test]
fn the_papers_cuts() {
    let cut = one_cut(deployed(), 180).unwrap();
    assert_eq!(cut.cut, 51);
    assert!((cut.period - 676.0).abs() < 1e-9 && (cut.idle - 1.0).abs() < 1e-9);
    assert_eq!(one_cut(VideoRates { decoder: 0.0, ..deployed() }, 180).unwrap().cut, 34);
    assert_eq!(one_cut(rates(12.633, 3.352, 308.0), 180).unwrap().cut, 57);
    let corun = rates(12.8, 3.101, 275.0);
    assert_eq!(one_cut(corun, 180).unwrap().cut, 52);
    assert!((cut_at(corun, 180, 30).unwrap().idle - 356.15).abs() < 1e-9);
    assert!((cut_at(corun, 180, 60).unwrap().idle - 120.88).abs() < 1e-9);
    assert!((crossing(corun, 180) - (180.0 * 3.101 + 275.0) / 15.901).abs() < 1e-12);
}

#[test]
fn the_ends_are_cuts_too() {
    assert_eq!(one_cut(rates(1.0, 1.0, 1000.0), 10).unwrap().cut, 10);
    assert_eq!(one_cut(rates(100.0, 1.0, 0.0), 3).unwrap().cut, 0);
    assert_eq!(one_cut(rates(0.0, 0.0, 0.0), 3).unwrap().period, 0.0);
    for bad in
        [rates(f64::NAN, 1.0, 1.0), rates(1e308, 1.0, 1.0), rates(1.0, -1.0, 1.0), rates(1.0, 1.0, f64::INFINITY)]
    {
        let error = one_cut(bad, 10).unwrap_err().to_string();
        assert!(error.contains("no time") && !error.contains('\n'), "{error}");
    }
    assert!(one_cut(deployed(), 0).is_err() && cut_at(deployed(), 3, 4).is_err());
}

#[test]
fn the_longer_stage_may_finish_alone() {
    let (corun, solo) = (rates(12.8, 3.101, 275.0), rates(12.633, 3.352, 308.0));
    let period = period_with_solo_rest(corun, solo, 180, 30).unwrap();
    let (short, long, alone) = (384.0, 740.15, 150.0 * 3.352 + 308.0);
    assert!((period - (short + (1.0 - short / long) * alone)).abs() < 1e-9);
    assert!(period > 740.15, "the NPU is slower alone");
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn one_cut_is_the_best_of_all(first in 0.0..20.0f64, second in 0.0..20.0f64, decoder in 0.0..400.0f64, blocks in 1u32..200) {
        let rates = rates(first, second, decoder);
        let best = (0..=blocks).map(|cut| cut_at(rates, blocks, cut).unwrap().period).fold(f64::INFINITY, f64::min);
        let found = one_cut(rates, blocks).unwrap();
        prop_assert!(found.period <= best * (1.0 + 1e-12) + 1e-12, "{} instead of {best}", found.period);
        let general = plan_stream(&StreamProblem::from_rates(rates, blocks)).unwrap();
        prop_assert!((general.period - best).abs() <= 1e-9 * (1.0 + best), "{} instead of {best}", general.period);
    }
}

fn problems() -> impl Strategy<Value = StreamProblem> {
    (1..=5usize, 1..=3usize).prop_flat_map(|(n, k)| {
        let cost = proptest::collection::vec((0.0..10.0f64, 0u8..5), k);
        let block =
            (cost, proptest::option::of(0u32..3), 1u64..4).prop_map(move |(cost, weights, bytes)| StreamBlock {
                // The first unit runs everything, so that limits and not holes decide.
                cost: cost.iter().enumerate().map(|(u, &(ms, hole))| (u == 0 || hole > 0).then_some(ms)).collect(),
                weights,
                // Blocks that share weights agree on their size.
                weight_bytes: weights.map_or(bytes, |name| u64::from(name) + 1),
            });
        let unit = (proptest::option::of(0u8..2), proptest::option::weighted(0.3, 1u64..9));
        (
            proptest::collection::vec(block, n),
            proptest::collection::vec(unit, k),
            proptest::option::of(proptest::collection::vec(0.0..3.0f64, n * k * k)),
            proptest::option::of(0u32..4),
            any::<bool>(),
            proptest::option::weighted(0.3, 1.0..40.0f64),
        )
            .prop_map(|(blocks, units, handoffs, most_handoffs, revisits, deadline)| StreamProblem {
                units: units
                    .into_iter()
                    .enumerate()
                    .map(|(at, (resource, memory_bytes))| StreamUnit {
                        name: format!("u{at}"),
                        resource: resource.map(|name| format!("r{name}")),
                        memory_bytes,
                    })
                    .collect(),
                blocks,
                handoffs: handoffs.unwrap_or_default(),
                most_handoffs,
                revisits,
                deadline,
            })
    })
}

/// (period, sum of stage times) of one unit per block; `None` where the placement breaks a limit.
fn price(problem: &StreamProblem, placement: &[usize]) -> Option<(f64, f64)> {
    let k = problem.units.len();
    let (mut handoffs, mut total) = (0, 0.0);
    let mut busy: std::collections::BTreeMap<String, f64> = std::collections::BTreeMap::new();
    let mut resident: Vec<BTreeSet<(u32, usize)>> = vec![BTreeSet::new(); k];
    let mut memory = vec![0u64; k];
    let mut used = BTreeSet::new();
    for (at, &unit) in placement.iter().enumerate() {
        let mut time = problem.blocks[at].cost[unit]?;
        if at == 0 || placement[at - 1] != unit {
            if at > 0 {
                handoffs += 1;
                time += problem.handoffs.get((at * k + placement[at - 1]) * k + unit).copied().unwrap_or(0.0);
            }
            if !used.insert(unit) && !problem.revisits {
                return None;
            }
        }
        let name = problem.units[unit].resource.clone().unwrap_or_else(|| format!("own {unit}"));
        *busy.entry(name).or_default() += time;
        total += time;
        let weights = problem.blocks[at].weights.map_or((1, at), |name| (0, name as usize));
        if resident[unit].insert(weights) {
            memory[unit] += problem.blocks[at].weight_bytes;
        }
    }
    let most = problem.most_handoffs.map_or(k - 1, |most| most as usize);
    let fits =
        problem.units.iter().zip(&memory).all(|(unit, &bytes)| unit.memory_bytes.is_none_or(|most| bytes <= most));
    (fits && handoffs <= most).then(|| (busy.values().copied().fold(0.0, f64::max), total))
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn the_general_search_agrees_with_every_placement(mut problem in problems()) {
        let (n, k) = (problem.blocks.len(), problem.units.len());
        let shares = |problem: &StreamProblem| {
            let names: Vec<_> = problem.units.iter().filter_map(|unit| unit.resource.as_ref()).collect();
            names.iter().collect::<BTreeSet<_>>().len() < names.len()
        };
        if problem.revisits || shares(&problem) {
            // Latency then depends on the cyclic schedule, which this oracle does not build.
            problem.deadline = None;
        }
        let mut best = f64::INFINITY;
        let mut all = Vec::new();
        for code in 0..k.pow(n as u32) {
            let placement: Vec<usize> = (0..n).map(|at| code / k.pow(at as u32) % k).collect();
            if let Some((period, latency)) = price(&problem, &placement)
                && problem.deadline.is_none_or(|deadline| latency <= deadline)
            {
                best = best.min(period);
                all.push((period, placement.windows(2).filter(|pair| pair[0] != pair[1]).count(), latency));
            }
        }
        match plan_stream(&problem) {
            Ok(plan) => {
                prop_assert!(plan.exact);
                prop_assert!((plan.period - best).abs() <= 1e-9 * (1.0 + best), "{} instead of {best}", plan.period);
                let placement: Vec<usize> =
                    plan.stages.iter().flat_map(|stage| vec![stage.unit; stage.end - stage.first]).collect();
                let (period, total) = price(&problem, &placement).expect("the plan keeps the limits");
                prop_assert!((period - plan.period).abs() <= 1e-9 * (1.0 + period));
                prop_assert!(plan.latency >= total - 1e-9, "stages of an item do not overlap");
                if !problem.revisits && !shares(&problem) {
                    prop_assert!((plan.latency - total).abs() <= 1e-9 * (1.0 + total));
                    // Among the shortest periods the fewest handoffs, then the shortest latency.
                    all.retain(|(period, ..)| *period <= best + 1e-9 * (1.0 + best));
                    let fewest = all.iter().map(|(_, handoffs, _)| *handoffs).min().unwrap();
                    prop_assert_eq!(plan.stages.len() - 1, fewest);
                    let least = all.iter().filter(|entry| entry.1 == fewest).map(|entry| entry.2).fold(f64::INFINITY, f64::min);
                    prop_assert!(plan.latency <= least + 1e-9 * (1.0 + least), "{} instead of {least}", plan.latency);
                }
                check_cycle(&problem, &plan)?;
            }
            Err(error) => {
                prop_assert!(best.is_infinite(), "{error}, but {best} is possible");
                prop_assert!(error.to_string().contains("no division"), "{error}");
            }
        }
    }
}

/// Played for several items, the schedule never uses a resource twice at once and items end every period.
fn check_cycle(problem: &StreamProblem, plan: &trefoil_plan::stream::StreamPlan) -> Result<(), TestCaseError> {
    let mut busy: Vec<(String, f64, f64)> = Vec::new();
    for item in 0..6 {
        let begin = f64::from(item) * plan.period;
        let mut ready = begin;
        for stage in &plan.stages {
            let start = begin + stage.start;
            prop_assert!(start >= ready - 1e-9);
            ready = start + stage.time;
            let unit = &problem.units[stage.unit];
            let name = unit.resource.clone().unwrap_or_else(|| format!("own {}", stage.unit));
            for (other, from, to) in &busy {
                let apart = *to <= start + 1e-7 || ready <= *from + 1e-7;
                prop_assert!(*other != name || apart, "{name} is used twice: {from}..{to} and {start}..{ready}");
            }
            busy.push((name, start, ready));
        }
        prop_assert!((ready - begin - plan.latency).abs() < 1e-9 * (1.0 + plan.latency));
    }
    prop_assert!((plan.time_of(6) - (plan.fill + 5.0 * plan.period)).abs() < 1e-9);
    Ok(())
}

/// A third unit, a decoder that two may run, and revisits find what one cut cannot.
#[test]
fn more_units_and_handoffs_shorten_the_period() {
    let mut problem = StreamProblem::from_rates(deployed(), 180);
    let one = plan_stream(&problem).unwrap();
    assert_eq!(
        one.stages.iter().map(|stage| (stage.unit, stage.first, stage.end)).collect::<Vec<_>>(),
        [(0, 0, 51), (1, 51, 181)]
    );
    assert!((one.idle[0] - 0.0).abs() < 1e-9 && (one.idle[1] - 1.0).abs() < 1e-9);
    problem.units.push(StreamUnit { name: "third".into(), resource: None, memory_bytes: None });
    for block in &mut problem.blocks {
        let slower = block.cost[1].map(|second| second * 4.0);
        block.cost.push(slower);
    }
    problem.most_handoffs = None;
    let three = plan_stream(&problem).unwrap();
    assert!(three.period < one.period && three.exact, "{three:?}");
    // A deadline between the two latencies forbids the third unit's help or lengthens the period.
    problem.deadline = Some(three.latency - 1.0);
    assert!(plan_stream(&problem).unwrap().period > three.period);
    // 100 bytes hold the weights of a third of the 30 blocks; every step needs all.
    let mut limited = StreamProblem::from_rates(deployed(), 180);
    for (at, block) in limited.blocks.iter_mut().take(180).enumerate() {
        (block.weights, block.weight_bytes) = (Some(at as u32 % 30), 10);
    }
    limited.units[0].memory_bytes = Some(100);
    assert_eq!(plan_stream(&limited).unwrap().stages[0].end, 10);
}

#[test]
fn malformed_streams_are_named_in_one_line() {
    let good = StreamProblem::from_rates(deployed(), 3);
    let mut cases: Vec<(StreamProblem, &str)> = Vec::new();
    let mut with = |change: &dyn Fn(&mut StreamProblem), want: &'static str| {
        let mut problem = good.clone();
        change(&mut problem);
        cases.push((problem, want));
    };
    with(&|p| p.blocks.clear(), "no blocks");
    with(&|p| p.units.clear(), "0 units");
    with(&|p| p.blocks[1].cost = vec![None, None], "block 1 runs on no unit");
    with(&|p| p.blocks[2].cost = vec![Some(f64::NAN), None], "block 2 costs NaN on first");
    with(&|p| p.blocks[0].cost.clear(), "block 0 has 0 costs");
    with(&|p| p.handoffs = vec![1.0], "16");
    with(&|p| p.deadline = Some(-1.0), "-1");
    with(&|p| p.deadline = Some(0.5), "a deadline of 0.5");
    for (problem, want) in cases {
        let error = plan_stream(&problem).unwrap_err().to_string();
        assert!(error.contains(want) && !error.contains('\n'), "{want}: {error}");
    }
}
