//! State that a model's loop carries on: outputs that are the next iteration's inputs.

use super::{Model, OnnxError};
use crate::port::{self, ModelPort};
use crate::proto::{NodeProto, TensorProto};
use trefoil_core::DataType;

/// How an input of one iteration becomes that of the next: `keep·input + scale·output + add`, element by element. Euler's
/// method, for one, is `x + dt·velocity` beside `t + dt`.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// The model input.
    pub input: String,
    /// The model output that goes into it, of the input's type and shape.
    pub output: Option<String>,
    /// Factor of the output.
    pub scale: f64,
    /// Whether the input itself is added.
    pub keep: bool,
    /// A constant to add.
    pub add: f64,
}

impl Update {
    /// Whether the next input is the output as it is, so that no computing is needed.
    #[allow(clippy::float_cmp)] // exactly nothing to do
    pub fn is_plain(&self) -> bool {
        self.output.is_some() && !self.keep && self.scale == 1.0 && self.add == 0.0
    }

    /// Name of the output that holds the next input: the output itself, or the one that [`Model::add_update`] adds.
    pub fn next(&self) -> String {
        match &self.output {
            Some(output) if self.is_plain() => output.clone(),
            _ => format!("{}.next", self.input),
        }
    }
}

impl Model {
    /// Adds an output with the next iteration's input ([`Update::next`]), computed by nodes at the end of the graph. Nothing is
    /// added for a plain hand-over.
    ///
    /// # Errors
    /// [`OnnxError::Update`] when a name is no input or output, types or shapes differ, nothing is handed on, or a name is taken.
    pub fn add_update(&mut self, update: &Update) -> Result<(), OnnxError> {
        let fail = |reason: String| OnnxError::Update { input: update.input.clone(), reason };
        let names = |ports: &[ModelPort]| ports.iter().map(|port| port.name.as_str()).collect::<Vec<_>>().join(", ");
        let (inputs, outputs) = (self.inputs(), self.outputs());
        let port = inputs
            .iter()
            .find(|port| port.name == update.input)
            .ok_or_else(|| fail(format!("the model has no such input; it has {}", names(&inputs))))?;
        let info = port.info().ok_or_else(|| fail(format!("its shape {} is open; give one", port.dims_text())))?;
        if let Some(output) = &update.output {
            let made = outputs
                .iter()
                .find(|port| port.name == *output)
                .ok_or_else(|| fail(format!("the model has no output `{output}`; it has {}", names(&outputs))))?;
            if made.info().is_some_and(|made| made.dtype != info.dtype || made.shape != info.shape) {
                return Err(fail(format!(
                    "output `{output}` is {}, the input is {}",
                    made.dims_text(),
                    port.dims_text()
                )));
            }
        } else if !update.keep {
            return Err(fail("neither an output nor the input itself is handed on".to_owned()));
        }
        if update.is_plain() {
            return Ok(());
        }
        let next = update.next();
        if self.value_exists(&next) {
            return Err(fail(format!("the model has a value `{next}` already")));
        }
        let mut nodes = Terms { prefix: next.clone(), nodes: Vec::new(), constants: Vec::new() };
        let mut sum: Option<String> = update.keep.then(|| update.input.clone());
        if let Some(output) = &update.output {
            let term = nodes.scaled(output, update.scale, info.dtype).map_err(&fail)?;
            sum = Some(match sum {
                Some(kept) => nodes.node("Add", &kept, &term),
                None => term,
            });
        }
        let mut last = sum.unwrap_or_default();
        if update.add != 0.0 {
            let constant = nodes.constant(update.add, info.dtype).map_err(&fail)?;
            last = nodes.node("Add", &last, &constant);
        }
        // Whatever comes last is the output; a copy of the input alone gets a node of its own.
        match nodes.nodes.last_mut() {
            Some(node) => node.output = vec![next.clone()],
            None => nodes.nodes.push(NodeProto {
                input: vec![last],
                output: vec![next.clone()],
                name: Some(next.clone()),
                op_type: Some("Identity".to_owned()),
                ..NodeProto::default()
            }),
        }
        let graph = self.graph_mut();
        graph.node.append(&mut nodes.nodes);
        graph.initializer.append(&mut nodes.constants);
        graph.output.push(port::declaration(&trefoil_core::TensorInfo { name: next, ..info }));
        self.derive_fingerprint(&format!("{update:?}"));
        Ok(())
    }

    fn value_exists(&self, name: &str) -> bool {
        let graph = self.graph();
        graph.node.iter().flat_map(|node| &node.output).any(|output| output == name)
            || graph.input.iter().any(|input| input.name() == name)
            || graph.initializer.iter().any(|constant| constant.name() == name)
    }
}

