//! Whether a schedule can happen, and whether it costs what is claimed.

use super::{CERTIFICATE, Execution, Schedule, Task, Work};
use crate::costs::Model;
use crate::json::text;
use crate::links::Source;
use crate::machine::{Class, Machine};
use crate::{CheckError, TOLERANCE, close};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What rounding does to a point in time, relative: some tens of the last binary place.
const ROUNDING: f64 = 1e-14;

impl Schedule {
    /// Slack for comparing points in time with a task's start: what rounding does to numbers of that size, and a part of the task that
    /// nobody can use. The end of the schedule has no say: one late task would let all others happen at once.
    fn slack(task: &Task) -> f64 {
        ROUNDING * task.start.max(task.end) + TOLERANCE * 1e-2 * task.ms
    }

    /// Times make sense: nothing ends before it starts or starts before it arrives, and every task is long enough for times of its size to
    /// tell it from none.
    fn verify_times(&self) -> Result<(), CheckError> {
        for (index, task) in self.tasks.iter().enumerate() {
            let slack = Self::slack(task);
            let fail = |what: String| Err(CheckError::Schedule(format!("task {index} {what}")));
            if task.end < task.start || task.start < self.arrival(task.of.0, task.of.1) - slack {
                return fail("ends before it starts, or starts before it arrives".to_owned());
            }
            if task.ms > 0.0 && slack > 1e-3 * task.ms {
                return fail(format!("ends at {} ms, a time so late that its {} ms do not show", task.end, task.ms));
            }
        }
        Ok(())
    }

    /// Every task starts when something else ends or arrives: planners wait for nothing else, and who does may claim any makespan.
    fn verify_starts(&self) -> Result<(), CheckError> {
        let works = self.tasks.iter().filter(|task| task.end > task.start);
        let mut events: Vec<f64> = std::iter::once(0.0).chain(self.arrivals.values().copied()).collect();
        events.extend(works.map(|task| task.end));
        events.sort_by(f64::total_cmp);
        for (index, task) in self.tasks.iter().enumerate() {
            let slack = Self::slack(task);
            let at = events.partition_point(|&event| event < task.start - slack);
            if events.get(at).is_none_or(|&event| event > task.start + slack) {
                return Err(CheckError::Schedule(format!(
                    "task {index} starts at {} ms, when nothing ends or arrives",
                    task.start
                )));
            }
        }
        Ok(())
    }

    pub fn verify(&self, models: &[Model], machine: &Machine) -> Result<(), CheckError> {
        self.verify_memory(models, machine)?;
        self.verify_times()?;
        self.verify_resources(machine)?;
        self.verify_data(models, machine)?;
        self.verify_progress(machine)?;
        self.verify_starts()
    }

    /// No unit holds more weights than its memory has; an operator's count once per unit that computes it.
    fn verify_memory(&self, models: &[Model], machine: &Machine) -> Result<(), CheckError> {
        let mut held = vec![0.0; machine.units.len()];
        let mut seen = BTreeSet::new();
        for task in &self.tasks {
            let Work::Compute(operators) = &task.work else { continue };
            for &at in operators {
                if seen.insert((task.unit, task.of.0, at)) {
                    held[task.unit] += models[task.of.0].operators[at].weight_bytes;
                }
            }
        }
        let over =
            machine.units.iter().zip(held).find(|(unit, held)| unit.memory_bytes.is_some_and(|most| *held > most));
        match over {
            Some((unit, held)) => Err(CheckError::Schedule(format!(
                "{} would hold {held} bytes of weights, more than its memory",
                unit.address
            ))),
            None => Ok(()),
        }
    }

