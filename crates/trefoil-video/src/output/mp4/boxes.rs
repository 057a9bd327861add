//! The MP4 file around an AV1 stream: one video track, everything a player needs before the samples (ISO/IEC 14496-12, and
//! "AV1 Codec ISO Media File Format Binding").

use crate::output::ClipMetadata;

/// What the file says about its track.
#[derive(Debug, Clone, Copy)]
pub(super) struct Track<'a> {
    pub(super) width: u16,
    pub(super) height: u16,
    pub(super) fps: u32,
    /// Content of `av1C`.
    pub(super) configuration: &'a [u8],
    pub(super) samples: &'a [Sample],
}

/// One temporal unit.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) data: Vec<u8>,
    pub(super) is_key: bool,
}

/// A box: size, type, content.
fn put(out: &mut Vec<u8>, kind: [u8; 4], content: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend([0; 4]);
    out.extend(kind);
    content(out);
    let size = (out.len() - start) as u32;
    out[start..start + 4].copy_from_slice(&size.to_be_bytes());
}

/// A box with version 0 and flags.
fn put_full(out: &mut Vec<u8>, kind: [u8; 4], flags: u32, content: impl FnOnce(&mut Vec<u8>)) {
    put(out, kind, |out| {
        word(out, flags);
        content(out);
    });
}

fn word(out: &mut Vec<u8>, value: u32) {
    out.extend(value.to_be_bytes());
}

fn half(out: &mut Vec<u8>, value: u16) {
    out.extend(value.to_be_bytes());
}

/// The identity, in the mixed fixed-point form of the format.
fn matrix(out: &mut Vec<u8>) {
    for value in [0x1_0000, 0, 0, 0, 0x1_0000, 0, 0, 0, 0x4000_0000] {
        word(out, value);
    }
}

/// Everything before the samples. `None` where sizes do not fit the 32-bit fields.
pub(super) fn header(track: &Track<'_>, metadata: &ClipMetadata) -> Option<Vec<u8>> {
    let total: usize = track.samples.iter().map(|sample| sample.data.len()).sum();
    let mut out = Vec::new();
    put(&mut out, *b"ftyp", |out| {
        out.extend(b"isom");
        word(out, 512);
        out.extend(b"isomiso6av01mp41");
    });
    // The offset of the samples is known once the movie box is: its own size does not depend on it.
    let mut movie_box = Vec::new();
    movie(&mut movie_box, track, metadata, 0);
    let offset = out.len() + movie_box.len() + 8;
    if offset.checked_add(total)? > u32::MAX as usize {
        return None;
    }
    movie(&mut out, track, metadata, offset as u32);
    word(&mut out, total as u32 + 8);
    out.extend(b"mdat");
    debug_assert_eq!(out.len(), offset, "samples follow");
    Some(out)
}

fn movie(out: &mut Vec<u8>, track: &Track<'_>, metadata: &ClipMetadata, offset: u32) {
    let frames = track.samples.len() as u32;
    put(out, *b"moov", |out| {
        put_full(out, *b"mvhd", 0, |out| {
            // Created, modified, ticks a second, duration.
            for value in [0, 0, track.fps, frames] {
                word(out, value);
            }
            // Rate 1, volume 1.
            word(out, 0x1_0000);
            half(out, 0x100);
            out.extend([0; 10]);
            matrix(out);
            out.extend([0; 24]);
            // Number of the next track.
            word(out, 2);
        });
        put(out, *b"trak", |out| {
            // Enabled and shown.
            put_full(out, *b"tkhd", 3, |out| {
                for value in [0, 0, 1, 0, frames, 0, 0] {
                    word(out, value);
                }
                // Layer, group, volume, reserved.
                out.extend([0; 8]);
                matrix(out);
                word(out, u32::from(track.width) << 16);
                word(out, u32::from(track.height) << 16);
            });
            put(out, *b"mdia", |out| media(out, track, offset));
        });
        put(out, *b"udta", |out| notes(out, metadata));
    });
}

