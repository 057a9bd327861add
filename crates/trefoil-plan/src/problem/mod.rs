//! The scheduling problem that all parallel planners share, over dense indices.
//!
//! A **job** is a convex group of operators (usually one) of one iteration of one item of a model; it runs on any unit where
//! its time is finite. A **tensor** makes its readers wait for its maker, and pays once per unit that reads it elsewhere
//! than it was made: a transfer is a task of the destination's resources. A **request** groups the jobs that arrive, are
//! due and are weighed together. A [`Schedule`] says where everything runs and in which order; its cost is what the
//! simulator's own engine makes of it, so a plan made from it costs exactly that (see [`Problem::evaluate`]).

mod build;
mod convert;
mod schedule;

pub(crate) use build::{Instance, Link};
pub(crate) use convert::run;
pub(crate) use schedule::MEMORY;
pub use schedule::{Evaluation, Schedule, Score, Step};

use crate::PlanError;
use crate::engine::{Platform, Rows};
use crate::factors::{Factors, class_index};
use trefoil_core::profile::above_idle;
use trefoil_core::{OperatorClass, OperatorId, TensorId, UnitAddress};

/// A unit of the problem.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemUnit {
    /// Its address.
    pub address: UnitAddress,
    /// Dense ids of the resources it holds, at least one.
    pub resources: Vec<u32>,
    /// Whether data must be handed to it and back.
    pub accelerator: bool,
    /// Power while busy, where known.
    pub watts: Option<f64>,
    /// Most bytes of weights it can hold.
    pub memory_bytes: Option<u64>,
}

/// What is scheduled: a convex group of operators of one iteration of one item of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Name for messages: its first operator's.
    pub name: String,
    /// Index of the model.
    pub model: u32,
    /// Which item (inference) of the model.
    pub item: u32,
    /// Which repetition within the item.
    pub iteration: u32,
    /// Operators, ascending.
    pub operators: Vec<OperatorId>,
    /// Class per unit, which slowdown factors depend on.
    pub class: Vec<OperatorClass>,
    /// Milliseconds per unit, alone; infinite where it cannot run.
    pub ms: Vec<f64>,
    /// Bytes of weights; jobs of equal model and operators share them.
    pub weight_bytes: u64,
    /// Index of its request.
    pub request: u32,
}

/// Data between jobs, or between the host and jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemTensor {
    /// Index of the model it is a tensor of.
    pub model: u32,
    /// The tensor.
    pub tensor: TensorId,
    /// The job that makes it; `None` for a model input, which is at the host.
    pub producer: Option<u32>,
    /// Jobs that read it, ascending, without its producer.
    pub consumers: Vec<u32>,
    /// Size.
    pub bytes: u64,
    /// Row-major (units + 1) × units: milliseconds to make it available to a unit (column) when it is at another (row); the
    /// last row is the host. 0 means that nothing is to be done.
    pub transfer_ms: Vec<f64>,
    /// Milliseconds per unit to hand it from there to the host; read only if it is an output.
    pub to_host_ms: Vec<f64>,
    /// Whether the host waits for it.
    pub is_output: bool,
}

/// Jobs that arrive, are due and are weighed together.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemRequest {
    /// None of its tasks starts before, in milliseconds.
    pub release_ms: f64,
    /// When it should be complete, in milliseconds.
    pub deadline_ms: Option<f64>,
    /// Its weight beside the others, above 0.
    pub weight: f64,
}

impl Default for ProblemRequest {
    fn default() -> Self {
        Self { release_ms: 0.0, deadline_ms: None, weight: 1.0 }
    }
}

/// What a schedule should make small, once it obeys memory limits and meets deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Goal {
    /// The end of the last task, in milliseconds.
    #[default]
    Makespan,
    /// `Σ weight · (completion − release) / Σ weight` over requests, in milliseconds.
    WeightedCompletion,
    /// `∫ [P_idle + Σ_busy (P_u − P_idle)] dt` in joules; an unknown idle power counts as 0.
    Energy,
}

