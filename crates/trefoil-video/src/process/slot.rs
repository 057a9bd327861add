//! The shared memory of a clip: inputs, the state twice, and the latent after each step.

use crate::VideoError;
use crate::denoise::ClipState;
use crate::sampler::History;
use crate::tensors::Tensor;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trefoil_weights::{Region, RegionKind};

/// Bytes of a value.
const SIZE: usize = size_of::<f32>();

/// Sizes of a slot, in values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotLayout {
    /// `[C, F, H, W]` of the latent.
    pub shape: [usize; 4],
    /// Tokens × d.
    pub hidden: usize,
    /// Rows of the texts: with the prompt, and without (0 without guidance).
    pub text_rows: [usize; 2],
    /// Width of a text row.
    pub text_dim: usize,
    /// Denoising steps.
    pub steps: usize,
    /// Whether a multi-step solver carries a history.
    pub has_history: bool,
}

/// The part of a state that is no tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StateMark {
    /// Execution that comes next.
    pub next: usize,
    /// Order of the solver's last prediction.
    pub order: usize,
    /// Steps that the solver has done.
    pub done: usize,
}

impl SlotLayout {
    /// Values of a latent.
    fn latent(&self) -> usize {
        self.shape.iter().product()
    }

    /// Sizes of the parts of a state: hidden, latent, guided, two predictions, last.
    fn state_parts(&self) -> [usize; 6] {
        let latent = self.latent();
        let guided = if self.text_rows[1] > 0 { latent } else { 0 };
        let history = if self.has_history { latent } else { 0 };
        [self.hidden, latent, guided, history, history, history]
    }

    /// Where text `branch` lies.
    fn text(&self, branch: usize) -> Range<usize> {
        let sizes = self.text_rows.map(|rows| rows * self.text_dim);
        let start = self.latent() + if branch == 0 { 0 } else { sizes[0] };
        start..start + sizes[branch]
    }

    /// Where state `number` (0 or 1) begins.
    fn state(&self, number: usize) -> usize {
        self.text(1).end + number * self.state_parts().iter().sum::<usize>()
    }

    /// Where the latent after `step` lies.
    fn result(&self, step: usize) -> Range<usize> {
        let start = self.state(2) + step * self.latent();
        start..start + self.latent()
    }

    /// Bytes of the slot.
    pub fn bytes(&self) -> usize {
        self.result(self.steps).start * SIZE
    }
}

/// A slot in shared memory.
#[derive(Debug)]
pub struct Slot {
    region: Region,
    layout: SlotLayout,
}

impl Slot {
    /// A new slot with a clip's inputs in it.
    ///
    /// # Errors
    /// Memory that the system refuses.
    pub fn create(layout: SlotLayout, noise: &Tensor, texts: [Option<&Tensor>; 2]) -> Result<Slot, VideoError> {
        let slot = Slot { region: Region::shared(0, layout.bytes(), RegionKind::Memfd, None)?, layout };
        slot.write(0, &noise.values)?;
        for (branch, text) in texts.into_iter().enumerate() {
            if let Some(text) = text {
                slot.write(layout.text(branch).start, &text.values)?;
            }
        }
        Ok(slot)
    }

    /// A slot that another process made.
    ///
    /// # Errors
    /// A region of another size.
    pub fn over(region: Region, layout: SlotLayout) -> Result<Slot, VideoError> {
        if region.len() < layout.bytes() {
            return Err(VideoError::Engine {
                engine: "worker".to_string(),
                reason: format!("a slot of {} bytes does not hold {}", region.len(), layout.bytes()),
            });
        }
        Ok(Slot { region, layout })
    }

    /// The memory, to be shared.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Its sizes.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// The starting latent.
    ///
    /// # Errors
    /// Never in practice: bounds are those of the layout.
    pub fn noise(&self) -> Result<Tensor, VideoError> {
        Tensor::new("noise", &self.layout.shape, self.read(0..self.layout.latent())?)
    }

    /// A text, if the clip has it.
    ///
    /// # Errors
    /// As above.
    pub fn text(&self, branch: usize) -> Result<Option<Tensor>, VideoError> {
        let rows = self.layout.text_rows[branch];
        if rows == 0 {
            return Ok(None);
        }
        Tensor::new("text", &[rows, self.layout.text_dim], self.read(self.layout.text(branch))?).map(Some)
    }

    /// Writes state `number`; what is not in it (the present branch's velocity) is no part of a state between executions.
    ///
    /// # Errors
    /// A state of other sizes.
    pub fn put(&self, number: usize, state: &ClipState) -> Result<StateMark, VideoError> {
        let (predictions, last, order, done) = state.history.parts();
        let parts = [&state.hidden[..], &state.latent, &state.guided, &predictions[0], &predictions[1], last];
        let mut at = self.layout.state(number);
        for (part, size) in parts.into_iter().zip(self.layout.state_parts()) {
            self.write(at, &part[..part.len().min(size)])?;
            at += size;
        }
        Ok(StateMark { next: state.next, order, done })
    }

