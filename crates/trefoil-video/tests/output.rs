//! Files of clips, read back.

#[path = "common/media.rs"]
mod media;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use trefoil_video::output::{
    ClipFormat, ClipMetadata, ClipWriter, ContactSheet, NamedTensor, VideoFrame, write_tensors,
};

const SIZE: (usize, usize) = (10, 14);

fn metadata() -> ClipMetadata {
    ClipMetadata {
        fps: 16,
        prompt: Some("a red ball — ein roter Ball — 赤い球".to_string()),
        seed: Some(40),
        numeric_path: "f32".to_string(),
        plan: Some("cpu 0..180".to_string()),
        source: None,
    }
}

/// A red square that moves right over grey; few colours, so that GIF holds it exactly.
fn frame(index: usize) -> VideoFrame {
    let (height, width) = SIZE;
    let bytes: Vec<u8> = (0..height * width)
        .flat_map(|pixel| {
            let (y, x) = (pixel / width, pixel % width);
            let is_inside = (3..6).contains(&y) && (index..index + 3).contains(&x);
            if is_inside { [200, 10, 20] } else { [90, 90, 90] }
        })
        .collect();
    VideoFrame::from_bytes(height, width, &bytes)
}

fn write(path: &Path, frames: usize) {
    let mut clip = ClipWriter::create(path, SIZE, frames, metadata()).unwrap();
    for index in 0..frames {
        clip.push(&frame(index)).unwrap();
    }
    let report = clip.finish().unwrap();
    assert_eq!((report.frames, report.health.warning()), (frames, None));
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn animated_png_holds_every_pixel_and_says_how_it_was_made() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("clip.png");
    write(&path, 5);
    let mut reader = png::Decoder::new(BufReader::new(File::open(&path).unwrap())).read_info().unwrap();
    let animation = *reader.info().animation_control().unwrap();
    assert_eq!((animation.num_frames, animation.num_plays), (5, 0));
    let texts: Vec<(String, String)> =
        reader.info().utf8_text.iter().map(|chunk| (chunk.keyword.clone(), chunk.get_text().unwrap())).collect();
    assert!(texts.contains(&("Description".to_string(), metadata().prompt.unwrap())));
    let comment = &texts.iter().find(|(keyword, _)| keyword == "Comment").unwrap().1;
    assert_eq!(serde_json::from_str::<ClipMetadata>(comment).unwrap(), metadata());
    let mut buffer = vec![0; reader.output_buffer_size().unwrap()];
    for index in 0..5 {
        reader.next_frame(&mut buffer).unwrap();
        assert_eq!(buffer, frame(index).to_bytes(), "frame {index}");
        let control = reader.info().frame_control().unwrap();
        assert_eq!((control.delay_num, control.delay_den), (1, 16));
    }
    // A single frame is a plain picture.
    let still = scratch.path().join("still.png");
    write(&still, 1);
    let reader = png::Decoder::new(BufReader::new(File::open(&still).unwrap())).read_info().unwrap();
    assert!(reader.info().animation_control().is_none());
    assert_eq!(entries(scratch.path()), ["clip.png", "still.png"]);
}

/// Whole chunks of a RIFF file: name and contents, in order.
fn chunks(bytes: &[u8]) -> Vec<(&[u8], &[u8])> {
    let mut rest = bytes;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let length = u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
        found.push((&rest[..4], &rest[8..8 + length]));
        assert!(length.is_multiple_of(2) || rest[8 + length] == 0, "padding is zero");
        rest = &rest[8 + length + length % 2..];
    }
    found
}

