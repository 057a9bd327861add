//! Some jobs of a problem that must all happen within one stretch of time, with the tensors between them: what loads with transfers
//! are bounded over ([`super::priced`]).

use crate::problem::Problem;

/// A tensor of a part.
#[derive(Debug, Clone)]
pub(super) struct PartTensor {
    /// The problem's tensor.
    pub(super) index: u32,
    /// Local job; `None` if it is at a place that is given.
    pub(super) maker: Option<u32>,
    /// Local jobs.
    pub(super) readers: Vec<u32>,
    /// First of its readers in `φ`, by readers.
    pub(super) slot: usize,
    /// Milliseconds to each unit, from each unit (row-major) or from where it is (one row).
    pub(super) ms: Vec<f64>,
    /// Units that must get it whatever the readers here do, as bits.
    pub(super) must: usize,
}

/// Some jobs of a problem that must all happen within one stretch of time, in topological order.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(super) units: usize,
    /// Row-major jobs × units; infinite where it cannot run.
    pub(super) ms: Vec<f64>,
    pub(super) class: Vec<u8>,
    pub(super) handed: Vec<f64>,
    /// What a job costs on a unit beyond its priced time.
    pub(super) charges: Vec<f64>,
    pub(super) tensors: Vec<PartTensor>,
    /// Per job: tensors it reads, with its place among the tensor's readers; tensors it makes.
    pub(super) reads: Vec<Vec<(u32, u32)>>,
    pub(super) makes: Vec<Vec<u32>>,
    /// Readers of all tensors together.
    pub(super) slots: usize,
    /// The problem's job of each.
    pub(super) jobs: Vec<u32>,
    /// Class of transfers: 1, or 0 where classes are not told apart.
    pub(super) memory: usize,
}

/// What is charged at a part's border.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Border<'b> {
    /// The job that ended right before the part begins, and its unit: what others read of it is brought within the part.
    pub before: Option<(u32, usize)>,
    /// The job that starts right after the part, and its unit: what it reads is brought to it within the part.
    pub after: Option<(u32, usize)>,
    /// Local index by job, `u32::MAX` for jobs outside; empty for the whole problem.
    pub local: &'b [u32],
    /// Whether model inputs are brought within the part.
    pub inputs: bool,
    /// Whether model outputs are handed over within the part.
    pub outputs: bool,
    /// Whether the class of work is known.
    pub classed: bool,
    /// What jobs cost beyond their priced time, by the problem's job × unit; empty for nothing.
    pub charges: &'b [f64],
}

impl Part {
    /// The whole problem.
    pub fn whole(problem: &Problem, classed: bool, charges: &[f64]) -> Self {
        let mut local = vec![0; problem.jobs().len()];
        for (at, &job) in problem.topological().iter().enumerate() {
            local[job as usize] = at as u32;
        }
        Self::new(
            problem,
            problem.topological(),
            Border { local: &local, inputs: true, outputs: true, classed, charges, ..Border::default() },
        )
    }

    /// The jobs given, in topological order.
    pub fn new(problem: &Problem, jobs: &[u32], border: Border<'_>) -> Self {
        let dense = &problem.dense;
        let units = dense.units;
        let local = |job: u32| Some(border.local[job as usize]).filter(|&at| at != u32::MAX);
        let mut part = Self {
            units,
            ms: Vec::with_capacity(jobs.len() * units),
            class: Vec::with_capacity(jobs.len() * units),
            handed: vec![0.0; jobs.len() * units],
            charges: Vec::with_capacity(jobs.len() * units),
            tensors: Vec::new(),
            reads: vec![Vec::new(); jobs.len()],
            makes: vec![Vec::new(); jobs.len()],
            slots: 0,
            jobs: jobs.to_vec(),
            memory: usize::from(border.classed),
        };
        let mut listed: Vec<u32> = Vec::new();
        for (at, &job) in jobs.iter().enumerate() {
            let row = job as usize * units;
            part.ms.extend_from_slice(&dense.ms[row..row + units]);
            match border.charges.get(row..row + units) {
                Some(charges) => part.charges.extend_from_slice(charges),
                None => part.charges.resize(part.ms.len(), 0.0),
            }
            if border.classed {
                part.class.extend_from_slice(&dense.class[row..row + units]);
            } else {
                part.class.extend(std::iter::repeat_n(0, units));
            }
            if border.outputs {
                for &tensor in dense.outputs.row(job as usize) {
                    for unit in 0..units {
                        part.handed[at * units + unit] += dense.to_host[tensor as usize * units + unit];
                    }
                }
            }
            listed.extend(dense.inputs.row(job as usize).iter().chain(dense.outputs.row(job as usize)));
        }
        if let Some((job, _)) = border.before {
            listed.extend(dense.outputs.row(job as usize));
        }
        listed.sort_unstable();
        listed.dedup();
        for tensor in listed {
            let index = tensor as usize;
            let producer = dense.producer[index];
            let maker = if producer == u32::MAX { None } else { local(producer) };
            let (from, rows) = match (maker, border.before) {
                (Some(_), _) => (0, units),
                (None, Some((before, unit))) if before == producer => (unit, 1),
                (None, _) if producer == u32::MAX && border.inputs => (units, 1),
                // Made long before: it may have been brought long before.
                (None, _) => continue,
            };
            let readers: Vec<u32> = dense.consumers.row(index).iter().filter_map(|&job| local(job)).collect();
            let after = border.after.filter(|(job, _)| dense.consumers.row(index).contains(job));
            let must = after.map_or(0, |(_, unit)| 1usize << unit);
            if readers.is_empty() && must == 0 {
                continue;
            }
            let first = (index * (units + 1) + from) * units;
            let ms = dense.transfer[first..first + rows * units].to_vec();
            if ms.iter().all(|&ms| ms <= 0.0) {
                continue;
            }
            let number = part.tensors.len() as u32;
            for (place, &reader) in readers.iter().enumerate() {
                part.reads[reader as usize].push((number, place as u32));
            }
            if let Some(maker) = maker {
                part.makes[maker as usize].push(number);
            }
            let slot = part.slots;
            part.slots += readers.len();
            part.tensors.push(PartTensor { index: tensor, maker, readers, slot, ms, must });
        }
        part
    }

    /// The same with some pairs of jobs and units (row-major) left out.
    pub(super) fn without(&self, left: &[bool]) -> Self {
        let ms = self.ms.iter().zip(left).map(|(&ms, &left)| if left { ms } else { f64::INFINITY });
        Self { ms: ms.collect(), ..self.clone() }
    }

    pub(super) fn jobs(&self) -> usize {
        self.reads.len()
    }

    /// Payments by the problem's (tensor, reader), 0 where a reader cannot be.
    pub fn payments(&self, paid: &[f64]) -> Vec<(u32, u32, Vec<f64>)> {
        let mut all = Vec::with_capacity(self.slots);
        for tensor in &self.tensors {
            for (place, &reader) in tensor.readers.iter().enumerate() {
                let row = &paid[(tensor.slot + place) * self.units..][..self.units];
                let row = row.iter().map(|&paid| if paid.is_finite() { paid } else { 0.0 }).collect();
                all.push((tensor.index, self.jobs[reader as usize], row));
            }
        }
        all
    }
}
