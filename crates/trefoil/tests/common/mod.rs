//! Helpers of the whole-program tests.
#![allow(dead_code)] // each test binary uses its own part

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The program under test.
pub fn trefoil() -> Command {
    Command::new(env!("CARGO_BIN_EXE_trefoil"))
}

/// Standard output as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is UTF-8")
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output as one JSON value; panics with both streams otherwise.
pub fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("not JSON ({error}):\n{}\n{}", stdout(output), stderr(output)))
}

/// A temporary folder with its own cache, in which the program runs.
pub struct Workspace {
    folder: tempfile::TempDir,
}

impl Workspace {
    /// An empty folder.
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    /// A folder with `small.onnx`, made by `trefoil make-model`.
    pub fn with_model() -> Self {
        let space = Self::new();
        space.run(["make-model", "small.onnx"]);
        space
    }

    /// Profiles `small.onnx` on the units into `p.json`: a first look, unrefined.
    pub fn profile(&self, units: &[&str]) {
        let mut arguments = vec!["profile", "small.onnx", "--quick", "--no-refine", "-o", "p.json"];
        for unit in units {
            arguments.extend(["-u", unit]);
        }
        self.run(arguments);
    }

    /// A path inside.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = trefoil();
        command.current_dir(self.folder.path()).env("TREFOIL_CACHE", self.path("cache")).args(arguments);
        // Discovery walks up from the working folder; a test that needs libraries names them.
        if let Some(site) = std::env::var_os("TREFOIL_TEST_SITE_PACKAGES") {
            let site = Path::new(&site);
            command
                .env("TREFOIL_OPENVINO_LIB", site.join("openvino/libs"))
                .env("TREFOIL_ORT_LIB", site.join("onnxruntime/capi"));
        }
        command
    }

    /// Runs and expects success.
    pub fn output<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        let output = self.command(arguments).output().expect("the program starts");
        assert!(output.status.success(), "{}\n{}\n{}", output.status, stdout(&output), stderr(&output));
        output
    }

    /// Runs, expects success, and drops the output.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) {
        drop(self.output(arguments));
    }

    /// Runs and expects the command line itself to be refused (exit code 2); returns what is said.
    pub fn usage<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> String {
        let output = self.command(arguments).output().expect("the program starts");
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output)
    }

    /// Runs and expects failure with `code` and exactly one line on standard error, which is returned.
    pub fn fails<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>, code: i32) -> String {
        let output = self.command(arguments).output().expect("the program starts");
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{}\n{message}", stdout(&output));
        assert!(!message.contains("panicked"), "{message}");
        let lines: Vec<_> = message.lines().filter(|line| !line.trim().is_empty()).collect();
        assert_eq!(lines.len(), 1, "one clear line: {message}");
        lines[0].to_owned()
    }
}
