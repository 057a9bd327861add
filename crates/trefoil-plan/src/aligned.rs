//! `aligned`: BIDENT's aligned search for two requests of one model running at once, literally (3.2.2, 3.3.3).

use crate::PairStep;

/// Costs of one model for [`aligned_dp`], row-major operators × units, in the objective's unit.
#[derive(Debug, Clone, Copy)]
pub struct AlignedCosts<'a> {
    /// Alone; infinite where the operator does not run.
    pub solo: &'a [f64],
    /// Average of the two measured times when both requests run the operator on this unit at once.
    pub together: &'a [f64],
    /// Making its inputs available to the unit: H2D, 0 for a unit that is no accelerator.
    pub enter: &'a [f64],
    /// Making its outputs available to others: D2H, 0 for a unit that is no accelerator.
    pub leave: &'a [f64],
}

/// BIDENT's aligned search (3.2.2) over dense arrays, exact under its model, which is: both requests advance in lockstep;
/// state (step, d0, d1); on one unit a step costs the average of the measured concurrent times, on different units the
/// larger of the solo times.
///
/// The text does not say how the two requests' transitions add up. Both happen at once like the operators, so a step pays
/// the larger of the two; each is equation 1's (`leave` of the old unit plus `enter` of the new one, nothing for staying),
/// with `enter` at the start and `leave` at the end.
///
/// Returns the cost and one step per operator; infinite and none where an operator runs nowhere. Ties keep the units, then
/// take lower ones. O(n·k⁴) time, 4·n·k² bytes.
///
/// # Panics
/// If `k` is 0 or above 255, or the arrays are not operators × `k` each.
pub fn aligned_dp(costs: AlignedCosts<'_>, k: usize) -> (f64, Vec<PairStep>) {
    assert!((1..=255).contains(&k) && costs.solo.len().is_multiple_of(k), "costs are not operators × {k} units");
    for other in [costs.together, costs.enter, costs.leave] {
        assert_eq!(other.len(), costs.solo.len(), "cost arrays differ in number");
    }
    let (count, states) = (costs.solo.len() / k, k * k);
    if count == 0 {
        return (0.0, Vec::new());
    }
    let work = |row: usize, state: usize| {
        let (a, b) = (row * k + state / k, row * k + state % k);
        if a == b { costs.together[a] } else { costs.solo[a].max(costs.solo[b]) }
    };
    let enter = |row: usize, unit: usize| costs.enter[row * k + unit];
    let leave = |row: usize, unit: usize| costs.leave[row * k + unit];
    let mut cost: Vec<f64> = (0..states).map(|s| enter(0, s / k).max(enter(0, s % k)) + work(0, s)).collect();
    let mut parents = vec![0u32; count * states];
    let mut moves = vec![0.0; states];
    for row in 1..count {
        for (from_to, price) in moves.iter_mut().enumerate() {
            let (from, to) = (from_to / k, from_to % k);
            *price = if from == to { 0.0 } else { leave(row - 1, from) + enter(row, to) };
        }
        let before = cost.clone();
        for (state, slot) in cost.iter_mut().enumerate() {
            // Staying first, so that ties keep the units.
            let (mut best, mut parent) = (before[state], state);
            for (from, &value) in before.iter().enumerate() {
                let price = moves[from / k * k + state / k].max(moves[from % k * k + state % k]);
                if value + price < best {
                    (best, parent) = (value + price, from);
                }
            }
            *slot = best + work(row, state);
            parents[row * states + state] = parent as u32;
        }
    }
    let ends = cost.iter().enumerate().map(|(s, cost)| cost + leave(count - 1, s / k).max(leave(count - 1, s % k)));
    let (total, mut state) =
        ends.enumerate().fold((f64::INFINITY, 0), |best, (s, cost)| if cost < best.0 { (cost, s) } else { best });
    if total == f64::INFINITY {
        return (total, Vec::new());
    }
    let mut steps = vec![PairStep { first: None, second: None }; count];
    for (row, step) in steps.iter_mut().enumerate().rev() {
        *step = PairStep { first: Some(state / k), second: Some(state % k) };
        state = parents[row * states + state] as usize;
    }
    (total, steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_requests_take_two_units_or_share_one() {
        let zeros = [0.0; 2];
        let run = |together: [f64; 2]| {
            aligned_dp(AlignedCosts { solo: &[3.0, 4.0], together: &together, enter: &zeros, leave: &zeros }, 2)
        };
        assert_eq!(run([6.0, 8.0]), (4.0, vec![PairStep { first: Some(0), second: Some(1) }]));
        assert_eq!(run([3.5, 8.0]), (3.5, vec![PairStep { first: Some(0), second: Some(0) }]));
    }
}
