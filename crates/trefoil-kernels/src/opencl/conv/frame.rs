//! Feature maps in memory that the device uses.

use crate::KernelError;
use crate::opencl::{Buffer, Kernels, OpenClError};

/// Pixels behind the last one that a whole tile of pixels may read; nobody stores what comes of them.
const SLACK: usize = 16;

/// One frame of features for a device: channels last (`[height][width][channels]`) inside a border of one zero pixel, as
/// [`crate::Frame`].
#[derive(Debug)]
pub struct Frame {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    pub(super) data: Buffer<f32>,
}

impl Kernels {
    /// A frame of zeros.
    ///
    /// # Errors
    /// Sizes that the device refuses.
    pub fn frame(&self, height: usize, width: usize, channels: usize) -> Result<Frame, OpenClError> {
        Ok(Frame { height, width, channels, data: self.zeroed(Frame::elements(height, width, channels))? })
    }
}

impl Frame {
    /// Values that a frame holds, border and slack included.
    pub fn elements(height: usize, width: usize, channels: usize) -> usize {
        ((height + 2) * (width + 2) + SLACK) * channels
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

    /// Values of a row of pixels, border included.
    pub(super) fn line(&self) -> usize {
        (self.width + 2) * self.channels
    }

    pub(super) fn extent(&self) -> [usize; 3] {
        [self.height, self.width, self.channels]
    }

    /// Waits for the work so far and takes the pixels of `frame`.
    ///
    /// # Errors
    /// A frame of another shape; errors of the work before.
    pub fn write(&mut self, frame: &crate::Frame) -> Result<(), OpenClError> {
        let extent = [frame.height(), frame.width(), frame.channels()];
        if extent != self.extent() {
            return Err(KernelError::shapes(
                "frame",
                ("the source", format!("{extent:?}")),
                ("the destination", format!("{:?}", self.extent())),
                "they must have the same shape",
            )
            .into());
        }
        self.data.write()?[..frame.data().len()].copy_from_slice(frame.data());
        Ok(())
    }

    /// Waits for the work so far and gives all pixels, without border: `[height][width][channels]`.
    ///
    /// # Errors
    /// Errors of the work before.
    pub fn read(&self) -> Result<Vec<f32>, OpenClError> {
        let data = self.data.read()?;
        let mut values = Vec::with_capacity(self.height * self.width * self.channels);
        for line in data.chunks_exact(self.line()).skip(1).take(self.height) {
            values.extend_from_slice(&line[self.channels..][..self.width * self.channels]);
        }
        Ok(values)
    }
}
