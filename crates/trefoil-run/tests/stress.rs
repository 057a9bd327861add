//! Many tiny tasks over several lanes: no lost wake-up, no wrong order.

mod support;

use std::time::Duration;
use support::{Behaviour, Fake, FakeSource, Random, graph, plan, reference, unit};
use trefoil_run::{Executor, ExecutorOptions};

/// `runs` × `segments` tasks over `lanes` lanes of a random layered graph; every result is compared.
fn stress(lanes: usize, segments: u32, runs: u32, spin: Duration) {
    let mut random = Random(lanes as u64 * 1000 + u64::from(segments));
    let mut edges = Vec::new();
    for to in 1..segments {
        for _ in 0..2 {
            let back = 1 + random.below(6.min(to as usize)) as u32;
            edges.push((to - back, to));
        }
    }
    let graph = graph(segments, &edges, |index| 8 + u64::from(index % 5) * 40);
    let units: Vec<_> = (0..lanes).map(|lane| unit(&format!("fake:u{lane}"), &[&format!("r{lane}")])).collect();
    let cuts: Vec<_> = (0..segments).map(|operator| (vec![operator], random.below(lanes))).collect();
    let sequence: Vec<_> = (0..segments as usize).map(|segment| (segment, 0)).collect();
    let plan = plan(&graph, &units, &cuts, &sequence, false);
    let fake = Fake::leak(Behaviour::default());
    let find = fake.find(&plan);
    let options = ExecutorOptions { spin, linger: spin, ..ExecutorOptions::default() };
    let mut executor = Executor::new(plan.clone(), &[&graph], &FakeSource(&graph), &find, &options).unwrap();
    assert_eq!(executor.schedule().lanes.len(), lanes);
    for run in 0..runs {
        let input = [run as u8; 64];
        executor.input_mut(0).copy_from_slice(&input);
        executor.run_bound().unwrap();
        if run % 16 == 0 {
            for (index, wanted) in reference(&graph, &plan, &input).iter().enumerate() {
                assert_eq!(executor.output(index), wanted, "run {run}");
            }
        }
    }
}

#[test]
fn two_lanes_that_spin() {
    stress(2, 100, 1000, Duration::from_micros(50));
}

#[test]
fn two_lanes_that_sleep_at_once() {
    stress(2, 100, 1000, Duration::ZERO);
}

#[test]
fn three_lanes_on_short_spins() {
    stress(3, 100, 1000, Duration::from_micros(2));
}

#[test]
fn four_lanes_that_sleep_at_once() {
    stress(4, 100, 1000, Duration::ZERO);
}

#[test]
fn runs_of_one_task_per_lane() {
    stress(4, 5, 5000, Duration::ZERO);
}
