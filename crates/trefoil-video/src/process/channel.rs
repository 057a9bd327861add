//! Messages over a stream socket: a length, then JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

/// Largest message: scales of a few hundred blocks are far below it.
const MAX_MESSAGE: u32 = 8 << 20;

/// Sends a message.
pub(super) fn send(mut socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).ok().filter(|&length| length <= MAX_MESSAGE);
    let length = length.ok_or_else(|| io::Error::other(format!("a message of {} bytes is too long", text.len())))?;
    socket.write_all(&length.to_le_bytes())?;
    socket.write_all(&text)
}

/// Receives a message; [`io::ErrorKind::UnexpectedEof`] where the other side is gone.
pub(super) fn receive<Message: DeserializeOwned>(mut socket: &UnixStream) -> io::Result<Message> {
    let mut length = [0u8; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Err(unreadable(format!("a message of {length} bytes is no message of this program")));
    }
    let mut text = vec![0u8; length as usize];
    socket.read_exact(&mut text)?;
    serde_json::from_slice(&text).map_err(|error| unreadable(format!("a message cannot be read ({error})")))
}

fn unreadable(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// What to say where somebody else speaks on the socket; `None` where nobody does any more.
pub(super) fn foreign(error: &io::Error) -> Option<String> {
    let is_foreign = error.kind() == io::ErrorKind::InvalidData;
    is_foreign.then(|| format!("somebody else than its owner speaks on its socket: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_and_a_closed_end_is_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours, &vec![1u32, 2, 3]).unwrap();
        assert_eq!(receive::<Vec<u32>>(&theirs).unwrap(), [1, 2, 3]);
        (&ours).write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(receive::<Vec<u32>>(&theirs).unwrap_err().to_string().contains("no message of this program"));
        send(&ours, &"words").unwrap();
        let error = receive::<Vec<u32>>(&theirs).unwrap_err();
        assert!(foreign(&error).unwrap().contains("speaks on its socket: a message cannot be read"));
        drop(ours);
        assert_eq!(receive::<Vec<u32>>(&theirs).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
