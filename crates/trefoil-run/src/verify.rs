//! Comparing a run with a reference at every segment boundary, and naming the first operator that differs.
//!
//! 1. The plan runs once with every boundary value kept. The reference is a traced run on the same inputs, or the same
//!    segments all on one unit.
//! 2. Segments are looked at in execution order. The first whose outputs differ although its inputs agree is to blame.
//! 3. Inside it, each operator runs by itself on the segment's unit, on the reference's inputs. The first whose output
//!    differs is named. If none differs alone, the shortest prefix of the segment that differs when compiled as one
//!    sub-model is searched by bisection (a prefix of a convex set in topological order is convex), and its last
//!    operator is named: then it is the unit's fusion that differs.
//! 4. If the segment computes what it should on the reference's inputs, then what differs is rounding of its inputs that
//!    grows inside it (half-precision `exp` of a long sum, say). Nothing computes wrongly; the run passes if all such
//!    segments are of that kind and every model output is right, and the summary names them.
//!
//! What is allowed follows from element types, precision and node types ([`trefoil_profile::tolerance`]); a boundary
//! value may be as far off as the node types of all its ancestors excuse.

use crate::RunError;
use crate::executor::{Executor, ExecutorOptions, FindUnit};
use crate::source::OperatorSource;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use trefoil_core::{
    DataType, HostTensor, OperatorGraph, OperatorId, Plan, SegmentId, TensorId, TensorInfo, Unit, UnitAddress,
};
use trefoil_onnx::Values;
use trefoil_profile::tolerance::{Deviation, Leniency, compare};
use trefoil_units::{Backend, Buffer, CompileOptions, SubModel, UnitError, enter_unit};

/// What a run is compared with.
pub enum Reference<'a> {
    /// Values of a run of each model on the same inputs, by name (a traced run).
    Values(&'a [&'a dyn Values]),
    /// The same segments, all on this unit.
    Unit(&'a UnitAddress),
}

/// A plan to be verified, and everything that is needed to run it and parts of it.
pub struct Verify<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Its graphs, in the order of [`Plan::models`].
    pub graphs: &'a [&'a OperatorGraph],
    /// Where sub-models come from.
    pub source: &'a dyn OperatorSource,
    /// Finds units.
    pub find: &'a FindUnit<'a>,
    /// Inputs by name.
    pub inputs: &'a [&'a HostTensor],
    /// What to compare with.
    pub reference: Reference<'a>,
    /// Folder for compiled blobs.
    pub cache: Option<PathBuf>,
}

/// One boundary value that was compared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BoundaryCheck {
    /// Name of the tensor.
    pub tensor: String,
    /// Segment that made it.
    pub segment: u32,
    /// That segment's unit.
    pub unit: UnitAddress,
    /// `max |a − b| / peak`.
    pub error_to_peak: f64,
    /// What is allowed.
    pub tolerance: f64,
    /// What is wrong, in one line; `None` if it is right.
    pub wrong: Option<String>,
}

/// The operator or segment where results begin to differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The segment.
    pub segment: u32,
    /// Its unit.
    pub unit: UnitAddress,
    /// The operator, if one could be told.
    pub operator: Option<OperatorId>,
    /// Its name, or the segment's first operator's.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// How it was found and what differs, in one line.
    pub finding: String,
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verification {
    /// Whether every compared value is right and something was compared.
    pub ok: bool,
    /// What was compared with.
    pub reference: String,
    /// Every compared boundary value, in execution order.
    pub boundaries: Vec<BoundaryCheck>,
    /// Boundary values that the reference does not have, or that depend on random numbers.
    pub not_compared: Vec<String>,
    /// Largest error of any boundary value; `None` if nothing was compared.
    pub worst_error: Option<f64>,
    /// Where results begin to differ.
    pub first_difference: Option<Difference>,
    /// Segments that compute what they should on the reference's inputs, but inside which small differences of their real
    /// inputs grow beyond what is allowed.
    #[serde(default)]
    pub grown: Vec<Difference>,
}

