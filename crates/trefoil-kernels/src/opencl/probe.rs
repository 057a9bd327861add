//! `opencl:N` as an engine of `trefoil probe`: can this device use a region of that size as it lies?

use super::buffer::{Buffer, Session};
use super::error::During;
use super::{Device, OpenClError};
use opencl3::types::CL_BLOCKING;
use std::sync::Arc;
use trefoil_weights::probe::{MARK_STRIDE, MapProbe, Mapped, check_marks};
use trefoil_weights::{Region, WeightsError};

/// A device as an engine that maps regions.
#[derive(Debug, Clone)]
pub struct DeviceProbe {
    index: usize,
    name: String,
}

impl DeviceProbe {
    /// One for every device that can run the kernels; none where there is no library or no device.
    pub fn all() -> Vec<DeviceProbe> {
        let devices = Device::list().unwrap_or_default();
        let fit = devices.into_iter().filter(|device| device.unfit.is_none());
        fit.map(|device| DeviceProbe { index: device.index, name: format!("opencl:{}", device.index) }).collect()
    }

    /// Shares the region, checks the marks through the driver's mapping, and has the device read every one of them.
    fn share(&self, region: &Region) -> Result<Buffer<i8>, OpenClError> {
        let session = Arc::new(Session::new(&Device::open(self.index, None)?)?);
        let twin = twin_of(region).map_err(|error| OpenClError::Share {
            device: self.name.clone(),
            bytes: region.len(),
            reason: error.to_string(),
        })?;
        let buffer: Buffer<i8> = Buffer::share(&session, Arc::new(twin))?;
        {
            let mapped = buffer.read()?;
            let bytes = trefoil_weights::tile::code_bytes(&mapped);
            let differs = |reason| OpenClError::Share { device: self.name.clone(), bytes: region.len(), reason };
            check_marks(bytes).map_err(differs)?;
            for (at, &want) in bytes.iter().enumerate().step_by(MARK_STRIDE) {
                let mut read = [0u8];
                // SAFETY: one byte inside the buffer; the call blocks until it is there.
                unsafe { session.queue.enqueue_read_buffer(buffer.object(), CL_BLOCKING, at, &mut read, &[]) }
                    .during("read a region")?;
                if read[0] != want {
                    return Err(differs(format!("the device reads {} at byte {at}, not {want}", read[0])));
                }
            }
        }
        Ok(buffer)
    }
}

/// The same memory, mapped again.
fn twin_of(region: &Region) -> Result<Region, WeightsError> {
    let descriptor = region
        .descriptor()
        .try_clone_to_owned()
        .map_err(|error| WeightsError::RegionAccess { block: region.block(), reason: error.to_string() })?;
    Region::from_descriptor(descriptor, region.block(), region.kind(), region.access(), region.offset(), region.len())
}

impl MapProbe for DeviceProbe {
    fn name(&self) -> &str {
        &self.name
    }

    fn try_map(&self, region: &Region) -> Result<Mapped, String> {
        self.share(region).map(|buffer| Box::new(buffer) as Mapped).map_err(|error| error.to_string())
    }
}
