//! Worker processes that crash, hang, talk nonsense or eat memory are findings; the next job gets a fresh one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trefoil_profile::protocol::{Answer, Job};
use trefoil_profile::{CallError, Launcher, MISBEHAVE_VARIABLE, WorkerSlot};

const LONG: Duration = Duration::from_mins(1);

fn launcher() -> Launcher {
    let mut launcher = Launcher::new(env!("CARGO_BIN_EXE_trefoil-worker").into(), Vec::new());
    launcher.environment.push((MISBEHAVE_VARIABLE.into(), "1".into()));
    launcher
}

fn misbehave(how: &str) -> Job {
    Job::Misbehave { how: how.to_owned() }
}

fn failure(slot: &mut WorkerSlot, how: &str, limit: Duration) -> (String, String) {
    match slot.call(&misbehave(how), limit, &AtomicBool::new(false)) {
        Err(CallError::Failure(failure)) => (failure.stage, failure.reason),
        other => panic!("{how}: {other:?}"),
    }
}

fn works(slot: &mut WorkerSlot) {
    let answer = slot.call(&Job::Ping, LONG, &AtomicBool::new(false));
    assert!(matches!(answer, Ok(Answer::Done)), "{answer:?}");
}

#[test]
fn an_abort_is_a_crash_with_signal_and_last_words() {
    let mut slot = WorkerSlot::new(launcher());
    let (stage, reason) = failure(&mut slot, "abort", LONG);
    assert_eq!(stage, "crash");
    assert!(reason.contains("signal 6") && reason.contains("aborting because a test said so"), "{reason}");
    works(&mut slot);
    assert_eq!(slot.crashes(), 1);
}

#[test]
fn a_crash_is_believed_only_of_a_fresh_worker() {
    let mut slot = WorkerSlot::new(launcher());
    works(&mut slot);
    failure(&mut slot, "abort", LONG);
    assert_eq!(slot.crashes(), 2, "the seasoned worker died, and then a fresh one");
}

#[test]
fn an_exit_is_a_crash_with_its_code() {
    let mut slot = WorkerSlot::new(launcher());
    let (stage, reason) = failure(&mut slot, "exit", LONG);
    assert_eq!(stage, "crash");
    assert!(reason.contains("exit code 7"), "{reason}");
}

#[test]
fn a_hang_is_a_timeout_and_the_worker_is_gone() {
    let mut slot = WorkerSlot::new(launcher());
    works(&mut slot);
    let pid = slot.pid().unwrap();
    let began = Instant::now();
    let (stage, reason) = failure(&mut slot, "hang", Duration::from_millis(300));
    assert_eq!(stage, "timeout");
    assert!(reason.contains("0.3 s") && began.elapsed() < LONG, "{reason}");
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "the hanging worker still runs");
    works(&mut slot);
}

#[test]
fn a_job_whose_worker_was_killed_is_given_to_a_fresh_one() {
    let mut slot = WorkerSlot::new(launcher());
    works(&mut slot);
    let pid = slot.pid().unwrap();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    });
    // The job is given to a fresh worker once, which then hangs until the limit.
    let (stage, reason) = failure(&mut slot, "hang", Duration::from_millis(1500));
    killer.join().unwrap();
    assert_eq!(stage, "timeout", "{reason}");
    assert_eq!(slot.crashes(), 2);
}

#[test]
fn garbage_is_a_crash_that_quotes_it() {
    let mut slot = WorkerSlot::new(launcher());
    let (stage, reason) = failure(&mut slot, "garbage", LONG);
    assert_eq!(stage, "crash");
    assert!(reason.contains("}{ this is no reply"), "{reason}");
    works(&mut slot);
}

#[test]
fn what_libraries_print_does_not_disturb_the_protocol() {
    let mut slot = WorkerSlot::new(launcher());
    let answer = slot.call(&misbehave("chatter"), LONG, &AtomicBool::new(false));
    assert!(matches!(answer, Ok(Answer::Done)), "{answer:?}");
    works(&mut slot);
    assert_eq!(slot.crashes(), 0);
}

#[test]
fn a_memory_hog_is_stopped_at_the_limit() {
    let mut launcher = launcher();
    launcher.memory_limit = Some(300 << 20);
    let mut slot = WorkerSlot::new(launcher);
    let (stage, reason) = failure(&mut slot, "allocate", LONG);
    assert_eq!(stage, "limit");
    assert!(reason.contains("allowed are 300 MiB"), "{reason}");
    works(&mut slot);
}

#[test]
fn the_stop_flag_ends_a_call_at_once() {
    let mut slot = WorkerSlot::new(launcher());
    works(&mut slot);
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            stop.store(true, Ordering::Relaxed);
        });
        let answer = slot.call(&misbehave("hang"), LONG, &stop);
        assert!(matches!(answer, Err(CallError::Interrupted)), "{answer:?}");
    });
    assert!(began.elapsed() < LONG / 2);
}

#[test]
fn misbehaviour_needs_permission() {
    let mut launcher = launcher();
    launcher.environment.clear();
    let mut slot = WorkerSlot::new(launcher);
    let (stage, reason) = failure(&mut slot, "abort", LONG);
    assert!(stage == "run" && reason.contains("tests only"), "{stage}: {reason}");
}

#[test]
fn a_program_that_is_no_worker_is_told() {
    for (program, words) in
        [("/bin/echo", "no trefoil worker"), ("/nonexistent", "cannot start"), ("/bin/false", "ended")]
    {
        let mut slot = WorkerSlot::new(Launcher::new(program.into(), vec!["hello".into()]));
        match slot.call(&Job::Ping, LONG, &AtomicBool::new(false)) {
            Err(CallError::Fatal(error)) => assert!(error.to_string().contains(words), "{program}: {error}"),
            other => panic!("{program}: {other:?}"),
        }
    }
}

#[test]
fn an_idle_worker_ends_with_its_slot() {
    let mut slot = WorkerSlot::new(launcher());
    works(&mut slot);
    let pid = slot.pid().unwrap();
    drop(slot);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
