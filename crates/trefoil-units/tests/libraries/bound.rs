//! A compiled sub-model with its own memory, run on a unit.

use std::path::Path;
use trefoil_core::{HostTensor, TensorInfo, Unit};
use trefoil_units::{Buffer, CompileOptions, Compiled, SubModel, UnitError, compile};

// Each test program that includes this file uses some of the fields.
#[allow(dead_code)]
/// Fields drop in order: the sub-model before the memory it is bound to.
pub struct Bound {
    pub compiled: Box<dyn Compiled>,
    pub inputs: Vec<HostTensor>,
    pub outputs: Vec<HostTensor>,
}

fn buffer(tensor: &mut HostTensor) -> Buffer {
    let bytes = tensor.bytes_mut();
    Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }
}

impl Bound {
    /// Compiles for a unit that the calling thread has entered, and binds.
    pub fn new(
        path: &Path,
        mut inputs: Vec<HostTensor>,
        outputs: &[TensorInfo],
        unit: &Unit,
        options: &CompileOptions,
    ) -> Result<Self, UnitError> {
        let model = SubModel {
            path: path.to_path_buf(),
            inputs: inputs.iter().map(|tensor| tensor.info().clone()).collect(),
            outputs: outputs.to_vec(),
        };
        let mut compiled = compile(&model, unit, options)?;
        let mut outputs: Vec<HostTensor> = outputs.iter().cloned().map(HostTensor::zeros).collect();
        let input_buffers: Vec<Buffer> = inputs.iter_mut().map(buffer).collect();
        let output_buffers: Vec<Buffer> = outputs.iter_mut().map(buffer).collect();
        // SAFETY: the tensors live as long as the compiled sub-model, which is dropped first.
        unsafe { compiled.bind(&input_buffers, &output_buffers) }?;
        Ok(Self { compiled, inputs, outputs })
    }

    pub fn run(&mut self) -> Result<(), UnitError> {
        self.compiled.submit()?;
        self.compiled.wait().map(drop)
    }
}
