//! Feature maps of a session, in f32 or in codes.

use trefoil_kernels::{CodeFrame, Frame};

/// What a map holds.
#[derive(Debug)]
enum Pixels {
    Values(Frame),
    Codes(CodeFrame),
}

/// A feature map; without pixels where only memory is counted.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    is_coded: bool,
    pixels: Option<Pixels>,
}

/// The last two frames that a causal convolution saw, older first.
pub(super) type History = [Option<Map>; 2];

impl Map {
    /// A new map of values or of codes, with room for them where `has_data`.
    pub(super) fn new(is_coded: bool, (height, width, channels): (usize, usize, usize), has_data: bool) -> Map {
        let pixels = has_data.then(|| {
            if is_coded {
                Pixels::Codes(CodeFrame::new(height, width, channels))
            } else {
                Pixels::Values(Frame::new(height, width, channels))
            }
        });
        Map { height, width, channels, is_coded, pixels }
    }

    /// A map of these values.
    pub(super) fn of_values(height: usize, width: usize, channels: usize, values: Option<Frame>) -> Map {
        Map { height, width, channels, is_coded: false, pixels: values.map(Pixels::Values) }
    }

    /// Bytes that it takes, or would.
    pub(super) fn bytes(&self) -> usize {
        if self.is_coded {
            CodeFrame::bytes_of(self.height, self.width, self.channels)
        } else {
            Frame::elements(self.height, self.width, self.channels) * size_of::<f32>()
        }
    }

    pub(super) fn is(&self, is_coded: bool, extent: (usize, usize, usize)) -> bool {
        self.is_coded == is_coded && (self.height, self.width, self.channels) == extent
    }

    pub(super) fn values(&self) -> Option<&Frame> {
        match &self.pixels {
            Some(Pixels::Values(frame)) => Some(frame),
            _ => None,
        }
    }

    pub(super) fn values_mut(&mut self) -> Option<&mut Frame> {
        match &mut self.pixels {
            Some(Pixels::Values(frame)) => Some(frame),
            _ => None,
        }
    }

    pub(super) fn codes(&self) -> Option<&CodeFrame> {
        match &self.pixels {
            Some(Pixels::Codes(frame)) => Some(frame),
            _ => None,
        }
    }

    pub(super) fn codes_mut(&mut self) -> Option<&mut CodeFrame> {
        match &mut self.pixels {
            Some(Pixels::Codes(frame)) => Some(frame),
            _ => None,
        }
    }
}
