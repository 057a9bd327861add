//! Synthetic input for the example and the tests: invented numbers, deterministic, through the real core types.

use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::plan::{PLAN_FORMAT, PLAN_VERSION, PlannedModel};
use trefoil_core::{
    CostRef, DataType, Granularity, Lane, Machine, Measurement, MeasurementId, Objective, Operator, OperatorClass,
    OperatorGraph, OperatorId, Origin, Outcome, Plan, Profile, Resource, Samples, Segment, SegmentId, Signature, Span,
    SpanKind, Subject, Task, TaskId, TensorEdge, TensorId, Timeline, Timing, Unit, UnitAddress, UnitKind, UnitLimits,
    Work,
};
use trefoil_report::{ContenderKind, ContenderRow, MemoryRow, ModelReport, ModelRow, Ratio, ReportInput, UnitRow};

/// Says what this is, wherever it shows.
pub const BANNER: &str = "Synthetic example: every number on this page is made up to show the layout.";

const KINDS: [(&str, f64); 8] = [
    ("Conv+Relu", 1.0),
    ("Conv", 0.8),
    ("MatMul+Add", 1.4),
    ("Softmax", 0.2),
    ("LayerNormalization", 0.25),
    ("Transpose", 0.3),
    ("CumSum", 2.0),
    ("Add", 0.08),
];

/// A small deterministic generator: the numbers must be the same on every machine.
pub struct Noise(u64);

impl Noise {
    /// Starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next number in `low..high`.
    pub fn next(&mut self, low: f64, high: f64) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        low + (high - low) * ((self.0 >> 11) as f64 / (1_u64 << 53) as f64)
    }
}

/// A chain of `count` operators.
pub fn graph(model: &str, count: u32, seed: u64) -> OperatorGraph {
    let mut noise = Noise::new(seed);
    let mut tensors = vec![TensorEdge {
        name: "pixel_values".into(),
        dtype: DataType::F32,
        shape: vec![1, 3, 224, 224],
        bytes: 602_112,
        producer: None,
        consumers: vec![OperatorId(0)],
    }];
    let mut operators = Vec::new();
    for index in 0..count {
        let kind = KINDS[(noise.next(0.0, 7.999)) as usize].0;
        let channels = 16_u64 << (u64::from(index) * 4 / u64::from(count));
        let consumers = if index + 1 < count { vec![OperatorId(index + 1)] } else { Vec::new() };
        tensors.push(TensorEdge {
            name: format!("stage{}_{index}_out", index * 4 / count),
            dtype: DataType::F32,
            shape: vec![1, channels, 56, 56],
            bytes: channels * 56 * 56 * 4,
            producer: Some(OperatorId(index)),
            consumers,
        });
        operators.push(Operator {
            name: format!(
                "/backbone/stage{}/blocks.{}/{}_{index}",
                index * 4 / count,
                index / 6,
                kind.replace('+', "_")
            ),
            kind: kind.into(),
            nodes: vec![index],
            inputs: vec![TensorId(index)],
            outputs: vec![TensorId(index + 1)],
            signature: Signature(format!("{:032x}", u128::from(index) + (u128::from(seed) << 64))),
            class: if kind.starts_with("Conv") || kind.starts_with("Mat") {
                OperatorClass::Compute
            } else {
                OperatorClass::Memory
            },
            flops: (kind != "Transpose").then(|| channels * channels * 9 * 56 * 56 * 2),
            weight_bytes: if kind.starts_with("Conv") { channels * channels * 9 * 4 } else { 0 },
        });
    }
    OperatorGraph {
        model: model.into(),
        fingerprint: format!("{seed:032x}"),
        granularity: Granularity::Fused,
        tensors,
        operators,
        inputs: vec![TensorId(0)],
        outputs: vec![TensorId(count)],
    }
}

/// The machine of the example.
pub fn machine() -> Machine {
    Machine {
        cpu: "Example CPU (synthetic)".into(),
        cores: vec![0, 1, 2, 3],
        memory_bytes: 16_000_000_000,
        os: "Linux 6.1 (synthetic)".into(),
        features: vec!["avx2".into(), "avx512_vnni".into()],
        versions: [("openvino", "0.0-example"), ("onnxruntime", "0.0-example"), ("trefoil", "0.1.0")]
            .map(|(name, version)| (name.to_owned(), version.to_owned()))
            .into(),
    }
}

fn unit(address: &str, simulated: bool) -> Unit {
    let address: UnitAddress = address.parse().expect("the example's unit addresses are valid");
    let resource = match address.cores.first() {
        Some(&core) => Resource::Core(core),
        None => Resource::Device(address.to_string()),
    };
    Unit {
        kind: if simulated { UnitKind::Npu } else { UnitKind::Cpu },
        resources: BTreeSet::from([resource]),
        limits: UnitLimits::default(),
        simulated,
        description: None,
        address,
    }
}

