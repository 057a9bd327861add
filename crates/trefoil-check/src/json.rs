//! Reading plain JSON with errors that name the place.

use crate::CheckError;
use serde_json::Value;

pub fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}

/// Reads fields of one file.
#[derive(Debug, Clone, Copy)]
pub struct Reader(pub &'static str);

impl Reader {
    pub fn fail(self, reason: impl Into<String>) -> CheckError {
        CheckError::Format { file: self.0, reason: reason.into() }
    }

    pub fn list<'a>(self, value: &'a Value, key: &str) -> Result<&'a [Value], CheckError> {
        match value.get(key) {
            Some(Value::Array(list)) => Ok(list),
            _ => Err(self.fail(format!("`{key}` is no list"))),
        }
    }

    /// A finite number that is not negative.
    pub fn number(self, value: &Value, key: &str) -> Result<f64, CheckError> {
        let number = value.get(key).and_then(Value::as_f64);
        number
            .filter(|number| number.is_finite() && *number >= 0.0)
            .ok_or_else(|| self.fail(format!("`{key}` is no number that is finite and not negative")))
    }

    /// A whole number that is not negative and counts something.
    pub fn count(self, value: &Value, key: &str) -> Result<u64, CheckError> {
        let number = value.get(key).and_then(Value::as_u64).filter(|&number| u32::try_from(number).is_ok());
        number.ok_or_else(|| {
            let found = value.get(key).unwrap_or(&Value::Null);
            self.fail(format!("`{key}` holds {found}, not a whole number from 0 on"))
        })
    }

    pub fn index(self, value: &Value, key: &str, below: usize) -> Result<usize, CheckError> {
        self.as_index(value.get(key).unwrap_or(&Value::Null), key, below)
    }

    pub fn as_index(self, value: &Value, key: &str, below: usize) -> Result<usize, CheckError> {
        let index = value.as_u64().map(|index| index as usize);
        index
            .filter(|&index| index < below)
            .ok_or_else(|| self.fail(format!("`{key}` holds {value}, not an index below {below}")))
    }

    pub fn indices(self, value: &Value, key: &str, below: usize) -> Result<Vec<usize>, CheckError> {
        self.list(value, key)?.iter().map(|item| self.as_index(item, key, below)).collect()
    }

    /// Rows of numbers; `null` stands for infinity.
    pub fn rows(self, value: &Value, key: &str, width: usize) -> Result<Vec<Vec<f64>>, CheckError> {
        let row = |row: &Value| {
            let row: Option<Vec<f64>> = row
                .as_array()?
                .iter()
                .map(|item| if item.is_null() { Some(f64::INFINITY) } else { item.as_f64() })
                .collect();
            row.filter(|row| row.len() == width && row.iter().all(|number| !number.is_nan()))
        };
        let rows: Option<Vec<Vec<f64>>> = self.list(value, key)?.iter().map(row).collect();
        rows.ok_or_else(|| self.fail(format!("`{key}` is no list of rows of {width} numbers")))
    }
}
