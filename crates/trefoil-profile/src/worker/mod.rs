//! The worker process: compiles and runs what the profiler asks for, so that a crash is a finding.

mod baton;
mod execution;
mod pairs;
mod threads;

use crate::StoreWriter;
use crate::power::PowerMeter;
use crate::protocol::{Answer, Failure, Hello, Item, ItemAnswer, Job, PROTOCOL_VERSION, Reply, Request, Sampling};
use crate::sampling::{Pacer, milliseconds};
use execution::Loaded;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, Write};
use std::time::Instant;
use threads::UnitThread;
use trefoil_core::{NodeTime, Samples, Unit};

/// Environment variable that allows [`Job::Misbehave`].
pub const MISBEHAVE_VARIABLE: &str = "TREFOIL_WORKER_MISBEHAVE";

/// Serves jobs until stdin ends, then exits. The whole life of `trefoil worker`.
pub fn worker_main() -> ! {
    // End of stdin ends an idle worker; this ends a busy one, whose parent cannot ask any more.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // If the machine runs out of memory it is the worker that should go, not the user's session.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let mut protocol = match private_stdout() {
        Ok(file) => file,
        Err(error) => {
            eprintln!("trefoil worker: cannot set up its output: {error}");
            std::process::exit(2);
        }
    };
    let hello = Hello { trefoil_worker: PROTOCOL_VERSION, pid: std::process::id() };
    if say(&mut protocol, &hello).is_err() {
        std::process::exit(0);
    }
    let mut worker = Server::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        if line.trim().is_empty() {
            continue;
        }
        let reply = match serde_json::from_str::<Request>(&line) {
            Ok(request) => {
                let (answer, failure) = match worker.serve(request.job, &mut protocol) {
                    Ok(answer) => (Some(answer), None),
                    Err(failure) => (None, Some(failure)),
                };
                Reply { id: request.id, answer, failure }
            }
            Err(error) => {
                let failure = Failure::new("run", &format!("the worker does not understand the request: {error}"));
                Reply { id: 0, answer: None, failure: Some(failure) }
            }
        };
        if say(&mut protocol, &reply).is_err() {
            break;
        }
    }
    // Backends' destructors have nothing to save; leaving at once cannot hang in one.
    std::process::exit(0)
}

/// Moves the protocol to a private descriptor and lets descriptor 1 go to stderr, where libraries may chatter.
fn private_stdout() -> std::io::Result<File> {
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    let protocol = rustix::io::fcntl_dupfd_cloexec(std::io::stdout().as_fd(), 3)?;
    // SAFETY: descriptor 1 is open (it was just duplicated); the owner is forgotten below, so that it stays open.
    let mut standard_output = unsafe { OwnedFd::from_raw_fd(1) };
    let outcome = rustix::io::dup2(std::io::stderr().as_fd(), &mut standard_output);
    std::mem::forget(standard_output);
    outcome?;
    Ok(File::from(protocol))
}

fn say(protocol: &mut File, message: &impl serde::Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    protocol.write_all(&line)
}

/// What a worker keeps between jobs.
#[derive(Default)]
struct Server {
    threads: BTreeMap<String, UnitThread>,
}

impl Server {
    fn thread(&mut self, unit: &Unit) -> &mut UnitThread {
        self.threads.entry(unit.address.to_string()).or_insert_with(|| UnitThread::new(vec![unit.clone()]))
    }

    fn serve(&mut self, job: Job, protocol: &mut File) -> Result<Answer, Failure> {
        match job {
            Job::Ping => Ok(Answer::Done),
            Job::Evaluate { item, into } => self
                .thread(&item.unit.clone())
                .run(move |_| {
                    let mut loaded = Loaded::load(&item)?;
                    loaded.execute()?;
                    store_outputs(&loaded, &into).map_err(|error| Failure::new("run", &error.to_string()))
                })
                .map(|()| Answer::Evaluated),
            Job::Measure { items, sampling } => Ok(Answer::Measured { items: self.measure(&items, sampling) }),
            Job::NodeTimes { item, runs, cap_ms } => {
                let nodes = self.thread(&item.unit.clone()).run(move |_| node_times(&item, runs, cap_ms))?;
                Ok(Answer::Nodes { nodes })
            }
            Job::Transfer { first, second, sampling } => pairs::transfer(&first, &second, sampling),
            Job::Slowdown { slowed, interfering, sampling } => pairs::slowdown(&slowed, &interfering, sampling),
            Job::Load { item, seconds } => self.load(item, seconds),
            Job::Spin { runs } => Ok(Answer::Spun { samples: spin(runs) }),
            Job::Misbehave { how } => misbehave(&how, protocol),
        }
    }

