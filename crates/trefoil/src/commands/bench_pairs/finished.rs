//! Pairs that are finished, in the cache: `trefoil bench pairs` goes on where it was interrupted, and a further model costs
//! only its own pairs.

use crate::cli::BenchPairsArgs;
use crate::error::CliError;
use crate::several::Ready;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use trefoil_core::Machine;
use trefoil_report::PairRow;

/// Raised when what is measured of a pair, or what a row means, changes.
const RULES: u32 = 1;

/// All that a pair's result depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    rules: u32,
    machine: String,
    versions: String,
    /// Fingerprints, ascending.
    models: [String; 2],
    granularity: String,
    units: Vec<String>,
    items: u32,
    rounds: u32,
    care: String,
}

impl Key {
    /// The key of two models.
    pub fn new(machine: &Machine, first: &Ready, second: &Ready, args: &BenchPairsArgs) -> Self {
        let mut models = [first, second].map(|ready| ready.graph.fingerprint.clone());
        models.sort();
        let measure = &args.measure;
        Self {
            rules: RULES,
            machine: format!("{} {:?} {:?}", machine.cpu, machine.cores, machine.features),
            versions: format!("{:?}", machine.versions),
            models,
            granularity: first.graph.granularity.to_string(),
            units: args.units.iter().map(ToString::to_string).collect(),
            items: args.items,
            rounds: args.rounds,
            care: format!(
                "{} ms, quick {}, refine {} {} s",
                args.pair_ms, measure.quick, !measure.no_refine, measure.refine_budget
            ),
        }
    }
}

/// A finished pair, as it stands in the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finished {
    key: Key,
    /// What came of it; its model indices are those of the invocation that measured it.
    pub row: PairRow,
    /// When.
    pub taken_at: String,
}

/// The file of finished pairs.
#[derive(Debug)]
pub struct FinishedPairs {
    path: PathBuf,
    file: File,
    known: Vec<Finished>,
}

impl FinishedPairs {
    /// Opens or creates it in a cache folder. Lines of other versions, and a line that a crash cut off, are passed over.
    pub fn open(cache: &Path) -> Result<Self, CliError> {
        let path = cache.join("pairs.jsonl");
        let failed = |action: &'static str, path: &Path| {
            let path = path.to_owned();
            move |source| CliError::File { action, path, source }
        };
        std::fs::create_dir_all(cache).map_err(failed("create", cache))?;
        let mut file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed("open", &path))?;
        let bytes = std::fs::read(&path).map_err(failed("read", &path))?;
        if bytes.last().is_some_and(|&byte| byte != b'\n') {
            file.write_all(b"\n").map_err(failed("write", &path))?;
        }
        let known = bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
        Ok(Self { path, file, known })
    }

    /// The newest result under `key`.
    pub fn get(&self, key: &Key) -> Option<&Finished> {
        self.known.iter().rev().find(|finished| finished.key == *key)
    }

    /// Appends a result.
    pub fn put(&mut self, key: Key, row: &PairRow) -> Result<(), CliError> {
        let finished = Finished { key, row: row.clone(), taken_at: trefoil_profile::now_utc() };
        let mut line = serde_json::to_vec(&finished)
            .map_err(|error| CliError::Failed(format!("cannot keep a pair's result: {error}")))?;
        line.push(b'\n');
        // Whole lines in one write, appended: two invocations rarely interleave, and a damaged line is passed over.
        self.file.write_all(&line).map_err(|source| CliError::File {
            action: "write",
            path: self.path.clone(),
            source,
        })?;
        self.known.push(finished);
        Ok(())
    }
}
