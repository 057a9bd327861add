//! Certificates with something wrong in what enters no cost and no bound: names, numbers of items and requests, weights, units that nobody uses,
//! fields that nobody reads. Each is refused with one line.

mod support;

use proptest::prelude::*;
use serde_json::{Value, json};
use support::certified::{paper, refused, value};
use trefoil_check::check;
use trefoil_core::{Objective, OperatorGraph, TensorId};
use trefoil_plan::testing::{ProfileBuilder, chain};
use trefoil_plan::{
    Application, Budget, ConcurrentRequest, PlanOptions, PlanRequest, Stage, StageLink, concurrent, plan_several,
    plan_with,
};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(30_000), ..PlanOptions::default() }
}

fn model(name: &str, number: u64) -> (OperatorGraph, ProfileBuilder) {
    let mut graph = chain(3, 64);
    name.clone_into(&mut graph.model);
    graph.fingerprint = format!("{number:032x}");
    for (at, operator) in graph.operators.iter_mut().enumerate() {
        operator.signature.0 = format!("{number:016x}{at:016x}");
    }
    let builder = ProfileBuilder::new(&graph)
        .cpus(3)
        .operators(0, &[Some(1.0), Some(0.5), Some(0.75)])
        .operators(1, &[Some(0.5), Some(1.5), Some(1.0)])
        .operators(2, &[Some(2.0); 3])
        .transfers(&[(0, 0.125)])
        .whole(0, 1.25)
        .watts(0, 4.0)
        .watts(1, 2.0)
        .watts(2, 1.0);
    (graph, builder)
}

