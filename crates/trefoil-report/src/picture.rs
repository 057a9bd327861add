//! Pictures for where a page cannot go: the heat map of model pairs as PNG, drawn into a plain pixel buffer with bitmap fonts.

use crate::format;
use crate::html::pairs::{PairRow, PairsInput, level};
use embedded_graphics::mono_font::iso_8859_1::{FONT_7X13, FONT_10X20};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::*;
use embedded_graphics::primitives::{PrimitiveStyle, PrimitiveStyleBuilder, Rectangle, StrokeAlignment};
use embedded_graphics::text::{Alignment, Baseline, Text, TextStyleBuilder};
use std::convert::Infallible;
use thiserror::Error;

/// A picture that could not be encoded.
#[derive(Debug, Error)]
#[error("cannot encode a picture of {width}×{height} pixels: {source}")]
pub struct PictureError {
    width: u32,
    height: u32,
    source: png::EncodingError,
}

const PAPER: Rgb888 = Rgb888::new(255, 255, 255);
const INK: Rgb888 = Rgb888::new(28, 36, 48);
const FAINT: Rgb888 = Rgb888::new(86, 96, 114);
const RULE: Rgb888 = Rgb888::new(213, 218, 225);
const EMPTY: Rgb888 = Rgb888::new(246, 247, 249);

/// Colours of the levels, as on the page; and what they stand for.
const LEVELS: [(Rgb888, &str); 6] = [
    (Rgb888::new(243, 180, 171), "below 0.98"),
    (Rgb888::new(251, 227, 223), "0.98 to 0.995"),
    (Rgb888::new(238, 240, 243), "0.995 to 1.02"),
    (Rgb888::new(217, 239, 220), "1.02 to 1.08"),
    (Rgb888::new(169, 219, 177), "1.08 to 1.15"),
    (Rgb888::new(111, 192, 125), "1.15 and above"),
];

const CELL: Size = Size::new(84, 46);
const MARGIN: i32 = 16;
const LINE: i32 = 24;
/// Most characters of a name.
const NAME: usize = 28;
const LARGE: i32 = 10;
const SMALL: i32 = 7;

/// An RGB pixel buffer.
struct Canvas {
    size: Size,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(size: Size) -> Self {
        Self { size, pixels: vec![255; size.width as usize * size.height as usize * 3] }
    }

    fn set(&mut self, point: Point, colour: Rgb888) {
        let (Ok(x), Ok(y)) = (u32::try_from(point.x), u32::try_from(point.y)) else { return };
        if x < self.size.width && y < self.size.height {
            let at = (y as usize * self.size.width as usize + x as usize) * 3;
            self.pixels[at..at + 3].copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
        }
    }
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        self.size
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Infallible> {
        pixels.into_iter().for_each(|Pixel(point, colour)| self.set(point, colour));
        Ok(())
    }
}

/// Draws upwards: what is to the right comes out above.
struct Upwards<'a>(&'a mut Canvas, Point);

impl OriginDimensions for Upwards<'_> {
    fn size(&self) -> Size {
        Size::new(self.0.size.height, self.0.size.width)
    }
}

impl DrawTarget for Upwards<'_> {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Infallible> {
        for Pixel(point, colour) in pixels {
            self.0.set(self.1 + Point::new(point.y, -point.x), colour);
        }
        Ok(())
    }
}

/// Whatever draws here cannot fail.
fn done<T>(outcome: Result<T, Infallible>) -> T {
    match outcome {
        Ok(value) => value,
        Err(never) => match never {},
    }
}

