//! Lower bounds over plans in which models may also run whole on modes of units, of which nothing but their time alone is known.

use super::{Workload, in_turn};
use crate::problem::{Goal, ProblemRequest};
use crate::simulate::resource_keys;
use crate::view::CostView;
use crate::{PlanError, whole};
use std::collections::BTreeSet;

/// What bounds every plan, plans in which models run whole on modes of units included, given what `bound`s plans on the units and what bounds each
/// model `alone` on them.
///
/// A model takes at least the lesser of what it takes on the units and on a mode. Where all units and modes hold a resource together, as backends of one
/// processor do, nothing overlaps, so requests wait for one another; elsewhere none is sure but each request's own time.
///
/// # Errors
/// Whatever is wrong with a profile.
pub(crate) fn with_modes(
    bound: f64,
    workload: &Workload<'_>,
    views: &[&CostView<'_>],
    goal: Goal,
    alone: &dyn Fn(usize) -> Result<f64, PlanError>,
) -> Result<f64, PlanError> {
    let on_modes: Vec<Option<f64>> =
        views.iter().map(|view| whole::fastest_mode(view).map(|plan| plan.claimed)).collect();
    if on_modes.iter().all(Option::is_none) || !in_turn::is_possible(workload) {
        return Ok(bound);
    }
    let mut least = Vec::with_capacity(views.len());
    for (model, on_mode) in on_modes.into_iter().enumerate() {
        least.push(alone(model)?.min(on_mode.unwrap_or(f64::INFINITY)));
    }
    let mut takes = vec![0.0f64; workload.requests.len()];
    for instance in &workload.instances {
        let slot = &mut takes[instance.request as usize];
        *slot = if nothing_overlaps(views) { *slot + least[instance.model] } else { slot.max(least[instance.model]) };
    }
    let own = own_times(&workload.requests, &takes, goal);
    if nothing_overlaps(views) {
        let in_line = if goal == Goal::WeightedCompletion {
            least_weighted_completion(&workload.requests, &takes)
        } else {
            last_end(&workload.requests, &takes)
        };
        // This holds for plans on the units, too.
        return Ok(bound.min(own).max(in_line));
    }
    Ok(bound.min(own))
}

/// Whether every unit and every mode holds a resource that all others hold.
fn nothing_overlaps(views: &[&CostView<'_>]) -> bool {
    let units = views.iter().flat_map(|view| view.units.iter().copied().chain(&view.index.profile.modes));
    let held = units.map(|unit| resource_keys(unit).into_iter().collect::<BTreeSet<String>>());
    held.reduce(|all, unit| &all & &unit).is_some_and(|common| !common.is_empty())
}

/// Every request as if it were alone.
fn own_times(requests: &[ProblemRequest], takes: &[f64], goal: Goal) -> f64 {
    let timed = requests.iter().zip(takes);
    if goal == Goal::WeightedCompletion {
        weighted_mean(requests, timed.map(|(_, &ms)| ms))
    } else {
        timed.map(|(request, ms)| request.release_ms + ms).fold(0.0, f64::max)
    }
}

fn weighted_mean(requests: &[ProblemRequest], values: impl Iterator<Item = f64>) -> f64 {
    let weights: f64 = requests.iter().map(|request| request.weight).sum();
    requests.iter().zip(values).map(|(request, ms)| request.weight * ms).sum::<f64>() / weights
}

/// The end of the last of requests that cannot overlap: no order ends sooner than that of arrival.
fn last_end(requests: &[ProblemRequest], takes: &[f64]) -> f64 {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by(|&a, &b| requests[a].release_ms.total_cmp(&requests[b].release_ms));
    order.into_iter().fold(0.0, |now: f64, at| now.max(requests[at].release_ms) + takes[at])
}

/// No schedule of requests that cannot overlap has a smaller weighted mean of `completion − release`, even where they may
/// interrupt one another: the mean of the moments at which a request works, and half its work, is no later than its
/// completion, and weighted means of such moments are least where of those that wait the one with the most weight for
/// its work always goes first (Goemans; Queyranne).
fn least_weighted_completion(requests: &[ProblemRequest], takes: &[f64]) -> f64 {
    let rank = |at: usize| requests[at].weight / takes[at];
    let mut arrivals: Vec<f64> = requests.iter().map(|request| request.release_ms).collect();
    arrivals.sort_by(f64::total_cmp);
    let (mut left, mut moments) = (takes.to_vec(), vec![0.0; requests.len()]);
    let mut now = 0.0f64;
    loop {
        let waiting = (0..requests.len()).filter(|&at| left[at] > 0.0);
        let Some(at) =
            waiting.clone().filter(|&at| requests[at].release_ms <= now).max_by(|&a, &b| rank(a).total_cmp(&rank(b)))
        else {
            let Some(next) = waiting.map(|at| requests[at].release_ms).reduce(f64::min) else { break };
            now = next;
            continue;
        };
        let next = arrivals.iter().copied().find(|&arrival| arrival > now).unwrap_or(f64::INFINITY);
        let (end, done) = if now + left[at] <= next { (now + left[at], true) } else { (next, false) };
        moments[at] += (end - now) * f64::midpoint(now, end);
        left[at] = if done { 0.0 } else { left[at] - (end - now) };
        now = end;
    }
    let least = (0..requests.len()).map(|at| {
        let moment = if takes[at] > 0.0 { moments[at] / takes[at] } else { requests[at].release_ms };
        moment + takes[at] / 2.0 - requests[at].release_ms
    });
    weighted_mean(requests, least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(release_ms: f64, weight: f64) -> ProblemRequest {
        ProblemRequest { release_ms, deadline_ms: None, weight }
    }

    /// The least weighted mean of `completion − release` over every order of unit pieces of work: interruptions at whole numbers are all that
    /// whole releases and times need.
    fn least_of_all(requests: &[ProblemRequest], left: &mut [u32], now: u32) -> f64 {
        if left.iter().all(|&left| left == 0) {
            return 0.0;
        }
        let ready: Vec<usize> =
            (0..left.len()).filter(|&at| left[at] > 0 && requests[at].release_ms <= f64::from(now)).collect();
        if ready.is_empty() {
            return least_of_all(requests, left, now + 1);
        }
        let mut least = f64::INFINITY;
        for at in ready {
            left[at] -= 1;
            let ends =
                if left[at] == 0 { requests[at].weight * (f64::from(now + 1) - requests[at].release_ms) } else { 0.0 };
            least = least.min(ends + least_of_all(requests, left, now + 1));
            left[at] += 1;
        }
        least
    }

    proptest! {
        #[test]
        fn no_schedule_of_requests_that_interrupt_one_another_is_better(
            asked in prop::collection::vec((0u32..5, 1u32..4, 1u32..5), 1..4),
        ) {
            let requests: Vec<ProblemRequest> =
                asked.iter().map(|&(release, _, weight)| request(f64::from(release), f64::from(weight))).collect();
            let takes: Vec<f64> = asked.iter().map(|&(_, ms, _)| f64::from(ms)).collect();
            let weights: f64 = requests.iter().map(|request| request.weight).sum();
            let mut left: Vec<u32> = asked.iter().map(|&(_, ms, _)| ms).collect();
            let least = least_of_all(&requests, &mut left, 0) / weights;
            let bound = least_weighted_completion(&requests, &takes);
            prop_assert!(bound <= least * (1.0 + 1e-12), "{bound} above {least}");
            prop_assert!(bound >= 0.5 * least, "{bound} far below {least}");
            if requests.iter().all(|request| request.release_ms.to_bits() == 0) {
                prop_assert!((bound - least).abs() < 1e-9, "{bound} is not {least}");
            }
        }
    }

    #[test]
    fn the_last_of_a_line_waits_for_all() {
        let requests = [request(5.0, 1.0), request(0.0, 1.0), request(1.0, 1.0)];
        assert!((last_end(&requests, &[2.0, 3.0, 1.0]) - 7.0).abs() < 1e-12);
        assert!((last_end(&requests, &[2.0, 3.0, 4.0]) - 9.0).abs() < 1e-12);
        assert!((own_times(&requests, &[2.0, 3.0, 4.0], Goal::Makespan) - 7.0).abs() < 1e-12);
    }
}
