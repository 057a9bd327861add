use super::place::shortest;
use super::*;
use crate::testing::{ProfileBuilder, chain};
use proptest::prelude::*;
use trefoil_core::{Resource, UnitKind};

/// `a:CPU` on two cores and on each; models of 4 operators of equal cost, by (all cores, one core).
fn machine() -> Vec<Unit> {
    ["a:CPU", "a:CPU@0", "a:CPU@1"]
        .map(|address| {
            let address: UnitAddress = address.parse().unwrap();
            let cores = if address.cores.is_empty() { vec![0, 1] } else { address.cores.clone() };
            Unit {
                address,
                kind: UnitKind::Cpu,
                resources: cores.into_iter().map(Resource::Core).collect(),
                limits: trefoil_core::UnitLimits::default(),
                simulated: false,
                description: None,
            }
        })
        .into()
}

/// A profile of a chain of 4 operators, `wide_ms` whole on all cores and `narrow_ms` on core 0; core 1 was not measured.
fn profile(wide_ms: f64, narrow_ms: f64) -> (OperatorGraph, Profile) {
    let graph = chain(4, 1000);
    let builder = ProfileBuilder::new(&graph)
        .unit("a:CPU", UnitKind::Cpu)
        .unit("a:CPU@0", UnitKind::Cpu)
        .operators(0, &[Some(wide_ms / 4.0); 4])
        .operators(1, &[Some(narrow_ms / 4.0); 4])
        .whole(0, wide_ms)
        .whole(1, narrow_ms);
    let mut profile = builder.profile;
    profile.units = machine().into_iter().take(2).collect();
    (graph, profile)
}

fn request(models: &[(OperatorGraph, Profile)]) -> TogetherRequest<'_> {
    let models = models.iter().map(|(graph, profile)| SharedModel { profile, graph }).collect();
    TogetherRequest::new(models, machine())
}

fn check(request: &TogetherRequest<'_>, plan: &Plan) {
    let graphs: Vec<&OperatorGraph> = request.models.iter().map(|model| model.graph).collect();
    plan.check(&graphs).unwrap();
}

#[test]
fn serial_adds_up_and_one_per_unit_takes_the_longest() {
    let models = [profile(2.0, 3.0), profile(0.9, 1.0)];
    let request = request(&models);
    let serial = serial(&request).unwrap();
    check(&request, &serial);
    assert!((serial.claimed - 2.9).abs() < 1e-9, "{}", serial.claimed);
    let apart = one_per_unit(&request).unwrap();
    check(&request, &apart);
    assert!((apart.claimed - 3.0).abs() < 1e-9, "{}", apart.claimed);
    let units: Vec<_> = apart.segments.iter().map(|segment| segment.unit.cores.clone()).collect();
    assert!(units.contains(&vec![0]) && units.contains(&vec![1]), "{units:?}");
    let free = own_threading(&request).unwrap();
    assert!(free.segments.iter().all(|segment| segment.unit.cores.is_empty()) && free.claimed == 0.0);
}

#[test]
fn models_go_where_they_are_told() {
    let models = [profile(2.0, 3.0), profile(0.9, 1.0)];
    let request = request(&models);
    let plan = on_units(&request, &[2, 1]).unwrap();
    check(&request, &plan);
    let units: Vec<_> = plan.segments.iter().map(|segment| segment.unit.to_string()).collect();
    assert_eq!(units, ["a:CPU@1", "a:CPU@0"]);
    assert!((plan.claimed - 3.0).abs() < 1e-9, "{}", plan.claimed);
    // On one core they wait for each other.
    assert!((on_units(&request, &[1, 1]).unwrap().claimed - 4.0).abs() < 1e-9);
    for wrong in [&[0usize][..], &[0, 3]] {
        assert!(on_units(&request, wrong).unwrap_err().to_string().contains("units are named"));
    }
}

#[test]
fn two_rounds_share_cores_evenly() {
    // All cores give nothing: 3 + 1 on each core instead of 3 + 3 beside 1 + 1.
    let models = [profile(3.0, 3.0), profile(1.0, 1.0)];
    let mut request = request(&models);
    request.items = 2;
    let plan = placed(&request).unwrap();
    check(&request, &plan);
    assert!((plan.claimed - 4.0).abs() < 1e-9, "{}", plan.claimed);
    assert!((one_per_unit(&request).unwrap().claimed - 6.0).abs() < 1e-9);
}