fn write(
    target: &mut impl DrawTarget<Color = Rgb888, Error = Infallible>,
    text: &str,
    at: Point,
    (font, colour): (&MonoFont<'_>, Rgb888),
    alignment: Alignment,
) {
    let style = TextStyleBuilder::new().alignment(alignment).baseline(Baseline::Middle).build();
    done(Text::with_text_style(text, at, MonoTextStyle::new(font, colour), style).draw(target));
}

/// At most [`NAME`] characters, the end kept: names of one family differ there.
fn shortened(name: &str) -> String {
    let count = name.chars().count();
    if count <= NAME {
        return name.to_owned();
    }
    let tail: String = name.chars().skip(count - (NAME - 2)).collect();
    format!("..{tail}")
}

/// Words on lines of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The heat map as PNG: below the diagonal what was measured, with the pair's cap, above it what was predicted; framed where
/// the plan is what is used.
///
/// # Errors
/// [`PictureError`] when there are so many models that no picture can hold them.
pub fn pairs_png(input: &PairsInput) -> Result<Vec<u8>, PictureError> {
    let names: Vec<String> = input.models.iter().map(|name| shortened(name)).collect();
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0) as i32 * LARGE;
    let count = names.len() as i32;
    let map = Point::new(MARGIN + longest + 10, MARGIN + LINE + longest + 14);
    let width = (map.x + count * CELL.width as i32 + MARGIN).max(640);
    let summary = input.notes.first().map_or("", String::as_str);
    let facts = format!("{}, {} cores, {}", input.machine.cpu, input.machine.cores.len(), input.generated_at);
    let columns = ((width - 2 * MARGIN) / SMALL).max(1) as usize;
    let below = "Speed-up of the plan over the best of: one model after the other, both at once under their backends' own \
                 threading, one model per core. Below the diagonal measured, with the cap of any overlap over one after the other \
                 under isolated operator costs; above it predicted. Framed: the plan is used.";
    let text: Vec<String> = [below, summary, &facts].iter().flat_map(|text| wrapped(text, columns)).collect();
    let legend = map.y + count * CELL.height as i32 + 20;
    let height = legend + LINE * 2 + text.len() as i32 * 16 + MARGIN;
    let mut canvas = Canvas::new(Size::new(width as u32, height as u32));

    write(&mut canvas, "Pairs of models", Point::new(MARGIN, MARGIN + 8), (&FONT_10X20, INK), Alignment::Left);
    for (at, name) in names.iter().enumerate() {
        let middle = at as i32 * CELL.height as i32 + CELL.height as i32 / 2;
        write(&mut canvas, name, Point::new(map.x - 8, map.y + middle), (&FONT_10X20, INK), Alignment::Right);
        let column = Point::new(map.x + at as i32 * CELL.width as i32 + CELL.width as i32 / 2, map.y - 8);
        write(&mut Upwards(&mut canvas, column), name, Point::zero(), (&FONT_10X20, INK), Alignment::Left);
    }
    for row in 0..names.len() {
        for column in 0..names.len() {
            let corner = map + Point::new(column as i32 * CELL.width as i32, row as i32 * CELL.height as i32);
            let key = (row.min(column), row.max(column));
            let pair = input.pairs.iter().find(|pair| row != column && pair.models == key);
            cell(&mut canvas, Rectangle::new(corner, CELL), pair, row > column);
        }
    }
    for (at, (colour, label)) in LEVELS.iter().enumerate() {
        // Two rows of three.
        let corner = Point::new(MARGIN + at as i32 % 3 * 190, legend + at as i32 / 3 * LINE);
        let square = Rectangle::new(corner, Size::new(18, 18));
        done(square.into_styled(PrimitiveStyle::with_fill(*colour)).draw(&mut canvas));
        write(&mut canvas, label, corner + Point::new(26, 9), (&FONT_7X13, INK), Alignment::Left);
    }
    for (at, line) in text.iter().enumerate() {
        let place = Point::new(MARGIN, legend + LINE * 2 + 8 + at as i32 * 16);
        write(&mut canvas, line, place, (&FONT_7X13, FAINT), Alignment::Left);
    }
    encode(&canvas, input)
}

fn cell(canvas: &mut Canvas, place: Rectangle, pair: Option<&PairRow>, measured: bool) {
    let value = pair.and_then(|pair| if measured { pair.measured.map(|ratio| ratio.median) } else { pair.predicted });
    let colour = value.map_or(EMPTY, |value| LEVELS[level(value)].0);
    let style = PrimitiveStyleBuilder::new().fill_color(colour).stroke_color(PAPER).stroke_width(1).build();
    done(place.into_styled(style).draw(canvas));
    let Some(pair) = pair else { return };
    let text = value.map_or_else(|| "-".to_owned(), format::ratio);
    let cap = pair.cap.filter(|_| measured && value.is_some());
    let middle = place.center() + Point::new(0, if cap.is_some() { -8 } else { 0 });
    write(canvas, &text, middle, (&FONT_10X20, if measured { INK } else { FAINT }), Alignment::Center);
    if let Some(cap) = cap {
        let at = place.center() + Point::new(0, 12);
        write(canvas, &format!("cap {}", format::ratio(cap)), at, (&FONT_7X13, FAINT), Alignment::Center);
    }
    let (colour, width) = if measured && pair.used { (INK, 2) } else { (RULE, 1) };
    let frame = PrimitiveStyleBuilder::new()
        .stroke_color(colour)
        .stroke_width(width)
        .stroke_alignment(StrokeAlignment::Inside)
        .build();
    done(place.into_styled(frame).draw(canvas));
}

