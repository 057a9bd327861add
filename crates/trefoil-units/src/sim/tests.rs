use super::*;
use trefoil_core::{
    CostTable, DataType, Granularity, Operator, OperatorClass, OperatorGraph, OperatorId, Origin, Outcome, Signature,
    Subject, TensorEdge, TensorId,
};

fn work(kind: &str, class: OperatorClass, operations: Option<u64>, bytes: u64, int8: bool) -> Workload {
    Workload {
        kinds: vec![kind.to_owned()],
        class,
        operations,
        input_bytes: bytes,
        output_bytes: 0,
        weight_bytes: 0,
        int8,
        rank: 4,
    }
}

fn matmul(size: u64, int8: bool) -> Workload {
    let bytes = 3 * size * size * if int8 { 1 } else { 2 };
    work("MatMul", OperatorClass::Compute, Some(2 * size.pow(3)), bytes, int8)
}

/// Times on CPU, GPU, NPU.
fn times(soc: &SocDescription, work: &Workload) -> [f64; 3] {
    ["CPU", "GPU", "NPU"].map(|device| soc.operator_ms(work, device).unwrap())
}

fn fastest(soc: &SocDescription, work: &Workload) -> usize {
    let times = times(soc, work);
    (0..3).min_by(|&a, &b| times[a].total_cmp(&times[b])).unwrap()
}

#[test]
fn observation_1_of_bident_holds() {
    let soc = description("lunar-lake").unwrap();
    let near =
        |have: f64, published: f64| assert!((have / published - 1.0).abs() < 0.02, "{have}, published {published}");
    let [cpu, gpu, npu] = times(&soc, &matmul(512, false));
    near(cpu / gpu, 2.8);
    near(npu / gpu, 1.6);
    let conv = work("Conv", OperatorClass::Compute, Some(231_211_008), 1 << 20, false);
    let [cpu, gpu, npu] = times(&soc, &conv);
    near(cpu / gpu, 2.2);
    near(npu / gpu, 1.1);
    for (kind, ratio) in [("DFT", 4.7), ("CumSum", 8.7), ("Gather", 4.1)] {
        let work = work(kind, OperatorClass::Memory, None, 1 << 22, false);
        let [cpu, _, npu] = times(&soc, &work);
        near(npu / cpu, ratio);
        assert_eq!(fastest(&soc, &work), 0, "the CPU is fastest for {kind}");
    }
    for (kind, class) in [("Conv", OperatorClass::Memory), ("Add", OperatorClass::Memory)] {
        assert_eq!(fastest(&soc, &work(kind, class, Some(1 << 20), 1 << 20, false)), 0, "{kind}");
    }
}

#[test]
fn observation_2_of_bident_holds() {
    let soc = description("lunar-lake").unwrap();
    let winners = |int8| [32, 64, 128, 256, 512, 1024, 2048].map(|size| fastest(&soc, &matmul(size, int8)));
    assert_eq!(winners(false), [0, 0, 1, 1, 1, 1, 1]);
    assert_eq!(winners(true), [0, 0, 0, 1, 1, 1, 2]);
    let lead = |size| {
        let [cpu, gpu, _] = times(&soc, &matmul(size, false));
        cpu / gpu
    };
    assert!((lead(2048) - 4.8).abs() < 0.05);
    assert!([128, 256, 512, 1024, 2048].windows(2).all(|pair| lead(pair[0]) < lead(pair[1])), "the lead widens");
}

#[test]
fn slowdowns_power_and_refusals_are_bidents() {
    let soc = description("lunar-lake").unwrap();
    assert_eq!([soc.slowdown("NPU", "CPU"), soc.slowdown("NPU", "GPU"), soc.slowdown("CPU", "NPU")], [1.17, 1.09, 1.0]);
    let [cpu, gpu, npu] = ["CPU", "GPU", "NPU"].map(|device| soc.watts(device).unwrap());
    assert!(npu < cpu && cpu < gpu);
    let and = work("BitwiseAnd", OperatorClass::Memory, None, 64, false);
    assert_eq!(soc.operator_ms(&and, "NPU"), None);
    assert!(soc.operator_ms(&and, "CPU").is_some());
    assert_eq!(soc.transfer_ms("CPU", "CPU", 1 << 20), Some(0.0));
    assert_eq!(soc.transfer_ms("CPU", "TPU", 1), None);
}

