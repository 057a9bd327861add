//! Buffers over host memory that device and host use at the same address, and views of them.
//!
//! Kernels only enqueue work; it runs in order. A buffer is read or written by the host through [`Buffer::read`] and
//! [`Buffer::write`], which wait for the work before them. Dropping a buffer waits too, so that memory never goes away under
//! running work. Memory that other processes or buffers write too is never borrowed by the host: it is copied through its region.

use super::error::During;
use super::{Device, OpenClError};
use crate::KernelError;
use crate::view::{Extent, check};
use opencl3::command_queue::CommandQueue;
use opencl3::context::Context;
use opencl3::memory::{
    Buffer as ClBuffer, CL_MAP_READ, CL_MAP_WRITE, CL_MAP_WRITE_INVALIDATE_REGION, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE,
    CL_MEM_USE_HOST_PTR, ClMem,
};
use opencl3::types::{CL_BLOCKING, cl_mem};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use trefoil_weights::{Region, RegionAccess};

/// A context and its in-order queue on one device.
pub(super) struct Session {
    pub(super) device: Device,
    pub(super) context: Context,
    pub(super) queue: CommandQueue,
}

impl Session {
    pub(super) fn new(device: &Device) -> Result<Session, OpenClError> {
        let context = Context::from_device(&opencl3::device::Device::new(device.id())).during("create a context")?;
        // SAFETY: the device is the context's. No properties: commands run in order.
        let queue = unsafe { CommandQueue::create(&context, device.id(), 0) }.during("create a queue")?;
        Ok(Session { device: device.clone(), context, queue })
    }
}

/// Host memory that outlives the device's use of it.
///
/// # Safety
/// The bytes of [`HostMemory::bytes`] stay mapped at that address while `self` lives, and may be written where
/// [`HostMemory::is_writable`] says so. Memory that is not writable never changes; memory that is private is reached through
/// this value only.
pub unsafe trait HostMemory: Send + Sync {
    /// Address and length, bytes.
    fn bytes(&self) -> (NonNull<u8>, usize);
    /// Whether the device may write.
    fn is_writable(&self) -> bool;
    /// Whether nobody else reaches the memory, so that the host may hold references to it.
    fn is_private(&self) -> bool {
        false
    }
}

// SAFETY: a region is mapped until it is dropped, and read-only ones do not change.
unsafe impl HostMemory for Region {
    fn bytes(&self) -> (NonNull<u8>, usize) {
        (NonNull::new(self.as_ptr().cast_mut()).expect("a mapping is not at zero"), self.len())
    }

    fn is_writable(&self) -> bool {
        self.access() == RegionAccess::ReadWrite
    }
}

// SAFETY: the pointee does not move when the `Arc` does.
unsafe impl<M: HostMemory + ?Sized> HostMemory for Arc<M> {
    fn bytes(&self) -> (NonNull<u8>, usize) {
        (**self).bytes()
    }

    fn is_writable(&self) -> bool {
        (**self).is_writable()
    }
    // Not private, whatever the pointee is: there may be other pointers.
}

/// Zeroed memory aligned for every device.
struct Aligned {
    pointer: NonNull<u8>,
    layout: Layout,
}