type Tamper = (&'static str, fn(&mut Value));

/// Applies every change to the certificate and expects one line that holds its words.
fn all_refused(certificate: &Value, profiles: &[Value], tampers: &[Tamper]) {
    check(certificate, profiles).unwrap_or_else(|error| panic!("the certificate itself: {error}"));
    for &(want, tamper) in tampers {
        let message = refused(certificate, profiles, want, tamper).to_string();
        assert!(message.contains(want) && !message.contains('\n'), "`{want}`: {message}");
    }
}

/// What holds for every certificate.
const ANY: &[Tamper] = &[
    ("no planning method `concurent`", |paper| paper["method"] = json!("concurent")),
    ("no planning method ``", |paper| paper["method"] = Value::Null),
    ("objective `latancy`", |paper| paper["objective"] = json!("latancy")),
    ("not for the objective `throughput`", |paper| paper["objective"] = json!("throughput")),
    ("field `methd`", |paper| paper["methd"] = json!("dag")),
    ("field `note`", |paper| paper["tasks"][0]["note"] = json!("fast")),
    ("field `gap`", |paper| paper["claim"]["gap"] = json!(0.0)),
    ("field `proven`", |paper| paper["bound"]["proofs"][0]["proven"] = json!(true)),
    ("field `size`", |paper| paper["models"][0]["size"] = json!(1)),
    ("one of both", |paper| paper["tasks"][0]["tensor"] = json!(0)),
    ("`item` holds -1", |paper| paper["tasks"][0]["item"] = json!(-1)),
    ("`item` holds 1e+308", |paper| paper["tasks"][0]["item"] = json!(1e308)),
    ("`item` holds 0.5", |paper| paper["tasks"][0]["item"] = json!(0.5)),
    ("`item` holds null", |paper| {
        paper["tasks"][0].as_object_mut().unwrap().remove("item");
    }),
    ("`iteration` holds -1", |paper| paper["tasks"][0]["iteration"] = json!(-1)),
    ("`iteration` holds 1e+308", |paper| paper["tasks"][0]["iteration"] = json!(1e308)),
    ("`iteration` holds \"0\"", |paper| paper["tasks"][0]["iteration"] = json!("0")),
    ("calls the model \"another\"", |paper| paper["models"][0]["name"] = json!("another")),
    ("no unit \"z:NPU\"", |paper| paper["units"].as_array_mut().unwrap().push(json!("z:NPU"))),
    ("lists the unit \"a:CPU\" twice", |paper| paper["units"].as_array_mut().unwrap().push(json!("a:CPU"))),
    ("fixed twice", |paper| {
        let pin = json!({ "model": 0, "operator": 0, "unit": 0 });
        let other = json!({ "model": 0, "operator": 0, "unit": 1 });
        *paper["fixed"].as_array_mut().unwrap() = vec![pin, other];
    }),
];

#[test]
fn one_inference() {
    let (graph, builder) = model("one", 1);
    let profiles = [value(&builder.profile)];
    let request = PlanRequest::new(&builder.profile, &graph);
    let of = |method: &str| {
        let plan = plan_with(method, &request, &quick()).unwrap();
        paper(std::slice::from_ref(&request), &plan)
    };
    let dag = of("dag");
    all_refused(&dag, &profiles, ANY);
    // The bounds on energy do not hold for it.
    let mut odd = profiles.clone();
    odd[0]["declared_watts"] = json!({ "idle": 1.5 });
    let message = check(&dag, &odd).unwrap_err().to_string();
    assert!(message.contains("c:CPU draws less while it works than the idle machine"), "{message}");
    all_refused(
        &dag,
        &profiles,
        &[
            ("plans two models, not 1", |paper| paper["method"] = json!("joint")),
            ("makes no claim by rule `makespan`", |paper| paper["method"] = json!("pipeline")),
            ("makes no claim by rule `makespan`", |paper| paper["method"] = json!("sequential")),
            ("makes no claim by rule `makespan`", |paper| paper["method"] = json!("single:a:CPU")),
            ("an index below 1", |paper| {
                paper["requests"] = json!([{ "model": 1, "item": 0, "request": 0, "arrival_ms": 0.0 }]);
            }),
            ("an index below 1", |paper| paper["tasks"][0]["model"] = json!(1)),
            ("is no list", |paper| paper["requests"] = json!({})),
            ("price of `b:GPU`", |paper| {
                let proofs = paper["bound"]["proofs"].as_array_mut().unwrap();
                let load = proofs.iter_mut().find(|proof| proof["weights"].is_object()).unwrap();
                load["weights"]["b:GPU"] = json!(0.5);
            }),
            ("executed as item 7", |paper| {
                paper["tasks"].as_array_mut().unwrap().iter_mut().for_each(|task| task["item"] = json!(7));
            }),
        ],
    );
    let sequential = of("sequential");
    all_refused(
        &sequential,
        &profiles,
        &[("no claim by rule `paper-sequential`", |paper| paper["method"] = json!("interval"))],
    );
    let single = of("single:a:CPU");
    all_refused(
        &single,
        &profiles,
        &[
            ("puts everything on b:CPU", |paper| paper["method"] = json!("single:b:CPU")),
            ("puts everything on q:CPU", |paper| paper["method"] = json!("single:q:CPU")),
            ("no claim by rule `busy-sum`", |paper| paper["method"] = json!("dag")),
        ],
    );
    let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
    let plan = plan_with("dag", &energy, &quick()).unwrap();
    let certificate = paper(std::slice::from_ref(&energy), &plan);
    all_refused(
        &certificate,
        &profiles,
        &[
            ("not for the objective `latency`", |paper| paper["objective"] = json!("latency")),
            ("the makespan is no claim", |paper| {
                paper["claim"]["rule"] = json!("makespan");
                paper["claim"]["value"] = paper["claim"]["simulated_ms"].clone();
                paper["bound"] = Value::Null;
            }),
        ],
    );
}

#[test]
fn two_models_and_their_requests() {
    let ((one, first), (two, second)) = (model("one", 1), model("two", 2));
    let profiles = [value(&first.profile), value(&second.profile)];
    let requests = [PlanRequest::new(&first.profile, &one), PlanRequest::new(&second.profile, &two)];
    let plan = plan_several("concurrent", &requests, &quick()).unwrap();
    let certificate = paper(&requests, &plan);
    all_refused(&certificate, &profiles, ANY);
    let of_requests: &[Tamper] = &[
        ("is executed but in no request", |paper| {
            paper["requests"].as_array_mut().unwrap().pop();
        }),
        ("is requested twice", |paper| {
            let again = paper["requests"][0].clone();
            paper["requests"].as_array_mut().unwrap().push(again);
        }),
        ("never executed as asked", |paper| {
            let mut more = paper["requests"][0].clone();
            more["item"] = json!(5);
            paper["requests"].as_array_mut().unwrap().push(more);
        }),
        ("`item` holds -1", |paper| paper["requests"][0]["item"] = json!(-1)),
        ("`item` holds 1e+308", |paper| paper["requests"][0]["item"] = json!(1e308)),
        ("`request` holds 0.25", |paper| paper["requests"][0]["request"] = json!(0.25)),
        ("without gaps", |paper| paper["requests"][0]["request"] = json!(9)),
        ("an index below 2", |paper| paper["requests"][0]["model"] = json!(2)),
        ("field `deadline`", |paper| paper["requests"][0]["deadline"] = json!(3.0)),
        ("`arrival_ms`", |paper| paper["requests"][0]["arrival_ms"] = json!(-1.0)),
        ("a weight, which this claim does not count", |paper| paper["requests"][0]["weight"] = json!(2.0)),
        ("is no object", |paper| paper["requests"][0] = json!(0)),
    ];
    all_refused(&certificate, &profiles, of_requests);
    all_refused(
        &certificate,
        &profiles,
        &[
            ("plans no 2 models", |paper| paper["method"] = json!("dag")),
            ("executed as item 0, but its next one is 1", |paper| {
                paper["method"] = json!("joint");
                paper.as_object_mut().unwrap().remove("requests");
            }),
        ],
    );
    let plan = plan_several("joint", &requests, &quick()).unwrap();
    let joint = paper(&requests, &plan);
    all_refused(&joint, &profiles, ANY);
    all_refused(&joint, &profiles, &[("but its next one is 0", |paper| paper["method"] = json!("concurrent"))]);
}

#[test]
fn weights_links_and_repetitions() {
    let ((one, first), (two, second)) = (model("one", 1), model("two", 2));
    let profiles = [value(&first.profile), value(&second.profile)];
    let requests = [PlanRequest::new(&first.profile, &one), PlanRequest::new(&second.profile, &two)];
    let application = Application {
        stages: vec![
            Stage { profile: &first.profile, graph: &one, repeat: 1 },
            Stage { profile: &second.profile, graph: &two, repeat: 2 },
        ],
        links: vec![
            StageLink { from: (0, TensorId(3)), to: (1, TensorId(0)) },
            StageLink { from: (1, TensorId(3)), to: (1, TensorId(0)) },
        ],
        arrivals_ms: vec![0.0, 0.5],
        weight: 3.0,
        ..Application::new(&first.profile, &one)
    };
    let other = Application::new(&second.profile, &two);
    let asked = ConcurrentRequest { weighted: true, ..ConcurrentRequest::new(vec![application, other]) };
    let certificate = paper(&requests, &concurrent(&asked, &quick()).unwrap());
    all_refused(
        &certificate,
        &profiles,
        &[
            ("arrive apart or weigh differently", |paper| paper["requests"][0]["weight"] = json!(4.0)),
            ("`weight`", |paper| paper["requests"][0]["weight"] = json!("3")),
            ("states no requests, whose completions", |paper| paper["requests"] = json!([])),
            ("states no requests, whose completions", |paper| {
                paper.as_object_mut().unwrap().remove("requests");
                paper["claim"]["value"] = json!(0.0);
                paper["bound"] = Value::Null;
            }),
            ("states no weight", |paper| {
                paper["requests"][0].as_object_mut().unwrap().remove("weight");
            }),
            // All parts of one request: the mean is another then.
            ("the cost is", |paper| {
                for request in paper["requests"].as_array_mut().unwrap() {
                    if request["request"] == 0 {
                        request["weight"] = json!(30.0);
                    }
                }
            }),
            // Any claim is close to an infinite mean.
            ("request 2 weighs 1e308, which is no weight", |paper| {
                for request in paper["requests"].as_array_mut().unwrap() {
                    if request["request"] == 2 {
                        request["weight"] = json!(1e308);
                    }
                }
                paper["claim"]["value"] = json!(0.001);
                paper["bound"] = Value::Null;
            }),
            ("it states 1e+308, which nothing it tells of can be", |paper| {
                paper["requests"].as_array_mut().unwrap().iter_mut().for_each(|one| one["arrival_ms"] = json!(1e308));
            }),
            ("`item` holds -2", |paper| paper["links"][0]["from"]["item"] = json!(-2)),
            ("field `iteration`", |paper| paper["links"][0]["from"]["iteration"] = json!(0)),
            ("repetition", |paper| {
                for task in paper["tasks"].as_array_mut().unwrap() {
                    if task["iteration"] == 1 {
                        task["iteration"] = json!(2);
                    }
                }
            }),
        ],
    );
}

/// Profiles whose numbers lead to infinite costs, to which any claim would be close.
#[test]
fn profiles_of_endless_numbers_prove_nothing() {
    let (graph, builder) = model("one", 1);
    let request = PlanRequest { objective: Objective::Energy, ..PlanRequest::new(&builder.profile, &graph) };
    let mut certificate = paper(std::slice::from_ref(&request), &plan_with("dag", &request, &quick()).unwrap());
    let profile = value(&builder.profile);
    check(&certificate, std::slice::from_ref(&profile)).unwrap();
    certificate["claim"]["value"] = json!(0.001);
    certificate["bound"] = Value::Null;
    let records = profile["measurements"].as_array().unwrap();
    let at = |kind: &str| records.iter().position(|record| record["subject"]["kind"] == kind).unwrap();
    let told = |change: &dyn Fn(&mut Value)| {
        let mut odd = profile.clone();
        change(&mut odd);
        check(&certificate, &[odd]).unwrap_err().to_string()
    };
    let ((operator, transfer), name) = ((at("operator"), at("transfer")), builder.profile.units[0].address.to_string());
    for record in [operator, transfer] {
        for ms in [1e308, -1.0, 1e-300] {
            let message = told(&|odd| odd["measurements"][record]["outcome"]["timing"]["total"]["median"] = json!(ms));
            assert!(
                message.contains("which is no time") && message.contains(&format!("measurement {record}")),
                "{message}"
            );
        }
    }
    let message = told(&|odd| odd["declared_watts"][&name] = json!(1e308));
    assert!(message.contains("which is no power"), "{message}");
    let message = told(&|odd| odd["models"][0]["operators"][1]["weight_bytes"] = json!(1u64 << 63));
    assert!(message.contains("no bytes that can be added up"), "{message}");
}

/// The certificate with one task that costs nothing very late, and all others at once at the start: with slack by the makespan nobody would
/// notice.
fn all_at_once(paper: &mut Value) {
    let tasks = paper["tasks"].as_array_mut().unwrap();
    for task in tasks.iter_mut() {
        (task["start_ms"], task["end_ms"]) = (json!(0.0), json!(0.0));
    }
    tasks.push(json!({
        "unit": 0, "model": 0, "item": 0, "iteration": 0, "tensor": 0, "ms": 0.0, "start_ms": 1e12, "end_ms": 1e12
    }));
    paper["claim"]["simulated_ms"] = json!(1e12);
    paper["bound"] = Value::Null;
}

#[test]
fn one_late_task_excuses_no_other() {
    let (graph, builder) = model("one", 1);
    let profiles = [value(&builder.profile)];
    for (objective, method) in [(Objective::Latency, "interval"), (Objective::Energy, "dag")] {
        let request = PlanRequest { objective, ..PlanRequest::new(&builder.profile, &graph) };
        let plan = plan_with(method, &request, &quick()).unwrap();
        let certificate = paper(std::slice::from_ref(&request), &plan);
        all_refused(
            &certificate,
            &profiles,
            &[
                ("it gets 0 ms done", all_at_once),
                ("when nothing ends or arrives", |paper| {
                    let mut late = paper.clone();
                    all_at_once(&mut late);
                    let last = late["tasks"].as_array_mut().unwrap().pop().unwrap();
                    paper["tasks"].as_array_mut().unwrap().push(last);
                    paper["claim"]["simulated_ms"] = json!(1e12);
                }),
            ],
        );
    }
}

/// An item that arrives so late that its tasks do not show in times of that size.
#[test]
fn a_request_beyond_any_sense() {
    let (graph, builder) = model("one", 1);
    let profiles = [value(&builder.profile)];
    let request = PlanRequest::new(&builder.profile, &graph);
    let mut application = Application::new(&builder.profile, &graph);
    application.arrivals_ms = vec![0.0, 1e7];
    let asked = ConcurrentRequest { weighted: true, ..ConcurrentRequest::new(vec![application]) };
    let certificate = paper(&[request], &concurrent(&asked, &quick()).unwrap());
    check(&certificate, &profiles).unwrap();
    let message = refused(&certificate, &profiles, "late", |paper| {
        paper["requests"][1]["arrival_ms"] = json!(1e15);
        for task in paper["tasks"].as_array_mut().unwrap() {
            let late = if task["item"] == 1 { 1e15 } else { 0.0 };
            (task["start_ms"], task["end_ms"]) = (json!(late), json!(late));
        }
        paper["claim"]["simulated_ms"] = json!(1e15);
        paper["claim"]["value"] = json!(0.0);
        paper["bound"] = Value::Null;
    });
    assert!(message.to_string().contains("a time so late"), "{message}");
}

proptest! {
    /// No task can be moved, be it by a millionth of a millisecond or by years, not even where the claim does not count when it ends.
    #[test]
    fn tasks_do_not_float(pick in 0usize..100, power in -5.0f64..12.0, method in 0usize..3) {
        let (graph, builder) = model("one", 1);
        let profiles = [value(&builder.profile)];
        let request = PlanRequest::new(&builder.profile, &graph);
        let plan = plan_with(["interval", "dag", "single:a:CPU"][method], &request, &quick()).unwrap();
        let mut certificate = paper(std::slice::from_ref(&request), &plan);
        check(&certificate, &profiles).unwrap();
        let tasks = certificate["tasks"].as_array_mut().unwrap();
        let count = tasks.len();
        let delta = 10f64.powf(power);
        for at in ["start_ms", "end_ms"] {
            let slot = &mut tasks[pick % count][at];
            *slot = json!(slot.as_f64().unwrap() + delta);
        }
        let end = tasks.iter().map(|task| task["end_ms"].as_f64().unwrap()).fold(0.0, f64::max);
        certificate["claim"]["simulated_ms"] = json!(end);
        certificate["bound"] = Value::Null;
        if certificate["claim"]["rule"] == "makespan" {
            certificate["claim"]["value"] = json!(end);
        }
        prop_assert!(check(&certificate, &profiles).is_err());
    }
}
