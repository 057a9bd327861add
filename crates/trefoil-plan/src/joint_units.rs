//! `joint-units`: the joint search with what BIDENT's leaves out: units in the state, slowdown between units, exclusive
//! resources.

use crate::PairStep;
use crate::checkpoint::Rows;
use crate::joint::KEPT_VALUES;
use trefoil_core::OperatorClass;

/// One request's operators for [`joint_units_dp`], row-major operators × units.
#[derive(Debug, Clone, Copy)]
pub struct PairOperators<'a> {
    /// Milliseconds alone; infinite where the operator does not run.
    pub ms: &'a [f64],
    /// Making its inputs available to the unit, in the objective's unit; finite, 0 for a unit that needs none.
    pub enter: &'a [f64],
    /// Making its outputs available to others, likewise.
    pub leave: &'a [f64],
    /// Class of each operator; decides the slowdown factor.
    pub classes: &'a [OperatorClass],
}

/// What units do to each other, k × k row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct PairRules {
    /// Whether two units may work at once: they share no resource. Never true for a unit and itself.
    pub disjoint: Vec<bool>,
    /// `[class of the slowed work][class of the other][slowed unit · k + other unit]`: how much longer the slowed work takes.
    pub slowdown: [[Vec<f64>; 2]; 2],
    /// The objective's cost of a millisecond in which one unit works alone: 1 for latency, joules for energy.
    pub solo: Vec<f64>,
    /// The objective's cost of a millisecond in which two units work: 1 for latency, `P_a + P_b − P_idle` for energy.
    pub overlap: Vec<f64>,
}

/// Index of a class in [`PairRules::slowdown`].
pub fn class_index(class: OperatorClass) -> usize {
    match class {
        OperatorClass::Compute => 0,
        OperatorClass::Memory => 1,
    }
}

/// Most units that [`joint_units_dp`] takes.
pub const MOST_PAIR_UNITS: usize = 8;

/// Stands for "does not run": sums of it stay finite and far above any cost, so that no NaN can arise.
const NEVER: f64 = 1e100;

/// The joint search with units in the state, exact under this model: state (i, j, unit of the first request's last operator,
/// unit of the second's); a step advances the first request, the second, or both on disjoint units.
///
/// * Moving a request costs `leave` of the old unit plus `enter` of the new one, before the step and beside nothing else;
///   the first operator pays `enter`, the last `leave`.
/// * While both work, each takes its slowdown factor times as long; when one ends, the rest of the other runs at full speed
///   and the step ends with it. The cost is the objective's price of the time with two units busy plus that of the rest.
/// * Two operators never share a unit or a resource at once; they can only follow each other.
///
/// Every plan it finds can be run at the claimed cost by holding both requests at the end of each step. Returns the cost and
/// the steps; infinite and none where an operator runs nowhere. O(n·m·k²) time (k³ for `k` above 4); 8·k²·n·m bytes up to 32 MiB,
/// beyond that 16·k²·√n·m at up to twice the time.
///
/// # Panics
/// If `k` is 0 or above [`MOST_PAIR_UNITS`], or arrays do not agree.
pub fn joint_units_dp(
    first: PairOperators<'_>,
    second: PairOperators<'_>,
    rules: &PairRules,
    k: usize,
) -> (f64, Vec<PairStep>) {
    assert!((1..=MOST_PAIR_UNITS).contains(&k), "{k} units, at most {MOST_PAIR_UNITS}");
    for operators in [&first, &second] {
        let count = operators.classes.len();
        for array in [operators.ms, operators.enter, operators.leave] {
            assert_eq!(array.len(), count * k, "arrays are not {count} operators × {k} units");
        }
    }
    // Units that do not exist pad the state up to a width that is compiled.
    match k {
        1 | 2 => Search::<2>::new(&first, &second, rules, k).run(KEPT_VALUES),
        3 => Search::<3>::new(&first, &second, rules, k).run(KEPT_VALUES),
        4 => Search::<4>::new(&first, &second, rules, k).run(KEPT_VALUES),
        5 | 6 => Search::<6>::new(&first, &second, rules, k).run(KEPT_VALUES),
        _ => Search::<8>::new(&first, &second, rules, k).run(KEPT_VALUES),
    }
}