impl Verification {
    /// One line for people.
    pub fn summary(&self) -> String {
        match (&self.first_difference, self.worst_error) {
            (Some(found), _) => format!(
                "differs from {} first at `{}` ({}) in segment {} on {}: {}",
                self.reference, found.name, found.kind, found.segment, found.unit, found.finding
            ),
            (None, Some(worst)) if self.ok && self.grown.is_empty() => format!(
                "{} boundary tensors agree with {} (largest error {worst:.1e} of peak)",
                self.boundaries.len(),
                self.reference
            ),
            (None, Some(_)) if self.ok => {
                let right = self.boundaries.iter().filter(|check| check.wrong.is_none());
                let worst = right.clone().map(|check| check.error_to_peak).fold(0.0, f64::max);
                format!(
                    "{} of {} boundary tensors and every output agree with {} (largest error {worst:.1e} of peak); rounding \
                     grows in between, first at `{}` in segment {}, and every segment is right on the reference's inputs",
                    right.count(),
                    self.boundaries.len(),
                    self.reference,
                    self.grown[0].name,
                    self.grown[0].segment
                )
            }
            (None, Some(_)) => {
                let wrong = self.boundaries.iter().find_map(|check| check.wrong.clone()).unwrap_or_default();
                format!("differs from {}: {wrong}", self.reference)
            }
            (None, None) => format!("nothing could be compared: {} has none of the boundary tensors", self.reference),
        }
    }
}

/// Runs the plan and compares it with the reference. Only item 0 is looked at.
///
/// # Errors
/// Those of [`Executor::new`] and [`Executor::run`], for the plan and for the reference unit's plan.
pub fn verify(request: &Verify<'_>) -> Result<Verification, RunError> {
    let kept = run_keeping_values(request, request.plan)?;
    let (single, name) = match &request.reference {
        Reference::Values(_) => (None, "the traced reference".to_owned()),
        Reference::Unit(unit) => {
            let plan = on_one_unit(request.plan, unit, request.find)?;
            (Some(run_keeping_values(request, &plan)?), format!("{unit} alone"))
        }
    };
    let reference = |model: u32, tensor: TensorId| match (&request.reference, &single) {
        (_, Some(single)) => value_of(single, request.graphs, model, tensor),
        (Reference::Values(values), None) => {
            let info = request.graphs[model as usize].tensor(tensor).info();
            // A traced value of another shape (a backend's own idea of it) is told by the comparison.
            values.get(model as usize)?.tensor(&info.name)
        }
        (Reference::Unit(_), None) => None,
    };
    let mut found = Verification {
        ok: false,
        reference: name,
        boundaries: Vec::new(),
        not_compared: Vec::new(),
        worst_error: None,
        first_difference: None,
        grown: Vec::new(),
    };
    let mut wrong: BTreeSet<(u32, TensorId)> = BTreeSet::new();
    let mut culprits = Vec::new();
    let mut seen = BTreeSet::new();
    for task in &kept.schedule().tasks {
        if !seen.insert(task.segment) {
            continue;
        }
        let segment = &request.plan.segments[task.segment.0 as usize];
        let graph = request.graphs[segment.model as usize];
        let mut differs = false;
        for &tensor in &segment.outputs {
            let Some(mine) = value_of(&kept, request.graphs, segment.model, tensor) else { continue };
            let ancestors = ancestors(graph, tensor);
            let random = ancestors.iter().any(|&id| is_random(&graph.operator(id).kind));
            let Some(theirs) = reference(segment.model, tensor).filter(|_| !random) else {
                found.not_compared.push(mine.info().name.clone());
                continue;
            };
            let leniency = leniency_of(graph, &ancestors, request.plan, segment.model);
            let deviation = compare(&mine, &theirs, &leniency);
            if deviation.wrong.is_some() {
                differs = true;
                wrong.insert((segment.model, tensor));
            }
            found.worst_error = Some(found.worst_error.unwrap_or(0.0).max(deviation.error_to_peak));
            found.boundaries.push(BoundaryCheck {
                tensor: mine.info().name.clone(),
                segment: task.segment.0,
                unit: segment.unit.clone(),
                error_to_peak: deviation.error_to_peak,
                tolerance: deviation.tolerance,
                wrong: deviation.wrong,
            });
        }
        let inputs_agree = segment.inputs.iter().all(|&tensor| !wrong.contains(&(segment.model, tensor)));
        if differs && inputs_agree {
            culprits.push(task.segment);
        }
    }
    for segment in culprits {
        match look_inside(request, segment, &reference)? {
            Finding::Grown(difference) => found.grown.push(difference),
            Finding::Wrong(difference) => {
                found.first_difference = Some(difference);
                break;
            }
        }
    }
    let wrong_output = wrong.iter().any(|(model, tensor)| request.graphs[*model as usize].outputs.contains(tensor));
    if wrong_output && found.first_difference.is_none() && !found.grown.is_empty() {
        // Rounding that reaches a result is a difference all the same.
        found.first_difference = Some(found.grown.remove(0));
    }
    found.ok = found.first_difference.is_none() && !wrong_output && !found.boundaries.is_empty();
    Ok(found)
}

