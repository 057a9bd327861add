//! Which numbers make sense: what is outside comes from a slip or a damaged file, and sums, products and quotients of what is
//! inside stay far from where numbers end, so that no plan is judged by comparing infinities.

use crate::CoreError;
use std::fmt;

/// Most bytes of one tensor, of all tensors of a model, or of all its weights: what every JSON reader and `f64` holds exactly.
pub const MOST_BYTES: u64 = 1 << 53;

/// What a number stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// A time in milliseconds (or in the unit of a stream's costs): 0, or from 1e-12 to 1e12.
    Time,
    /// A power in watts: 0, or from 1e-9 to 1e9.
    Power,
    /// How many times as long something takes beside something else: from 1e-3 to 1e6.
    Factor,
    /// How much a request counts: from 1e-9 to 1e9.
    Weight,
}

impl Quantity {
    /// Least and most, and whether 0 is one too.
    fn range(self) -> (f64, f64, bool) {
        match self {
            Self::Time => (1e-12, 1e12, true),
            Self::Power => (1e-9, 1e9, true),
            Self::Factor => (1e-3, 1e6, false),
            Self::Weight => (1e-9, 1e9, false),
        }
    }

    /// Whether a number can be one.
    pub fn holds(self, number: f64) -> bool {
        let (least, most, zero) = self.range();
        (least..=most).contains(&number) || zero && number == 0.0
    }

    /// Whether a number can be part of the spread of one: as small as it likes.
    pub fn spreads_to(self, number: f64) -> bool {
        (0.0..=self.range().1).contains(&number)
    }

    /// Checks that a number can be one; `place` tells where it stands.
    ///
    /// # Errors
    /// [`CoreError::BadNumber`].
    pub fn check(self, number: f64, place: impl FnOnce() -> String) -> Result<(), CoreError> {
        if self.holds(number) { Ok(()) } else { Err(self.refused(number, place())) }
    }

    /// The error that a number there is none.
    pub fn refused(self, number: f64, place: String) -> CoreError {
        CoreError::BadNumber { place, value: short(number), what: self.to_string() }
    }
}

/// What it is and how large, for messages: `time (0, or from 1e-12 to 1e12 ms)`.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Time => "time (0, or from 1e-12 to 1e12 ms)",
            Self::Power => "power (0, or from 1e-9 to 1e9 W)",
            Self::Factor => "slowdown factor (from 1e-3 to 1e6)",
            Self::Weight => "weight (from 1e-9 to 1e9)",
        })
    }
}

/// A number without hundreds of zeros.
pub fn short(number: f64) -> String {
    let plain = number == 0.0 || !number.is_finite() || (1e-6..1e9).contains(&number.abs());
    if plain { number.to_string() } else { format!("{number:e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (quantity, inside, outside) in [
            (Quantity::Time, [0.0, 1e-12, 1e12], [-1.0, 1e-13, 1.1e12]),
            (Quantity::Power, [0.0, 1e-9, 1e9], [-0.5, 1e-10, 1e308]),
            (Quantity::Factor, [1e-3, 1.0, 1e6], [0.0, 1e-300, f64::INFINITY]),
            (Quantity::Weight, [1e-9, 1.0, 1e9], [0.0, 1e308, f64::NAN]),
        ] {
            for number in inside {
                assert_eq!(quantity.check(number, String::new), Ok(()), "{quantity}: {number}");
            }
            for number in outside {
                let message = quantity.check(number, || "here".to_owned()).unwrap_err().to_string();
                assert!(message.starts_with(&format!("here holds {}, which is no ", short(number))), "{message}");
                assert!(message.len() < 150, "{message}");
            }
        }
    }
}
