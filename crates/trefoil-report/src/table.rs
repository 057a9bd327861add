//! A table that renders as aligned text, bordered text, Markdown or HTML, and never shows a number without its origin.

use crate::html::escape::{escape, slug};
use comfy_table::{CellAlignment, ContentArrangement, presets};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::str::FromStr;
use trefoil_core::Origin;

/// How to render a [`Table`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TableFormat {
    /// Aligned columns without borders; pastes well into a mail or an issue.
    #[default]
    Text,
    /// UTF-8 borders.
    Bordered,
    /// A Markdown table.
    Markdown,
}

/// The name is none of `text`, `bordered`, `md`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("table format `{0}` is none of text, bordered, md")]
pub struct TableFormatError(pub String);

impl FromStr for TableFormat {
    type Err = TableFormatError;

    fn from_str(text: &str) -> Result<Self, TableFormatError> {
        match text {
            "text" => Ok(Self::Text),
            "bordered" => Ok(Self::Bordered),
            "md" | "markdown" => Ok(Self::Markdown),
            other => Err(TableFormatError(other.to_owned())),
        }
    }
}

/// Emphasis of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mark {
    /// None.
    #[default]
    Plain,
    /// The best of its kind: `*` in text, bold elsewhere.
    Best,
}

/// One cell.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Cell {
    pub text: String,
    pub origin: Option<Origin>,
    pub mark: Mark,
    /// Unit whose colour HTML shows beside the text.
    pub unit: Option<String>,
    /// Set in an origin column: HTML shows the word as a badge.
    pub badge: Option<Origin>,
}

impl Cell {
    /// Text, a count or a name: facts that nobody had to time.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// A number with its origin.
    pub fn number(text: impl Into<String>, origin: Origin) -> Self {
        Self { text: text.into(), origin: Some(origin), ..Self::default() }
    }

    /// A number that may be absent.
    pub fn optional(text: Option<String>, origin: Origin) -> Self {
        text.map_or_else(|| Self::text(crate::format::ABSENT), |text| Self::number(text, origin))
    }

    /// A unit's name, in its colour.
    pub fn unit(name: &str) -> Self {
        Self { text: name.to_owned(), unit: Some(name.to_owned()), ..Self::default() }
    }

    /// The same cell marked as the best if `best`.
    pub fn best(mut self, best: bool) -> Self {
        self.mark = if best { Mark::Best } else { Mark::Plain };
        self
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Column {
    heading: String,
    right: bool,
}

/// A table: columns, rows, total rows and notes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Table {
    title: Option<String>,
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    totals: Vec<Vec<Cell>>,
    notes: Vec<String>,
    /// Whether an origin column says how the numbers of each row were got.
    origin_column: bool,
}

impl Table {
    /// A table with these headings; a heading that begins with `>` is right-aligned.
    pub(crate) fn new(headings: &[&str]) -> Self {
        let column = |heading: &&str| match heading.strip_prefix('>') {
            Some(heading) => Column { heading: heading.to_owned(), right: true },
            None => Column { heading: (*heading).to_owned(), right: false },
        };
        Self { columns: headings.iter().map(column).collect(), ..Self::default() }
    }

    pub(crate) fn titled(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    pub(crate) fn push_column(&mut self, heading: impl Into<String>, right: bool) {
        self.columns.push(Column { heading: heading.into(), right });
    }

    pub(crate) fn push(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.columns.len(), "a row has one cell per column");
        self.rows.push(row);
    }

    pub(crate) fn push_total(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.columns.len(), "a total row has one cell per column");
        self.totals.push(row);
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Drops columns whose cells are all empty or absent; keeps the first.
    pub(crate) fn without_empty_columns(mut self) -> Self {
        let keep: Vec<bool> = (0..self.columns.len())
            .map(|column| {
                let filled = |row: &Vec<Cell>| !matches!(row[column].text.as_str(), "" | crate::format::ABSENT);
                column == 0 || self.rows.iter().chain(&self.totals).any(filled)
            })
            .collect();
        let mut flags = keep.iter();
        self.columns.retain(|_| *flags.next().unwrap_or(&true));
        for row in self.rows.iter_mut().chain(&mut self.totals) {
            let mut flags = keep.iter();
            row.retain(|_| *flags.next().unwrap_or(&true));
        }
        self
    }