/// Costs of all states of one (i, j): first request's unit × second request's unit.
type Cell<const K: usize> = [[f64; K]; K];

/// One request's rows.
struct Request<const K: usize> {
    ms: Vec<[f64; K]>,
    enter: Vec<[f64; K]>,
    leave: Vec<[f64; K]>,
    class: Vec<usize>,
}

impl<const K: usize> Request<K> {
    fn new(operators: &PairOperators<'_>, k: usize) -> Self {
        let rows = |values: &[f64], absent: f64| -> Vec<[f64; K]> {
            let row = |row: &[f64]| std::array::from_fn(|unit| row.get(unit).map_or(absent, |&value| value.min(NEVER)));
            values.chunks_exact(k).map(row).collect()
        };
        Self {
            ms: rows(operators.ms, NEVER),
            enter: rows(operators.enter, 0.0),
            leave: rows(operators.leave, 0.0),
            class: operators.classes.iter().map(|&class| class_index(class)).collect(),
        }
    }
}

/// Prices of two units working at once, for one pair of classes.
#[derive(Clone, Copy)]
struct Together<const K: usize> {
    /// Slowdown of the first request's work on a beside b.
    first: Cell<K>,
    /// Slowdown of the second request's work on b beside a.
    second: Cell<K>,
    /// Price of a slowed millisecond left of the first after the second ended: `solo / slowdown`.
    first_rest: Cell<K>,
    second_rest: Cell<K>,
}

struct Search<const K: usize> {
    first: Request<K>,
    second: Request<K>,
    solo: [f64; K],
    /// Overlap price, [`NEVER`] where the units are not disjoint.
    overlap: Cell<K>,
    together: [[Together<K>; 2]; 2],
}

impl<const K: usize> Search<K> {
    fn new(first: &PairOperators<'_>, second: &PairOperators<'_>, rules: &PairRules, k: usize) -> Self {
        // A unit that only pads runs nothing: its work must stay out of reach whatever it is multiplied by.
        let solo: [f64; K] = std::array::from_fn(|unit| rules.solo.get(unit).copied().unwrap_or(1.0));
        let pair = |a: usize, b: usize| (a < k && b < k && a != b && rules.disjoint[a * k + b]).then_some(a * k + b);
        let cell = |value: &dyn Fn(usize, usize) -> f64| -> Cell<K> {
            std::array::from_fn(|a| std::array::from_fn(|b| value(a, b)))
        };
        let together = |mine: usize, theirs: usize| {
            let first = |a: usize, b: usize| pair(a, b).map_or(1.0, |at| rules.slowdown[mine][theirs][at]);
            let second = |a: usize, b: usize| pair(b, a).map_or(1.0, |at| rules.slowdown[theirs][mine][at]);
            Together {
                first: cell(&first),
                second: cell(&second),
                first_rest: cell(&|a, b| solo[a] / first(a, b)),
                second_rest: cell(&|a, b| solo[b] / second(a, b)),
            }
        };
        Self {
            first: Request::new(first, k),
            second: Request::new(second, k),
            overlap: cell(&|a, b| pair(a, b).map_or(NEVER, |at| rules.overlap[at])),
            together: std::array::from_fn(|mine| std::array::from_fn(|theirs| together(mine, theirs))),
            solo,
        }
    }

    /// Cost of running operators i and j at once on units a and b.
    #[inline]
    fn pair_cost(&self, rules: &Together<K>, i: &[f64; K], j: &[f64; K], a: usize, b: usize) -> f64 {
        let (mine, theirs) = (i[a] * rules.first[a][b], j[b] * rules.second[a][b]);
        let (short, gap) = (least(mine, theirs), theirs - mine);
        let rest = if gap > 0.0 { gap * rules.second_rest[a][b] } else { -gap * rules.first_rest[a][b] };
        // Overlapping for no time at all is free even where overlap is ruled out, and never useful there.
        least(short * self.overlap[a][b] + rest + if self.overlap[a][b] >= NEVER { NEVER } else { 0.0 }, NEVER)
    }