#[test]
fn heterovdiff_rates_give_its_cuts() {
    let soc = description("snapdragon-8-elite").unwrap();
    let task =
        |device: &str, task: &str, condition: &str| soc.device(device).unwrap().task_ms(task, condition).unwrap();
    // Equation 5 with B = 180, the better integer neighbour of the crossing by Equation 4.
    let cut = |gpu: f64, npu: f64, decoder: f64| {
        let period = |k: f64| (k * gpu).max((180.0 - k) * npu + decoder);
        let crossing = (180.0 * npu + decoder) / (npu + gpu);
        if period(crossing.floor()) <= period(crossing.ceil()) { crossing.floor() } else { crossing.ceil() }
    };
    let rates = |condition| ["dit-block"].map(|name| (task("GPU", name, condition), task("NPU", name, condition)))[0];
    let (gpu, npu) = rates("deployed");
    assert_eq!(cut(gpu, npu, task("NPU", "vae-decoder", "deployed")), 51.0);
    assert_eq!(cut(gpu, npu, 0.0), 34.0);
    let (gpu, npu) = rates("solo");
    assert_eq!(cut(gpu, npu, task("NPU", "vae-decoder", "solo")), 57.0);
    let (gpu, npu) = rates("co-run");
    assert_eq!(cut(gpu, npu, task("NPU", "vae-decoder", "co-run")), 52.0);
    assert!(soc.slowdown("NPU", "GPU") < 1.0 && soc.slowdown("GPU", "NPU") > 1.0);
    let conv3d = Workload { rank: 5, ..work("Conv", OperatorClass::Compute, Some(1000), 64, false) };
    assert_eq!(soc.operator_ms(&conv3d, "GPU"), None);
    assert!(soc.operator_ms(&conv3d, "NPU").is_some());
}

/// BIDENT 2.1: matrix-vector products are memory-bound, so their time is that of their weights.
#[test]
fn matrix_vector_products_go_by_bytes() {
    let soc = description("lunar-lake").unwrap();
    let product = |weight_bytes, int8| Workload {
        weight_bytes,
        ..work("MatMul", OperatorClass::Memory, Some(2 << 24), 16 << 10, int8)
    };
    let (fp16, int8) = (times(&soc, &product(2 << 24, false)), times(&soc, &product(1 << 24, true)));
    for (device, (fp16, int8)) in ["CPU", "GPU", "NPU"].into_iter().zip(fp16.into_iter().zip(int8)) {
        let dispatch = soc.device(device).unwrap().dispatch_ms.value;
        let ratio = (fp16 - dispatch) / (int8 - dispatch);
        assert!((1.5..2.5).contains(&ratio), "{device}: {ratio}");
    }
}

#[test]
fn rates_hold_at_their_points_and_outside() {
    let soc = description("lunar-lake").unwrap();
    let cpu = soc.device("CPU").unwrap();
    let fp16 = cpu.rates.iter().find(|rate| rate.int8 == Some(false)).unwrap();
    for size in [64u64, 128, 512, 2048] {
        let amount = 2.0 * (size as f64).powi(3);
        let rate = fp16.per_second.iter().find(|[work, _]| *work == amount).unwrap()[1];
        let time = cpu.operator_time(&matmul(size, false)).unwrap();
        assert!((time.exec_ms - amount / rate * 1e3).abs() < 1e-9 * time.exec_ms);
    }
    let (small, smaller) = (matmul(8, false), matmul(4, false));
    let exec = |work: &Workload| cpu.operator_time(work).unwrap().exec_ms;
    assert!((exec(&small) / exec(&smaller) - 8.0).abs() < 1e-9, "constant rate below the smallest size");
    assert_eq!(exec(&work("Relu", OperatorClass::Memory, None, 0, false)), 0.0);
}

/// `x → MatMul → BitwiseAnd → MatMul`, the two MatMuls alike.
fn graph() -> OperatorGraph {
    let edge = |name: &str, producer: Option<u32>, consumer: Option<u32>| TensorEdge {
        name: name.to_owned(),
        dtype: DataType::F32,
        shape: vec![512, 512],
        bytes: 1 << 20,
        producer: producer.map(OperatorId),
        consumers: consumer.map(OperatorId).into_iter().collect(),
    };
    let operator = |index: u32, kind: &str, class, signature: &str| Operator {
        name: format!("op{index}"),
        kind: kind.to_owned(),
        nodes: vec![index],
        inputs: vec![TensorId(index)],
        outputs: vec![TensorId(index + 1)],
        signature: Signature(signature.repeat(32)),
        class,
        flops: (class == OperatorClass::Compute).then_some(268_435_456),
        weight_bytes: 0,
    };
    OperatorGraph {
        model: "chain".to_owned(),
        fingerprint: "f".repeat(32),
        granularity: Granularity::Node,
        tensors: vec![
            edge("x", None, Some(0)),
            edge("a", Some(0), Some(1)),
            edge("b", Some(1), Some(2)),
            edge("y", Some(2), None),
        ],
        operators: vec![
            operator(0, "MatMul", OperatorClass::Compute, "a"),
            operator(1, "BitwiseAnd", OperatorClass::Memory, "b"),
            operator(2, "MatMul", OperatorClass::Compute, "a"),
        ],
        inputs: vec![TensorId(0)],
        outputs: vec![TensorId(3)],
    }
}

fn lunar_lake_units() -> Vec<UnitAddress> {
    ["CPU", "GPU", "NPU"].map(|device| UnitAddress::new("sim", format!("lunar-lake/{device}"))).to_vec()
}

