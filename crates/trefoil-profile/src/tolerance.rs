//! When is a result wrong? One rule per element type, with reasons; aware of NaN, infinities, masks and threshold flips.
//!
//! The figure compared is `max |a − b| / peak`, the peak being the largest ordinary magnitude of the reference.
//! "Ordinary" leaves out magnitudes above [`HUGE`]: attention masks hold −3.4e38 or −10⁹, and a peak of that size would
//! excuse any error in the elements that matter. Huge elements are compared relative to themselves.
//!
//! | element type | allowed | why |
//! |---|---|---|
//! | f32, f64 | 2e-3 of peak | reordered sums and fast transcendental functions stay below 1e-4, Winograd below 1e-3; a wrong axis or pad is above 1e-2 |
//! | f16 | 3e-2 of peak | ε is 1e-3, and backends accumulate in f16 or f32 |
//! | bf16 | 6e-2 of peak | ε is 8e-3 |
//! | f32 on a `+f16` or `+bf16` unit | as f16, bf16 | the unit was asked to compute so |
//! | i8, u8 around a quantisation | 1 code | backends round x/scale differently at ties |
//! | floats after a quantisation | at least 3e-2 of peak | one flipped code is 1/127 of peak; several add up |
//! | integers and booleans | exact | |
//!
//! Operators with steps in them (casts, comparisons, rounding, quantisation, arg-max) can flip a whole element when the
//! value before the step differs in its last bit, which is legal inside a fused operator or a segment. For those up to
//! 1 % of the elements may be off; for all others none.

use serde::{Deserialize, Serialize};
use trefoil_core::{DataType, HostTensor, Precision};

/// Magnitudes above this are no part of the peak (see module).
pub const HUGE: f64 = 1e8;

/// Share of elements that may flip behind a step function.
pub const FLIP_SHARE: f64 = 0.01;

/// What the comparison of one operator or segment may forgive; derived from its node types and unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leniency {
    /// Precision that the unit was asked to compute floats in.
    pub precision: Option<Precision>,
    /// Quantised arithmetic is involved.
    pub quantised: bool,
    /// A step function stands behind other arithmetic.
    pub steps: bool,
    /// Some value inside is f16, whatever the outputs' type.
    pub half: bool,
}

/// Node types with steps.
const STEPS: &[&str] = &[
    "ArgMax",
    "ArgMin",
    "Cast",
    "CastLike",
    "Ceil",
    "DynamicQuantizeLinear",
    "Equal",
    "Floor",
    "Greater",
    "GreaterOrEqual",
    "Hardmax",
    "If",
    "Less",
    "LessOrEqual",
    "Loop",
    "Mod",
    "NonMaxSuppression",
    "NonZero",
    "QuantizeLinear",
    "Round",
    "Scan",
    "Sign",
    "TopK",
    "Unique",
];

impl Leniency {
    /// For an operator kind (node types joined with `+`), or several kinds joined the same way.
    pub fn of_kinds<'a>(kinds: impl IntoIterator<Item = &'a str>, precision: Option<Precision>) -> Self {
        let mut leniency = Self { precision, ..Self::default() };
        let (mut nodes, mut bodies) = (0usize, false);
        for kind in kinds.into_iter().flat_map(|kind| kind.split('+')) {
            nodes += 1;
            let bare = kind.rsplit([':', '.']).next().unwrap_or(kind);
            leniency.quantised |= bare.contains("Quantize") || bare.contains("QLinear") || bare.ends_with("Integer");
            leniency.quantised |= bare.starts_with("QGemm") || bare.starts_with("QAttention") || bare.contains("NBits");
            // Long kinds are cut short (`…3 more`), and what is not told may be a step.
            leniency.steps |= STEPS.contains(&bare) || bare.starts_with('…');
            bodies |= matches!(bare, "If" | "Loop" | "Scan");
        }
        // A lone step sees the reference's own inputs, so it has no excuse, unless it hides arithmetic in a body.
        leniency.steps &= nodes > 1 || bodies;
        leniency
    }

    /// The same, knowing whether some value inside is f16.
    #[must_use]
    pub fn with_half(mut self, half: bool) -> Self {
        self.half = half;
        self
    }

    /// Error allowed relative to peak for an output of type `dtype`.
    pub fn tolerance(&self, dtype: DataType) -> f64 {
        let precision = match self.precision {
            Some(Precision::F16) => 3e-2,
            Some(Precision::BF16) => 6e-2,
            Some(Precision::F32) | None => 0.0,
        };
        let own: f64 = match dtype {
            DataType::F32 | DataType::F64 if self.half => 3e-2,
            DataType::F32 | DataType::F64 => 2e-3,
            DataType::F16 => 3e-2,
            DataType::BF16 => 6e-2,
            _ => return 0.0,
        };
        own.max(precision).max(if self.quantised { 3e-2 } else { 0.0 })
    }
}

