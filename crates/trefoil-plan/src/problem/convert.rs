//! From a schedule to a [`Plan`]: jobs become segments, neighbours merge where that delays nothing.

use super::{Goal, Problem, Schedule, Score, Step};
use crate::quality::{plan_score, plan_value};
use crate::simulate::{Simulation, SimulationModel, simulate};
use crate::view::{CostView, SegmentCost, composed};
use crate::{PlanError, PlanRequest};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use trefoil_core::plan::{PLAN_FORMAT, PLAN_VERSION, PlannedModel, PlannedRequest};
use trefoil_core::{
    CostRef, Objective, OperatorGraph, OperatorId, Origin, Plan, Segment, SegmentId, Task, TaskId, Timeline, Work,
};

/// Times closer than this fraction of the makespan count as equal when merging.
const EQUAL: f64 = 1e-9;

/// A plan's task before it is written down.
#[derive(Debug, Clone, PartialEq)]
enum Piece {
    /// Jobs that run as one segment, in order.
    Jobs(Vec<u32>),
    Other(Step),
}

impl Problem {
    /// The plan of a schedule of one model, as [`Problem::from_request`] made the problem of it. `claimed` is the schedule's own
    /// value (every job a segment of its own), in the objective's unit. With `merge`, neighbouring jobs of one unit become one
    /// segment where that is convex, delays nothing and costs no more than the parts, and the simulator finds the plan no
    /// slower. Bound, gap and `exact` are left open.
    ///
    /// # Errors
    /// [`PlanError::Stuck`] when the schedule is not valid ([`Problem::evaluate`]); what is wrong with the request.
    pub fn plan(
        &self,
        request: &PlanRequest<'_>,
        schedule: &Schedule,
        method: &str,
        merge: bool,
    ) -> Result<Plan, PlanError> {
        self.to_plan(&[&CostView::new(request)?], schedule, method, merge)
    }