/// Dense tables made once from the parts.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    pub units: usize,
    /// Row-major jobs × units.
    pub ms: Vec<f64>,
    pub class: Vec<u8>,
    /// Tensors that a job reads and makes.
    pub inputs: Rows,
    pub outputs: Rows,
    pub consumers: Rows,
    /// Row-major tensors × (units + 1) × units.
    pub transfer: Vec<f64>,
    /// Row-major tensors × units, 0 unless an output.
    pub to_host: Vec<f64>,
    /// `u32::MAX` for the host.
    pub producer: Vec<u32>,
    /// Jobs before and after a job, without duplicates.
    pub before: Rows,
    pub after: Rows,
    /// A topological order of the jobs: of those ready the lowest index goes first.
    pub order: Vec<u32>,
    pub release: Vec<f64>,
    /// When transfers of a tensor may start, beside waiting for its maker.
    pub tensor_release: Vec<f64>,
    /// Tensors at the host that some job reads.
    pub at_host: Vec<u32>,
    /// Jobs that share weights have one number; only where some unit limits memory.
    pub weights: Option<(Vec<u32>, Vec<u64>)>,
}

impl Dense {
    pub fn ms(&self, job: usize, unit: usize) -> f64 {
        self.ms[job * self.units + unit]
    }

    /// Price of a tensor on a unit, given where it was made (`units` for the host).
    pub fn transfer(&self, tensor: usize, from: usize, to: usize) -> f64 {
        self.transfer[(tensor * (self.units + 1) + from) * self.units + to]
    }
}

/// A whole scheduling problem; see the module's description. Immutable once made.
#[derive(Debug, Clone)]
pub struct Problem {
    units: Vec<ProblemUnit>,
    resources: Vec<String>,
    jobs: Vec<Job>,
    tensors: Vec<ProblemTensor>,
    requests: Vec<ProblemRequest>,
    idle_watts: Option<f64>,
    goal: Goal,
    pub(crate) platform: Platform,
    pub(crate) dense: Dense,
}

fn bad(reason: String) -> PlanError {
    PlanError::Problem { reason }
}

impl Problem {
    /// Checks the parts and puts them together. `resources` are names by dense id.
    ///
    /// # Errors
    /// [`PlanError::Problem`] naming the job: a time that is NaN or negative, a job that no unit runs, tables of the wrong
    /// length, indices out of range, jobs that wait for each other; a slowdown factor that is not above 0; no unit.
    pub fn new(
        units: Vec<ProblemUnit>,
        resources: Vec<String>,
        jobs: Vec<Job>,
        tensors: Vec<ProblemTensor>,
        requests: Vec<ProblemRequest>,
        factors: Factors,
        idle_watts: Option<f64>,
    ) -> Result<Self, PlanError> {
        let count = units.len();
        if count == 0 || count >= usize::from(u8::MAX) {
            return Err(bad(format!("it has {count} units; between 1 and 254 are possible")));
        }
        for unit in &units {
            if unit.resources.is_empty() || unit.resources.iter().any(|&id| id as usize >= resources.len()) {
                return Err(bad(format!("unit {} holds no resource, or one that does not exist", unit.address)));
            }
            let watts = [unit.watts, idle_watts];
            if let Some(watts) = watts.iter().flatten().find(|watts| !watts.is_finite() || **watts < 0.0) {
                return Err(bad(format!("unit {} or idling draws {watts} W", unit.address)));
            }
            // Of several profiles one may tell the unit's power and another the idle machine's.
            if let [Some(watts), Some(idle)] = watts {
                above_idle(&unit.address.to_string(), watts, idle)?;
            }
        }
        if let Some(factor) = factors.bad() {
            return Err(bad(format!("a slowdown factor is {factor}, which is not above 0 and finite")));
        }
        for (index, request) in requests.iter().enumerate() {
            let fine = |ms: f64| ms.is_finite() && ms >= 0.0;
            let sound = fine(request.release_ms)
                && request.deadline_ms.is_none_or(fine)
                && request.weight.is_finite()
                && request.weight > 0.0;
            if !sound {
                return Err(bad(format!("request {index} has a time below 0 or a weight that is not above 0")));
            }
        }
        for (index, job) in jobs.iter().enumerate() {
            check_job(index, job, count, requests.len())?;
        }
        for (index, tensor) in tensors.iter().enumerate() {
            check_tensor(index, tensor, &jobs, count)?;
        }
        let platform = Platform {
            unit_resources: units.iter().map(|unit| unit.resources.clone()).collect(),
            resources: resources.len(),
            factors,
        };
        let dense = Dense::new(&units, &jobs, &tensors, &requests)?;
        let goal = Goal::default();
        Ok(Self { units, resources, jobs, tensors, requests, idle_watts, goal, platform, dense })
    }

