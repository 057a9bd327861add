//! What a planner is asked: model, units, objective, pins.

use crate::PlanError;
use std::fmt;
use std::str::FromStr;
use trefoil_core::{Objective, Operator, OperatorGraph, Profile, UnitAddress};

/// A planning question. Planners are pure: equal requests give equal plans.
#[derive(Debug, Clone)]
pub struct PlanRequest<'a> {
    /// The measurements.
    pub profile: &'a Profile,
    /// The model.
    pub graph: &'a OperatorGraph,
    /// Units to use; empty means every unit of the profile.
    pub units: Vec<UnitAddress>,
    /// What to minimise.
    pub objective: Objective,
    /// Placements that are not the planner's to choose. Several may match one operator if they name the same unit.
    pub pins: Vec<Pin>,
}

impl<'a> PlanRequest<'a> {
    /// Latency on every unit of the profile, nothing pinned.
    pub fn new(profile: &'a Profile, graph: &'a OperatorGraph) -> Self {
        Self { profile, graph, units: Vec::new(), objective: Objective::Latency, pins: Vec::new() }
    }
}

/// Knobs of the planners that few people need.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanOptions {
    /// `auto` returns a plan that mixes units only if its claim is below the best single unit's by more than this
    /// fraction; smaller gains drown in measurement noise.
    pub minimum_gain: f64,
    /// Most cut positions of one interval graph.
    pub cut_limit: usize,
    /// Most undominated partial plans kept per (cut, unit).
    pub label_limit: usize,
    /// How long the anytime planners (`dag`, `concurrent`) search.
    pub budget: Budget,
    /// Seed of their random choices: equal seeds and step budgets give equal plans.
    pub seed: u64,
    /// Lets `auto` choose a mode of a unit ([`trefoil_core::Profile::modes`]) on which only the whole model was measured.
    /// Off for those who ask on: such a unit has no operator costs to explain or replay.
    pub modes: bool,
}

impl PlanOptions {
    /// The same with a part of what is left of the budget, from now on.
    pub(crate) fn part(&self, share: f64) -> Self {
        let budget = match self.budget {
            Budget::Steps(steps) => Budget::Steps((steps as f64 * share) as u64),
            Budget::Until(clock) => {
                let now = (clock.now_ms)();
                Budget::Until(Clock { end_ms: now + (clock.end_ms - now).max(0.0) * share, ..clock })
            }
        };
        Self { budget, ..*self }
    }

    /// Milliseconds left, where a clock decides.
    pub(crate) fn left_ms(&self) -> Option<f64> {
        match self.budget {
            Budget::Steps(_) => None,
            Budget::Until(clock) => Some(clock.end_ms - (clock.now_ms)()),
        }
    }

    /// Whether a clock decides and the time is over.
    pub(crate) fn is_over(&self) -> bool {
        self.left_ms().is_some_and(|left| left <= 0.0)
    }
}

/// When an anytime planner stops. Planners read no clock of their own; a budget of steps makes them deterministic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// After simulating this many task executions.
    Steps(u64),
    /// When the caller's clock says so.
    Until(Clock),
}

/// A clock that the caller lends to an anytime planner.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Milliseconds since whenever.
    pub now_ms: fn() -> f64,
    /// When to stop, by that clock.
    pub end_ms: f64,
}

impl PartialEq for Clock {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.now_ms, other.now_ms) && self.end_ms == other.end_ms
    }
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            minimum_gain: 0.02,
            cut_limit: 256,
            label_limit: 12,
            budget: Budget::Steps(10_000_000),
            seed: 1,
            modes: false,
        }
    }
}

/// Forces the operators whose name or kind matches a pattern onto a unit: `Conv*=openvino:CPU`.
///
/// `*` stands for any characters, `?` for one; everything else is literal and case counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// Pattern over an operator's name or kind.
    pub pattern: String,
    /// The unit.
    pub unit: UnitAddress,
}

impl Pin {
    /// Whether the pattern matches the operator's name or its kind.
    pub fn matches(&self, operator: &Operator) -> bool {
        glob(&self.pattern, &operator.name) || glob(&self.pattern, &operator.kind)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.unit)
    }
}

impl FromStr for Pin {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let fail = |reason: String| PlanError::PinSyntax { text: text.to_owned(), reason };
        // The last `=` separates: node names may hold one, unit addresses never do.
        let (pattern, unit) = text.rsplit_once('=').ok_or_else(|| fail("no `=`".to_owned()))?;
        if pattern.is_empty() {
            return Err(fail("the pattern is empty".to_owned()));
        }
        let unit = unit.parse().map_err(|error: trefoil_core::CoreError| fail(error.to_string()))?;
        Ok(Self { pattern: pattern.to_owned(), unit })
    }
}

/// Matches `*` (any run) and `?` (one character). Backtracks to the last star only: O(pattern × text).
fn glob(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut at, mut seen) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(&want) if want == '?' || want == text[seen] => {
                at += 1;
                seen += 1;
            }
            _ => match star {
                Some((star_at, star_seen)) => {
                    star = Some((star_at, star_seen + 1));
                    at = star_at + 1;
                    seen = star_seen + 1;
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|&left| left == '*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pins_parse_and_print() {
        for text in ["Conv*=openvino:CPU", "/layer=1/MatMul=ort:CPU@0-1", "?elu=rten:CPU"] {
            assert_eq!(text.parse::<Pin>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn malformed_pins_are_one_line() {
        for text in ["", "Conv*", "=openvino:CPU", "Conv*=", "Conv*=openvino"] {
            let message = text.parse::<Pin>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{text}` is not a pin")) && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn globs() {
        for (pattern, text, want) in [
            ("Conv*", "Conv+Relu", true),
            ("Conv", "Conv+Relu", false),
            ("*Relu", "Conv+Relu", true),
            ("*o*R?lu", "Conv+Relu", true),
            ("", "", true),
            ("*", "", true),
            ("?", "", false),
            ("a*b*c", "aXbYbZ", false),
        ] {
            assert_eq!(glob(pattern, text), want, "{pattern} {text}");
        }
    }

    /// Oracle: try every split of the text at each star.
    fn glob_by_recursion(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => (0..=text.len()).any(|skip| glob_by_recursion(rest, &text[skip..])),
            Some((&want, rest)) => text
                .split_first()
                .is_some_and(|(&have, left)| (want == '?' || want == have) && glob_by_recursion(rest, left)),
        }
    }

    proptest! {
        #[test]
        fn globs_agree_with_recursion(pattern in "[ab*?]{0,7}", text in "[ab]{0,8}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            prop_assert_eq!(glob(&pattern, &text), glob_by_recursion(&chars(&pattern), &chars(&text)));
        }
    }
}
