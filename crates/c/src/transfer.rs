//! `weft_transfer` and `weft_prepared`.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use weft::{Direction, Error, Prepared, Summary, Transfer, TransferBuilder};

use crate::arguments::{OutStruct, Plain, duration, duration_if_any, list, one_of, structure_or_default};
use crate::boundary::{Handle, Object, free, handle_out, on};
use crate::event::Events;
use crate::failure::Failed;
use crate::peer::{PeerHandle, PeerObject};
use crate::spans::{LegOfTransfer, legs};
use crate::status::Status;

#[derive(Debug)]
pub struct TransferObject {
    transfer: Transfer,
}

impl Object for TransferObject {
    const NAME: &'static str = "transfer";
    const MARK: u64 = 0x7765_6674_7472_616e;
}

pub type TransferHandle = Handle<TransferObject>;

#[derive(Debug)]
pub struct PreparedObject {
    prepared: Prepared,
    events: Arc<Events>,
}

impl Object for PreparedObject {
    const NAME: &'static str = "prepared transfer";
    const MARK: u64 = 0x7765_6674_7072_6570;
}

pub type PreparedHandle = Handle<PreparedObject>;

/// A `weft_direction`, as C hands it in: any number.
pub type DirectionNumber = i32;
/// A `weft_switch`, likewise.
pub type SwitchNumber = i32;

/// In the order of the header.
pub const DIRECTIONS: [Direction; 2] = [Direction::Read, Direction::Write];
/// In the order of the header: what the agent's settings say, on, off.
const SWITCHES: [Option<bool>; 3] = [None, Some(true), Some(false)];

/// `weft_transfer_options`.
#[derive(Debug)]
#[repr(C)]
pub struct TransferOptions {
    pub size: usize,
    pub deadline_ns: u64,
    pub notification: *const c_void,
    pub notification_length: usize,
    pub checksum: SwitchNumber,
}

// SAFETY: numbers and a raw pointer, for all of which zero is a value.
unsafe impl Plain for TransferOptions {
    const FIRST_SIZE: usize = 40;
}

/// `weft_summary`.
#[derive(Debug)]
#[repr(C)]
pub struct SummaryOfTransfer {
    pub size: usize,
    pub bytes: u64,
    pub duration_ns: u64,
    pub parts: u32,
    pub retries: u32,
    pub transport: [c_char; 32],
}

// SAFETY: numbers.
unsafe impl Plain for SummaryOfTransfer {
    const FIRST_SIZE: usize = 64;
}

impl From<Summary> for SummaryOfTransfer {
    fn from(summary: Summary) -> SummaryOfTransfer {
        let mut transport = [0; 32];
        // The last one stays zero.
        for (to, from) in transport[..31].iter_mut().zip(summary.transport().bytes()) {
            *to = from as c_char;
        }
        SummaryOfTransfer {
            size: size_of::<SummaryOfTransfer>(),
            bytes: summary.bytes,
            duration_ns: summary.duration().as_ns(),
            parts: summary.parts,
            retries: summary.retries,
            transport,
        }
    }
}

/// # Safety
/// So many legs, and a structure or null.
unsafe fn prepare(
    peer: &PeerObject,
    direction: Direction,
    first: *const LegOfTransfer,
    count: usize,
    options: *const TransferOptions,
) -> Result<PreparedObject, Failed> {
    // SAFETY: as the caller says.
    let (legs, options) = unsafe { (legs(first, count)?, structure_or_default(options, "options")?) };
    let mut transfer: TransferBuilder<'_> = peer.peer.transfer(direction);
    for leg in legs {
        transfer = match leg.spans {
            Some((here, there)) => transfer.leg(leg.local, here, leg.remote, there),
            None => transfer.whole_leg(leg.local, leg.remote),
        };
    }
    if let Some(deadline) = duration_if_any(options.deadline_ns) {
        transfer = transfer.deadline(deadline);
    }
    if let Some(on) = one_of(&SWITCHES, options.checksum, "switch")? {
        transfer = transfer.checksum(on);
    }
    if !options.notification.is_null() {
        let length = options.notification_length;
        // SAFETY: as the header says, so many bytes are there.
        transfer = transfer.notify(unsafe { list(options.notification.cast(), length, "notification") }?);
    } else if options.notification_length > 0 {
        return Err(Failed::invalid("notification is null, and has a length"));
    }
    Ok(PreparedObject {
        prepared: transfer.prepare()?,
        events: peer.events.clone(),
    })
}