    /// The same problem with another goal.
    ///
    /// # Errors
    /// [`PlanError::NoPower`] for energy when a unit's power is unknown.
    pub fn with_goal(mut self, goal: Goal) -> Result<Self, PlanError> {
        let lacking: Vec<String> =
            self.units.iter().filter(|unit| unit.watts.is_none()).map(|unit| unit.address.to_string()).collect();
        if goal == Goal::Energy
            && let Some(first) = lacking.first()
        {
            return Err(PlanError::NoPower { units: lacking.join(", "), example: format!("{first}=15") });
        }
        self.goal = goal;
        Ok(self)
    }

    /// Units, in the order that every table's columns have.
    pub fn units(&self) -> &[ProblemUnit] {
        &self.units
    }

    /// Names of the resources by dense id.
    pub fn resources(&self) -> &[String] {
        &self.resources
    }

    /// Jobs.
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// Tensors.
    pub fn tensors(&self) -> &[ProblemTensor] {
        &self.tensors
    }

    /// Requests.
    pub fn requests(&self) -> &[ProblemRequest] {
        &self.requests
    }

    /// Slowdown factors.
    pub fn factors(&self) -> &Factors {
        &self.platform.factors
    }

    /// Package power while nothing runs, where known.
    pub fn idle_watts(&self) -> Option<f64> {
        self.idle_watts
    }

    /// What is minimised.
    pub fn goal(&self) -> Goal {
        self.goal
    }

    /// Jobs in a topological order.
    pub fn topological(&self) -> &[u32] {
        &self.dense.order
    }

    /// Jobs whose tensors a job reads, ascending, no duplicates.
    pub fn predecessors(&self, job: usize) -> &[u32] {
        self.dense.before.row(job)
    }

    /// Jobs that read a job's tensors, ascending, no duplicates.
    pub fn successors(&self, job: usize) -> &[u32] {
        self.dense.after.row(job)
    }

    /// Whether something may be gained by not starting what could start: where units that work at once change each other's rates.
    pub fn gains_by_waiting(&self) -> bool {
        self.platform.factors.matter(|one, other| !self.conflict(one, other))
    }

    /// Whether two units share a resource and so never run at once.
    pub fn conflict(&self, first: usize, second: usize) -> bool {
        self.units[first].resources.iter().any(|resource| self.units[second].resources.contains(resource))
    }
}

fn check_job(index: usize, job: &Job, units: usize, requests: usize) -> Result<(), PlanError> {
    let what = || format!("job {index} (operator `{}`)", job.name);
    if job.ms.len() != units || job.class.len() != units {
        return Err(bad(format!("{} has {} times for {units} units", what(), job.ms.len())));
    }
    if let Some(ms) = job.ms.iter().find(|ms| ms.is_nan() || **ms < 0.0) {
        return Err(bad(format!("{} takes {ms} ms on a unit", what())));
    }
    if job.ms.iter().all(|ms| ms.is_infinite()) {
        return Err(bad(format!("{} runs on no unit", what())));
    }
    if job.request as usize >= requests {
        return Err(bad(format!("{} belongs to request {}, of {requests}", what(), job.request)));
    }
    Ok(())
}

fn check_tensor(index: usize, tensor: &ProblemTensor, jobs: &[Job], units: usize) -> Result<(), PlanError> {
    let maker = tensor.producer.and_then(|job| jobs.get(job as usize));
    let what = || match maker {
        Some(job) => format!("tensor {index} (made by operator `{}`)", job.name),
        None => format!("tensor {index} (at the host)"),
    };
    if tensor.transfer_ms.len() != (units + 1) * units || tensor.to_host_ms.len() != units {
        return Err(bad(format!("{} has transfer tables of the wrong length", what())));
    }
    if let Some(ms) =
        tensor.transfer_ms.iter().chain(&tensor.to_host_ms).find(|ms| !ms.is_finite() || ms.is_sign_negative())
    {
        return Err(bad(format!("{} takes {ms} ms to hand over", what())));
    }
    if (0..units).any(|unit| tensor.transfer_ms[unit * units + unit] != 0.0) {
        return Err(bad(format!("{} takes time to stay where it is", what())));
    }
    if tensor.producer.is_some() != maker.is_some()
        || tensor.consumers.iter().any(|&job| job as usize >= jobs.len() || Some(job) == tensor.producer)
        || !tensor.consumers.is_sorted_by(|a, b| a < b)
    {
        return Err(bad(format!("{} has readers or a maker that are no jobs, or in no order", what())));
    }
    let request = |job: &u32| jobs[*job as usize].request;
    if maker.is_none() && tensor.consumers.windows(2).any(|pair| request(&pair[0]) != request(&pair[1])) {
        return Err(bad(format!("{} is read by several requests", what())));
    }
    Ok(())
}

