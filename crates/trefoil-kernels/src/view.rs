//! Row-major matrix views with a row stride, checked once when they are made.

use crate::KernelError;

/// Rows and columns, formatted only when an error needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    rows: usize,
    columns: usize,
}

impl Extent {
    /// Rows and columns.
    pub(crate) fn new(rows: usize, columns: usize) -> Extent {
        Extent { rows, columns }
    }
}

impl std::fmt::Display for Extent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}×{}", self.rows, self.columns)
    }
}

fn needed(rows: usize, columns: usize, stride: usize) -> Option<usize> {
    if rows == 0 { Some(0) } else { (rows - 1).checked_mul(stride)?.checked_add(columns) }
}

pub(crate) fn check(
    what: &'static str,
    rows: usize,
    columns: usize,
    stride: usize,
    have: usize,
) -> Result<(), KernelError> {
    let need = needed(rows, columns, stride).unwrap_or(usize::MAX);
    if stride < columns || need > have {
        return Err(KernelError::Buffer { what, rows, columns, stride, need, have });
    }
    Ok(())
}

/// A matrix that is read. Elements of row `r` are at `r · stride ..`, `stride` ≥ `columns`.
#[derive(Debug)]
#[allow(clippy::struct_field_names, reason = "a matrix of rows has a number of rows")]
pub struct Rows<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    stride: usize,
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// A view; `what` names it in errors.
    ///
    /// # Errors
    /// [`KernelError::Buffer`] where the last row does not fit or rows overlap.
    pub fn new(
        what: &'static str,
        data: &'a [T],
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> Result<Rows<'a, T>, KernelError> {
        check(what, rows, columns, stride, data.len())?;
        Ok(Rows { data, rows, columns, stride })
    }

    /// A view without gaps.
    pub fn dense(what: &'static str, data: &'a [T], rows: usize, columns: usize) -> Result<Rows<'a, T>, KernelError> {
        Rows::new(what, data, rows, columns, columns)
    }

    /// All of `data`, which is as long as it must be.
    pub(crate) fn whole(data: &'a [T], rows: usize, columns: usize) -> Rows<'a, T> {
        assert_eq!(data.len(), rows * columns, "{rows} rows of {columns}");
        Rows { data, rows, columns, stride: columns }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `row`.
    #[inline]
    pub fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.stride..][..self.columns]
    }

    /// All from row `row` on, gaps included.
    #[inline]
    pub(crate) fn starting_at(&self, row: usize) -> &'a [T] {
        &self.data[(row * self.stride).min(self.data.len())..]
    }

    /// Rows `first .. first + count`.
    pub(crate) fn part(&self, first: usize, count: usize) -> Rows<'a, T> {
        debug_assert!(first + count <= self.rows, "rows {first}+{count} of {}", self.rows);
        Rows { data: self.starting_at(first), rows: count, columns: self.columns, stride: self.stride }
    }

    /// Elements available, for padding checks.
    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    /// `rows×columns`.
    pub(crate) fn shape(&self) -> Extent {
        Extent { rows: self.rows, columns: self.columns }
    }
}

/// A matrix that is written. See [`Rows`].
#[derive(Debug)]
#[allow(clippy::struct_field_names, reason = "as above")]
pub struct RowsMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    columns: usize,
    stride: usize,
}

impl<'a, T> RowsMut<'a, T> {
    /// A view; `what` names it in errors.
    ///
    /// # Errors
    /// [`KernelError::Buffer`] where the last row does not fit or rows overlap.
    pub fn new(
        what: &'static str,
        data: &'a mut [T],
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> Result<RowsMut<'a, T>, KernelError> {
        check(what, rows, columns, stride, data.len())?;
        Ok(RowsMut { data, rows, columns, stride })
    }

    /// A view without gaps.
    pub fn dense(
        what: &'static str,
        data: &'a mut [T],
        rows: usize,
        columns: usize,
    ) -> Result<RowsMut<'a, T>, KernelError> {
        RowsMut::new(what, data, rows, columns, columns)
    }

    /// All of `data`, which is as long as it must be.
    pub(crate) fn whole(data: &'a mut [T], rows: usize, columns: usize) -> RowsMut<'a, T> {
        assert_eq!(data.len(), rows * columns, "{rows} rows of {columns}");
        RowsMut { data, rows, columns, stride: columns }
    }

    /// Where row `first` starts, and the stride: `rows` whole rows are writable there.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn origin(&mut self, first: usize, rows: usize) -> (*mut T, usize) {
        let need = rows.saturating_sub(1) * self.stride + self.columns;
        let rows = &mut self.data[first * self.stride..];
        assert!(rows.len() >= need, "rows of {} columns at a stride of {}", self.columns, self.stride);
        (rows.as_mut_ptr(), self.stride)
    }

    /// The same to read.
    pub(crate) fn as_rows(&self) -> Rows<'_, T> {
        Rows { data: self.data, rows: self.rows, columns: self.columns, stride: self.stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Row `row` to its stride or the end of the buffer, so that padding can be cleared.
    #[inline]
    pub(crate) fn row_and_gap(&mut self, row: usize) -> &mut [T] {
        let start = row * self.stride;
        let end = (start + self.stride).min(self.data.len());
        &mut self.data[start..end]
    }

    /// Row `row`.
    #[inline]
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        &mut self.data[row * self.stride..][..self.columns]
    }

    /// Where an element is or would be.
    #[inline]
    pub(crate) fn at(&self, row: usize, column: usize) -> *const T {
        self.data.as_ptr().wrapping_add(row * self.stride + column)
    }

    /// Splits the first `count` rows off.
    pub(crate) fn take_rows(&mut self, count: usize) -> RowsMut<'a, T> {
        let count = count.min(self.rows);
        let data = std::mem::take(&mut self.data);
        let at = (count * self.stride).min(data.len());
        let (head, tail) = data.split_at_mut(at);
        self.data = tail;
        self.rows -= count;
        RowsMut { data: head, rows: count, columns: self.columns, stride: self.stride }
    }

    /// `rows×columns`.
    pub(crate) fn shape(&self) -> Extent {
        Extent { rows: self.rows, columns: self.columns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_buffers_and_overlapping_rows_are_refused() {
        let data = [0u8; 11];
        assert!(Rows::new("x", &data, 3, 3, 4).is_ok());
        let error = Rows::new("x", &data, 3, 4, 4).unwrap_err();
        assert_eq!(error.to_string(), "x of 3×4 with row stride 4 needs 12 elements but the buffer has 11");
        assert!(Rows::new("x", &data, 2, 4, 3).is_err());
        assert!(Rows::new("x", &data, usize::MAX, 4, 4).is_err());
        assert!(Rows::new("x", &data[..0], 0, 4, 4).is_ok());
    }

    #[test]
    fn taking_rows_leaves_the_rest() {
        let mut data: Vec<usize> = (0..11).collect();
        let mut rows = RowsMut::new("x", &mut data, 3, 3, 4).unwrap();
        let mut head = rows.take_rows(2);
        assert_eq!((head.rows(), rows.rows()), (2, 1));
        assert_eq!(head.row_mut(1), [4, 5, 6]);
        assert_eq!(rows.row_mut(0), [8, 9, 10]);
        assert_eq!(rows.take_rows(5).rows(), 1);
    }
}
