//! State dictionaries as PyTorch saves them (`.pth`): a zip archive of raw storages and a pickle that says which tensor is
//! which part of which storage.
//!
//! A pickle is a program. What is run here is a small part of its language, enough to build dictionaries, tuples and tensor
//! descriptions; the only functions it may name are those that rebuild tensors, and they are not called but recognised.
//! Anything else is refused by name. Storages are read where they lie in the file, so they must be stored uncompressed, as
//! PyTorch does.

use super::SourceType;
use crate::{FloatType, WeightsError};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use zip::{CompressionMethod, ZipArchive};

/// Largest pickle that is read.
const MAX_PICKLE: u64 = 64 << 20;
/// Most values on the stack and in the memo together; a state dictionary of 10,000 tensors has about a million.
const MAX_VALUES: usize = 1 << 24;

/// A tensor and where its elements lie in the file.
#[derive(Debug)]
pub(super) struct TorchTensor {
    pub(super) name: String,
    pub(super) dtype: SourceType,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
    pub(super) offset: u64,
}

/// Reads the names and places of all tensors.
pub(super) fn read(path: &Path, file: &File) -> Result<Vec<TorchTensor>, WeightsError> {
    let fail = |reason: String| WeightsError::checkpoint(path, reason);
    let odd = |error: zip::result::ZipError| {
        fail(format!("not a state dictionary of PyTorch 1.6 or later ({error}); convert it to safetensors"))
    };
    let file_length = file.metadata().map_err(WeightsError::io("inspect", path))?.len();
    let mut archive = ZipArchive::new(file).map_err(odd)?;
    let mut storages = BTreeMap::new();
    let mut pickle = Vec::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(odd)?;
        let name = entry.name().map_err(odd)?.into_owned();
        // Everything lies in one folder named after the file.
        let inner = name.split_once('/').map_or(name.as_str(), |(_, inner)| inner);
        if inner == "data.pkl" {
            entry.by_ref().take(MAX_PICKLE + 1).read_to_end(&mut pickle).map_err(WeightsError::io("read", path))?;
        } else if inner == "byteorder" {
            let mut order = String::new();
            entry.take(16).read_to_string(&mut order).map_err(WeightsError::io("read", path))?;
            if order.trim() != "little" {
                return Err(fail(format!(
                    "its bytes are in `{}` order; save it on a little-endian machine",
                    order.trim()
                )));
            }
        } else if let Some(key) = inner.strip_prefix("data/") {
            let (Some(start), CompressionMethod::Stored) = (entry.data_start(), entry.compression()) else {
                return Err(fail(format!("storage `{key}` is compressed; save it again with torch.save")));
            };
            let length = entry.size();
            if start.checked_add(length).is_none_or(|end| end > file_length) {
                return Err(fail(format!("storage `{key}` lies outside the file; download it again")));
            }
            storages.insert(key.to_string(), (start, length));
        }
    }
    if pickle.is_empty() || pickle.len() as u64 > MAX_PICKLE {
        return Err(fail(format!("a data.pkl of {} bytes is no state dictionary", pickle.len())));
    }
    let value =
        Machine::run(&pickle).map_err(|reason| fail(format!("its pickle {reason}; convert it to safetensors")))?;
    let mut tensors = Vec::new();
    for (name, tensor) in
        state_dictionary(value).ok_or_else(|| fail("it holds no dictionary of tensors".to_string()))?
    {
        let place = |reason: String| fail(format!("tensor `{name}`: {reason}"));
        let &(start, length) =
            storages.get(&tensor.storage).ok_or_else(|| place(format!("storage `{}` is missing", tensor.storage)))?;
        let (dtype, width) =
            element_type(&tensor.class).ok_or_else(|| place(format!("elements of {}", tensor.class)))?;
        if !tensor.is_dense() {
            return Err(place(format!(
                "{:?} with strides {:?} is a view; save a contiguous copy",
                tensor.shape, tensor.stride
            )));
        }
        let elements = tensor.shape.iter().try_fold(1u64, |product, &side| product.checked_mul(side));
        let bytes = elements.and_then(|elements| elements.checked_mul(width));
        let begin = tensor.offset.checked_mul(width);
        let (Some(bytes), Some(begin)) = (bytes, begin) else { return Err(place("its size overflows".to_string())) };
        if begin.checked_add(bytes).is_none_or(|end| end > length) {
            return Err(place(format!("{bytes} bytes at {begin} are not in its storage of {length}")));
        }
        tensors.push(TorchTensor { name, dtype, shape: tensor.shape, bytes, offset: start + begin });
    }
    Ok(tensors)
}

