//! Measurements: append-only records that every cost in a plan traces to.

use crate::{Granularity, OperatorClass, OperatorId, Signature, UnitAddress};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Name of a measurement: its subject, its unit(s) and a running number, readable as text:
/// `operator/3fa9…|openvino:CPU@0-1#0`. Deterministic, so that a missing one can be named.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MeasurementId(pub String);

impl MeasurementId {
    /// The id of the `number`-th measurement of `subject` on `units`.
    pub fn new(subject: &Subject, units: &[UnitAddress], number: u32) -> Self {
        let units: Vec<_> = units.iter().map(ToString::to_string).collect();
        Self(format!("{}|{}#{number}", subject.key(), units.join("|")))
    }
}

impl fmt::Display for MeasurementId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How a number was got. Printed with it wherever it shows; none looks like another (DESIGN: honesty rules).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Timed on the unit itself.
    Measured,
    /// Timed on a real engine slowed on purpose to a stated rate.
    Emulated,
    /// From a machine description.
    Simulated,
    /// Stated by the user.
    Declared,
    /// Computed from other numbers by a model.
    Predicted,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Measured => "measured",
            Self::Emulated => "emulated",
            Self::Simulated => "simulated",
            Self::Declared => "declared",
            Self::Predicted => "predicted",
        })
    }
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Subject {
    /// One operator alone, by signature (so that equal operators of any model share it).
    Operator {
        /// Its signature.
        signature: Signature,
    },
    /// A convex set of operators compiled as one sub-model.
    Segment {
        /// Fingerprint of the prepared model.
        model: String,
        /// Granularity the operator ids belong to.
        granularity: Granularity,
        /// The operators, ascending.
        operators: Vec<OperatorId>,
    },
    /// A whole model in one piece.
    WholeModel {
        /// Fingerprint of the prepared model.
        model: String,
    },
    /// Handing a tensor of `bytes` from the first unit to the second.
    Transfer {
        /// Tensor size.
        bytes: u64,
    },
    /// Slowdown of the first unit's work while the second unit works.
    Slowdown {
        /// Class of the slowed operator.
        class: OperatorClass,
        /// Class of the interfering operator.
        interference: OperatorClass,
    },
    /// Two subjects started together on their units.
    CoRun {
        /// Keys of the subjects, in unit order.
        subjects: Vec<String>,
    },
    /// Consecutive blocks of a block-structured model (video).
    BlockRange {
        /// Artefact fingerprint.
        model: String,
        /// First block execution.
        first: u32,
        /// How many.
        count: u32,
    },
    /// Power drawn while the unit works.
    Power,
}

impl Subject {
    /// Text form used in ids. Distinct for distinct subjects.
    pub fn key(&self) -> String {
        match self {
            Self::Operator { signature } => format!("operator/{signature}"),
            Self::Segment { model, granularity, operators } => {
                format!("segment/{model}/{granularity}/{}", compact_ids(operators))
            }
            Self::WholeModel { model } => format!("model/{model}"),
            Self::Transfer { bytes } => format!("transfer/{bytes}"),
            Self::Slowdown { class, interference } => format!("slowdown/{class:?}/{interference:?}").to_lowercase(),
            Self::CoRun { subjects } => format!("corun/{}", subjects.join("&")),
            Self::BlockRange { model, first, count } => format!("blocks/{model}/{first}+{count}"),
            Self::Power => "power".to_owned(),
        }
    }
}

/// `0-3,7` for `[0, 1, 2, 3, 7]`.
fn compact_ids(ids: &[OperatorId]) -> String {
    let mut parts = Vec::new();
    let mut rest = ids;
    while let Some(&first) = rest.first() {
        let run = rest.iter().zip(first.0..).take_while(|(id, expected)| id.0 == *expected).count();
        parts.push(if run == 1 { first.to_string() } else { format!("{first}-{}", rest[run - 1]) });
        rest = &rest[run..];
    }
    parts.join(",")
}

/// A timing as a distribution: median with its spread and count. Milliseconds (watts for power, a ratio for slowdown).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// Number of samples.
    pub count: u32,
    /// Median.
    pub median: f64,
    /// 10th percentile.
    pub p10: f64,
    /// 90th percentile.
    pub p90: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl Samples {
    /// Summarises raw samples; `None` if there are none. Sorts `values`.
    pub fn from_values(values: &mut [f64]) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let at = |fraction: f64| {
            let position = fraction * (values.len() - 1) as f64;
            let (low, weight) = (position.floor() as usize, position.fract());
            let high = (low + 1).min(values.len() - 1);
            values[low] * (1.0 - weight) + values[high] * weight
        };
        Some(Self {
            count: values.len() as u32,
            median: at(0.5),
            p10: at(0.1),
            p90: at(0.9),
            min: values[0],
            max: values[values.len() - 1],
        })
    }

    /// A single stated value (declared or simulated numbers).
    pub fn exactly(value: f64) -> Self {
        Self { count: 1, median: value, p10: value, p90: value, min: value, max: value }
    }

    /// Spread (p90 − p10) relative to the median; 0 when the median is 0.
    pub fn spread(&self) -> f64 {
        if self.median > 0.0 { (self.p90 - self.p10) / self.median } else { 0.0 }
    }
}

/// Spread above which a measurement is flagged as noisy.
pub const NOISY_SPREAD: f64 = 0.30;

