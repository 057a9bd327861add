//! The guard: a plan is used only if it was measured to be faster than the best single unit.

use crate::compare::{Comparison, ContenderResult, Ratio};
use serde::{Deserialize, Serialize};

/// Confidence below which an interval decides nothing (fewer than five rounds).
pub const GUARD_CONFIDENCE: f64 = 0.9;

/// Why the guard chose as it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The plan is faster, beyond doubt.
    PlanFaster,
    /// No single unit runs the model.
    OnlyPlan,
    /// The plan is slower, beyond doubt.
    PlanSlower,
    /// The difference is within noise: the simpler one is used.
    Tie,
    /// The plan failed.
    PlanFailed,
    /// There is no plan beside the single units.
    NoPlan,
    /// Nothing ran.
    NothingRan,
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Name of the contender to use; `None` if nothing ran.
    pub choice: Option<String>,
    /// Whether that is a plan rather than a single unit.
    pub uses_plan: bool,
    /// Why.
    pub reason: Reason,
    /// One line for people.
    pub message: String,
}

/// Decides what to run. Ties and noise go to the single unit: a plan must win with an interval that excludes 1.
pub fn guard(comparison: &Comparison) -> Verdict {
    let verdict = |choice: Option<&ContenderResult>, reason: Reason, message: String| Verdict {
        choice: choice.map(|choice| choice.name.clone()),
        uses_plan: choice.is_some_and(|choice| !choice.baseline),
        reason,
        message,
    };
    let failures = |baseline: bool| {
        let failed = comparison.contenders.iter().filter(|contender| contender.baseline == baseline);
        let lines: Vec<_> = failed
            .filter_map(|contender| contender.failure.as_ref().map(|why| format!("{}: {why}", contender.name)))
            .collect();
        lines.join("; ")
    };
    match (comparison.best_plan(), comparison.best_baseline()) {
        (None, None) => {
            let reasons = [failures(false), failures(true)].join("; ");
            verdict(None, Reason::NothingRan, format!("nothing ran: {}", reasons.trim_matches([';', ' '])))
        }
        (Some(plan), None) => verdict(
            Some(plan),
            Reason::OnlyPlan,
            match failures(true) {
                reasons if reasons.is_empty() => {
                    format!("{} is used: there is no single unit to compare with", plan.name)
                }
                reasons => format!("{} is used: no single unit runs this model ({reasons})", plan.name),
            },
        ),
        (None, Some(single)) => {
            let alone = format!("{} alone is best here", single.name);
            match failures(false) {
                reasons if reasons.is_empty() => verdict(Some(single), Reason::NoPlan, alone),
                reasons => verdict(Some(single), Reason::PlanFailed, format!("{alone}: the plan failed ({reasons})")),
            }
        }
        (Some(plan), Some(single)) => {
            let Some(ratio) = comparison.ratio(&plan.name) else {
                let message = format!("{} alone is best here: the plan's times cannot be compared", single.name);
                return verdict(Some(single), Reason::Tie, message);
            };
            let figures = figures(ratio);
            let interval = ratio.interval;
            let sure = interval.confidence >= GUARD_CONFIDENCE;
            if sure && interval.high < 1.0 {
                let message = format!("{} beats {} alone: {figures}", plan.name, single.name);
                verdict(Some(plan), Reason::PlanFaster, message)
            } else if sure && interval.low > 1.0 {
                let message = format!("{} alone is best here: {} takes {figures}", single.name, plan.name);
                verdict(Some(single), Reason::PlanSlower, message)
            } else {
                let why = if sure { "within noise" } else { "too few rounds to tell" };
                let message = format!("{} alone is best here: {} takes {figures}, {why}", single.name, plan.name);
                verdict(Some(single), Reason::Tie, message)
            }
        }
    }
}

/// A plan that leads by less is not worth more rounds.
const WORTH_MORE_ROUNDS: f64 = 0.98;
/// Baselines whose time is within this factor of the best one's may turn out to be the best.
const NEAR_THE_BEST: f64 = 1.1;

/// Where more rounds could change the verdict: the best plan leads, but its interval does not exclude 1 or rests on too few
/// rounds. The names of those that further rounds need: that plan, and the baselines near the best.
pub fn undecided(comparison: &Comparison) -> Option<Vec<String>> {
    let (plan, single) = (comparison.best_plan()?, comparison.best_baseline()?);
    let interval = comparison.ratio(&plan.name)?.interval;
    let sure = interval.confidence >= GUARD_CONFIDENCE && (interval.high < 1.0 || interval.low > 1.0);
    if sure || interval.median > WORTH_MORE_ROUNDS {
        return None;
    }
    let limit = single.measured?.median * NEAR_THE_BEST;
    let near = comparison.contenders.iter().filter(|one| {
        one.name == plan.name || (one.baseline && one.measured.is_some_and(|measured| measured.median <= limit))
    });
    Some(near.map(|one| one.name.clone()).collect())
}

