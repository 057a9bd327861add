//! `joint`: BIDENT's joint (i, j) search for two different models running at once, literally (3.2.2, 3.3.3).

use crate::checkpoint::Rows;

/// One step of a pair plan: the units on which the requests run their next operator; `None` for one that does not advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairStep {
    /// Unit of the first request's next operator.
    pub first: Option<usize>,
    /// Unit of the second request's next operator.
    pub second: Option<usize>,
}

/// One request's costs for the literal pair searches, row-major operators × units, in the objective's unit.
#[derive(Debug, Clone, Copy)]
pub struct PairCosts<'a> {
    /// Alone; infinite where the operator does not run.
    pub solo: &'a [f64],
    /// As measured while the other request runs on the same unit; infinite where it does not run.
    pub concurrent: &'a [f64],
}

/// Values of one row that the kernels keep before they turn to checkpoints: 4 Mi values, 32 MiB.
pub(crate) const KEPT_VALUES: usize = 1 << 22;

/// BIDENT's joint (i, j) search (3.2.2) over dense arrays, exact under its model, which is: state (i, j) counts completed
/// operators; a step advances both requests, the first, or the second.
///
/// * One operator alone costs the least of its solo costs.
/// * Both on one unit cost the average of their concurrent costs ("co-scheduled operators on the same PU use empirically
///   measured concurrent execution costs"; the averaging is what the text says of its aligned mode).
/// * Both on different units cost the larger of their solo costs ("their respective profiled costs").
///
/// The state holds no unit, so moving a request from one unit to another is free; different units never slow each other
/// down. Both are the paper's. [`joint_units_dp`](crate::joint_units_dp) is the search without these two gaps.
///
/// Returns the cost and the steps in order; infinite and none where an operator runs nowhere. Ties advance both, then the
/// first, and take lower units. O(n·m·k) time; 8·(n+1)·(m+1) bytes up to 32 MiB, beyond that 16·√n·m bytes at up to twice
/// the time.
///
/// # Panics
/// If `k` is 0 or the arrays are not operators × `k` each.
pub fn joint_dp(first: PairCosts<'_>, second: PairCosts<'_>, k: usize) -> (f64, Vec<PairStep>) {
    joint_within(first, second, k, KEPT_VALUES)
}

pub(crate) fn check_shape(costs: &PairCosts<'_>, k: usize) {
    assert!(k > 0 && costs.solo.len().is_multiple_of(k), "costs are not operators × {k} units");
    assert_eq!(costs.solo.len(), costs.concurrent.len(), "solo and concurrent costs differ in number");
}

// A compare-and-select without the NaN cases of `f64::min`, so that loops over it vectorise.
pub(crate) fn least(a: f64, b: f64) -> f64 {
    if b < a { b } else { a }
}

fn most(a: f64, b: f64) -> f64 {
    if b > a { b } else { a }
}

/// Lowest of a row with its unit.
fn cheapest(row: &[f64]) -> (f64, usize) {
    let mut best = (f64::INFINITY, 0);
    for (unit, &cost) in row.iter().enumerate() {
        if cost < best.0 {
            best = (cost, unit);
        }
    }
    best
}

/// The other request's costs by unit, one column per unit, so that a row of pair costs is a few passes over columns.
struct Columns {
    /// Half the concurrent cost on each unit.
    half_concurrent: Vec<Vec<f64>>,
    /// The least solo cost on any *other* unit.
    elsewhere: Vec<Vec<f64>>,
    /// The least solo cost anywhere.
    alone: Vec<f64>,
}

impl Columns {
    fn new(costs: &PairCosts<'_>, k: usize) -> Self {
        let rows = || costs.solo.chunks_exact(k);
        let elsewhere = |unit: usize| {
            rows()
                .map(|row| {
                    let others = row.iter().enumerate().filter(|(other, _)| *other != unit);
                    others.fold(f64::INFINITY, |best, (_, &cost)| least(best, cost))
                })
                .collect()
        };
        Self {
            half_concurrent: (0..k)
                .map(|unit| costs.concurrent.iter().skip(unit).step_by(k).map(|cost| 0.5 * cost).collect())
                .collect(),
            elsewhere: (0..k).map(elsewhere).collect(),
            alone: rows().map(|row| cheapest(row).0).collect(),
        }
    }

    /// Costs of running one operator of the first request beside each operator of the second.
    fn both(&self, solo: &[f64], concurrent: &[f64], out: &mut [f64]) {
        out.fill(f64::INFINITY);
        for (unit, (&mine, &together)) in solo.iter().zip(concurrent).enumerate() {
            if mine == f64::INFINITY {
                continue;
            }
            let half = 0.5 * together;
            let columns = self.half_concurrent[unit].iter().zip(&self.elsewhere[unit]);
            for (out, (&same, &other)) in out.iter_mut().zip(columns) {
                *out = least(*out, least(most(mine, other), half + same));
            }
        }
    }
}

