//! Concurrency, drop order, threads, caches.

use crate::bench::Bench;
use crate::case::Case;
use crate::numerics::compare;
use crate::{Subject, Verdict, ensure};
use std::time::{Duration, Instant};
use trefoil_core::Unit;
use trefoil_units::{CompileOptions, allowed_cores, enter_unit};

fn plain() -> CompileOptions {
    CompileOptions::default()
}

/// Compiles and runs `name` on a thread of its own inside `unit`, checking every result.
fn work(subject: &Subject, unit: &Unit, name: &str, runs: usize) -> Result<(), String> {
    let _inside = enter_unit(unit).map_err(|error| error.to_string())?;
    let case = Case::own(name);
    let mut bench = Bench::new(subject.backend, unit, &case, &plain())?;
    for run in 0..runs {
        let (outputs, _) = bench.run()?;
        compare(subject, &case, &outputs).map_err(|reason| format!("{name}, run {run}: {reason}"))?;
    }
    Ok(())
}

fn together(jobs: Vec<Box<dyn FnOnce() -> Result<(), String> + Send + '_>>) -> Result<(), String> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
    })
}

/// Two sub-models on two threads, each pinned to a core of its own, 200 runs each.
pub fn two_cores_at_once(subject: &Subject) -> Verdict {
    let cores = allowed_cores();
    if subject.unit.address.cores.len() != 1 {
        return Ok(Some("for units of one core".to_owned()));
    }
    let Some(&other) = cores.iter().find(|core| !subject.unit.address.cores.contains(core)) else {
        return Ok(Some("this machine has one core".to_owned()));
    };
    let unit =
        subject.backend.unit(&subject.unit.address.clone().with_cores(vec![other])).map_err(|e| e.to_string())?;
    together(vec![
        Box::new(|| work(subject, &subject.unit, "matmul_odd_sizes", 200)),
        Box::new(|| work(subject, &unit, "conv_3x3", 200)),
    ])?;
    Ok(None)
}

/// The same file compiled on two threads of one unit, 100 runs each, with different data.
pub fn one_unit_from_two_threads(subject: &Subject) -> Verdict {
    together(vec![
        Box::new(|| work(subject, &subject.unit, "conv_3x3", 100)),
        Box::new(|| work(subject, &subject.unit, "conv_3x3", 100)),
    ])?;
    Ok(None)
}

/// The same file compiled twice on one thread, runs interleaved: neither sees the other's memory.
pub fn compiled_twice(subject: &Subject) -> Verdict {
    let case = Case::own("matmul");
    let mut first = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
    let mut second = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
    for input in &mut second.inputs {
        input.contents_mut().fill(0);
    }
    for _ in 0..10 {
        compare(subject, &case, &first.run()?.0)?;
        let (outputs, _) = second.run()?;
        ensure(outputs[0].to_f64().iter().all(|value| *value == 0.0), || "the other's inputs were used".to_owned())?;
    }
    Ok(None)
}

/// Sub-models dropped in every order; the last one still runs.
pub fn any_drop_order(subject: &Subject) -> Verdict {
    let names = ["matmul", "conv_3x3", "gather_axis0"];
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut benches = Vec::new();
        for name in names {
            let case = Case::own(name);
            benches.push(Some((Bench::new(subject.backend, &subject.unit, &case, &plain())?, case)));
        }
        for index in order {
            let Some((mut bench, case)) = benches[index].take() else { continue };
            compare(subject, &case, &bench.run()?.0)?;
            drop(bench);
        }
    }
    // One that was never bound, one that was bound and never run.
    let case = Case::own("matmul");
    drop(Bench::unbound(subject.backend, &subject.unit, &case, &plain()).map_err(|error| error.to_string())?);
    drop(Bench::new(subject.backend, &subject.unit, &case, &plain())?);
    Ok(None)
}

fn thread_count() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}

/// 50 sub-models made and dropped, each on a thread of its own: the process ends with the threads it had.
pub fn threads_do_not_pile_up(subject: &Subject) -> Verdict {
    let cycle = || together(vec![Box::new(|| work(subject, &subject.unit, "conv_3x3", 2))]);
    // Libraries start threads that stay, once.
    for _ in 0..3 {
        cycle()?;
    }
    let Some(before) = thread_count() else { return Ok(Some("no /proc here".to_owned())) };
    for _ in 0..50 {
        cycle()?;
    }
    // Pools end their threads in the background.
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let after = thread_count().unwrap_or(0);
        if after <= before {
            return Ok(None);
        }
        if Instant::now() > deadline {
            return Err(format!("{before} threads before, {after} after 50 sub-models came and went"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A cache folder changes nothing but the time of the second compile; a spoilt one is not fatal.
pub fn cached_compiles_agree(subject: &Subject) -> Verdict {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let options = CompileOptions { cache: Some(folder.path().join("cache")), ..plain() };
    for name in ["conv_3x3", "matmul", "conv_3x3"] {
        let case = Case::own(name);
        let mut bench = Bench::new(subject.backend, &subject.unit, &case, &options)?;
        compare(subject, &case, &bench.run()?.0).map_err(|reason| format!("{name}: {reason}"))?;
    }
    spoil(folder.path()).map_err(|error| error.to_string())?;
    let case = Case::own("conv_3x3");
    let mut bench = Bench::new(subject.backend, &subject.unit, &case, &options)
        .map_err(|reason| format!("after the cache was overwritten with noise: {reason}"))?;
    compare(subject, &case, &bench.run()?.0)?;
    Ok(None)
}

/// Overwrites every file below `folder`.
fn spoil(folder: &std::path::Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            spoil(&path)?;
        } else {
            std::fs::write(path, b"noise where a blob was")?;
        }
    }
    Ok(())
}

/// A worker inside [`trefoil_units::Backend::run_inside`] computes the same, on the unit's cores.
pub fn run_inside_computes_the_same(subject: &Subject) -> Verdict {
    let case = Case::own("matmul_odd_sizes");
    let mut result = Err("the body did not run".to_owned());
    let mut cores = Vec::new();
    let mut body = || {
        cores = trefoil_units::thread_cores();
        result = Bench::new(subject.backend, &subject.unit, &case, &plain()).and_then(|mut bench| {
            for _ in 0..20 {
                compare(subject, &case, &bench.run()?.0)?;
            }
            Ok(())
        });
    };
    subject.backend.run_inside(&subject.unit, &mut body).map_err(|error| error.to_string())?;
    result?;
    let own = trefoil_units::unit_cores(&subject.unit);
    ensure(cores.iter().all(|core| own.is_empty() || own.contains(core)), || {
        format!("ran on cores {cores:?}, the unit has {own:?}")
    })?;
    Ok(None)
}
