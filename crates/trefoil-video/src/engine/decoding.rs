//! The kernels of the video decoder on an engine: the one that ends a clip decodes it, on its own kind and its own cores.

use super::opencl::{HostThread, kernels_of, notes_of};
use super::{EngineKind, EngineSpec};
use crate::VideoError;
use crate::vae::{DecoderKernels, DecoderMemory, DecoderPath, VaeDecoder, VaeError};
use std::path::Path;
use trefoil_kernels::{Kernels, opencl};

/// See the module.
#[derive(Debug)]
pub struct DecoderEngine {
    spec: EngineSpec,
    kernels: Held,
    notes: Vec<String>,
}

#[derive(Debug)]
enum Held {
    Cpu(Kernels),
    OpenCl(Box<opencl::Kernels>),
}

/// While this lives, the calling thread is on the engine's cores where that matters.
#[derive(Debug)]
pub struct OnCores {
    _host: Option<HostThread>,
}

impl DecoderEngine {
    /// The kernels of `spec` on its cores; a shape does not apply to decoding.
    ///
    /// # Errors
    /// Cores that cannot be used; no OpenCL library or no device that fits.
    pub fn open(spec: &EngineSpec) -> Result<DecoderEngine, VideoError> {
        let spec = EngineSpec { shape: None, ..spec.clone() };
        Ok(match spec.kind {
            EngineKind::Cpu => {
                let kernels = Held::Cpu(Kernels::best(&spec.resolved_cores())?);
                DecoderEngine { spec, kernels, notes: Vec::new() }
            }
            EngineKind::OpenCl => {
                let (kernels, mut notes) = kernels_of(&spec)?;
                notes.extend(notes_of(&kernels, &spec.to_string()));
                DecoderEngine { spec, kernels: Held::OpenCl(Box::new(kernels)), notes }
            }
        })
    }

    /// Its address.
    pub fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    /// What a decoder is opened for and runs on.
    pub fn kernels(&self) -> DecoderKernels<'_> {
        match &self.kernels {
            Held::Cpu(kernels) => DecoderKernels::Cpu(kernels),
            Held::OpenCl(kernels) => DecoderKernels::OpenCl(kernels),
        }
    }

    /// Threads that compute, as far as this process has them.
    pub fn threads(&self) -> usize {
        match &self.kernels {
            Held::Cpu(kernels) => kernels.pool().threads(),
            Held::OpenCl(kernels) => kernels.device().info().compute_units as usize,
        }
    }

    /// Instruction set or variant of the kernels.
    pub fn kernels_name(&self) -> String {
        match &self.kernels {
            Held::Cpu(kernels) => kernels.isa().to_string(),
            Held::OpenCl(kernels) => format!("OpenCL {}", kernels.variant()),
        }
    }

    /// What a reader of its results should know, such as the device.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Puts the calling thread on the engine's cores, where it only enqueues and waits, so that it disturbs no other engine's.
    pub fn on_cores(&self) -> OnCores {
        let is_host = matches!(self.kernels, Held::OpenCl(_));
        OnCores { _host: is_host.then(|| HostThread::on(&self.spec.resolved_cores())) }
    }
}

/// A decoder whose weights are packed for the engine that runs it.
#[derive(Debug)]
pub struct EngineDecoder {
    engine: DecoderEngine,
    decoder: VaeDecoder,
}

impl EngineDecoder {
    /// Opens the decoder of a model folder on `path` for the engine of `spec`.
    ///
    /// # Errors
    /// As [`VaeDecoder::open`] and [`DecoderEngine::open`].
    pub fn open(model: &Path, path: DecoderPath, spec: &EngineSpec) -> Result<EngineDecoder, VideoError> {
        EngineDecoder::open_on(model, path, DecoderEngine::open(spec)?)
    }

    /// The same on an engine that is there already.
    ///
    /// # Errors
    /// As [`VaeDecoder::open_for`].
    pub fn open_on(model: &Path, path: DecoderPath, engine: DecoderEngine) -> Result<EngineDecoder, VideoError> {
        let decoder = VaeDecoder::open_for(model, path, engine.kernels())?;
        Ok(EngineDecoder { engine, decoder })
    }

    /// Its engine.
    pub fn engine(&self) -> &DecoderEngine {
        &self.engine
    }

    /// The decoder.
    pub fn decoder(&self) -> &VaeDecoder {
        &self.decoder
    }

    /// What it runs on.
    pub fn kernels(&self) -> DecoderKernels<'_> {
        self.engine.kernels()
    }

    /// Memory that decoding a latent of `[frames, height, width]` takes.
    ///
    /// # Errors
    /// As [`VaeDecoder::clip_memory`].
    pub fn memory(&self, latent: [usize; 3]) -> Result<DecoderMemory, VaeError> {
        self.decoder.clip_memory(latent, self.engine.threads())
    }
}
