//! Escaping: every text that goes into HTML passes through here.

/// Escapes text for element content and quoted attributes. Control characters that HTML forbids become U+FFFD.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' => escaped.push(character),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Makes JSON safe inside a `<script>` element: no `</script>`, no comment opener, no line separators.
pub fn script_json(json: &str) -> String {
    json.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// A class or id fragment: lowercase ASCII letters, digits and hyphens.
pub fn slug(text: &str) -> String {
    let mapped = text.chars().map(
        |character| {
            if character.is_ascii_alphanumeric() { character.to_ascii_lowercase() } else { '-' }
        },
    );
    mapped.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_becomes_text() {
        assert_eq!(escape("<b a='\"'>&\u{1}"), "&lt;b a=&#39;&quot;&#39;&gt;&amp;\u{fffd}");
        assert_eq!(script_json("</script>&"), "\\u003c/script\\u003e\\u0026");
        assert_eq!(slug("PP-OCR v6"), "pp-ocr-v6");
    }
}
