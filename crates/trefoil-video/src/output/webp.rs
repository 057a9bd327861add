//! Animated WebP: every pixel as decoded, shown by all browsers.
//!
//! Frames are lossless ones (VP8L) of `image-webp`, which knows single pictures only; the container around them is written here:
//! RFC 9649, section 2.7, one RIFF file of chunks.

use super::atomic::AtomicFile;
use super::{ClipMetadata, OutputError, VideoFrame};
use image_webp::{ColorType, WebPEncoder};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// Most pixels a side of a VP8L frame.
const MOST_SIDE: usize = 1 << 14;
/// Most bytes of the file: its length is one 32-bit number, less than the 10 bytes that the RFC leaves free.
const MOST_BYTES: u64 = (u32::MAX - 10) as u64;
/// Bytes before the first chunk: `RIFF`, the length of what follows, `WEBP`.
const HEAD: usize = 12;

/// Flags of the `VP8X` chunk.
const HAS_ANIMATION: u8 = 1 << 1;
const HAS_XMP: u8 = 1 << 2;
/// Flag of a frame: it replaces what was there before.
const NO_BLENDING: u8 = 1 << 1;

/// A WebP being written.
#[derive(Debug)]
pub(super) struct AnimatedWebp {
    file: AtomicFile,
    out: BufWriter<File>,
    size: (u32, u32),
    is_animated: bool,
    metadata: ClipMetadata,
    frames: u32,
    /// Bytes so far.
    bytes: u64,
}

impl AnimatedWebp {
    pub(super) fn create(
        path: &Path,
        (height, width): (usize, usize),
        frames: usize,
        metadata: &ClipMetadata,
    ) -> Result<AnimatedWebp, OutputError> {
        if height.max(width) > MOST_SIDE {
            let what = format!("a WebP has at most {MOST_SIDE} pixels a side, not {width}×{height}; use .png");
            return Err(OutputError::format(path, what));
        }
        let file = AtomicFile::create(path)?;
        let out = BufWriter::new(file.handle()?);
        let (is_animated, metadata) = (frames > 1, metadata.clone());
        let size = (height as u32, width as u32);
        let mut animation = AnimatedWebp { file, out, size, is_animated, metadata, frames: 0, bytes: 0 };
        animation.start().map_err(OutputError::io("write", path))?;
        Ok(animation)
    }

    /// The head, whose length is filled in at the end, and what the frames have in common.
    fn start(&mut self) -> io::Result<()> {
        self.out.write_all(b"RIFF\0\0\0\0WEBP")?;
        self.bytes = HEAD as u64;
        let (height, width) = self.size;
        let flags = if self.is_animated { HAS_ANIMATION | HAS_XMP } else { HAS_XMP };
        self.chunk(*b"VP8X", &[&[flags, 0, 0, 0], &short(width - 1), &short(height - 1)])?;
        if self.is_animated {
            // No background shows, because every frame covers the canvas; 0 loops are endless ones.
            self.chunk(*b"ANIM", &[&[0; 4], &0u16.to_le_bytes()])?;
        }
        Ok(())
    }

    pub(super) fn push(&mut self, frame: &VideoFrame) -> Result<(), OutputError> {
        let (height, width) = self.size;
        let mut still = Vec::new();
        WebPEncoder::new(&mut still)
            .encode(&frame.to_bytes(), width, height, ColorType::Rgb8)
            .map_err(|error| OutputError::encode(self.file.path(), error))?;
        // A file of its own with one chunk.
        let Some(picture) = still.get(HEAD..).filter(|chunk| chunk.starts_with(b"VP8L")) else {
            return Err(OutputError::encode(self.file.path(), "the encoder gave no VP8L picture"));
        };
        let written = if self.is_animated {
            let stays = milliseconds(self.frames, self.metadata.fps);
            let place = [0; 6];
            let parts: [&[u8]; 6] =
                [&place, &short(width - 1), &short(height - 1), &short(stays), &[NO_BLENDING], picture];
            self.chunk(*b"ANMF", &parts)
        } else {
            self.bytes += picture.len() as u64;
            self.out.write_all(picture)
        };
        written.map_err(OutputError::io("write", self.file.path()))?;
        self.frames += 1;
        self.check_length()
    }

