//! Which numbers make sense: sums and products of infinities are close to anything, so no file may state numbers that lead to one.
//!
//! The ranges are those of `docs/src/formats.md`: planners refuse the same.

use crate::CheckError;
use crate::json::{Reader, text};
use crate::machine::Machine;
use serde_json::Value;

const PROFILE: Reader = Reader("profile");

/// Most bytes of a model's weights, and of its tensors: what numbers hold exactly.
const MOST_BYTES: f64 = 9_007_199_254_740_992.0;
/// Most that any number of a certificate is, either side of 0.
const MOST: f64 = 1e24;
/// How many times what is proven any term that cancels may be.
const LARGEST_TERM: f64 = 1e6;
/// Least and most that a request can weigh.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-9..=1e9;

/// 0, or from `least` to `most`.
fn is_time(ms: f64) -> bool {
    ms == 0.0 || (1e-12..=1e12).contains(&ms)
}

fn is_power(watts: f64) -> bool {
    watts == 0.0 || (1e-9..=1e9).contains(&watts)
}

/// No number of a certificate is too large to be added up and multiplied.
pub fn certificate(value: &Value) -> Result<(), CheckError> {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(known) if known.abs() <= MOST => Ok(()),
            _ => Err(Reader("certificate").fail(format!("it states {number}, which nothing it tells of can be"))),
        },
        Value::Array(list) => list.iter().try_for_each(certificate),
        Value::Object(fields) => fields.values().try_for_each(certificate),
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

/// No term of a proof that others are to cancel, a payment or what a unit's memory is worth, is so much larger than what is proven that
/// rounding it could prove something.
pub fn witness(proof: &Value, stated: f64, machine: &Machine) -> Result<(), CheckError> {
    // Payments for energy are in millijoules.
    let payments_in = if text(proof, "kind") == Some("energy") { 1e3 } else { 1.0 };
    let paid = proof["payments"].as_array().into_iter().flatten();
    let paid = paid.flat_map(|payment| payment["paid"].as_array().into_iter().flatten());
    let paid = paid.filter_map(Value::as_f64).map(|paid| paid.abs() / payments_in);
    let worth =
        machine.units.iter().filter_map(|unit| Some(proof["memory"][&unit.address].as_f64()? * unit.memory_bytes?));
    match paid.chain(worth).find(|&term| term > LARGEST_TERM * stated) {
        Some(term) if stated > 0.0 => {
            Err(CheckError::Bound(format!("a term of {term:e} is rounded by more than may count in {stated}")))
        }
        _ => Ok(()),
    }
}

/// Times, powers, factors and bytes of a profile are ones.
pub fn profile(value: &Value) -> Result<(), CheckError> {
    for (number, record) in PROFILE.list(value, "measurements")?.iter().enumerate() {
        let (subject, outcome) = (&record["subject"], &record["outcome"]);
        let fail = |what: &str, found: &Value| {
            let id = text(record, "id").unwrap_or("without id");
            Err(PROFILE.fail(format!("measurement {number} (`{id}`) holds {found}, which is no {what}")))
        };
        for part in ["total", "h2d", "dispatch", "exec", "d2h"] {
            let found = &outcome["timing"][part]["median"];
            if found.is_number() && !found.as_f64().is_some_and(is_time) {
                return fail("time", found);
            }
        }
        for node in outcome["nodes"].as_array().into_iter().flatten() {
            if !node["ms"].as_f64().is_none_or(is_time) {
                return fail("time", &node["ms"]);
            }
        }
        let bytes = &subject["bytes"];
        let is_size = |bytes: &Value| bytes.as_u64().is_some_and(|bytes| bytes as f64 <= MOST_BYTES);
        if text(subject, "kind") == Some("transfer") && !is_size(bytes) {
            return fail("number of bytes", bytes);
        }
        let found = &outcome["value"]["median"];
        let is_factor = |factor: f64| (1e-3..=1e6).contains(&factor);
        match (text(subject, "kind"), found.as_f64()) {
            (Some("power"), Some(watts)) if !is_power(watts) => return fail("power", found),
            (Some("slowdown"), Some(factor)) if !is_factor(factor) => return fail("slowdown factor", found),
            _ => {}
        }
    }
    for (name, watts) in value["declared_watts"].as_object().into_iter().flatten() {
        if !watts.as_f64().is_some_and(is_power) {
            return Err(PROFILE.fail(format!("the declared power of {name} is {watts}, which is no power")));
        }
    }
    for model in PROFILE.list(value, "models")? {
        for (key, bytes) in [("operators", "weight_bytes"), ("tensors", "bytes")] {
            let mut total = 0.0;
            for item in PROFILE.list(model, key)? {
                let own = item.get(bytes).map_or(Some(0), Value::as_u64);
                total += own.map_or(f64::INFINITY, |own| own as f64);
                if total > MOST_BYTES {
                    let (name, stated) = (text(item, "name").unwrap_or_default(), &item[bytes]);
                    return Err(PROFILE.fail(format!(
                        "`{name}` has `{bytes}` {stated}, with which those of all {key} are no bytes that can be added up"
                    )));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn certificates_state_no_endless_numbers() {
        assert_eq!(certificate(&json!({ "a": [1, -2.5e20, { "b": 0 }], "c": null, "d": "1e308" })), Ok(()));
        for bad in [json!({ "a": [{ "b": 1e308 }] }), json!([-1e25])] {
            assert!(certificate(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn profiles_hold_times_powers_factors_and_bytes() {
        let with = |measurement: Value, watts: f64, weights: u64| {
            profile(&json!({
                "measurements": [measurement],
                "declared_watts": { "idle": watts },
                "models": [{
                    "operators": [{ "name": "op0", "weight_bytes": weights }, { "name": "op1", "weight_bytes": weights }],
                    "tensors": [],
                }],
            }))
        };
        let time = |ms: f64| json!({ "id": "m", "outcome": { "timing": { "h2d": { "median": ms } } } });
        let value = |kind: &str, value: f64| json!({ "id": "m", "subject": { "kind": kind }, "outcome": { "value": { "median": value } } });
        for right in [time(0.0), time(3.5), value("slowdown", 0.5), value("power", 0.0)] {
            assert_eq!(with(right.clone(), 5.0, 1 << 52), Ok(()), "{right}");
        }
        let transfer = |bytes: Value| json!({ "subject": { "kind": "transfer", "bytes": bytes } });
        assert_eq!(with(transfer(json!(4096)), 5.0, 1), Ok(()));
        for wrong in [
            with(transfer(json!(1e308)), 5.0, 1),
            with(transfer(json!(0.5)), 5.0, 1),
            with(transfer(json!(1u64 << 60)), 5.0, 1),
            with(time(-1.0), 5.0, 1),
            with(time(1e308), 5.0, 1),
            with(value("slowdown", 1e-300), 5.0, 1),
            with(value("power", 1e308), 5.0, 1),
            with(time(1.0), 1e308, 1),
            with(time(1.0), 5.0, 1 << 63),
        ] {
            assert!(wrong.is_err());
        }
    }
}
