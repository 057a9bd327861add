//! `trefoil bench operators`: BIDENT's Observations 1 and 2 (2.2) on whatever units this machine has.

use crate::cli::BenchOperatorsArgs;
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use serde::Serialize;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::{DataType, HostTensor, Samples, Subject, TensorInfo, Unit, UnitAddress};
use trefoil_onnx::builder::{Attribute, ModelBuilder};
use trefoil_profile::{Launcher, PrepareOptions, ProfileOptions};
use trefoil_report::format;

/// One operator or size, timed on every unit.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    shape: String,
    /// Milliseconds per unit, in the order of the units; absent with a reason where it does not run.
    times: Vec<Result<Samples, String>>,
}

/// Runs the command.
pub fn run(args: &BenchOperatorsArgs) -> Result<(), CliError> {
    let addresses = if args.units.is_empty() { available_units() } else { args.units.clone() };
    let units = context::resolve_units(&addresses)?;
    let folder = tempfile::tempdir().map_err(|source| CliError::File {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let line = ProgressLine::new("bench operators", args.json);
    let time = |name: &str, shape: String, model: &ModelBuilder| -> Result<Row, CliError> {
        line.step(&format!("{name} {shape}"));
        let path = folder.path().join(format!("{name}-{}.onnx", shape.replace(['×', ' ', ',', '[', ']', '/'], "_")));
        model.save(&path)?;
        Ok(Row { name: name.to_owned(), shape, times: measure(&path, &units, args)? })
    };
    let mut observation1 = Vec::new();
    for (name, shape, model) in seven_operators() {
        observation1.push(time(name, shape.to_owned(), &model)?);
    }
    let mut observation2 = Vec::new();
    let sizes = (5..).map(|power| 1u64 << power).take_while(|&size| size <= args.max_size);
    for size in sizes {
        observation2.push(time("MatMul", format!("{size}"), &matmul(size))?);
    }
    drop(line);
    let crossovers = crossovers(&observation2, &addresses);
    if args.json {
        return print_json(&json!({
            "machine": trefoil_units::machine(),
            "units": addresses,
            "origin": "measured",
            "observation1": observation1,
            "observation2": observation2,
            "crossovers": crossovers,
        }));
    }
    let mut text = String::new();
    let machine = trefoil_units::machine();
    let _ = writeln!(text, "{}, {} core(s); {}", machine.cpu, machine.cores.len(), versions(&machine.versions));
    text += &table(
        "Observation 1: the best unit depends on the operator (f32, measured)",
        "shape",
        &observation1,
        &addresses,
    );
    text += &table(
        "Observation 2: the best unit depends on the size, MatMul [1,N,N]×[N,N] (f32, measured)",
        "N",
        &observation2,
        &addresses,
    );
    for crossover in crossovers {
        let _ = writeln!(text, "crossover: {crossover}");
    }
    print(&text)
}

fn versions(versions: &std::collections::BTreeMap<String, String>) -> String {
    versions.iter().map(|(name, version)| format!("{name} {version}")).collect::<Vec<_>>().join(", ")
}

/// Every real unit that can be used here.
pub fn available_units() -> Vec<UnitAddress> {
    let usable = |report: &trefoil_units::UnitReport| {
        !report.unit.simulated && matches!(report.availability, trefoil_units::Availability::Available { .. })
    };
    trefoil_units::list().into_iter().filter(usable).map(|report| report.unit.address).collect()
}

/// Whole-model times of a one-operator model, in the order of the units.
fn measure(path: &Path, units: &[Unit], args: &BenchOperatorsArgs) -> Result<Vec<Result<Samples, String>>, CliError> {
    let cache = context::cache_dir(args.cache.as_deref());
    let launcher = Launcher::discover()?;
    let prepared = trefoil_profile::prepare_model(
        path,
        &PrepareOptions::new(launcher.clone(), cache.clone()),
        context::stop_flag(),
    )?;
    let mut options = ProfileOptions::new(launcher, cache);
    options.warmup = args.measure.warmup;
    options.runs = args.measure.runs;
    options.cap_ms = args.measure.cap_ms;
    options.quick = args.measure.quick;
    options.fresh = args.measure.fresh;
    options.baselines = false;
    options.node_times = false;
    let profile = trefoil_profile::profile(&prepared, units, &options, &mut |_| {}, context::stop_flag())?;
    let index = profile.index();
    let subject = Subject::WholeModel { model: prepared.prepared.fingerprint().to_owned() };
    let of = |unit: &Unit| match index.newest(&subject, std::slice::from_ref(&unit.address)) {
        None => Err("not measured".to_owned()),
        Some(measurement) => match measurement.total() {
            Some(samples) => Ok(*samples),
            None => Err(measurement.failure().unwrap_or_default()),
        },
    };
    Ok(units.iter().map(of).collect())
}

fn info(name: &str, shape: &[u64]) -> TensorInfo {
    TensorInfo::new(name, DataType::F32, shape)
}

fn matmul(size: u64) -> ModelBuilder {
    ModelBuilder::new("matmul", 17)
        .input(&info("x", &[1, size, size]))
        .random_constant("w", &[size, size], 1.0 / (size as f32).sqrt())
        .node("MatMul", &["x", "w"], &["y"], &[])
        .output(&info("y", &[1, size, size]))
}

/// The paper's seven operators (figure 2). Its shapes are not given in its text; these are common ones of the model
/// families it names.
pub fn seven_operators() -> Vec<(&'static str, &'static str, ModelBuilder)> {
    let ints = |values: &[i64]| Attribute::Ints(values.to_vec());
    let conv = |group: i64| {
        vec![("kernel_shape", ints(&[3, 3])), ("pads", ints(&[1, 1, 1, 1])), ("group", Attribute::Int(group))]
    };
    let image = || info("x", &[1, 128, 28, 28]);
    let image_out = || info("y", &[1, 128, 28, 28]);
    let scan = || info("x", &[1, 64, 2048, 16]);
    vec![
        ("MatMul", "[1,512,512]×[512,512]", matmul(512)),
        (
            "Conv2D",
            "[1,128,28,28], 128 of 3×3",
            ModelBuilder::new("conv", 17)
                .input(&image())
                .random_constant("w", &[128, 128, 3, 3], 0.03)
                .node("Conv", &["x", "w"], &["y"], &conv(1))
                .output(&image_out()),
        ),
        (
            "DWConv",
            "[1,128,28,28], 3×3 per channel",
            ModelBuilder::new("dwconv", 17)
                .input(&image())
                .random_constant("w", &[128, 1, 3, 3], 0.3)
                .node("Conv", &["x", "w"], &["y"], &conv(128))
                .output(&image_out()),
        ),
        (
            "Add",
            "[1,512,1024]",
            ModelBuilder::new("add", 17)
                .input(&info("x", &[1, 512, 1024]))
                .input(&info("z", &[1, 512, 1024]))
                .node("Add", &["x", "z"], &["y"], &[])
                .output(&info("y", &[1, 512, 1024])),
        ),
        (
            "RDFT",
            "[64,512,1], one-sided",
            ModelBuilder::new("rdft", 17)
                .input(&info("x", &[64, 512, 1]))
                .node("DFT", &["x"], &["y"], &[("axis", Attribute::Int(1)), ("onesided", Attribute::Int(1))])
                .output(&info("y", &[64, 257, 2])),
        ),
        (
            "CumSum",
            "[1,64,2048,16], axis 1",
            ModelBuilder::new("cumsum", 17)
                .input(&scan())
                .constant(&HostTensor::from_i64("axis", [], &[1]))
                .node("CumSum", &["x", "axis"], &["y"], &[])
                .output(&info("y", &[1, 64, 2048, 16])),
        ),
        (
            "Gather",
            "[4096,256] rows by 512 indices",
            ModelBuilder::new("gather", 17)
                .random_constant("table", &[4096, 256], 1.0)
                .input(&TensorInfo::new("x", DataType::I64, [512u64]))
                .node("Gather", &["table", "x"], &["y"], &[])
                .output(&info("y", &[512, 256])),
        ),
    ]
}

/// The fastest unit of a row.
fn best(row: &Row) -> Option<usize> {
    let times =
        row.times.iter().enumerate().filter_map(|(unit, time)| time.as_ref().ok().map(|time| (unit, time.median)));
    times.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(unit, _)| unit)
}

/// Sizes at which the fastest unit changes.
fn crossovers(rows: &[Row], units: &[UnitAddress]) -> Vec<String> {
    let pairs = rows.windows(2).filter_map(|pair| {
        let (before, after) = (best(&pair[0])?, best(&pair[1])?);
        (before != after).then(|| {
            format!("{} is fastest at N = {}, {} at N = {}", units[before], pair[0].shape, units[after], pair[1].shape)
        })
    });
    pairs.collect()
}

fn table(title: &str, shape_heading: &str, rows: &[Row], units: &[UnitAddress]) -> String {
    let mut headings = vec!["operator".to_owned(), shape_heading.to_owned()];
    headings.extend(units.iter().map(|unit| format!(">{unit}")));
    headings.push("fastest".to_owned());
    headings.push(">next / fastest".to_owned());
    let mut cells_of_rows = Vec::with_capacity(rows.len());
    for row in rows {
        let fastest = best(row);
        let mut cells = vec![(row.name.clone(), false), (row.shape.clone(), false)];
        for (unit, time) in row.times.iter().enumerate() {
            let text = match time {
                Ok(samples) => format::time(samples.median),
                Err(reason) => reason.split([':', ';']).next().unwrap_or("no").to_owned(),
            };
            cells.push((text, fastest == Some(unit)));
        }
        let mut sorted: Vec<f64> = row.times.iter().flatten().map(|samples| samples.median).collect();
        sorted.sort_by(f64::total_cmp);
        cells.push((fastest.map_or_else(|| "none".to_owned(), |unit| units[unit].to_string()), false));
        let lead = match sorted.as_slice() {
            [first, second, ..] if *first > 0.0 => format!("{:.2}", second / first),
            _ => format::ABSENT.to_owned(),
        };
        cells.push((lead, false));
        cells_of_rows.push(cells);
    }
    let table = trefoil_report::text_table(title, &headings, cells_of_rows);
    let mut text = String::from("\n");
    text += &table.render(trefoil_report::TableFormat::Text, context::width());
    for row in rows {
        for (unit, time) in row.times.iter().enumerate() {
            if let Err(reason) = time {
                let _ = writeln!(text, "{} on {}: {reason}", row.name, units[unit]);
            }
        }
    }
    text
}