    pub(super) fn finish(mut self) -> Result<(), OutputError> {
        let packet = xmp(&self.metadata);
        self.chunk(*b"XMP ", &[packet.as_bytes()])
            .and_then(|()| {
                // What follows the length itself.
                let length = (self.bytes - 8) as u32;
                self.out.seek(SeekFrom::Start(4))?;
                self.out.write_all(&length.to_le_bytes())?;
                self.out.flush()
            })
            .map_err(OutputError::io("write", self.file.path()))?;
        self.check_length()?;
        self.file.commit()
    }

    fn check_length(&self) -> Result<(), OutputError> {
        if self.bytes <= MOST_BYTES {
            return Ok(());
        }
        Err(OutputError::format(self.file.path(), "the clip needs more than the 4 GiB of a WebP; use .mp4 or .png"))
    }

    /// A chunk: name, length, contents, and a zero where the length is odd.
    fn chunk(&mut self, name: [u8; 4], parts: &[&[u8]]) -> io::Result<()> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let field = u32::try_from(length).map_err(|_| io::Error::other("a chunk of more than 4 GiB"))?;
        self.out.write_all(&name)?;
        self.out.write_all(&field.to_le_bytes())?;
        for part in parts {
            self.out.write_all(part)?;
        }
        let padding = length % 2;
        self.out.write_all(&[0][..padding])?;
        self.bytes += (8 + length + padding) as u64;
        Ok(())
    }
}

/// The 24 bits of a side or a time.
fn short(value: u32) -> [u8; 3] {
    let [low, middle, high, _] = value.to_le_bytes();
    [low, middle, high]
}

/// Milliseconds that frame `index` stays, so that the clip as a whole keeps its rate.
fn milliseconds(index: u32, fps: u32) -> u32 {
    let end = |index: u32| (u64::from(index) * 1000 + u64::from(fps) / 2) / u64::from(fps);
    (end(index + 1) - end(index)) as u32
}

/// The metadata as an XMP packet: the prompt as the title that viewers show, all fields as JSON in the description.
fn xmp(metadata: &ClipMetadata) -> String {
    let text = |name: &str, text: &str| {
        let text = escaped(text);
        format!("<dc:{name}><rdf:Alt><rdf:li xml:lang=\"x-default\">{text}</rdf:li></rdf:Alt></dc:{name}>")
    };
    let title = metadata.prompt.as_ref().map_or_else(String::new, |prompt| text("title", prompt));
    let version = env!("CARGO_PKG_VERSION");
    let description = text("description", &metadata.json());
    format!(
        "<?xpacket begin=\"\u{feff}\" id=\"W5M0MpCehiHzreSzNTczkc9d\"?><x:xmpmeta xmlns:x=\"adobe:ns:meta/\">\
         <rdf:RDF xmlns:rdf=\"http://www.w3.org/1999/02/22-rdf-syntax-ns#\"><rdf:Description rdf:about=\"\" \
         xmlns:dc=\"http://purl.org/dc/elements/1.1/\" xmlns:xmp=\"http://ns.adobe.com/xap/1.0/\" \
         xmp:CreatorTool=\"trefoil {version}\">{title}{description}</rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end=\"r\"?>"
    )
}

/// Text between XML tags; what XML cannot hold becomes a space.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '\t' | '\n' => safe.push(character),
            '\u{0}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => safe.push(' '),
            _ => safe.push(character),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::{escaped, milliseconds};

    #[test]
    fn times_keep_the_rate_over_the_clip() {
        let sum = |fps: u32, frames: u32| (0..frames).map(|index| milliseconds(index, fps)).sum::<u32>();
        assert_eq!((sum(16, 16), sum(16, 160), sum(24, 48), sum(1000, 7)), (1000, 10_000, 2000, 7));
        assert!((0..64).all(|index| (62..=63).contains(&milliseconds(index, 16))));
    }

    #[test]
    fn what_xml_cannot_hold_is_left_out() {
        assert_eq!(escaped("a <b> & \"c\"\u{7}\u{ffff}\nd"), "a &lt;b&gt; &amp; \"c\"  \nd");
    }
}