fn joint_within(first: PairCosts<'_>, second: PairCosts<'_>, k: usize, limit: usize) -> (f64, Vec<PairStep>) {
    check_shape(&first, k);
    check_shape(&second, k);
    let (n, m) = (first.solo.len() / k, second.solo.len() / k);
    let row = |values: &'_ [f64], at: usize| -> std::ops::Range<usize> {
        debug_assert!((at + 1) * k <= values.len());
        at * k..(at + 1) * k
    };
    let columns = Columns::new(&second, k);
    let mut both = vec![0.0; m];
    // On the way back only columns left of the path are needed.
    let reach = std::cell::Cell::new(m);
    let mut step = |i: usize, above: &[f64], here: &mut [f64]| {
        let (above, here) = (&above[..=reach.get()], &mut here[..=reach.get()]);
        let solo = &first.solo[row(first.solo, i)];
        let alone = cheapest(solo).0;
        columns.both(solo, &first.concurrent[row(first.concurrent, i)], &mut both[..reach.get()]);
        here[0] = above[0] + alone;
        for (here, (pair, &both)) in here[1..].iter_mut().zip(above.windows(2).zip(&both)) {
            *here = least(pair[0] + both, pair[1] + alone);
        }
        let mut left = here[0];
        for (here, &alone) in here[1..].iter_mut().zip(&columns.alone) {
            left = least(*here, left + alone);
            *here = left;
        }
    };
    let start = |row: &mut [f64]| {
        row[0] = 0.0;
        for (j, &alone) in columns.alone.iter().enumerate() {
            row[j + 1] = row[j] + alone;
        }
    };
    let rows = Rows::forward(n, m + 1, limit, 0.0, start, &mut step);
    let total = rows.last()[m];
    if total == f64::INFINITY {
        return (total, Vec::new());
    }
    let mut steps = Vec::with_capacity(n + m);
    let mut j = m;
    rows.walk_back(&mut step, |i, above, here| {
        loop {
            let left = j.checked_sub(1).map_or(f64::INFINITY, |before| here[before] + columns.alone[before]);
            let Some(above) = above else {
                if j == 0 {
                    return;
                }
                j -= 1;
                reach.set(j);
                steps.push(PairStep { first: None, second: Some(cheapest(&second.solo[row(second.solo, j)]).1) });
                continue;
            };
            let mine = row(first.solo, i - 1);
            let (alone, unit) = cheapest(&first.solo[mine.clone()]);
            let up = above[j] + alone;
            let (diagonal, units) = match j.checked_sub(1) {
                None => (f64::INFINITY, (0, 0)),
                Some(before) => {
                    let theirs = row(second.solo, before);
                    let (both, units) = best_pair(&first, mine, &second, theirs);
                    (above[before] + both, units)
                }
            };
            if diagonal <= up && diagonal <= left {
                j -= 1;
                reach.set(j);
                steps.push(PairStep { first: Some(units.0), second: Some(units.1) });
                return;
            }
            if up <= left {
                steps.push(PairStep { first: Some(unit), second: None });
                return;
            }
            j -= 1;
            reach.set(j);
            steps.push(PairStep { first: None, second: Some(cheapest(&second.solo[row(second.solo, j)]).1) });
        }
    });
    steps.reverse();
    (total, steps)
}

/// The cheapest pair of units for two operators, by the same rule as [`Columns::both`].
fn best_pair(
    first: &PairCosts<'_>,
    mine: std::ops::Range<usize>,
    second: &PairCosts<'_>,
    theirs: std::ops::Range<usize>,
) -> (f64, (usize, usize)) {
    let mut best = (f64::INFINITY, (0, 0));
    for (a, (&solo, &concurrent)) in first.solo[mine.clone()].iter().zip(&first.concurrent[mine]).enumerate() {
        for (b, (&other, &together)) in
            second.solo[theirs.clone()].iter().zip(&second.concurrent[theirs.clone()]).enumerate()
        {
            let cost = if a == b { 0.5 * concurrent + 0.5 * together } else { most(solo, other) };
            if solo < f64::INFINITY && cost < best.0 {
                best = (cost, (a, b));
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;

    /// A plan from checkpoints is the plan from the whole table.
    #[test]
    fn checkpoints_change_nothing() {
        let mut numbers = Numbers(11);
        let mut table = |count: usize| -> Vec<f64> { numbers.by_ref().take(count * 3).collect() };
        let (w0, c0, w1, c1) = (table(57), table(57), table(31), table(31));
        let first = PairCosts { solo: &w0, concurrent: &c0 };
        let second = PairCosts { solo: &w1, concurrent: &c1 };
        assert_eq!(joint_within(first, second, 3, 0), joint_within(first, second, 3, usize::MAX));
    }

    #[test]
    fn empty_requests_cost_nothing() {
        let empty = PairCosts { solo: &[], concurrent: &[] };
        assert_eq!(joint_dp(empty, empty, 2), (0.0, Vec::new()));
        let one = PairCosts { solo: &[2.0, 1.0], concurrent: &[2.0, 1.0] };
        let step = PairStep { first: None, second: Some(1) };
        assert_eq!(joint_dp(empty, one, 2), (1.0, vec![step]));
        let nowhere = PairCosts { solo: &[f64::INFINITY; 2], concurrent: &[f64::INFINITY; 2] };
        assert_eq!(joint_dp(one, nowhere, 2), (f64::INFINITY, Vec::new()));
    }
}