impl Dense {
    fn new(
        units: &[ProblemUnit],
        jobs: &[Job],
        tensors: &[ProblemTensor],
        requests: &[ProblemRequest],
    ) -> Result<Self, PlanError> {
        let (mut inputs, mut outputs, mut consumers) = (Vec::new(), Vec::new(), Vec::new());
        let mut pairs = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            for &job in &tensor.consumers {
                inputs.push((job, index as u32));
                consumers.push((index as u32, job));
                pairs.extend(tensor.producer.map(|producer| (producer, job)));
            }
            outputs.extend(tensor.producer.map(|producer| (producer, index as u32)));
        }
        pairs.sort_unstable();
        pairs.dedup();
        let after = Rows::new(jobs.len(), &pairs);
        let mut turned: Vec<(u32, u32)> = pairs.iter().map(|&(from, to)| (to, from)).collect();
        turned.sort_unstable();
        let before = Rows::new(jobs.len(), &turned);
        let order = topological(jobs.len(), &before, &after);
        if order.len() < jobs.len() {
            let mut placed = vec![false; jobs.len()];
            for &job in &order {
                placed[job as usize] = true;
            }
            let lost = placed.iter().position(|placed| !placed).unwrap_or(0);
            return Err(bad(format!("job {lost} (operator `{}`) waits for jobs that wait for it", jobs[lost].name)));
        }
        let limited = units.iter().any(|unit| unit.memory_bytes.is_some());
        Ok(Self {
            units: units.len(),
            ms: jobs.iter().flat_map(|job| job.ms.iter().copied()).collect(),
            class: jobs.iter().flat_map(|job| job.class.iter().map(|&class| class_index(class) as u8)).collect(),
            inputs: Rows::new(jobs.len(), &inputs),
            outputs: Rows::new(jobs.len(), &outputs),
            consumers: Rows::new(tensors.len(), &consumers),
            transfer: tensors.iter().flat_map(|tensor| tensor.transfer_ms.iter().copied()).collect(),
            to_host: tensors
                .iter()
                .flat_map(|tensor| tensor.to_host_ms.iter().map(|&ms| if tensor.is_output { ms } else { 0.0 }))
                .collect(),
            producer: tensors.iter().map(|tensor| tensor.producer.unwrap_or(u32::MAX)).collect(),
            before,
            after,
            order,
            release: jobs.iter().map(|job| requests[job.request as usize].release_ms).collect(),
            tensor_release: tensors
                .iter()
                .map(|tensor| tensor.producer.or(tensor.consumers.first().copied()))
                .map(|job| job.map_or(0.0, |job| requests[jobs[job as usize].request as usize].release_ms))
                .collect(),
            at_host: (0..tensors.len() as u32)
                .filter(|&at| tensors[at as usize].producer.is_none() && !tensors[at as usize].consumers.is_empty())
                .collect(),
            weights: limited.then(|| shared_weights(jobs)),
        })
    }
}

/// Number of each job's weights, and the bytes of each number.
fn shared_weights(jobs: &[Job]) -> (Vec<u32>, Vec<u64>) {
    let mut numbers = std::collections::BTreeMap::new();
    let mut bytes = Vec::new();
    let of = jobs.iter().map(|job| {
        *numbers.entry((job.model, &job.operators)).or_insert_with(|| {
            bytes.push(job.weight_bytes);
            bytes.len() as u32 - 1
        })
    });
    let of: Vec<u32> = of.collect();
    (of, bytes)
}

/// Of the ready jobs the lowest index goes first; jobs of a circle are left out.
fn topological(count: usize, before: &Rows, after: &Rows) -> Vec<u32> {
    use std::cmp::Reverse;
    let mut waiting: Vec<usize> = (0..count).map(|job| before.row(job).len()).collect();
    let mut ready: std::collections::BinaryHeap<Reverse<u32>> =
        (0..count as u32).filter(|&job| waiting[job as usize] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse(job)) = ready.pop() {
        order.push(job);
        for &next in after.row(job as usize) {
            waiting[next as usize] -= 1;
            if waiting[next as usize] == 0 {
                ready.push(Reverse(next));
            }
        }
    }
    order
}
