//! Fixed-size messages with descriptors and one deadline over a stream socket.

use super::{BATCH, protocol};
use crate::WeightsError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// One exchange over a socket. All calls together take at most the timeout.
pub(super) struct Wire<'a> {
    socket: BorrowedFd<'a>,
    started: Instant,
    timeout: Duration,
}

impl<'a> Wire<'a> {
    pub fn new(socket: BorrowedFd<'a>, timeout: Duration) -> Wire<'a> {
        Wire { socket, started: Instant::now(), timeout }
    }

    /// Sends all bytes, with the descriptors on the first of them.
    pub fn send(&self, step: &'static str, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), WeightsError> {
        debug_assert!(descriptors.len() <= BATCH, "a batch of descriptors");
        let mut sent = 0;
        while sent < bytes.len() {
            self.wait(step, PollFlags::OUT)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(protocol(step, format!("{} descriptors do not fit one message", descriptors.len())));
            }
            let part = [IoSlice::new(&bytes[sent..])];
            match sendmsg(self.socket, &part, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => sent += count,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(WeightsError::PeerClosed { while_doing: step }),
                Err(error) => return Err(WeightsError::Socket { while_doing: step, source: error.into() }),
            }
        }
        Ok(())
    }

    /// Receives a message without descriptors.
    pub fn receive<const LEN: usize>(&self, step: &'static str) -> Result<[u8; LEN], WeightsError> {
        let mut bytes = [0u8; LEN];
        self.receive_with_descriptors(step, &mut bytes, 0)?;
        Ok(bytes)
    }

    /// Fills `bytes` and returns exactly `expected` descriptors.
    pub fn receive_with_descriptors(
        &self,
        step: &'static str,
        bytes: &mut [u8],
        expected: usize,
    ) -> Result<Vec<OwnedFd>, WeightsError> {
        let mut descriptors = Vec::new();
        let mut filled = 0;
        while filled < bytes.len() {
            self.wait(step, PollFlags::IN)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut bytes[filled..])];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let message = match recvmsg(self.socket, &mut part, &mut control, flags) {
                Ok(message) => message,
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(Errno::CONNRESET) => return Err(WeightsError::PeerClosed { while_doing: step }),
                Err(error) => return Err(WeightsError::Socket { while_doing: step, source: error.into() }),
            };
            for ancillary in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = ancillary {
                    descriptors.extend(received);
                }
            }
            if message.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > expected {
                let reason = format!(
                    "it sent more than the {expected} descriptors expected, or this process has no room for them"
                );
                return Err(protocol(step, reason));
            }
            if message.bytes == 0 {
                return Err(WeightsError::PeerClosed { while_doing: step });
            }
            filled += message.bytes;
        }
        if descriptors.len() != expected {
            return Err(protocol(step, format!("it sent {} descriptors where {expected} belong", descriptors.len())));
        }
        Ok(descriptors)
    }

    /// Waits until the socket is ready or the deadline of the whole exchange has passed.
    fn wait(&self, step: &'static str, events: PollFlags) -> Result<(), WeightsError> {
        loop {
            let Some(left) = self.timeout.checked_sub(self.started.elapsed()) else {
                return Err(WeightsError::PeerTimeout {
                    while_doing: step,
                    waited_ms: self.timeout.as_millis() as u64,
                });
            };
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.socket, events)], Some(&left)) {
                Ok(0) | Err(Errno::INTR) => {}
                // A hang-up is reported by the call that follows, after what was sent before it has been read.
                Ok(_) => return Ok(()),
                Err(error) => return Err(WeightsError::Socket { while_doing: step, source: error.into() }),
            }
        }
    }
}