    /// Number of body rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no body row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The title, if it has one.
    pub fn title(&self) -> Option<&str> {
        self.title.as_deref()
    }

    /// The origin that all numbers of a column share: it then stands in the heading instead of in every cell.
    fn shared_origin(&self, column: usize) -> Option<Origin> {
        let mut origins = self.rows.iter().chain(&self.totals).filter_map(|row| row[column].origin);
        let first = origins.next()?;
        origins.all(|origin| origin == first).then_some(first)
    }

    /// Where columns mix origins but every row has one, a column of its own says it once a row. Else `self`: shared
    /// origins stand in headings, others in cells.
    fn laid_out(&self) -> Cow<'_, Self> {
        let mixed = |column: usize| {
            let mut origins = self.rows.iter().chain(&self.totals).filter_map(|row| row[column].origin);
            origins.next().is_some_and(|first| origins.any(|origin| origin != first))
        };
        let row_origin = |row: &Vec<Cell>| {
            let mut origins = row.iter().filter_map(|cell| cell.origin);
            let first = origins.next();
            origins.all(|origin| Some(origin) == first).then_some(first)
        };
        let origins: Option<Vec<_>> = self.rows.iter().chain(&self.totals).map(row_origin).collect();
        let numbers = |column: &usize| self.rows.iter().chain(&self.totals).any(|row| row[*column].origin.is_some());
        let number_columns: Vec<_> = (0..self.columns.len()).filter(numbers).collect();
        let (Some(origins), Some(&at)) = (origins, number_columns.first()) else { return Cow::Borrowed(self) };
        if !number_columns.iter().any(|&column| mixed(column)) {
            return Cow::Borrowed(self);
        }
        let mut table = self.clone();
        table.origin_column = true;
        table.columns.insert(at, Column { heading: "origin".to_owned(), right: false });
        for (row, origin) in table.rows.iter_mut().chain(&mut table.totals).zip(origins) {
            let text = origin.map(|origin| origin.to_string()).unwrap_or_default();
            row.insert(at, Cell { badge: origin, ..Cell::text(text) });
        }
        Cow::Owned(table)
    }

    /// Renders the table. `width` wraps text columns to that many characters (text formats only); `None` lets lines be
    /// as long as they need. Ends with a newline.
    pub fn render(&self, format: TableFormat, width: Option<u16>) -> String {
        match format {
            TableFormat::Text => self.laid_out().aligned(false, width),
            TableFormat::Bordered => self.laid_out().aligned(true, width),
            TableFormat::Markdown => self.laid_out().markdown(),
        }
    }

    /// Texts of headings and rows with origins put in.
    fn texts(&self, mark: impl Fn(&Cell, String) -> String) -> (Vec<String>, Vec<Vec<String>>) {
        let shared: Vec<_> = (0..self.columns.len()).map(|column| self.shared_origin(column)).collect();
        let heading = |(column, origin): (&Column, &Option<Origin>)| match origin {
            Some(origin) if !self.origin_column => format!("{} ({origin})", column.heading),
            _ => column.heading.clone(),
        };
        let headings = self.columns.iter().zip(&shared).map(heading).collect();
        let cell = |(cell, shared): (&Cell, &Option<Origin>)| {
            let text = match (cell.origin, shared) {
                // In front, so that digits stay under each other.
                (Some(origin), None) if !self.origin_column => format!("{origin} {}", cell.text),
                _ => cell.text.clone(),
            };
            mark(cell, text)
        };
        let rows = self.rows.iter().chain(&self.totals);
        (headings, rows.map(|row| row.iter().zip(&shared).map(cell).collect()).collect())
    }

