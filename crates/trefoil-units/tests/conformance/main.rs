//! The conformance suite: what every backend must do, checked on every unit present.
//!
//! Each unit is checked in a process of its own, so that a crash is a finding about one unit (and its name and check
//! are printed) and not the end of the suite. Failures that are known and listed in [`deviations`] must fail as listed.
//! The result is a table, printed past the test harness's capture.
//!
//! With `TREFOIL_REQUIRE_BACKENDS=1` a backend that is missing fails the suite; otherwise it is skipped with a message.
//! `TREFOIL_CONFORMANCE_ONLY=rten:CPU@0` checks one unit, `TREFOIL_CONFORMANCE_CHECK=dft` the checks whose names hold that.

mod bench;
mod case;
mod deviations;
mod lifetime;
#[path = "../libraries/npz.rs"]
mod npz;
mod numerics;
mod ports;

use deviations::Deviation;
use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};
use trefoil_core::{Unit, UnitAddress, UnitKind};
use trefoil_units::{Availability, Backend, allowed_cores, enter_unit};

/// What is checked.
pub struct Subject {
    /// A backend whose library is present.
    pub backend: &'static dyn Backend,
    /// One of its units, usable here.
    pub unit: Unit,
}

/// Passed (`None`), not applicable with the reason, or failed with the reason.
pub type Verdict = Result<Option<String>, String>;

/// `Err(reason)` unless `condition`.
pub fn ensure(condition: bool, reason: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(reason()) }
}

type Check = fn(&Subject) -> Verdict;

/// Checks that are not about one operator's numbers.
const CHECKS: &[(&str, Check)] = &[
    ("ports/changed inputs are seen", ports::changed_inputs_are_seen),
    ("ports/booleans are 0 or 1", ports::booleans_are_zero_or_one),
    ("ports/rebinding", ports::rebinding),
    ("ports/chained through one buffer", ports::chained_through_one_buffer),
    ("ports/unbound is an error", ports::unbound_is_an_error),
    ("ports/wrong buffers are refused", ports::wrong_buffers_are_refused),
    ("ports/wrong ports are refused", ports::wrong_ports_are_refused),
    ("ports/unknown names are refused", ports::unknown_names_are_refused),
    ("ports/broken files are refused", ports::broken_files_are_refused),
    ("ports/broken external data is refused", ports::broken_external_data_is_refused),
    ("ports/unknown places are refused", ports::unknown_places_are_refused),
    ("ports/large integers are right or refused", ports::large_integers_are_right_or_refused),
    ("ports/timing is plausible", ports::timing_is_plausible),
    ("ports/node times are plausible", ports::node_times_are_plausible),
    ("lifetime/two cores at once", lifetime::two_cores_at_once),
    ("lifetime/one unit from two threads", lifetime::one_unit_from_two_threads),
    ("lifetime/compiled twice", lifetime::compiled_twice),
    ("lifetime/any drop order", lifetime::any_drop_order),
    ("lifetime/threads do not pile up", lifetime::threads_do_not_pile_up),
    ("lifetime/cached compiles agree", lifetime::cached_compiles_agree),
    ("lifetime/run inside computes the same", lifetime::run_inside_computes_the_same),
];

const UNIT_VARIABLE: &str = "TREFOIL_CONFORMANCE_UNIT";
const REPORT_VARIABLE: &str = "TREFOIL_CONFORMANCE_REPORT";

/// Every backend; simulated units plan and do not run.
fn backends() -> Vec<&'static dyn Backend> {
    trefoil_units::backends().iter().copied().filter(|backend| backend.name() != "sim").collect()
}

/// Prints past the harness's capture.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The units to check: each CPU with all cores, with one and with two; other devices as they are.
fn addresses(unit: &Unit) -> Vec<UnitAddress> {
    let mut list = vec![unit.address.clone()];
    if unit.kind == UnitKind::Cpu {
        let cores = allowed_cores();
        list.push(unit.address.clone().with_cores(&cores[..1]));
        if cores.len() > 1 {
            list.push(unit.address.clone().with_cores(&cores[..2]));
        }
    }
    list
}

#[derive(Default)]
struct Tally {
    passed: usize,
    not_applicable: usize,
    /// An accelerator said clearly that it does not compile this: no silent fallback, and a legitimate answer.
    refused: usize,
    known: Vec<&'static Deviation>,
    failed: Vec<String>,
}