    /// Loops an item while the power meters run.
    fn load(&mut self, item: Option<Item>, seconds: f64) -> Result<Answer, Failure> {
        let seconds = seconds.clamp(0.0, 3600.0);
        let Some(item) = item else {
            let meter = PowerMeter::discover();
            let reading = meter.read();
            std::thread::sleep(std::time::Duration::from_secs_f64(seconds));
            let watts = reading.and_then(|reading| meter.watts_since(&reading));
            return Ok(Answer::Loaded { executions: 0, seconds, watts });
        };
        self.thread(&item.unit.clone()).run(move |_| {
            let mut loaded = Loaded::load(&item)?;
            // A quarter of the time to reach a steady state first.
            let (mut executions, warm) = (0, Instant::now());
            while warm.elapsed().as_secs_f64() < seconds / 4.0 {
                loaded.execute()?;
            }
            let meter = PowerMeter::discover();
            let reading = meter.read();
            let began = Instant::now();
            while began.elapsed().as_secs_f64() < seconds {
                loaded.execute()?;
                executions += 1;
            }
            let watts = reading.and_then(|reading| meter.watts_since(&reading));
            Ok(Answer::Loaded { executions, seconds: began.elapsed().as_secs_f64(), watts })
        })
    }

    /// Loads all items, then times them in alternating batches.
    fn measure(&mut self, items: &[Item], sampling: Sampling) -> Vec<ItemAnswer> {
        // Each item lives on its unit's thread under a name; items that are not to be kept get one for this job.
        let names: Vec<String> =
            items.iter().enumerate().map(|(n, item)| item.keep.clone().unwrap_or(format!("\u{0}{n}"))).collect();
        let mut answers: Vec<Option<Failure>> = Vec::new();
        for (item, name) in items.iter().zip(&names) {
            let (item_copy, name) = (item.clone(), name.clone());
            let loaded = self.thread(&item.unit).run(move |session| {
                if !session.kept.contains_key(&name) {
                    session.kept.insert(name.clone(), Loaded::load(&item_copy)?);
                }
                let loaded = session.kept.get_mut(&name).expect("it was put there");
                loaded.begin(&item_copy, sampling)
            });
            answers.push(loaded.err());
        }
        let pacer = Pacer::new(sampling);
        for _ in 0..pacer.batches() {
            for ((item, name), answer) in items.iter().zip(&names).zip(&mut answers) {
                if answer.is_none() {
                    *answer = self.with_kept(&item.unit, name, Loaded::time_batch).err();
                }
            }
        }
        let mut results = Vec::new();
        for ((item, name), failure) in items.iter().zip(&names).zip(answers) {
            let keep = item.keep.is_some() && failure.is_none();
            let name = name.clone();
            let result = self.thread(&item.unit).run(move |session| {
                let result = match (failure, session.kept.get_mut(&name)) {
                    (Some(failure), _) => Err(failure),
                    (None, Some(loaded)) => loaded.finish(),
                    (None, None) => Err(Failure::new("run", "lost its compiled sub-model")),
                };
                if !keep {
                    session.kept.remove(&name);
                }
                result
            });
            results.push(result.into());
        }
        results
    }

    /// Does something with a kept sub-model on its unit's thread.
    fn with_kept(
        &mut self,
        unit: &Unit,
        name: &str,
        act: impl FnOnce(&mut Loaded) -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        let name = name.to_owned();
        self.thread(unit).run(move |session| match session.kept.get_mut(&name) {
            Some(loaded) => act(loaded),
            None => Err(Failure::new("run", "lost its compiled sub-model")),
        })
    }
}

fn store_outputs(loaded: &Loaded, into: &std::path::Path) -> Result<(), crate::ProfileError> {
    let mut writer = StoreWriter::create(into)?;
    for tensor in loaded.outputs() {
        writer.push(tensor)?;
    }
    writer.finish()?;
    Ok(())
}

