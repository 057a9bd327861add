//! Noticing that a unit has become slow: every segment's recent times against its first ones.

use std::collections::{BTreeMap, VecDeque};
use trefoil_core::UnitAddress;

/// When a unit counts as slow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WatchRule {
    /// Executions of a segment whose median is its normal time, and over whose median the recent time is taken.
    pub window: usize,
    /// Recent time over normal time from which a unit is slow.
    pub factor: f64,
}

impl Default for WatchRule {
    fn default() -> Self {
        Self { window: 25, factor: 1.4 }
    }
}

/// Times of one segment. Bounded: the window is all it keeps.
#[derive(Debug, Clone, Default)]
struct History {
    recent: VecDeque<f64>,
    normal: Option<f64>,
}

/// The segments of a plan under watch.
#[derive(Debug, Clone)]
pub struct Watch {
    rule: WatchRule,
    units: Vec<UnitAddress>,
    segments: Vec<History>,
}

impl Watch {
    /// Watches segments, given the unit of each.
    pub fn new(units: Vec<UnitAddress>, rule: WatchRule) -> Self {
        let rule = WatchRule { window: rule.window.max(1), ..rule };
        Self { segments: vec![History::default(); units.len()], units, rule }
    }

    /// Watches segments whose normal times are known, in milliseconds; 0 means that it is not.
    pub fn expecting(units: Vec<UnitAddress>, normal_ms: Vec<f64>, rule: WatchRule) -> Self {
        let mut watch = Self::new(units, rule);
        for (history, ms) in watch.segments.iter_mut().zip(normal_ms) {
            history.normal = Some(ms).filter(|&ms| ms > 0.0);
        }
        watch
    }

    /// A segment took so many milliseconds.
    pub fn add(&mut self, segment: usize, ms: f64) {
        let window = self.rule.window;
        let Some(history) = self.segments.get_mut(segment) else { return };
        if history.recent.len() == window {
            history.recent.pop_front();
        }
        history.recent.push_back(ms);
        if history.normal.is_none() && history.recent.len() == window {
            history.normal = Some(median(&history.recent));
            history.recent.clear();
        }
    }

    /// Units that are slow now, and by how much: the median of their segments' recent times over their normal ones, of the
    /// segment that suffers most.
    pub fn slow(&self) -> BTreeMap<UnitAddress, f64> {
        let mut slow = BTreeMap::new();
        for (unit, history) in self.units.iter().zip(&self.segments) {
            let Some(normal) = history.normal.filter(|normal| *normal > 0.0) else { continue };
            if history.recent.len() < self.rule.window {
                continue;
            }
            let factor = median(&history.recent) / normal;
            if factor >= self.rule.factor {
                let worst = slow.entry(unit.clone()).or_insert(factor);
                *worst = worst.max(factor);
            }
        }
        slow
    }
}

fn median(times: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = times.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> Watch {
        let units = ["a:CPU@0", "b:CPU@1", "a:CPU@0"].map(|unit| unit.parse().unwrap());
        Watch::new(units.into(), WatchRule { window: 5, factor: 1.5 })
    }

    #[test]
    fn a_lasting_slowdown_is_told_and_a_hiccup_is_not() {
        let mut watch = watch();
        for _ in 0..20 {
            (0..3).for_each(|segment| watch.add(segment, 1.0));
        }
        watch.add(0, 50.0);
        watch.add(0, 50.0);
        assert!(watch.slow().is_empty(), "two of five are a hiccup");
        for _ in 0..5 {
            watch.add(0, 1.6);
            watch.add(1, 1.4);
            watch.add(2, 2.0);
        }
        let slow: Vec<_> = watch.slow().into_iter().map(|(unit, factor)| (unit.to_string(), factor)).collect();
        assert_eq!(slow, [("a:CPU@0".to_owned(), 2.0)]);
    }

    #[test]
    fn what_is_expected_is_normal() {
        let units = vec!["a:CPU@0".parse().unwrap(), "b:CPU".parse().unwrap()];
        let mut watch = Watch::expecting(units, vec![1.0, 0.0], WatchRule { window: 3, factor: 1.5 });
        for _ in 0..3 {
            watch.add(0, 2.0);
            watch.add(1, 2.0);
        }
        assert_eq!(watch.slow().len(), 1, "the first is slow from the start, of the second nothing is known");
    }

    #[test]
    fn nothing_is_told_before_it_is_known_what_is_normal() {
        let mut watch = watch();
        for ms in [1.0, 2.0, 4.0, 8.0] {
            watch.add(0, ms);
        }
        assert!(watch.slow().is_empty());
        watch.add(7, 1.0);
        let mut zero = watch.clone();
        (0..20).for_each(|_| zero.add(1, 0.0));
        assert!(zero.slow().is_empty(), "a segment without a time cannot be slow");
    }
}
