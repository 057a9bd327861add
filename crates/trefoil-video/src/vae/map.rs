//! Feature maps of a session: f32 or codes, in the CPU's memory or in memory that a device uses.

use super::VaeError;
use super::bands::Window;
use super::compute::DecoderKernels;
use trefoil_kernels::{CodeFrame, Frame, KernelError, opencl};

/// What a map is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapKind {
    Values,
    Codes,
    Device,
    DeviceCodes,
}

/// What a map holds.
#[derive(Debug)]
pub(super) enum Pixels {
    Values(Frame),
    Codes(CodeFrame),
    Device(opencl::Frame),
    DeviceCodes(opencl::CodeFrame),
}

/// A feature map; without pixels where only memory is counted.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    kind: MapKind,
    pixels: Option<Pixels>,
}

/// The last two frames that a causal convolution saw, older first.
pub(super) type History = [Option<Map>; 2];

impl Map {
    /// A new map with room for its pixels where there are kernels to fill them.
    pub(super) fn new(
        kind: MapKind,
        (height, width, channels): (usize, usize, usize),
        kernels: Option<DecoderKernels<'_>>,
    ) -> Result<Map, VaeError> {
        let pixels = match (kind, kernels) {
            (_, None) => None,
            (MapKind::DeviceCodes, Some(DecoderKernels::OpenCl(kernels))) => {
                Some(Pixels::DeviceCodes(kernels.code_frame(height, width, channels)?))
            }
            (MapKind::Codes | MapKind::DeviceCodes, Some(_)) => {
                Some(Pixels::Codes(CodeFrame::new(height, width, channels)))
            }
            (MapKind::Device, Some(DecoderKernels::OpenCl(kernels))) => {
                Some(Pixels::Device(kernels.frame(height, width, channels)?))
            }
            (MapKind::Values | MapKind::Device, Some(_)) => Some(Pixels::Values(Frame::new(height, width, channels))),
        };
        Ok(Map { height, width, channels, kind, pixels })
    }

    /// A copy of the pixels in `window`; without pixels where this one has none. Only f32 in the CPU's memory is cut.
    pub(super) fn part(&self, window: &Window) -> Result<Map, VaeError> {
        let pixels = match &self.pixels {
            None => None,
            Some(Pixels::Values(frame)) => {
                Some(Pixels::Values(frame.part(window.rows.clone(), window.columns.clone())))
            }
            Some(_) => {
                return Err(KernelError::Value {
                    operator: "decoder",
                    what: "a map to be cut",
                    value: format!("{:?}", self.kind),
                    rule: "bands are for f32 on the CPU",
                }
                .into());
            }
        };
        let (height, width) = (window.rows.len(), window.columns.len());
        Ok(Map { height, width, channels: self.channels, kind: self.kind, pixels })
    }

    /// Takes these values.
    pub(super) fn fill(&mut self, values: Frame) -> Result<(), VaeError> {
        match &mut self.pixels {
            Some(Pixels::Device(frame)) => frame.write(&values)?,
            pixels => *pixels = Some(Pixels::Values(values)),
        }
        Ok(())
    }

    /// Its values without the border, `[height][width][channels]`, wherever they are.
    pub(super) fn read(&self) -> Result<Option<Vec<f32>>, VaeError> {
        Ok(match &self.pixels {
            Some(Pixels::Values(frame)) => Some((0..frame.height()).flat_map(|y| frame.row(y)).copied().collect()),
            Some(Pixels::Device(frame)) => Some(frame.read()?),
            _ => None,
        })
    }

    /// Bytes that it takes, or would.
    pub(super) fn bytes(&self) -> usize {
        let Map { height, width, channels, .. } = *self;
        match self.kind {
            MapKind::Values => Frame::elements(height, width, channels) * size_of::<f32>(),
            MapKind::Codes => CodeFrame::bytes_of(height, width, channels),
            MapKind::DeviceCodes => opencl::CodeFrame::bytes_of(height, width, channels),
            MapKind::Device => opencl::Frame::elements(height, width, channels) * size_of::<f32>(),
        }
    }

    pub(super) fn is(&self, kind: MapKind, extent: (usize, usize, usize)) -> bool {
        self.kind == kind && (self.height, self.width, self.channels) == extent
    }

    pub(super) fn pixels(&self) -> Option<&Pixels> {
        self.pixels.as_ref()
    }

    pub(super) fn pixels_mut(&mut self) -> Option<&mut Pixels> {
        self.pixels.as_mut()
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

    pub(super) fn device(&self) -> Option<&opencl::Frame> {
        match &self.pixels {
            Some(Pixels::Device(frame)) => Some(frame),
            _ => None,
        }
    }

    pub(super) fn device_codes(&self) -> Option<&opencl::CodeFrame> {
        match &self.pixels {
            Some(Pixels::DeviceCodes(frame)) => Some(frame),
            _ => None,
        }
    }

    pub(super) fn device_mut(&mut self) -> Option<&mut opencl::Frame> {
        match &mut self.pixels {
            Some(Pixels::Device(frame)) => Some(frame),
            _ => None,
        }
    }
}