    /// What one (i, j) costs after the first request moved to run operator `i`: its `ms` not yet added.
    #[inline]
    fn move_first(&self, cell: &Cell<K>, i: usize) -> Cell<K> {
        let enter = &self.first.enter[i];
        let leave = if i == 0 { &[0.0; K] } else { &self.first.leave[i - 1] };
        let mut best = [NEVER; K];
        for a in 0..K {
            for b in 0..K {
                best[b] = least(best[b], cell[a][b] + leave[a]);
            }
        }
        let mut moved = [[0.0; K]; K];
        for a in 0..K {
            for b in 0..K {
                let arriving = best[b] + enter[a];
                // The first operator enters from the host wherever it runs.
                moved[a][b] = if i == 0 { arriving } else { least(cell[a][b], arriving) };
            }
        }
        moved
    }

    #[inline]
    fn move_second(&self, cell: &Cell<K>, j: usize) -> Cell<K> {
        let enter = &self.second.enter[j];
        let leave = if j == 0 { &[0.0; K] } else { &self.second.leave[j - 1] };
        let mut moved = [[0.0; K]; K];
        for a in 0..K {
            let mut best = NEVER;
            for b in 0..K {
                best = least(best, cell[a][b] + leave[b]);
            }
            for b in 0..K {
                let arriving = best + enter[b];
                moved[a][b] = if j == 0 { arriving } else { least(cell[a][b], arriving) };
            }
        }
        moved
    }

    /// Row i + 1 from row i, up to column `reach`.
    fn step(&self, i: usize, above: &[Cell<K>], here: &mut [Cell<K>], reach: usize) {
        let ms = &self.first.ms[i];
        let alone: [f64; K] = std::array::from_fn(|a| ms[a] * self.solo[a]);
        let mut moved = self.move_first(&above[0], i);
        here[0] = std::array::from_fn(|a| std::array::from_fn(|b| moved[a][b] + alone[a]));
        for j in 0..reach {
            let theirs = &self.second.ms[j];
            let rules = &self.together[self.first.class[i]][self.second.class[j]];
            let both = self.move_second(&moved, j);
            moved = self.move_first(&above[j + 1], i);
            let left = self.move_second(&here[j], j);
            let cell = &mut here[j + 1];
            for a in 0..K {
                for b in 0..K {
                    let at_once = both[a][b] + self.pair_cost(rules, ms, theirs, a, b);
                    let one = least(moved[a][b] + alone[a], left[a][b] + theirs[b] * self.solo[b]);
                    cell[a][b] = least(at_once, one);
                }
            }
        }
    }

    fn start(&self, row: &mut [Cell<K>]) {
        row[0] = [[0.0; K]; K];
        for j in 0..self.second.ms.len() {
            let left = self.move_second(&row[j], j);
            row[j + 1] =
                std::array::from_fn(|a| std::array::from_fn(|b| left[a][b] + self.second.ms[j][b] * self.solo[b]));
        }
    }

    fn run(&self, limit: usize) -> (f64, Vec<PairStep>) {
        let (n, m) = (self.first.ms.len(), self.second.ms.len());
        // On the way back only columns left of the path are needed.
        let reach = std::cell::Cell::new(m);
        let mut step = |i: usize, above: &[Cell<K>], here: &mut [Cell<K>]| self.step(i, above, here, reach.get());
        let rows = Rows::forward(n, m + 1, limit / (K * K), [[0.0; K]; K], |row| self.start(row), &mut step);
        let end = |request: &Request<K>, unit: usize| request.leave.last().map_or(0.0, |leave| leave[unit]);
        let (mut total, mut units) = (f64::INFINITY, (0, 0));
        for (a, row) in rows.last()[m].iter().enumerate() {
            for (b, cost) in row.iter().enumerate() {
                let cost = cost + end(&self.first, a) + end(&self.second, b);
                if cost < total {
                    (total, units) = (cost, (a, b));
                }
            }
        }
        if total >= NEVER {
            return (f64::INFINITY, Vec::new());
        }
        let mut steps = Vec::with_capacity(n + m);
        let mut j = m;
        rows.walk_back(&mut step, |i, above, here| {
            loop {
                if i == 0 && j == 0 {
                    return;
                }
                let (choice, before) = self.choose(i, j, units, above, here);
                steps.push(choice);
                units = before;
                j -= usize::from(choice.second.is_some());
                reach.set(j);
                if choice.first.is_some() {
                    return;
                }
            }
        });
        steps.reverse();
        (total, steps)
    }

