//! Bytes, and a file descriptor with the first of them, over a unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Room for the descriptors of one receive. The kernel closes those that do not fit.
const FDS: usize = 4;

/// Sends bytes, and `fd` with the first of them. Gives how many were sent; none of them is an error.
///
/// # Errors
/// What the socket says.
pub fn send(socket: impl AsFd, bytes: &[u8], fd: BorrowedFd<'_>) -> std::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    Ok(retry(|| sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?)
}

/// Receives bytes into `buffer`, and appends what descriptors came along to `fds` (close-on-exec). Gives how many bytes; 0 is the end.
///
/// # Errors
/// What the socket says; `WouldBlock` where it does not block and has nothing.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> std::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = retry(|| recvmsg(socket.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, flags))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came);
        }
    }
    Ok(got.bytes)
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_file_comes_through_with_its_bytes_and_is_closed_on_exec() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        assert_eq!(send(&one, b"hello", file.as_fd()).unwrap(), 5);
        let (mut buffer, mut fds) = ([0; 16], Vec::new());
        assert_eq!(receive(&other, &mut buffer, &mut fds).unwrap(), 5);
        assert_eq!((&buffer[..5], fds.len()), (&b"hello"[..], 1));
        let flags = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & nix::libc::FD_CLOEXEC, nix::libc::FD_CLOEXEC);
        let (sent, got) = (file.metadata().unwrap(), std::fs::File::from(fds.remove(0)).metadata().unwrap());
        assert_eq!((sent.dev(), sent.ino()), (got.dev(), got.ino()));
        one.write_all(b"x").unwrap();
        assert_eq!(receive(&other, &mut buffer, &mut fds).unwrap(), 1);
        assert!(fds.is_empty());
        drop(one);
        assert_eq!(receive(&other, &mut buffer, &mut fds).unwrap(), 0);
    }
}