#[test]
fn a_tail_on_all_cores_beats_an_idle_core() {
    let models = [profile(2.0, 3.0), profile(0.9, 1.0)];
    let request = request(&models);
    // The second model hides 1 ms of the first; of the other 2 ms in 4 parts of 0.75 each all cores make two thirds. The cut
    // after one part wastes 0.25 of a core: 1 + 3/4·2 = 2.5; after two parts: 1.5 + 1 = 2.5.
    let plans = tail_cuts(&request, 3).unwrap();
    let best = &plans[0];
    check(&request, best);
    assert!((best.claimed - 2.5).abs() < 1e-9, "{}", best.claimed);
    assert!(best.claimed < placed(&request).unwrap().claimed);
    assert!(!best.all_measured && best.segments.len() == 3);
}

#[test]
fn a_cut_that_measured_badly_is_given_up() {
    let (graph, mut known) = profile(2.0, 3.0);
    let models = [(graph.clone(), known.clone()), profile(0.9, 1.0)];
    let first = tail_cuts(&request(&models), 1).unwrap().remove(0);
    let tail = first.segments.iter().max_by_key(|segment| segment.operators[0]).unwrap();
    let mut builder = ProfileBuilder::new(&graph);
    std::mem::swap(&mut builder.profile, &mut known);
    let subject = trefoil_core::Subject::Segment {
        model: graph.fingerprint.clone(),
        granularity: graph.granularity,
        operators: tail.operators.clone(),
    };
    builder.record(subject, std::slice::from_ref(&tail.unit), crate::testing::ok(50.0));
    let models = [(graph, builder.profile), profile(0.9, 1.0)];
    let request = request(&models);
    let second = tail_cuts(&request, 1).unwrap().remove(0);
    check(&request, &second);
    assert!(second.segments.iter().all(|segment| segment.operators != tail.operators), "{second:#?}");
    assert!(second.claimed < 3.0);
}

#[test]
fn a_model_that_runs_nowhere_is_named() {
    let (graph, mut unmeasured) = profile(1.0, 1.0);
    unmeasured.measurements.clear();
    let models = [(graph, unmeasured)];
    let error = placed(&request(&models)).unwrap_err().to_string();
    assert!(error.contains("synthetic") && error.contains("a:CPU@1"), "{error}");
}

#[test]
fn a_strained_core_is_left() {
    let models = [profile(4.0, 3.0)];
    let mut request = request(&models);
    let unit_of = |request: &TogetherRequest<'_>| placed(request).unwrap().segments[0].unit.to_string();
    assert_eq!(unit_of(&request), "a:CPU@0");
    request.strained.insert("a:CPU@0".parse().unwrap(), 1.2);
    request.strained.insert("a:CPU".parse().unwrap(), 1.2);
    assert_eq!(unit_of(&request), "a:CPU@1");
    assert!((serial(&request).unwrap().claimed - 3.0).abs() < 1e-9);
}

#[test]
fn slowdown_is_paid_beside_others_only() {
    let models = [profile(3.0, 3.0), profile(3.0, 3.0)];
    let mut request = request(&models);
    let [first, second] = ["a:CPU@0", "a:CPU@1"].map(|address| address.parse::<UnitAddress>().unwrap());
    request.slowdown.insert((first.clone(), second.clone()), 1.5);
    request.slowdown.insert((second, first), 1.5);
    assert!((one_per_unit(&request).unwrap().claimed - 4.5).abs() < 1e-9);
    assert!((serial(&request).unwrap().claimed - 6.0).abs() < 1e-9);
}

/// One request of each model every `period_ms`, due within `deadline_ms`.
fn stream(period_ms: f64, deadline_ms: Option<f64>, priority: i32) -> RateStream {
    RateStream { period_ms, offset_ms: 0.0, deadline_ms, priority }
}

#[test]
fn rates_that_one_unit_cannot_keep_go_to_two_cores() {
    // All cores one after another: 2.5 + 2.5 ms of work every 4 ms; on a core each: 3 ms every 4 ms.
    let models = [profile(2.5, 3.0), profile(2.5, 3.0)];
    let request = request(&models);
    let streams = [stream(4.0, Some(4.0), 0), stream(4.0, Some(4.0), 0)];
    let (plan, prediction) = served(&request, &streams, 1000.0).unwrap();
    check(&request, &plan);
    assert!(prediction.miss_rate == 0.0, "{prediction:?}");
    assert!((prediction.mean_response_ms - 3.0).abs() < 0.01, "{prediction:?}");
    assert!(plan.segments.iter().all(|segment| segment.unit.cores.len() == 1), "{plan:#?}");
    let one_by_one = predict_served(&request, &serial(&request).unwrap(), &streams, 1000.0).unwrap();
    assert!(one_by_one.miss_rate > 0.4, "the queue grows for ever: {one_by_one:?}");
}

