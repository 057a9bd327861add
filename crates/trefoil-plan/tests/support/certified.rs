//! Certificates as JSON: making, checking and forging them.

use serde_json::{Value, json};
use trefoil_check::{CheckError, Verdict, check};
use trefoil_core::{Plan, Profile};
use trefoil_plan::{PlanRequest, certificate};

/// A profile as the checker reads it.
pub fn value(profile: &Profile) -> Value {
    serde_json::to_value(profile).unwrap()
}

/// A plan's certificate.
pub fn paper(requests: &[PlanRequest<'_>], plan: &Plan) -> Value {
    serde_json::to_value(certificate(requests, plan).unwrap()).unwrap()
}

/// The first proof of a kind.
pub fn proof<'p>(paper: &'p mut Value, kind: &str) -> &'p mut Value {
    let proofs = paper["bound"]["proofs"].as_array_mut().unwrap();
    proofs.iter_mut().find(|proof| proof["kind"] == kind).unwrap_or_else(|| panic!("no proof `{kind}`"))
}

/// Whether a kind of proof was verified.
pub fn has(verdict: &Verdict, kind: &str) -> bool {
    verdict.proofs.iter().any(|proof| proof == kind)
}

/// Multiplies a number.
pub fn scale(value: &mut Value, factor: f64) {
    *value = json!(value.as_f64().unwrap() * factor);
}

/// Applies a change to a certificate and expects the checker to refuse it.
pub fn refused(paper: &Value, profiles: &[Value], what: &str, tamper: impl Fn(&mut Value)) -> CheckError {
    let mut forged = paper.clone();
    tamper(&mut forged);
    assert_ne!(&forged, paper, "{what} changes something");
    match check(&forged, profiles) {
        Ok(verdict) => panic!("{what} passes: {verdict:?}"),
        Err(error) => error,
    }
}

/// The same, expecting that a bound is refused.
pub fn bound_refused(paper: &Value, profiles: &[Value], what: &str, tamper: impl Fn(&mut Value)) {
    let error = refused(paper, profiles, what, tamper);
    assert!(matches!(error, CheckError::Bound(_)), "{what}: {error}");
}