fn run_keeping_values(request: &Verify<'_>, plan: &Plan) -> Result<Executor, RunError> {
    let options = ExecutorOptions { cache: request.cache.clone(), keep_values: true, ..ExecutorOptions::default() };
    let mut executor = Executor::new(plan.clone(), request.graphs, request.source, request.find, &options)?;
    executor.run(request.inputs)?;
    Ok(executor)
}

/// The same segments, all on `unit`.
fn on_one_unit(plan: &Plan, address: &UnitAddress, find: &FindUnit<'_>) -> Result<Plan, RunError> {
    let (_, unit) = find(address)?;
    let mut moved = plan.clone();
    moved.method = format!("single:{address}");
    moved.segments.iter_mut().for_each(|segment| segment.unit = address.clone());
    moved.tasks.iter_mut().for_each(|task| task.unit = address.clone());
    let order: Vec<_> = (0..plan.tasks.len() as u32).map(trefoil_core::TaskId).collect();
    moved.order = unit.resources.iter().map(|resource| (resource.to_string(), order.clone())).collect();
    moved.units = vec![unit];
    Ok(moved)
}

fn value_of(executor: &Executor, graphs: &[&OperatorGraph], model: u32, tensor: TensorId) -> Option<HostTensor> {
    let info = graphs[model as usize].tensor(tensor).info();
    HostTensor::from_bytes(info, executor.value(model, 0, tensor)?).ok()
}

/// All operators that a tensor depends on.
fn ancestors(graph: &OperatorGraph, tensor: TensorId) -> BTreeSet<OperatorId> {
    let mut stack: Vec<OperatorId> = graph.tensor(tensor).producer.into_iter().collect();
    let mut seen: BTreeSet<OperatorId> = stack.iter().copied().collect();
    while let Some(id) = stack.pop() {
        stack.extend(graph.predecessors(id).into_iter().filter(|&earlier| seen.insert(earlier)));
    }
    seen
}

/// Whether an operator draws random numbers, so that two runs never agree.
fn is_random(kind: &str) -> bool {
    let draws = ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];
    kind.split('+').any(|node| draws.contains(&node))
}

/// What these operators excuse together, on the units that the plan runs them on.
fn leniency_of(graph: &OperatorGraph, operators: &BTreeSet<OperatorId>, plan: &Plan, model: u32) -> Leniency {
    let kinds = operators.iter().map(|&id| graph.operator(id).kind.as_str());
    let on = plan.segments.iter().filter(|segment| segment.model == model);
    let precision = on
        .filter(|segment| segment.operators.iter().any(|id| operators.contains(id)))
        .filter_map(|segment| segment.unit.precision)
        .max();
    Leniency::of_kinds(kinds, precision).with_half(is_half(graph, operators))
}

/// Whether any value of these operators is of half precision.
fn is_half(graph: &OperatorGraph, operators: &BTreeSet<OperatorId>) -> bool {
    let tensors = operators.iter().flat_map(|&id| graph.operator(id).inputs.iter().chain(&graph.operator(id).outputs));
    tensors.into_iter().any(|&tensor| matches!(graph.tensor(tensor).dtype, DataType::F16 | DataType::BF16))
}

