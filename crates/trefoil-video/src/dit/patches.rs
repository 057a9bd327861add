//! Latents as patches: the running latent of a clip is kept as tokens × (channel, row, column of the patch), the order of the
//! patch embedding's input, so that the embedding is a plain product and the handoff is one dense block.

use crate::config::PATCH;

/// `[channels, frames, height, width]` → tokens × patch. Tokens are ordered frame, row, column.
pub fn patchify(latent: &[f32], shape: [usize; 4]) -> Vec<f32> {
    let mut patches = vec![0f32; latent.len()];
    for_each(shape, |patch, pixel| patches[patch] = latent[pixel]);
    patches
}

/// The inverse of [`patchify`].
pub fn unpatchify(patches: &[f32], shape: [usize; 4]) -> Vec<f32> {
    let mut latent = vec![0f32; patches.len()];
    for_each(shape, |patch, pixel| latent[pixel] = patches[patch]);
    latent
}

/// Calls `put(index in patches, index in the latent)` for every value.
fn for_each([channels, frames, height, width]: [usize; 4], mut put: impl FnMut(usize, usize)) {
    let (rows, columns) = (height / PATCH, width / PATCH);
    let patch = channels * PATCH * PATCH;
    for channel in 0..channels {
        for frame in 0..frames {
            for y in 0..height {
                for x in 0..width {
                    let token = (frame * rows + y / PATCH) * columns + x / PATCH;
                    let inside = (channel * PATCH + y % PATCH) * PATCH + x % PATCH;
                    put(token * patch + inside, ((channel * frames + frame) * height + y) * width + x);
                }
            }
        }
    }
}

/// Reorders a row of the output projection, (row, column, channel) with the channel fastest, to (channel, row, column).
pub(super) fn from_head_order(projected: &[f32], patch: &mut [f32]) {
    let channels = patch.len() / (PATCH * PATCH);
    for (place, values) in projected.chunks_exact(channels).enumerate() {
        for (channel, &value) in values.iter().enumerate() {
            patch[channel * PATCH * PATCH + place] = value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_come_back_and_lie_as_the_model_wants() {
        let shape = [3, 2, 4, 6];
        let latent: Vec<f32> = (0..3 * 2 * 4 * 6).map(|value| value as f32).collect();
        let patches = patchify(&latent, shape);
        assert_eq!(unpatchify(&patches, shape), latent);
        // Token (frame 1, row 1, column 2), channel 2, inside (1, 0): pixel (3, 4) of frame 1.
        let token = (2 + 1) * 3 + 2;
        let pixel = ((2 * 2 + 1) * 4 + 3) * 6 + 4;
        assert_eq!(patches[token * 12 + (2 * 2 + 1) * 2].to_bits(), latent[pixel].to_bits());
    }

    #[test]
    fn the_head_s_order_has_the_channel_fastest() {
        let projected: Vec<f32> = (0..12).map(|value| value as f32).collect();
        let mut patch = vec![0f32; 12];
        from_head_order(&projected, &mut patch);
        // Channel 1, inside (1, 0) was at (1·2 + 0)·3 + 1.
        assert_eq!(patch[4 + 2].to_bits(), 7f32.to_bits());
        assert_eq!(patch[..4], [0.0, 3.0, 6.0, 9.0]);
    }
}
