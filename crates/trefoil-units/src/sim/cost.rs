//! Times, transfers, slowdowns and power of a described SoC.

use super::description::{Device, Rate, SocDescription, WorkMeasure};
use trefoil_core::{DataType, Operator, OperatorClass, OperatorGraph, TensorId};

/// What an operator costs by: its types, class, operations, bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// ONNX operator types it consists of, without domains.
    pub kinds: Vec<String>,
    /// Its class.
    pub class: OperatorClass,
    /// Arithmetic operations, multiply and add counted apart; `None` when unknown.
    pub operations: Option<u64>,
    /// Activation bytes read.
    pub input_bytes: u64,
    /// Activation bytes written.
    pub output_bytes: u64,
    /// Constant bytes read.
    pub weight_bytes: u64,
    /// Whether it computes on 8-bit operands.
    pub int8: bool,
    /// Largest rank of an input.
    pub rank: usize,
}

impl Workload {
    /// The workload of an operator of `graph`.
    pub fn of(graph: &OperatorGraph, operator: &Operator) -> Self {
        let kinds: Vec<String> =
            operator.kind.split('+').map(|kind| kind.rsplit('.').next().unwrap_or(kind).to_owned()).collect();
        let bytes = |tensors: &[TensorId]| tensors.iter().map(|&tensor| graph.tensor(tensor).bytes).sum();
        let reads_codes =
            operator.inputs.iter().any(|&tensor| matches!(graph.tensor(tensor).dtype, DataType::I8 | DataType::U8));
        let is_quantised = |kind: &String| kind.starts_with("QLinear") || kind.ends_with("Integer");
        let dequantises = kinds.iter().any(|kind| kind == "DequantizeLinear") && kinds.len() > 1;
        Self {
            class: operator.class,
            operations: operator.flops,
            input_bytes: bytes(&operator.inputs),
            output_bytes: bytes(&operator.outputs),
            weight_bytes: operator.weight_bytes,
            rank: operator.inputs.iter().map(|&tensor| graph.tensor(tensor).shape.len()).max().unwrap_or(0),
            int8: kinds.iter().any(is_quantised) || dequantises || reads_codes,
            kinds,
        }
    }

    fn bytes(&self) -> u64 {
        self.input_bytes.saturating_add(self.output_bytes).saturating_add(self.weight_bytes)
    }
}

/// Simulated time of one operator on one device, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperatorTime {
    /// Submitting it.
    pub dispatch_ms: f64,
    /// Computing it.
    pub exec_ms: f64,
}

impl OperatorTime {
    /// Both parts: `w(operator, device)`.
    pub fn total_ms(self) -> f64 {
        self.dispatch_ms + self.exec_ms
    }
}

impl Rate {
    /// Whether the rule applies; one that counts operations does not apply where they are unknown.
    fn applies(&self, work: &Workload) -> bool {
        (self.operators.is_empty() || self.operators.iter().any(|kind| work.kinds.contains(kind)))
            && self.class.is_none_or(|class| class == work.class)
            && self.int8.is_none_or(|int8| int8 == work.int8)
            && (self.measure == WorkMeasure::Bytes || work.operations.is_some())
    }

    /// Amount per second at `amount` of work.
    fn at(&self, amount: f64) -> f64 {
        let points = &self.per_second;
        let upper = points.partition_point(|[work, _]| *work < amount);
        if upper == 0 {
            return points[0][1];
        }
        if upper == points.len() {
            return points[upper - 1][1];
        }
        let ([x0, y0], [x1, y1]) = (points[upper - 1], points[upper]);
        let position = (amount / x0).ln() / (x1 / x0).ln();
        y0 * (y1 / y0).powf(position)
    }

    fn ms(&self, work: &Workload) -> f64 {
        let amount = match self.measure {
            WorkMeasure::Operations => work.operations.unwrap_or(0),
            WorkMeasure::Bytes => work.bytes(),
        } as f64;
        if amount == 0.0 { 0.0 } else { amount / self.at(amount) * 1e3 }
    }
}

impl Device {
    /// Why the device does not run the operator; `None` if it does.
    pub fn refusal(&self, work: &Workload) -> Option<String> {
        let unsupported = self
            .unsupported
            .iter()
            .find(|entry| work.kinds.contains(&entry.operator) && entry.rank.is_none_or(|rank| rank == work.rank))?;
        Some(format!("{} does not run {} ({})", self.title, unsupported.operator, unsupported.source))
    }

    /// Time of an operator; `None` if the device does not run it.
    pub fn operator_time(&self, work: &Workload) -> Option<OperatorTime> {
        if self.refusal(work).is_some() {
            return None;
        }
        // The last rule applies to everything, which `validate` checked.
        let rate = self.rates.iter().find(|rate| rate.applies(work)).or(self.rates.last())?;
        Some(OperatorTime { dispatch_ms: self.dispatch_ms.value, exec_ms: rate.ms(work) })
    }

    /// Where the rate that gives an operator's time comes from; `None` if the device does not run it.
    pub fn rate_source(&self, work: &Workload) -> Option<&str> {
        let rate = self.rates.iter().find(|rate| rate.applies(work)).or(self.rates.last())?;
        self.refusal(work).is_none().then_some(rate.source.as_str())
    }

    /// Published time of a named piece of work under a condition, in milliseconds.
    pub fn task_ms(&self, task: &str, condition: &str) -> Option<f64> {
        self.tasks.iter().find(|entry| entry.task == task && entry.condition == condition).map(|entry| entry.ms)
    }
}

impl SocDescription {
    /// Dispatch plus execution of an operator on `device`, in milliseconds; `None` if there is no such device or it does
    /// not run the operator.
    pub fn operator_ms(&self, work: &Workload, device: &str) -> Option<f64> {
        self.device(device)?.operator_time(work).map(OperatorTime::total_ms)
    }

    /// Milliseconds to hand `bytes` from one device to another: 0 within a device, `None` for an unknown one.
    pub fn transfer_ms(&self, from: &str, to: &str, bytes: u64) -> Option<f64> {
        if from == to {
            return self.device(from).map(|_| 0.0);
        }
        let transfer = self.transfers.iter().find(|transfer| transfer.from == from && transfer.to == to)?;
        Some(transfer.latency_ms + bytes as f64 / transfer.bytes_per_second * 1e3)
    }

    /// How much longer `slowed` takes while `busy` works; 1 where the description states nothing.
    pub fn slowdown(&self, slowed: &str, busy: &str) -> f64 {
        self.slowdowns
            .iter()
            .find(|entry| entry.slowed == slowed && entry.busy == busy)
            .map_or(1.0, |entry| entry.factor)
    }

    /// Power in watts while `device` works; `None` for an unknown one.
    pub fn watts(&self, device: &str) -> Option<f64> {
        self.device(device).map(|device| device.watts.value)
    }
}