#[test]
fn every_backend_conforms() {
    let required = std::env::var("TREFOIL_REQUIRE_BACKENDS").is_ok_and(|value| value == "1");
    let only = std::env::var("TREFOIL_CONFORMANCE_ONLY").ok();
    let mut missing = Vec::new();
    let mut table = Vec::new();
    if case::node_tests().is_none() {
        say("skipped: the ONNX node tests (no ../shared/models beside the repository); the suite's own models run");
    }
    for backend in backends() {
        let mut usable = false;
        for (unit, availability) in backend.units() {
            match availability {
                Availability::Available { .. } => {
                    usable = true;
                    for address in addresses(&unit) {
                        if only.as_ref().is_none_or(|only| *only == address.to_string()) {
                            table.push((address.to_string(), check_in_a_process(&address)));
                        }
                    }
                }
                Availability::Unavailable { reason, .. } => say(&format!("skipped: {}: {reason}", unit.address)),
            }
        }
        if !usable {
            missing.push(backend.name());
        }
    }
    say(&format!("\n{:<24}{:>8}{:>8}{:>8}{:>8}{:>8}", "unit", "passed", "failed", "known", "refused", "n/a"));
    for (unit, tally) in &table {
        let (passed, failed, known) = (tally.passed, tally.failed.len(), tally.known.len());
        say(&format!("{unit:<24}{passed:>8}{failed:>8}{known:>8}{:>8}{:>8}", tally.refused, tally.not_applicable));
    }
    let known: BTreeSet<_> = table
        .iter()
        .flat_map(|(_, tally)| &tally.known)
        .map(|entry| (entry.backend, entry.check, entry.reason))
        .collect();
    for (backend, check, reason) in known {
        say(&format!("known deviation: {backend:<10}{check:<44}{reason}"));
    }
    let failures: Vec<String> = table
        .iter()
        .flat_map(|(unit, tally)| tally.failed.iter().map(move |failure| format!("{unit}: {failure}")))
        .collect();
    assert!(failures.is_empty(), "{} checks failed:\n{}", failures.len(), failures.join("\n"));
    assert!(only.is_some() || !table.is_empty(), "no unit was checked");
    assert!(
        !required || missing.is_empty(),
        "TREFOIL_REQUIRE_BACKENDS=1 and these are missing: {}",
        missing.join(", ")
    );
}

/// Checks one unit in a child process and reads its report.
fn check_in_a_process(address: &UnitAddress) -> Tally {
    let unit = address.to_string();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("report");
    std::fs::write(&report, "").expect("writable temporary folder");
    let output = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "one_unit", "--ignored", "--nocapture", "--test-threads=1"])
        .env(UNIT_VARIABLE, address.to_string())
        .env(REPORT_VARIABLE, &report)
        .stdin(Stdio::null())
        .output()
        .expect("the suite starts itself");
    let text = std::fs::read_to_string(&report).unwrap_or_default();
    let mut tally = Tally::default();
    let mut running = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, '\t');
        let (kind, check, reason) = (parts.next(), parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        running = (kind == Some("start")).then_some(check);
        let known = deviations::of(&unit, check);
        match (kind, known) {
            (Some("pass"), None) => tally.passed += 1,
            (Some("pass"), Some(_)) => {
                tally.failed.push(format!("{check}: listed as a known deviation, but passes; take it off the list"));
            }
            (Some("skip"), _) => tally.not_applicable += 1,
            (Some("fail"), _) if address.device != "CPU" && reason.contains("does not compile") => tally.refused += 1,
            (Some("fail"), Some(entry)) if reason.contains(entry.says) => tally.known.push(entry),
            (Some("fail"), Some(entry)) => {
                let listed = format!("listed as a known deviation that says `{}`, but says", entry.says);
                tally.failed.push(format!("{check}: {listed}: {reason}"));
            }
            (Some("fail"), None) => tally.failed.push(format!("{check}: {reason}")),
            _ => {}
        }
    }
    if let Some(check) = running {
        let reason = format!("the process ended in the middle ({})", output.status);
        match deviations::of(&unit, check) {
            Some(entry) if reason.contains(entry.says) => tally.known.push(entry),
            _ => tally.failed.push(format!("{check}: {reason}")),
        }
    } else if !output.status.success() || !text.contains("done") {
        let text = String::from_utf8_lossy(&output.stderr);
        let panic: Vec<_> = text.lines().skip_while(|line| !line.contains("panicked")).take(2).collect();
        tally.failed.push(format!("the process ended early ({}): {}", output.status, panic.join(" ")));
    }
    tally
}

/// The child's side: checks the unit that the environment names and writes one line per check.
#[test]
#[ignore = "started by every_backend_conforms, one process per unit"]
fn one_unit() {
    let Ok(text) = std::env::var(UNIT_VARIABLE) else { return };
    let report = std::env::var(REPORT_VARIABLE).expect("set with the unit");
    let filter = std::env::var("TREFOIL_CONFORMANCE_CHECK").unwrap_or_default();
    let mut report = std::fs::OpenOptions::new().append(true).open(report).expect("the parent made it");
    let mut line = |kind: &str, check: &str, reason: &str| {
        let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        writeln!(report, "{kind}\t{check}\t{reason}").expect("the report is writable");
    };
    let address: UnitAddress = text.parse().expect("the parent wrote it");
    let backend =
        backends().into_iter().find(|backend| backend.name() == address.backend).expect("listed by the parent");
    let unit = backend.unit(&address).expect("listed by the parent");
    let _inside = enter_unit(&unit).expect("its cores are allowed");
    let subject = Subject { backend, unit };
    let mut record = |name: &str, run: &dyn Fn() -> Verdict| {
        if !name.contains(&filter) {
            return;
        }
        line("start", name, "");
        let verdict = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
            .unwrap_or_else(|panic| Err(format!("panicked: {:?}", panic.downcast_ref::<String>())));
        match verdict {
            Ok(None) => line("pass", name, ""),
            Ok(Some(why)) => line("skip", name, &why),
            Err(reason) => line("fail", name, &reason),
        }
    };
    for (name, case) in &case::all().expect("the suite's models are in the repository") {
        record(name, &|| numerics::check(&subject, case));
    }
    for (name, check) in CHECKS {
        record(name, &|| check(&subject));
    }
    line("done", "", "");
}
