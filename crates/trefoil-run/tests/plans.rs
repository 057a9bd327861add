//! Random plans: the placement never lets two live values share bytes under any legal schedule, and the executor's
//! results are those of running one segment after the other.

mod support;

use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap};
use support::{Behaviour, Fake, FakeSource, Random, graph, plan, reference, unit};
use trefoil_core::{OperatorGraph, Plan, Unit};
use trefoil_run::{Executor, ExecutorOptions, Placement, Schedule, Source};

#[derive(Debug, Clone)]
struct Case {
    operators: u32,
    edges: Vec<(u32, u32)>,
    sizes: Vec<u64>,
    /// Resources of each unit, out of four.
    units: Vec<Vec<usize>>,
    /// Lengths of consecutive operators per segment.
    lengths: Vec<u32>,
    placement: Vec<usize>,
    items: u32,
    transfers: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    (1u32..24).prop_flat_map(|operators| {
        (
            proptest::collection::vec((0..operators, 0..operators), 0..48),
            proptest::collection::vec(prop_oneof![Just(0u64), 1u64..700], operators as usize),
            proptest::collection::vec(proptest::collection::vec(0usize..4, 1..3), 1..6),
            proptest::collection::vec(1u32..4, operators as usize),
            proptest::collection::vec(0usize..6, operators as usize),
            1u32..4,
            any::<bool>(),
            any::<u64>(),
        )
            .prop_map(move |(edges, sizes, units, lengths, placement, items, transfers, seed)| Case {
                operators,
                edges: edges.into_iter().filter(|(from, to)| from < to).collect(),
                sizes,
                units,
                lengths,
                placement,
                items,
                transfers,
                seed,
            })
    })
}

/// The case's graph and plan; tasks in a random linear extension over all items.
fn build(case: &Case) -> (OperatorGraph, Plan) {
    let graph = graph(case.operators, &case.edges, |index| case.sizes[index as usize]);
    let units: Vec<Unit> = case
        .units
        .iter()
        .enumerate()
        .map(|(index, resources)| {
            let names: BTreeSet<_> = resources.iter().map(|resource| format!("r{resource}")).collect();
            unit(&format!("fake:u{index}"), &names.iter().map(String::as_str).collect::<Vec<_>>())
        })
        .collect();
    let mut cuts = Vec::new();
    let mut first = 0;
    for (length, place) in case.lengths.iter().zip(&case.placement) {
        let last = (first + length).min(case.operators);
        if first < last {
            cuts.push(((first..last).collect::<Vec<_>>(), place % units.len()));
        }
        first = last;
    }
    let mut random = Random(case.seed);
    // Segments are intervals of a topological order: each needs only earlier ones.
    let mut owner = vec![0; case.operators as usize];
    for (segment, (operators, _)) in cuts.iter().enumerate() {
        for &operator in operators {
            owner[operator as usize] = segment;
        }
    }
    let needs: Vec<BTreeSet<usize>> = (0..cuts.len())
        .map(|segment| {
            let edges = case.edges.iter().map(|&(from, to)| (owner[from as usize], owner[to as usize]));
            edges.filter(|&(from, to)| to == segment && from != segment).map(|(from, _)| from).collect()
        })
        .collect();
    let mut left: Vec<(usize, u32)> =
        (0..case.items).flat_map(|item| (0..cuts.len()).map(move |segment| (segment, item))).collect();
    let mut done = BTreeSet::new();
    let mut sequence = Vec::new();
    while !left.is_empty() {
        let ready: Vec<_> = (0..left.len())
            .filter(|&index| needs[left[index].0].iter().all(|&need| done.contains(&(need, left[index].1))))
            .collect();
        let task = left.swap_remove(ready[random.below(ready.len())]);
        done.insert(task);
        sequence.push(task);
    }
    let plan = plan(&graph, &units, &cuts, &sequence, case.transfers);
    (graph, plan)
}

