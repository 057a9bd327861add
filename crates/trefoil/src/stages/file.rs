//! The pipeline file: stages, what they hand on, and how often the whole of it is asked for. See the page on file formats.

use crate::context;
use crate::error::CliError;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use trefoil_core::Quantity;
use trefoil_core::quantity::short;
use trefoil_onnx::Update;

/// Name of the file format, first field of every pipeline file.
const FORMAT: &str = "trefoil-pipeline";
/// Version of the file format that this build reads.
const VERSION: u32 = 1;
/// Executions of one stage within one inference at most.
const MOST_REPEATS: u32 = 10_000;

/// A pipeline file, checked in itself.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineFile {
    format: String,
    version: u32,
    /// Name to show; the file's by default.
    #[serde(default)]
    pub name: String,
    /// Its stages, in any order.
    pub stages: Vec<StageEntry>,
    /// Inferences asked for in a second; without it each begins when the last one has ended.
    #[serde(default)]
    pub rate_hz: Option<f64>,
    /// When the first one is asked for, in milliseconds.
    #[serde(default)]
    pub offset_ms: f64,
    /// Milliseconds in which an inference is in time.
    #[serde(default)]
    pub deadline_ms: Option<f64>,
    #[serde(skip)]
    path: PathBuf,
}

/// A stage.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageEntry {
    /// Its name.
    pub name: String,
    /// Its ONNX file; relative paths start at the pipeline file's folder.
    pub model: PathBuf,
    /// Static shapes of inputs with symbolic extents.
    #[serde(default)]
    pub shapes: BTreeMap<String, Vec<u64>>,
    /// Executions within one inference.
    #[serde(default = "once")]
    pub repeat: u32,
    /// Where its inputs come from; what is not named is random.
    #[serde(default)]
    pub inputs: BTreeMap<String, InputEntry>,
}

fn once() -> u32 {
    1
}

/// Where an input comes from: one of `from`, `file`, `values`, `fill` and `random`; and in a loop, what comes `next`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputEntry {
    /// Another stage.
    pub from: Option<String>,
    /// Its output.
    pub output: Option<String>,
    /// A `.npz` or `.npy` file.
    pub file: Option<PathBuf>,
    /// The tensor in it; the input's name by default.
    pub tensor: Option<String>,
    /// Every element.
    pub values: Option<Vec<f64>>,
    /// One value for all elements.
    pub fill: Option<f64>,
    /// Seed of random data.
    pub random: Option<u64>,
    /// The input of the next iteration.
    pub next: Option<NextEntry>,
}

/// `keep·input + scale·output + add`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NextEntry {
    /// An output of the stage itself.
    pub output: Option<String>,
    /// Factor of the output.
    pub scale: Option<f64>,
    /// Whether the input itself is added.
    #[serde(default)]
    pub keep: bool,
    /// A constant to add.
    #[serde(default)]
    pub add: f64,
}

impl NextEntry {
    /// As the model is given it. Without an output it is the input that is carried on.
    pub fn update(&self, input: &str) -> Update {
        Update {
            input: input.to_owned(),
            output: self.output.clone(),
            scale: self.scale.unwrap_or(1.0),
            keep: self.keep || self.output.is_none(),
            add: self.add,
        }
    }
}