/// Nodes and constants of one sum.
struct Terms {
    prefix: String,
    nodes: Vec<NodeProto>,
    constants: Vec<TensorProto>,
}

impl Terms {
    fn node(&mut self, kind: &str, first: &str, second: &str) -> String {
        let output = format!("{}.{}", self.prefix, self.nodes.len());
        self.nodes.push(NodeProto {
            input: vec![first.to_owned(), second.to_owned()],
            output: vec![output.clone()],
            name: Some(output.clone()),
            op_type: Some(kind.to_owned()),
            ..NodeProto::default()
        });
        output
    }

    #[allow(clippy::float_cmp)] // exactly 1 needs no product
    fn scaled(&mut self, value: &str, scale: f64, dtype: DataType) -> Result<String, String> {
        if scale == 1.0 {
            return Ok(value.to_owned());
        }
        let constant = self.constant(scale, dtype)?;
        Ok(self.node("Mul", value, &constant))
    }

    fn constant(&mut self, value: f64, dtype: DataType) -> Result<String, String> {
        let whole = value.fract() == 0.0;
        let bytes = match dtype {
            DataType::F32 => (value as f32).to_le_bytes().to_vec(),
            DataType::F64 => value.to_le_bytes().to_vec(),
            DataType::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
            DataType::I64 if whole => (value as i64).to_le_bytes().to_vec(),
            DataType::I32 if whole => (value as i32).to_le_bytes().to_vec(),
            _ => return Err(format!("{value} cannot be added to or multiplied with {dtype}")),
        };
        let name = format!("{}.c{}", self.prefix, self.constants.len());
        self.constants.push(TensorProto {
            data_type: Some(dtype.onnx_code()),
            name: Some(name.clone()),
            raw_data: Some(bytes::Bytes::from(bytes)),
            ..TensorProto::default()
        });
        Ok(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::ModelBuilder;
    use trefoil_core::TensorInfo;

    fn model() -> Model {
        let info = |name: &str| TensorInfo::new(name, DataType::F32, [2u64, 3]);
        let bytes = ModelBuilder::new("step", 17)
            .input(&info("x"))
            .input(&TensorInfo::new("t", DataType::F32, [1u64]))
            .node("Mul", &["x", "t"], &["v"], &[])
            .output(&info("v"))
            .to_bytes();
        Model::decode(bytes.into(), std::path::Path::new("step.onnx")).unwrap()
    }

    fn update(input: &str, output: Option<&str>, scale: f64, keep: bool, add: f64) -> Update {
        Update { input: input.to_owned(), output: output.map(str::to_owned), scale, keep, add }
    }

    fn kinds(model: &Model) -> Vec<&str> {
        model.graph().node.iter().map(NodeProto::op_type).collect()
    }

    #[test]
    fn a_step_of_eulers_method_is_added() {
        let mut model = model();
        let before = model.fingerprint().to_owned();
        model.add_update(&update("x", Some("v"), -0.1, true, 0.0)).unwrap();
        model.add_update(&update("t", None, 1.0, true, -0.1)).unwrap();
        assert_eq!(kinds(&model), ["Mul", "Mul", "Add", "Add"]);
        let names: Vec<_> = model.outputs().into_iter().map(|port| port.name).collect();
        assert_eq!(names, ["v", "x.next", "t.next"]);
        assert_ne!(model.fingerprint(), before);
        // What was written is a model again, and the same one.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loop.onnx");
        model.save(&path).unwrap();
        assert_eq!(Model::load(&path).unwrap().outputs(), model.outputs());
    }

    #[test]
    fn plain_hand_overs_need_nothing() {
        let mut model = model();
        let plain = update("x", Some("v"), 1.0, false, 0.0);
        assert!(plain.is_plain() && plain.next() == "v");
        model.add_update(&plain).unwrap();
        assert_eq!(kinds(&model), ["Mul"]);
        model.add_update(&update("t", None, 1.0, true, 0.0)).unwrap();
        assert_eq!(kinds(&model), ["Mul", "Identity"]);
    }

    #[test]
    fn what_cannot_be_handed_on_is_told() {
        for (wrong, wanted) in [
            (update("y", Some("v"), 1.0, false, 0.0), "no such input; it has x, t"),
            (update("x", Some("w"), 1.0, false, 0.0), "no output `w`; it has v"),
            (update("t", Some("v"), 1.0, false, 0.0), "output `v` is"),
            (update("x", None, 1.0, false, 1.0), "neither"),
        ] {
            let message = model().add_update(&wrong).unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
        let mut model = model();
        let twice = update("x", Some("v"), 2.0, false, 0.0);
        model.add_update(&twice).unwrap();
        assert!(model.add_update(&twice).unwrap_err().to_string().contains("already"));
    }
}
