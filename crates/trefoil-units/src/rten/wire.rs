//! The protobuf wire format, as much of it as copying a message field by field needs.

/// One field of a protobuf message: its number, its payload, and the bytes of the whole field.
pub(super) struct Field<'a> {
    pub(super) number: u64,
    pub(super) payload: Payload<'a>,
    pub(super) whole: &'a [u8],
}

/// What a field holds.
pub(super) enum Payload<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// A varint and what follows it.
pub(super) fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index as u32);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[index + 1..]));
        }
    }
    None
}

/// Splits a message into its fields.
pub(super) fn fields(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, String>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let start = rest;
        let field = next_field(rest).map(|(number, payload, after)| {
            rest = after;
            Field { number, payload, whole: &start[..start.len() - after.len()] }
        });
        if field.is_none() {
            rest = &[];
        }
        Some(field.ok_or_else(|| "the file is not a valid ONNX (protobuf) message, or is cut short".to_owned()))
    })
}

/// The next field: number, payload, what follows it.
fn next_field(bytes: &[u8]) -> Option<(u64, Payload<'_>, &[u8])> {
    let (tag, rest) = varint(bytes)?;
    let number = tag >> 3;
    if number == 0 {
        return None;
    }
    let (payload, after) = match tag & 7 {
        0 => {
            let (value, after) = varint(rest)?;
            (Payload::Varint(value), after)
        }
        1 => (Payload::Fixed, rest.get(8..)?),
        2 => {
            let (length, rest) = varint(rest)?;
            let length = usize::try_from(length).ok()?;
            (Payload::Bytes(rest.get(..length)?), rest.get(length..)?)
        }
        5 => (Payload::Fixed, rest.get(4..)?),
        _ => return None,
    };
    Some((number, payload, after))
}

/// Appends a varint.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a field of bytes.
pub(super) fn put_bytes(out: &mut Vec<u8>, number: u64, bytes: &[u8]) {
    put_varint(out, number << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}