#[test]
fn a_lone_rare_request_gets_all_cores() {
    let models = [profile(2.0, 3.0)];
    let request = request(&models);
    let (plan, prediction) = served(&request, &[stream(100.0, None, 0)], 1000.0).unwrap();
    assert!(plan.segments[0].unit.cores.is_empty());
    assert!((prediction.mean_response_ms - 2.0).abs() < 0.01);
}

#[test]
fn rates_are_checked() {
    let models = [profile(2.0, 3.0)];
    let request = request(&models);
    for (streams, wanted) in [(vec![], "rates of 0"), (vec![stream(0.0, None, 0)], "not above 0")] {
        let error = served(&request, &streams, 10.0).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

proptest! {
    /// The heuristic for many jobs is never worse than the longest-job-first bound, and never better than what is possible.
    #[test]
    fn assignments_are_within_bounds(costs in prop::collection::vec(1u32..100, 1..24), slots in 1usize..5) {
        let jobs: Vec<Vec<f64>> = costs.iter().map(|&cost| vec![f64::from(cost); slots]).collect();
        let choice = shortest(&jobs);
        let mut loads = vec![0.0; slots];
        for (row, &slot) in jobs.iter().zip(&choice) {
            loads[slot] += row[slot];
        }
        let longest = loads.iter().copied().fold(0.0, f64::max);
        let sum: f64 = costs.iter().copied().map(f64::from).sum();
        let bound = (sum / slots as f64).max(f64::from(*costs.iter().max().unwrap()));
        // Graham: longest first is within 4/3 − 1/(3m) of the optimum, which is at least `bound`… and at most twice it.
        prop_assert!(longest >= bound - 1e-9);
        prop_assert!(longest <= (4.0 / 3.0) * 2.0 * bound + 1e-9);
        prop_assert_eq!(choice.len(), jobs.len());
    }

    /// Few jobs are divided exactly as by trying everything recursively.
    #[test]
    fn few_jobs_are_exact(costs in prop::collection::vec(prop::collection::vec(1u32..50, 2), 1..7)) {
        fn least(jobs: &[Vec<u32>], loads: [u32; 2]) -> u32 {
            match jobs.split_first() {
                None => loads[0].max(loads[1]),
                Some((job, rest)) => {
                    let left = least(rest, [loads[0] + job[0], loads[1]]);
                    left.min(least(rest, [loads[0], loads[1] + job[1]]))
                }
            }
        }
        let jobs: Vec<Vec<f64>> = costs.iter().map(|row| row.iter().copied().map(f64::from).collect()).collect();
        let mut loads = [0.0; 2];
        for (row, slot) in jobs.iter().zip(shortest(&jobs)) {
            loads[slot] += row[slot];
        }
        // Sums of small whole numbers are exact.
        prop_assert_eq!(loads[0].max(loads[1]) as u32, least(&costs, [0, 0]));
    }
}

/// The model input, and what the last operator makes, of a chain.
fn ends(graph: &OperatorGraph) -> (trefoil_core::TensorId, trefoil_core::TensorId) {
    (graph.inputs[0], graph.outputs[0])
}

fn linked<'a>(models: &'a [(OperatorGraph, Profile)], repeats: &[u32], links: &[(usize, usize)]) -> LinkedRequest<'a> {
    let link = |&(from, to): &(usize, usize)| crate::StageLink {
        from: (from, ends(&models[from].0).1),
        to: (to, ends(&models[to].0).0),
    };
    LinkedRequest { stages: request(models), repeats: repeats.to_vec(), links: links.iter().map(link).collect() }
}