fn media(out: &mut Vec<u8>, track: &Track<'_>, offset: u32) {
    let frames = track.samples.len() as u32;
    put_full(out, *b"mdhd", 0, |out| {
        for value in [0, 0, track.fps, frames] {
            word(out, value);
        }
        // Language: undetermined.
        half(out, 0x55c4);
        half(out, 0);
    });
    put_full(out, *b"hdlr", 0, |out| {
        word(out, 0);
        out.extend(b"vide");
        out.extend([0; 12]);
        out.extend(b"trefoil\0");
    });
    put(out, *b"minf", |out| {
        put_full(out, *b"vmhd", 1, |out| out.extend([0; 8]));
        put(out, *b"dinf", |out| {
            put_full(out, *b"dref", 0, |out| {
                word(out, 1);
                // The samples are in this file.
                put_full(out, *b"url ", 1, |_| ());
            });
        });
        put(out, *b"stbl", |out| sample_table(out, track, offset));
    });
}

fn sample_table(out: &mut Vec<u8>, track: &Track<'_>, offset: u32) {
    let frames = track.samples.len() as u32;
    put_full(out, *b"stsd", 0, |out| {
        word(out, 1);
        put(out, *b"av01", |out| {
            out.extend([0; 6]);
            // Data reference 1.
            half(out, 1);
            out.extend([0; 16]);
            half(out, track.width);
            half(out, track.height);
            // 72 dots an inch, both ways.
            word(out, 0x48_0000);
            word(out, 0x48_0000);
            word(out, 0);
            // One frame a sample; the compressor's name as a Pascal string of 32 bytes.
            half(out, 1);
            let name = b"AV1 (rav1e)";
            out.push(name.len() as u8);
            out.extend(name);
            out.extend(std::iter::repeat_n(0, 31 - name.len()));
            half(out, 24);
            half(out, 0xffff);
            put(out, *b"av1C", |out| out.extend(track.configuration));
            put(out, *b"colr", |out| {
                out.extend(b"nclx");
                // BT.709 primaries and matrix, sRGB transfer, limited range: as in the stream.
                for value in [1, 13, 1] {
                    half(out, value);
                }
                out.push(0);
            });
        });
    });
    put_full(out, *b"stts", 0, |out| {
        // All samples last one tick.
        for value in [1, frames, 1] {
            word(out, value);
        }
    });
    let keys: Vec<u32> =
        (1..).zip(track.samples).filter(|(_, sample)| sample.is_key).map(|(number, _)| number).collect();
    put_full(out, *b"stss", 0, |out| {
        word(out, keys.len() as u32);
        for &number in &keys {
            word(out, number);
        }
    });
    put_full(out, *b"stsc", 0, |out| {
        // One chunk holds all samples.
        for value in [1, 1, frames, 1] {
            word(out, value);
        }
    });
    put_full(out, *b"stsz", 0, |out| {
        word(out, 0);
        word(out, frames);
        track.samples.iter().for_each(|sample| word(out, sample.data.len() as u32));
    });
    put_full(out, *b"stco", 0, |out| {
        word(out, 1);
        word(out, offset);
    });
}

/// Entries that players and file managers show: tool, description, comment.
fn notes(out: &mut Vec<u8>, metadata: &ClipMetadata) {
    put_full(out, *b"meta", 0, |out| {
        put_full(out, *b"hdlr", 0, |out| {
            word(out, 0);
            out.extend(b"mdirappl");
            out.extend([0; 9]);
        });
        put(out, *b"ilst", |out| {
            for (keyword, text) in metadata.entries() {
                let kind = match keyword {
                    "Software" => *b"\xa9too",
                    "Description" => *b"desc",
                    _ => *b"\xa9cmt",
                };
                put(out, kind, |out| {
                    put(out, *b"data", |out| {
                        // UTF-8, no locale.
                        word(out, 1);
                        word(out, 0);
                        out.extend(text.as_bytes());
                    });
                });
            }
        });
    });
}