impl PreparedObject {
    fn post(&self) -> Result<TransferObject, Failed> {
        let transfer = self.prepared.post()?;
        self.events.watch(transfer.clone());
        Ok(TransferObject { transfer })
    }
}

/// # Safety
/// A handle, so many legs, a structure or null, and a place for a handle.
unsafe fn post(
    peer: *const PeerHandle,
    direction: Direction,
    first: *const LegOfTransfer,
    count: usize,
    options: *const TransferOptions,
    transfer: *mut *mut TransferHandle,
) -> Status {
    // SAFETY: as the caller says.
    unsafe {
        on(peer, |peer| {
            let out = handle_out(transfer, "transfer")?;
            out.hand_out(prepare(peer, direction, first, count, options)?.post()?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_read(
    peer: *mut PeerHandle,
    legs: *const LegOfTransfer,
    leg_count: usize,
    options: *const TransferOptions,
    transfer: *mut *mut TransferHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe { post(peer, Direction::Read, legs, leg_count, options, transfer) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_write(
    peer: *mut PeerHandle,
    legs: *const LegOfTransfer,
    leg_count: usize,
    options: *const TransferOptions,
    transfer: *mut *mut TransferHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe { post(peer, Direction::Write, legs, leg_count, options, transfer) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_prepare(
    peer: *mut PeerHandle,
    direction: DirectionNumber,
    legs: *const LegOfTransfer,
    leg_count: usize,
    options: *const TransferOptions,
    prepared: *mut *mut PreparedHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        on(peer, |peer| {
            let out = handle_out(prepared, "prepared")?;
            let direction = one_of(&DIRECTIONS, direction, "direction")?;
            out.hand_out(prepare(peer, direction, legs, leg_count, options)?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_prepared_post(prepared: *mut PreparedHandle, transfer: *mut *mut TransferHandle) -> Status {
    // SAFETY: as the header says.
    unsafe {
        on(prepared, |prepared| {
            let out = handle_out(transfer, "transfer")?;
            out.hand_out(prepared.post()?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_prepared_free(prepared: *mut PreparedHandle) {
    // SAFETY: as the header says.
    unsafe { free(prepared) }
}

/// Asks a transfer for its end.
///
/// # Safety
/// A handle, and a structure or null.
unsafe fn end(
    transfer: *const TransferHandle,
    summary: *mut SummaryOfTransfer,
    ended: impl FnOnce(&Transfer) -> Option<Result<Summary, weft::Error>>,
) -> Status {
    // SAFETY: as the caller says.
    unsafe {
        on(transfer, |object| {
            let out = match summary.is_null() {
                true => None,
                false => Some(OutStruct::new(summary, "summary")?),
            };
            let Some(ended) = ended(&object.transfer) else {
                return Ok(Status::Pending);
            };
            let summary = ended?;
            if let Some(out) = out {
                out.put(summary.into());
            }
            Ok(Status::Ok)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_transfer_poll(transfer: *mut TransferHandle, summary: *mut SummaryOfTransfer) -> Status {
    // SAFETY: as the header says.
    unsafe { end(transfer, summary, Transfer::poll) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_transfer_wait(
    transfer: *mut TransferHandle,
    timeout_ns: u64,
    summary: *mut SummaryOfTransfer,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        end(transfer, summary, |transfer| match timeout_ns {
            u64::MAX => Some(transfer.wait()),
            _ => transfer.wait_for(duration(timeout_ns)),
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_transfer_cancel(transfer: *mut TransferHandle) -> Status {
    // SAFETY: as the header says.
    unsafe {
        on(transfer, |object| {
            object.transfer.cancel();
            match object.transfer.wait() {
                // Whether anything is still under way is not known then.
                Err(error @ (Error::Stopped | Error::Forked(_))) => Err(error.into()),
                // However else it ends, it ends.
                _ => Ok(()),
            }
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_transfer_free(transfer: *mut TransferHandle) {
    // SAFETY: as the header says.
    unsafe { free(transfer) }
}