    fn aligned(&self, bordered: bool, width: Option<u16>) -> String {
        let one_line = |text: String| text.replace(['\n', '\r', '\t'], " ");
        let (headings, rows) = self.texts(|cell, text| match cell.mark {
            Mark::Best => format!("{} *", one_line(text)),
            // Room for the mark keeps digits of marked and unmarked cells under each other.
            Mark::Plain => one_line(text),
        });
        let marked: Vec<bool> = (0..self.columns.len())
            .map(|column| self.columns[column].right && self.rows.iter().any(|row| row[column].mark == Mark::Best))
            .collect();
        let pad = |row: Vec<String>| -> Vec<String> {
            let padded = row.into_iter().zip(&marked);
            padded
                .map(|(text, marked)| if *marked && !text.ends_with('*') { format!("{text}  ") } else { text })
                .collect()
        };
        let mut table = comfy_table::Table::new();
        table.force_no_tty();
        table.load_style(if bordered { presets::UTF8_FULL_CONDENSED } else { presets::NOTHING });
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        } else {
            table.set_content_arrangement(ContentArrangement::Disabled);
        }
        table.set_header(pad(headings));
        table.add_rows(rows.into_iter().map(pad));
        for (column, spec) in table.column_iter_mut().zip(&self.columns) {
            column.set_cell_alignment(if spec.right { CellAlignment::Right } else { CellAlignment::Left });
            if !bordered {
                column.set_padding((0, 2));
            }
        }
        let mut text = String::new();
        if let Some(title) = &self.title {
            let _ = writeln!(text, "{}", one_line(title.clone()));
        }
        for line in table.lines() {
            let _ = writeln!(text, "{}", line.trim_end());
        }
        for note in &self.notes {
            let _ = writeln!(text, "{}", one_line(note.clone()));
        }
        text
    }

    fn markdown(&self) -> String {
        let (headings, rows) = self.texts(|cell, text| match cell.mark {
            Mark::Best => format!("**{}**", escape_markdown(&text)),
            Mark::Plain => escape_markdown(&text),
        });
        let mut text = String::new();
        if let Some(title) = &self.title {
            let _ = writeln!(text, "**{}**\n", escape_markdown(title));
        }
        let _ = writeln!(text, "| {} |", headings.iter().map(|h| escape_markdown(h)).collect::<Vec<_>>().join(" | "));
        let rules: Vec<_> = self.columns.iter().map(|column| if column.right { "--:" } else { "---" }).collect();
        let _ = writeln!(text, "|{}|", rules.join("|"));
        for row in rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        for note in &self.notes {
            let _ = writeln!(text, "\n{}", escape_markdown(note));
        }
        text
    }

    /// As an HTML table. `color` gives the palette index of a unit.
    pub(crate) fn html(&self, color: &dyn Fn(&str) -> usize) -> String {
        self.laid_out().html_table(color)
    }

    fn html_table(&self, color: &dyn Fn(&str) -> usize) -> String {
        let shared: Vec<_> = (0..self.columns.len()).map(|column| self.shared_origin(column)).collect();
        let mut html = String::from("<div class=\"scroll\" tabindex=\"0\" role=\"group\"");
        let _ = write!(html, " aria-label=\"{}\">", escape(self.title.as_deref().unwrap_or("table")));
        html.push_str("<table><thead><tr>");
        for (column, origin) in self.columns.iter().zip(&shared) {
            let class = if column.right { " class=\"num\"" } else { "" };
            let origin = origin.filter(|_| !self.origin_column);
            let badge = origin.map(|origin| format!("<br>{}", crate::html::badge(origin))).unwrap_or_default();
            let _ = write!(html, "<th scope=\"col\"{class}>{}{badge}</th>", escape(&column.heading));
        }
        html.push_str("</tr></thead><tbody>");
        let mut write_row = |row: &Vec<Cell>, class: &str| {
            let _ = write!(html, "<tr{class}>");
            for ((cell, column), shared) in row.iter().zip(&self.columns).zip(&shared) {
                let mut classes = Vec::new();
                if column.right {
                    classes.push("num".to_owned());
                }
                // Short texts stay on one line; long ones get room to wrap in.
                if cell.text.chars().count() > 32 {
                    classes.push("long".to_owned());
                }
                if cell.mark == Mark::Best {
                    classes.push("best".to_owned());
                }
                if cell.origin.is_some_and(|origin| matches!(origin, Origin::Simulated | Origin::Emulated)) {
                    classes.push(format!("hatch-{}", slug(&cell.origin.map(|o| o.to_string()).unwrap_or_default())));
                }
                let class =
                    if classes.is_empty() { String::new() } else { format!(" class=\"{}\"", classes.join(" ")) };
                let swatch = cell
                    .unit
                    .as_ref()
                    .map(|unit| format!("<i class=\"swatch u{}\"></i>", color(unit)))
                    .unwrap_or_default();
                let badge = match (cell.origin, shared) {
                    (Some(origin), None) if !self.origin_column => format!("{} ", crate::html::badge(origin)),
                    _ => String::new(),
                };
                let text = cell.badge.map_or_else(|| escape(&cell.text), crate::html::badge);
                let _ = write!(html, "<td{class}>{swatch}{badge}{text}</td>");
            }
            html.push_str("</tr>");
        };
        for row in &self.rows {
            write_row(row, "");
        }
        for row in &self.totals {
            write_row(row, " class=\"total\"");
        }
        html.push_str("</tbody></table></div>");
        for note in &self.notes {
            let _ = write!(html, "<p class=\"note\">{}</p>", escape(note));
        }
        html
    }
}

