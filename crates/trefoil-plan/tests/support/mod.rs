//! A small scheduling problem written down plainly, its own simulator and exhaustive search. Nothing here shares code with the
//! crate: times advance event by event over hash maps, orders are enumerated as permutations.

#![allow(dead_code)]

pub mod certified;

use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{OperatorClass, OperatorId, TensorId, UnitAddress};
use trefoil_plan::Factors;
use trefoil_plan::problem::{Job, Problem, ProblemRequest, ProblemTensor, ProblemUnit, Schedule, Step};

/// A tensor: maker, readers, `price[from][to]` (the last row is the host), `home[unit]` (to the host), an output or not.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub maker: Option<usize>,
    pub readers: Vec<usize>,
    pub price: Vec<Vec<f64>>,
    pub home: Vec<f64>,
    pub output: bool,
}

/// An instance: `ms[job][unit]`, resources per unit, `factor[slowed][other]` for every class.
#[derive(Debug, Clone)]
pub struct Instance {
    pub ms: Vec<Vec<Option<f64>>>,
    pub tensors: Vec<Tensor>,
    pub resources: Vec<Vec<u32>>,
    pub factor: Vec<Vec<f64>>,
    pub watts: Vec<f64>,
    pub idle: f64,
    /// Request of each job, and release, deadline and weight of each request.
    pub request: Vec<usize>,
    pub requests: Vec<(f64, Option<f64>, f64)>,
    /// Bytes of each job's weights, and the most that each unit holds.
    pub weights: Vec<u64>,
    pub memory: Vec<Option<u64>>,
}

/// Deterministic numbers in `[0, 1)`.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as f64) / f64::from(1u32 << 31)
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.roll() * count as f64) as usize
    }
}

/// What a random instance may hold.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub jobs: usize,
    pub units: usize,
    /// Chance of an edge between two jobs.
    pub edges: f64,
    /// Scale of transfers beside jobs of up to 1 ms.
    pub transfers: f64,
    pub slowdown: bool,
    /// Factors below 1 too.
    pub speedup: bool,
    /// Units 0 and 1 share a resource.
    pub shared: bool,
    pub requests: usize,
}

impl Instance {
    pub fn random(shape: Shape, dice: &mut Dice) -> Self {
        let Shape { jobs, units, .. } = shape;
        let ms: Vec<Vec<Option<f64>>> = (0..jobs)
            .map(|_| {
                let keep = dice.below(units);
                (0..units)
                    .map(|unit| (unit == keep || dice.roll() < 0.85).then(|| (dice.roll() * 8.0).ceil() / 8.0))
                    .collect()
            })
            .collect();
        let request: Vec<usize> = (0..jobs).map(|job| job % shape.requests).collect();
        let mut tensors = Vec::new();
        let table = |dice: &mut Dice, host: bool| -> Vec<Vec<f64>> {
            (0..=units)
                .map(|from| {
                    (0..units)
                        .map(|to| {
                            let free = from == to || (from == units && !host) || dice.roll() < 0.3;
                            if free { 0.0 } else { (dice.roll() * 8.0).ceil() / 8.0 * shape.transfers }
                        })
                        .collect()
                })
                .collect()
        };
        for maker in 0..jobs {
            let readers: Vec<usize> =
                (maker + 1..jobs).filter(|&job| request[job] == request[maker] && dice.roll() < shape.edges).collect();
            let output = readers.is_empty();
            let price = table(dice, false);
            let home =
                (0..units).map(|_| if dice.roll() < 0.7 { 0.0 } else { dice.roll() * shape.transfers }).collect();
            tensors.push(Tensor { maker: Some(maker), readers, price, home, output });
        }
        for number in 0..shape.requests {
            let sources: Vec<usize> = (0..jobs)
                .filter(|&job| {
                    request[job] == number && !tensors.iter().any(|tensor: &Tensor| tensor.readers.contains(&job))
                })
                .collect();
            if !sources.is_empty() && dice.roll() < 0.5 {
                let price = table(dice, true);
                tensors.push(Tensor { maker: None, readers: sources, price, home: vec![0.0; units], output: false });
            }
        }
        let mut resources: Vec<Vec<u32>> = (0..units as u32).map(|unit| vec![unit]).collect();
        if shape.shared && units > 1 {
            resources[1] = vec![0, 1];
        }
        let factor = (0..units)
            .map(|slowed| {
                (0..units)
                    .map(|other| match (shape.slowdown, slowed == other) {
                        (true, false) if shape.speedup => 0.75 + dice.roll(),
                        (true, false) => 1.0 + dice.roll(),
                        _ => 1.0,
                    })
                    .collect()
            })
            .collect();
        let requests = (0..shape.requests)
            .map(|number| {
                if shape.requests == 1 {
                    return (0.0, None, 1.0);
                }
                let release = if number == 0 { 0.0 } else { dice.roll() };
                let deadline = (dice.roll() < 0.5).then(|| release + 0.5 + 1.5 * dice.roll());
                (release, deadline, 0.5 + dice.roll())
            })
            .collect();
        let watts = (0..units).map(|_| 3.0 + 10.0 * dice.roll()).collect();
        let (weights, memory) = (vec![0; jobs], vec![None; units]);
        Self { ms, tensors, resources, factor, watts, idle: 2.0, request, requests, weights, memory }
    }

