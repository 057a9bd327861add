//! The worker process: compiles and runs what the profiler asks for, so that a crash is a finding.

mod execution;
mod pairs;
mod threads;

use crate::protocol::{Answer, Failure, Hello, Item, ItemAnswer, Job, PROTOCOL_VERSION, Reply, Request, Sampling};
use crate::sampling::milliseconds;
use execution::{Batch, Loaded};
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
    let protocol = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
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
            Job::Evaluate { model, unit, stores, inputs, outputs, into } => self
                .thread(&unit)
                .run(move |_| execution::evaluate(&model, &unit, &stores, &inputs, &outputs, &into))
                .map(|()| Answer::Evaluated),
            Job::Measure { items, sampling } => Ok(Answer::Measured { items: self.measure(items, sampling) }),
            Job::NodeTimes { item, runs } => {
                let nodes = self.thread(&item.unit.clone()).run(move |_| node_times(&item, runs))?;
                Ok(Answer::Nodes { nodes })
            }
            Job::Transfer { first, second, sampling } => pairs::transfer(first, second, sampling),
            Job::Slowdown { slowed, interfering, sampling } => pairs::slowdown(slowed, interfering, sampling),
            Job::Load { item, seconds } => {
                let Some(item) = item else {
                    let seconds = seconds.clamp(0.0, 3600.0);
                    std::thread::sleep(std::time::Duration::from_secs_f64(seconds));
                    return Ok(Answer::Loaded { executions: 0, seconds });
                };
                self.thread(&item.unit.clone()).run(move |_| {
                    let mut loaded = Loaded::load(&item)?;
                    let (began, mut executions) = (Instant::now(), 0);
                    while began.elapsed().as_secs_f64() < seconds {
                        loaded.execute()?;
                        executions += 1;
                    }
                    Ok(Answer::Loaded { executions, seconds: began.elapsed().as_secs_f64() })
                })
            }
            Job::Spin { runs } => Ok(Answer::Spun { samples: spin(runs) }),
            Job::Misbehave { how } => misbehave(&how, protocol),
        }
    }

    /// Loads all items, then times them in alternating batches.
    fn measure(&mut self, items: Vec<Item>, sampling: Sampling) -> Vec<ItemAnswer> {
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
        for _ in 0..crate::sampling::Pacer::new(sampling).batches() {
            for ((item, name), answer) in items.iter().zip(&names).zip(&mut answers) {
                if answer.is_some() {
                    continue;
                }
                let name = name.clone();
                *answer = self
                    .thread(&item.unit)
                    .run(move |session| match session.kept.get_mut(&name) {
                        Some(loaded) => loaded.time_batch(),
                        None => Err(Failure::new("run", "lost its compiled sub-model")),
                    })
                    .err();
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
}

/// Median time of each node over `runs` executions; `None` if the backend reports none.
fn node_times(item: &Item, runs: u32) -> Result<Option<Vec<NodeTime>>, Failure> {
    let mut loaded = Loaded::load(item)?;
    let mut names: Vec<NodeTime> = Vec::new();
    let mut times: Vec<Vec<f64>> = Vec::new();
    for _ in 0..2 {
        loaded.execute()?;
    }
    for run in 0..runs.max(1) {
        loaded.execute()?;
        let Some(nodes) = loaded.node_times() else { return Ok(None) };
        if run == 0 {
            times = vec![Vec::new(); nodes.len()];
            names = nodes;
            for (list, node) in times.iter_mut().zip(&names) {
                list.push(node.ms);
            }
        } else if nodes.len() == names.len() {
            // Backends report nodes in one fixed order; a run that differs (a branch not taken) is left out.
            for (list, node) in times.iter_mut().zip(&nodes) {
                list.push(node.ms);
            }
        }
    }
    for (node, list) in names.iter_mut().zip(&mut times) {
        node.ms = Samples::from_values(list).map_or(node.ms, |samples| samples.median);
    }
    Ok(Some(names))
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
            std::thread::sleep(std::time::Duration::from_secs(3600));
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

/// Kept out of [`execution`] so that its buffers and timing loops stay free of bookkeeping.
type Batches = Vec<Batch>;
