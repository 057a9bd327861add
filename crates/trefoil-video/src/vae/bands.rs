//! Decoding in bands: less memory, the same bits.
//!
//! Most of a decoder's memory are the frames that its finer levels remember. After the coarsest level a pixel depends on a
//! neighbourhood only, so the picture is cut across its longer side, and the clip is decoded from its first to its last latent frame for one
//! band, then in the same memory for the next. A band takes as many pixels of its neighbours with it as the convolutions to come
//! reach, fewer from level to level, and what is computed of those is thrown away. The coarsest level, whose attention sees all pixels,
//! is computed once, before the bands, and what it leaves of every latent frame waits for them: 2.4 MB a latent frame at 416 × 240.
//!
//! The result is that of the whole picture, bit for bit: no sum depends on where a pixel lies, but for Winograd's pairs of columns, and bands
//! begin at even ones. INT8 is not cut, since its scales are of whole frames.

use super::map::Map;
use super::session::MAX_SIDE;
use super::{DecoderKernels, DecoderMemory, DecoderPath, DecoderSession, Latent, VaeDecoder, VaeError};
use crate::output::VideoFrame;
use std::ops::Range;

/// A clip that remembers less than this is not worth the work of cutting it.
const WORTH_CUTTING: usize = 64 << 20;

/// Rows and columns of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

/// A part of the picture, and what of each level's map it takes.
#[derive(Debug, Clone)]
pub(super) struct Band {
    latent: (usize, usize),
    /// The part, pixels.
    picture: Window,
    /// For each level, coarsest first, the part of the map in memory that is kept after its residual blocks; of the finest the picture.
    kept: Vec<Window>,
    keeps_all: Vec<bool>,
}

impl Band {
    /// Latent rows and columns of the whole picture.
    pub(super) fn latent(&self) -> (usize, usize) {
        self.latent
    }

    /// What is kept of the level's map.
    pub(super) fn kept(&self, level: usize) -> &Window {
        &self.kept[level]
    }

    /// Whether that is all of it.
    pub(super) fn keeps_all(&self, level: usize) -> bool {
        self.keeps_all[level]
    }

    /// The band of these latent rows and columns.
    fn new(decoder: &VaeDecoder, latent: (usize, usize), rows: Range<usize>, columns: Range<usize>) -> Band {
        let levels = decoder.levels.len();
        // Two convolutions a residual block, each of which reaches one pixel far.
        let reach = 2 * (decoder.config().num_res_blocks + 1);
        let [rows, columns] =
            [(latent.0, rows), (latent.1, columns)].map(|(side, band)| kept_spans(side, band, levels, reach));
        let (mut kept, mut keeps_all) = (Vec::new(), Vec::new());
        for level in 0..levels {
            let [(rows, all_rows), (columns, all_columns)] =
                [(&rows, latent.0), (&columns, latent.1)].map(|(spans, side)| inside(spans, side, level));
            kept.push(Window { rows, columns });
            keeps_all.push(all_rows && all_columns);
        }
        let picture = Window { rows: rows[levels - 1].clone(), columns: columns[levels - 1].clone() };
        Band { latent, picture, kept, keeps_all }
    }
}

/// For each level the pixels of a whole map that are kept after its residual blocks, so that the latent pixels `band` of `side` come out
/// right; of the finest level the picture's.
fn kept_spans(side: usize, band: Range<usize>, levels: usize, reach: usize) -> Vec<Range<usize>> {
    let last = levels - 1;
    let grown = |span: &Range<usize>, by: usize, side: usize| span.start.saturating_sub(by)..(span.end + by).min(side);
    let picture = band.start << last..band.end << last;
    // The last convolution reaches one pixel far.
    let mut needed = grown(&picture, 1, side << last);
    let mut spans = vec![picture; levels];
    for level in (0..last).rev() {
        let input = grown(&needed, reach, side << (level + 1));
        // Doubling rows or columns and a 3 × 3 convolution: pixel p is made of pixels ⌊(p − 1)/2⌋ and ⌊(p + 1)/2⌋.
        needed = input.start.saturating_sub(1) / 2..(input.end / 2 + 1).min(side << level);
        spans[level] = needed.clone();
    }
    spans
}

/// Where a level's span lies in its map, which begins where twice the coarser level's span does; and whether it is all of that map.
fn inside(spans: &[Range<usize>], side: usize, level: usize) -> (Range<usize>, bool) {
    let map = match level.checked_sub(1) {
        Some(coarser) => 2 * spans[coarser].start..2 * spans[coarser].end,
        None => 0..side,
    };
    let span = &spans[level];
    (span.start - map.start..span.end - map.start, *span == map)
}