#[test]
fn stages_that_do_not_read_from_each_other_overlap() {
    // Two encoders, one of which a loop of three reads; the loop reads itself, too.
    let mut models = [profile(2.0, 2.0), profile(1.5, 1.5), profile(1.0, 1.2)];
    for (graph, _) in &mut models {
        // A chain's input is smaller than what its operators hand on.
        let input = graph.inputs[0].index();
        (graph.tensors[input].shape, graph.tensors[input].bytes) = (vec![1000], 1000);
    }
    let request = linked(&models, &[1, 1, 3], &[(0, 2), (2, 2)]);
    let serial = linked_serial(&request).unwrap();
    assert!((serial.claimed - 6.5).abs() < 1e-9, "{}", serial.claimed);
    let singles = linked_on_one_unit(&request).unwrap();
    assert_eq!((singles.len(), singles[0].method.as_str()), (3, "single:a:CPU"));
    assert!((singles[0].claimed - 6.5).abs() < 1e-9 && (singles[2].claimed - 7.1).abs() < 1e-9);
    let staged = linked_staged(&request).unwrap();
    // 2 beside 1.5 on a core each, then three on all cores; or the loop on the core that is free first, beside the second encoder.
    assert!((staged.claimed - 5.0).abs() < 1e-9, "{}", staged.claimed);
    for plan in singles.iter().chain([&serial, &staged]) {
        let graphs: Vec<&OperatorGraph> = models.iter().map(|(graph, _)| graph).collect();
        plan.check(&graphs).unwrap();
        assert_eq!((plan.tasks.len(), plan.links.len()), (5, 2), "{}", plan.method);
        let iterations: Vec<u32> = plan.tasks.iter().map(|task| task.iteration).collect();
        assert_eq!(iterations.iter().max(), Some(&2));
    }
}

#[test]
fn many_stages_are_placed_no_worse_than_one_after_another() {
    let models: Vec<_> = (0..12).map(|at| profile(1.0 + f64::from(at) * 0.1, 1.5)).collect();
    let links: Vec<_> = (0..10).map(|at| (at, at + 2)).collect();
    let request = linked(&models, &[1; 12], &links);
    // 3^12 assignments are too many to look at one by one.
    let (staged, serial) = (linked_staged(&request).unwrap(), linked_serial(&request).unwrap());
    assert!(staged.claimed < serial.claimed * 0.8, "{} {}", staged.claimed, serial.claimed);
}

#[test]
fn stages_and_links_must_fit_each_other() {
    let models = [profile(2.0, 2.0), profile(1.0, 1.0)];
    for (request, wanted) in [
        (linked(&models, &[1, 1], &[(0, 1), (1, 0)]), "circle"),
        (linked(&models, &[1], &[]), "repeats"),
        (linked(&models, &[1, 0], &[]), "repeats"),
    ] {
        let message = linked_staged(&request).unwrap_err().to_string();
        assert!(message.contains(wanted), "{message}");
    }
}

fn powers() -> Powers {
    let busy = [("a:CPU", 15.0), ("a:CPU@0", 9.0), ("a:CPU@1", 9.0)];
    Powers { idle: 5.0, busy: busy.map(|(unit, watts)| (unit.parse().unwrap(), watts)).into() }
}

#[test]
fn units_that_work_at_once_pay_for_the_idle_package_once() {
    let (powers, unit) = (powers(), |text: &str| -> UnitAddress { text.parse().unwrap() });
    let close = |joules: Option<f64>, wanted: f64| assert!((joules.unwrap() - wanted).abs() < 1e-12, "{joules:?}");
    close(powers.joules(2.0, [(&unit("a:CPU"), 2.0)]), 0.03);
    // 3 ms of 5 W, and 4 W more on each core while it works.
    close(powers.joules(3.0, [(&unit("a:CPU@0"), 3.0), (&unit("a:CPU@1"), 1.0)]), 0.031);
    assert_eq!(powers.joules(1.0, [(&unit("b:CPU"), 1.0)]), None);
}

#[test]
fn least_energy_is_not_always_the_shortest_round() {
    // All cores: 2 ms of 15 W; one core: 3 ms of 9 W.
    let models = [profile(2.0, 3.0)];
    let request = request(&models);
    let plan = frugal(&request, &powers()).unwrap();
    check(&request, &plan);
    assert!((plan.claimed - 0.027).abs() < 1e-12 && (plan.simulated_ms - 3.0).abs() < 1e-12, "{}", plan.claimed);
    assert_eq!(placed(&request).unwrap().segments[0].unit.to_string(), "a:CPU");
    // A second model beside it costs only what its core adds.
    let models = [profile(2.0, 3.0), profile(0.9, 1.0)];
    let two = TogetherRequest { items: 2, ..self::request(&models) };
    let plan = frugal(&two, &powers()).unwrap();
    check(&two, &plan);
    assert!((plan.claimed - (0.005 * 6.0 + 0.004 * 8.0)).abs() < 1e-12, "{}", plan.claimed);
    // Units without a known power are not used.
    let none = Powers { idle: 5.0, busy: BTreeMap::new() };
    assert!(frugal(&two, &none).is_err());
}