/// How far a result is from the reference, and whether that is too far. Of several outputs the worst one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Deviation {
    /// `max |a − b| / peak`; [`f64::MAX`] where it is infinite (JSON has no infinity).
    pub error_to_peak: f64,
    /// What is allowed.
    pub tolerance: f64,
    /// What is wrong, in one line; `None` if the result is right.
    pub wrong: Option<String>,
    /// Elements out of tolerance that were forgiven as flips behind a step.
    #[serde(default)]
    pub flips: u64,
}

impl Deviation {
    /// The worse of two: a wrong one before a right one, then by error over tolerance.
    #[must_use]
    pub fn worse(self, other: Self) -> Self {
        let rank = |d: &Self| (d.wrong.is_some(), d.error_to_peak / d.tolerance.max(1e-12));
        if rank(&other) > rank(&self) { other } else { self }
    }
}

/// Compares an output with the reference's. Types are `result`'s port types; a shape difference is wrong.
pub fn compare(result: &HostTensor, reference: &HostTensor, leniency: &Leniency) -> Deviation {
    let (mine, theirs) = (result.info(), reference.info());
    let tolerance = leniency.tolerance(theirs.dtype);
    let name = &mine.name;
    if mine.shape != theirs.shape || mine.dtype != theirs.dtype {
        let wrong = Some(format!(
            "output `{name}` is {}{:?}, the reference {}{:?}",
            mine.dtype, mine.shape, theirs.dtype, theirs.shape
        ));
        return Deviation { error_to_peak: f64::MAX, tolerance, wrong, flips: 0 };
    }
    if result.bytes() == reference.bytes() {
        return Deviation { error_to_peak: 0.0, tolerance, wrong: None, flips: 0 };
    }
    compare_values(name, &result.to_f64(), &reference.to_f64(), theirs.dtype, *leniency)
}

