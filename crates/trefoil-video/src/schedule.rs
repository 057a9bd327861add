//! The flattened trajectory (HeteroVDiff 4.3): all block executions of a clip in one row, to be cut anywhere.
//!
//! Step n has one run of L blocks per branch; guidance adds a second branch. Execution `e` is block `e mod L` of branch
//! `⌊e/L⌋ mod branches` of step `⌊e/(L·branches)⌋`; B = N·L·branches.

use std::ops::Range;

/// Sizes of a trajectory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trajectory {
    /// Denoising steps N.
    pub steps: usize,
    /// Branches of a step: 2 with guidance, else 1.
    pub branches: usize,
    /// Blocks L.
    pub layers: usize,
}

/// Where a block execution stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Step.
    pub step: usize,
    /// Branch: 0 with the prompt, 1 without.
    pub branch: usize,
    /// Block.
    pub block: usize,
}

/// Consecutive blocks of one branch of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Step.
    pub step: usize,
    /// Branch.
    pub branch: usize,
    /// Blocks.
    pub blocks: Range<usize>,
}

impl Trajectory {
    /// Block executions B.
    pub fn blocks(&self) -> usize {
        self.steps * self.branches * self.layers
    }

    /// The place of execution `index`, which is below B.
    pub fn place(&self, index: usize) -> Place {
        let run = index / self.layers;
        Place { step: run / self.branches, branch: run % self.branches, block: index % self.layers }
    }

    /// The executions of `range` as runs within a branch.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Piece> + use<> {
        let trajectory = *self;
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let Place { step, branch, block } = trajectory.place(at);
            let count = (trajectory.layers - block).min(range.end - at);
            at += count;
            Some(Piece { step, branch, blocks: block..block + count })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_paper_s_trajectory_has_180_executions() {
        let trajectory = Trajectory { steps: 6, branches: 1, layers: 30 };
        assert_eq!(trajectory.blocks(), 180);
        assert_eq!(trajectory.place(51), Place { step: 1, branch: 0, block: 21 });
        let pieces: Vec<Piece> = trajectory.pieces(51..95).collect();
        let blocks: Vec<_> = pieces.iter().map(|piece| (piece.step, piece.blocks.clone())).collect();
        assert_eq!(blocks, [(1, 21..30), (2, 0..30), (3, 0..5)]);
    }

    proptest! {
        #[test]
        fn pieces_cover_a_range_once_and_in_order(
            steps in 1usize..5, branches in 1usize..3, layers in 1usize..6, a in 0usize..60, b in 0usize..60,
        ) {
            let trajectory = Trajectory { steps, branches, layers };
            let (start, end) = (a.min(b).min(trajectory.blocks()), a.max(b).min(trajectory.blocks()));
            let mut at = start;
            for piece in trajectory.pieces(start..end) {
                prop_assert!(!piece.blocks.is_empty());
                for block in piece.blocks.clone() {
                    prop_assert_eq!(trajectory.place(at), Place { step: piece.step, branch: piece.branch, block });
                    at += 1;
                }
            }
            prop_assert_eq!(at, end);
        }
    }
}