/// What [`look_inside`] found.
enum Finding {
    /// An operator, or the unit's fusion of several, computes something else on the reference's inputs.
    Wrong(Difference),
    /// The segment is right on the reference's inputs.
    Grown(Difference),
}

/// Finds the operator to blame in a segment whose inputs agree with the reference.
fn look_inside(
    request: &Verify<'_>,
    segment_id: SegmentId,
    boundary: &dyn Fn(u32, TensorId) -> Option<HostTensor>,
) -> Result<Finding, RunError> {
    let segment = &request.plan.segments[segment_id.0 as usize];
    let graph = request.graphs[segment.model as usize];
    let suspect = Probe::new(request, &segment.unit)?;
    let referee = match &request.reference {
        Reference::Unit(address) => Some(Probe::new(request, address)?),
        Reference::Values(_) => None,
    };
    let named = |operator: Option<OperatorId>, finding: String| {
        let shown = graph.operator(operator.unwrap_or(segment.operators[0]));
        Difference {
            segment: segment_id.0,
            unit: segment.unit.clone(),
            operator,
            name: shown.name.clone(),
            kind: if operator.is_some() { shown.kind.clone() } else { format!("{} and what follows", shown.kind) },
            finding,
        }
    };
    let allowed = |operators: &[OperatorId]| {
        let kinds = operators.iter().map(|&id| graph.operator(id).kind.as_str());
        let set = operators.iter().copied().collect();
        Leniency::of_kinds(kinds, segment.unit.precision).with_half(is_half(graph, &set))
    };
    // Reference values inside the segment: from the trace, or computed operator by operator on the reference unit.
    let mut known: BTreeMap<TensorId, HostTensor> = BTreeMap::new();
    for &tensor in &segment.inputs {
        if let Some(value) = boundary(segment.model, tensor) {
            known.insert(tensor, value);
        }
    }
    for &id in &segment.operators {
        let operator = graph.operator(id);
        if let Some(referee) = &referee {
            if let Ok(made) = referee.run(segment.model, &[id], &known) {
                known.extend(made);
            }
        } else {
            let made = operator.outputs.iter().filter_map(|&tensor| Some((tensor, boundary(segment.model, tensor)?)));
            known.extend(made.collect::<Vec<_>>());
        }
        if !operator.inputs.iter().all(|tensor| known.contains_key(tensor)) {
            continue;
        }
        match suspect.run(segment.model, &[id], &known) {
            // It compiles as a part of the segment but not alone: the search over prefixes will tell.
            Err(_) => {}
            Ok(made) => {
                let leniency = allowed(&[id]);
                if let Some(wrong) = first_wrong(&made, &known, leniency) {
                    let finding = format!("alone, on the reference's inputs: {wrong}");
                    return Ok(Finding::Wrong(named(Some(id), finding)));
                }
            }
        }
    }
    // No operator differs alone. Bisect over prefixes, if the whole segment differs on these inputs.
    let attempt = |length: usize| -> Result<Option<String>, RunError> {
        let prefix = &segment.operators[..length];
        let made = suspect.run(segment.model, prefix, &known)?;
        Ok(first_wrong(&made, &known, allowed(prefix)))
    };
    let (mut right, mut wrong) = (0, segment.operators.len());
    let mut finding = match attempt(wrong) {
        Ok(Some(finding)) => finding,
        Ok(None) => {
            let finding = "no operator differs alone, nor the segment on the reference's inputs: small differences of its \
                           inputs grow inside it";
            return Ok(Finding::Grown(named(None, finding.to_owned())));
        }
        Err(error) => {
            let finding =
                format!("no operator differs alone, and the segment cannot be run on the reference's inputs: {error}");
            return Ok(Finding::Wrong(named(None, finding)));
        }
    };
    let differs = |length: usize| attempt(length).ok().flatten();
    while wrong - right > 1 {
        let middle = usize::midpoint(right, wrong);
        match differs(middle) {
            Some(found) => (wrong, finding) = (middle, found),
            None => right = middle,
        }
    }
    Ok(Finding::Wrong(named(
        Some(segment.operators[wrong - 1]),
        format!("no operator differs alone, but the segment's first {wrong} compiled as one do: {finding}"),
    )))
}