#[test]
fn webp_holds_every_pixel_and_the_rate_and_says_how_it_was_made() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("clip.webp");
    write(&path, 8);
    let mut reader = image_webp::WebPDecoder::new(BufReader::new(File::open(&path).unwrap())).unwrap();
    assert_eq!((reader.dimensions(), reader.is_animated(), reader.num_frames()), ((14, 10), true, 8));
    assert_eq!((reader.loop_count(), reader.loop_duration()), (image_webp::LoopCount::Forever, 500));
    assert!(!reader.has_alpha());
    let mut buffer = vec![0; reader.output_buffer_size().unwrap()];
    let mut times = Vec::new();
    for index in 0..8 {
        times.push(reader.read_frame(&mut buffer).unwrap());
        assert_eq!(buffer, frame(index).to_bytes(), "frame {index}");
    }
    assert!(times.iter().all(|&ms| (62..=63).contains(&ms)) && times.iter().sum::<u32>() == 500, "{times:?}");
    let packet = String::from_utf8(reader.xmp_metadata().unwrap().unwrap()).unwrap();
    let description = packet.split("<dc:description>").nth(1).unwrap();
    let json = description.split_once("x-default\">").unwrap().1.split_once('<').unwrap().0;
    assert_eq!(serde_json::from_str::<ClipMetadata>(json).unwrap(), metadata());
    assert!(packet.contains(&metadata().prompt.unwrap()) && packet.contains("CreatorTool=\"trefoil "));

    // The order that RFC 9649 asks for, and lengths that a strict reader adds up.
    let bytes = std::fs::read(&path).unwrap();
    let [(riff, contents)] = chunks(&bytes)[..] else { panic!("one RIFF chunk") };
    assert_eq!((riff, &contents[..4]), (&b"RIFF"[..], &b"WEBP"[..]));
    let inside = chunks(&contents[4..]);
    let names: Vec<&[u8]> = inside.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, [&[&b"VP8X"[..], b"ANIM"], &[&b"ANMF"[..]; 8][..], &[&b"XMP "[..]]].concat());
    for (_, contents) in inside.iter().filter(|(name, _)| *name == b"ANMF") {
        let picture = chunks(&contents[16..]);
        assert_eq!(picture.len(), 1);
        assert_eq!(picture[0].0, b"VP8L");
    }

    // A single frame is a plain picture; a side too long for the format is told.
    let still = scratch.path().join("still.webp");
    write(&still, 1);
    let mut reader = image_webp::WebPDecoder::new(BufReader::new(File::open(&still).unwrap())).unwrap();
    assert!(!reader.is_animated());
    reader.read_image(&mut buffer).unwrap();
    assert_eq!(buffer, frame(0).to_bytes());
    assert!(reader.xmp_metadata().unwrap().is_some());
    let message = ClipWriter::create(&path, (16, 16_385), 1, metadata()).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("at most 16384 pixels a side, not 16385×16"), "{message}");
    assert_eq!(entries(scratch.path()), ["clip.webp", "still.webp"]);
}

#[test]
fn gif_holds_the_frames_and_the_rate() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("clip.gif");
    write(&path, 8);
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::RGBA);
    let mut reader = options.read_info(File::open(&path).unwrap()).unwrap();
    assert_eq!((reader.width(), reader.height()), (14, 10));
    let (mut count, mut hundredths) = (0, 0);
    while let Some(picture) = reader.read_next_frame().unwrap() {
        let want = frame(count).to_bytes();
        for (pixel, want) in picture.buffer.chunks_exact(4).zip(want.chunks_exact(3)) {
            assert!(pixel.iter().zip(want).all(|(&got, &want)| got.abs_diff(want) <= 2), "{pixel:?} {want:?}");
        }
        hundredths += u32::from(picture.delay);
        count += 1;
    }
    assert_eq!((count, hundredths), (8, 50));
    let bytes = std::fs::read(&path).unwrap();
    let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(has("Software: trefoil") && has("\"seed\":40"));
}

#[test]
fn a_folder_holds_numbered_pictures_and_the_metadata() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("frames/");
    write(&folder, 3);
    assert_eq!(entries(&folder), ["clip.json", "frame_00001.png", "frame_00002.png", "frame_00003.png"]);
    let text = std::fs::read_to_string(folder.join("clip.json")).unwrap();
    assert_eq!(serde_json::from_str::<ClipMetadata>(&text).unwrap(), metadata());
    let picture = File::open(folder.join("frame_00002.png")).unwrap();
    let mut reader = png::Decoder::new(BufReader::new(picture)).read_info().unwrap();
    let mut buffer = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut buffer).unwrap();
    assert_eq!(buffer, frame(1).to_bytes());
    let message = ClipWriter::create(&folder, SIZE, 3, metadata()).unwrap_err().to_string();
    assert!(message.contains("it is there and not empty"), "{message}");
    std::fs::create_dir(scratch.path().join("empty")).unwrap();
    write(&scratch.path().join("empty"), 2);
    assert_eq!(entries(scratch.path()), ["empty", "frames"]);
}

