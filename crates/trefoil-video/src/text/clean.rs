//! Prompt cleaning as the reference pipelines do it: `ftfy.fix_text`, HTML entities twice, white space.
//!
//! Of ftfy's default settings everything is here that changes single characters, and the repair of text whose UTF-8 was
//! read as Windows-1252 throughout ("cafÃ©"). Its search for damaged *parts* of a text is not.

use unicode_normalization::UnicodeNormalization;

/// Cleans a prompt.
pub fn clean(prompt: &str) -> String {
    let mut text = fix_text(prompt);
    for _ in 0..2 {
        text = unescape(&text);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Most rounds; each undoes one layer of damage.
const MAX_ROUNDS: usize = 8;

fn fix_text(text: &str) -> String {
    let mut text = text.to_string();
    for _ in 0..MAX_ROUNDS {
        let fixed = fix_once(&text);
        if fixed == text {
            break;
        }
        text = fixed;
    }
    text
}

fn fix_once(text: &str) -> String {
    // Text with a tag is taken for HTML, where entities mean what they say.
    let text = if text.contains('<') { text.to_string() } else { unescape(text) };
    let text = without_terminal_escapes(&text);
    let text = fix_encoding(text);
    let mut fixed = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match fix_c1(character) {
            '\r' => {
                if characters.peek() == Some(&'\n') {
                    characters.next();
                }
                fixed.push('\n');
            }
            '\u{2028}' | '\u{2029}' | '\u{85}' => fixed.push('\n'),
            '\u{2bc}' | '\u{2018}'..='\u{201b}' => fixed.push('\''),
            '\u{201c}'..='\u{201f}' => fixed.push('"'),
            '\u{3000}' => fixed.push(' '),
            // Full-width and half-width forms.
            wide @ '\u{ff01}'..='\u{ffef}' => fixed.extend(std::iter::once(wide).nfkc()),
            character if is_control(character) => {}
            character => match ligature(character) {
                Some(letters) => fixed.push_str(letters),
                None => fixed.push(character),
            },
        }
    }
    fixed.nfc().collect()
}

/// Control characters without a meaning in text.
fn is_control(character: char) -> bool {
    matches!(character, '\0'..='\u{8}' | '\u{b}' | '\u{e}'..='\u{1f}' | '\u{7f}' | '\u{206a}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffc}')
}

/// Letters of a Latin ligature that is only a way of setting them.
fn ligature(character: char) -> Option<&'static str> {
    Some(match character {
        'Ĳ' => "IJ",
        'ĳ' => "ij",
        'ŉ' => "ʼn",
        'Ǳ' => "DZ",
        'ǲ' => "Dz",
        'ǳ' => "dz",
        'Ǆ' => "DŽ",
        'ǅ' => "Dž",
        'ǆ' => "dž",
        'Ǉ' => "LJ",
        'ǈ' => "Lj",
        'ǉ' => "lj",
        'Ǌ' => "NJ",
        'ǋ' => "Nj",
        'ǌ' => "nj",
        'ﬀ' => "ff",
        'ﬁ' => "fi",
        'ﬂ' => "fl",
        'ﬃ' => "ffi",
        'ﬄ' => "ffl",
        'ﬅ' => "ſt",
        'ﬆ' => "st",
        _ => return None,
    })
}

/// Entities, by HTML5's rules.
fn unescape(text: &str) -> String {
    htmlize::unescape(text).into_owned()
}

/// Without `ESC [ digits and semicolons letter`.
fn without_terminal_escapes(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let mut clean = parts.next().unwrap_or("").to_string();
    for part in parts {
        let rest = part.trim_start_matches(|character: char| character.is_ascii_digit() || character == ';');
        if rest.starts_with(|character: char| character.is_ascii_alphabetic()) {
            clean.push_str(&rest[1..]);
        } else {
            clean.push_str("\u{1b}[");
            clean.push_str(part);
        }
    }
    clean
}

/// What the bytes 0x80..0xa0 are in Windows-1252; undefined ones stay C1 controls.
const WINDOWS_1252: [char; 32] = [
    '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž', '\u{8f}', '\u{90}', '‘', '’',
    '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}', 'ž', 'Ÿ',
];

/// A C1 control is a Windows-1252 character that was read as Latin-1.
fn fix_c1(character: char) -> char {
    match character {
        '\u{80}'..='\u{9f}' => WINDOWS_1252[character as usize - 0x80],
        other => other,
    }
}

fn windows_1252_byte(character: char) -> Option<u8> {
    match character {
        '\0'..='\u{ff}' => Some(character as u8),
        other => WINDOWS_1252.iter().position(|&known| known == other).map(|at| 0x80 + at as u8),
    }
}

/// Undoes one reading of UTF-8 as Windows-1252, where all of the text is such a reading.
fn fix_encoding(text: String) -> String {
    if text.is_ascii() {
        return text;
    }
    let bytes: Option<Vec<u8>> = text.chars().map(windows_1252_byte).collect();
    match bytes.map(String::from_utf8) {
        Some(Ok(repaired)) => repaired,
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_reference_cleans_is_cleaned() {
        for (prompt, cleaned) in [
            ("  a red\t ball \n moves\u{a0}left ", "a red ball moves left"),
            ("“smart” ‘quotes’", "\"smart\" 'quotes'"),
            ("ﬁsh &amp; chips", "fish & chips"),
            ("&amp;amp;lt;b&amp;amp;gt;", "<b>"),
            ("ＦＵＬＬ　width！", "FULL width!"),
            ("cafÃ© in MÃ¼nchen", "café in München"),
            ("it\u{92}s", "it's"),
            ("a\r\nb\rc\u{2028}d", "a b c d"),
            ("\u{1b}[1;31mred\u{1b}[0m", "red"),
            ("e\u{301}", "é"),
            ("zero\u{feff}width\u{0}", "zerowidth"),
            ("日本の庭", "日本の庭"),
            ("\u{3000}\n", ""),
            ("<b>&quot;x&quot;</b>", "<b>\"x\"</b>"),
            ("naïve façade", "naïve façade"),
        ] {
            assert_eq!(clean(prompt), cleaned, "{prompt:?}");
        }
    }

    #[test]
    fn cleaning_twice_changes_nothing_more() {
        for prompt in ["a ball", "“x”", "cafÃ©", "ﬁ ﬂ", "&amp;lt;"] {
            let once = clean(prompt);
            assert_eq!(clean(&once), once);
        }
    }
}