fn first_wrong(
    made: &[(TensorId, HostTensor)],
    known: &BTreeMap<TensorId, HostTensor>,
    leniency: Leniency,
) -> Option<String> {
    made.iter().find_map(|(tensor, mine)| {
        let Deviation { wrong, error_to_peak, tolerance, .. } = compare(mine, known.get(tensor)?, &leniency);
        wrong.map(|wrong| format!("{wrong} (error {error_to_peak:.1e} of peak, allowed {tolerance:.0e})"))
    })
}

/// Runs sets of operators on one unit, each once.
struct Probe<'a> {
    backend: &'static dyn Backend,
    unit: Unit,
    source: &'a dyn OperatorSource,
    graphs: &'a [&'a OperatorGraph],
}

impl<'a> Probe<'a> {
    fn new(request: &'a Verify<'_>, address: &UnitAddress) -> Result<Self, RunError> {
        let (backend, unit) = (request.find)(address)?;
        Ok(Self { backend, unit, source: request.source, graphs: request.graphs })
    }

    /// Compiles and runs the set on the known values; returns its outputs.
    fn run(
        &self,
        model: u32,
        operators: &[OperatorId],
        known: &BTreeMap<TensorId, HostTensor>,
    ) -> Result<Vec<(TensorId, HostTensor)>, RunError> {
        let set: BTreeSet<_> = operators.iter().copied().collect();
        let sub_model = self.source.operators(model, &set)?;
        let graph = self.graphs[model as usize];
        let (inputs, outputs) = graph.boundary(&set);
        let find = |port: &TensorInfo, tensors: &[TensorId]| {
            let id = tensors.iter().copied().find(|&tensor| graph.tensor(tensor).name == port.name);
            id.ok_or_else(|| RunError::Extract {
                what: format!("{} operators", set.len()),
                reason: format!("port `{}` is not at their boundary", port.name),
            })
        };
        let mut given = Vec::with_capacity(sub_model.inputs.len());
        for port in &sub_model.inputs {
            let id = find(port, &inputs)?;
            let value = known.get(&id).filter(|value| value.info().bytes() == port.bytes());
            given.push(value.map(HostTensor::duplicate).ok_or_else(|| RunError::Extract {
                what: format!("{} operators", set.len()),
                reason: format!("the reference has no value of `{}`", port.name),
            })?);
        }
        let ids: Vec<_> = sub_model.outputs.iter().map(|port| find(port, &outputs)).collect::<Result<_, _>>()?;
        let made = run_once(self.backend, &self.unit, &sub_model, given)?;
        Ok(ids.into_iter().zip(made).collect())
    }
}

/// Compiles and runs a sub-model once, on a thread of its own that enters the unit.
fn run_once(
    backend: &'static dyn Backend,
    unit: &Unit,
    model: &SubModel,
    mut given: Vec<HostTensor>,
) -> Result<Vec<HostTensor>, UnitError> {
    let crashed = || UnitError::Run {
        unit: unit.address.to_string(),
        model: model.path.display().to_string(),
        reason: "the backend panicked".to_owned(),
    };
    std::thread::scope(|scope| {
        let body = || -> Result<Vec<HostTensor>, UnitError> {
            let _inside = enter_unit(unit)?;
            let mut made: Vec<_> = model.outputs.iter().map(|port| HostTensor::zeros(port.clone())).collect();
            let mut compiled = backend.compile(model, unit, &CompileOptions::default())?;
            let buffer = |tensor: &mut HostTensor| {
                let bytes = tensor.bytes_mut();
                Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }
            };
            let inputs: Vec<_> = given.iter_mut().map(buffer).collect();
            let outputs: Vec<_> = made.iter_mut().map(buffer).collect();
            // SAFETY: `given` and `made` outlive `compiled`, which is dropped first, and nobody else touches them.
            unsafe { compiled.bind(&inputs, &outputs)? };
            compiled.submit()?;
            compiled.wait()?;
            drop(compiled);
            Ok(made)
        };
        scope.spawn(body).join().unwrap_or_else(|_| Err(crashed()))
    })
}
