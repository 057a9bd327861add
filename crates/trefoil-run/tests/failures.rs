//! What happens when segments fail: everything stops, nothing hangs, and the error says where.

mod support;

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;
use support::{Behaviour, Fake, FakeSource, Mishap, chain, graph, plan, reference, unit};
use trefoil_core::{OperatorGraph, Plan, TaskId};
use trefoil_run::{Executor, ExecutorOptions, RunError};

fn executor(graph: &OperatorGraph, plan: &Plan, behaviour: Behaviour) -> Result<Executor, RunError> {
    let fake = Fake::leak(behaviour);
    let find = fake.find(plan);
    Executor::new(plan.clone(), &[graph], &FakeSource(graph), &find, &ExecutorOptions::default())
}

fn failing(segment: u32, run: u32, mishap: Mishap) -> Behaviour {
    Behaviour { mishaps: BTreeMap::from([(segment, (run, mishap))]), ..Behaviour::default() }
}

/// Runs `body` on a thread and fails the test if it takes longer than a minute: a hang is a failure, not a wait.
fn within_a_minute(body: impl FnOnce() + Send + 'static) {
    let (done, waited) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    match waited.recv_timeout(Duration::from_mins(1)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs"),
        _ => thread.join().unwrap(),
    }
}

fn two_lanes(count: u32) -> (OperatorGraph, Plan) {
    chain(count, &[unit("fake:a", &["a"]), unit("fake:b", &["b"])], 64)
}

#[test]
fn an_error_names_the_segment_and_the_executor_stays_usable() {
    within_a_minute(|| {
        let (graph, plan) = two_lanes(7);
        let mut executor = executor(&graph, &plan, failing(4, 2, Mishap::Error)).unwrap();
        executor.input_mut(0).fill(3);
        executor.run_bound().unwrap();
        let error = executor.run_bound().unwrap_err();
        assert_eq!(error.to_string(), "segment 4 on fake:a (operators `op4`) failed: fake:a failed to run 4: boom");
        for _ in 0..3 {
            executor.run_bound().unwrap();
            assert_eq!(executor.output(0), reference(&graph, &plan, &[3; 64])[0]);
        }
    });
}

#[test]
fn a_panic_poisons_the_executor_in_words() {
    within_a_minute(|| {
        let (graph, plan) = two_lanes(7);
        let mut executor = executor(&graph, &plan, failing(3, 2, Mishap::Panic)).unwrap();
        executor.run_bound().unwrap();
        let error = executor.run_bound().unwrap_err();
        assert!(error.to_string().starts_with("segment 3 on fake:b (operators `op3`) panicked: fake panic"), "{error}");
        let again = executor.run_bound().unwrap_err();
        assert!(matches!(&again, RunError::Poisoned { first } if *first == error.to_string()), "{again}");
    });
}

#[test]
fn a_segment_that_does_not_compile_is_named_and_all_threads_end() {
    within_a_minute(|| {
        let (graph, plan) = two_lanes(5);
        let error = executor(&graph, &plan, Behaviour { refuses: Some(3), ..Behaviour::default() }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "segment 3 on fake:b (operators `op3`) is not ready to run: fake:b does not compile 3.onnx: no such kernel"
        );
    });
}

#[test]
fn every_segment_may_fail_at_any_run_without_a_hang() {
    within_a_minute(|| {
        // Three lanes, a diamond in the middle, so that lanes wait for each other in both directions.
        let edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)];
        let graph = graph(7, &edges, |_| 200);
        let units = [unit("fake:a", &["a"]), unit("fake:b", &["b"]), unit("fake:c", &["c"])];
        let cuts: Vec<_> = (0..7).map(|operator| (vec![operator], operator as usize % 3)).collect();
        let sequence: Vec<_> = (0..7).map(|segment| (segment, 0)).collect();
        let plan = plan(&graph, &units, &cuts, &sequence, true);
        for segment in 0..7 {
            for run in 1..4 {
                for mishap in [Mishap::Error, Mishap::Panic] {
                    let mut executor = executor(&graph, &plan, failing(segment, run, mishap)).unwrap();
                    for _ in 1..run {
                        executor.run_bound().unwrap();
                    }
                    let error = executor.run_bound().unwrap_err();
                    assert!(error.to_string().starts_with(&format!("segment {segment} on ")), "{error}");
                }
            }
        }
    });
}

#[test]
fn plans_that_cannot_run_are_refused_in_one_line() {
    let (graph, good) = two_lanes(4);
    let refuse = |plan: &Plan| {
        let error = executor(&graph, plan, Behaviour::default()).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        error
    };
    let mut incomplete = good.clone();
    incomplete.order.get_mut("device:b").unwrap().pop();
    assert!(refuse(&incomplete).contains("the order of device:b leaves out task 3 (fake:b)"));
    let mut twice = good.clone();
    twice.order.get_mut("device:a").unwrap().push(TaskId(0));
    assert!(refuse(&twice).contains("names task 0 twice"));
    let mut backwards = good.clone();
    backwards.order.get_mut("device:a").unwrap().reverse();
    assert!(refuse(&backwards).contains("can never start"));
    let mut missing = good.clone();
    missing.tasks.pop();
    missing.order.get_mut("device:b").unwrap().pop();
    assert!(refuse(&missing).contains("no task makes the model output `t3`"));
    let mut stranger = good.clone();
    stranger.order.get_mut("device:a").unwrap().push(TaskId(77));
    assert!(refuse(&stranger).contains("names task 77, which does not exist"));
    let mut other_model = good.clone();
    other_model.models[0].fingerprint = "1".repeat(32);
    assert!(refuse(&other_model).contains("profile holds"));
}

#[test]
fn strict_refuses_copies_and_other_resources() {
    let (graph, plan) = two_lanes(2);
    let strict = ExecutorOptions { strict: true, ..ExecutorOptions::default() };
    let fake = Fake::leak(Behaviour { copied: true, ..Behaviour::default() });
    let find = fake.find(&plan);
    let error = Executor::new(plan.clone(), &[&graph], &FakeSource(&graph), &find, &strict).unwrap_err();
    assert_eq!(error.to_string(), "strict: port `x` of segment 0 on fake:a is copied, not shared");
    let lenient = Executor::new(plan.clone(), &[&graph], &FakeSource(&graph), &find, &ExecutorOptions::default());
    assert_eq!(lenient.unwrap().memory().copied.len(), 4);

    let mut moved = plan.clone();
    moved.units[1] = unit("fake:b", &["b", "b2"]);
    let find_moved = fake.find(&moved);
    let notes = Executor::new(plan.clone(), &[&graph], &FakeSource(&graph), &find_moved, &ExecutorOptions::default());
    assert_eq!(
        notes.unwrap().notes(),
        ["fake:b holds device:b, device:b2 here but device:b in the plan; plan again on this machine"]
    );
    // Units that are apart in the plan but not here must not run at once.
    moved.units[1] = unit("fake:b", &["a"]);
    let find_shared = fake.find(&moved);
    let error = Executor::new(plan, &[&graph], &FakeSource(&graph), &find_shared, &ExecutorOptions::default());
    assert!(error.unwrap_err().to_string().contains("share a resource on this machine"));
}