    /// The plan of a schedule. Neighbouring jobs of one unit become one segment where that is convex, every input is there
    /// when the first starts, nobody waits for what the earlier ones make, and the segment costs no more than the parts;
    /// if the simulator nevertheless finds the merged plan slower, jobs stay apart. `claimed` is the schedule's own value
    /// (every job alone), in the objective's unit; bound, gap and `exact` are left open.
    ///
    /// `views` are those the problem was made from, in the order of [`super::Job::model`].
    ///
    /// # Errors
    /// [`PlanError::Stuck`] when the schedule is not valid ([`Problem::evaluate`]).
    pub(crate) fn to_plan(
        &self,
        views: &[&CostView<'_>],
        schedule: &Schedule,
        method: &str,
        merge: bool,
    ) -> Result<Plan, PlanError> {
        let evaluation = self.evaluate(schedule)?;
        let edges = self.step_edges(schedule)?;
        let writer = Writer { problem: self, views, schedule, method };
        let apart: Vec<Piece> = schedule
            .order
            .iter()
            .map(|&step| match step {
                Step::Job(job) => Piece::Jobs(vec![job]),
                other => Piece::Other(other),
            })
            .collect();
        let mut plan = writer.plan(&apart, &edges, evaluation.score.value)?;
        if merge && let Some(merged) = self.merge(views, schedule, &evaluation.spans, &edges) {
            let merged = writer.plan(&merged, &edges, evaluation.score.value)?;
            let score = |(plan, simulation): &(Plan, Simulation)| -> Result<Score, PlanError> {
                if self.goal == Goal::Energy {
                    let value = simulation.energy_j.unwrap_or(simulation.makespan_ms);
                    // Deadlines first, for energy too.
                    return Ok(Score { value, ..plan_score(plan, views, Goal::Makespan)?.0 });
                }
                Ok(plan_score(plan, views, self.goal)?.0)
            };
            let (before, after) = (score(&plan)?, score(&merged)?);
            let allowed = Score { value: before.value * (1.0 + EQUAL), ..before };
            if !allowed.is_better(&after) {
                plan = merged;
            }
        }
        let (mut plan, _) = plan;
        if self.goal == Goal::Energy && self.idle_watts.is_none() {
            plan.notes.push(
                "energy is the sum of busy time x unit power; idle power is not declared (`--watts idle=…`)".to_owned(),
            );
        }
        Ok(plan)
    }

    /// The same with one task at a time, in the order of the schedule: transfers too wait for whatever comes before them, so that
    /// nothing slows anything.
    ///
    /// # Errors
    /// As [`Self::to_plan`].
    pub(crate) fn to_serial_plan(
        &self,
        views: &[&CostView<'_>],
        schedule: &Schedule,
        method: &str,
    ) -> Result<Plan, PlanError> {
        let mut plan = self.to_plan(views, schedule, method, false)?;
        for (task, before) in plan.tasks.iter_mut().skip(1).zip(0u32..) {
            if !task.after.contains(&TaskId(before)) {
                task.after.push(TaskId(before));
            }
        }
        run(&mut plan, views)?;
        plan.claimed = plan_value(&plan, views, self.goal)?;
        Ok(plan)
    }

    /// Joins neighbours on one unit; `None` when nothing can be joined.
    fn merge(
        &self,
        views: &[&CostView<'_>],
        schedule: &Schedule,
        spans: &[(f64, f64)],
        edges: &[(u32, u32)],
    ) -> Option<Vec<Piece>> {
        let count = schedule.order.len();
        let slack = EQUAL * spans.iter().map(|span| span.1).fold(0.0, f64::max);
        let (mut before, mut after) = (vec![Vec::new(); count], vec![Vec::new(); count]);
        for &(first, then) in edges {
            before[then as usize].push(first);
            after[first as usize].push(then);
        }
        // Runs: positions of jobs that could be one segment. `last` is the run that last took each resource.
        let mut runs: Vec<Vec<usize>> = Vec::new();
        let mut run_of = vec![usize::MAX; count];
        let mut last: Vec<usize> = vec![usize::MAX; self.resources.len()];
        for at in 0..count {
            let here = self.step_unit(schedule.order[at], &schedule.unit) as usize;
            let resources = &self.platform.unit_resources[here];
            let open = last[resources[0] as usize];
            let joins = match schedule.order[at] {
                Step::Job(job) if open != usize::MAX && resources.iter().all(|&id| last[id as usize] == open) => {
                    let run = &runs[open];
                    let same = run.first().is_some_and(|&first| match schedule.order[first] {
                        Step::Job(other) => {
                            let (a, b) = (&self.jobs[job as usize], &self.jobs[other as usize]);
                            schedule.unit[other as usize] as usize == here
                                && (a.model, a.item, a.iteration) == (b.model, b.item, b.iteration)
                        }
                        _ => false,
                    });
                    same && before[at]
                        .iter()
                        .all(|&from| run_of[from as usize] == open || spans[from as usize].1 <= spans[run[0]].0 + slack)
                        && run.iter().all(|&member| {
                            let outside = after[member].iter().filter(|&&to| to as usize != at);
                            outside
                                .into_iter()
                                .all(|&to| run_of[to as usize] == open || spans[to as usize].0 + slack >= spans[at].1)
                        })
                }
                _ => false,
            };
            if joins {
                runs[open].push(at);
                run_of[at] = open;
            } else {
                run_of[at] = runs.len();
                for &resource in resources {
                    last[resource as usize] = runs.len();
                }
                runs.push(vec![at]);
            }
        }
        let mut pieces: Vec<(Piece, Vec<usize>)> = Vec::with_capacity(runs.len());
        for run in runs {
            self.split_run(views, schedule, &run, &mut pieces);
        }
        if pieces.len() == count {
            return None;
        }
        // Positions in the order of first members may now contradict what a run waits for: sort again.
        let mut piece_of = vec![0u32; count];
        for (index, (_, members)) in pieces.iter().enumerate() {
            for &at in members {
                piece_of[at] = index as u32;
            }
        }
        let pairs: BTreeSet<(u32, u32)> = edges
            .iter()
            .map(|&(first, then)| (piece_of[first as usize], piece_of[then as usize]))
            .filter(|(first, then)| first != then)
            .collect();
        let mut waiting = vec![0; pieces.len()];
        let mut follow: Vec<Vec<u32>> = vec![Vec::new(); pieces.len()];
        for &(first, then) in &pairs {
            waiting[then as usize] += 1;
            follow[first as usize].push(then);
        }
        let key = |piece: u32| Reverse((pieces[piece as usize].1[0], piece));
        let mut ready: BinaryHeap<Reverse<(usize, u32)>> =
            (0..pieces.len() as u32).filter(|&piece| waiting[piece as usize] == 0).map(key).collect();
        let mut sorted = Vec::with_capacity(pieces.len());
        while let Some(Reverse((_, piece))) = ready.pop() {
            sorted.push(pieces[piece as usize].0.clone());
            for &next in &follow[piece as usize] {
                waiting[next as usize] -= 1;
                if waiting[next as usize] == 0 {
                    ready.push(key(next));
                }
            }
        }
        (sorted.len() == pieces.len()).then_some(sorted)
    }

    /// A run as one piece if it may be one segment at no more than the cost of its parts, else its halves.
    fn split_run(
        &self,
        views: &[&CostView<'_>],
        schedule: &Schedule,
        run: &[usize],
        pieces: &mut Vec<(Piece, Vec<usize>)>,
    ) {
        let jobs: Vec<u32> = run
            .iter()
            .filter_map(|&at| match schedule.order[at] {
                Step::Job(job) => Some(job),
                _ => None,
            })
            .collect();
        let [first, _, ..] = jobs.as_slice() else {
            let piece = match schedule.order[run[0]] {
                Step::Job(job) => Piece::Jobs(vec![job]),
                other => Piece::Other(other),
            };
            pieces.push((piece, run.to_vec()));
            return;
        };
        let view = views[self.jobs[*first as usize].model as usize];
        let unit = schedule.unit[*first as usize] as usize;
        let operators = self.operators_of(&jobs);
        let apart: f64 = jobs.iter().map(|&job| self.dense.ms(job as usize, unit)).sum();
        let joint = view.segment_ms(&operators, unit).is_ok_and(|ms| ms <= apart * (1.0 + EQUAL));
        if joint
            && self.hands_on_whole(view, &jobs, &operators)
            && view.graph.is_convex(&operators.iter().copied().collect())
        {
            pieces.push((Piece::Jobs(jobs), run.to_vec()));
            return;
        }
        let middle = run.len() / 2;
        self.split_run(views, schedule, &run[..middle], pieces);
        self.split_run(views, schedule, &run[middle..], pieces);
    }

    /// Whether everything that jobs of other executions read leaves a segment of these: a segment hands out model outputs and what
    /// its own execution reads elsewhere, and a link may name another tensor.
    fn hands_on_whole(&self, view: &CostView<'_>, jobs: &[u32], operators: &[OperatorId]) -> bool {
        let execution = |job: u32| {
            let job = &self.jobs[job as usize];
            (job.model, job.item, job.iteration)
        };
        jobs.iter().all(|&job| {
            self.dense.outputs.row(job as usize).iter().all(|&index| {
                let mut readers = self.dense.consumers.row(index as usize).iter();
                let read_elsewhere = readers.any(|&reader| execution(reader) != execution(job));
                !read_elsewhere || view.leaves(operators, self.tensors[index as usize].tensor)
            })
        })
    }

    fn operators_of(&self, jobs: &[u32]) -> Vec<OperatorId> {
        let mut operators: Vec<OperatorId> =
            jobs.iter().flat_map(|&job| self.jobs[job as usize].operators.iter().copied()).collect();
        operators.sort_unstable();
        operators
    }
}

/// Simulates a plan and writes down what came of it; spans of transfers are named after the tensor, which a plan alone does not know.
pub(crate) fn run(plan: &mut Plan, views: &[&CostView<'_>]) -> Result<Simulation, PlanError> {
    let indices: Vec<_> = views.iter().map(|view| &view.index).collect();
    let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
    let simulation = simulate(plan, &SimulationModel::from_profiles(&indices, &graphs, plan)?)?;
    plan.simulated_ms = simulation.makespan_ms;
    plan.timeline = simulation.timeline.clone();
    for span in plan.timeline.lanes.iter_mut().flat_map(|lane| &mut lane.spans) {
        if let Work::Transfer { model, tensor, .. } = &plan.tasks[span.task.0 as usize].work {
            span.label.clone_from(&views[*model as usize].graph.tensor(*tensor).name);
        }
    }
    Ok(simulation)
}

/// What all plans of one schedule have in common.
struct Writer<'p, 'v, 'a> {
    problem: &'p Problem,
    views: &'p [&'v CostView<'a>],
    schedule: &'p Schedule,
    method: &'p str,
}

impl Writer<'_, '_, '_> {
    fn plan(&self, pieces: &[Piece], edges: &[(u32, u32)], claimed: f64) -> Result<(Plan, Simulation), PlanError> {
        let (problem, schedule) = (self.problem, self.schedule);
        let at_step: BTreeMap<Step, u32> =
            schedule.order.iter().enumerate().map(|(at, &step)| (step, at as u32)).collect();
        let mut task_of = vec![u32::MAX; schedule.order.len()];
        for (task, piece) in pieces.iter().enumerate() {
            match piece {
                Piece::Jobs(jobs) => {
                    for &job in jobs {
                        task_of[at_step[&Step::Job(job)] as usize] = task as u32;
                    }
                }
                Piece::Other(step) => task_of[at_step[step] as usize] = task as u32,
            }
        }
        let mut after: Vec<BTreeSet<TaskId>> = vec![BTreeSet::new(); pieces.len()];
        for &(first, then) in edges {
            let (first, then) = (task_of[first as usize], task_of[then as usize]);
            if first != then {
                after[then as usize].insert(TaskId(first));
            }
        }
        let mut segments: Vec<Segment> = Vec::new();
        let mut known: BTreeMap<(u32, u32, Vec<OperatorId>), SegmentId> = BTreeMap::new();
        let mut all_measured = true;
        let mut tasks = Vec::with_capacity(pieces.len());
        let mut order: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
        for (index, (piece, after)) in pieces.iter().zip(after).enumerate() {
            let (work, unit, cost, item, iteration) = match piece {
                Piece::Jobs(jobs) => {
                    let job = &problem.jobs[jobs[0] as usize];
                    let unit = schedule.unit[jobs[0] as usize];
                    let operators = problem.operators_of(jobs);
                    let key = (job.model, unit, operators);
                    let segment = if let Some(&segment) = known.get(&key) {
                        segment
                    } else {
                        let (segment, whole) = self.segment(job.model, unit as usize, &key.2)?;
                        all_measured &= whole;
                        let id = SegmentId(segments.len() as u32);
                        segments.push(segment);
                        known.insert(key, id);
                        id
                    };
                    let cost = segments[segment.0 as usize].cost.clone();
                    (Work::Segment { segment }, unit, cost, job.item, job.iteration)
                }
                Piece::Other(step) => self.handing(*step),
            };
            for &resource in &problem.units[unit as usize].resources {
                order.entry(problem.resources[resource as usize].clone()).or_default().push(TaskId(index as u32));
            }
            let unit = problem.units[unit as usize].address.clone();
            tasks.push(Task { work, unit, iteration, item, after: after.into_iter().collect(), cost });
        }
        let used: BTreeSet<u32> = schedule.order.iter().map(|&step| problem.step_unit(step, &schedule.unit)).collect();
        let graphs: Vec<&OperatorGraph> = self.views.iter().map(|view| view.graph).collect();
        let mut plan = Plan {
            format: PLAN_FORMAT.to_owned(),
            version: PLAN_VERSION,
            method: self.method.to_owned(),
            objective: if problem.goal == Goal::Energy { Objective::Energy } else { Objective::Latency },
            models: graphs
                .iter()
                .map(|graph| PlannedModel {
                    name: graph.model.clone(),
                    fingerprint: graph.fingerprint.clone(),
                    granularity: graph.granularity,
                    operators: graph.len() as u32,
                })
                .collect(),
            requests: self.requests(),
            links: Vec::new(),
            units: used.into_iter().map(|unit| self.views[0].units[unit as usize].clone()).collect(),
            segments,
            tasks,
            order,
            claimed,
            simulated_ms: 0.0,
            model_bound: None,
            gap: None,
            exact: false,
            own: None,
            simulated_j: None,
            weighted: false,
            all_measured,
            notes: Vec::new(),
            timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
        };
        let simulation = run(&mut plan, self.views)?;
        Ok((plan, simulation))
    }

    fn requests(&self) -> Vec<PlannedRequest> {
        let problem = self.problem;
        if problem.requests.len() < 2
            && problem.requests.iter().all(|request| *request == super::ProblemRequest::default())
        {
            return Vec::new();
        }
        let served: BTreeSet<(u32, u32, u32)> =
            problem.jobs.iter().map(|job| (job.model, job.item, job.request)).collect();
        served
            .into_iter()
            .map(|(model, item, number)| {
                let request = &problem.requests[number as usize];
                PlannedRequest {
                    model,
                    item,
                    request: number,
                    arrival_ms: request.release_ms,
                    deadline_ms: request.deadline_ms,
                    weight: request.weight,
                }
            })
            .collect()
    }

    fn cost_ref(&self, cost: &SegmentCost, unit: usize) -> CostRef {
        CostRef {
            ms: cost.ms,
            joules: self.problem.units[unit].watts.map(|watts| watts * cost.ms / 1e3),
            origin: cost.origin,
            measurements: cost.ids.clone(),
        }
    }

    fn segment(&self, model: u32, unit: usize, operators: &[OperatorId]) -> Result<(Segment, bool), PlanError> {
        let view = self.views[model as usize];
        let cost = view.segment(operators, unit).map_err(|reason| PlanError::Unrunnable {
            unit: view.table.units[unit].to_string(),
            what: crate::assemble::describe(view, operators),
            model: view.graph.model.clone(),
            reason,
        })?;
        let (inputs, outputs) = view.graph.boundary(&operators.iter().copied().collect());
        let segment = Segment {
            model,
            unit: view.table.units[unit].clone(),
            operators: operators.to_vec(),
            inputs,
            outputs,
            cost: self.cost_ref(&cost, unit),
        };
        Ok((segment, cost.whole))
    }

    /// A transfer or handover.
    fn handing(&self, step: Step) -> (Work, u32, CostRef, u32, u32) {
        let problem = self.problem;
        let (index, outward) = match step {
            Step::Transfer { tensor, .. } => (tensor, false),
            Step::Handover(tensor) => (tensor, true),
            Step::Job(_) => unreachable!("jobs are pieces of their own"),
        };
        let tensor = &problem.tensors[index as usize];
        let view = self.views[tensor.model as usize];
        let here = problem.step_unit(step, &self.schedule.unit);
        let from = tensor.producer.map(|job| self.schedule.unit[job as usize] as usize);
        let (ids, origin) = match (from, outward) {
            (_, true) => {
                let (_, ids, origin) = view.output_ms(tensor.tensor, here as usize);
                (ids.to_vec(), composed(Origin::Predicted, origin))
            }
            (None, false) => {
                let (_, ids, origin) = view.input_ms(tensor.tensor, here as usize);
                (ids.to_vec(), composed(Origin::Predicted, origin))
            }
            (Some(from), false) => {
                let transfer = view.table.transfer(from, here as usize);
                // Between measured sizes the price is interpolated, which is a prediction.
                let measured = transfer.points.iter().any(|&(size, _)| size == tensor.bytes);
                let interpolated = transfer.origin == Origin::Measured && !measured;
                (transfer.ids.clone(), if interpolated { Origin::Predicted } else { transfer.origin })
            }
        };
        let ms = problem.step_ms(step, &self.schedule.unit);
        let cost = self.cost_ref(&SegmentCost { ms, whole: true, ids, origin }, here as usize);
        let work = Work::Transfer {
            model: tensor.model,
            tensor: tensor.tensor,
            from: from.map(|from| problem.units[from].address.clone()),
        };
        let job = tensor.producer.or(tensor.consumers.first().copied()).unwrap_or(0);
        let job = &problem.jobs[job as usize];
        (work, here, cost, job.item, job.iteration)
    }
}