fn encode(canvas: &Canvas, input: &PairsInput) -> Result<Vec<u8>, PictureError> {
    let Size { width, height } = canvas.size;
    let failed = |source| PictureError { width, height, source };
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    for (keyword, text) in [("Software", "trefoil"), ("Comment", &input.command)] {
        encoder.add_itxt_chunk(keyword.to_owned(), text.to_owned()).map_err(failed)?;
    }
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&canvas.pixels).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::Ratio;
    use std::collections::BTreeMap;
    use trefoil_core::Machine;

    fn input(names: &[&str]) -> PairsInput {
        let pair = PairRow {
            models: (0, 1),
            baseline: Some(("serial".to_owned(), 2.5)),
            plan: Some(("tail-cut".to_owned(), 2.0)),
            measured: Some(Ratio { median: 1.25, low: 1.2, high: 1.3 }),
            predicted: Some(1.01),
            error: Some(-0.02),
            cap: Some(1.9),
            over_serial: Some(1.25),
            used: true,
            reason: "none".to_owned(),
        };
        PairsInput {
            models: names.iter().map(|name| (*name).to_owned()).collect(),
            pairs: vec![pair],
            machine: Machine {
                cpu: "test".to_owned(),
                cores: vec![0, 1],
                memory_bytes: 1,
                os: "none".to_owned(),
                features: Vec::new(),
                versions: BTreeMap::new(),
            },
            command: "trefoil bench pairs".to_owned(),
            generated_at: "now".to_owned(),
            notes: vec!["geometric mean over 1 pair: 1.25×".to_owned()],
        }
    }

    /// Size and RGB pixels of a PNG.
    fn decoded(file: &[u8]) -> (u32, u32, Vec<u8>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        (info.width, info.height, pixels)
    }

    #[test]
    fn a_measured_and_a_predicted_cell_have_their_colours() {
        let names = ["a", "b", "c"];
        let (width, height, pixels) = decoded(&pairs_png(&input(&names)).unwrap());
        assert!(width >= 640 && height > 3 * CELL.height);
        let map = Point::new(MARGIN + 10 + 10, MARGIN + LINE + 10 + 14);
        let colour = |row: i32, column: i32| {
            // Near the corner, clear of frame and text.
            let at = map + Point::new(column * CELL.width as i32 + 5, row * CELL.height as i32 + 5);
            let at = (at.y as usize * width as usize + at.x as usize) * 3;
            Rgb888::new(pixels[at], pixels[at + 1], pixels[at + 2])
        };
        assert_eq!((colour(1, 0), colour(0, 1)), (LEVELS[5].0, LEVELS[2].0));
        assert_eq!((colour(0, 0), colour(2, 0), colour(1, 2)), (EMPTY, EMPTY, EMPTY));
        // The measured cell is framed, and there is ink in it: its text.
        let inside = |row: i32, column: i32| {
            let corner = map + Point::new(column * CELL.width as i32 + 4, row * CELL.height as i32 + 4);
            let points = Rectangle::new(corner, CELL - Size::new(8, 8)).points();
            points
                .filter(|at| {
                    let at = (at.y as usize * width as usize + at.x as usize) * 3;
                    pixels[at..at + 3] == [INK.r(), INK.g(), INK.b()]
                })
                .count()
        };
        assert!(inside(1, 0) > 30 && inside(2, 0) == 0, "{} {}", inside(1, 0), inside(2, 0));
    }

    #[test]
    fn any_name_and_any_number_of_models_can_be_drawn() {
        assert!(pairs_png(&input(&[])).is_ok());
        let long = "n".repeat(500);
        let (width, _, _) = decoded(&pairs_png(&input(&[&long, "模型 – ×"])).unwrap());
        assert!(width < 1000, "{width}");
        assert_eq!(shortened(&long).len(), NAME);
        assert_eq!(wrapped("a bb  ccc", 4), ["a bb", "ccc"]);
    }
}
