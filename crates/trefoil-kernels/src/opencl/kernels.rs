//! The handle: a device, a variant, its compiled kernels and scratch.

use super::buffer::Session;
use super::call::{Call, DISPATCH_ELEMENTS};
use super::error::During;
use super::program::{Built, ProgramCopy, ProgramOrigin, build};
use super::variant::names;
use super::{Buffer, Device, Element, HostMemory, OpenClError, Variant, Vector};
use crate::KernelError;
use opencl3::kernel::Kernel;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The compiled kernels and the scratch of calls. Setting arguments is not thread-safe, so one call at a time does it.
pub(super) struct State {
    kernels: BTreeMap<&'static str, Kernel>,
    /// Row sums of codes, where the variant needs them: of the input, and of the adapter's hidden rows.
    pub(super) sums: [Scratch<i32>; 2],
    /// Scores of a block of queries, where attention is de-fused.
    pub(super) scores: Scratch<i32>,
    /// Their codes, of a tile of rows where attention is fused.
    pub(super) codes: Scratch<i8>,
    /// Sums of the codes.
    pub(super) block_sums: Scratch<i32>,
    /// What a block of keys contributes to each row, and the totals; the state of every item where attention is fused.
    pub(super) weights: Scratch<f32>,
    /// Of the f32 operators on frames.
    pub(super) frames: FrameScratch,
}

/// Scratch of the operators on frames.
#[derive(Default)]
pub(super) struct FrameScratch {
    /// Transformed inputs of a band of rows.
    pub(super) transformed: Scratch<f32>,
    /// Keys and values of an attention, packed.
    pub(super) keys: Scratch<f32>,
    pub(super) values: Scratch<f32>,
    /// Scores of a band of queries, and their softmax.
    pub(super) scores: Scratch<f32>,
    pub(super) shares: Scratch<f32>,
}

impl FrameScratch {
    fn bytes(&self) -> usize {
        [&self.transformed, &self.keys, &self.values, &self.scores, &self.shares].map(Scratch::bytes).into_iter().sum()
    }
}

impl State {
    /// A kernel to set arguments of.
    pub(super) fn call(&self, name: &'static str) -> Result<Call<'_>, OpenClError> {
        match self.kernels.get(name) {
            Some(kernel) => Ok(Call::new(kernel, name)),
            None => Err(OpenClError::Call { action: name, code: opencl3::error_codes::CL_INVALID_KERNEL_NAME }),
        }
    }
}

/// A buffer that grows.
pub(super) struct Scratch<T>(Option<Buffer<T>>);

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Scratch(None)
    }
}

impl<T: Element> Scratch<T> {
    /// At least `len` elements.
    pub(super) fn at_least(&mut self, session: &Arc<Session>, len: usize) -> Result<&Buffer<T>, OpenClError> {
        match &self.0 {
            Some(buffer) if buffer.len() >= len => {}
            _ => self.0 = Some(Buffer::zeroed(session, len)?),
        }
        Ok(self.0.as_ref().expect("made above"))
    }

    /// What there is.
    pub(super) fn get<'s>(&'s self, nothing: &'s Buffer<T>) -> &'s Buffer<T> {
        self.0.as_ref().unwrap_or(nothing)
    }

    fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |buffer| buffer.len() * size_of::<T>())
    }
}

/// Kernels of one variant on one device, with an in-order queue. The methods are those of [`crate::Kernels`]; they enqueue
/// and return. [`Buffer::read`] waits for what was enqueued before, [`Kernels::finish`] for everything.
pub struct Kernels {
    variant: Variant,
    pub(super) session: Arc<Session>,
    state: Mutex<State>,
    /// Stand in for arguments that a call does not use.
    pub(super) no_floats: Buffer<f32>,
    pub(super) no_codes: Buffer<i8>,
    pub(super) no_integers: Buffer<i32>,
    origin: ProgramOrigin,
    note: Option<String>,
    /// Which copy of the program this is, where queues must not share one.
    #[expect(dead_code, reason = "it is in use while this lives")]
    copy: Option<ProgramCopy>,
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // The copy of the program is free again when nothing of it runs. There is nobody to tell of an error; the queue goes anyway.
        let _ = self.session.queue.finish();
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Kernels")
            .field("variant", &self.variant)
            .field("device", &self.session.device.info().name)
            .finish_non_exhaustive()
    }
}

impl Kernels {
    /// Kernels of `variant` on `device`; `cache` is a folder for compiled programs.
    ///
    /// # Errors
    /// [`OpenClError::VariantUnavailable`]; [`OpenClError::Build`] with the compiler's words; [`OpenClError::Device`] where a
    /// check of its arithmetic fails, because results would differ from other engines'.
    pub fn new(device: &Device, variant: Variant, cache: Option<&Path>) -> Result<Kernels, OpenClError> {
        let info = device.info();
        if !info.variants.contains(&variant) {
            return Err(OpenClError::VariantUnavailable {
                device: info.name.clone(),
                variant,
                available: names(&info.variants),
            });
        }
        let session = Arc::new(Session::new(device)?);
        let copy = ProgramCopy::free(device, variant);
        let Built { program, origin, note } = build(&session.context, device, variant, copy.as_ref(), cache)?;
        let mut kernels = BTreeMap::new();
        for name in NAMES.into_iter().filter(|name| variant.has(name)) {
            kernels.insert(name, Kernel::create(&program, name).during("find a kernel in the program")?);
        }
        let state = State {
            kernels,
            sums: [Scratch(None), Scratch(None)],
            scores: Scratch(None),
            codes: Scratch(None),
            block_sums: Scratch(None),
            weights: Scratch(None),
            frames: FrameScratch::default(),
        };
        let kernels = Kernels {
            variant,
            state: Mutex::new(state),
            no_floats: Buffer::zeroed(&session, 64)?,
            no_codes: Buffer::zeroed(&session, 64)?,
            no_integers: Buffer::zeroed(&session, 64)?,
            session,
            origin,
            note,
            copy,
        };
        kernels.check_arithmetic()?;
        Ok(kernels)
    }

