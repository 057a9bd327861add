//! The parent's side of worker processes: start, ask, watch, kill.

use crate::ProfileError;
use crate::protocol::{Answer, Failure, Hello, Job, PROTOCOL_VERSION, Reply, Request};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Environment variable that names the worker program; without it the current program is asked for `worker`.
pub const WORKER_VARIABLE: &str = "TREFOIL_WORKER";

/// How often the parent looks at deadline, stop flag and memory while a worker is busy. Rare enough not to disturb.
const POLL: Duration = Duration::from_millis(100);

/// How long a worker may take to say hello.
const HELLO_LIMIT: Duration = Duration::from_secs(30);

/// How to start a worker process.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// Program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Environment variables on top of the parent's.
    pub environment: Vec<(OsString, OsString)>,
    /// Resident memory in bytes above which a worker is killed; `None` leaves it to the system.
    pub memory_limit: Option<u64>,
}

impl Launcher {
    /// `TREFOIL_WORKER` if set, else the current program with the argument `worker`; the memory limit is nine tenths
    /// of what is available now.
    ///
    /// # Errors
    /// [`ProfileError::Worker`] if the current program cannot be found.
    pub fn discover() -> Result<Self, ProfileError> {
        if let Some(program) = std::env::var_os(WORKER_VARIABLE) {
            return Ok(Self::new(program.into(), Vec::new()));
        }
        let program = std::env::current_exe().map_err(|error| ProfileError::Worker {
            command: "(this program)".to_owned(),
            reason: format!("cannot find its file: {error}; set {WORKER_VARIABLE}"),
        })?;
        Ok(Self::new(program, vec!["worker".into()]))
    }

    /// For a given program and arguments.
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        let memory_limit = available_memory().map(|bytes| bytes / 10 * 9);
        Self { program, arguments, environment: Vec::new(), memory_limit }
    }

    fn command_line(&self) -> String {
        let mut line = self.program.display().to_string();
        for argument in &self.arguments {
            line.push(' ');
            line.push_str(&argument.to_string_lossy());
        }
        line
    }
}

/// `MemAvailable` in bytes, where the system tells.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Resident bytes of a process, where the system tells.
fn resident_memory(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Why a call has no answer.
#[derive(Debug)]
pub enum CallError {
    /// The job failed, or the worker died of it.
    Failure(Failure),
    /// The stop flag was raised; the worker is gone.
    Interrupted,
    /// Workers cannot be used at all.
    Fatal(ProfileError),
}

/// A running worker.
#[derive(Debug)]
struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    next_id: u64,
    served: u64,
}

enum Heard {
    Line(String),
    Gone,
    Late,
    Stopped,
    TooBig(u64),
}

impl Worker {
    fn spawn(launcher: &Launcher, stop: &AtomicBool) -> Result<Self, CallError> {
        let fatal =
            |reason: String| CallError::Fatal(ProfileError::Worker { command: launcher.command_line(), reason });
        let mut child = Command::new(&launcher.program)
            .args(&launcher.arguments)
            .envs(launcher.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C reaches the parent only, which ends its workers in order.
            .process_group(0)
            .spawn()
            .map_err(|error| fatal(format!("cannot start: {error}")))?;
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n') {
                let Ok(line) = line else { return };
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        let words = Arc::clone(&last_words);
        std::thread::spawn(move || collect_last_words(stderr, &words));
        let stdin = child.stdin.take();
        let mut worker = Self { child, stdin, lines, last_words, next_id: 0, served: 0 };
        let reason = match worker.hear(Instant::now() + HELLO_LIMIT, stop, launcher.memory_limit) {
            Heard::Line(line) => match serde_json::from_str::<Hello>(&line) {
                Ok(hello) if hello.trefoil_worker == PROTOCOL_VERSION => return Ok(worker),
                Ok(hello) => {
                    format!("speaks protocol {}, this program {PROTOCOL_VERSION}", hello.trefoil_worker)
                }
                Err(_) => format!("is no trefoil worker, it said `{}`", trefoil_units::one_line(&line)),
            },
            Heard::Gone => format!("ended at once ({})", worker.autopsy()),
            Heard::Late => format!("said nothing for {} s", HELLO_LIMIT.as_secs()),
            Heard::Stopped => {
                worker.kill();
                return Err(CallError::Interrupted);
            }
            Heard::TooBig(bytes) => format!("took {} MiB at its start", bytes >> 20),
        };
        worker.kill();
        Err(fatal(reason))
    }

    fn hear(&mut self, deadline: Instant, stop: &AtomicBool, memory_limit: Option<u64>) -> Heard {
        loop {
            if stop.load(Ordering::Relaxed) {
                return Heard::Stopped;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(POLL)) {
                Ok(line) => return Heard::Line(line),
                Err(RecvTimeoutError::Disconnected) => return Heard::Gone,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Heard::Late,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let (Some(limit), Some(resident)) = (memory_limit, resident_memory(self.child.id()))
                && resident > limit
            {
                return Heard::TooBig(resident);
            }
        }
    }

    /// How it ended, with the last lines it wrote to stderr. Only after its stdout ended.
    fn autopsy(&mut self) -> String {
        let began = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if began.elapsed() < Duration::from_secs(2) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => break None,
            }
        };
        self.kill();
        let mut text = status.map_or_else(|| "closed its output".to_owned(), describe_status);
        let words = self.words();
        if !words.is_empty() {
            text.push_str("; it wrote: ");
            text.push_str(&words);
        }
        text
    }