impl PipelineFile {
    /// Whether a path on the command line is meant to be a pipeline file.
    pub fn is_meant(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`CliError::File`], [`CliError::Usage`] with the path of the key that is wrong.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let text = context::read_file(path)?;
        let mut file = Self::parse(&text).map_err(|what| CliError::Usage(format!("{}: {what}", path.display())))?;
        path.clone_into(&mut file.path);
        if file.name.is_empty() {
            file.name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        }
        Ok(file)
    }

    /// Parses and checks the text; the error is `key.path: what is wrong`.
    fn parse(text: &[u8]) -> Result<Self, String> {
        // Of another format it would be told about its first unknown field only.
        #[derive(Deserialize)]
        struct Head {
            format: Option<String>,
            version: Option<u32>,
        }
        let head: Head = serde_json::from_slice(text).map_err(|error| format!("is no pipeline file: {error}"))?;
        match head.format.as_deref() {
            Some(FORMAT) => {}
            Some(other) => return Err(format!("format: is `{other}`, a pipeline file has `{FORMAT}`")),
            None => return Err(format!("format: is missing; a pipeline file begins with \"format\": \"{FORMAT}\"")),
        }
        if head.version != Some(VERSION) {
            let found = head.version.map_or_else(|| "missing".to_owned(), |version| version.to_string());
            return Err(format!("version: is {found}; this Trefoil reads version {VERSION}"));
        }
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        let file: Self = serde_path_to_error::deserialize(&mut deserializer)
            .map_err(|error| format!("{}: {}", error.path(), error.inner()))?;
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        if self.stages.is_empty() {
            return Err("stages: there is none".to_owned());
        }
        let mut names = BTreeSet::new();
        for (at, stage) in self.stages.iter().enumerate() {
            let fail = |key: &str, what: &str| Err(format!("stages[{at}].{key}: {what}"));
            if stage.name.is_empty() || stage.name.contains('/') {
                return fail("name", "must have characters, and no `/`");
            }
            if !names.insert(&stage.name) {
                return fail("name", &format!("`{}` is taken by an earlier stage", stage.name));
            }
            if stage.repeat == 0 || stage.repeat > MOST_REPEATS {
                return fail("repeat", &format!("{} is not between 1 and {MOST_REPEATS}", stage.repeat));
            }
            for (input, entry) in &stage.inputs {
                if let Err(what) = self.check_input(stage, entry) {
                    return fail(&format!("inputs.{input}"), &what);
                }
            }
        }
        if !self.rate_hz.is_none_or(|rate| (1e-4..=1e6).contains(&rate)) {
            return Err("rate_hz: is no number of inferences a second between 0.0001 and 1000000".to_owned());
        }
        if !self.deadline_ms.is_none_or(|deadline| deadline > 0.0 && Quantity::Time.holds(deadline)) {
            return Err("deadline_ms: is no number of milliseconds above 0".to_owned());
        }
        if !Quantity::Time.holds(self.offset_ms) {
            return Err(format!("offset_ms: {} is no {}", short(self.offset_ms), Quantity::Time));
        }
        if self.rate_hz.is_none() && (self.deadline_ms.is_some() || self.offset_ms > 0.0) {
            return Err("rate_hz: is missing; deadline_ms and offset_ms are about inferences at a rate".to_owned());
        }
        self.order().map(drop)
    }

    fn check_input(&self, stage: &StageEntry, entry: &InputEntry) -> Result<(), String> {
        let given = [
            ("from", entry.from.is_some()),
            ("file", entry.file.is_some()),
            ("values", entry.values.is_some()),
            ("fill", entry.fill.is_some()),
            ("random", entry.random.is_some()),
        ];
        let given: Vec<&str> = given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect();
        if let [first, second, ..] = given.as_slice() {
            return Err(format!("has both `{first}` and `{second}`; it can come from one place only"));
        }
        match (&entry.from, &entry.output) {
            (Some(from), _) if *from == stage.name => {
                return Err(
                    "comes from its own stage; say so with `next`, and where the first one comes from".to_owned()
                );
            }
            (Some(from), _) if !self.stages.iter().any(|other| other.name == *from) => {
                let names: Vec<_> = self.stages.iter().map(|other| other.name.as_str()).collect();
                return Err(format!("comes from stage `{from}`, which does not exist; there are {}", names.join(", ")));
            }
            (Some(from), None) => return Err(format!("comes from stage `{from}`; name its `output`")),
            (None, Some(_)) => return Err("has an `output`, but not the stage it is `from`".to_owned()),
            _ => {}
        }
        if entry.tensor.is_some() && entry.file.is_none() {
            return Err("has a `tensor`, but not the `file` it is in".to_owned());
        }
        let numbers = entry.values.iter().flatten().chain(&entry.fill);
        if numbers.into_iter().any(|value| !value.is_finite()) {
            return Err("has a value that is no finite number".to_owned());
        }
        if let Some(next) = &entry.next {
            if stage.repeat < 2 {
                return Err("has a `next`, but its stage is executed once; give it `repeat`".to_owned());
            }
            if next.output.is_none() && next.scale.is_some() {
                return Err("next.scale: is for an output; name one".to_owned());
            }
            if ![next.scale.unwrap_or(1.0), next.add].iter().all(|value| value.is_finite()) {
                return Err("next: has a value that is no finite number".to_owned());
            }
        }
        Ok(())
    }

    /// Index of a stage.
    pub fn stage(&self, name: &str) -> Option<usize> {
        self.stages.iter().position(|stage| stage.name == name)
    }

    /// Stages in an order in which each comes after those it reads from.
    pub fn order(&self) -> Result<Vec<usize>, String> {
        let sources = |stage: usize| {
            let inputs = self.stages[stage].inputs.values();
            inputs.filter_map(|entry| self.stage(entry.from.as_deref()?)).collect::<Vec<_>>()
        };
        let mut order: Vec<usize> = Vec::new();
        while order.len() < self.stages.len() {
            let free =
                |stage: &usize| !order.contains(stage) && sources(*stage).iter().all(|from| order.contains(from));
            let Some(next) = (0..self.stages.len()).find(free) else {
                let stuck = (0..self.stages.len()).find(|stage| !order.contains(stage)).unwrap_or(0);
                return Err(format!("stages[{stuck}].inputs: stages read from each other in a circle"));
            };
            order.push(next);
        }
        Ok(order)
    }

    /// A path of the file, from its folder on.
    pub fn resolve(&self, path: &Path) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(path)
    }

    /// An error about a key of a stage.
    pub fn wrong(&self, stage: usize, key: &str, what: impl std::fmt::Display) -> CliError {
        CliError::Usage(format!("{}: stages[{stage}].{key}: {what}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(stages: &str, more: &str) -> Result<PipelineFile, String> {
        let text = format!("{{\"format\":\"trefoil-pipeline\",\"version\":1,\"stages\":[{stages}]{more}}}");
        PipelineFile::parse(text.as_bytes())
    }

    #[test]
    fn a_loop_behind_an_encoder_is_read() {
        let stages = r#"{"name":"denoise","model":"d.onnx","repeat":10,"inputs":{
                "x":{"random":3,"next":{"output":"v","scale":-0.1,"keep":true}},
                "t":{"fill":1.0,"next":{"add":-0.1}},
                "kv":{"from":"prefix","output":"kv"}}},
            {"name":"prefix","model":"p.onnx","shapes":{"ids":[1,8]}}"#;
        let file = with(stages, r#","rate_hz":10,"offset_ms":5,"deadline_ms":80"#).unwrap();
        assert_eq!(file.order().unwrap(), [1, 0]);
        let next = file.stages[0].inputs["t"].next.as_ref().unwrap().update("t");
        assert!(next.keep && next.output.is_none() && next.next() == "t.next");
        assert!(!file.stages[0].inputs["x"].next.as_ref().unwrap().update("x").is_plain());
    }

    #[test]
    fn the_example_is_read() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/pi05.json");
        let file = PipelineFile::read(&path).unwrap();
        assert_eq!((file.name.as_str(), file.order().unwrap().len(), file.stages[3].repeat), ("pi05", 4, 10));
        assert!(file.resolve(&file.stages[0].model).starts_with(path.parent().unwrap()));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_key() {
        let stage = |inputs: &str| format!(r#"{{"name":"a","model":"a.onnx","inputs":{{{inputs}}}}}"#);
        for (stages, more, wanted) in [
            (String::new(), "", "stages: there is none"),
            (stage(r#""x":{"from":"b","output":"y"}"#), "", "stages[0].inputs.x: comes from stage `b`"),
            (stage(r#""x":{"from":"a","output":"y"}"#), "", "stages[0].inputs.x: comes from its own stage"),
            (stage(r#""x":{"fill":1,"random":2}"#), "", "stages[0].inputs.x: has both `fill` and `random`"),
            (stage(r#""x":{"next":{"output":"y"}}"#), "", "stages[0].inputs.x: has a `next`"),
            (stage(r#""x":{"tensor":"y"}"#), "", "stages[0].inputs.x: has a `tensor`"),
            (stage(r#""x":{"fil":1}"#), "", "stages[0].inputs.x"),
            (stage(r#""x":{"fill":"one"}"#), "", "stages[0].inputs.x.fill"),
            (r#"{"name":"a"}"#.to_owned(), "", "stages[0]: missing field `model`"),
            (r#"{"name":"a/b","model":"m"}"#.to_owned(), "", "stages[0].name"),
            (format!("{},{}", stage(""), stage("")), "", "stages[1].name: `a` is taken"),
            (r#"{"name":"a","model":"m","repeat":0}"#.to_owned(), "", "stages[0].repeat"),
            (stage(""), r#","rate_hz":0"#, "rate_hz"),
            (stage(""), r#","deadline_ms":5"#, "rate_hz: is missing"),
            (stage(""), r#","rate_hz":5,"deadline_ms":-1"#, "deadline_ms"),
            (stage(""), r#","rate_hz":5,"deadline_ms":1e308"#, "deadline_ms"),
            (stage(""), r#","rate_hz":5,"offset_ms":1e308"#, "offset_ms: 1e308 is no time"),
            (stage(""), r#","rate":5"#, "rate"),
            (
                r#"{"name":"a","model":"m","inputs":{"x":{"from":"b","output":"y"}}},
                   {"name":"b","model":"m","inputs":{"x":{"from":"a","output":"y"}}}"#
                    .to_owned(),
                "",
                "circle",
            ),
        ] {
            let message = with(&stages, more).unwrap_err();
            assert!(message.starts_with(wanted) || message.contains(wanted), "{wanted}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
        let of = |text: &str| PipelineFile::parse(text.as_bytes()).unwrap_err();
        assert!(of("{").starts_with("is no pipeline file"));
        assert!(of("{}").starts_with("format: is missing"));
        assert!(of(r#"{"format":"trefoil-plan","version":1}"#).contains("`trefoil-plan`"));
        assert!(of(r#"{"format":"trefoil-pipeline","version":9}"#).starts_with("version: is 9"));
    }
}