/// Type and bytes of the elements of a storage class.
fn element_type(class: &str) -> Option<(SourceType, u64)> {
    let raw = |name: &str, width| (SourceType::Raw { name: name.to_string() }, width);
    Some(match class {
        "torch FloatStorage" => (SourceType::Float(FloatType::F32), 4),
        "torch HalfStorage" => (SourceType::Float(FloatType::F16), 2),
        "torch BFloat16Storage" => (SourceType::Float(FloatType::Bf16), 2),
        "torch DoubleStorage" => raw("f64", 8),
        "torch LongStorage" => raw("i64", 8),
        "torch IntStorage" => raw("i32", 4),
        "torch ShortStorage" => raw("i16", 2),
        "torch CharStorage" => raw("i8", 1),
        "torch ByteStorage" => raw("u8", 1),
        "torch BoolStorage" => raw("bool", 1),
        _ => return None,
    })
}

/// The named tensors of a dictionary, or of the one under `state_dict` in it. Other entries are left out.
fn state_dictionary(value: Value) -> Option<Vec<(String, Described)>> {
    let Value::Dictionary(entries) = value else { return None };
    let mut tensors = Vec::new();
    for (key, value) in entries {
        match (key, value) {
            (Value::Text(name), Value::Tensor(tensor)) => tensors.push((name, tensor)),
            (Value::Text(name), inner @ Value::Dictionary(_)) if name == "state_dict" => {
                return state_dictionary(inner);
            }
            _ => {}
        }
    }
    (!tensors.is_empty()).then_some(tensors)
}

/// A tensor as the pickle describes it.
#[derive(Debug, Clone)]
struct Described {
    class: String,
    storage: String,
    offset: u64,
    shape: Vec<u64>,
    stride: Vec<u64>,
}

impl Described {
    /// Whether elements lie one after another in row-major order.
    fn is_dense(&self) -> bool {
        let mut expected = 1u64;
        self.shape.len() == self.stride.len()
            && self.shape.iter().zip(&self.stride).rev().all(|(&side, &stride)| {
                let fits = side == 1 || stride == expected;
                expected = expected.saturating_mul(side);
                fits
            })
    }
}

/// What the pickle's stack holds.
#[derive(Debug, Clone)]
enum Value {
    Mark,
    /// None, booleans, floats and what they are part of: never needed.
    Other,
    Integer(i64),
    Text(String),
    Function(String),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    Dictionary(Vec<(Value, Value)>),
    Storage {
        class: String,
        key: String,
    },
    Tensor(Described),
}

/// The part of the pickle language that is understood.
struct Machine<'p> {
    program: &'p [u8],
    stack: Vec<Value>,
    memo: BTreeMap<u32, Value>,
}

type Step<T> = Result<T, String>;

impl<'p> Machine<'p> {
    fn run(program: &'p [u8]) -> Step<Value> {
        let mut machine = Machine { program, stack: Vec::new(), memo: BTreeMap::new() };
        while !machine.step()? {
            if machine.stack.len() + machine.memo.len() > MAX_VALUES {
                return Err("builds too much".to_string());
            }
        }
        machine.pop()
    }