/// `0.91× its time [0.88, 0.95] (94 % interval over 5 rounds)`.
fn figures(ratio: &Ratio) -> String {
    let (interval, rounds) = (ratio.interval, ratio.per_round.len());
    format!(
        "{:.2}× its time [{:.2}, {:.2}] ({:.0} % interval over {rounds} rounds)",
        interval.median,
        interval.low,
        interval.high,
        interval.confidence * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::median_interval;
    use trefoil_core::Samples;

    fn contender(name: &str, baseline: bool, medians: &[f64]) -> ContenderResult {
        ContenderResult {
            name: name.into(),
            baseline,
            predicted_ms: 1.0,
            measured: Samples::from_values(&mut medians.to_vec()),
            round_medians: medians.to_vec(),
            samples: 0,
            prepare_ms: None,
            prediction_error: None,
            round_predictions: Vec::new(),
            paired_error: None,
            trace: None,
            failure: medians.is_empty().then(|| "it crashed".to_owned()),
        }
    }

    fn judge(plan: &[f64], one: &[f64], two: &[f64]) -> Verdict {
        guard(&comparison(plan, one, two))
    }

    fn comparison(plan: &[f64], one: &[f64], two: &[f64]) -> Comparison {
        let contenders =
            vec![contender("interval", false, plan), contender("ort:CPU", true, one), contender("rten:CPU", true, two)];
        let mut comparison = Comparison { rounds: plan.len() as u32, contenders, ratios: Vec::new() };
        if let (Some(best), false) = (comparison.best_baseline(), plan.is_empty()) {
            let per_round: Vec<_> = plan.iter().zip(&best.round_medians).map(|(plan, best)| plan / best).collect();
            comparison.ratios = vec![Ratio {
                of: "interval".into(),
                to: best.name.clone(),
                interval: median_interval(&mut per_round.clone()).unwrap(),
                per_round,
            }];
        }
        comparison
    }

    #[test]
    fn a_clear_win_uses_the_plan() {
        let verdict = judge(&[0.9, 0.91, 0.89, 0.9, 0.92], &[1.0; 5], &[2.0; 5]);
        assert_eq!((verdict.choice.as_deref(), verdict.reason), (Some("interval"), Reason::PlanFaster));
        assert!(verdict.uses_plan);
        assert_eq!(
            verdict.message,
            "interval beats ort:CPU alone: 0.90× its time [0.89, 0.92] (94 % interval over 5 rounds)"
        );
    }

    #[test]
    fn a_loss_and_a_tie_use_the_best_single_unit() {
        let slower = judge(&[1.2; 5], &[2.0; 5], &[1.0; 5]);
        assert_eq!((slower.choice.as_deref(), slower.reason), (Some("rten:CPU"), Reason::PlanSlower));
        assert!(slower.message.starts_with("rten:CPU alone is best here"), "{}", slower.message);
        let tie = judge(&[0.9, 0.9, 0.9, 0.9, 1.01], &[1.0; 5], &[2.0; 5]);
        assert_eq!((tie.choice.as_deref(), tie.reason), (Some("ort:CPU"), Reason::Tie));
        assert!(!tie.uses_plan && tie.message.ends_with("within noise"), "{}", tie.message);
    }

    #[test]
    fn a_lead_that_is_not_sure_asks_for_more_rounds_of_those_near_the_best() {
        let compared = |plan: &[f64], one: &[f64], two: &[f64]| undecided(&comparison(plan, one, two));
        let names = |names: &[&str]| Some(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(compared(&[0.8; 3], &[1.0; 3], &[2.0; 3]), names(&["interval", "ort:CPU"]), "too few rounds");
        let noisy = [0.8, 0.8, 0.8, 0.8, 1.01];
        assert_eq!(compared(&noisy, &[1.0; 5], &[1.05; 5]), names(&["interval", "ort:CPU", "rten:CPU"]));
        assert_eq!(compared(&[0.8; 5], &[1.0; 5], &[2.0; 5]), None, "sure of the plan");
        assert_eq!(compared(&[1.2; 5], &[1.0; 5], &[2.0; 5]), None, "sure of the single unit");
        assert_eq!(compared(&[0.99, 1.0, 0.98], &[1.0; 3], &[2.0; 3]), None, "nothing to gain");
        assert_eq!(compared(&[], &[1.0; 3], &[2.0; 3]), None, "no plan");
    }

    #[test]
    fn few_rounds_decide_nothing() {
        let verdict = judge(&[0.5; 3], &[1.0; 3], &[2.0; 3]);
        assert_eq!(verdict.reason, Reason::Tie);
        assert!(verdict.message.ends_with("too few rounds to tell"), "{}", verdict.message);
    }

    #[test]
    fn failures_leave_what_runs() {
        assert_eq!(judge(&[1.0; 5], &[], &[]).reason, Reason::OnlyPlan);
        assert!(judge(&[1.0; 5], &[], &[]).message.contains("no single unit runs this model (ort:CPU: it crashed;"));
        let failed = judge(&[], &[1.0; 5], &[]);
        assert_eq!((failed.choice.as_deref(), failed.reason), (Some("ort:CPU"), Reason::PlanFailed));
        assert!(failed.message.contains("the plan failed (interval: it crashed)"), "{}", failed.message);
        let nothing = judge(&[], &[], &[]);
        assert_eq!((nothing.choice, nothing.reason), (None, Reason::NothingRan));
    }
}