/// Parts of one execution's time. A part that the backend cannot tell is `None`, never invented.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Submit to completion as the caller sees it: dispatch and execution, and any copy the backend does inside.
    pub total: Option<Samples>,
    /// Making inputs available to the unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub h2d: Option<Samples>,
    /// Submitting to the unit's queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch: Option<Samples>,
    /// Computing on the unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec: Option<Samples>,
    /// Making outputs available to the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d2h: Option<Samples>,
}

/// Time of one node or fused kernel as a backend's own profiling reports it while the whole model runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeTime {
    /// The backend's name for it (often the last fused ONNX node's name or output).
    pub name: String,
    /// The backend's type name.
    pub kind: String,
    /// Milliseconds.
    pub ms: f64,
    /// Operators of the graph it was matched to; empty if it could not be matched.
    #[serde(default)]
    pub operators: Vec<OperatorId>,
}

/// What came of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case")]
// Nearly every record is `Ok`; boxing it would cost an allocation each to make the rare ones small.
#[allow(clippy::large_enum_variant)]
pub enum Outcome {
    /// It ran.
    Ok {
        /// Time parts.
        timing: Timing,
        /// Error against the reference, relative to its peak; `None` when nothing could be compared.
        #[serde(default)]
        error_to_peak: Option<f64>,
        /// In-situ node times, where the backend reports them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        nodes: Vec<NodeTime>,
    },
    /// It ran and computed something else than the reference.
    Wrong {
        /// Error found.
        error_to_peak: f64,
        /// Error allowed.
        tolerance: f64,
        /// Which output and what was seen.
        reason: String,
    },
    /// It did not compile, run or survive.
    Failed {
        /// Where: `extract`, `compile`, `bind`, `run`, `crash`, `timeout`, `limit`.
        stage: String,
        /// The backend's message in one line.
        reason: String,
    },
    /// A plain value: a slowdown factor (ratio) or a power (watts).
    Value {
        /// The samples.
        value: Samples,
    },
}

/// Under which conditions samples were taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Warm-up runs before the samples.
    pub warmup: u32,
    /// Samples asked for (fewer may have been taken, see [`Samples::count`]).
    pub runs: u32,
    /// Wall-clock cap in milliseconds, if one applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap_ms: Option<f64>,
    /// One-minute load average of the machine when the measurement began, where readable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// Whether denormals were flushed to zero.
    #[serde(default)]
    pub denormals_flushed: bool,
    /// Whether the samples come from a process that measured nothing else.
    #[serde(default)]
    pub fresh_process: bool,
}

/// One append-only record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Its name.
    pub id: MeasurementId,
    /// What.
    pub subject: Subject,
    /// Where; two units for transfers (from, to), slowdowns (slowed, interfering) and co-runs.
    pub units: Vec<UnitAddress>,
    /// How it was got.
    pub origin: Origin,
    /// What came of it.
    pub outcome: Outcome,
    /// Conditions.
    #[serde(default)]
    pub conditions: Conditions,
    /// Backend and library versions that the number depends on.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// When, RFC 3339 UTC.
    pub taken_at: String,
}

impl Measurement {
    /// The total time, if it ran.
    pub fn total(&self) -> Option<&Samples> {
        match &self.outcome {
            Outcome::Ok { timing, .. } => timing.total.as_ref(),
            _ => None,
        }
    }

    /// Why it has no time, in one line; `None` if it has.
    pub fn failure(&self) -> Option<String> {
        match &self.outcome {
            Outcome::Ok { .. } | Outcome::Value { .. } => None,
            Outcome::Wrong { error_to_peak, tolerance, reason } => {
                Some(format!("computes wrongly: {reason} (error {error_to_peak:.2e} of peak, allowed {tolerance:.0e})"))
            }
            Outcome::Failed { stage, reason } => Some(format!("{stage}: {reason}")),
        }
    }

    /// Whether the spread is over [`NOISY_SPREAD`].
    pub fn is_noisy(&self) -> bool {
        self.total().is_some_and(|samples| samples.count > 4 && samples.spread() > NOISY_SPREAD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_readable_and_deterministic() {
        let subject = Subject::Segment {
            model: "abc".into(),
            granularity: Granularity::Fused,
            operators: [0, 1, 2, 5].map(OperatorId).to_vec(),
        };
        let unit = "ort:CPU@0".parse().unwrap();
        assert_eq!(MeasurementId::new(&subject, &[unit], 2).0, "segment/abc/fused/0-2,5|ort:CPU@0#2");
    }

    #[test]
    fn samples_interpolate_percentiles() {
        let samples = Samples::from_values(&mut [5.0, 1.0, 2.0, 4.0, 3.0]).unwrap();
        assert_eq!((samples.median, samples.min, samples.max, samples.count), (3.0, 1.0, 5.0, 5));
        assert!((samples.p10 - 1.4).abs() < 1e-12 && (samples.p90 - 4.6).abs() < 1e-12);
        assert!(Samples::from_values(&mut []).is_none());
    }

    #[test]
    fn absent_parts_stay_absent_in_json() {
        let timing = Timing { total: Some(Samples::exactly(1.0)), ..Timing::default() };
        let json = serde_json::to_string(&timing).unwrap();
        assert!(!json.contains("h2d") && !json.contains("exec"), "{json}");
        assert_eq!(serde_json::from_str::<Timing>(&json).unwrap(), timing);
    }
}