    /// The step that leads to (i, j) on `units` at least cost, and the units before it. Ties advance both, then the first.
    fn choose(
        &self,
        i: usize,
        j: usize,
        (a, b): (usize, usize),
        above: Option<&[Cell<K>]>,
        here: &[Cell<K>],
    ) -> (PairStep, (usize, usize)) {
        let moving = |request: &Request<K>, row: usize, from: usize, to: usize| {
            if row > 0 && from == to {
                0.0
            } else {
                request.enter[row][to] + if row == 0 { 0.0 } else { request.leave[row - 1][from] }
            }
        };
        let stay_first = |unit: usize, units: &mut dyn FnMut(usize)| {
            units(unit);
            (0..K).filter(|&other| other != unit).for_each(units);
        };
        let mut best = (f64::INFINITY, PairStep { first: None, second: None }, (a, b));
        let mut offer = |cost: f64, step: PairStep, before: (usize, usize)| {
            if cost < best.0 {
                best = (cost, step, before);
            }
        };
        if let (Some(above), Some(before)) = (above, j.checked_sub(1)) {
            let rules = &self.together[self.first.class[i - 1]][self.second.class[before]];
            let work = self.pair_cost(rules, &self.first.ms[i - 1], &self.second.ms[before], a, b);
            stay_first(a, &mut |x| {
                stay_first(b, &mut |y| {
                    let moves = moving(&self.first, i - 1, x, a) + moving(&self.second, before, y, b);
                    let step = PairStep { first: Some(a), second: Some(b) };
                    offer(above[before][x][y] + moves + work, step, (x, y));
                });
            });
        }
        if let Some(above) = above {
            let work = self.first.ms[i - 1][a] * self.solo[a];
            stay_first(a, &mut |x| {
                let step = PairStep { first: Some(a), second: None };
                offer(above[j][x][b] + moving(&self.first, i - 1, x, a) + work, step, (x, b));
            });
        }
        if let Some(before) = j.checked_sub(1) {
            let work = self.second.ms[before][b] * self.solo[b];
            stay_first(b, &mut |y| {
                let step = PairStep { first: None, second: Some(b) };
                offer(here[before][a][y] + moving(&self.second, before, y, b) + work, step, (a, y));
            });
        }
        (best.1, best.2)
    }
}

fn least(a: f64, b: f64) -> f64 {
    if b < a { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;

    #[test]
    fn checkpoints_change_nothing() {
        let mut numbers = Numbers(5);
        let mut table = |count: usize| -> Vec<f64> { numbers.by_ref().take(count * 3).collect() };
        let (w0, e0, l0, w1, e1, l1) = (table(40), table(40), table(40), table(23), table(23), table(23));
        let class = [OperatorClass::Memory; 40];
        let first = PairOperators { ms: &w0, enter: &e0, leave: &l0, classes: &class };
        let second = PairOperators { ms: &w1, enter: &e1, leave: &l1, classes: &class[..23] };
        let factors = vec![1.0, 1.2, 1.1, 0.9, 1.0, 1.05, 1.17, 1.09, 1.0];
        let rules = PairRules {
            disjoint: vec![false, true, true, true, false, true, true, true, false],
            slowdown: std::array::from_fn(|_| std::array::from_fn(|_| factors.clone())),
            solo: vec![1.0; 3],
            overlap: vec![1.0; 9],
        };
        let search = Search::<3>::new(&first, &second, &rules, 3);
        let (whole, kept) = (search.run(usize::MAX), search.run(0));
        assert_eq!(whole, kept);
        assert_eq!(whole, joint_units_dp(first, second, &rules, 3));
        assert!(whole.1.iter().any(|step| step.first.is_some() && step.second.is_some()));
    }
}
