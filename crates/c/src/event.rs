//! A descriptor that becomes readable when something may have happened: what a loop around `epoll` sleeps on.
//!
//! The runtime tells futures when they are ready by waking them, and here waking is a write to an eventfd. So there is nothing new between the
//! agent and its peers, and nothing to pay for those who never ask for the descriptor.

use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use weft::fork::NotInherited;

/// The descriptor of one agent, once somebody has asked for it.
#[derive(Debug, Default)]
pub struct Events {
    bell: OnceLock<(Arc<Bell>, Waker)>,
    making: Mutex<()>,
}

#[derive(Debug)]
struct Bell {
    event: NotInherited<File>,
}

impl Events {
    /// The descriptor, made where there is none yet.
    pub fn descriptor(&self) -> io::Result<RawFd> {
        let _alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((bell, _)) = self.bell.get() {
            return Ok(bell.event.as_raw_fd());
        }
        let bell = Arc::new(Bell {
            event: NotInherited::open(event)?,
        });
        let waker = Waker::from(bell.clone());
        let (bell, _) = self.bell.get_or_init(|| (bell, waker));
        Ok(bell.event.as_raw_fd())
    }

    /// Makes the descriptor readable when something has ended, if there is a descriptor.
    pub fn watch(&self, under_way: impl Future) {
        if let Some((bell, _)) = self.bell.get()
            && self.look(under_way).is_some()
        {
            bell.ring();
        }
    }

    /// What is ready now. What is not makes the descriptor readable when it may be, if there is a descriptor.
    pub fn look<T>(&self, awaited: impl Future<Output = T>) -> Option<T> {
        let (_, waker) = self.bell.get()?;
        match pin!(awaited).poll(&mut Context::from_waker(waker)) {
            Poll::Ready(found) => Some(found),
            Poll::Pending => None,
        }
    }
}

impl Bell {
    fn ring(&self) {
        // It fails only where the count is at its maximum, and then it is readable already.
        let _ = (&*self.event).write(&1u64.to_ne_bytes());
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Bell>) {
        self.ring();
    }
    fn wake_by_ref(self: &Arc<Bell>) {
        self.ring();
    }
}

fn event() -> io::Result<File> {
    // SAFETY: a plain system call.
    let made = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is new, and nobody else's.
    Ok(unsafe { File::from_raw_fd(made) })
}