    fn take(&mut self, count: usize) -> Step<&'p [u8]> {
        if count > self.program.len() {
            return Err("ends in the middle".to_string());
        }
        let (head, tail) = self.program.split_at(count);
        self.program = tail;
        Ok(head)
    }

    /// A little-endian number of up to four bytes.
    fn number(&mut self, width: usize) -> Step<u32> {
        Ok(self.take(width)?.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte)))
    }

    fn line(&mut self) -> Step<&'p str> {
        let end = self.program.iter().position(|&byte| byte == b'\n').ok_or("ends in the middle of a line")?;
        let line = self.take(end + 1)?;
        std::str::from_utf8(&line[..end]).map_err(|_| "holds a line that is not UTF-8".to_string())
    }

    fn text(&mut self, length: usize) -> Step<Value> {
        let bytes = self.take(length)?;
        Ok(Value::Text(std::str::from_utf8(bytes).map_err(|_| "holds a name that is not UTF-8")?.to_string()))
    }

    fn pop(&mut self) -> Step<Value> {
        self.stack.pop().ok_or_else(|| "takes from an empty stack".to_string())
    }

    /// Everything above the last mark.
    fn pop_mark(&mut self) -> Step<Vec<Value>> {
        let mark = self
            .stack
            .iter()
            .rposition(|value| matches!(value, Value::Mark))
            .ok_or("has no mark where it needs one")?;
        let values = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(values)
    }

    fn pop_tuple(&mut self, count: usize) -> Step<Value> {
        let at = self.stack.len().checked_sub(count).ok_or("takes from an empty stack")?;
        Ok(Value::Tuple(self.stack.split_off(at)))
    }

    fn remember(&mut self, index: u32) -> Step<()> {
        let value = match self.stack.last().ok_or("remembers nothing")? {
            // A container is filled after it was remembered: a copy would go stale. Tensors are never shared through one.
            Value::Dictionary(_) | Value::List(_) => Value::Other,
            value => value.clone(),
        };
        self.memo.insert(index, value);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Step<()> {
        let value = self.memo.get(&index).ok_or("recalls what it never remembered")?.clone();
        self.stack.push(value);
        Ok(())
    }

    /// One operation; true at the end.
    fn step(&mut self) -> Step<bool> {
        let code = self.take(1)?[0];
        let value = match code {
            // Protocol and frame length: nothing to do.
            0x80 => {
                self.take(1)?;
                return Ok(false);
            }
            0x95 => {
                self.take(8)?;
                return Ok(false);
            }
            b'.' => return Ok(true),
            b'(' => Value::Mark,
            b'}' => Value::Dictionary(Vec::new()),
            b']' => Value::List(Vec::new()),
            b')' => Value::Tuple(Vec::new()),
            b'N' | 0x88 | 0x89 => Value::Other,
            b'G' => {
                self.take(8)?;
                Value::Other
            }
            b'K' => Value::Integer(i64::from(self.number(1)?)),
            b'M' => Value::Integer(i64::from(self.number(2)?)),
            b'J' => Value::Integer(i64::from(self.number(4)? as i32)),
            0x8a => {
                let length = self.number(1)? as usize;
                let bytes = self.take(length)?;
                if length > 8 {
                    return Err(format!("holds a number of {length} bytes"));
                }
                let mut wide = if bytes.last().is_some_and(|&byte| byte & 0x80 != 0) { [0xff; 8] } else { [0; 8] };
                wide[..length].copy_from_slice(bytes);
                Value::Integer(i64::from_le_bytes(wide))
            }
            b'X' => {
                let length = self.number(4)? as usize;
                self.text(length)?
            }
            0x8c => {
                let length = self.number(1)? as usize;
                self.text(length)?
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                function(format!("{module} {name}"))?
            }
            0x93 => match (self.pop()?, self.pop()?) {
                (Value::Text(name), Value::Text(module)) => function(format!("{module} {name}"))?,
                _ => return Err("names a function by something other than text".to_string()),
            },
            b't' => Value::Tuple(self.pop_mark()?),
            0x85..=0x87 => self.pop_tuple(usize::from(code - 0x84))?,
            b'Q' => storage(self.pop()?)?,
            b'R' => {
                let arguments = self.pop()?;
                rebuild(self.pop()?, arguments)?
            }
            b'q' => {
                let index = self.number(1)?;
                self.remember(index)?;
                return Ok(false);
            }
            b'r' => {
                let index = self.number(4)?;
                self.remember(index)?;
                return Ok(false);
            }
            0x94 => {
                self.remember(self.memo.len() as u32)?;
                return Ok(false);
            }
            b'h' => {
                let index = self.number(1)?;
                self.recall(index)?;
                return Ok(false);
            }
            b'j' => {
                let index = self.number(4)?;
                self.recall(index)?;
                return Ok(false);
            }
            b's' | b'u' => {
                let entries = if code == b's' {
                    let Value::Tuple(pair) = self.pop_tuple(2)? else { return Err("sets nothing".to_string()) };
                    pair
                } else {
                    self.pop_mark()?
                };
                let Some(Value::Dictionary(dictionary)) = self.stack.last_mut() else {
                    return Err("sets an entry of what is no dictionary".to_string());
                };
                let mut entries = entries.into_iter();
                while let (Some(key), Some(value)) = (entries.next(), entries.next()) {
                    dictionary.push((key, value));
                }
                return Ok(false);
            }
            b'a' | b'e' => {
                let values = if code == b'a' { vec![self.pop()?] } else { self.pop_mark()? };
                let Some(Value::List(list)) = self.stack.last_mut() else {
                    return Err("appends to what is no list".to_string());
                };
                list.extend(values);
                return Ok(false);
            }
            // Attributes of a dictionary (`_metadata`) or of a parameter: left out.
            b'b' => {
                self.pop()?;
                return Ok(false);
            }
            other => return Err(format!("uses operation 0x{other:02x}, which no state dictionary needs")),
        };
        self.stack.push(value);
        Ok(false)
    }
}

/// Functions and classes that may be named.
fn function(name: String) -> Step<Value> {
    let is_known = matches!(
        name.as_str(),
        "collections OrderedDict" | "torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_parameter"
    ) || element_type(&name).is_some();
    if is_known { Ok(Value::Function(name)) } else { Err(format!("would call `{name}`, which is not allowed")) }
}