    /// No resource does two things at once.
    fn verify_resources(&self, machine: &Machine) -> Result<(), CheckError> {
        let mut by_resource: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, task) in self.tasks.iter().enumerate() {
            for resource in &machine.units[task.unit].resources {
                by_resource.entry(resource).or_default().push(index);
            }
        }
        for (resource, mut list) in by_resource {
            list.sort_by(|&a, &b| {
                let (a, b) = (&self.tasks[a], &self.tasks[b]);
                a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end))
            });
            for pair in list.windows(2) {
                let next = &self.tasks[pair[1]];
                if next.start < self.tasks[pair[0]].end - Self::slack(next) {
                    return Err(CheckError::Schedule(format!(
                        "tasks {} and {} hold resource {resource} at once",
                        pair[0], pair[1]
                    )));
                }
            }
        }
        Ok(())
    }

    /// Whatever a task reads is there when it starts.
    fn verify_data(&self, models: &[Model], machine: &Machine) -> Result<(), CheckError> {
        let mut brought: BTreeMap<(Execution, usize, usize), &Task> = BTreeMap::new();
        let mut handed: BTreeMap<(Execution, usize), &Task> = BTreeMap::new();
        for (index, task) in self.tasks.iter().enumerate() {
            let Work::Transfer { tensor, from } = task.work else { continue };
            let producer = models[task.of.0].tensors[tensor].producer;
            let fail = |what: &str| Err(CheckError::Schedule(format!("task {index} moves tensor {tensor} {what}")));
            match (from, producer) {
                (None, None) => {}
                (Some(from), Some(at)) => {
                    let Some(done) = self.computed_by.get(&task.of) else { return fail("of something never computed") };
                    let source = &self.tasks[done[at]];
                    if source.unit != from {
                        return fail("from a unit that does not make it");
                    }
                    if task.start < source.end - Self::slack(task) {
                        return fail("before it is made");
                    }
                }
                _ => return fail("from where it never is"),
            }
            if from == Some(task.unit) {
                handed.insert((task.of, tensor), task);
            } else {
                let earlier = brought.entry((task.of, tensor, task.unit)).or_insert(task);
                if task.end < earlier.end {
                    *earlier = task;
                }
            }
        }
        for (index, task) in self.tasks.iter().enumerate() {
            let Work::Compute(operators) = &task.work else { continue };
            let model = &models[task.of.0];
            for &at in operators {
                for &tensor in &model.operators[at].inputs {
                    let producer = model.tensors[tensor].producer;
                    if producer.is_some_and(|producer| operators.binary_search(&producer).is_ok()) {
                        continue;
                    }
                    let source = match producer {
                        Some(_) => Source::Made(task.of, tensor),
                        None => self.links.source(task.of, tensor),
                    };
                    let brought = |of: Execution, tensor: usize| {
                        brought.get(&(of, tensor, task.unit)).map(|transfer| transfer.end)
                    };
                    let arrives = match source {
                        Source::Made(of, made) => self.made_by(models, of, made).and_then(|maker| {
                            let free = maker.unit == task.unit
                                || models[of.0].transfer(maker.unit, task.unit, models[of.0].tensors[made].bytes)
                                    == 0.0;
                            if free { Some(maker.end) } else { brought(of, made) }
                        }),
                        Source::Host(_) if model.host_transfer(tensor, task.unit, machine, false) == 0.0 => Some(0.0),
                        Source::Host(of) => brought(of, tensor),
                    };
                    if arrives.is_none_or(|arrives| task.start < arrives - Self::slack(task)) {
                        return Err(CheckError::Schedule(format!(
                            "task {index} starts before tensor {tensor}, which operator {at} reads, is on its unit"
                        )));
                    }
                }
                for &tensor in &model.operators[at].outputs {
                    if model.tensors[tensor].is_output
                        && self.links.hands_over(task.of, tensor)
                        && model.host_transfer(tensor, task.unit, machine, true) > 0.0
                        && !handed.contains_key(&(task.of, tensor))
                    {
                        return Err(CheckError::Schedule(format!("output tensor {tensor} is never handed over")));
                    }
                }
            }
        }
        Ok(())
    }

    /// The task that makes a tensor.
    fn made_by(&self, models: &[Model], of: Execution, tensor: usize) -> Option<&Task> {
        let maker = models[of.0].tensors[tensor].producer?;
        Some(&self.tasks[self.computed_by.get(&of)?[maker]])
    }

    /// The busy sets between consecutive events: `f(length, running tasks)`.
    fn sweep(&self, mut f: impl FnMut(f64, &[usize])) {
        let mut events: Vec<(f64, bool, usize)> = Vec::with_capacity(2 * self.tasks.len());
        for (index, task) in self.tasks.iter().enumerate() {
            events.push((task.start, true, index));
            events.push((task.end.max(task.start), false, index));
        }
        // At equal times ends come before starts, so that neighbours on a resource do not overlap.
        events.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut running: Vec<usize> = Vec::new();
        let mut now = 0.0;
        for (time, starts, index) in events {
            if time > now {
                f(time - now, &running);
                now = time;
            }
            if starts && self.tasks[index].end > self.tasks[index].start {
                running.push(index);
            } else {
                running.retain(|&other| other != index);
            }
        }
    }

    /// Each task gets as much work done between its start and end as it costs, at the rates that the busy units leave it.
    fn verify_progress(&self, machine: &Machine) -> Result<(), CheckError> {
        let mut progress = vec![0.0; self.tasks.len()];
        self.sweep(|length, running| {
            for &index in running {
                let others: Vec<(usize, Class)> = running
                    .iter()
                    .filter(|&&other| other != index)
                    .map(|&other| (self.tasks[other].unit, self.tasks[other].class))
                    .collect();
                let task = &self.tasks[index];
                progress[index] += length / machine.factor(task.unit, task.class, &others);
            }
        });
        for (index, task) in self.tasks.iter().enumerate() {
            if (progress[index] - task.ms).abs() > TOLERANCE * task.ms + Self::slack(task) {
                return Err(CheckError::Schedule(format!(
                    "task {index} costs {} ms but from {} to {} it gets {} ms done",
                    task.ms, task.start, task.end, progress[index]
                )));
            }
        }
        Ok(())
    }

    /// The claimed cost by its rule; returns the verified value.
    pub fn verify_claim(
        &self,
        certificate: &Value,
        models: &[Model],
        machine: &Machine,
        per_ms: &[f64],
    ) -> Result<f64, CheckError> {
        let claim = certificate.get("claim").unwrap_or(&Value::Null);
        let stated = CERTIFICATE.number(claim, "value")?;
        let simulated = CERTIFICATE.number(claim, "simulated_ms")?;
        if !close(simulated, self.makespan()) {
            return Err(CheckError::Claim(format!("the makespan is {} ms, not {simulated}", self.makespan())));
        }
        // A period or an energy is not to be read as milliseconds of something else.
        let objective = text(certificate, "objective");
        for (rule, own) in [("period", "throughput"), ("energy", "energy")] {
            if text(claim, "rule") == Some(rule) && objective != Some(own) {
                return Err(
                    CERTIFICATE.fail(format!("claim rule {rule:?} is for the objective {own:?}, not {objective:?}"))
                );
            }
        }
        if (text(claim, "rule"), objective) == (Some("makespan"), Some("energy")) && self.energy(machine).is_ok() {
            return Err(CheckError::Claim(
                "the profile tells the energy, so the makespan is no claim for it".to_owned(),
            ));
        }
        let derived = match text(claim, "rule") {
            Some("makespan") => self.makespan(),
            Some("busy-sum") => self.tasks.iter().map(|task| task.ms * per_ms[task.unit]).sum(),
            Some("energy") => self.energy(machine)?,
            Some("period") => self.period(machine),
            Some("weighted-completion") => {
                self.weighted_mean(|model, item| (self.completion(model, item) - self.arrival(model, item)).max(0.0))
            }
            Some("paper-sequential") => {
                let [model] = models else { return Err(CERTIFICATE.fail("the paper's claim is of one model")) };
                let done = self.computed_by.get(&(0, 0, 0)).cloned().unwrap_or_default();
                let assignment: Vec<usize> = done.iter().map(|&task| self.tasks[task].unit).collect();
                crate::serial::paper_cost(model, machine, per_ms, &assignment)
            }
            rule => return Err(CERTIFICATE.fail(format!("claim rule {rule:?}"))),
        };
        if close(stated, derived) {
            Ok(derived)
        } else {
            Err(CheckError::Claim(format!("the cost is {derived}, not {stated}")))
        }
    }

    /// The busiest resource's time for one item.
    fn period(&self, machine: &Machine) -> f64 {
        let mut load: BTreeMap<&str, f64> = BTreeMap::new();
        for task in &self.tasks {
            for resource in &machine.units[task.unit].resources {
                *load.entry(resource).or_default() += task.ms;
            }
        }
        load.into_values().fold(0.0, f64::max)
    }

    /// `∫ [P_idle + Σ_busy (P_u − P_idle)] dt` in joules.
    fn energy(&self, machine: &Machine) -> Result<f64, CheckError> {
        let mut joules = Some(0.0);
        self.sweep(|length, running| {
            let busy: Option<f64> = running.iter().map(|&task| machine.units[self.tasks[task].unit].watts).sum();
            let idle = match running.len() {
                1 => Some(0.0),
                count => machine.idle_watts.map(|idle| idle * (1.0 - count as f64)),
            };
            joules = joules.zip(busy).zip(idle).map(|((sum, busy), idle)| sum + (busy + idle) * length / 1e3);
        });
        joules.ok_or_else(|| CheckError::OtherProfile("it does not tell the powers that the energy needs".to_owned()))
    }
}
