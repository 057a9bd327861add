//! Whether a command fits into what the system has free, before anything of it is made.

use crate::cli::EngineArgs;
use crate::error::CliError;
use std::path::Path;
use trefoil_report::format;
use trefoil_video::config::PATCH;
use trefoil_video::rates::shape_for_tokens;
use trefoil_video::{MAX_TOKENS, Model, NumericPath};
use trefoil_weights::memory::available_bytes;

/// Clips of a stream that are in memory at once: on either lane, and between them.
pub const IN_FLIGHT: u64 = 3;

/// What something takes at least.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// What.
    pub what: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// Weights that engines read, states of `clips` at once, and the widest buffers of a block, for latents of `[1, C, F, H, W]`. At least
/// that much: kernels' own scratch comes on top.
pub fn of_engines(
    args: &EngineArgs,
    in_processes: bool,
    model: &Model,
    artefact: &Path,
    shape: [usize; 5],
    clips: u64,
) -> Vec<Need> {
    let float = size_of::<f32>() as u64;
    let latent: u64 = shape.iter().fold(1u64, |product, &side| product.saturating_mul(side as u64));
    let config = model.config();
    let tokens = latent / (config.channels * PATCH * PATCH) as u64;
    let hidden = tokens.saturating_mul(config.width() as u64).saturating_mul(float);
    let engines = args.engines.len() as u64;
    let packed = |path: &Path| std::fs::metadata(path).map_or(0, |about| about.len());
    let weights = packed(artefact) + args.second.second.as_deref().map_or(0, packed);
    // Four bytes for one, in every process that computes with them.
    let copies = if in_processes { 1 + engines } else { 1 };
    let unquantised = if args.path.contains(&NumericPath::F32) { weights.saturating_mul(4 * copies) } else { 0 };
    let regions = if in_processes { engines.saturating_mul(hidden) } else { 0 };
    let clips = (hidden.saturating_add(latent.saturating_mul(4 * float))).saturating_mul(clips);
    vec![
        Need { what: "weights", bytes: weights.saturating_add(unquantised) },
        Need { what: "clips", bytes: clips.saturating_add(regions) },
        // Queries, keys, values and the attention's result.
        Need { what: "engines", bytes: hidden.saturating_mul(4).saturating_mul(engines) },
    ]
}

/// Refuses sizes of a random clip that no engine takes, or that do not fit.
pub fn check_random(
    args: &EngineArgs,
    in_processes: bool,
    (model, artefact): (&Model, &Path),
    [tokens, text_rows]: [usize; 2],
) -> Result<(), CliError> {
    if !(1..=MAX_TOKENS).contains(&tokens) || text_rows == 0 {
        return Err(CliError::Usage(format!(
            "{tokens} --tokens and {text_rows} --text-rows; tokens must lie in 1..={MAX_TOKENS}, and text needs a row"
        )));
    }
    let [channels, frames, rows, columns] = shape_for_tokens(model.config(), tokens);
    let mut needs = of_engines(args, in_processes, model, artefact, [1, channels, frames, rows, columns], IN_FLIGHT);
    needs.push(of_text(model, text_rows));
    check("this", "choose fewer --tokens or --text-rows", &needs)
}

/// Text states of that many rows, and their contexts.
pub fn of_text(model: &Model, rows: usize) -> Need {
    let config = model.config();
    let width = (config.text_dim + 2 * config.width()) as u64 * size_of::<f32>() as u64;
    Need { what: "text", bytes: width.saturating_mul(rows as u64) }
}

/// Refuses what would be ended by the system halfway. `what` needs it, and `remedy` says how it would need less.
pub fn check(what: &str, remedy: &str, needs: &[Need]) -> Result<(), CliError> {
    match available_bytes() {
        Some(available) => refuse(what, remedy, needs, available),
        None => Ok(()),
    }
}

fn refuse(what: &str, remedy: &str, needs: &[Need], available: u64) -> Result<(), CliError> {
    let all = needs.iter().fold(0u64, |sum, need| sum.saturating_add(need.bytes));
    if all <= available {
        return Ok(());
    }
    let parts: Vec<String> = needs
        .iter()
        .filter(|need| need.bytes > 0)
        .map(|need| format!("{} {}", need.what, format::bytes(need.bytes)))
        .collect();
    Err(CliError::Usage(format!(
        "{what} needs at least {} of memory ({}) and {} are available; {remedy}, or free some",
        format::bytes(all),
        parts.join(", "),
        format::bytes(available)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_with_its_parts() {
        let need = |what, bytes| Need { what, bytes };
        let needs = [need("decoder", 3_000_000_000), need("clips", 1_000_000_000), need("engines", 0)];
        assert!(refuse("the stream", "x", &needs, 4_000_000_000).is_ok());
        let message = refuse("the stream", "choose less", &needs, 2_000_000_000).unwrap_err().to_string();
        assert!(
            message.contains(
                "the stream needs at least 4.00 GB of memory (decoder 3.00 GB, clips 1.00 GB) and 2.00 GB are available; \
                 choose less, or free some"
            ),
            "{message}"
        );
        assert!(refuse("it", "x", &[need("clips", u64::MAX), need("decoder", 1)], 1 << 40).is_err());
    }
}
