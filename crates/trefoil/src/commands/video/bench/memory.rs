//! Weights in memory, as the kernel counts them: which files, mapped by whom, how much of them is resident.

use serde::Serialize;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use trefoil_report::{Table, format, text_table};
use trefoil_weights::memory::{ResidentMemory, mapping_usage, resident_memory};

/// A process of a configuration.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessMemory {
    /// What it is.
    pub what: String,
    /// Its number.
    pub pid: u32,
    /// Its resident memory by kind; absent where the kernel does not tell it.
    pub resident: Option<ResidentMemory>,
}

/// An artefact in memory.
#[derive(Debug, Clone, Serialize)]
pub struct ArtefactMemory {
    /// Its inode: one inode is one copy, however many processes map it.
    pub inode: u64,
    /// Its size on disk.
    pub bytes: u64,
    /// Mappings of it in all processes.
    pub mappings: usize,
    /// Resident bytes of those mappings, each process counted for itself (`Rss`).
    pub resident_bytes: u64,
    /// The same with shared pages divided among those who map them (`Pss`): what it takes in memory.
    pub proportional_bytes: u64,
}

/// Weights of a configuration while it holds them.
#[derive(Debug, Clone, Serialize)]
pub struct WeightMemory {
    /// Its artefacts: copies of the weights.
    pub artefacts: Vec<ArtefactMemory>,
    /// Bytes of weights that are no pages of an artefact (f32 from the checkpoint).
    pub private_bytes: usize,
    /// Who maps them.
    pub processes: Vec<ProcessMemory>,
}

impl WeightMemory {
    /// Asks the kernel about `artefacts` in these processes. `None` where it tells nothing.
    pub fn of(artefacts: &[&Path], processes: Vec<(String, u32)>, private_bytes: usize) -> Option<WeightMemory> {
        let artefacts = artefacts
            .iter()
            .map(|path| {
                let about = std::fs::metadata(path).ok()?;
                let mut artefact = ArtefactMemory {
                    inode: about.ino(),
                    bytes: about.len(),
                    mappings: 0,
                    resident_bytes: 0,
                    proportional_bytes: 0,
                };
                for (_, pid) in &processes {
                    let usage = mapping_usage(*pid, about.dev(), about.ino())?;
                    artefact.mappings += usage.mappings;
                    artefact.resident_bytes += usage.resident;
                    artefact.proportional_bytes += usage.proportional;
                }
                Some(artefact)
            })
            .collect::<Option<Vec<_>>>()?;
        let processes = processes
            .into_iter()
            .map(|(what, pid)| ProcessMemory { what, pid, resident: resident_memory(pid) })
            .collect();
        Some(WeightMemory { artefacts, private_bytes, processes })
    }

    /// Weights in memory.
    pub fn bytes(&self) -> u64 {
        let mapped: u64 = self.artefacts.iter().map(|artefact| artefact.proportional_bytes).sum();
        mapped + self.private_bytes as u64
    }

    /// Weights in memory over the size of one artefact: one copy is at most 1.
    pub fn over_artefact(&self) -> Option<f64> {
        let one = self.artefacts.first().filter(|artefact| artefact.bytes > 0)?;
        Some(self.bytes() as f64 / one.bytes as f64)
    }

    /// Anonymous memory of all its processes: scratch, states, and whatever would be a hidden copy.
    pub fn anonymous_bytes(&self) -> Option<u64> {
        self.processes.iter().map(|process| Some(process.resident.as_ref()?.anonymous_bytes)).sum()
    }
}

/// One row for each configuration that the kernel told about.
pub fn table(rows: &[(&str, &WeightMemory)]) -> Table {
    let headings = [
        "configuration",
        ">copies",
        ">inodes",
        ">processes",
        ">mappings",
        ">weights (Pss)",
        ">of the artefact",
        ">Rss of them",
        ">own memory",
        ">peak",
    ]
    .map(str::to_owned);
    let rows = rows
        .iter()
        .map(|(name, memory)| {
            let sum = |of: fn(&ArtefactMemory) -> u64| format::bytes(memory.artefacts.iter().map(of).sum());
            let inodes: Vec<String> = memory.artefacts.iter().map(|artefact| artefact.inode.to_string()).collect();
            let peak =
                memory.processes.iter().map(|process| Some(process.resident.as_ref()?.peak_bytes)).sum::<Option<u64>>();
            let bytes = |bytes: Option<u64>| bytes.map_or_else(|| format::ABSENT.to_owned(), format::bytes);
            let cells = [
                (*name).to_owned(),
                memory.artefacts.len().to_string(),
                inodes.join(" "),
                memory.processes.len().to_string(),
                memory.artefacts.iter().map(|artefact| artefact.mappings).sum::<usize>().to_string(),
                format::bytes(memory.bytes()),
                memory.over_artefact().map_or_else(|| format::ABSENT.to_owned(), |share| format!("{share:.3}")),
                sum(|artefact| artefact.resident_bytes),
                bytes(memory.anonymous_bytes()),
                bytes(peak),
            ];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    text_table("Weights in memory, from the kernel", &headings, rows)
}
