//! Cuts of a problem: jobs that split time.

use crate::engine::Rows;
use crate::problem::Problem;

/// Cuts (jobs that are before or after every other one) and what lies between them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blocks {
    /// Per job: its number among the cuts.
    pub number: Vec<Option<usize>>,
    /// Jobs before the first cut, between cuts, after the last; one more than there are cuts.
    pub inside: Vec<Vec<u32>>,
}

impl Blocks {
    pub fn new(problem: &Problem) -> Self {
        let dense = &problem.dense;
        let count = problem.jobs().len();
        let forward = alone(count, &dense.before, &dense.after);
        let backward = alone(count, &dense.after, &dense.before);
        let mut number = vec![None; count];
        let mut inside = vec![Vec::new()];
        for &job in &dense.order {
            // Both passes have all other jobs behind them once, or twice those that are neither before nor after.
            let cut = forward[job as usize]
                .zip(backward[job as usize])
                .is_some_and(|(before, after)| before + after + 1 == count);
            if cut {
                number[job as usize] = Some(inside.len() - 1);
                inside.push(Vec::new());
            } else if let Some(block) = inside.last_mut() {
                block.push(job);
            }
        }
        Self { number, inside }
    }
}

/// How many jobs went before a job (Kahn), if it was the only ready one when its turn came: all that was left came after it.
fn alone(count: usize, before: &Rows, after: &Rows) -> Vec<Option<usize>> {
    let mut waiting: Vec<usize> = (0..count).map(|job| before.row(job).len()).collect();
    let mut ready: Vec<u32> = (0..count as u32).filter(|&job| waiting[job as usize] == 0).collect();
    let mut result = vec![None; count];
    let mut gone = 0;
    while let Some(job) = ready.pop() {
        result[job as usize] = ready.is_empty().then_some(gone);
        gone += 1;
        for &next in after.row(job as usize) {
            waiting[next as usize] -= 1;
            if waiting[next as usize] == 0 {
                ready.push(next);
            }
        }
    }
    result
}