impl VaeDecoder {
    /// Bands in which a clip of latents of `height` × `width` is decoded where nothing else is asked for: two in f32 on the CPU, if one
    /// would remember 64 MiB or more and if each of two leaves a third of the coarsest level's pixels out (from 42 latent pixels on in
    /// Wan2.1's decoder), else one. At 52 latent pixels two bands compute a tenth more than one and remember little more than half.
    pub fn bands(&self, height: usize, width: usize) -> usize {
        let is_large = |memory: DecoderMemory| memory.history >= WORTH_CUTTING;
        if self.check_bands(height, width, 2).is_err() || !self.memory(height, width, 1).is_ok_and(is_large) {
            return 1;
        }
        let longer = height.max(width);
        let reach = 2 * (self.config().num_res_blocks + 1);
        let kept = &kept_spans(longer, 0..longer.div_ceil(2), self.levels.len(), reach)[0];
        if 3 * kept.len() <= 2 * longer { 2 } else { 1 }
    }

    fn check_bands(&self, height: usize, width: usize, bands: usize) -> Result<(), VaeError> {
        let fail = |reason: String| Err(VaeError::Bands { bands, reason });
        let longer = height.max(width).min(MAX_SIDE);
        if !(1..=longer).contains(&bands) {
            return fail(format!("a latent of {height}×{width} pixels has 1 to {longer}"));
        }
        if bands > 1 && (self.path() == DecoderPath::Int8 || self.is_on_device()) {
            return fail("only the f32 decoder on the CPU cuts a picture into bands".to_string());
        }
        if bands > 1 && self.levels.len() < 2 {
            return fail("a decoder of one level has nothing to cut after it".to_string());
        }
        Ok(())
    }

    /// Bands of nearly equal size across the longer side.
    fn cut(&self, height: usize, width: usize, bands: usize) -> Vec<Band> {
        let longer = height.max(width);
        let part = |number: usize| number * longer / bands..(number + 1) * longer / bands;
        let band = |span: Range<usize>| {
            let (rows, columns) = if width >= height { (0..height, span) } else { (span, 0..width) };
            Band::new(self, (height, width), rows, columns)
        };
        (0..bands).map(|number| band(part(number))).collect()
    }

    /// Decodes a whole clip in as many bands as [`VaeDecoder::bands`] says and hands out its frames in order.
    ///
    /// `before` is asked before the work on a latent frame, with its number; in bands several times for each. `sink` takes a frame.
    ///
    /// # Errors
    /// A latent that does not fit the VAE, kernels of another kind than the decoder was opened for; those of `before` and of `sink`.
    pub fn decode_clip<'k, E: From<VaeError>>(
        &self,
        kernels: impl Into<DecoderKernels<'k>>,
        latent: &Latent,
        before: &mut dyn FnMut(usize) -> Result<(), E>,
        sink: &mut dyn FnMut(VideoFrame) -> Result<(), E>,
    ) -> Result<(), E> {
        self.decode_in_bands(kernels, latent, self.bands(latent.height(), latent.width()), before, sink)
    }

    /// The same in so many bands. One gives frames as they are made; several keep the clip's frames until the last band is there.
    ///
    /// # Errors
    /// As [`VaeDecoder::decode_clip`]; [`VaeError::Bands`] where there cannot be so many.
    pub fn decode_in_bands<'k, E: From<VaeError>>(
        &self,
        kernels: impl Into<DecoderKernels<'k>>,
        latent: &Latent,
        bands: usize,
        before: &mut dyn FnMut(usize) -> Result<(), E>,
        sink: &mut dyn FnMut(VideoFrame) -> Result<(), E>,
    ) -> Result<(), E> {
        let kernels = kernels.into();
        let (height, width) = (latent.height(), latent.width());
        self.check_bands(height, width, bands)?;
        let mut session = self.session(height, width)?;
        if bands == 1 {
            for frame in 0..latent.frames() {
                before(frame)?;
                session.push(kernels, latent, frame)?.into_iter().try_for_each(&mut *sink)?;
            }
            return Ok(self.check_unchanged()?);
        }
        let mut features: Vec<Map> = Vec::with_capacity(latent.frames());
        for frame in 0..latent.frames() {
            before(frame)?;
            features.push(session.push_front(kernels, latent, frame)?);
        }
        drop(session);
        let scale = self.config().spatial_scale();
        let blank =
            || VideoFrame::from_signed(height * scale, width * scale, vec![0.0; height * width * scale * scale * 3]);
        let mut clip: Vec<VideoFrame> = Vec::new();
        clip.resize_with(self.config().frames(latent.frames()), blank);
        for band in self.cut(height, width, bands) {
            let place = (band.picture.rows.start, band.picture.columns.start);
            let mut session = DecoderSession::of_band(self, band)?;
            let mut frames = clip.iter_mut();
            for (frame, features) in features.iter().enumerate() {
                before(frame)?;
                for (part, frame) in session.push_band(kernels, features)?.iter().zip(&mut frames) {
                    paste(part, frame, place);
                }
            }
        }
        drop(features);
        self.check_unchanged()?;
        clip.into_iter().try_for_each(sink)
    }

    /// Memory that [`VaeDecoder::decode_clip`] takes for a latent of `[frames, height, width]` on `threads` threads (of the CPU's kernels).
    ///
    /// # Errors
    /// As [`VaeDecoder::memory`].
    pub fn clip_memory(&self, latent: [usize; 3], threads: usize) -> Result<DecoderMemory, VaeError> {
        self.memory_in_bands(latent, self.bands(latent[1], latent[2]), threads)
    }

    /// The same for [`VaeDecoder::decode_in_bands`].
    ///
    /// # Errors
    /// As [`VaeDecoder::memory`]; [`VaeError::Bands`] where there cannot be so many.
    pub fn memory_in_bands(
        &self,
        [frames, height, width]: [usize; 3],
        bands: usize,
        threads: usize,
    ) -> Result<DecoderMemory, VaeError> {
        self.check_bands(height, width, bands)?;
        if bands == 1 {
            return self.memory(height, width, threads);
        }
        let cut = self.cut(height, width, bands);
        let predicted = DecoderSession::predict_bands(self, (height, width), &cut, threads)?;
        let scale = self.config().spatial_scale();
        let pictures = self.config().frames(frames) * height * width * scale * scale * 3 * size_of::<f32>();
        let features = frames * predicted.features;
        // The bands begin when the part before them has gone.
        let in_bands = predicted.bands.into_iter().map(|memory| (memory, pictures));
        let most = in_bands.chain([(predicted.front, 0)]).max_by_key(|(memory, clip)| memory.total() + clip);
        let (mut memory, clip) = most.unwrap_or((predicted.front, 0));
        memory.working += features + clip;
        Ok(memory)
    }
}

