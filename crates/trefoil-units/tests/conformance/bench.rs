//! Running a compiled sub-model on guarded caller memory.

use crate::case::Case;
use trefoil_core::tensor::{AlignedBytes, TENSOR_ALIGNMENT};
use trefoil_core::{HostTensor, TensorInfo, Unit};
use trefoil_units::{Backend, Buffer, CompileOptions, Compiled, RunTiming, UnitError};

/// What stands around every buffer, and in outputs before a run.
const CANARY: u8 = 0xA5;
const STALE: u8 = 0xCC;

/// A buffer with canaries before and behind it.
pub struct Guarded {
    bytes: AlignedBytes,
    length: usize,
}

impl Guarded {
    pub fn new(length: usize) -> Self {
        let mut bytes = AlignedBytes::zeroed(length + 2 * TENSOR_ALIGNMENT);
        bytes.as_mut_slice().fill(CANARY);
        Self { bytes, length }
    }

    pub fn holding(contents: &[u8]) -> Self {
        let mut guarded = Self::new(contents.len());
        guarded.contents_mut().copy_from_slice(contents);
        guarded
    }

    pub fn contents(&self) -> &[u8] {
        &self.bytes.as_slice()[TENSOR_ALIGNMENT..TENSOR_ALIGNMENT + self.length]
    }

    pub fn contents_mut(&mut self) -> &mut [u8] {
        &mut self.bytes.as_mut_slice()[TENSOR_ALIGNMENT..TENSOR_ALIGNMENT + self.length]
    }

    pub fn buffer(&mut self) -> Buffer {
        Buffer { pointer: self.contents_mut().as_mut_ptr(), length: self.length }
    }

    fn is_intact(&self) -> bool {
        let bytes = self.bytes.as_slice();
        let (front, back) = (&bytes[..TENSOR_ALIGNMENT], &bytes[TENSOR_ALIGNMENT + self.length..]);
        front.iter().chain(back).all(|&byte| byte == CANARY)
    }
}

/// A compiled case with its memory. Fields drop in order: the sub-model before the memory that it is bound to.
pub struct Bench {
    compiled: Box<dyn Compiled>,
    pub inputs: Vec<Guarded>,
    pub outputs: Vec<Guarded>,
    input_infos: Vec<TensorInfo>,
    output_infos: Vec<TensorInfo>,
}

impl Bench {
    /// Compiles `case` and binds it to fresh memory that holds its inputs.
    pub fn new(backend: &dyn Backend, unit: &Unit, case: &Case, options: &CompileOptions) -> Result<Self, String> {
        let mut bench = Self::unbound(backend, unit, case, options).map_err(|error| error.to_string())?;
        bench.bind().map_err(|error| error.to_string())?;
        Ok(bench)
    }

    /// As [`Bench::new`], not yet bound.
    pub fn unbound(
        backend: &dyn Backend,
        unit: &Unit,
        case: &Case,
        options: &CompileOptions,
    ) -> Result<Self, UnitError> {
        let model = case.sub_model();
        let compiled = backend.compile(&model, unit, options)?;
        let infos = |ports: &[trefoil_units::Port]| ports.iter().map(|port| port.info.clone()).collect::<Vec<_>>();
        let (input_infos, output_infos) = (infos(&compiled.ports().inputs), infos(&compiled.ports().outputs));
        assert_eq!(input_infos, model.inputs, "input ports differ from what was asked for");
        assert_eq!(output_infos, model.outputs, "output ports differ from what was asked for");
        Ok(Self {
            compiled,
            inputs: case.inputs.iter().map(|tensor| Guarded::holding(tensor.bytes())).collect(),
            outputs: model.outputs.iter().map(|info| Guarded::new(info.bytes() as usize)).collect(),
            input_infos,
            output_infos,
        })
    }

    pub fn bind(&mut self) -> Result<(), UnitError> {
        let inputs: Vec<_> = self.inputs.iter_mut().map(Guarded::buffer).collect();
        let outputs: Vec<_> = self.outputs.iter_mut().map(Guarded::buffer).collect();
        self.bind_to(&inputs, &outputs)
    }

    /// Binds other buffers than the bench's own. Callers pass buffers that outlive the next bind, or wrong ones that must
    /// be refused.
    pub fn bind_to(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        // SAFETY: the bench's own buffers live as long as the bench and longer than the sub-model; the suite touches
        // them between runs only.
        unsafe { self.compiled.bind(inputs, outputs) }
    }

    pub fn buffers(&mut self) -> (Vec<Buffer>, Vec<Buffer>) {
        let inputs = self.inputs.iter_mut().map(Guarded::buffer).collect();
        let outputs = self.outputs.iter_mut().map(Guarded::buffer).collect();
        (inputs, outputs)
    }

    pub fn compiled(&mut self) -> &mut dyn Compiled {
        self.compiled.as_mut()
    }

    /// One run. Checks that inputs and canaries are untouched and hands the outputs out.
    pub fn run(&mut self) -> Result<(Vec<HostTensor>, RunTiming), String> {
        for output in &mut self.outputs {
            output.contents_mut().fill(STALE);
        }
        let before: Vec<Vec<u8>> = self.inputs.iter().map(|input| input.contents().to_vec()).collect();
        self.compiled.submit().map_err(|error| error.to_string())?;
        let timing = self.compiled.wait().map_err(|error| error.to_string())?;
        for ((input, before), info) in self.inputs.iter().zip(&before).zip(&self.input_infos) {
            if input.contents() != before.as_slice() {
                return Err(format!("the run changed its input `{}`", info.name));
            }
        }
        for (guarded, info) in
            self.inputs.iter().zip(&self.input_infos).chain(self.outputs.iter().zip(&self.output_infos))
        {
            if !guarded.is_intact() {
                return Err(format!("the run wrote outside the buffer of `{}`", info.name));
            }
        }
        let outputs = self
            .outputs
            .iter()
            .zip(&self.output_infos)
            .map(|(output, info)| HostTensor::from_bytes(info.clone(), output.contents()).map_err(|e| e.to_string()))
            .collect::<Result<_, _>>()?;
        Ok((outputs, timing))
    }

    /// A run without the checks, for loops.
    pub fn run_fast(&mut self) -> Result<(), String> {
        self.compiled.submit().map_err(|error| error.to_string())?;
        self.compiled.wait().map(|_| ()).map_err(|error| error.to_string())
    }
}