    /// The variant that the device prefers.
    ///
    /// # Errors
    /// As [`Kernels::new`].
    pub fn best(device: &Device, cache: Option<&Path>) -> Result<Kernels, OpenClError> {
        Kernels::new(device, device.info().variants[0], cache)
    }

    /// Variant that runs: the one asked for, always.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.session.device
    }

    /// Where the compiled program came from.
    pub fn program_origin(&self) -> &ProgramOrigin {
        &self.origin
    }

    /// What was odd about the cache of compiled programs, if something was.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Waits until all enqueued work is done.
    ///
    /// # Errors
    /// What the device reports about it.
    pub fn finish(&self) -> Result<(), OpenClError> {
        self.session.queue.finish().during("finish the enqueued work")
    }

    /// A zeroed buffer.
    ///
    /// # Errors
    /// Sizes that the device refuses.
    pub fn zeroed<T: Element>(&self, len: usize) -> Result<Buffer<T>, OpenClError> {
        Buffer::zeroed(&self.session, len)
    }

    /// A buffer with these values.
    ///
    /// # Errors
    /// As [`Kernels::zeroed`].
    pub fn copied<T: Element>(&self, values: &[T]) -> Result<Buffer<T>, OpenClError> {
        Buffer::copied(&self.session, values)
    }

    /// A buffer over memory that is there already, a weight region for one: nothing is copied.
    ///
    /// # Errors
    /// Memory that the device cannot use as it lies.
    pub fn share<T: Element>(&self, memory: impl HostMemory + 'static) -> Result<Buffer<T>, OpenClError> {
        Buffer::share(&self.session, Arc::new(memory))
    }

    /// Bytes of scratch held for calls.
    pub fn scratch_bytes(&self) -> usize {
        let state = self.state();
        let [input, hidden] = &state.sums;
        input.bytes()
            + hidden.bytes()
            + state.scores.bytes()
            + state.codes.bytes()
            + state.block_sums.bytes()
            + state.weights.bytes()
            + state.frames.bytes()
    }

    /// `out ← left + right`, element by element: the modulation of a step.
    ///
    /// # Errors
    /// Lengths that differ.
    pub fn add(&self, left: Vector<'_>, right: Vector<'_>, out: &mut Buffer<f32>) -> Result<(), OpenClError> {
        if left.len != right.len || out.len() < left.len {
            return Err(KernelError::shapes(
                "add",
                ("the terms", format!("{} and {} values", left.len, right.len)),
                ("the destination", format!("{} values", out.len())),
                "they must have the same length",
            )
            .into());
        }
        let state = self.state();
        let call = state.call("add")?.at(left.buffer, left.first).at(right.buffer, right.first).buffer(out);
        for first in (0..left.len).step_by(DISPATCH_ELEMENTS) {
            let count = DISPATCH_ELEMENTS.min(left.len - first);
            call.run(&self.session, [(first, count), (0, 1), (0, 1)], [1, 1, 1])?;
        }
        Ok(())
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs single operations whose results tell contraction, flushed subnormals and other roundings apart.
    fn check_arithmetic(&self) -> Result<(), OpenClError> {
        let one_and_bit = 1.0 + f32::EPSILON;
        // Rounded alone the square is 1 + 2ε, fused it leaves ε². A tie above one goes to even. A subnormal stays.
        let inputs = [one_and_bit, -(1.0 + 2.0 * f32::EPSILON), 1.0, f32::EPSILON / 2.0, f32::MIN_POSITIVE, 0.5];
        let want = [
            inputs[0] * inputs[0] + inputs[1],
            inputs[2] + inputs[3],
            -inputs[2] - inputs[3],
            inputs[0] + inputs[3],
            inputs[4] * inputs[5],
            (inputs[4] * inputs[5]) + inputs[4],
        ];
        let input = self.copied(&inputs)?;
        let mut out = self.zeroed::<f32>(want.len())?;
        {
            let state = self.state();
            let call = state.call("check_arithmetic")?.buffer(&input).buffer(&out);
            call.run(&self.session, [(0, 1), (0, 1), (0, 1)], [1, 1, 1])?;
        }
        let names = [
            "x·y + z without contraction",
            "1 + ε/2",
            "−1 − ε/2",
            "(1 + ε) + ε/2",
            "a subnormal product",
            "a subnormal term",
        ];
        let got = out.write()?;
        for ((got, want), name) in got.iter().zip(want).zip(names) {
            if got.to_bits() != want.to_bits() {
                return Err(OpenClError::Device {
                    device: self.session.device.info().name.clone(),
                    reason: format!("{name} gives {got:e}, not {want:e}, so results would differ from other engines'"),
                });
            }
        }
        Ok(())
    }
}

/// Every kernel of the source.
const NAMES: [&str; 20] = [
    "gemm_w8a8",
    "row_sums",
    "row_operator",
    "add",
    "pack_keys",
    "pack_values",
    "attention_fused",
    "attention_scores",
    "attention_codes",
    "attention_values",
    "check_arithmetic",
    "float_product",
    "winograd_inputs",
    "winograd_product",
    "pixel_norm",
    "pack_pixels",
    "norm_ranges",
    "code_parameters",
    "norm_codes",
    "codes_product",
];
