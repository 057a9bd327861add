//! Slowdown factors as a dense table over units and classes.

use trefoil_core::OperatorClass;

/// Number of operator classes.
const CLASSES: usize = 2;

/// `f(slowed unit, other unit, class of the slowed work, class of the other's work)` between `units` dense units.
///
/// A busy unit's `f` is the largest measured factor over the other busy units, 1 where none was measured; below 1 where
/// engines speed each other up.
#[derive(Debug, Clone, PartialEq)]
pub struct Factors {
    units: usize,
    /// Row-major slowed × other × class × class; NaN where nothing was measured.
    table: Vec<f64>,
}

pub(crate) fn class_index(class: OperatorClass) -> usize {
    match class {
        OperatorClass::Compute => 0,
        OperatorClass::Memory => 1,
    }
}

impl Factors {
    /// Nothing slows anything.
    pub fn none(units: usize) -> Self {
        Self { units, table: vec![f64::NAN; units * units * CLASSES * CLASSES] }
    }

    fn at(&self, slowed: usize, other: usize, class: usize, interference: usize) -> usize {
        ((slowed * self.units + other) * CLASSES + class) * CLASSES + interference
    }

    /// Sets one factor.
    pub fn set(&mut self, slowed: usize, other: usize, classes: (OperatorClass, OperatorClass), factor: f64) {
        let at = self.at(slowed, other, class_index(classes.0), class_index(classes.1));
        self.table[at] = factor;
    }

    /// Sets one factor for all classes.
    pub fn set_all(&mut self, slowed: usize, other: usize, factor: f64) {
        let at = self.at(slowed, other, 0, 0);
        self.table[at..at + CLASSES * CLASSES].fill(factor);
    }

    /// A class pair that was not measured takes the worst that was for the class of the slowed work.
    pub(crate) fn fill_classes(&mut self) {
        for pair in self.table.chunks_exact_mut(CLASSES) {
            let worst = pair.iter().copied().fold(f64::NAN, f64::max);
            pair.iter_mut().filter(|factor| factor.is_nan()).for_each(|factor| *factor = worst);
        }
    }

    /// The factor, if one is known.
    pub fn get(&self, slowed: usize, other: usize, classes: (OperatorClass, OperatorClass)) -> Option<f64> {
        let factor = self.table[self.at(slowed, other, class_index(classes.0), class_index(classes.1))];
        (!factor.is_nan()).then_some(factor)
    }

    /// `max` over the busy others, which may be empty; dense classes. NaN-aware: `f64::max` ignores NaN.
    pub(crate) fn slowdown(&self, unit: u32, class: u8, others: impl Iterator<Item = (u32, u8)>) -> f64 {
        let row = unit as usize * self.units;
        let worst = others.fold(f64::NAN, |worst, (other, interference)| {
            let at = ((row + other as usize) * CLASSES + class as usize) * CLASSES + interference as usize;
            worst.max(self.table[at])
        });
        if worst.is_nan() { 1.0 } else { worst }
    }

    /// The smallest rate divisor that work of a class on a unit can see, alone or in any company of `usable` units that
    /// can be busy beside it.
    pub(crate) fn least(&self, unit: usize, class: usize, mut beside: impl FnMut(usize) -> bool) -> f64 {
        let mut least: f64 = 1.0;
        for other in (0..self.units).filter(|&other| other != unit && beside(other)) {
            for interference in 0..CLASSES {
                least = least.min(self.table[self.at(unit, other, class, interference)]);
            }
        }
        least
    }

    /// The smallest rate divisor of any work on a unit while exactly the units of `set` (it is one of them) are busy.
    pub(crate) fn least_beside(&self, unit: usize, set: &[usize]) -> f64 {
        let of_class = |class: usize| {
            let pairs = set.iter().filter(|&&other| other != unit).map(|&other| {
                let row = self.at(unit, other, class, 0);
                self.table[row..row + CLASSES].iter().copied().fold(f64::NAN, f64::min)
            });
            let worst = pairs.fold(f64::NAN, f64::max);
            if worst.is_nan() { 1.0 } else { worst }
        };
        (0..CLASSES).map(of_class).fold(f64::INFINITY, f64::min)
    }

    /// The largest divisor, likewise.
    pub(crate) fn most(&self, unit: usize, class: usize) -> f64 {
        let mut most: f64 = 1.0;
        for other in (0..self.units).filter(|&other| other != unit) {
            for interference in 0..CLASSES {
                most = most.max(self.table[self.at(unit, other, class, interference)]);
            }
        }
        most
    }

    /// Whether work on one of two units that can be busy at once changes the other's rate.
    pub(crate) fn matter(&self, beside: impl Fn(usize, usize) -> bool) -> bool {
        let pairs = (0..self.units).flat_map(|slowed| (0..self.units).map(move |other| (slowed, other)));
        pairs.filter(|&(slowed, other)| slowed != other && beside(slowed, other)).any(|(slowed, other)| {
            let at = self.at(slowed, other, 0, 0);
            self.table[at..at + CLASSES * CLASSES]
                .iter()
                .any(|&factor| !factor.is_nan() && factor.to_bits() != 1f64.to_bits())
        })
    }

    /// Whether every factor is a number above 0 or unmeasured.
    pub(crate) fn bad(&self) -> Option<f64> {
        self.table.iter().copied().find(|factor| *factor <= 0.0 || factor.is_infinite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OperatorClass::{Compute, Memory};

    #[test]
    fn unmeasured_pairs_take_the_worst_of_their_class_or_one() {
        let mut factors = Factors::none(3);
        factors.set(0, 1, (Compute, Memory), 1.2);
        factors.set(0, 2, (Compute, Compute), 0.9);
        factors.fill_classes();
        assert_eq!(factors.get(0, 1, (Compute, Compute)), Some(1.2));
        assert_eq!(factors.get(0, 1, (Memory, Compute)), None);
        let with = |others: &[(u32, u8)]| factors.slowdown(0, 0, others.iter().copied());
        let found = [
            with(&[]),
            with(&[(2, 0)]),
            with(&[(1, 1), (2, 0)]),
            factors.slowdown(1, 1, [(0, 0)].into_iter()),
            factors.least(0, 0, |_| true),
            factors.least(0, 0, |other| other != 2),
            factors.least_beside(0, &[0, 2]),
        ];
        assert_eq!(found.map(f64::to_bits), [1.0, 0.9, 1.2, 1.0, 0.9, 1.0, 0.9].map(f64::to_bits));
    }
}
