//! Who reads what.

use super::{Random, Shape};
use std::collections::BTreeSet;

/// Edges `(from, to)`, `from < to`, of a connected graph of `count` operators.
pub(super) fn connect(shape: Shape, count: usize, random: &mut Random) -> Vec<(u32, u32)> {
    let mut builder = Connector { count: count as u32, next: 0, edges: Vec::new() };
    match shape {
        Shape::Chain => builder.edges.extend((1..count as u32).map(|to| (to - 1, to))),
        Shape::SeriesParallel => {
            let mut at = None;
            while builder.next < builder.count {
                let budget = builder.count - builder.next;
                at = Some(builder.series_parallel(at, budget, random));
            }
        }
        Shape::Layered => builder.layered(random),
        Shape::ForkJoin => builder.fork_join(random),
        Shape::Network => builder.network(),
    }
    builder.edges
}

struct Connector {
    count: u32,
    next: u32,
    edges: Vec<(u32, u32)>,
}

impl Connector {
    /// Adds an operator that reads `from`.
    fn push(&mut self, from: impl IntoIterator<Item = u32>) -> u32 {
        let at = self.next;
        self.next += 1;
        self.edges.extend(from.into_iter().map(|from| (from, at)));
        at
    }

    /// A block of exactly `budget` operators after `from`; returns its last operator.
    fn series_parallel(&mut self, from: Option<u32>, budget: u32, random: &mut Random) -> u32 {
        match budget {
            0 | 1 => self.push(from),
            // A parallel composition needs a fork, two branches and a join.
            4.. if random.unit() < 0.55 => {
                let fork = self.push(from);
                let mut left = budget - 2;
                let branches = 2 + random.below(3).min(left as usize - 2) as u32;
                let mut exits = Vec::new();
                for branch in 0..branches {
                    let others = branches - branch - 1;
                    let most = left - others;
                    let take = if others == 0 { left } else { 1 + random.below(most as usize) as u32 };
                    exits.push(self.series_parallel(Some(fork), take, random));
                    left -= take;
                }
                self.push(exits)
            }
            _ => {
                let first = 1 + random.below(budget as usize - 1) as u32;
                let middle = self.series_parallel(from, first, random);
                self.series_parallel(Some(middle), budget - first, random)
            }
        }
    }

    fn layered(&mut self, random: &mut Random) {
        let mut before: Vec<u32> = Vec::new();
        while self.next < self.count {
            let width = (1 + random.below(8)).min((self.count - self.next) as usize);
            let layer: Vec<u32> = (0..width)
                .map(|_| {
                    let reads = (1 + random.below(3)).min(before.len());
                    let from: BTreeSet<u32> = (0..reads).map(|_| before[random.below(before.len())]).collect();
                    self.push(from)
                })
                .collect();
            before = layer;
        }
    }

    fn fork_join(&mut self, random: &mut Random) {
        let mut at: Option<u32> = None;
        while self.next < self.count {
            let fork = self.push(at);
            at = Some(fork);
            let mut exits = Vec::new();
            for _ in 0..4 + random.below(13) {
                let mut tail = fork;
                for _ in 0..=random.below(3) {
                    if self.next + 1 < self.count {
                        tail = self.push([tail]);
                    }
                }
                if tail != fork {
                    exits.push(tail);
                }
            }
            if self.next < self.count && !exits.is_empty() {
                at = Some(self.push(exits));
            }
        }
    }

    fn network(&mut self) {
        let mut at: Option<u32> = None;
        while self.next < self.count {
            let entry = at;
            // norm → (q, k, v) → scores → softmax → mix → + → norm → up, gate → mul → down → +
            let pattern: [&[u32]; 13] =
                [&[], &[0], &[0], &[0], &[1, 2], &[4], &[5, 3], &[6], &[7], &[8], &[8], &[9, 10], &[11, 7]];
            let mut made: Vec<u32> = Vec::new();
            for (step, reads) in pattern.iter().enumerate() {
                if self.next == self.count {
                    break;
                }
                let mut from: BTreeSet<u32> = reads.iter().map(|&read| made[read as usize]).collect();
                // The first operator reads the block's input, and the first addition adds it back.
                if matches!(step, 0 | 7) {
                    from.extend(entry);
                }
                made.push(self.push(from));
            }
            at = made.last().copied();
        }
    }
}