    /// Reads state `number`.
    ///
    /// # Errors
    /// As above.
    pub fn get(&self, number: usize, mark: StateMark) -> Result<ClipState, VideoError> {
        let mut at = self.layout.state(number);
        let mut parts = Vec::with_capacity(6);
        for size in self.layout.state_parts() {
            parts.push(self.read(at..at + size)?);
            at += size;
        }
        let mut parts = parts.into_iter();
        let mut next = || parts.next().unwrap_or_default();
        let (hidden, latent, guided) = (next(), next(), next());
        let (mut newest, mut earlier, mut last) = (next(), next(), next());
        // A history that has not begun is empty.
        if mark.done < 2 {
            earlier.clear();
        }
        if mark.done < 1 {
            newest.clear();
            last.clear();
        }
        Ok(ClipState {
            velocity: vec![0.0; latent.len()],
            hidden,
            latent,
            guided,
            history: History::from_parts([newest, earlier], last, mark.order, mark.done),
            next: mark.next,
        })
    }

    /// Writes the latent after a step, as `[C, F, H, W]`.
    ///
    /// # Errors
    /// As above.
    pub fn put_result(&self, step: usize, latent: &[f32]) -> Result<(), VideoError> {
        self.write(self.layout.result(step).start, latent)
    }

    /// The latent after a step, as `[C, F, H, W]`.
    ///
    /// # Errors
    /// As above.
    pub fn result(&self, step: usize) -> Result<Vec<f32>, VideoError> {
        self.read(self.layout.result(step))
    }

    fn write(&self, at: usize, values: &[f32]) -> Result<(), VideoError> {
        let mut bytes = Vec::with_capacity(CHUNK * SIZE);
        for (number, chunk) in values.chunks(CHUNK).enumerate() {
            bytes.clear();
            bytes.extend(chunk.iter().flat_map(|value| value.to_ne_bytes()));
            self.region.write_at((at + number * CHUNK) * SIZE, &bytes)?;
        }
        Ok(())
    }

    fn read(&self, range: Range<usize>) -> Result<Vec<f32>, VideoError> {
        let mut bytes = vec![0u8; CHUNK * SIZE];
        let mut values = Vec::with_capacity(range.len());
        while values.len() < range.len() {
            let count = CHUNK.min(range.len() - values.len());
            let bytes = &mut bytes[..count * SIZE];
            self.region.read_at((range.start + values.len()) * SIZE, bytes)?;
            values.extend(bytes.as_chunks::<SIZE>().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)));
        }
        Ok(values)
    }
}

/// Values copied at a time.
const CHUNK: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_come_back_from_either_half() {
        let layout = SlotLayout {
            shape: [2, 1, 2, 4],
            hidden: 40_000,
            text_rows: [3, 2],
            text_dim: 5,
            steps: 2,
            has_history: true,
        };
        let ramp = |from: f32, len: usize| (0..len).map(|at| from + at as f32).collect::<Vec<f32>>();
        let noise = Tensor::new("noise", &[2, 1, 2, 4], ramp(0.5, 16)).unwrap();
        let texts = [ramp(100.0, 15), ramp(200.0, 10)];
        let texts = [
            Tensor::new("a", &[3, 5], texts[0].clone()).unwrap(),
            Tensor::new("b", &[1, 2, 5], texts[1].clone()).unwrap(),
        ];
        let slot = Slot::create(layout, &noise, [Some(&texts[0]), Some(&texts[1])]).unwrap();
        let state = |done: usize| ClipState {
            hidden: ramp(1.0, 40_000),
            latent: ramp(2.0, 16),
            velocity: vec![0.0; 16],
            guided: ramp(3.0, 16),
            history: History::from_parts(
                [ramp(4.0, 16), if done > 1 { ramp(5.0, 16) } else { vec![] }],
                ramp(6.0, 16),
                1,
                done,
            ),
            next: 7,
        };
        for (number, done) in [(0, 2), (1, 1)] {
            let mark = slot.put(number, &state(done)).unwrap();
            assert_eq!(mark, StateMark { next: 7, order: 1, done });
        }
        slot.put_result(1, &ramp(9.0, 16)).unwrap();
        for (number, done) in [(0, 2), (1, 1)] {
            assert_eq!(slot.get(number, StateMark { next: 7, order: 1, done }).unwrap(), state(done));
        }
        assert_eq!(slot.noise().unwrap().values, noise.values);
        assert_eq!(slot.text(1).unwrap().unwrap().values, texts[1].values);
        assert_eq!(slot.result(1).unwrap(), ramp(9.0, 16));
        // A peer with other sizes is refused.
        let small = Region::shared(0, 64, RegionKind::Memfd, None).unwrap();
        assert!(Slot::over(small, layout).is_err());
    }
}