#[test]
fn a_simulated_profile_is_complete_and_says_what_it_is() {
    let graph = graph();
    graph.validate().unwrap();
    let units = lunar_lake_units();
    let profile = simulated_profile(&graph, &units, "2026-01-01T00:00:00Z").unwrap();
    profile.validate().unwrap();
    assert!(profile.units.iter().all(|unit| unit.simulated));
    assert!(profile.measurements.iter().all(|measurement| measurement.origin == Origin::Simulated));
    let mut ids: Vec<_> = profile.measurements.iter().map(|measurement| &measurement.id).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), profile.measurements.len(), "ids are unique");
    let table = CostTable::from_profile(&profile, &graph, &[]).unwrap();
    assert!(table.cost(OperatorId(1), 2).is_none(), "the NPU has no BitwiseAnd");
    let cost = table.cost(OperatorId(0), 1).unwrap();
    assert_eq!(cost.origin, Origin::Simulated);
    assert!(cost.h2d_ms.is_some() && table.cost(OperatorId(0), 0).unwrap().h2d_ms.is_none());
    let soc = description("lunar-lake").unwrap();
    let between = 3 << 20;
    let transfer = table.transfer(0, 2).ms(between);
    assert!((transfer - soc.transfer_ms("CPU", "NPU", between).unwrap()).abs() < 1e-9);
    assert_eq!(table.watts, [Some(18.0), Some(21.4), Some(11.0)]);
    assert_eq!(table.idle_watts, Some(4.0));
    let whole = |unit: &UnitAddress| {
        let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
        profile.index().newest(&subject, std::slice::from_ref(unit)).unwrap().outcome.clone()
    };
    assert!(matches!(whole(&units[0]), Outcome::Ok { .. }));
    assert!(matches!(whole(&units[2]), Outcome::Failed { reason, .. } if reason.contains("BitwiseAnd")));
}

#[test]
fn units_of_two_machines_are_refused() {
    let mut units = lunar_lake_units();
    units.push("sim:snapdragon-8-elite/GPU".parse().unwrap());
    let error = profile_entries(&graph(), &units, "").unwrap_err().to_string();
    assert!(error.contains("lunar-lake, snapdragon-8-elite"), "{error}");
}

#[test]
fn the_backend_lists_units_and_refuses_to_run() {
    let unit = |text: &str| SimBackend.unit(&text.parse().unwrap());
    let npu = unit("sim:lunar-lake/NPU").unwrap();
    assert!(npu.simulated);
    assert!(SimBackend.units().iter().any(|(known, _)| *known == npu));
    let model = SubModel { path: "m.onnx".into(), inputs: Vec::new(), outputs: Vec::new() };
    let Err(error) = SimBackend.compile(&model, &npu, &CompileOptions::default()) else { panic!("compiled") };
    assert_eq!(error.to_string(), "sim:lunar-lake/NPU does not compile m.onnx: simulated units plan but do not run");
    assert!(unit("sim:lunar-lake").unwrap_err().to_string().contains("lunar-lake/NPU"));
    assert!(unit("sim:lunar-lake/TPU").unwrap_err().to_string().contains("lunar-lake/GPU"));
    assert!(unit("sim:moon/NPU").unwrap_err().to_string().contains("snapdragon-8-elite"));
    assert!(unit("sim:lunar-lake/NPU@1").unwrap_err().to_string().contains("sim:lunar-lake/NPU"));
}

#[test]
fn malformed_descriptions_are_named_in_one_line() {
    let good = include_str!("../../data/lunar-lake.json");
    for (from, to, want) in [
        ("\"version\": 1", "\"version\": 7", "version 7"),
        ("\"name\": \"GPU\"", "\"name\": \"CPU\"", "must differ"),
        ("\"factor\": 1.17", "\"factor\": -1.0", "no time, rate, power or factor"),
        ("\"source\": \"BIDENT 3.2.2\"", "\"source\": \" \"", "no source"),
        ("\"slowed\": \"NPU\"", "\"slowed\": \"TPU\"", "no pair of two devices"),
        ("\"from\": \"GPU\",\n   \"to\": \"NPU\"", "\"from\": \"GPU\",\n   \"to\": \"CPU\"", "exactly one transfer"),
        ("\"measure\": \"operations\"", "\"measure\": \"parsecs\"", "parsecs"),
        ("\"idle_watts\"", "\"idle_whats\"", "idle_whats"),
        ("\"idle_watts\": { \"value\": 4", "\"idle_watts\": { \"value\": 15", "less than idle_watts"),
        ("\"class\": \"memory\"", "\"class\": \"memory\", \"colour\": 1", "colour"),
    ] {
        assert!(good.contains(from), "{from} is not in the file any more");
        let error = parse(&good.replacen(from, to, 1), "x.json").unwrap_err().to_string();
        assert!(error.contains(want) && error.starts_with("x.json: ") && !error.contains('\n'), "{from}: {error}");
    }
    let no_catch_all = good.replace(
        "\"measure\": \"bytes\",\n     \"per_second\": [[4194304, 50000000000.0]]",
        "\"class\": \"memory\", \"measure\": \"bytes\",\n     \"per_second\": [[4194304, 50000000000.0]]",
    );
    assert_ne!(no_catch_all, good);
    assert!(parse(&no_catch_all, "x").unwrap_err().to_string().contains("apply to every operator"));
}