/// A profile of `graph` on two CPU backends and, if asked, a simulated NPU that lacks some kinds. What [`plan`] in
/// `parts` segments places somewhere runs there.
pub fn profile(graph: &OperatorGraph, with_simulated: bool, parts: u32) -> Profile {
    let mut profile = Profile::new(machine());
    profile.units = vec![unit("openvino:CPU@0", false), unit("ort:CPU@1", false)];
    if with_simulated {
        profile.units.push(unit("sim:example/NPU", true));
    }
    let mut noise = Noise::new(7);
    let units: Vec<_> = profile.units.iter().map(|unit| (unit.address.clone(), unit.simulated)).collect();
    for (column, (address, simulated)) in units.iter().enumerate() {
        let mut sum = 0.0;
        for operator in &graph.operators {
            let base = KINDS.iter().find(|(kind, _)| *kind == operator.kind).map_or(1.0, |(_, ms)| *ms);
            let tilt = match (operator.kind.as_str(), column) {
                ("CumSum", 0) => 9.0,
                ("Softmax", 0) => 2.4,
                ("Transpose", 0) => 2.2,
                ("Conv+Relu", 1) => 1.6,
                ("LayerNormalization", 1) => 1.3,
                (_, 2) => 0.4,
                _ => 1.0,
            };
            let ms = base * tilt * noise.next(0.05, 0.9);
            let count = graph.len() as u32;
            let part = (0..parts).rfind(|part| count * part / parts <= operator.nodes[0]).unwrap_or(0);
            let placed = part as usize % units.len() == column;
            let outcome = match (operator.kind.as_str(), if placed { usize::MAX } else { column }) {
                ("CumSum", 2) => Outcome::Failed {
                    stage: "compile".into(),
                    reason: "CumSum is not in the <machine description>".into(),
                },
                ("LayerNormalization", 0) if operator.nodes[0] % 11 == 3 => {
                    Outcome::Wrong { error_to_peak: 0.31, tolerance: 1e-3, reason: "output `y` differs".into() }
                }
                _ => {
                    sum += ms;
                    let wide = if noise.next(0.0, 1.0) > 0.93 { 0.4 } else { 0.03 };
                    let samples = Samples {
                        count: if *simulated { 1 } else { 200 },
                        median: ms,
                        p10: ms * (1.0 - wide / 3.0),
                        p90: ms * (1.0 + wide),
                        min: ms * 0.95,
                        max: ms * 1.8,
                    };
                    let samples = if *simulated { Samples::exactly(ms) } else { samples };
                    Outcome::Ok {
                        timing: Timing { total: Some(samples), ..Timing::default() },
                        error_to_peak: Some(1e-6),
                        nodes: Vec::new(),
                    }
                }
            };
            let subject = Subject::Operator { signature: operator.signature.clone() };
            push(&mut profile, subject, address, *simulated, outcome);
        }
        let timing = Timing { total: Some(Samples::exactly(sum * 0.83)), ..Timing::default() };
        let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
        let whole = match column {
            2 => Outcome::Failed { stage: "compile".into(), reason: "CumSum is not in the machine description".into() },
            _ => Outcome::Ok { timing, error_to_peak: None, nodes: Vec::new() },
        };
        push(&mut profile, subject, address, *simulated, whole);
    }
    profile.models.push(graph.clone());
    profile
}

fn push(profile: &mut Profile, subject: Subject, unit: &UnitAddress, simulated: bool, outcome: Outcome) {
    profile.measurements.push(Measurement {
        id: MeasurementId::new(&subject, std::slice::from_ref(unit), 0),
        subject,
        units: vec![unit.clone()],
        origin: if simulated { Origin::Simulated } else { Origin::Measured },
        outcome,
        conditions: trefoil_core::Conditions::default(),
        versions: BTreeMap::new(),
        taken_at: "2000-01-01T00:00:00Z".into(),
    });
}

