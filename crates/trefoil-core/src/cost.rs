//! Cost tables: what planners see of a profile. Every cost carries the measurement ids it came from.

use crate::{
    CoreError, MeasurementId, OperatorGraph, OperatorId, Origin, Outcome, Profile, Samples, Subject, UnitAddress,
};
use serde::{Deserialize, Serialize};

/// Time (and power, where known) of one thing on one unit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Dispatch plus execution in milliseconds: `w(i,j)`.
    pub ms: f64,
    /// Making the operator's inputs available to the unit, in milliseconds; `None` when the backend cannot tell.
    pub h2d_ms: Option<f64>,
    /// Making its outputs available to the host; `None` when the backend cannot tell.
    pub d2h_ms: Option<f64>,
    /// The measurements behind the numbers.
    pub ids: Vec<MeasurementId>,
    /// How they were got.
    pub origin: Origin,
}

/// `T(t, from, to)` as measured at several sizes: piecewise linear in bytes, constant below the smallest size, and
/// with the last two points' slope above the largest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransferCost {
    /// `(bytes, milliseconds)`, ascending in bytes. Empty means never measured.
    pub points: Vec<(u64, f64)>,
    /// The measurements behind the points.
    pub ids: Vec<MeasurementId>,
    /// How they were got.
    pub origin: Origin,
}

impl TransferCost {
    /// Milliseconds to hand over `bytes`.
    pub fn ms(&self, bytes: u64) -> f64 {
        let points = &self.points;
        let Some(&(first_bytes, first_ms)) = points.first() else { return 0.0 };
        if points.len() == 1 || bytes <= first_bytes {
            return first_ms;
        }
        let upper = points.partition_point(|&(size, _)| size < bytes).clamp(1, points.len() - 1);
        let ((x0, y0), (x1, y1)) = (points[upper - 1], points[upper]);
        if x1 == x0 {
            return y1;
        }
        let slope = (y1 - y0) / (x1 - x0) as f64;
        (y0 + slope * (bytes as f64 - x0 as f64)).max(0.0)
    }
}

/// The view of a profile that planners of one model use: operators × units, and transfers between units.
#[derive(Debug, Clone)]
pub struct CostTable {
    /// Columns.
    pub units: Vec<UnitAddress>,
    /// Whether each column is an accelerator.
    pub accelerator: Vec<bool>,
    /// Power of each unit in watts while it works, where known.
    pub watts: Vec<Option<f64>>,
    /// Package power in watts while nothing runs, where known.
    pub idle_watts: Option<f64>,
    /// Row-major operators × units; `None` where the operator does not compile, run or compute rightly.
    pub costs: Vec<Option<Cost>>,
    /// Row-major from × to.
    pub transfers: Vec<TransferCost>,
}

impl CostTable {
    /// The view of `profile` for `graph` on `units` (all of the profile's units when empty).
    ///
    /// # Errors
    /// [`CoreError::MissingMeasurement`] when an operator has neither a cost nor a failure on a unit,
    /// [`CoreError::MissingTransfer`] when a unit pair has no transfer; [`CoreError::Unplaceable`] when an operator runs
    /// nowhere; [`CoreError::UnknownUnit`].
    pub fn from_profile(profile: &Profile, graph: &OperatorGraph, units: &[UnitAddress]) -> Result<Self, CoreError> {
        Self::from_index(&profile.index(), graph, units)
    }

