//! MP4 with AV1: plays in browsers and common players, and no licence or program outside this one is needed.

mod boxes;

use super::atomic::AtomicFile;
use super::{ClipMetadata, OutputError, VideoFrame};
use boxes::{Sample, Track};
use rav1e::color::{ColorDescription, ColorPrimaries, MatrixCoefficients, PixelRange, TransferCharacteristics};
use rav1e::data::{EncoderStatus, FrameType, Rational};
use rav1e::{Config, Context, EncoderConfig};
use std::io::Write;
use std::path::Path;

/// rav1e's preset, 0 (best) to 10 (fastest).
const SPEED: u8 = 9;
/// Base quantiser, 0 to 255: near transparent for clips of this size.
const QUANTISER: usize = 50;
/// Shortest side that the encoder takes.
const MIN_SIDE: usize = 16;

/// An MP4 being written. Samples are kept until the end, so that the header can come first and playback can start at once.
pub(super) struct Av1Mp4 {
    file: AtomicFile,
    context: Context<u8>,
    size: (usize, usize),
    metadata: ClipMetadata,
    samples: Vec<Sample>,
    sequence_header: Vec<u8>,
}

impl std::fmt::Debug for Av1Mp4 {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Av1Mp4").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Av1Mp4 {
    pub(super) fn create(
        path: &Path,
        (height, width): (usize, usize),
        metadata: &ClipMetadata,
    ) -> Result<Av1Mp4, OutputError> {
        if height.min(width) < MIN_SIDE || height.max(width) > usize::from(u16::MAX) {
            let reason =
                format!("MP4 frames have {MIN_SIDE} to 65535 pixels a side, not {width}×{height}; use .png or .gif");
            return Err(OutputError::format(path, reason));
        }
        let mut encoder = EncoderConfig::with_speed_preset(SPEED);
        encoder.width = width;
        encoder.height = height;
        encoder.time_base = Rational::new(1, u64::from(metadata.fps));
        encoder.quantizer = QUANTISER;
        encoder.pixel_range = PixelRange::Limited;
        encoder.color_description = Some(ColorDescription {
            color_primaries: ColorPrimaries::BT709,
            transfer_characteristics: TransferCharacteristics::SRGB,
            matrix_coefficients: MatrixCoefficients::BT709,
        });
        let context = Config::new()
            .with_encoder_config(encoder)
            .new_context()
            .map_err(|error| OutputError::encode(path, error))?;
        let (file, metadata) = (AtomicFile::create(path)?, metadata.clone());
        Ok(Av1Mp4 { file, context, size: (height, width), metadata, samples: Vec::new(), sequence_header: Vec::new() })
    }

    pub(super) fn push(&mut self, frame: &VideoFrame) -> Result<(), OutputError> {
        let mut picture = self.context.new_frame();
        let (height, width) = self.size;
        let planes = to_yuv(&frame.to_bytes(), height, width);
        for (plane, (values, stride)) in picture.planes.iter_mut().zip([
            (&planes.luma, width),
            (&planes.blue, width.div_ceil(2)),
            (&planes.red, width.div_ceil(2)),
        ]) {
            plane.copy_from_raw_u8(values, stride, 1);
        }
        self.context.send_frame(picture).map_err(|error| OutputError::encode(self.file.path(), error))?;
        self.receive()
    }

    /// Takes what the encoder has ready.
    fn receive(&mut self) -> Result<(), OutputError> {
        loop {
            match self.context.receive_packet() {
                Ok(packet) => {
                    let units = parse_units(&packet.data)
                        .ok_or_else(|| OutputError::encode(self.file.path(), "the encoder's stream is malformed"))?;
                    let mut data = Vec::with_capacity(packet.data.len());
                    for (kind, unit) in units {
                        match kind {
                            // A file marks the units itself.
                            TEMPORAL_DELIMITER => continue,
                            SEQUENCE_HEADER if self.sequence_header.is_empty() => self.sequence_header = unit.to_vec(),
                            _ => {}
                        }
                        data.extend(unit);
                    }
                    self.samples.push(Sample { data, is_key: packet.frame_type == FrameType::KEY });
                }
                Err(EncoderStatus::Encoded) => {}
                Err(EncoderStatus::NeedMoreData | EncoderStatus::LimitReached) => return Ok(()),
                Err(error) => return Err(OutputError::encode(self.file.path(), error)),
            }
        }
    }

    pub(super) fn finish(mut self) -> Result<(), OutputError> {
        self.context.flush();
        self.receive()?;
        let path = self.file.path().to_path_buf();
        let (height, width) = self.size;
        let mut configuration = self.context.container_sequence_header();
        configuration.extend(&self.sequence_header);
        let track = Track {
            width: width as u16,
            height: height as u16,
            fps: self.metadata.fps,
            configuration: &configuration,
            samples: &self.samples,
        };
        let header = boxes::header(&track, &self.metadata)
            .ok_or_else(|| OutputError::format(&path, "the clip is above 4 GiB; write it as .png or a folder"))?;
        let mut out = std::io::BufWriter::new(self.file.handle()?);
        let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(OutputError::io("write", &path));
        write(&header)?;
        for sample in &self.samples {
            write(&sample.data)?;
        }
        out.flush().map_err(OutputError::io("write", &path))?;
        drop(out);
        self.file.commit()
    }
}