/// A plan that cuts the chain into `parts` segments on the profile's units in turn, with a transfer before each.
pub fn plan(graph: &OperatorGraph, profile: &Profile, parts: u32) -> Plan {
    let mut noise = Noise::new(u64::from(parts));
    let count = graph.len() as u32;
    let units = &profile.units;
    let (mut segments, mut tasks, mut order) = (Vec::new(), Vec::<Task>::new(), BTreeMap::<String, Vec<TaskId>>::new());
    let mut lanes: Vec<Lane> =
        units.iter().map(|unit| Lane { name: unit.address.to_string(), spans: Vec::new() }).collect();
    let mut at = 0.0;
    for part in 0..parts {
        let on = part as usize % units.len();
        let unit = &units[on].address;
        let operators: Vec<_> = (count * part / parts..count * (part + 1) / parts).map(OperatorId).collect();
        let (inputs, outputs) = graph.boundary(&operators.iter().copied().collect());
        let origin = if units[on].simulated { Origin::Simulated } else { Origin::Measured };
        let cost = |ms: f64, origin| CostRef { ms, joules: None, origin, measurements: Vec::new() };
        let mut task = |work, ms: f64, label: String, kind, origin| {
            let id = TaskId(tasks.len() as u32);
            let after = id.0.checked_sub(1).map(TaskId).into_iter().collect();
            tasks.push(Task { work, unit: unit.clone(), iteration: 0, item: 0, after, cost: cost(ms, origin) });
            order
                .entry(units[on].resources.iter().next().map(ToString::to_string).unwrap_or_default())
                .or_default()
                .push(id);
            lanes[on].spans.push(Span { task: id, label, kind, start_ms: at, end_ms: at + ms });
            at += ms;
        };
        if part > 0 {
            let work = Work::Transfer {
                model: 0,
                tensor: inputs[0],
                from: Some(units[(part as usize - 1) % units.len()].address.clone()),
            };
            let name = &graph.tensor(inputs[0]).name;
            task(work, noise.next(0.05, 0.25), format!("transfer {name}"), SpanKind::Transfer, origin);
        }
        let ms = noise.next(0.6, 3.2);
        task(Work::Segment { segment: SegmentId(part) }, ms, format!("segment {part}"), SpanKind::Compute, origin);
        segments.push(Segment { model: 0, unit: unit.clone(), operators, inputs, outputs, cost: cost(ms, origin) });
    }
    Plan {
        format: PLAN_FORMAT.into(),
        version: PLAN_VERSION,
        method: "interval".into(),
        objective: Objective::Latency,
        requests: Vec::new(),
        links: Vec::new(),
        models: vec![PlannedModel {
            name: graph.model.clone(),
            fingerprint: graph.fingerprint.clone(),
            granularity: graph.granularity,
            operators: count,
        }],
        units: units.clone(),
        segments,
        tasks,
        order,
        claimed: at,
        simulated_ms: at,
        model_bound: Some(at * 0.97),
        gap: Some(1.0 / 0.97 - 1.0),
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        all_measured: !units.iter().any(|unit| unit.simulated),
        notes: vec!["estimates were lower bounds in 3 of 3 refinement rounds".into()],
        timeline: Timeline { origin: Origin::Predicted, lanes },
    }
}

/// What a run of `plan` could have looked like: the predicted lanes, stretched a little.
pub fn trace(plan: &Plan) -> Timeline {
    let mut noise = Noise::new(99);
    let stretch: Vec<f64> = plan.tasks.iter().map(|_| noise.next(0.93, 1.15)).collect();
    let mut starts = Vec::new();
    let mut at = 0.02;
    for (task, factor) in plan.tasks.iter().zip(&stretch) {
        starts.push(at);
        at += task.cost.ms * factor + 0.012;
    }
    let mut lanes = plan.timeline.lanes.clone();
    for span in lanes.iter_mut().flat_map(|lane| &mut lane.spans) {
        let index = span.task.0 as usize;
        span.start_ms = starts[index];
        span.end_ms = starts[index] + plan.tasks[index].cost.ms * stretch[index];
    }
    Timeline { origin: Origin::Measured, lanes }
}

fn samples(ms: f64) -> Samples {
    Samples { count: 60, median: ms, p10: ms * 0.975, p90: ms * 1.06, min: ms * 0.96, max: ms * 1.3 }
}

/// A comparison of single units with a plan of `plan_ms`.
pub fn contenders(plan_ms: f64, predicted_ms: f64, ratio: Ratio, crossings: usize) -> Vec<ContenderRow> {
    let single = |name: &str, ms: f64| ContenderRow::new(name, ContenderKind::Single, Origin::Measured, &samples(ms));
    let best = plan_ms * ratio.median;
    let plan = ContenderRow {
        predicted_ms: Some(predicted_ms),
        crossings: Some(crossings),
        ratio: Some(ratio),
        winner: ratio.low > 1.0,
        ..ContenderRow::new("interval", ContenderKind::Plan, Origin::Measured, &samples(plan_ms))
    };
    let unit = Ratio { median: 1.0, low: 1.0, high: 1.0 };
    let slower = |factor: f64| Some(Ratio { median: 1.0 / factor, low: 0.985 / factor, high: 1.012 / factor });
    vec![
        ContenderRow { ratio: Some(unit), winner: ratio.low <= 1.0, ..single("ort:CPU", best) },
        ContenderRow { ratio: slower(1.31), ..single("openvino:CPU", best * 1.31) },
        ContenderRow { ratio: slower(2.6), ..single("rten:CPU", best * 2.6) },
        ContenderRow::failed("ort:WebGPU", ContenderKind::Single, "compile: CumSum(14) has no kernel on <WebGPU>"),
        plan,
    ]
}