/// Puts a band's part of a frame at its place.
fn paste(part: &VideoFrame, frame: &mut VideoFrame, (top, left): (usize, usize)) {
    let width = frame.width();
    for (y, line) in part.values().chunks_exact(part.width() * 3).enumerate() {
        frame.values_mut()[((top + y) * width + left) * 3..][..line.len()].copy_from_slice(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pixels of the coarsest map that pixel `p` of the picture depends on, by following every convolution back.
    fn dependencies(p: usize, side: usize, levels: usize, reach: usize) -> Range<usize> {
        let mut span = p..p + 1;
        let grow = |span: Range<usize>, side: usize| span.start.saturating_sub(1)..(span.end + 1).min(side);
        span = grow(span, side << (levels - 1));
        for level in (0..levels - 1).rev() {
            for _ in 0..reach {
                span = grow(span, side << (level + 1));
            }
            // The doubled map's pixels under the filter, then the pixels that they repeat.
            let doubled = grow(span, side << (level + 1));
            span = doubled.start / 2..(doubled.end - 1) / 2 + 1;
        }
        span
    }

    #[test]
    fn a_band_keeps_what_its_pixels_depend_on_and_no_more() {
        for (side, levels, reach) in [(52usize, 4, 6), (30, 4, 6), (9, 3, 4), (1, 2, 2), (16, 1, 4)] {
            for (first, end) in
                [(0, side), (0, side.div_ceil(2)), (side / 2, side), (side / 3, (side / 3 + 1).min(side))]
            {
                let spans = kept_spans(side, first..end, levels, reach);
                let pixels = first << (levels - 1)..end << (levels - 1);
                let (low, high) = (
                    dependencies(pixels.start, side, levels, reach),
                    dependencies(pixels.end - 1, side, levels, reach),
                );
                if levels > 1 {
                    assert_eq!(spans[0], low.start..high.end, "{side} {first}..{end}");
                }
                assert_eq!(spans[levels - 1], pixels);
                for level in 1..levels {
                    // Every map covers what is kept of it, and begins at an even pixel.
                    let (within, _) = inside(&spans, side, level);
                    assert!(within.start <= within.end && within.end <= 2 * spans[level - 1].len());
                }
            }
        }
        assert_eq!(kept_spans(52, 0..26, 4, 6)[0], 0..33);
    }

    #[test]
    fn parts_are_put_at_their_place() {
        let mut frame = VideoFrame::from_signed(3, 3, vec![0.0; 27]);
        paste(&VideoFrame::from_signed(2, 1, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), &mut frame, (1, 2));
        let mut want = vec![0.0f32; 27];
        want[15..18].copy_from_slice(&[1.0, 2.0, 3.0]);
        want[24..27].copy_from_slice(&[4.0, 5.0, 6.0]);
        assert_eq!(frame.values(), want);
    }
}