    /// The same from an index made before.
    ///
    /// # Errors
    /// As for [`CostTable::from_profile`].
    pub fn from_index(
        index: &crate::profile::ProfileIndex<'_>,
        graph: &OperatorGraph,
        units: &[UnitAddress],
    ) -> Result<Self, CoreError> {
        let profile = index.profile;
        let units: Vec<UnitAddress> = if units.is_empty() {
            profile.units.iter().map(|unit| unit.address.clone()).collect()
        } else {
            units.to_vec()
        };
        let mut accelerator = Vec::new();
        let mut watts = Vec::new();
        for address in &units {
            accelerator.push(profile.unit(address)?.kind.is_accelerator());
            let measured =
                index.newest(&Subject::Power, std::slice::from_ref(address)).and_then(|m| match &m.outcome {
                    Outcome::Value { value } => Some(value.median),
                    _ => None,
                });
            watts.push(measured.or_else(|| profile.declared_watts.get(&address.to_string()).copied()));
        }
        let mut costs = Vec::with_capacity(graph.len() * units.len());
        for (row, operator) in graph.operators.iter().enumerate() {
            let subject = Subject::Operator { signature: operator.signature.clone() };
            let mut reasons = Vec::new();
            for address in &units {
                let key = std::slice::from_ref(address);
                let Some(measurement) = index.newest(&subject, key) else {
                    return Err(CoreError::MissingMeasurement {
                        id: MeasurementId::new(&subject, key, 0).0,
                        operator: row as u32,
                        name: operator.name.clone(),
                        kind: operator.kind.clone(),
                        unit: address.to_string(),
                    });
                };
                if let Some(reason) = measurement.failure() {
                    reasons.push(format!("{address}: {reason}"));
                }
                costs.push(measurement_cost(measurement));
            }
            if costs[row * units.len()..].iter().all(Option::is_none) {
                return Err(CoreError::Unplaceable {
                    operator: row as u32,
                    name: operator.name.clone(),
                    kind: operator.kind.clone(),
                    reasons: reasons.join("; "),
                });
            }
        }
        let mut transfers = Vec::new();
        let pairs: Vec<&crate::Measurement> =
            index.newest_of(|subject| matches!(subject, Subject::Transfer { .. })).collect();
        for from in &units {
            for to in &units {
                transfers.push(transfer_cost(&pairs, from, to)?);
            }
        }
        Ok(Self {
            units,
            accelerator,
            watts,
            idle_watts: profile.declared_watts.get("idle").copied(),
            costs,
            transfers,
        })
    }

    /// Number of units.
    pub fn unit_count(&self) -> usize {
        self.units.len()
    }

    /// `w(operator, unit)`, `None` where it cannot run.
    pub fn cost(&self, operator: OperatorId, unit: usize) -> Option<&Cost> {
        self.costs[operator.index() * self.units.len() + unit].as_ref()
    }

    /// `T(·, from, to)`.
    pub fn transfer(&self, from: usize, to: usize) -> &TransferCost {
        &self.transfers[from * self.units.len() + to]
    }
}

/// A cost from a measurement that ran: total time, with h2d and d2h split off where the backend tells them.
pub fn measurement_cost(measurement: &crate::Measurement) -> Option<Cost> {
    let Outcome::Ok { timing, .. } = &measurement.outcome else { return None };
    let median = |samples: &Option<Samples>| samples.as_ref().map(|samples| samples.median);
    let parts = match (median(&timing.dispatch), median(&timing.exec)) {
        (None, None) => None,
        (dispatch, exec) => Some(dispatch.unwrap_or(0.0) + exec.unwrap_or(0.0)),
    };
    // The caller-side total is what a plan really pays; device-side parts stand in only when there is no total.
    let ms = median(&timing.total).or(parts)?;
    Some(Cost {
        ms,
        h2d_ms: median(&timing.h2d),
        d2h_ms: median(&timing.d2h),
        ids: vec![measurement.id.clone()],
        origin: measurement.origin,
    })
}