    /// The same with weights, and limits that some random assignment keeps to.
    pub fn limited(mut self, dice: &mut Dice) -> Self {
        let step = 1 + dice.below(3) as u64;
        self.weights = self.ms.iter().map(|_| step * dice.below(6) as u64).collect();
        let mut held = vec![0; self.memory.len()];
        for (ms, weight) in self.ms.iter().zip(&self.weights) {
            let able: Vec<usize> = (0..ms.len()).filter(|&unit| ms[unit].is_some()).collect();
            held[able[dice.below(able.len())]] += weight;
        }
        self.memory = held.iter().map(|held| (dice.roll() < 0.8).then(|| held + dice.below(3) as u64)).collect();
        self
    }

    fn fits(&self, unit: &[usize]) -> bool {
        let held = |at: usize| -> u64 {
            unit.iter().zip(&self.weights).filter(|(unit, _)| **unit == at).map(|(_, weight)| weight).sum()
        };
        self.memory.iter().enumerate().all(|(at, most)| most.is_none_or(|most| held(at) <= most))
    }

    pub fn problem(&self) -> Problem {
        let units = self.resources.len();
        let names = self.resources.iter().flatten().max().map_or(0, |most| most + 1);
        let mut factors = Factors::none(units);
        for slowed in 0..units {
            for other in (0..units).filter(|&other| other != slowed) {
                factors.set_all(slowed, other, self.factor[slowed][other]);
            }
        }
        let unit = |unit: usize| ProblemUnit {
            address: UnitAddress::new("test", format!("U{unit}")),
            resources: self.resources[unit].clone(),
            accelerator: unit > 0,
            watts: Some(self.watts[unit]),
            memory_bytes: self.memory[unit],
        };
        let jobs = self.ms.iter().enumerate().map(|(job, ms)| Job {
            name: format!("op{job}"),
            model: 0,
            item: self.request[job] as u32,
            iteration: 0,
            operators: vec![OperatorId(job as u32)],
            class: vec![OperatorClass::Memory; units],
            ms: ms.iter().map(|ms| ms.unwrap_or(f64::INFINITY)).collect(),
            weight_bytes: self.weights[job],
            request: self.request[job] as u32,
        });
        let tensors = self.tensors.iter().enumerate().map(|(index, tensor)| ProblemTensor {
            model: 0,
            tensor: TensorId(index as u32),
            producer: tensor.maker.map(|job| job as u32),
            consumers: tensor.readers.iter().map(|&job| job as u32).collect(),
            bytes: 1,
            transfer_ms: tensor.price.iter().flatten().copied().collect(),
            to_host_ms: tensor.home.clone(),
            is_output: tensor.output,
        });
        let requests = self.requests.iter().map(|&(release_ms, deadline_ms, weight)| ProblemRequest {
            release_ms,
            deadline_ms,
            weight,
        });
        Problem::new(
            (0..units).map(unit).collect(),
            (0..names).map(|id| format!("r{id}")).collect(),
            jobs.collect(),
            tensors.collect(),
            requests.collect(),
            factors,
            Some(self.idle),
        )
        .expect("a sound problem")
    }

    /// Tasks of an assignment: `(step, unit, ms, waits for, release, request it completes)`.
    pub fn tasks(&self, unit: &[usize]) -> Vec<Task> {
        let units = self.resources.len();
        let mut tasks: Vec<Task> = (0..self.ms.len())
            .map(|job| Task {
                step: Step::Job(job as u32),
                unit: unit[job],
                ms: self.ms[job][unit[job]].expect("runs there"),
                waits: BTreeSet::new(),
                release: self.requests[self.request[job]].0,
                completes: Some(self.request[job]),
            })
            .collect();
        for (index, tensor) in self.tensors.iter().enumerate() {
            let from = tensor.maker.map_or(units, |job| unit[job]);
            let mut brought: BTreeMap<usize, usize> = BTreeMap::new();
            for &reader in &tensor.readers {
                let to = unit[reader];
                let price = tensor.price[from][to];
                if price > 0.0 {
                    let task = *brought.entry(to).or_insert_with(|| {
                        tasks.push(Task {
                            step: Step::Transfer { tensor: index as u32, unit: to as u32 },
                            unit: to,
                            ms: price,
                            waits: tensor.maker.into_iter().collect(),
                            release: self.requests[self.request[tensor.maker.unwrap_or(reader)]].0,
                            completes: None,
                        });
                        tasks.len() - 1
                    });
                    tasks[reader].waits.insert(task);
                } else {
                    tasks[reader].waits.extend(tensor.maker);
                }
            }
            if let Some(maker) = tensor.maker
                && tensor.output
                && tensor.home[from] > 0.0
            {
                tasks.push(Task {
                    step: Step::Handover(index as u32),
                    unit: from,
                    ms: tensor.home[from],
                    waits: BTreeSet::from([maker]),
                    release: 0.0,
                    completes: Some(self.request[maker]),
                });
            }
        }
        tasks
    }

