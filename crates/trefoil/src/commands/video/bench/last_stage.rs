//! What ends a clip in the benchmark: a decoder with random weights, or a stand-in that waits.

use super::super::keep_going;
use crate::cli::BenchVideoArgs;
use crate::error::CliError;
use std::path::Path;
use std::time::{Duration, Instant};
use trefoil_core::Samples;
use trefoil_kernels::Kernels;
use trefoil_report::format;
use trefoil_video::engine::stand_in;
use trefoil_video::noise::torch_normals;
use trefoil_video::stream::{Cost, LastStageOn, LastStageRate, measure_last_stage};
use trefoil_video::synthetic::write_vae_decoder;
use trefoil_video::vae::{Latent, VaeConfig, VaeDecoder};
use trefoil_video::{Clip, EngineSpec, Lane, Tensor, VideoError};

/// See the module.
pub enum LastStage {
    /// Milliseconds where one engine works alone, and while both do; nothing at all with zeros.
    StandIn([f64; 2]),
    /// Real work.
    Decoder(Box<Decoder>),
}

/// A decoder and what it decodes.
pub struct Decoder {
    decoder: VaeDecoder,
    latent: Latent,
}

impl LastStage {
    /// The one asked for. A decoder of the released widths is written into `folder` and read from there.
    pub fn of(args: &BenchVideoArgs, folder: &Path) -> Result<LastStage, CliError> {
        let Some([frames, height, width]) = args.decode.map(|latent| latent.0) else {
            let solo = args.decoder_solo_ms.unwrap_or(args.decoder_ms);
            for ms in [args.decoder_ms, solo] {
                if !(0.0..=1e9).contains(&ms) {
                    return Err(CliError::Usage(format!("--decoder-ms {ms} is no time")));
                }
            }
            return Ok(LastStage::StandIn([solo, args.decoder_ms]));
        };
        let folder = folder.join("vae");
        std::fs::create_dir_all(&folder).map_err(|source| CliError::File {
            action: "create",
            path: folder.clone(),
            source,
        })?;
        let config = VaeConfig::default();
        write_vae_decoder(&folder, &config, 1)?;
        let decoder = VaeDecoder::open(&folder).map_err(VideoError::from)?;
        let len = config.z_dim * frames * height * width;
        let mut values = torch_normals(42, len.max(16));
        values.truncate(len);
        let latent = Latent::new(config.z_dim, frames, height, width, values)
            .and_then(|latent| latent.denormalise(&config))
            .map_err(VideoError::from)?;
        Ok(LastStage::Decoder(Box::new(Decoder { decoder, latent })))
    }

    /// Kernels for it on the cores of an engine.
    pub fn kernels(spec: Option<&EngineSpec>) -> Result<Kernels, VideoError> {
        Ok(Kernels::best(&spec.map(EngineSpec::resolved_cores).unwrap_or_default())?)
    }

    /// Does it once. `is_serial`: nothing else works meanwhile.
    pub fn run(&self, kernels: &Kernels, is_serial: bool) -> Result<(), VideoError> {
        match self {
            LastStage::StandIn([solo, corun]) => {
                let ms = if is_serial { *solo } else { *corun };
                if ms > 0.0 {
                    stand_in(Duration::from_secs_f64(ms / 1e3));
                }
                Ok(())
            }
            LastStage::Decoder(decoder) => {
                let Decoder { decoder, latent } = decoder.as_ref();
                decoder.decode_clip(kernels, latent, &mut |_| keep_going(0, 0), &mut |_| Ok(()))
            }
        }
    }

    /// Times it on kernels, alone and while a lane beside it runs blocks; of a stand-in what was declared.
    pub fn rate(
        &self,
        kernels: &Kernels,
        beside: Option<(&mut Lane, &Clip, &Tensor)>,
    ) -> Result<LastStageRate, VideoError> {
        if let LastStage::StandIn([solo, corun]) = *self {
            return Ok(LastStageRate { solo_ms: Samples::exactly(solo), corun_ms: Some(Samples::exactly(corun)) });
        }
        let mut stage = || {
            let begun = Instant::now();
            self.run(kernels, false)?;
            Ok(begun.elapsed().as_secs_f64() * 1e3)
        };
        measure_last_stage(&mut stage, beside, &|| keep_going(0, 0))
    }

    /// What it costs at such a rate. A stand-in waits as [`LastStage::run`] does, whoever works meanwhile.
    pub fn cost(&self, rate: &LastStageRate, is_serial: bool) -> Cost {
        match self {
            LastStage::StandIn([solo, corun]) => Cost::always(if is_serial { *solo } else { *corun }),
            LastStage::Decoder(_) => rate.cost(),
        }
    }

    /// A stand-in makes times emulated, unless there is nothing to stand in for.
    pub fn is_emulated(&self) -> bool {
        matches!(self, LastStage::StandIn(ms) if ms.iter().any(|&ms| ms > 0.0))
    }

    /// Whose it is in the data-parallel baseline: as in the paper the second engine's where it stands in for one that alone can decode;
    /// real decoding can be done by either engine's cores.
    pub fn in_data_parallel(&self) -> LastStageOn {
        if self.is_emulated() { LastStageOn::Last } else { LastStageOn::Each }
    }

    /// For people.
    pub fn describe(&self) -> String {
        match self {
            LastStage::StandIn([solo, corun]) if *solo <= 0.0 && *corun <= 0.0 => "none".to_owned(),
            LastStage::StandIn([solo, corun]) => format!(
                "a stand-in that waits {} alone and {} while both engines work (emulated)",
                format::time(*solo),
                format::time(*corun)
            ),
            LastStage::Decoder(decoder) => {
                let latent = &decoder.latent;
                format!(
                    "the VAE decoder (f32, random weights) on a latent of {} × {} × {}",
                    latent.frames(),
                    latent.height(),
                    latent.width()
                )
            }
        }
    }
}