#[test]
fn tensors_hold_clamped_planes() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("frames.safetensors");
    write(&path, 4);
    let (shape, values) = media::tensor(&path, "frames");
    assert_eq!(shape, [1, 3, 4, SIZE.0, SIZE.1]);
    let plane = SIZE.0 * SIZE.1;
    for channel in 0..3 {
        for index in 0..4 {
            let want: Vec<f32> = frame(index).plane(channel).collect();
            assert_eq!(values[(channel * 4 + index) * plane..][..plane], want);
        }
    }
    let raw = scratch.path().join("raw.safetensors");
    let tensors = [
        NamedTensor { name: "a", shape: &[2, 3], values: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0] },
        NamedTensor { name: "b", shape: &[1], values: &[7.0] },
    ];
    write_tensors(&raw, &tensors, &[("prompt", "x".to_string())]).unwrap();
    assert_eq!(media::tensor(&raw, "a"), (vec![2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    assert_eq!(media::tensor(&raw, "b").1, [7.0]);
    let wrong = NamedTensor { name: "a", shape: &[2, 2], values: &[1.0] };
    let message = write_tensors(&raw, &[wrong], &[]).unwrap_err().to_string();
    assert!(message.contains("tensor `a` of [2, 2] has 1 values"), "{message}");
    assert_eq!(media::tensor(&raw, "b").1, [7.0], "the old file is whole");
}

#[test]
fn contact_sheets_show_first_and_last() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("sheet.png");
    let mut sheet = ContactSheet::new(SIZE.0, SIZE.1, 49);
    for index in 0..49 {
        sheet.push(&VideoFrame::from_bytes(SIZE.0, SIZE.1, &vec![index as u8 * 5; SIZE.0 * SIZE.1 * 3]));
    }
    sheet.write(&path, &metadata()).unwrap();
    let mut reader = png::Decoder::new(BufReader::new(File::open(&path).unwrap())).read_info().unwrap();
    let mut buffer = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut buffer).unwrap();
    let width = reader.info().width as usize;
    let columns = (width - 4) / (SIZE.1 + 4);
    assert_eq!(width, columns * (SIZE.1 + 4) + 4);
    let shades: std::collections::BTreeSet<u8> = buffer.iter().copied().collect();
    // Shade 32 is the gap's.
    assert_eq!(shades.iter().filter(|&&shade| shade != 32).count(), 24);
    assert!(shades.contains(&0) && shades.contains(&240));
    for (frames, tiles) in [(1, 1), (2, 2), (3, 3)] {
        let mut sheet = ContactSheet::new(SIZE.0, SIZE.1, frames);
        (0..frames).for_each(|index| sheet.push(&frame(index)));
        sheet.write(&path, &metadata()).unwrap();
        let reader = png::Decoder::new(BufReader::new(File::open(&path).unwrap())).read_info().unwrap();
        assert!(reader.info().width as usize * reader.info().height as usize >= tiles * SIZE.0 * SIZE.1);
    }
    let message = ContactSheet::new(4, 4, 3).write(&path, &metadata()).unwrap_err().to_string();
    assert!(message.contains("at least one frame"), "{message}");
}

#[test]
fn nothing_is_left_of_a_clip_that_did_not_finish() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["clip.png", "clip.gif", "clip.safetensors", "clip/"] {
        let path = scratch.path().join(name);
        let mut clip = ClipWriter::create(&path, SIZE, 3, metadata()).unwrap();
        clip.push(&frame(0)).unwrap();
        let message = clip.push(&VideoFrame::from_bytes(2, 2, &[0; 12])).unwrap_err().to_string();
        assert!(message.ends_with("a frame of 2×2 in a clip of 10×14"), "{message}");
        let message = clip.finish().unwrap_err().to_string();
        assert!(message.ends_with("1 frames of the 3 announced"), "{message}");
        let mut clip = ClipWriter::create(&path, SIZE, 1, metadata()).unwrap();
        clip.push(&frame(0)).unwrap();
        assert!(clip.push(&frame(1)).unwrap_err().to_string().contains("more than the 1 frames"));
        drop(clip);
        assert_eq!(entries(scratch.path()), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn names_and_places_that_cannot_be_are_one_clear_line() {
    let scratch = tempfile::tempdir().unwrap();
    let create = |name: &str| {
        ClipWriter::create(&scratch.path().join(name), SIZE, 3, metadata()).map(|_| ()).unwrap_err().to_string()
    };
    assert!(create("clip.avi").contains("clips are not written as .avi; use .mp4, DIR/ (PNG frames), .png"));
    assert!(create("no/such/folder/clip.png").contains("cannot write"));
    std::fs::write(scratch.path().join("file"), "x").unwrap();
    assert!(create("file/clip.gif").contains("cannot write"));
    assert!(create("file/frames/").contains("cannot write"));
    let message =
        ClipWriter::create(&scratch.path().join("a.png"), (0, 3), 3, metadata()).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("3 frames of 0×3 are no clip"), "{message}");
    let fast = ClipMetadata { fps: 0, ..metadata() };
    assert!(ClipWriter::create(&scratch.path().join("a.png"), SIZE, 3, fast).is_err());
    assert_eq!(ClipFormat::of(Path::new("A.PNG")).unwrap(), ClipFormat::AnimatedPng);
    assert_eq!(ClipFormat::of(Path::new("frames")).unwrap(), ClipFormat::Frames);
}

#[test]
fn damaged_frames_are_reported() {
    let scratch = tempfile::tempdir().unwrap();
    let mut clip = ClipWriter::create(&scratch.path().join("a.png"), (1, 2), 1, metadata()).unwrap();
    clip.push(&VideoFrame::from_signed(1, 2, vec![f32::NAN, 0.0, 0.0, 9.0, 0.0, 0.0])).unwrap();
    let health = clip.finish().unwrap().health;
    assert_eq!((health.values, health.not_finite, health.saturated), (6, 1, 1));
    assert!(health.warning().unwrap().contains("NaN"));
}

/// Boxes of one level: type and content.
#[cfg(feature = "mp4")]
fn boxes(mut data: &[u8]) -> Vec<(String, &[u8])> {
    let mut boxes = Vec::new();
    while !data.is_empty() {
        let size = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
        boxes.push((data[4..8].iter().map(|&byte| char::from(byte)).collect(), &data[8..size]));
        data = &data[size..];
    }
    boxes
}

/// The content of the box at a path.
#[cfg(feature = "mp4")]
fn find<'d>(data: &'d [u8], path: &[&str]) -> &'d [u8] {
    path.iter().fold(data, |data, kind| {
        boxes(data).into_iter().find(|(name, _)| name == kind).unwrap_or_else(|| panic!("no {kind}")).1
    })
}