/// Times of the nodes in one warm execution; `None` if the backend reports none.
///
/// Some backends report the last execution, others means over all executions since compilation, the cold first one
/// included, which can be a hundred times longer than the rest. From several readings [`is_mean`] tells which, and of
/// means the difference of two readings gives the executions between them. Otherwise the lowest reading stands.
fn node_times(item: &Item, runs: u32, cap_ms: f64) -> Result<Option<Vec<NodeTime>>, Failure> {
    let mut loaded = Loaded::load(item)?;
    loaded.execute()?;
    let began = Instant::now();
    loaded.execute()?;
    let affordable = (cap_ms / milliseconds(began, Instant::now()).max(1e-4)) as u32;
    let early = affordable.min(runs).div_ceil(4).max(2);
    let (rounds, pause) = if affordable < 20 { (1, 1) } else { (4, 3) };
    for _ in 2..early {
        loaded.execute()?;
    }
    let Some(first) = loaded.node_times() else { return Ok(None) };
    let late = early * 3;
    let began = Instant::now();
    for _ in 0..late {
        loaded.execute()?;
    }
    let wall = milliseconds(began, Instant::now()) / f64::from(late);
    let Some(mut nodes) = loaded.node_times() else { return Ok(None) };
    let mut readings = Vec::new();
    for _ in 0..rounds {
        for _ in 0..pause {
            loaded.execute()?;
        }
        readings.extend(loaded.node_times());
    }
    let sums = readings.first().map(|third| [&first, &nodes, third].map(|nodes| total_ms(nodes)));
    if sums.is_some_and(|sums| is_mean(sums, [early, late, pause], wall)) && nodes.len() == first.len() {
        for (node, before) in nodes.iter_mut().zip(&first) {
            let spent = node.ms * f64::from(early + late) - before.ms * f64::from(early);
            node.ms = (spent / f64::from(late)).max(0.0);
        }
        return Ok(Some(nodes));
    }
    readings.push(nodes);
    Ok(readings.into_iter().min_by(|a, b| total_ms(a).total_cmp(&total_ms(b))))
}

/// Whether readings are means that still hold a cold start: sums of node times after `early`, then `late`, then
/// `pause` more executions, and the wall time of one of the `late` ones. Such a mean is well above that wall time, falls
/// as executions are added, falls no faster than a mean can, and hardly changes with the few of the pause. One disturbed execution
/// looks like this in one of the four at most.
fn is_mean([first, second, third]: [f64; 3], [early, late, pause]: [u32; 3], wall: f64) -> bool {
    let (early, both) = (f64::from(early), f64::from(early + late));
    let steady = (third * (both + f64::from(pause)) - second * both).abs() <= 0.1 * second * both;
    second > 1.5 * wall && first > 1.2 * second && first * early <= 1.02 * second * both && steady
}

fn total_ms(nodes: &[NodeTime]) -> f64 {
    nodes.iter().map(|node| node.ms).sum()
}

/// Times a loop of dependent integer operations that no clock-independent disturbance can change.
fn spin(runs: u32) -> Samples {
    let mut times = Vec::new();
    for run in 0..runs.max(1) {
        let began = Instant::now();
        let mut state = std::hint::black_box(u64::from(run) | 1);
        for _ in 0..200_000 {
            state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (state >> 31);
        }
        std::hint::black_box(state);
        times.push(milliseconds(began, Instant::now()));
    }
    Samples::from_values(&mut times).expect("there is at least one")
}

fn misbehave(how: &str, protocol: &mut File) -> Result<Answer, Failure> {
    if std::env::var_os(MISBEHAVE_VARIABLE).is_none() {
        return Err(Failure::new("run", "this job exists for tests only"));
    }
    match how {
        "abort" => {
            eprintln!("aborting because a test said so");
            std::process::abort()
        }
        "hang" => loop {
            std::thread::sleep(std::time::Duration::from_hours(1));
        },
        "garbage" => {
            let _ = protocol.write_all(b"}{ this is no reply\n");
            Ok(Answer::Done)
        }
        "exit" => std::process::exit(7),
        "chatter" => {
            println!("a library prints to stdout");
            Ok(Answer::Done)
        }
        "allocate" => {
            let mut hoard = Vec::new();
            loop {
                hoard.push(std::hint::black_box(vec![1u8; 16 << 20]));
                std::thread::sleep(std::time::Duration::from_millis(5));
                if hoard.len() > 4096 {
                    return Err(Failure::new("run", "nobody stopped it"));
                }
            }
        }
        "panic" => panic!("a test said so"),
        other => Err(Failure::new("run", &format!("no misbehaviour `{other}`"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_with_a_cold_start_are_told_from_single_executions() {
        // A cold first execution of 20 ms, 0.1 ms afterwards, read as means after 10, 40 and 43.
        let mean = |count: f64| (20.0 + 0.1 * (count - 1.0)) / count;
        assert!(is_mean([mean(10.0), mean(40.0), mean(43.0)], [10, 30, 3], 0.12));
        // Last executions, calm; with one disturbed at each place; and slow clocks of small nodes.
        assert!(!is_mean([0.1, 0.1, 0.1], [10, 30, 3], 0.12));
        assert!(!is_mean([4.0, 0.1, 0.1], [10, 30, 3], 0.12));
        assert!(!is_mean([0.1, 4.0, 0.1], [10, 30, 3], 0.12));
        assert!(!is_mean([0.3, 0.3, 0.3], [10, 30, 3], 0.12));
    }
}