impl Aligned {
    fn new(bytes: usize) -> Result<Aligned, KernelError> {
        /// A page: some GPUs share whole pages only.
        const ALIGNMENT: usize = 4096;
        let layout = bytes
            .max(1)
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|bytes| Layout::from_size_align(bytes, ALIGNMENT).ok())
            .ok_or_else(|| KernelError::value("buffer", "the size", bytes, "it must fit the address space"))?;
        // SAFETY: the layout has a size above zero.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Ok(Aligned { pointer, layout })
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout and freed once.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Aligned {}
// SAFETY: as above; it is only reached through `HostMemory`.
unsafe impl Sync for Aligned {}

// SAFETY: allocated until dropped, writable, and private to its buffer.
unsafe impl HostMemory for Aligned {
    fn bytes(&self) -> (NonNull<u8>, usize) {
        (self.pointer, self.layout.size())
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn is_private(&self) -> bool {
        true
    }
}

mod sealed {
    pub trait Element: Copy + Send + Sync + 'static {}
    impl Element for i8 {}
    impl Element for i32 {}
    impl Element for f32 {}
}

/// What buffers hold: `i8`, `i32`, `f32`.
pub trait Element: sealed::Element {}
impl<T: sealed::Element> Element for T {}

/// Host memory that a device uses as it lies.
pub struct Buffer<T> {
    // Fields are dropped in this order, after `drop` has waited for the queue.
    memory: Arc<ClBuffer<u8>>,
    host: Arc<dyn HostMemory>,
    session: Arc<Session>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (pointer, _) = self.host().bytes();
        formatter
            .debug_struct("Buffer")
            .field("len", &self.len)
            .field("address", &pointer)
            .field("device", &self.session.device.info().name)
            .finish_non_exhaustive()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // A failing queue has nothing left that runs.
        let _ = self.session.queue.finish();
    }
}

impl<T> Buffer<T> {
    /// The memory itself: a pointer to it is never private.
    fn host(&self) -> &dyn HostMemory {
        &*self.host
    }
}

impl<T: Element> Buffer<T> {
    pub(super) fn zeroed(session: &Arc<Session>, len: usize) -> Result<Buffer<T>, OpenClError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let mut buffer = Buffer::share(session, Arc::new(Aligned::new(bytes)?))?;
        buffer.len = len;
        Ok(buffer)
    }

    pub(super) fn copied(session: &Arc<Session>, values: &[T]) -> Result<Buffer<T>, OpenClError> {
        let mut buffer = Buffer::zeroed(session, values.len())?;
        buffer.write()?.copy_from_slice(values);
        Ok(buffer)
    }

    pub(super) fn share(session: &Arc<Session>, host: Arc<dyn HostMemory>) -> Result<Buffer<T>, OpenClError> {
        let (pointer, bytes) = host.bytes();
        let info = session.device.info();
        let refused = |reason: String| OpenClError::Share { device: info.name.clone(), bytes, reason };
        if bytes as u64 > info.largest_buffer {
            return Err(refused(format!("its largest buffer has {} bytes; use smaller regions", info.largest_buffer)));
        }
        if !pointer.addr().get().is_multiple_of(info.alignment.max(align_of::<T>())) {
            return Err(refused(format!("the address must be a multiple of {}", info.alignment)));
        }
        let access = if host.is_writable() { CL_MEM_READ_WRITE } else { CL_MEM_READ_ONLY };
        // SAFETY: the memory has `bytes` bytes and lives until after this object is released, see `Buffer`.
        let memory =
            unsafe { ClBuffer::create(&session.context, access | CL_MEM_USE_HOST_PTR, bytes, pointer.as_ptr().cast()) }
                .during("share host memory")?;
        let len = bytes / size_of::<T>();
        Ok(Buffer { memory: Arc::new(memory), host, session: session.clone(), len, elements: PhantomData })
    }