    /// Runs tasks in a global order (each resource takes its tasks in that order): makespan, joules, completion per request.
    pub fn simulate(&self, tasks: &[Task], order: &[usize]) -> (f64, f64, Vec<f64>) {
        let mut left: Vec<f64> = tasks.iter().map(|task| task.ms).collect();
        let (mut begun, mut ended) = (BTreeSet::new(), BTreeSet::new());
        let mut completion = vec![0.0f64; self.requests.len()];
        let (mut now, mut joules) = (0.0f64, 0.0);
        let share = |a: usize, b: usize| {
            self.resources[tasks[a].unit].iter().any(|id| self.resources[tasks[b].unit].contains(id))
        };
        while ended.len() < tasks.len() {
            loop {
                let next = order.iter().enumerate().find(|&(place, task)| {
                    !begun.contains(task)
                        && tasks[*task].release <= now + 1e-12
                        && tasks[*task].waits.iter().all(|before| ended.contains(before))
                        && order[..place].iter().all(|&earlier| !share(earlier, *task) || ended.contains(&earlier))
                });
                match next {
                    Some((_, &task)) => begun.insert(task),
                    None => break,
                };
            }
            let running: Vec<usize> = begun.difference(&ended).copied().collect();
            let factor = |task: usize| {
                let others = running.iter().filter(|&&other| other != task);
                others.map(|&other| self.factor[tasks[task].unit][tasks[other].unit]).reduce(f64::max).unwrap_or(1.0)
            };
            let releases = tasks.iter().map(|task| task.release - now).filter(|&wait| wait > 1e-12);
            let step = running.iter().map(|&task| left[task] * factor(task)).chain(releases).reduce(f64::min);
            let Some(step) = step else { return (f64::NAN, f64::NAN, completion) };
            let factors: Vec<f64> = running.iter().map(|&task| factor(task)).collect();
            joules += step
                * (self.idle + running.iter().map(|&task| self.watts[tasks[task].unit] - self.idle).sum::<f64>())
                / 1e3;
            now += step;
            for (&task, factor) in running.iter().zip(factors) {
                left[task] -= step / factor;
                if left[task] <= 1e-11 {
                    ended.insert(task);
                    if let Some(request) = tasks[task].completes {
                        completion[request] = now;
                    }
                }
            }
        }
        (now, joules, completion)
    }

    /// Calls `visit` with makespan, joules and completions of every course that the tasks can take: whenever something ends or arrives, any of
    /// those that could start do. One that did not start when it could does not start before something ends.
    pub fn every_course(&self, tasks: &[Task], visit: &mut impl FnMut(f64, f64, &[f64])) {
        let start = Course {
            now: 0.0,
            joules: 0.0,
            left: tasks.iter().map(|task| task.ms).collect(),
            begun: BTreeSet::new(),
            ended: BTreeSet::new(),
            waiting: BTreeSet::new(),
            completion: vec![0.0; self.requests.len()],
        };
        self.courses(tasks, &start, visit);
    }

