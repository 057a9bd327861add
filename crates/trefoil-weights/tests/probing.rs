//! The probe with engines that refuse, crash, hang and quit above 5 MiB: each is a finding.

use std::time::Duration;
use trefoil_weights::probe::{Attempt, ChildCommand, MapProbe, Mapped, ProbeOptions};
use trefoil_weights::{Region, RegionKind, probe};

/// Parents only use names.
struct Named(&'static str);

impl MapProbe for Named {
    fn name(&self) -> &str {
        self.0
    }

    fn try_map(&self, _: &Region) -> Result<Mapped, String> {
        unreachable!("engines run in children")
    }
}

const MIB: u64 = 1 << 20;

fn options(kinds: &[RegionKind]) -> ProbeOptions {
    ProbeOptions {
        kinds: kinds.to_vec(),
        cap_bytes: 16 * MIB,
        step_bytes: MIB,
        timeout: Duration::from_secs(20),
        child: ChildCommand {
            program: env!("CARGO_BIN_EXE_trefoil-weights-helper").into(),
            arguments: vec!["probe-child".into()],
        },
    }
}

#[test]
fn limits_are_found_to_the_step_and_every_ending_is_a_finding() {
    let engines = ["cpu", "picky", "fragile", "quitter"].map(Named);
    let engines: Vec<&dyn MapProbe> = engines.iter().map(|engine| engine as &dyn MapProbe).collect();
    let report = probe(&engines, &options(&[RegionKind::Memfd])).unwrap();
    let [kind] = report.kinds.as_slice() else { panic!("{report:?}") };
    let [cpu, picky, fragile, quitter] = kind.engines.as_slice() else { panic!("{kind:?}") };
    assert!(cpu.capped && cpu.largest_bytes == 16 * MIB && cpu.first_failure.is_none(), "{cpu:?}");
    for limit in [picky, fragile, quitter, kind.together.as_ref().unwrap()] {
        assert!(!limit.capped && limit.largest_bytes == 5 * MIB, "{limit:?}");
        assert_eq!(limit.first_failure.as_ref().unwrap().0, 6 * MIB, "{limit:?}");
    }
    let failure = |limit: &trefoil_weights::probe::EngineLimit| limit.first_failure.clone().unwrap().1;
    assert_eq!(failure(picky), Attempt::Refused { reason: format!("picky: {} bytes are too many", 6 * MIB) });
    assert_eq!(failure(fragile), Attempt::Crashed { signal: 6, message: "about to abort".into() });
    assert_eq!(failure(quitter), Attempt::NoAnswer { code: 7, message: "giving up".into() });
    assert_eq!(kind.together.as_ref().unwrap().engines, ["cpu", "picky", "fragile", "quitter"]);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["kinds"][0]["engines"][2]["first_failure"][1]["outcome"], "crashed");
}

#[test]
fn a_hanging_engine_is_killed_and_reported() {
    let options =
        ProbeOptions { timeout: Duration::from_millis(300), cap_bytes: 8 * MIB, ..options(&[RegionKind::File]) };
    let report = probe(&[&Named("stuck")], &options).unwrap();
    let limit = &report.kinds[0].engines[0];
    assert_eq!(limit.first_failure.as_ref().unwrap().1, Attempt::TimedOut { after_ms: 300 });
    assert!(limit.largest_bytes <= 5 * MIB, "{limit:?}");
}

#[test]
fn kinds_without_a_device_are_reported_without_attempts() {
    let report = probe(&[&Named("cpu")], &options(&[RegionKind::HardwareBuffer])).unwrap();
    assert!(report.kinds[0].unavailable.as_ref().unwrap().contains("Android"));
    assert!(report.kinds[0].engines.is_empty() && report.kinds[0].together.is_none());
}

#[test]
fn a_child_that_cannot_start_is_an_error_and_an_unknown_engine_a_refusal() {
    let mut wrong = options(&[RegionKind::Memfd]);
    wrong.child.program = "/nonexistent/program".into();
    assert!(probe(&[&Named("cpu")], &wrong).unwrap_err().to_string().contains("cannot start /nonexistent/program"));
    let report = probe(&[&Named("abacus")], &options(&[RegionKind::Memfd])).unwrap();
    let limit = &report.kinds[0].engines[0];
    assert_eq!(limit.largest_bytes, 0);
    assert_eq!(
        limit.first_failure.as_ref().unwrap().1,
        Attempt::Refused { reason: "the child has no engine `abacus`".into() }
    );
}