    /// The same memory as elements of another kind: codes and their scales lie in one section of an artefact, and a device should
    /// know a piece of memory once.
    ///
    /// # Errors
    /// Memory that is writable, because two views could then disagree.
    pub fn viewed_as<U: Element>(&self) -> Result<Buffer<U>, OpenClError> {
        if self.host().is_writable() {
            return Err(self.refuse("only read-only memory has several views"));
        }
        let (_, bytes) = self.host().bytes();
        Ok(Buffer {
            memory: self.memory.clone(),
            host: self.host.clone(),
            session: self.session.clone(),
            len: bytes / size_of::<U>(),
            elements: PhantomData,
        })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element in this process, which is the device's memory too.
    pub fn as_ptr(&self) -> *const T {
        self.host().bytes().0.as_ptr().cast()
    }

    /// Whether it belongs to the kernels of `session`.
    pub(super) fn is_of(&self, session: &Arc<Session>) -> bool {
        Arc::ptr_eq(&self.session, session)
    }

    pub(super) fn memory(&self) -> cl_mem {
        self.memory.get()
    }

    /// The library's object.
    pub(super) fn object(&self) -> &ClBuffer<u8> {
        &self.memory
    }

    /// Maps for the host and checks that it is the same memory, not a copy.
    fn map(&self, flags: u64) -> Result<NonNull<T>, OpenClError> {
        let mut mapped: cl_mem = std::ptr::null_mut();
        let bytes = self.len * size_of::<T>();
        // SAFETY: the range is the buffer's; the call blocks, so the memory may be used when it returns.
        unsafe {
            self.session.queue.enqueue_map_buffer(&self.memory, CL_BLOCKING, flags, 0, bytes.max(1), &mut mapped, &[])
        }
        .during("map a buffer")?;
        let (pointer, _) = self.host().bytes();
        if mapped.cast() != pointer.as_ptr() {
            return Err(self.refuse(&format!("the driver maps it at {mapped:p}, not at {pointer:p}: it keeps a copy")));
        }
        Ok(pointer.cast())
    }

    fn unmap(&self) {
        let (pointer, _) = self.host().bytes();
        // SAFETY: the guard that calls this came from `map` and is being dropped.
        let _ = unsafe { self.session.queue.enqueue_unmap_mem_object(self.memory.get(), pointer.as_ptr().cast(), &[]) };
    }

    /// References are given only to memory that nobody else changes.
    fn refuse(&self, reason: &str) -> OpenClError {
        OpenClError::Share {
            device: self.session.device.info().name.clone(),
            bytes: self.len * size_of::<T>(),
            reason: reason.to_string(),
        }
    }

    /// Waits for the work so far and reads.
    ///
    /// # Errors
    /// A driver that keeps a copy of the memory; shared memory that others may change ([`Buffer::publish`] it and copy out of the
    /// region);
    /// errors of the work before.
    pub fn read(&self) -> Result<Reading<'_, T>, OpenClError> {
        if self.host().is_writable() && !self.host().is_private() {
            return Err(self.refuse("others may change it under a reference; publish it and copy out of the region"));
        }
        self.map(CL_MAP_READ).map(|pointer| Reading { buffer: self, pointer })
    }

    /// Waits for the work so far and reads or writes.
    ///
    /// # Errors
    /// As [`Buffer::read`]; memory that is read-only.
    pub fn write(&mut self) -> Result<Writing<'_, T>, OpenClError> {
        if !self.host().is_writable() {
            return Err(self.refuse("it is read-only"));
        }
        if !self.host().is_private() {
            return Err(self.refuse("others may change it under a reference; copy into the region and refresh it"));
        }
        self.map(CL_MAP_READ | CL_MAP_WRITE).map(|pointer| Writing { buffer: self, pointer })
    }

    /// Waits for the work so far and makes what the device wrote visible in the host memory, for an engine that reads it there.
    ///
    /// # Errors
    /// A driver that keeps a copy of the memory; errors of the work before.
    pub fn publish(&self) -> Result<(), OpenClError> {
        self.map(CL_MAP_READ)?;
        self.unmap();
        self.session.queue.finish().during("publish a buffer")
    }

    /// Makes what another engine wrote in the host memory visible to the device.
    ///
    /// # Errors
    /// As [`Buffer::publish`]; memory that is read-only.
    pub fn refresh(&mut self) -> Result<(), OpenClError> {
        if !self.host().is_writable() {
            return Err(self.refuse("it is read-only"));
        }
        // Invalidating keeps a device with memory of its own from writing its old content over the new one.
        self.map(CL_MAP_WRITE_INVALIDATE_REGION)?;
        self.unmap();
        Ok(())
    }

    /// All of it as a vector.
    pub fn vector(&self) -> Vector<'_, T> {
        Vector { buffer: self, first: 0, len: self.len }
    }

    /// Elements `first .. first + len`.
    ///
    /// # Errors
    /// A range past the end.
    pub fn slice(&self, what: &'static str, first: usize, len: usize) -> Result<Vector<'_, T>, KernelError> {
        check(what, 1, len, len, self.len.saturating_sub(first))?;
        Ok(Vector { buffer: self, first, len })
    }

    /// A matrix from element `first` on; `what` names it in errors.
    ///
    /// # Errors
    /// [`KernelError::Buffer`] where the last row does not fit or rows overlap.
    pub fn rows(
        &self,
        what: &'static str,
        (first, rows, columns, stride): (usize, usize, usize, usize),
    ) -> Result<Rows<'_, T>, KernelError> {
        check(what, rows, columns, stride, self.len.saturating_sub(first))?;
        Ok(Rows { buffer: self, first, rows, columns, stride })
    }

    /// A matrix that is written, from element `first` on.
    ///
    /// # Errors
    /// As [`Buffer::rows`].
    pub fn rows_mut(
        &mut self,
        what: &'static str,
        (first, rows, columns, stride): (usize, usize, usize, usize),
    ) -> Result<RowsMut<'_, T>, KernelError> {
        check(what, rows, columns, stride, self.len.saturating_sub(first))?;
        if !self.host().is_writable() {
            return Err(KernelError::value("rows_mut", what, "read-only memory", "a destination must be writable"));
        }
        Ok(RowsMut { view: Rows { buffer: self, first, rows, columns, stride }, exclusive: PhantomData })
    }
}

