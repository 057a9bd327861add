//! Video frames as the decoder leaves them, and what is wrong with them.

use serde::Serialize;

/// One RGB frame, values in −1..1 (black to white) as the decoder computes them, which may lie outside or be NaN.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoFrame {
    height: usize,
    width: usize,
    values: Vec<f32>,
}

impl VideoFrame {
    /// A frame from `[height][width][3]` values in −1..1.
    ///
    /// # Panics
    /// Where the number of values is another.
    pub fn from_signed(height: usize, width: usize, values: Vec<f32>) -> VideoFrame {
        assert_eq!(values.len(), height * width * 3, "values of a frame of {height}×{width}");
        VideoFrame { height, width, values }
    }

    /// A frame from bytes.
    ///
    /// # Panics
    /// As [`VideoFrame::from_signed`].
    pub fn from_bytes(height: usize, width: usize, bytes: &[u8]) -> VideoFrame {
        VideoFrame::from_signed(height, width, bytes.iter().map(|&byte| f32::from(byte) / 127.5 - 1.0).collect())
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// `[height][width][3]`, not clamped.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The same, to be changed.
    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Colour `channel` of every pixel, clamped to −1..1; NaN becomes −1 (black).
    pub fn plane(&self, channel: usize) -> impl Iterator<Item = f32> {
        self.values
            .iter()
            .skip(channel)
            .step_by(3)
            .map(|&value| if value.is_nan() { -1.0 } else { value.clamp(-1.0, 1.0) })
    }

    /// `round_half_even(255·clamp(x/2 + ½, 0, 1))` of every value; 0 for NaN.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.values.iter().map(|&value| byte(value)).collect()
    }

    /// Counts values that a picture cannot hold.
    pub fn health(&self) -> FrameHealth {
        let mut health = FrameHealth { values: self.values.len(), ..FrameHealth::default() };
        for &value in &self.values {
            health.not_finite += usize::from(!value.is_finite());
            health.saturated += usize::from(value.abs() > 1.0 && value.is_finite());
        }
        health
    }
}

fn byte(value: f32) -> u8 {
    // A cast of NaN is 0.
    (255.0 * (value * 0.5 + 0.5).clamp(0.0, 1.0)).round_ties_even() as u8
}

/// How many values of a frame, or of a clip, are outside what a picture shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct FrameHealth {
    /// All values.
    pub values: usize,
    /// NaN and infinite ones.
    pub not_finite: usize,
    /// Finite ones beyond black or white.
    pub saturated: usize,
}

/// Share of saturated values from which a clip is reported. Trained models leave a few percent; random or badly quantised
/// weights leave most.
const MUCH_SATURATION: f64 = 0.25;

impl FrameHealth {
    /// Adds another frame's counts.
    pub fn add(&mut self, other: FrameHealth) {
        self.values += other.values;
        self.not_finite += other.not_finite;
        self.saturated += other.saturated;
    }

    /// One line where something is wrong.
    pub fn warning(&self) -> Option<String> {
        let share = |count: usize| 100.0 * count as f64 / self.values.max(1) as f64;
        if self.not_finite > 0 {
            return Some(format!(
                "{} of {} values ({:.2} %) are NaN or infinite and are shown black; the weights or the latent are damaged",
                self.not_finite,
                self.values,
                share(self.not_finite)
            ));
        }
        (share(self.saturated) > 100.0 * MUCH_SATURATION).then(|| {
            format!(
                "{:.0} % of the values are beyond black or white; check that the latent is this VAE's and de-normalised once",
                share(self.saturated)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_half_to_even_and_never_wrap() {
        let at = |byte: f32| byte / 127.5 - 1.0;
        let values = vec![-1.0, 1.0, 0.0, -7.0, 7.0, f32::NAN, f32::INFINITY, at(3.0), at(200.0)];
        let frame = VideoFrame::from_signed(1, 3, values);
        // 0 is 127.5, which goes to the even 128.
        assert_eq!(frame.to_bytes(), [0, 255, 128, 0, 255, 0, 255, 3, 200]);
        assert_eq!(frame.plane(2).collect::<Vec<_>>(), [0.0, -1.0, at(200.0)]);
        let health = frame.health();
        assert_eq!(health, FrameHealth { values: 9, not_finite: 2, saturated: 2 });
        assert!(health.warning().unwrap().starts_with("2 of 9 values (22.22 %) are NaN"));
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(VideoFrame::from_bytes(16, 16, &all.repeat(3)).to_bytes(), all.repeat(3));
    }

    #[test]
    fn only_much_saturation_is_reported() {
        let health = |saturated| FrameHealth { values: 100, not_finite: 0, saturated };
        assert_eq!(health(20).warning(), None);
        assert!(health(26).warning().unwrap().starts_with("26 % of the values"));
    }
}
