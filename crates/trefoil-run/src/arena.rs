//! Which bytes of the arena each value gets: reuse by liveness over the schedule's partial order.
//!
//! Two values may share bytes only if every task that touches one is certainly finished before the task that makes the
//! other starts ([`Schedule::precedes`]); so a task's inputs never alias its outputs, nor its outputs each other.
//! Values are placed by falling size, each into the smallest gap that holds it between the already placed values it
//! conflicts with (best fit). That compares every pair of values, so beyond [`PAIRWISE_LIMIT`] values a linear rule
//! takes over: values that stay within one lane reuse bytes along that lane's sequence, all others keep their own.

use crate::schedule::Schedule;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::tensor::TENSOR_ALIGNMENT;

/// Number of values up to which every pair is compared.
pub const PAIRWISE_LIMIT: usize = 4096;

/// Where each value lies in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Byte offset per value of [`Schedule::values`]; `None` for model outputs, which have buffers of their own.
    pub offsets: Vec<Option<usize>>,
    /// Bytes of the arena.
    pub bytes: usize,
    /// Bytes that the same values take without reuse.
    pub bytes_without_reuse: usize,
}

impl Placement {
    /// Places the values of a schedule. Without `reuse` every value has bytes of its own (they survive the run, which
    /// is what verification reads).
    pub fn new(schedule: &Schedule, reuse: bool) -> Self {
        let count = schedule.values.iter().filter(|value| !value.is_output).count();
        if !reuse {
            Self::without_reuse(schedule)
        } else if count <= PAIRWISE_LIMIT {
            Self::pairwise(schedule)
        } else {
            Self::by_lane(schedule)
        }
    }

    fn empty(schedule: &Schedule) -> Self {
        let bytes_without_reuse = schedule
            .values
            .iter()
            .enumerate()
            .filter(|(_, value)| !value.is_output)
            .map(|(v, _)| size_of(schedule, v))
            .sum();
        Self { offsets: vec![None; schedule.values.len()], bytes: 0, bytes_without_reuse }
    }

    fn without_reuse(schedule: &Schedule) -> Self {
        let mut placement = Self::empty(schedule);
        for (index, value) in schedule.values.iter().enumerate() {
            if !value.is_output {
                placement.offsets[index] = Some(placement.bytes);
                placement.bytes += size_of(schedule, index);
            }
        }
        placement
    }

    /// Best fit by falling size over the exact conflict relation. O(values²).
    pub fn pairwise(schedule: &Schedule) -> Self {
        let mut placement = Self::empty(schedule);
        let mut by_size: Vec<usize> =
            (0..schedule.values.len()).filter(|&index| !schedule.values[index].is_output).collect();
        by_size.sort_by_key(|&index| (std::cmp::Reverse(size_of(schedule, index)), index));
        let mut placed: Vec<usize> = Vec::with_capacity(by_size.len());
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for value in by_size {
            let size = size_of(schedule, value);
            taken.clear();
            taken.extend(placed.iter().filter(|&&other| conflict(schedule, value, other)).map(|&other| {
                let offset = placement.offsets[other].expect("placed values have an offset");
                (offset, offset + size_of(schedule, other))
            }));
            taken.sort_unstable();
            let offset = best_gap(&taken, size);
            placement.offsets[value] = Some(offset);
            placement.bytes = placement.bytes.max(offset + size);
            placed.push(value);
        }
        placement
    }

    /// The linear rule for large schedules: per lane, a free list along the lane's sequence.
    pub fn by_lane(schedule: &Schedule) -> Self {
        let mut placement = Self::empty(schedule);
        let stays = |index: usize| {
            let value = &schedule.values[index];
            let lane = schedule.tasks[value.producer].lane;
            !value.is_output && value.consumers.iter().all(|&consumer| schedule.tasks[consumer].lane == lane)
        };
        for (index, value) in schedule.values.iter().enumerate() {
            if !value.is_output && !stays(index) {
                placement.offsets[index] = Some(placement.bytes);
                placement.bytes += size_of(schedule, index);
            }
        }
        for lane in &schedule.lanes {
            // Regions of this lane that are free, by size; and what each task frees when it is done.
            let mut free: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
            let mut frees: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
            for &task in &lane.tasks {
                for &value in &schedule.tasks[task].outputs {
                    if !stays(value) {
                        continue;
                    }
                    let size = size_of(schedule, value);
                    // The smallest free region that is large enough, unless it would waste more than it holds.
                    let fit = free
                        .range(size..=size.saturating_mul(2))
                        .find_map(|(&held, regions)| regions.first().map(|&offset| (held, offset)));
                    let (held, offset) = fit.unwrap_or((size, placement.bytes));
                    if fit.is_some() {
                        let regions = free.get_mut(&held).expect("found above");
                        regions.remove(&offset);
                        if regions.is_empty() {
                            free.remove(&held);
                        }
                    } else {
                        placement.bytes += size;
                    }
                    placement.offsets[value] = Some(offset);
                    let last = schedule.values[value]
                        .consumers
                        .iter()
                        .copied()
                        .max_by_key(|&consumer| schedule.tasks[consumer].position);
                    frees.entry(last.unwrap_or(task)).or_default().push((held, offset));
                }
                // Freed only after this task's outputs are placed, so inputs never alias outputs.
                for (held, offset) in frees.remove(&task).unwrap_or_default() {
                    free.entry(held).or_default().insert(offset);
                }
            }
        }
        placement
    }
}

/// Bytes of a value, rounded up to the alignment so that every offset is aligned.
fn size_of(schedule: &Schedule, value: usize) -> usize {
    (schedule.values[value].info.bytes() as usize).next_multiple_of(TENSOR_ALIGNMENT)
}

/// Whether two values may be alive at once: neither is certainly dead before the other is made.
fn conflict(schedule: &Schedule, one: usize, other: usize) -> bool {
    let dead_before = |dying: usize, born: usize| {
        let (dying, born) = (&schedule.values[dying], schedule.values[born].producer);
        schedule.precedes(dying.producer, born)
            && dying.consumers.iter().all(|&consumer| schedule.precedes(consumer, born))
    };
    !dead_before(one, other) && !dead_before(other, one)
}

/// Start of the smallest gap of at least `size` between `taken` (sorted, may overlap); the end if there is none.
fn best_gap(taken: &[(usize, usize)], size: usize) -> usize {
    let mut best: Option<(usize, usize)> = None;
    let mut end = 0;
    for &(start, stop) in taken {
        if start >= end {
            let gap = start - end;
            if gap >= size && best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, end));
            }
        }
        end = end.max(stop);
    }
    best.map_or(end, |(_, offset)| offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_sufficient_gap_wins() {
        assert_eq!(best_gap(&[], 128), 0);
        assert_eq!(best_gap(&[(0, 256)], 128), 256);
        assert_eq!(best_gap(&[(512, 640), (768, 1024)], 128), 640);
        assert_eq!(best_gap(&[(0, 640), (128, 256), (768, 1024)], 256), 1024);
    }
}