/// Escapes what Markdown would read as markup or as the end of a cell.
fn escape_markdown(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\r' | '\t' => escaped.push(' '),
            '<' => escaped.push_str("&lt;"),
            '&' => escaped.push_str("&amp;"),
            '\\' | '|' | '*' | '_' | '`' | '[' | ']' => {
                escaped.push('\\');
                escaped.push(character);
            }
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(second: Origin) -> Table {
        let mut table = Table::new(&["name", ">time", ">power"]).titled("T");
        let power = || Cell::number("5 W", Origin::Declared);
        table.push(vec![Cell::text("a|b"), Cell::number("9.00 ms", Origin::Measured).best(true), power()]);
        table.push(vec![Cell::text("<c>"), Cell::number("10.0 ms", second), power()]);
        table
    }

    #[test]
    fn a_shared_origin_moves_to_the_heading_and_a_mixed_one_stays_in_the_cells() {
        let text = sample(Origin::Measured).render(TableFormat::Text, None);
        assert_eq!(text.matches("measured").count(), 1, "{text}");
        let text = sample(Origin::Simulated).render(TableFormat::Text, None);
        assert!(text.contains("measured 9.00 ms *") && text.contains("simulated 10.0 ms"), "{text}");
    }

    #[test]
    fn rows_of_one_origin_each_get_an_origin_column() {
        let mut table = Table::new(&["name", ">time", ">spread"]);
        for (name, origin) in [("a", Origin::Measured), ("b", Origin::Simulated)] {
            table.push(vec![Cell::text(name), Cell::number("1.00 ms", origin), Cell::number("2.0%", origin)]);
        }
        let text = table.render(TableFormat::Text, None);
        assert_eq!(text.matches("simulated").count(), 1, "{text}");
        assert!(text.contains("origin") && text.contains("measured"), "{text}");
    }

    #[test]
    fn markdown_escapes_pipes_and_tags() {
        let text = sample(Origin::Measured).render(TableFormat::Markdown, None);
        assert!(text.contains("| a\\|b | **9.00 ms** | 5 W |") && text.contains("&lt;c>"), "{text}");
        assert!(text.contains("|---|--:|--:|"));
    }

    #[test]
    fn digits_stay_under_each_other_beside_a_mark() {
        let text = sample(Origin::Measured).render(TableFormat::Text, None);
        let ends: Vec<_> = text.lines().filter_map(|line| line.find("ms")).collect();
        assert_eq!(ends[0], ends[1], "{text}");
    }

    #[test]
    fn format_names() {
        assert_eq!("md".parse(), Ok(TableFormat::Markdown));
        assert!("pdf".parse::<TableFormat>().unwrap_err().to_string().contains("pdf"));
    }
}
