//! Normalisation of every pixel over its channels.

use super::Frame;
use crate::gemm::Activation;
use crate::math::{lane_sum, silu};
use crate::multiversion::multiversion;
use crate::{KernelError, Kernels, Workspace};

/// Smallest norm that is divided by, as in the reference (`F.normalize`).
const SMALLEST_NORM: f32 = 1e-12;

impl Kernels {
    /// `out ← act(x / max(‖x‖₂, 1e-12) · √C · gain)` for the `C` channels of every pixel (the VAE's RMS norm: a clamped norm,
    /// no ε under the root).
    ///
    /// # Errors
    /// Shapes that do not fit each other, an activation other than the identity and SiLU.
    pub fn pixel_norm(
        &self,
        input: &Frame,
        gain: &[f32],
        activation: Activation,
        out: &mut Frame,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "pixel_norm";
        let channels = input.channels();
        if gain.len() != channels {
            return Err(KernelError::shapes(
                operator,
                ("the gain", format!("{} values", gain.len())),
                ("the input", input.shape()),
                "there must be one value per channel",
            ));
        }
        if (out.height(), out.width(), out.channels()) != (input.height(), input.width(), channels) {
            return Err(KernelError::shapes(
                operator,
                ("the input", input.shape()),
                ("the destination", out.shape()),
                "they must have the same shape",
            ));
        }
        let is_activated = match activation {
            Activation::Identity => false,
            Activation::Silu => true,
            Activation::GeluTanh => {
                return Err(KernelError::value(operator, "the activation", "gelu", "use the identity or SiLU"));
            }
        };
        let root = root_of(channels);
        let mut rows = out.rows_mut();
        self.run_grains(
            input.height(),
            1,
            workspace,
            |count| rows.take(count),
            |part| {
                for y in 0..part.rows {
                    normalise(self.supported(), input.row(part.first + y), gain, root, is_activated, part.sink.row(y));
                }
            },
        );
        Ok(())
    }
}

/// √C, rounded once.
pub(crate) fn root_of(channels: usize) -> f32 {
    (channels as f64).sqrt() as f32
}

/// √C over the norm of a pixel.
#[inline(always)]
#[allow(clippy::inline_always, reason = "compiled inside each version of its callers")]
pub(super) fn factor(x: &[f32], root: f32) -> f32 {
    let norm = lane_sum(x, |x| x * x).sqrt();
    let factor = root / if norm > SMALLEST_NORM { norm } else { SMALLEST_NORM };
    // NaN stays NaN: a comparison with it is false, so its norm must not be replaced.
    if norm.is_nan() { norm } else { factor }
}

multiversion! {
    fn normalise(input: &[f32], gain: &[f32], root: f32, is_activated: bool, out: &mut [f32]) {
        for (x, out) in input.chunks_exact(gain.len()).zip(out.chunks_exact_mut(gain.len())) {
            let factor = factor(x, root);
            if is_activated {
                for ((out, &x), &gain) in out.iter_mut().zip(x).zip(gain) {
                    *out = silu(x * factor * gain);
                }
            } else {
                for ((out, &x), &gain) in out.iter_mut().zip(x).zip(gain) {
                    *out = x * factor * gain;
                }
            }
        }
    }
}
