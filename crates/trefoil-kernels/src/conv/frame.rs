//! Feature maps: one frame, channels last, with a border of zeros.

use super::values::Values;
use crate::KernelError;
use std::ops::Range;

/// One frame of features, channels last (`[height][width][channels]`), inside a border of one zero pixel.
///
/// The border makes a 3 × 3 convolution a matrix product that reads the frame where it lies: the pixels under a row of the
/// filter are consecutive, also at the edges.
#[derive(Debug, Clone)]
pub struct Frame {
    height: usize,
    width: usize,
    channels: usize,
    data: Values,
}

impl Frame {
    /// A frame of zeros.
    pub fn new(height: usize, width: usize, channels: usize) -> Frame {
        Frame { height, width, channels, data: Values::zeroed(Frame::elements(height, width, channels)) }
    }

    /// Values that a frame holds, border included.
    pub fn elements(height: usize, width: usize, channels: usize) -> usize {
        (height + 2) * (width + 2) * channels
    }

    /// A frame from `[channels][height][width]`, the order of checkpoints and reference tensors. `channel(c)` gives plane `c`.
    pub fn from_planes<'p>(
        height: usize,
        width: usize,
        channels: usize,
        channel: impl Fn(usize) -> &'p [f32],
    ) -> Result<Frame, KernelError> {
        let mut frame = Frame::new(height, width, channels);
        for index in 0..channels {
            let plane = channel(index);
            if plane.len() != height * width {
                return Err(KernelError::shapes(
                    "frame",
                    ("a plane", format!("{} values", plane.len())),
                    ("the frame", format!("{height}×{width}")),
                    "there must be one value per pixel",
                ));
            }
            for (y, line) in plane.chunks_exact(width.max(1)).enumerate() {
                for (pixel, &value) in frame.row_mut(y).chunks_exact_mut(channels).zip(line) {
                    pixel[index] = value;
                }
            }
        }
        Ok(frame)
    }

    /// These rows and columns as a frame of their own, in a border of zeros; what lies outside the frame is left out.
    #[must_use]
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Frame {
        let within =
            |span: Range<usize>, side: usize| span.start.min(side)..span.end.min(side).max(span.start.min(side));
        let (rows, columns) = (within(rows, self.height), within(columns, self.width));
        let mut part = Frame::new(rows.len(), columns.len(), self.channels);
        for (y, row) in rows.enumerate() {
            let line = self.row(row);
            part.row_mut(y).copy_from_slice(&line[columns.start * self.channels..columns.end * self.channels]);
        }
        part
    }

    /// Rows of pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Pixels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Values of a pixel.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.data.len() * size_of::<f32>()
    }

    /// Values from one row of pixels to the next.
    pub(super) fn stride(&self) -> usize {
        (self.width + 2) * self.channels
    }

    /// All values, border included.
    pub(crate) fn data(&self) -> &[f32] {
        &self.data
    }

    /// Row `y`, `width · channels` values.
    pub fn row(&self, y: usize) -> &[f32] {
        &self.data[(y + 1) * self.stride() + self.channels..][..self.width * self.channels]
    }

    /// Row `y`, to be written. The border cannot be reached.
    pub fn row_mut(&mut self, y: usize) -> &mut [f32] {
        let start = (y + 1) * self.stride() + self.channels;
        &mut self.data[start..][..self.width * self.channels]
    }

    /// `height×width×channels`, for messages.
    pub(super) fn shape(&self) -> String {
        format!("{}×{}×{}", self.height, self.width, self.channels)
    }

    /// The rows of pixels, to be handed out to threads.
    pub(super) fn rows_mut(&mut self) -> FrameRows<'_> {
        let (stride, channels, width, height) = (self.stride(), self.channels, self.width, self.height);
        let data = &mut self.data[stride..][..height * stride];
        FrameRows { data, stride, channels, width }
    }
}

/// Whole rows of a frame that one thread writes.
#[derive(Debug)]
pub(super) struct FrameRows<'a> {
    data: &'a mut [f32],
    stride: usize,
    channels: usize,
    width: usize,
}

impl<'a> FrameRows<'a> {
    /// Splits the first `count` rows off.
    pub(super) fn take(&mut self, count: usize) -> FrameRows<'a> {
        let data = std::mem::take(&mut self.data);
        let (head, tail) = data.split_at_mut((count * self.stride).min(data.len()));
        self.data = tail;
        FrameRows { data: head, stride: self.stride, channels: self.channels, width: self.width }
    }

    /// Row `y` of these.
    pub(super) fn row(&mut self, y: usize) -> &mut [f32] {
        &mut self.data[y * self.stride + self.channels..][..self.width * self.channels]
    }

    /// Pixel `x` of row `y` of these.
    #[inline]
    pub(super) fn pixel(&mut self, y: usize, x: usize) -> &mut [f32] {
        &mut self.data[y * self.stride + (x + 1) * self.channels..][..self.channels]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_land_inside_a_border_of_zeros() {
        let planes: Vec<f32> = (1..=12u8).map(f32::from).collect();
        let frame = Frame::from_planes(2, 3, 2, |channel| &planes[channel * 6..][..6]).unwrap();
        assert_eq!(frame.row(0), [1.0, 7.0, 2.0, 8.0, 3.0, 9.0]);
        assert_eq!(frame.row(1), [4.0, 10.0, 5.0, 11.0, 6.0, 12.0]);
        assert_eq!(frame.data().len(), Frame::elements(2, 3, 2));
        let inside: f32 = planes.iter().sum();
        assert_eq!(frame.data().iter().sum::<f32>().to_bits(), inside.to_bits());
        let error = Frame::from_planes(2, 2, 2, |channel| &planes[channel * 6..][..6]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "frame: a plane is 6 values but the frame is 2×2; there must be one value per pixel"
        );
    }

    #[test]
    fn a_part_has_its_own_border() {
        let planes: Vec<f32> = (1..=24u8).map(f32::from).collect();
        let frame = Frame::from_planes(3, 4, 2, |channel| &planes[channel * 12..][..12]).unwrap();
        let part = frame.part(1..3, 1..3);
        assert_eq!((part.height(), part.width(), part.channels()), (2, 2, 2));
        assert_eq!((part.row(0), part.row(1)), (&[6.0, 18.0, 7.0, 19.0][..], &[10.0, 22.0, 11.0, 23.0][..]));
        let inside: f32 = part.row(0).iter().chain(part.row(1)).sum();
        assert_eq!(part.data().iter().sum::<f32>().to_bits(), inside.to_bits());
        assert_eq!(frame.part(0..9, 0..9).data(), frame.data());
    }

    #[test]
    fn threads_get_disjoint_rows() {
        let mut frame = Frame::new(3, 2, 1);
        let mut rows = frame.rows_mut();
        let mut head = rows.take(1);
        head.row(0).fill(1.0);
        rows.pixel(1, 1)[0] = 2.0;
        assert_eq!((frame.row(0), frame.row(1), frame.row(2)), (&[1.0, 1.0][..], &[0.0, 0.0][..], &[0.0, 2.0][..]));
    }
}
