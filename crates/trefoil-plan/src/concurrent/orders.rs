//! Orders in which requests follow one another, nothing else running: one machine, releases, deadlines, weights.

use crate::assemble::ROUNDING;
use crate::problem::{Goal, ProblemRequest, Score};

/// Requests of which every order is tried.
const ALL_ORDERS: usize = 7;
/// Requests whose order is improved one move at a time.
const IMPROVED: usize = 100;

/// Orders of the requests, one after another, each taking its `work` (milliseconds): by arrival, by deadline, by work for its weight,
/// and the best for `goal` of all orders where requests are few, or what moves of single requests make of those three.
pub(crate) fn request_orders(requests: &[ProblemRequest], work: &[f64], goal: Goal) -> Vec<Vec<usize>> {
    let arrival = |at: usize| requests[at].release_ms;
    let due = |at: usize| requests[at].deadline_ms.unwrap_or(f64::INFINITY);
    let keys: [&dyn Fn(usize) -> f64; 3] = [&arrival, &due, &|at| work[at] / requests[at].weight];
    let mut orders: Vec<Vec<usize>> = Vec::new();
    for key in keys {
        let mut sorted: Vec<usize> = (0..requests.len()).collect();
        // Stable: what arrives at once keeps the order in which it was asked for.
        sorted.sort_by(|&a, &b| key(a).total_cmp(&key(b)).then(arrival(a).total_cmp(&arrival(b))));
        if !orders.contains(&sorted) {
            orders.push(sorted);
        }
    }
    let line = Line { requests, work, goal };
    let best = if requests.len() <= ALL_ORDERS {
        line.best_of_all(&orders[0])
    } else if requests.len() <= IMPROVED {
        orders.iter().map(|order| line.improved(order)).reduce(|best, order| line.better(best, order))
    } else {
        None
    };
    orders.extend(best.filter(|best| !orders.contains(best)));
    orders
}

struct Line<'r> {
    requests: &'r [ProblemRequest],
    work: &'r [f64],
    goal: Goal,
}

impl Line<'_> {
    fn score(&self, order: &[usize]) -> Score {
        let (mut now, mut weighted) = (0.0f64, 0.0);
        let (mut late, mut tardiness_ms) = (0.0, 0.0);
        for &at in order {
            let request = &self.requests[at];
            now = now.max(request.release_ms) + self.work[at];
            if let Some(deadline) = request.deadline_ms.filter(|&deadline| now - deadline > ROUNDING * now) {
                late += request.weight;
                tardiness_ms += request.weight * (now - deadline);
            }
            weighted += request.weight * (now - request.release_ms);
        }
        let value = if self.goal == Goal::WeightedCompletion { weighted } else { now };
        Score { excess_bytes: 0.0, late, tardiness_ms, value }
    }

    fn better(&self, best: Vec<usize>, order: Vec<usize>) -> Vec<usize> {
        if self.score(&order).is_better(&self.score(&best)) { order } else { best }
    }

    /// The best of all orders; `None` where none is better than `first`.
    fn best_of_all(&self, first: &[usize]) -> Option<Vec<usize>> {
        let (mut best, mut found) = (self.score(first), None);
        let mut order = first.to_vec();
        permute(&mut order, 0, &mut |order| {
            let score = self.score(order);
            if score.is_better(&best) {
                best = score;
                found = Some(order.to_vec());
            }
        });
        found
    }

    /// Moves one request at a time elsewhere as long as that helps.
    fn improved(&self, order: &[usize]) -> Vec<usize> {
        let mut best = order.to_vec();
        let mut score = self.score(&best);
        let mut moved = true;
        while moved {
            moved = false;
            for from in 0..best.len() {
                for to in 0..best.len() {
                    let mut order = best.clone();
                    let request = order.remove(from);
                    order.insert(to, request);
                    let other = self.score(&order);
                    if other.is_better(&score) {
                        (best, score, moved) = (order, other, true);
                    }
                }
            }
        }
        best
    }
}

/// Every order of `items[fixed..]`.
fn permute(items: &mut [usize], fixed: usize, visit: &mut dyn FnMut(&[usize])) {
    if fixed + 1 >= items.len() {
        return visit(items);
    }
    for at in fixed..items.len() {
        items.swap(fixed, at);
        permute(items, fixed + 1, visit);
        items.swap(fixed, at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(release_ms: f64, deadline_ms: Option<f64>, weight: f64) -> ProblemRequest {
        ProblemRequest { release_ms, deadline_ms, weight }
    }

    #[test]
    fn every_order_of_few_is_tried() {
        let mut seen = std::collections::BTreeSet::new();
        permute(&mut [0, 1, 2, 3], 0, &mut |order| assert!(seen.insert(order.to_vec())));
        assert_eq!(seen.len(), 24);
        permute(&mut [], 0, &mut |order| assert!(order.is_empty()));
    }

    #[test]
    fn an_order_that_is_none_of_the_usual_ones_is_found() {
        // By arrival the long one keeps others waiting; by deadline likewise; by work for weight the first deadline is missed.
        let requests = [
            request(0.0, Some(100.0), 1.0),
            request(1.0, None, 10.0),
            request(2.0, Some(8.5), 0.1),
            request(0.5, None, 4.0),
        ];
        let work = [50.0, 4.0, 3.0, 2.0];
        let line = Line { requests: &requests, work: &work, goal: Goal::WeightedCompletion };
        let orders = request_orders(&requests, &work, Goal::WeightedCompletion);
        let less = |a: Score, b: Score| if b.is_better(&a) { b } else { a };
        let best = orders.iter().map(|order| line.score(order)).reduce(less).unwrap();
        let mut least = Score::WORST;
        permute(&mut [0, 1, 2, 3], 0, &mut |order| least = less(least, line.score(order)));
        assert_eq!(best, least);
        assert!(best.late < 1e-12);
        assert_eq!(orders.len(), 4, "{orders:?}");
    }

    #[test]
    fn moves_never_make_an_order_worse() {
        let requests: Vec<ProblemRequest> = (0..20u32)
            .map(|at| {
                request(f64::from(at * 7 % 13), (at % 3 == 0).then(|| f64::from(at * 11 % 90)), f64::from(at % 5 + 1))
            })
            .collect();
        let work: Vec<f64> = (0..20u32).map(|at| f64::from(at * 5 % 17 + 1)).collect();
        let line = Line { requests: &requests, work: &work, goal: Goal::WeightedCompletion };
        let orders = request_orders(&requests, &work, Goal::WeightedCompletion);
        let (best, named) = orders.split_last().unwrap();
        assert!(named.len() == 3 && named.iter().all(|order| line.score(best).is_better(&line.score(order))));
        let mut sorted = best.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..20));
    }
}
