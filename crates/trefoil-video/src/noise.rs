//! Starting latents from a seed: PyTorch's CPU generator, so that a seed means what it means in the reference pipelines.

/// MT19937 (Matsumoto and Nishimura 1998), seeded as `init_genrand`.
#[derive(Debug, Clone)]
struct Twister {
    state: [u32; 624],
    at: usize,
}

impl Twister {
    fn new(seed: u32) -> Twister {
        let mut state = [0u32; 624];
        state[0] = seed;
        for at in 1..624 {
            let before = state[at - 1];
            state[at] = (before ^ (before >> 30)).wrapping_mul(1_812_433_253).wrapping_add(at as u32);
        }
        Twister { state, at: 624 }
    }

    fn next(&mut self) -> u32 {
        if self.at == 624 {
            for at in 0..624 {
                let mixed = (self.state[at] & 0x8000_0000) | (self.state[(at + 1) % 624] & 0x7fff_ffff);
                let twist = if mixed & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[at] = self.state[(at + 397) % 624] ^ (mixed >> 1) ^ twist;
            }
            self.at = 0;
        }
        let mut bits = self.state[self.at];
        self.at += 1;
        bits ^= bits >> 11;
        bits ^= (bits << 7) & 0x9d2c_5680;
        bits ^= (bits << 15) & 0xefc6_0000;
        bits ^ (bits >> 18)
    }

    /// 24 bits of a draw in [0, 1).
    fn uniform(&mut self) -> f32 {
        (self.next() & 0x00ff_ffff) as f32 / 16_777_216.0
    }
}

/// `len` standard normal values as `torch.randn(len, generator=torch.Generator("cpu").manual_seed(seed))` draws them, up to the last
/// bits of logarithm and cosine. `len` must be at least 16, as every latent is; torch draws fewer in another way.
///
/// Blocks of 16 uniforms become normals by Box–Muller, element j with j + 8; a rest is covered by redrawing the last 16.
pub fn torch_normals(seed: u32, len: usize) -> Vec<f32> {
    debug_assert!(len >= 16, "{len} values are drawn in another way");
    let mut generator = Twister::new(seed);
    let mut values: Vec<f32> = (0..len).map(|_| generator.uniform()).collect();
    for block in values.as_chunks_mut::<16>().0 {
        box_muller(block);
    }
    if !len.is_multiple_of(16)
        && let Some(last) = values.last_chunk_mut::<16>()
    {
        for value in last.iter_mut() {
            *value = generator.uniform();
        }
        box_muller(last);
    }
    values
}

fn box_muller(block: &mut [f32; 16]) {
    for at in 0..8 {
        let (first, second) = (1.0 - block[at], block[at + 8]);
        let radius = (-2.0 * first.ln()).sqrt();
        let angle = std::f32::consts::TAU * second;
        block[at] = radius * angle.cos();
        block[at + 8] = radius * angle.sin();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_mt19937() {
        // The first outputs for the seed 5489 of the reference implementation.
        let mut generator = Twister::new(5489);
        assert_eq!([generator.next(), generator.next(), generator.next()], [3_499_211_612, 581_869_302, 3_890_346_734]);
        let mut generator = Twister::new(5489);
        let last = (0..10_000).map(|_| generator.next()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one_also_with_a_rest() {
        for len in [16, 40, 100_000, 100_007] {
            let values = torch_normals(40, len);
            assert!(values.len() == len && values.iter().all(|value| value.is_finite()));
            if len > 1000 {
                let mean = values.iter().sum::<f32>() / len as f32;
                let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / len as f32;
                assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
            }
        }
    }
}