fn compare_values(name: &str, mine: &[f64], theirs: &[f64], dtype: DataType, leniency: Leniency) -> Deviation {
    let tolerance = leniency.tolerance(dtype);
    let peak =
        theirs.iter().map(|value| value.abs()).filter(|&v| v.is_finite() && v < HUGE).fold(0.0f64, f64::max).max(1e-9);
    let code = if leniency.quantised && matches!(dtype, DataType::I8 | DataType::U8) { 1.0 } else { 0.0 };
    let mut worst = 0.0f64;
    let mut worst_at = 0usize;
    let mut off = 0u64;
    let mut not_finite = None;
    for (at, (&a, &b)) in mine.iter().zip(theirs).enumerate() {
        if a.is_finite() && b.is_finite() {
            let scale = if b.abs() < HUGE { peak } else { b.abs() };
            let difference = (a - b).abs();
            let error = difference / scale;
            // A code off by one is right, but still told in the error.
            let allowed = difference <= code || error <= tolerance;
            off += u64::from(!allowed);
            if error > worst {
                (worst, worst_at) = (error, at);
            }
        } else if !(a.is_nan() && b.is_nan() || a.to_bits() == b.to_bits()) {
            // f16 arithmetic may overflow where a wider accumulator does not, and the other way round.
            off += 1;
            not_finite.get_or_insert(at);
        }
    }
    let share = off as f64 / theirs.len().max(1) as f64;
    let forgiven = leniency.steps && share <= FLIP_SHARE;
    let wrong = (off > 0 && !forgiven).then(|| {
        let at = not_finite.unwrap_or(worst_at);
        format!(
            "output `{name}`: {off} of {} elements off, element {at} is {} instead of {}",
            theirs.len(),
            mine[at],
            theirs[at]
        )
    });
    let error_to_peak = if not_finite.is_some() { f64::MAX } else { worst };
    Deviation { error_to_peak, tolerance, wrong, flips: if forgiven { off } else { 0 } }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact values are meant
mod tests {
    use super::*;
    use trefoil_core::TensorInfo;

    fn floats(values: &[f32]) -> HostTensor {
        HostTensor::from_f32("y", [values.len() as u64], values)
    }

    fn bytes(dtype: DataType, values: &[u8]) -> HostTensor {
        HostTensor::from_bytes(TensorInfo::new("y", dtype, [values.len() as u64]), values).unwrap()
    }

    #[test]
    fn rounding_passes_and_a_swapped_axis_does_not() {
        let reference = floats(&[1.0, -4.0, 0.5, 2.0]);
        let plain = Leniency::default();
        assert_eq!(compare(&floats(&[1.001, -4.002, 0.5, 2.0]), &reference, &plain).wrong, None);
        let swapped = compare(&floats(&[1.0, 0.5, -4.0, 2.0]), &reference, &plain);
        assert!(swapped.wrong.unwrap().contains("2 of 4 elements off"));
        assert!((swapped.error_to_peak - 1.125).abs() < 1e-6);
    }

    #[test]
    fn one_wrong_element_in_many_is_wrong_without_a_step() {
        let reference = floats(&vec![1.0; 10_000]);
        let mut values = vec![1.0; 10_000];
        values[77] = 0.0;
        assert!(compare(&floats(&values), &reference, &Leniency::default()).wrong.is_some());
        let steps = Leniency::of_kinds(["Conv+Greater+Cast"], None);
        let forgiven = compare(&floats(&values), &reference, &steps);
        assert_eq!((forgiven.wrong, forgiven.flips), (None, 1));
    }

    #[test]
    fn a_mask_does_not_hide_an_error() {
        let reference = floats(&[f32::MIN, 1.0, 2.0]);
        assert_eq!(compare(&floats(&[f32::MIN, 1.0, 2.001]), &reference, &Leniency::default()).wrong, None);
        assert!(compare(&floats(&[f32::MIN, 1.0, 3.0]), &reference, &Leniency::default()).wrong.is_some());
        assert!(compare(&floats(&[-1e30, 1.0, 2.0]), &reference, &Leniency::default()).wrong.is_some());
    }

    #[test]
    fn not_a_number_must_stand_at_the_same_places() {
        let reference = floats(&[f32::NAN, f32::INFINITY, 1.0]);
        assert_eq!(compare(&floats(&[f32::NAN, f32::INFINITY, 1.0]), &reference, &Leniency::default()).wrong, None);
        for bad in [[0.0, f32::INFINITY, 1.0], [f32::NAN, f32::NEG_INFINITY, 1.0], [f32::NAN, f32::INFINITY, f32::NAN]]
        {
            let deviation = compare(&floats(&bad), &reference, &Leniency::default());
            assert!(deviation.wrong.is_some() && deviation.error_to_peak == f64::MAX, "{bad:?}");
        }
    }

    #[test]
    fn codes_may_be_off_by_one_only_when_quantised() {
        let reference = bytes(DataType::U8, &[10, 200, 30]);
        let quantised = Leniency::of_kinds(["QLinearConv"], None);
        assert_eq!(compare(&bytes(DataType::U8, &[11, 199, 30]), &reference, &quantised).wrong, None);
        assert!(compare(&bytes(DataType::U8, &[12, 200, 30]), &reference, &quantised).wrong.is_some());
        assert!(compare(&bytes(DataType::U8, &[11, 200, 30]), &reference, &Leniency::default()).wrong.is_some());
    }

    #[test]
    fn integers_and_shapes_are_exact() {
        let reference = HostTensor::from_i64("y", [2u64], &[3, 1 << 40]);
        assert!(
            compare(&HostTensor::from_i64("y", [2u64], &[3, (1 << 40) + 1]), &reference, &Leniency::default())
                .wrong
                .is_some()
        );
        let other = compare(&HostTensor::from_i64("y", [1u64, 2], &[3, 1 << 40]), &reference, &Leniency::default());
        assert_eq!(other.wrong.unwrap(), "output `y` is i64[1, 2], the reference i64[2]");
    }

    #[test]
    fn leniency_follows_types_and_precision() {
        let of = |kind| Leniency::of_kinds([kind], None);
        assert!(!of("Cast").steps, "a lone step sees the reference's own inputs");
        assert!(of("MatMul+Cast").steps && !of("MatMul+Add").steps);
        assert!(of("DequantizeLinear+MatMul+QuantizeLinear").quantised && of("com.microsoft.QLinearAdd").quantised);
        assert!(of("com.microsoft.MatMulNBits").quantised);
        assert!(of("Loop").steps && of("Conv+…3 more").steps);
        assert_eq!(of("Conv").tolerance(DataType::F32), 2e-3);
        let half = Leniency::of_kinds(["Conv"], Some(Precision::F16));
        assert_eq!((half.tolerance(DataType::F32), half.tolerance(DataType::I64)), (3e-2, 0.0));
    }
}