/// The host reads a buffer.
#[derive(Debug)]
pub struct Reading<'b, T: Element> {
    buffer: &'b Buffer<T>,
    pointer: NonNull<T>,
}

impl<T: Element> Deref for Reading<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory has `len` elements, any bits are one; the queue wrote all that was enqueued before, and nothing
        // that writes can be enqueued while the buffer is borrowed.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.buffer.len) }
    }
}

impl<T: Element> Drop for Reading<'_, T> {
    fn drop(&mut self) {
        self.buffer.unmap();
    }
}

/// The host writes a buffer.
#[derive(Debug)]
pub struct Writing<'b, T: Element> {
    buffer: &'b mut Buffer<T>,
    pointer: NonNull<T>,
}

impl<T: Element> Deref for Writing<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as in `Reading`.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.buffer.len) }
    }
}

impl<T: Element> DerefMut for Writing<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `Reading`; nothing that reads can be enqueued either, because the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.buffer.len) }
    }
}

impl<T: Element> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        self.buffer.unmap();
    }
}

/// Elements of a buffer, for reading.
#[derive(Debug)]
pub struct Vector<'b, T = f32> {
    pub(super) buffer: &'b Buffer<T>,
    pub(super) first: usize,
    pub(super) len: usize,
}

impl<T> Clone for Vector<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Vector<'_, T> {}

/// A matrix in a buffer, for reading. Elements of row `r` are at `first + r·stride ..`.
#[derive(Debug)]
#[allow(clippy::struct_field_names, reason = "a matrix of rows has a number of rows")]
pub struct Rows<'b, T> {
    pub(super) buffer: &'b Buffer<T>,
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) stride: usize,
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

impl<T> Rows<'_, T> {
    /// `(rows, columns)`.
    pub fn size(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// For errors.
    pub(super) fn shape(&self) -> Extent {
        Extent::new(self.rows, self.columns)
    }

    /// Whether every row can be read or written up to `padded` columns.
    pub(super) fn has_room(&self, padded: usize) -> bool {
        let last = self.rows.saturating_sub(1) * self.stride + padded;
        self.rows == 0 || self.first + last <= self.buffer.len && (self.rows == 1 || self.stride >= padded)
    }
}

/// A matrix in a buffer, for writing. See [`Rows`].
#[derive(Debug)]
pub struct RowsMut<'b, T> {
    pub(super) view: Rows<'b, T>,
    /// Made from an exclusive borrow, which it keeps.
    exclusive: PhantomData<&'b mut Buffer<T>>,
}

impl<'b, T> RowsMut<'b, T> {
    /// Of scratch that the caller holds the lock of.
    pub(super) fn of_scratch(view: Rows<'b, T>) -> RowsMut<'b, T> {
        RowsMut { view, exclusive: PhantomData }
    }
}
