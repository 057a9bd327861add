//! Local search over placements for the shortest period: one operator at a time moves to where the busiest resource is
//! relieved, transfers included.

use crate::problem::Problem;

/// Passes over all operators at most.
const PASSES: usize = 12;
/// Relative gain below which a move is not worth it.
const LEAST_GAIN: f64 = 1e-9;

/// A placement and the load that it makes.
struct Placement<'p> {
    problem: &'p Problem,
    unit: Vec<u32>,
    /// Readers of each tensor on each unit, row-major.
    readers: Vec<u32>,
    /// Milliseconds of each resource.
    load: Vec<f64>,
    /// Tensors that each job reads and makes.
    reads: Vec<Vec<usize>>,
    makes: Vec<Vec<usize>>,
}

impl<'p> Placement<'p> {
    fn new(problem: &'p Problem, unit: Vec<u32>) -> Self {
        let units = problem.units().len();
        let jobs = problem.jobs().len();
        let mut reads: Vec<Vec<usize>> = vec![Vec::new(); jobs];
        let mut makes = reads.clone();
        let mut readers = vec![0; problem.tensors().len() * units];
        for (index, tensor) in problem.tensors().iter().enumerate() {
            if let Some(maker) = tensor.producer {
                makes[maker as usize].push(index);
            }
            for &job in &tensor.consumers {
                reads[job as usize].push(index);
                readers[index * units + unit[job as usize] as usize] += 1;
            }
        }
        let load = vec![0.0; problem.resources().len()];
        let mut placement = Self { problem, unit, readers, load, reads, makes };
        for job in 0..jobs {
            placement.add_work(job, 1.0);
        }
        for tensor in 0..problem.tensors().len() {
            placement.add_transfers(tensor, 1.0);
        }
        placement
    }

    fn add(&mut self, unit: usize, ms: f64) {
        for &resource in &self.problem.units()[unit].resources {
            self.load[resource as usize] += ms;
        }
    }

    fn add_work(&mut self, job: usize, sign: f64) {
        let unit = self.unit[job] as usize;
        self.add(unit, sign * self.problem.jobs()[job].ms[unit]);
    }

    /// What a tensor costs: brought once to every other unit that reads it, and handed over if it is an output.
    fn add_transfers(&mut self, tensor: usize, sign: f64) {
        let units = self.problem.units().len();
        let details = &self.problem.tensors()[tensor];
        let source = details.producer.map(|job| self.unit[job as usize] as usize);
        for to in 0..units {
            if self.readers[tensor * units + to] > 0 && source != Some(to) {
                self.add(to, sign * details.transfer_ms[source.unwrap_or(units) * units + to]);
            }
        }
        if let Some(source) = source.filter(|_| details.is_output) {
            self.add(source, sign * details.to_host_ms[source]);
        }
    }

    fn put(&mut self, job: usize, to: usize) {
        let units = self.problem.units().len();
        let touched: Vec<usize> = self.reads[job].iter().chain(&self.makes[job]).copied().collect();
        for &tensor in &touched {
            self.add_transfers(tensor, -1.0);
        }
        self.add_work(job, -1.0);
        let from = self.unit[job] as usize;
        for at in 0..self.reads[job].len() {
            let tensor = self.reads[job][at];
            self.readers[tensor * units + from] -= 1;
            self.readers[tensor * units + to] += 1;
        }
        self.unit[job] = to as u32;
        self.add_work(job, 1.0);
        for &tensor in &touched {
            self.add_transfers(tensor, 1.0);
        }
    }

    /// The busiest resource, and (to tell equal ones apart) the sum of squares.
    fn score(&self) -> (f64, f64) {
        self.load.iter().fold((0.0, 0.0), |(most, squares), &load| (f64::max(most, load), squares + load * load))
    }
}

/// Steps of annealing per operator, and at most.
const STEPS: usize = 600;
const MOST_STEPS: usize = 200_000;
/// First and last temperature, relative to the score.
const HOT: f64 = 0.08;
const COLD: f64 = 0.000_5;