/// Rows of `trefoil units`.
pub fn units() -> Vec<UnitRow> {
    let row = |unit: &str, device: &str, version: &str| UnitRow {
        unit: unit.into(),
        available: true,
        simulated: false,
        device: Some(device.into()),
        version: Some(version.into()),
        reason: None,
        fix: None,
    };
    vec![
        row("rten:CPU", "embedded", "0.27"),
        row("openvino:CPU", "Example CPU (synthetic)", "0.0-example"),
        row("ort:CPU", "Example CPU (synthetic)", "0.0-example"),
        UnitRow { simulated: true, ..row("sim:example/NPU", "from example.toml", "") },
        UnitRow {
            unit: "openvino:NPU".into(),
            available: false,
            simulated: false,
            device: None,
            version: None,
            reason: Some("no /dev/accel device on this machine".into()),
            fix: Some("install the kernel's NPU driver, then `trefoil units` again".into()),
        },
    ]
}

/// One model with everything.
pub fn full_model(name: &str, operators: u32, parts: u32, simulated: bool, ratio: Ratio) -> ModelReport {
    let graph = graph(name, operators, u64::from(operators) + u64::from(simulated));
    let profile = profile(&graph, simulated, parts);
    let plan = plan(&graph, &profile, parts);
    let trace = trace(&plan);
    let wall = trace.end_ms() + 0.06;
    let mut row = ModelRow {
        model: name.into(),
        operators: graph.len(),
        distinct: graph.distinct(),
        contenders: contenders(wall, plan.simulated_ms, ratio, plan.crossings()),
    };
    let plans = row.contenders.iter_mut().filter(|row| simulated && row.kind == ContenderKind::Plan);
    plans.for_each(|plan| plan.origin = Origin::Simulated);
    let mut report = ModelReport::new(row).with_profile(&profile, &graph, &[], Some(&plan)).with_plan(
        &plan,
        0,
        &[&graph],
        Some(&trace),
    );
    report.wall_ms = Some(wall);
    report.memory = vec![
        MemoryRow {
            name: "activations (shared buffers)".into(),
            bytes: 18_350_080,
            origin: Origin::Measured,
            note: None,
        },
        MemoryRow {
            name: "weights inside compiled segments".into(),
            bytes: 44_900_000,
            origin: Origin::Predicted,
            note: Some("sum of the model's constants; backends may repack".into()),
        },
    ];
    report.notes.push("verified against rten:CPU at every segment boundary (synthetic)".into());
    report
}

/// The whole example: a plan that wins, a single unit that wins, an undecided one with simulated numbers, a plan that
/// was never run, and one that only a plan runs.
pub fn input() -> ReportInput {
    let mut predicted_only = full_model("segformer-b0", 48, 4, true, Ratio { median: 1.0, low: 0.9, high: 1.1 });
    predicted_only.row.contenders.clear();
    predicted_only.measured = None;
    predicted_only.wall_ms = None;
    predicted_only.segments.iter_mut().for_each(|row| (row.traced_ms, row.traced_origin) = (None, None));
    predicted_only.transfers.iter_mut().for_each(|row| (row.traced_ms, row.traced_origin) = (None, None));
    let mut only_plan = full_model("stft-vocoder", 30, 3, false, Ratio { median: 1.0, low: 0.9, high: 1.1 });
    let reason = "wrong: output `spectrum` has shape 64x257x1x2, wanted 64x257x2";
    only_plan.row.contenders = vec![
        ContenderRow::failed("openvino:CPU", ContenderKind::Single, reason),
        ContenderRow::failed("ort:CPU", ContenderKind::Single, "compile: operator `Warp` is not implemented"),
        ContenderRow {
            winner: true,
            crossings: Some(2),
            ..ContenderRow::new("interval", ContenderKind::Plan, Origin::Measured, &samples(6.4))
        },
    ];
    ReportInput {
        title: "Trefoil report".into(),
        command: Some("trefoil run ppocr-det.onnx -u openvino:CPU@0 -u ort:CPU@1 --report report.html".into()),
        generated_at: Some("2000-01-01T00:00:00Z".into()),
        banner: Some(BANNER.into()),
        machine: Some(machine()),
        units: units(),
        models: vec![
            full_model("ppocr-det", 320, 7, false, Ratio { median: 1.07, low: 1.05, high: 1.09 }),
            full_model("mamba-130m", 96, 5, false, Ratio { median: 0.94, low: 0.92, high: 0.96 }),
            full_model("hyena-dna", 64, 6, true, Ratio { median: 1.01, low: 0.98, high: 1.04 }),
            predicted_only,
            only_plan,
        ],
        notes: vec!["load average 1.4 at the start; two measurements are flagged as noisy (synthetic)".into()],
    }
}
