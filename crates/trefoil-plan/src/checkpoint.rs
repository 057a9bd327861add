//! Rows of a dynamic programme that is too large to keep: checkpoints every √n rows, recomputed block by block on the way back.

/// Rows `0..=count` of `width` values each. Row `i + 1` is computed from row `i` alone, so any row can be had again from a
/// checkpoint before it.
///
/// Within the limit every row is kept and nothing is computed twice. Above it, every `⌈√(count + 1)⌉`-th row is kept and
/// walking back computes each row once more: memory is O(√count · width), time at most doubles.
pub(crate) struct Rows<T> {
    count: usize,
    width: usize,
    /// Distance of checkpoints; 0 when all rows are in `block`.
    every: usize,
    checkpoints: Vec<T>,
    block: Vec<T>,
}

impl<T: Copy> Rows<T> {
    /// Runs forward. `start` fills row 0; `step(i, above, here)` computes row `i + 1` (`here`) from row `i` (`above`), and
    /// must write all of `here`. At most about `limit` values are kept where that suffices for two rows and the checkpoints.
    pub fn forward(
        count: usize,
        width: usize,
        limit: usize,
        blank: T,
        start: impl FnOnce(&mut [T]),
        step: &mut impl FnMut(usize, &[T], &mut [T]),
    ) -> Self {
        let whole = (count + 1).saturating_mul(width) <= limit;
        if whole {
            let mut block = vec![blank; (count + 1) * width];
            start(&mut block[..width]);
            for row in 0..count {
                let (above, here) = block[row * width..].split_at_mut(width);
                step(row, above, &mut here[..width]);
            }
            return Self { count, width, every: 0, checkpoints: Vec::new(), block };
        }
        let every = ((count + 1) as f64).sqrt().ceil() as usize;
        let mut checkpoints = Vec::with_capacity((count / every + 1) * width);
        let mut block = vec![blank; (every + 1) * width];
        let (mut above, mut here) = (vec![blank; width], vec![blank; width]);
        start(&mut above);
        checkpoints.extend_from_slice(&above);
        for row in 0..count {
            step(row, &above, &mut here);
            std::mem::swap(&mut above, &mut here);
            if (row + 1).is_multiple_of(every) {
                checkpoints.extend_from_slice(&above);
            }
        }
        block[..width].copy_from_slice(&above);
        Self { count, width, every, checkpoints, block }
    }

    /// The last row.
    pub fn last(&self) -> &[T] {
        if self.every == 0 { &self.block[self.count * self.width..] } else { &self.block[..self.width] }
    }

    /// Values held at once, checkpoints and block.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.checkpoints.len() + self.block.len()
    }

    /// Visits rows from the last to row 0: `visit(i, above, here)` with row `i − 1` (`None` for row 0) and row `i`.
    pub fn walk_back(
        mut self,
        step: &mut impl FnMut(usize, &[T], &mut [T]),
        mut visit: impl FnMut(usize, Option<&[T]>, &[T]),
    ) {
        let width = self.width;
        let mut visit_block = |block: &[T], base: usize, end: usize| {
            for row in (base + 1..=end).rev() {
                let at = (row - base) * width;
                visit(row, Some(&block[at - width..at]), &block[at..at + width]);
            }
            if base == 0 {
                visit(0, None, &block[..width]);
            }
        };
        if self.every == 0 {
            visit_block(&self.block, 0, self.count);
            return;
        }
        let mut end = self.count;
        for index in (0..=self.count / self.every).rev() {
            let base = index * self.every;
            self.block[..width].copy_from_slice(&self.checkpoints[index * width..(index + 1) * width]);
            for row in base..end {
                let (above, here) = self.block[(row - base) * width..].split_at_mut(width);
                step(row, above, &mut here[..width]);
            }
            visit_block(&self.block, base, end);
            end = base;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the limit, walking back shows the same rows, each once, with the row above.
    #[test]
    fn kept_and_recomputed_rows_are_the_same() {
        for count in [0usize, 1, 2, 3, 8, 9, 10, 99, 100] {
            for limit in [0, usize::MAX] {
                let mut step = |row: usize, above: &[u64], here: &mut [u64]| {
                    here[0] = above[0] * 3 + row as u64 + above[1] % 7;
                    here[1] = above[0] ^ above[1];
                };
                let rows = Rows::forward(count, 2, limit, 0, |row| row.copy_from_slice(&[1, 2]), &mut step);
                let mut want = vec![[1u64, 2]];
                for row in 0..count {
                    let mut next = [0; 2];
                    step(row, &want[row], &mut next);
                    want.push(next);
                }
                assert_eq!(rows.last(), want[count]);
                if limit == 0 {
                    let root = ((count + 1) as f64).sqrt();
                    assert!(rows.held() as f64 <= 2.0 * (2.0 * root + 4.0), "{count}: {}", rows.held());
                }
                let mut seen = Vec::new();
                rows.walk_back(&mut step, |row, above, here| {
                    assert_eq!(here, want[row]);
                    assert_eq!(above, row.checked_sub(1).map(|row| &want[row][..]));
                    seen.push(row);
                });
                assert_eq!(seen, (0..=count).rev().collect::<Vec<_>>());
            }
        }
    }
}
