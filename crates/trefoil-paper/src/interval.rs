//! Intervals: a published number stands for all numbers that print like it.

use serde::Serialize;
use std::ops::{Add, Div, Mul, Sub};

/// All numbers from `low` to `high`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// Lowest.
    pub low: f64,
    /// Highest.
    pub high: f64,
}

impl Interval {
    /// One number.
    pub fn exactly(value: f64) -> Self {
        Self { low: value, high: value }
    }

    /// From `low` to `high`.
    pub fn new(low: f64, high: f64) -> Self {
        debug_assert!(low <= high, "{low}..{high}");
        Self { low, high }
    }

    /// What prints as `text` when rounded to its last digit: `3.9` is 3.85 to 3.95. Commas group digits. Zeros at the end of
    /// whole numbers from 1,000 may be rounding: `12,800` is 12,750 to 12,850. `None` if it is no number.
    pub fn printed(text: &str) -> Option<Self> {
        let plain = text.replace(',', "");
        let value: f64 = plain.parse().ok()?;
        let decimals = plain.split_once('.').map_or(0, |(_, decimals)| decimals.len());
        let zeros = plain.bytes().rev().take_while(|&byte| byte == b'0').count();
        let rounded = if decimals == 0 && value >= 1000.0 { zeros } else { 0 };
        let half = 0.5 * 10f64.powi(rounded as i32 - decimals as i32);
        Some(Self { low: value - half, high: value + half })
    }

    /// The middle.
    pub fn middle(self) -> f64 {
        f64::midpoint(self.low, self.high)
    }

    /// Whether some number is in both.
    pub fn meets(self, other: Self) -> bool {
        // Ends computed in different orders differ by rounding.
        let slack = 1e-9 * self.high.abs().max(other.high.abs());
        self.low <= other.high + slack && other.low <= self.high + slack
    }

    /// The larger of two quantities.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { low: self.low.max(other.low), high: self.high.max(other.high) }
    }

    /// The smallest interval that holds both.
    #[must_use]
    pub fn hull(self, other: Self) -> Self {
        Self { low: self.low.min(other.low), high: self.high.max(other.high) }
    }

    /// Difference of the middles relative to `published`'s, in percent.
    pub fn difference_percent(self, published: Self) -> f64 {
        100.0 * (self.middle() / published.middle() - 1.0)
    }
}

impl From<f64> for Interval {
    fn from(value: f64) -> Self {
        Self::exactly(value)
    }
}

impl<T: Into<Interval>> Add<T> for Interval {
    type Output = Self;

    fn add(self, other: T) -> Self {
        let other = other.into();
        Self { low: self.low + other.low, high: self.high + other.high }
    }
}

impl<T: Into<Interval>> Sub<T> for Interval {
    type Output = Self;

    fn sub(self, other: T) -> Self {
        let other = other.into();
        Self { low: self.low - other.high, high: self.high - other.low }
    }
}

impl<T: Into<Interval>> Mul<T> for Interval {
    type Output = Self;

    fn mul(self, other: T) -> Self {
        let other = other.into();
        let ends = [self.low * other.low, self.low * other.high, self.high * other.low, self.high * other.high];
        Self {
            low: ends.into_iter().fold(f64::INFINITY, f64::min),
            high: ends.into_iter().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

impl<T: Into<Interval>> Div<T> for Interval {
    type Output = Self;

    /// The divisor must not hold 0.
    fn div(self, other: T) -> Self {
        let other = other.into();
        debug_assert!(other.low > 0.0 || other.high < 0.0, "division by {other:?}");
        self * Self { low: 1.0 / other.high, high: 1.0 / other.low }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_numbers_are_intervals() {
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let number = Interval::printed("1,423.5").unwrap();
        assert!(close(number.low, 1423.45) && close(number.high, 1423.55));
        assert!(Interval::printed("x").is_none());
        let rounded = Interval::printed("12,800").unwrap();
        assert!(close(rounded.low, 12_750.0) && close(rounded.high, 12_850.0));
        assert!(close(Interval::printed("180").unwrap().low, 179.5));
        let two = Interval::printed("2").unwrap();
        let product = two * Interval::new(-1.0, 3.0);
        assert!(close(product.low, -2.5) && close(product.high, 7.5));
        assert!(two.meets(Interval::exactly(2.5)) && !two.meets(Interval::exactly(2.51)));
    }
}