/// Placements that are few enough to look at all of them.
const FEW: usize = 1 << 13;

/// Improves a placement (one unit for each job): all of them where they are few, else annealing over single moves, then the
/// best single moves. Equal questions get equal answers.
pub(super) fn balance(problem: &Problem, unit: Vec<u32>) -> Vec<u32> {
    let mut placement = Placement::new(problem, unit);
    if exhaust(&mut placement) {
        return placement.unit;
    }
    anneal(&mut placement);
    descend(&mut placement);
    placement.unit
}

/// Tries every placement, and leaves the best; `false`, and nothing done, if they are too many.
fn exhaust(placement: &mut Placement<'_>) -> bool {
    let runs: Vec<Vec<usize>> = placement
        .problem
        .jobs()
        .iter()
        .map(|job| (0..job.ms.len()).filter(|&unit| job.ms[unit].is_finite()).collect())
        .collect();
    let count = runs.iter().try_fold(1usize, |count, runs| count.checked_mul(runs.len()).filter(|&count| count <= FEW));
    if count.is_none_or(|count| count == 0) {
        return false;
    }
    for (job, runs) in runs.iter().enumerate() {
        placement.put(job, runs[0]);
    }
    let mut at = vec![0; runs.len()];
    let mut best = (placement.score(), placement.unit.clone());
    'all: loop {
        // Counts up: the first job that has a next unit takes it, those before it start again.
        for job in 0..runs.len() {
            at[job] = (at[job] + 1) % runs[job].len();
            placement.put(job, runs[job][at[job]]);
            if at[job] > 0 {
                let score = placement.score();
                if score < best.0 {
                    best = (score, placement.unit.clone());
                }
                continue 'all;
            }
        }
        break;
    }
    *placement = Placement::new(placement.problem, best.1);
    true
}

fn anneal(placement: &mut Placement<'_>) {
    let (jobs, units) = (placement.unit.len(), placement.problem.units().len());
    if jobs == 0 || units < 2 {
        return;
    }
    let steps = (STEPS * jobs).min(MOST_STEPS);
    let mut numbers = crate::testing::Numbers(0x5eed);
    let mut below = |count: usize| ((numbers.next().unwrap_or(0.0) * count as f64) as usize).min(count - 1);
    let mut now = placement.score().0;
    let mut best = (now, placement.unit.clone());
    for step in 0..steps {
        let job = below(jobs);
        let home = placement.unit[job] as usize;
        let to = (home + 1 + below(units - 1)) % units;
        let luck = below(1 << 20) as f64 / f64::from(1 << 20);
        if placement.problem.jobs()[job].ms[to].is_infinite() {
            continue;
        }
        placement.put(job, to);
        let score = placement.score().0;
        let heat = HOT * (COLD / HOT).powf(step as f64 / steps as f64);
        if score <= now || luck < (-(score - now) / (heat * best.0.max(f64::MIN_POSITIVE))).exp() {
            now = score;
            if now < best.0 * (1.0 - LEAST_GAIN) {
                best = (now, placement.unit.clone());
            }
        } else {
            placement.put(job, home);
        }
    }
    // Afresh, so that rounding of many moves does not add up.
    *placement = Placement::new(placement.problem, best.1);
}

fn descend(placement: &mut Placement<'_>) {
    let (problem, units) = (placement.problem, placement.problem.units().len());
    for _ in 0..PASSES {
        let mut moved = false;
        for job in 0..problem.jobs().len() {
            let home = placement.unit[job] as usize;
            let mut best = (placement.score(), home);
            for to in (0..units).filter(|&to| to != home && problem.jobs()[job].ms[to].is_finite()) {
                placement.put(job, to);
                let score = placement.score();
                let less = score.0 < best.0.0 * (1.0 - LEAST_GAIN)
                    || score.0 <= best.0.0 * (1.0 + LEAST_GAIN) && score.1 < best.0.1 * (1.0 - LEAST_GAIN);
                if less {
                    best = (score, to);
                }
            }
            placement.put(job, best.1);
            moved |= best.1 != home;
        }
        if !moved {
            break;
        }
    }
}
