//! Calling a worker process: a line of JSON in, a file of JSON out.

use crate::{RunError, RunRequest, WorkerCommand};
use serde::de::DeserializeOwned;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Starts a worker for `who`, waits for it and reads its answer.
pub(crate) fn call<R: DeserializeOwned>(
    who: &str,
    request: &RunRequest,
    command: &WorkerCommand,
    timeout: Duration,
) -> Result<R, RunError> {
    let failed = |reason: String| RunError::Worker { contender: who.to_owned(), reason };
    let log = request.result.with_extension("log");
    let log_file = std::fs::File::create(&log).map_err(|error| RunError::io(&log, &error))?;
    let mut child = Command::new(&command.program)
        .args(&command.arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(log_file)
        .spawn()
        .map_err(|error| RunError::Start { what: command.program.display().to_string(), reason: error.to_string() })?;
    let line = serde_json::to_string(request).map_err(|error| failed(error.to_string()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A child that is gone already tells its reason by its exit status.
        let _ = writeln!(stdin, "{line}");
    }
    let status = wait(&mut child, timeout).map_err(|reason| failed(with_last_line(&reason, &log)))?;
    match std::fs::read(&request.result) {
        Ok(text) if status.success() => {
            serde_json::from_slice(&text).map_err(|error| failed(format!("its result is damaged: {error}")))
        }
        _ => Err(failed(with_last_line(&describe(status), &log))),
    }
}

fn wait(child: &mut Child, timeout: Duration) -> Result<ExitStatus, String> {
    let began = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if began.elapsed() < timeout => {
                std::thread::sleep(pause);
                // Rare looks: the parent must not take time from what is being measured.
                pause = (pause * 2).min(Duration::from_millis(50));
            }
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("gave up after {:.0} s", timeout.as_secs_f64()));
            }
            Err(error) => {
                let _ = child.kill();
                return Err(error.to_string());
            }
        }
    }
}

fn describe(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("the process died of signal {signal}");
    }
    match status.code() {
        Some(0) => "the process ended without a result".to_owned(),
        Some(code) => format!("the process ended with exit code {code}"),
        None => "the process ended oddly".to_owned(),
    }
}

fn with_last_line(reason: &str, log: &Path) -> String {
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    match text.lines().rev().find(|line| !line.trim().is_empty()) {
        Some(line) => format!("{reason}; its last words: {}", trefoil_units::one_line(line)),
        None => reason.to_owned(),
    }
}