/// `('storage', class, key, device, elements)`.
fn storage(identifier: Value) -> Step<Value> {
    let Value::Tuple(fields) = identifier else { return Err("names a storage by something odd".to_string()) };
    match fields.as_slice() {
        [Value::Text(kind), Value::Function(class), Value::Text(key), ..] if kind == "storage" => {
            Ok(Value::Storage { class: class.clone(), key: key.clone() })
        }
        _ => Err("names a storage by something odd".to_string()),
    }
}

/// What a call would give.
fn rebuild(function: Value, arguments: Value) -> Step<Value> {
    let (Value::Function(name), Value::Tuple(arguments)) = (function, arguments) else {
        return Err("calls what is no function".to_string());
    };
    match (name.as_str(), arguments.as_slice()) {
        ("collections OrderedDict", []) => Ok(Value::Dictionary(Vec::new())),
        ("torch._utils _rebuild_parameter", [tensor @ Value::Tensor(_), ..]) => Ok(tensor.clone()),
        (
            "torch._utils _rebuild_tensor_v2",
            [Value::Storage { class, key }, Value::Integer(offset), Value::Tuple(shape), Value::Tuple(stride), ..],
        ) => {
            let sizes = |values: &[Value]| -> Step<Vec<u64>> {
                let size = |value: &Value| match value {
                    Value::Integer(size) => u64::try_from(*size).map_err(|_| format!("holds a size of {size}")),
                    _ => Err("holds a size that is no number".to_string()),
                };
                values.iter().map(size).collect()
            };
            Ok(Value::Tensor(Described {
                class: class.clone(),
                storage: key.clone(),
                offset: u64::try_from(*offset).map_err(|_| format!("holds an offset of {offset}"))?,
                shape: sizes(shape)?,
                stride: sizes(stride)?,
            }))
        }
        _ => Err(format!("calls `{name}` with arguments of another kind")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `{'w': tensor}` as `torch.save` writes it, with a function and a storage class of choice.
    fn program(function: &str, class: &str, tail: &[u8]) -> Vec<u8> {
        let mut program = b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01c".to_vec();
        program.extend(function.as_bytes());
        program.extend(b"\nq\x02((X\x07\x00\x00\x00storageq\x03ctorch\n");
        program.extend(class.as_bytes());
        program.extend(b"\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x06tq\x07QK\x00K\x02K\x03\x86q\x08K\x03K\x01\x86q\x09\x89");
        program.extend(b"ccollections\nOrderedDict\nq\x0a)Rq\x0btq\x0cRq\x0ds");
        program.extend(tail);
        program
    }

    const REBUILD: &str = "torch._utils\n_rebuild_tensor_v2";

    #[test]
    fn a_state_dictionary_is_understood() {
        let value = Machine::run(&program(REBUILD, "HalfStorage", b".")).unwrap();
        let tensors = state_dictionary(value).unwrap();
        let (name, tensor) = &tensors[0];
        assert_eq!((tensors.len(), name.as_str(), tensor.class.as_str()), (1, "w", "torch HalfStorage"));
        assert_eq!((tensor.storage.as_str(), tensor.offset, tensor.shape.as_slice()), ("0", 0, &[2, 3][..]));
        assert!(tensor.is_dense());
        let view = Described { stride: vec![1, 2], ..tensor.clone() };
        assert!(!view.is_dense());
    }

    #[test]
    fn programs_that_would_do_anything_else_are_refused() {
        let refuse = |program: &[u8]| Machine::run(program).unwrap_err();
        assert_eq!(
            refuse(&program("os\nsystem", "FloatStorage", b".")),
            "would call `os system`, which is not allowed"
        );
        assert!(refuse(&program(REBUILD, "Storage", b".")).contains("torch Storage"));
        assert!(refuse(&program(REBUILD, "FloatStorage", b"i")).contains("operation 0x69"));
        assert_eq!(refuse(b"\x80\x02cbuiltins\neval\n."), "would call `builtins eval`, which is not allowed");
        assert!(refuse(b"\x80\x02)R.").contains("empty stack") || refuse(b"\x80\x02)R.").contains("no function"));
        assert!(refuse(b"\x80\x02}h\x05.").contains("never remembered"));
        let whole = program(REBUILD, "FloatStorage", b".");
        for end in 0..whole.len() {
            assert!(Machine::run(&whole[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn damaged_programs_never_panic() {
        let whole = program(REBUILD, "FloatStorage", b".");
        let mut state = 1u32;
        for _ in 0..20_000 {
            let mut damaged = whole.clone();
            for _ in 0..3 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = (state >> 8) as usize % damaged.len();
                damaged[at] = (state >> 3) as u8;
            }
            if let Ok(value) = Machine::run(&damaged) {
                drop(state_dictionary(value));
            }
        }
    }
}