    fn words(&self) -> String {
        // The stderr reader may be a moment behind the end of the process.
        std::thread::sleep(Duration::from_millis(20));
        let words = self.last_words.lock().expect("no thread panics while it holds this lock");
        words.iter().map(String::as_str).collect::<Vec<_>>().join(" / ")
    }

    fn kill(&mut self) {
        // Both fail only if the process is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // End of file asks it to end; it holds nothing worth a grace period beyond that.
        drop(self.stdin.take());
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.kill();
    }
}

/// Keeps the last few lines of a worker's stderr, each cut to a sane length.
fn collect_last_words(stderr: impl Read, words: &Mutex<VecDeque<String>>) {
    for line in BufReader::new(stderr).split(b'\n') {
        let Ok(line) = line else { return };
        let line = String::from_utf8_lossy(&line).trim().chars().take(200).collect::<String>();
        if line.is_empty() {
            continue;
        }
        let mut words = words.lock().expect("no thread panics while it holds this lock");
        if words.len() == 4 {
            words.pop_front();
        }
        words.push_back(line);
    }
}

fn describe_status(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = match signal {
                4 => " (illegal instruction)",
                6 => " (abort)",
                7 => " (bus error)",
                8 => " (arithmetic exception)",
                9 => " (killed, perhaps for memory)",
                11 => " (segmentation fault)",
                15 => " (terminated)",
                _ => "",
            };
            format!("signal {signal}{name}")
        }
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

/// A worker that is started when needed and replaced after it died.
#[derive(Debug)]
pub struct WorkerSlot {
    launcher: Launcher,
    worker: Option<Worker>,
    crashes: u32,
}

impl WorkerSlot {
    /// Nothing is started yet.
    pub fn new(launcher: Launcher) -> Self {
        Self { launcher, worker: None, crashes: 0 }
    }

    /// How many workers died so far.
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// Process id of the present worker, if one runs.
    pub fn pid(&self) -> Option<u32> {
        self.worker.as_ref().map(|worker| worker.child.id())
    }

    /// Ends the present worker, so that the next call gets a fresh process.
    pub fn retire(&mut self) {
        self.worker = None;
    }

    /// Has a job done. A worker that dies of it, answers garbage, takes longer than `limit` or too much memory is
    /// killed, and that is the [`Failure`]. A death is believed only of a worker that did nothing else before: the job
    /// is given to a fresh one once, since an earlier job may have left damage behind.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call(&mut self, job: &Job, limit: Duration, stop: &AtomicBool) -> Result<Answer, CallError> {
        let seasoned = self.worker.as_ref().is_some_and(|worker| worker.served > 0);
        match self.call_once(job, limit, stop) {
            Err(CallError::Failure(failure)) if failure.stage == "crash" && seasoned && self.worker.is_none() => {
                self.call_once(job, limit, stop)
            }
            other => other,
        }
    }

    fn call_once(&mut self, job: &Job, limit: Duration, stop: &AtomicBool) -> Result<Answer, CallError> {
        if stop.load(Ordering::Relaxed) {
            return Err(CallError::Interrupted);
        }
        let mut worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::spawn(&self.launcher, stop)?,
        };
        worker.next_id += 1;
        let id = worker.next_id;
        let mut line = serde_json::to_string(&Request { id, job: job.clone() }).expect("a job serialises");
        line.push('\n');
        // A write fails when the worker is gone; the reader below then says how it went.
        if let Some(stdin) = &mut worker.stdin {
            let _ = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
        }
        let failure = match worker.hear(Instant::now() + limit, stop, self.launcher.memory_limit) {
            Heard::Line(line) => match serde_json::from_str::<Reply>(&line) {
                Ok(Reply { id: said, answer, failure }) if said == id => {
                    worker.served += 1;
                    self.worker = Some(worker);
                    return match (answer, failure) {
                        (Some(answer), None) => Ok(answer),
                        (_, Some(failure)) => Err(CallError::Failure(failure)),
                        (None, None) => Err(CallError::Failure(Failure::new("run", "the worker answered nothing"))),
                    };
                }
                _ => Failure::new("crash", &format!("the worker sent garbage: {}", trefoil_units::one_line(&line))),
            },
            Heard::Gone => Failure::new("crash", &worker.autopsy()),
            Heard::Late => {
                let words = worker.words();
                let tail = if words.is_empty() { String::new() } else { format!("; it wrote: {words}") };
                Failure::new("timeout", &format!("no answer within {:.1} s{tail}", limit.as_secs_f64()))
            }
            Heard::Stopped => {
                worker.kill();
                return Err(CallError::Interrupted);
            }
            Heard::TooBig(bytes) => Failure::new(
                "limit",
                &format!(
                    "the worker took {} MiB of memory, allowed are {} MiB",
                    bytes >> 20,
                    self.launcher.memory_limit.unwrap_or(0) >> 20
                ),
            ),
        };
        worker.kill();
        self.crashes += 1;
        Err(CallError::Failure(failure))
    }
}