    fn courses(&self, tasks: &[Task], at: &Course, visit: &mut impl FnMut(f64, f64, &[f64])) {
        let share = |a: usize, b: usize| {
            self.resources[tasks[a].unit].iter().any(|id| self.resources[tasks[b].unit].contains(id))
        };
        let ready: Vec<usize> = (0..tasks.len())
            .filter(|&task| {
                !at.begun.contains(&task)
                    && !at.waiting.contains(&task)
                    && tasks[task].release <= at.now + 1e-12
                    && tasks[task].waits.iter().all(|before| at.ended.contains(before))
                    && at.begun.difference(&at.ended).all(|&other| !share(task, other))
            })
            .collect();
        for choice in 0..1u32 << ready.len() {
            let begins = |&(bit, _): &(usize, usize)| choice >> bit & 1 == 1;
            let (begin, wait): (Vec<_>, Vec<_>) = ready.iter().copied().enumerate().partition(begins);
            let [begin, wait] =
                [begin, wait].map(|list| list.into_iter().map(|(_, task)| task).collect::<Vec<usize>>());
            if begin.iter().any(|&one| begin.iter().any(|&other| one < other && share(one, other))) {
                continue;
            }
            let mut next = at.clone();
            next.begun.extend(begin);
            next.waiting.extend(wait);
            let running: Vec<usize> = next.begun.difference(&next.ended).copied().collect();
            let releases = (0..tasks.len())
                .filter(|task| !next.begun.contains(task))
                .map(|task| tasks[task].release - next.now)
                .filter(|&wait| wait > 1e-12);
            let factor = |task: usize| {
                let others = running.iter().filter(|&&other| other != task);
                others.map(|&other| self.factor[tasks[task].unit][tasks[other].unit]).reduce(f64::max).unwrap_or(1.0)
            };
            let step = running.iter().map(|&task| next.left[task] * factor(task)).chain(releases).reduce(f64::min);
            let Some(step) = step else {
                if next.ended.len() == tasks.len() {
                    visit(next.now, next.joules, &next.completion);
                }
                continue;
            };
            next.joules += step
                * (self.idle + running.iter().map(|&task| self.watts[tasks[task].unit] - self.idle).sum::<f64>())
                / 1e3;
            next.now += step;
            for &task in &running {
                next.left[task] -= step / factor(task);
                if next.left[task] <= 1e-11 {
                    next.ended.insert(task);
                    next.waiting.clear();
                    if let Some(request) = tasks[task].completes {
                        next.completion[request] = next.now;
                    }
                }
            }
            self.courses(tasks, &next, visit);
        }
    }

    /// Calls `visit` with every assignment within the limits and its tasks.
    pub fn all_placements(&self, visit: &mut impl FnMut(&[Task])) {
        let units = self.resources.len();
        for code in 0..units.pow(self.ms.len() as u32) {
            let unit: Vec<usize> = (0..self.ms.len()).map(|job| code / units.pow(job as u32) % units).collect();
            if unit.iter().zip(&self.ms).all(|(&unit, ms)| ms[unit].is_some()) && self.fits(&unit) {
                visit(&self.tasks(&unit));
            }
        }
    }

    /// Calls `visit` with every assignment within the limits and every distinct set of resource orders.
    pub fn all_schedules(&self, visit: &mut impl FnMut(&[usize], &[Task], &[usize])) {
        let units = self.resources.len();
        let total = units.pow(self.ms.len() as u32);
        for code in 0..total {
            let mut rest = code;
            let unit: Vec<usize> = (0..self.ms.len())
                .map(|_| {
                    let digit = rest % units;
                    rest /= units;
                    digit
                })
                .collect();
            if unit.iter().zip(&self.ms).any(|(&unit, ms)| ms[unit].is_none()) || !self.fits(&unit) {
                continue;
            }
            let tasks = self.tasks(&unit);
            let mut seen = BTreeSet::new();
            self.orders(&tasks, &mut Vec::new(), &mut seen, &mut |order| visit(&unit, &tasks, order));
        }
    }

    fn orders(
        &self,
        tasks: &[Task],
        prefix: &mut Vec<usize>,
        seen: &mut BTreeSet<Vec<Vec<usize>>>,
        visit: &mut impl FnMut(&[usize]),
    ) {
        // Prefixes that order every resource alike are continued once.
        let mut key: Vec<Vec<usize>> = vec![Vec::new(); self.resources.iter().flatten().count() + 1];
        for &task in prefix.iter() {
            for &resource in &self.resources[tasks[task].unit] {
                key[resource as usize].push(task);
            }
        }
        if !seen.insert(key) {
            return;
        }
        if prefix.len() == tasks.len() {
            visit(prefix);
            return;
        }
        for task in 0..tasks.len() {
            if !prefix.contains(&task) && tasks[task].waits.iter().all(|before| prefix.contains(before)) {
                prefix.push(task);
                self.orders(tasks, prefix, seen, visit);
                prefix.pop();
            }
        }
    }

    /// The same as the crate's schedule.
    pub fn schedule(unit: &[usize], tasks: &[Task], order: &[usize]) -> Schedule {
        Schedule {
            unit: unit.iter().map(|&unit| unit as u32).collect(),
            order: order.iter().map(|&task| tasks[task].step).collect(),
            after: Vec::new(),
        }
    }
}

#[derive(Clone)]
struct Course {
    now: f64,
    joules: f64,
    left: Vec<f64>,
    begun: BTreeSet<usize>,
    ended: BTreeSet<usize>,
    waiting: BTreeSet<usize>,
    completion: Vec<f64>,
}

/// See [`Instance::tasks`].
#[derive(Debug, Clone)]
pub struct Task {
    pub step: Step,
    pub unit: usize,
    pub ms: f64,
    pub waits: BTreeSet<usize>,
    pub release: f64,
    pub completes: Option<usize>,
}

pub fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()))
}