/// Plays the schedule in a random legal interleaving of starts and ends. Every byte remembers the last value written
/// to it; a task's inputs must still be whole when the task ends. Disjointness of units is checked on the way.
fn simulate(schedule: &Schedule, placement: &Placement, plan: &Plan, seed: u64) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let mut owner: Vec<Option<usize>> = vec![None; placement.bytes];
    let mut next = vec![0usize; schedule.lanes.len()];
    let mut running: Vec<Option<usize>> = vec![None; schedule.lanes.len()];
    let mut finished = vec![0u32; schedule.lanes.len()];
    let range = |value: usize| {
        placement.offsets[value].map(|offset| offset..offset + schedule.values[value].info.bytes() as usize)
    };
    loop {
        let mut moves = Vec::new();
        for lane in 0..schedule.lanes.len() {
            match running[lane] {
                Some(_) => moves.push(lane),
                None => {
                    if let Some(&task) = schedule.lanes[lane].tasks.get(next[lane])
                        && schedule.tasks[task].waits.iter().all(|&(other, count)| finished[other] >= count)
                    {
                        moves.push(lane);
                    }
                }
            }
        }
        if moves.is_empty() {
            break;
        }
        let lane = moves[random.below(moves.len())];
        if let Some(index) = running[lane].take() {
            let task = &schedule.tasks[index];
            for source in &task.inputs {
                if let Source::Value(value) = source
                    && let Some(mut range) = range(*value)
                {
                    prop_assert!(range.all(|byte| owner[byte] == Some(*value)), "value {value} was overwritten");
                }
            }
            for &value in &task.outputs {
                if let Some(mut range) = range(value) {
                    prop_assert!(range.all(|byte| owner[byte] == Some(value)), "output {value} was overwritten");
                }
            }
            finished[lane] += 1;
            prop_assert_eq!(finished[lane], task.position);
        } else {
            let index = schedule.lanes[lane].tasks[next[lane]];
            next[lane] += 1;
            let task = &schedule.tasks[index];
            let unit = |index: usize| {
                let address = &plan.segments[schedule.tasks[index].segment.0 as usize].unit;
                plan.units.iter().find(|unit| unit.address == *address).unwrap()
            };
            for other in running.iter().flatten() {
                prop_assert!(unit(index).is_disjoint(unit(*other)), "units that share a resource run at once");
            }
            for source in &task.inputs {
                if let Source::Value(value) = source {
                    let producer = &schedule.tasks[schedule.values[*value].producer];
                    prop_assert!(finished[producer.lane] >= producer.position, "starts before its input is made");
                }
            }
            for &value in &task.outputs {
                range(value).into_iter().flatten().for_each(|byte| owner[byte] = Some(value));
            }
            running[lane] = Some(index);
        }
    }
    prop_assert_eq!(finished.iter().sum::<u32>() as usize, schedule.tasks.len(), "deadlock");
    Ok(())
}

/// `precedes` by depth-first search over waits and lane sequences.
fn precedes_by_search(schedule: &Schedule, first: usize, second: usize) -> bool {
    let mut stack = vec![second];
    let mut seen = BTreeSet::new();
    while let Some(index) = stack.pop() {
        let task = &schedule.tasks[index];
        let mut before: Vec<_> =
            task.waits.iter().map(|&(lane, count)| schedule.lanes[lane].tasks[count as usize - 1]).collect();
        if task.position > 1 {
            before.push(schedule.lanes[task.lane].tasks[task.position as usize - 2]);
        }
        for earlier in before {
            if earlier == first {
                return true;
            }
            if seen.insert(earlier) {
                stack.push(earlier);
            }
        }
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_legal_schedule_overwrites_a_live_value(case in cases(), seeds in proptest::array::uniform4(any::<u64>())) {
        let (graph, plan) = build(&case);
        plan.check(&[&graph]).unwrap();
        let schedule = Schedule::new(&plan, &[&graph]).unwrap();
        for placement in [Placement::pairwise(&schedule), Placement::by_lane(&schedule), Placement::new(&schedule, false)] {
            prop_assert!(placement.bytes <= placement.bytes_without_reuse);
            for seed in seeds {
                simulate(&schedule, &placement, &plan, seed)?;
            }
        }
        for first in 0..schedule.tasks.len() {
            for second in 0..schedule.tasks.len() {
                prop_assert_eq!(schedule.precedes(first, second), precedes_by_search(&schedule, first, second));
            }
        }
        // Resource orders are kept.
        let position: HashMap<_, _> = schedule.tasks.iter().enumerate().map(|(index, task)| (task.task, index)).collect();
        for order in plan.order.values() {
            for pair in order.windows(2) {
                prop_assert!(schedule.precedes(position[&pair[0]], position[&pair[1]]));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn results_are_those_of_the_sequential_reference(case in cases(), keep in any::<bool>()) {
        let (graph, plan) = build(&case);
        let fake = Fake::leak(Behaviour::default());
        let find = fake.find(&plan);
        let options = ExecutorOptions { keep_values: keep, ..ExecutorOptions::default() };
        let mut executor = Executor::new(plan.clone(), &[&graph], &FakeSource(&graph), &find, &options).unwrap();
        let mut random = Random(case.seed);
        for _ in 0..3 {
            let inputs: Vec<Vec<u8>> =
                (0..case.items).map(|_| (0..64).map(|_| random.below(256) as u8).collect()).collect();
            for (index, input) in inputs.iter().enumerate() {
                executor.input_mut(index).copy_from_slice(input);
            }
            executor.run_bound().unwrap();
            let wanted = inputs.iter().flat_map(|input| reference(&graph, &plan, input));
            for (index, wanted) in wanted.enumerate() {
                prop_assert_eq!(executor.output(index), wanted.as_slice());
            }
        }
        let spans: usize = executor.trace().lanes.iter()
            .map(|lane| lane.spans.iter().filter(|span| span.kind == trefoil_core::SpanKind::Compute).count()).sum();
        prop_assert_eq!(spans, plan.segments.len() * case.items as usize);
    }
}