fn transfer_cost(
    records: &[&crate::Measurement],
    from: &UnitAddress,
    to: &UnitAddress,
) -> Result<TransferCost, CoreError> {
    if from == to {
        return Ok(TransferCost { points: vec![(0, 0.0)], ids: Vec::new(), origin: Origin::Measured });
    }
    let pair = [from.clone(), to.clone()];
    let mut points = Vec::new();
    let mut ids = Vec::new();
    let mut origin = Origin::Measured;
    for measurement in records.iter().filter(|record| record.units == pair) {
        if let (Subject::Transfer { bytes }, Some(total)) = (&measurement.subject, measurement.total()) {
            points.push((*bytes, total.median));
            ids.push(measurement.id.clone());
            origin = measurement.origin;
        }
    }
    if points.is_empty() {
        return Err(CoreError::MissingTransfer { from: from.to_string(), to: to.to_string() });
    }
    points.sort_unstable_by_key(|&(bytes, _)| bytes);
    Ok(TransferCost { points, ids, origin })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Conditions, Machine, Measurement, OperatorClass, Timing, Unit, UnitKind, UnitLimits};

    fn transfer(points: &[(u64, f64)]) -> TransferCost {
        TransferCost { points: points.to_vec(), ids: Vec::new(), origin: Origin::Measured }
    }

    #[test]
    fn transfers_interpolate_and_extrapolate() {
        let cost = transfer(&[(0, 1.0), (100, 2.0), (200, 4.0)]);
        assert_eq!([cost.ms(0), cost.ms(50), cost.ms(100), cost.ms(150), cost.ms(300)], [1.0, 1.5, 2.0, 3.0, 6.0]);
        assert_eq!(transfer(&[]).ms(5), 0.0);
        assert_eq!(transfer(&[(10, 3.0)]).ms(500), 3.0);
    }

    fn sample_profile() -> Profile {
        let graph = crate::graph::tests::from_edges(2, &[(0, 1)], 16);
        let machine = Machine {
            cpu: "test".into(),
            cores: vec![0],
            memory_bytes: 1,
            os: "test".into(),
            features: Vec::new(),
            versions: std::collections::BTreeMap::default(),
        };
        let mut profile = Profile::new(machine);
        let address: UnitAddress = "rten:CPU".parse().unwrap();
        profile.units.push(Unit {
            address: address.clone(),
            kind: UnitKind::Cpu,
            resources: std::collections::BTreeSet::default(),
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        });
        for operator in &graph.operators {
            let subject = Subject::Operator { signature: operator.signature.clone() };
            profile.measurements.push(Measurement {
                id: MeasurementId::new(&subject, std::slice::from_ref(&address), 0),
                subject,
                units: vec![address.clone()],
                origin: Origin::Measured,
                outcome: Outcome::Ok {
                    timing: Timing { total: Some(Samples::exactly(1.0)), ..Timing::default() },
                    error_to_peak: None,
                    nodes: Vec::new(),
                },
                conditions: Conditions::default(),
                versions: std::collections::BTreeMap::default(),
                taken_at: String::new(),
            });
        }
        profile.models.push(graph);
        profile
    }

    #[test]
    fn a_deleted_measurement_is_named() {
        let mut profile = sample_profile();
        let table = CostTable::from_profile(&profile, &profile.models[0], &[]).unwrap();
        let id = table.cost(OperatorId(1), 0).unwrap().ids[0].clone();
        profile.measurements.retain(|measurement| measurement.id != id);
        let error = CostTable::from_profile(&profile, &profile.models[0], &[]).unwrap_err();
        assert!(error.to_string().contains(&id.0), "{error}");
    }

    #[test]
    fn the_newest_record_wins() {
        let mut profile = sample_profile();
        let mut again = profile.measurements[0].clone();
        again.id = profile.next_id(&again.subject, &again.units);
        again.outcome = Outcome::Failed { stage: "crash".into(), reason: "signal 11".into() };
        profile.measurements.push(again);
        let error = CostTable::from_profile(&profile, &profile.models[0], &[]).unwrap_err();
        assert!(error.to_string().contains("crash: signal 11"), "{error}");
    }

    #[test]
    fn bad_numbers_are_named() {
        for bad in [-1.0, 1e308, 1e-300, f64::INFINITY, f64::NAN] {
            let mut profile = sample_profile();
            if let Outcome::Ok { timing, .. } = &mut profile.measurements[1].outcome {
                timing.total = Some(Samples::exactly(bad));
            }
            let message = profile.validate().unwrap_err().to_string();
            let told = format!("of operator 1 `op1` (Relu) holds {}, which is no time", crate::quantity::short(bad));
            assert!(message.contains(&told), "{message}");
        }
        for (subject, bad, told) in [
            (Subject::Power, 1e308, "holds 1e308, which is no power"),
            (
                Subject::Slowdown { class: OperatorClass::Memory, interference: OperatorClass::Memory },
                1e-300,
                "holds 1e-300, which is no slowdown factor",
            ),
        ] {
            let mut profile = sample_profile();
            let record = Measurement {
                subject,
                outcome: Outcome::Value { value: Samples::exactly(bad) },
                ..profile.measurements[0].clone()
            };
            profile.measurements.push(record);
            let message = profile.validate().unwrap_err().to_string();
            assert!(message.contains(told), "{message}");
        }
        let mut profile = sample_profile();
        profile.measurements[1].subject = Subject::Transfer { bytes: 1 << 54 };
        let message = profile.validate().unwrap_err().to_string();
        assert!(message.contains("holds 18014398509481984, which is no number of bytes"), "{message}");
        let mut profile = sample_profile();
        profile.declared_watts.insert("rten:CPU".to_owned(), 1e308);
        let message = profile.validate().unwrap_err().to_string();
        assert!(message.contains("declared power of rten:CPU holds 1e308"), "{message}");
    }

    #[test]
    fn a_missing_transfer_asks_for_profiling() {
        let mut profile = sample_profile();
        let other = "ort:CPU".parse().unwrap();
        profile.units.push(Unit { address: other, ..profile.units[0].clone() });
        for at in 0..2 {
            let mut record = profile.measurements[at].clone();
            record.units = vec![profile.units[1].address.clone()];
            profile.measurements.push(record);
        }
        let message = CostTable::from_profile(&profile, &profile.models[0], &[]).unwrap_err().to_string();
        assert!(message.contains("from rten:CPU to ort:CPU; run `trefoil profile` again"), "{message}");
    }
}