/// Types of open bitstream units.
const SEQUENCE_HEADER: u8 = 1;
const TEMPORAL_DELIMITER: u8 = 2;

/// Cuts a temporal unit into its open bitstream units: type and bytes, header included.
fn parse_units(data: &[u8]) -> Option<Vec<(u8, &[u8])>> {
    let mut units = Vec::new();
    let mut rest = data;
    while let Some(&first) = rest.first() {
        let (kind, has_extension, has_size) = (first >> 3 & 15, first & 4 != 0, first & 2 != 0);
        let mut at = if has_extension { 2 } else { 1 };
        let length = if has_size {
            // Little-endian groups of seven bits.
            let mut length = 0usize;
            for group in 0..8 {
                let byte = *rest.get(at)?;
                at += 1;
                length |= usize::from(byte & 0x7f) << (7 * group);
                if byte & 0x80 == 0 {
                    break;
                }
            }
            length
        } else {
            rest.len().checked_sub(at)?
        };
        let end = at.checked_add(length).filter(|&end| end <= rest.len())?;
        let (unit, after) = rest.split_at(end);
        units.push((kind, unit));
        rest = after;
    }
    Some(units)
}

/// A picture as luma and two planes of half the resolution.
struct Planes {
    luma: Vec<u8>,
    blue: Vec<u8>,
    red: Vec<u8>,
}

/// RGB to BT.709 luma and chroma, limited range, chroma averaged over 2 × 2 pixels.
fn to_yuv(rgb: &[u8], height: usize, width: usize) -> Planes {
    let (half_height, half_width) = (height.div_ceil(2), width.div_ceil(2));
    let mut luma = Vec::with_capacity(height * width);
    let mut sums = vec![[0f32; 3]; half_height * half_width];
    for (pixel, rgb) in rgb.as_chunks::<3>().0.iter().enumerate() {
        let (row, column) = (pixel / width, pixel % width);
        let [r, g, b] = rgb.map(f32::from);
        luma.push(luma_of(r, g, b).round() as u8);
        for (sum, value) in sums[row / 2 * half_width + column / 2].iter_mut().zip([r, g, b]) {
            *sum += value;
        }
    }
    let chroma = |weights: [f32; 3]| {
        let value = |(index, sum): (usize, &[f32; 3])| {
            // An odd last row or column has fewer pixels under it.
            let rows = (height - index / half_width * 2).min(2);
            let columns = (width - index % half_width * 2).min(2);
            let total: f32 = sum.iter().zip(weights).map(|(sum, weight)| sum * weight).sum();
            (128.0 + total / (rows * columns) as f32).round() as u8
        };
        sums.iter().enumerate().map(value).collect()
    };
    // 224/255 over twice the distance of each primary's luma weight from 1.
    let scale = 224.0 / 255.0;
    let (blue, red) = (scale / 1.8556, scale / 1.5748);
    Planes {
        luma,
        blue: chroma([-0.2126 * blue, -0.7152 * blue, 0.9278 * blue]),
        red: chroma([0.7874 * red, -0.7152 * red, -0.0722 * red]),
    }
}

fn luma_of(r: f32, g: f32, b: f32) -> f32 {
    16.0 + 219.0 / 255.0 * (0.2126 * r + 0.7152 * g + 0.0722 * b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_bt709_in_limited_range() {
        let planes = |rgb: [u8; 3]| {
            let planes = to_yuv(&rgb.repeat(4), 2, 2);
            (planes.luma[0], planes.blue[0], planes.red[0])
        };
        assert_eq!(planes([0, 0, 0]), (16, 128, 128));
        assert_eq!(planes([255, 255, 255]), (235, 128, 128));
        assert_eq!(planes([255, 0, 0]), (63, 102, 240));
        assert_eq!(planes([0, 255, 0]), (173, 42, 26));
        assert_eq!(planes([0, 0, 255]), (32, 240, 118));
        let odd = to_yuv(&[255, 0, 0].repeat(9), 3, 3);
        assert_eq!((odd.luma.len(), odd.blue, odd.red), (9, vec![102; 4], vec![240; 4]));
    }

    #[test]
    fn bitstream_units_are_cut_and_damaged_ones_refused() {
        // A temporal delimiter, a sequence header of three bytes, a frame without a size.
        let data = [0x12, 0, 0x0a, 3, 1, 2, 3, 0x30, 9, 9];
        let units = parse_units(&data).unwrap();
        assert_eq!(units, [(2, &data[..2]), (1, &data[2..7]), (6, &data[7..])]);
        assert_eq!(parse_units(&[0x0a, 3, 1]), None);
        assert_eq!(parse_units(&[0x0a]), None);
        assert_eq!(parse_units(&[]), Some(vec![]));
    }
}
