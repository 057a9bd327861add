//! Several models at once: one front door to the planners of more than one request.

use crate::{
    Application, ConcurrentRequest, METHODS, MethodInfo, PlanError, PlanOptions, PlanRequest, concurrent, plan_pair,
    throughput,
};
use trefoil_core::{Objective, Plan};

/// The planners that [`plan_several`] knows.
pub const SEVERAL_METHODS: &[MethodInfo] = &[
    MethodInfo {
        name: "concurrent",
        summary: "any number of models at once, on exclusive units, contention decided together; throughput: rounds of them",
    },
    MethodInfo { name: "aligned", summary: "BIDENT 3.2.2 literally: two requests of one model in lockstep" },
    MethodInfo { name: "joint", summary: "BIDENT 3.2.2 literally: two models, state (i, j) without units" },
    MethodInfo {
        name: "joint-units",
        summary: "joint with units in the state, slowdown between units, exclusive resources",
    },
];

/// Plans the models of several requests, which all start at once, to run together. `auto` is `concurrent`, which for throughput plans
/// endless rounds of one inference of each. All requests must
/// ask for the same units and objective; their profiles must be of one machine.
///
/// # Errors
/// [`PlanError::UnknownMethod`], [`PlanError::OneModel`] for a planner of one model, [`PlanError::Pair`] when a method of two requests
/// gets another number of them, and whatever is wrong with the requests.
pub fn plan_several(method: &str, requests: &[PlanRequest<'_>], options: &PlanOptions) -> Result<Plan, PlanError> {
    let names = |methods: &[MethodInfo]| methods.iter().map(|method| method.name).collect::<Vec<_>>().join(", ");
    let known = |methods: &[MethodInfo]| methods.iter().any(|known| known.name == method);
    if method != "auto" && !known(SEVERAL_METHODS) {
        let of_one = known(METHODS) || method == "pareto" || method.starts_with("single:");
        return Err(if of_one {
            let (method, several) = (method.to_owned(), names(SEVERAL_METHODS));
            PlanError::OneModel { method, given: requests.len(), several }
        } else {
            PlanError::UnknownMethod { want: method.to_owned(), have: names(SEVERAL_METHODS) }
        });
    }
    let objective = requests.first().map_or(Objective::Latency, |request| request.objective);
    let rounds = objective == Objective::Throughput;
    if rounds && !(matches!(method, "auto" | "concurrent") && requests.len() > 1) {
        return Err(PlanError::Objective { method: method.to_owned(), objective: "throughput".to_owned() });
    }
    match (method, requests) {
        ("auto" | "concurrent", [first, ..]) => {
            let asked = ConcurrentRequest {
                units: first.units.clone(),
                objective,
                pins: first.pins.clone(),
                ..ConcurrentRequest::new(
                    requests.iter().map(|request| Application::new(request.profile, request.graph)).collect(),
                )
            };
            // As for one model, only `auto` chooses what nothing but the whole model's time is known of.
            let options = &PlanOptions { modes: options.modes && method == "auto", ..*options };
            if rounds { throughput::rounds(&asked, options) } else { concurrent(&asked, options) }
        }
        ("auto" | "concurrent", []) => Err(PlanError::NoUnits),
        (_, [first, second]) => plan_pair(method, first, second),
        _ => Err(PlanError::Pair {
            reason: format!(
                "method `{method}` plans two requests, but {} were given; give two profiles",
                requests.len()
            ),
        }),
    }
}