#[cfg(feature = "mp4")]
#[test]
fn mp4_holds_a_sample_per_frame_where_its_table_says() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("clip.mp4");
    let (height, width, frames) = (48, 64, 17);
    let mut clip = ClipWriter::create(&path, (height, width), frames, metadata()).unwrap();
    for index in 0..frames {
        let bytes: Vec<u8> = (0..height * width)
            .flat_map(|pixel| {
                let (y, x) = (pixel / width, pixel % width);
                let is_inside = (12..28).contains(&y) && (index * 2..index * 2 + 16).contains(&x);
                if is_inside { [210, 20, 30] } else { [90, 90, 90] }
            })
            .collect();
        clip.push(&VideoFrame::from_bytes(height, width, &bytes)).unwrap();
    }
    clip.finish().unwrap();
    let data = std::fs::read(&path).unwrap();
    let kinds: Vec<String> = boxes(&data).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, ["ftyp", "moov", "mdat"], "the header comes first");
    let table = find(&data, &["moov", "trak", "mdia", "minf", "stbl"]);
    let word = |data: &[u8], at: usize| u32::from_be_bytes(data[at..at + 4].try_into().unwrap()) as usize;
    let sizes = find(table, &["stsz"]);
    assert_eq!(word(sizes, 8), frames);
    let total: usize = (0..frames).map(|index| word(sizes, 12 + 4 * index)).sum();
    let samples = find(&data, &["mdat"]);
    assert_eq!(samples.len(), total);
    let offset = word(find(table, &["stco"]), 8);
    assert_eq!(data[offset..offset + 8], samples[..8]);
    // The first sample starts with a sequence header (no temporal delimiter), and it is a key frame.
    assert_eq!(samples[0] >> 3 & 15, 1);
    let keys = find(table, &["stss"]);
    assert_eq!(word(keys, 8), 1);
    assert_eq!((word(find(table, &["stts"]), 8), word(find(table, &["stts"]), 12)), (frames, 1));
    let media = find(&data, &["moov", "trak", "mdia", "mdhd"]);
    assert_eq!((word(media, 12), word(media, 16)), (16, frames), "ticks a second and duration");
    let entry = &find(table, &["stsd"])[8..];
    let entry = find(entry, &["av01"]);
    assert_eq!(entry[24..28], [0, 64, 0, 48]);
    let configuration = find(&entry[78..], &["av1C"]);
    assert_eq!(configuration[0], 0x81, "marker and version");
    assert_eq!(configuration[4] >> 3 & 15, 1, "the sequence header");
    let has = |text: &str| data.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(has(&metadata().prompt.unwrap()) && has("\"seed\":40"));
    let message = ClipWriter::create(&path, (8, 64), 1, metadata()).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("MP4 frames have 16 to 65535 pixels a side, not 64×8"), "{message}");
}

#[cfg(unix)]
#[test]
fn a_device_is_refused_and_stays_a_device() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["clip.png", "clip.gif", "clip.safetensors"] {
        let link = scratch.path().join(name);
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let message = ClipWriter::create(&link, SIZE, 1, metadata()).map(|_| ()).unwrap_err().to_string();
        assert!(message.ends_with("it is a device; name a regular file") && !message.contains('\n'), "{message}");
    }
    assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
}
