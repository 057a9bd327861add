//! diffusers' decoder, run by a Python that has it.

use super::case::output_of;
use super::{Run, Workbench};
use crate::error::CliError;
use std::path::{Path, PathBuf};
use std::process::Command;
use trefoil_units::cores_text;

/// The program; it is written into the work folder, so that an installed Trefoil needs no checkout.
const SCRIPT: &str = include_str!("diffusers_decoder.py");

/// A Python that can decode.
pub struct Peer {
    python: PathBuf,
    script: PathBuf,
}

impl Peer {
    /// Writes the script and asks for the versions, so that a Python without diffusers is told before anything is measured.
    pub fn find(python: &Path, space: &Path) -> Result<Self, CliError> {
        let script = space.join("diffusers_decoder.py");
        let fail = |source| CliError::File { action: "write", path: script.clone(), source };
        std::fs::write(&script, SCRIPT).map_err(fail)?;
        let peer = Self { python: python.to_owned(), script };
        let mut command = peer.command();
        command.arg("--check");
        let _versions: String = output_of(command, &format!("{} with torch and diffusers", python.display()))?;
        Ok(peer)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(&self.script);
        command
    }

    /// Decodes the latent on some cores.
    pub fn decode(&self, bench: &Workbench, cores: &[u32], frames: &Path) -> Result<Run, CliError> {
        let mut command = self.command();
        command.arg("--weights").arg(bench.weights());
        command.arg("--latent").arg(bench.space.path().join("latent.safetensors"));
        command.arg("--frames").arg(frames).args(["--cores", &cores_text(cores)]);
        output_of(command, "diffusers' decoder")
    }
}
