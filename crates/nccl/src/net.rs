//! The net: what NCCL sends between hosts goes by channels of a Weft agent (`weft::matched`).
//!
//! One agent serves all communicators of a process. A handle, which NCCL carries to the rank that connects, holds the agent's address and a token that is good once;
//! that rank must prove Weft's secret all the same. Memory is registered once, however many communicators register it.
//!
//! NCCL asks again and again, and nothing here makes it wait: connecting and accepting give nothing until they have something, and a request is looked at by `test`.
//! Only closing and deregistering wait, until nobody touches the memory any more.

mod handle;
mod state;

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Instant;

use weft::matched::{Landing, Listener, Receiver, Request, Sender};

use crate::abi::{
    GROUPED_RECEIVES, LOG_INFO, Logger, NcclResult, Net, PTR_HOST, ProfilerCallback, PropertiesHead, PropertiesV11,
    PropertiesV12, SUBSYSTEM_INIT, VDeviceProps,
};
use crate::boundary::{Failed, guarded, log, log_to};
use handle::Handle;
use state::{Registration, State};

const NAME: &std::ffi::CStr = c"Weft";
/// What NCCL can take for the longest message.
const LONGEST_BYTES: usize = 1 << 40;

/// What NCCL has of a listener, and of the two ends of a channel.
#[derive(Debug)]
struct Listening {
    state: Arc<State>,
    listener: Listener,
    since: Instant,
}

#[derive(Debug)]
struct Sending {
    state: Arc<State>,
    sender: Sender,
}

#[derive(Debug)]
struct Receiving {
    state: Arc<State>,
    receiver: Receiver,
}

/// A request, as `test` looks at it.
#[derive(Debug)]
struct Pending {
    state: Arc<State>,
    request: Request,
    /// Counted from the first look that found it under way.
    since: Option<Instant>,
    looks: u32,
}

/// So many looks for one at the clock.
const LOOKS_PER_CLOCK: u32 = 1024;

macro_rules! table {
    ($properties:ty, $get_properties:ident) => {
        Net::<$properties> {
            name: NAME.as_ptr(),
            init,
            devices,
            get_properties: $get_properties,
            listen,
            connect,
            accept,
            reg_mr,
            reg_mr_dma_buf: None,
            dereg_mr,
            isend,
            irecv,
            iflush,
            test,
            close_send,
            close_recv,
            close_listen,
            get_device_mr: None,
            irecv_consumed: None,
            make_v_device: None,
            finalize,
            set_net_attr: None,
        }
    };
}

/// What NCCL 2.28 and 2.29 look for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v11: Net<PropertiesV11> = table!(PropertiesV11, get_properties_v11);

/// What NCCL 2.30 and later look for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v12: Net<PropertiesV12> = table!(PropertiesV12, get_properties_v12);

/// Gives something to NCCL, which gives the pointer back to [`reclaim`].
fn hand_over<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(value)).cast()
}

/// # Safety
/// The pointer is null, or came from [`hand_over`] of this type and was not given back.
unsafe fn reclaim<T>(pointer: *mut c_void) -> Option<Box<T>> {
    // SAFETY: as the caller says.
    (!pointer.is_null()).then(|| unsafe { Box::from_raw(pointer.cast()) })
}

/// # Safety
/// As for [`reclaim`], and nobody gives it back meanwhile.
unsafe fn behind<'a, T>(pointer: *mut c_void, what: &str) -> Result<&'a T, Failed> {
    // SAFETY: as the caller says.
    let found = unsafe { pointer.cast::<T>().as_ref() };
    found.ok_or_else(|| Failed::argument(format!("no {what} was given")))
}

/// # Safety
/// The pointer is null or may be written to.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Failed> {
    if to.is_null() {
        return Err(Failed::argument("there is nowhere to put the answer"));
    }
    // SAFETY: as the caller says; what was there needs no drop, for all that is put are numbers and pointers.
    unsafe { to.write(value) };
    Ok(())
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _comm: u64,
    _config: *mut c_void,
    logger: Option<Logger>,
    _profiler: Option<ProfilerCallback>,
) -> NcclResult {
    log_to(logger);
    guarded("starting the net", || {
        let state = State::shared()?;
        let text = format!("weft: the net is up at {}", state.agent().address());
        log(LOG_INFO, SUBSYSTEM_INIT, &text);
        // SAFETY: NCCL gives the place for its context.
        unsafe { put(context, hand_over(state)) }
    })
}

unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guarded("counting devices", || {
        // SAFETY: NCCL gives the place for the number.
        unsafe { put(count, 1) }
    })
}

fn head() -> Result<PropertiesHead, Failed> {
    Ok(PropertiesHead {
        name: NAME.as_ptr().cast::<c_char>(),
        pci_path: std::ptr::null(),
        guid: u64::from_le_bytes(*b"weft-net"),
        ptr_support: PTR_HOST,
        reg_is_global: 1,
        force_flush: 0,
        speed: crate::options::Options::of_process()?.speed,
        port: 0,
        latency: 0.0,
        max_comms: 1 << 16,
        max_recvs: GROUPED_RECEIVES as c_int,
        net_device_type: 0,
        net_device_version: 0,
    })
}

fn vdevice<const DEVICES: usize>(device: c_int) -> VDeviceProps<DEVICES> {
    let mut devs = [0; DEVICES];
    devs[0] = device;
    VDeviceProps { ndevs: 1, devs }
}

unsafe extern "C" fn get_properties_v11(device: c_int, properties: *mut PropertiesV11) -> NcclResult {
    guarded("telling properties", || {
        let told = PropertiesV11 {
            head: head()?,
            vdevice: vdevice(device),
            max_p2p_bytes: LONGEST_BYTES,
            max_coll_bytes: LONGEST_BYTES,
            max_multi_request_size: 1,
        };
        // SAFETY: NCCL gives the place for the properties of this version.
        unsafe { put(properties, told) }
    })
}

unsafe extern "C" fn get_properties_v12(device: c_int, properties: *mut PropertiesV12) -> NcclResult {
    guarded("telling properties", || {
        let told = PropertiesV12 {
            head: head()?,
            vdevice: vdevice(device),
            max_p2p_bytes: LONGEST_BYTES,
            max_coll_bytes: LONGEST_BYTES,
            max_multi_request_size: 1,
            rail_id: -1,
            plane_id: -1,
        };
        // SAFETY: NCCL gives the place for the properties of this version.
        unsafe { put(properties, told) }
    })
}

unsafe extern "C" fn listen(
    context: *mut c_void,
    _device: c_int,
    handle: *mut c_void,
    listening: *mut *mut c_void,
) -> NcclResult {
    guarded("listening", || {
        // SAFETY: the context is what `init` handed over.
        let state: &Arc<State> = unsafe { behind(context, "context") }?;
        let listener = state.channels().listen()?;
        let told = Handle::new(&state.agent().address(), listener.token())?;
        // SAFETY: NCCL gives 128 bytes for a handle.
        unsafe { put(handle.cast::<Handle>(), told) }?;
        let handed = hand_over(Listening {
            state: state.clone(),
            listener,
            since: Instant::now(),
        });
        // SAFETY: NCCL gives the place for the listener.
        unsafe { put(listening, handed) }
    })
}

unsafe extern "C" fn connect(
    context: *mut c_void,
    _device: c_int,
    handle: *mut c_void,
    sending: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> NcclResult {
    guarded("connecting", || {
        // SAFETY: NCCL gives the place for the channel, and the context that `init` handed over.
        let state: &Arc<State> = unsafe {
            put(sending, std::ptr::null_mut())?;
            behind(context, "context")?
        };
        // SAFETY: a handle is 128 bytes which NCCL keeps for as long as it asks, and lets us write to, as its own nets do.
        let Some(handle) = (unsafe { handle.cast::<Handle>().as_mut() }) else {
            return Err(Failed::argument("no handle was given"));
        };
        let Some(sender) = state.connect(handle)? else {
            return Ok(());
        };
        let state = state.clone();
        // SAFETY: as above.
        unsafe { put(sending, hand_over(Sending { state, sender })) }
    })
}

unsafe extern "C" fn accept(
    listening: *mut c_void,
    receiving: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> NcclResult {
    guarded("accepting", || {
        // SAFETY: NCCL gives the place for the channel, and what `listen` handed over.
        let listening: &Listening = unsafe {
            put(receiving, std::ptr::null_mut())?;
            behind(listening, "listener")?
        };
        let state = listening.state.clone();
        match listening.listener.accept()? {
            // SAFETY: as above.
            Some(receiver) => unsafe { put(receiving, hand_over(Receiving { state, receiver })) },
            None if listening.since.elapsed() > state.options().wait => Err(late("nobody has connected")),
            None => Ok(()),
        }
    })
}

fn late(what: &str) -> Failed {
    Failed::new(NcclResult::REMOTE_ERROR, format!("{what} within NCCL_WEFT_WAIT"))
}

/// NCCL registers with either end of a channel; both belong to the one agent.
unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    registration: *mut *mut c_void,
) -> NcclResult {
    guarded("registering memory", || {
        if kind != PTR_HOST {
            return Err(Failed::argument("only host memory can be registered"));
        }
        // SAFETY: both kinds of channel ends begin with the state, as `state_of` says.
        let state = unsafe { state_of(comm) }?;
        // SAFETY: NCCL owns the memory, and keeps it until it has deregistered it.
        let registered = unsafe { state.register(data.cast(), size) }?;
        // SAFETY: NCCL gives the place for the registration.
        unsafe { put(registration, hand_over(registered)) }
    })
}

/// # Safety
/// The pointer is null or that of a channel end that `connect` or `accept` handed over.
unsafe fn state_of(comm: *mut c_void) -> Result<Arc<State>, Failed> {
    if comm.is_null() {
        return Err(Failed::argument("no channel was given"));
    }
    // All registrations of a process are with its one agent, whichever end this is.
    State::shared()
}

unsafe extern "C" fn dereg_mr(_comm: *mut c_void, registration: *mut c_void) -> NcclResult {
    guarded("deregistering memory", || {
        // SAFETY: it is what `reg_mr` handed over, and NCCL gives it back once.
        match unsafe { reclaim::<Registration>(registration) } {
            Some(registration) => (*registration).end(),
            None => Ok(()),
        }
    })
}

unsafe extern "C" fn isend(
    sending: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    registration: *mut c_void,
    _profiled: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guarded("sending", || {
        // SAFETY: NCCL gives what `connect` and `reg_mr` handed over.
        let (sending, registration) = unsafe {
            put(request, std::ptr::null_mut())?;
            (
                behind::<Sending>(sending, "channel")?,
                registration.cast::<Registration>().as_ref(),
            )
        };
        let (memory, offset) = sending.state.place(registration, data as usize, size)?;
        let sent = sending.sender.send(&memory, offset, size as u64, tag)?;
        // SAFETY: NCCL gives the place for the request.
        unsafe { put(request, pending(&sending.state, sent)) }
    })
}

fn pending(state: &Arc<State>, request: Request) -> *mut c_void {
    hand_over(Pending {
        state: state.clone(),
        request,
        since: None,
        looks: 0,
    })
}

unsafe extern "C" fn irecv(
    receiving: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    registrations: *mut *mut c_void,
    _profiled: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guarded("receiving", || {
        // SAFETY: NCCL gives the place for the request, and what `accept` handed over.
        let receiving: &Receiving = unsafe {
            put(request, std::ptr::null_mut())?;
            behind(receiving, "channel")?
        };
        let count = usize::try_from(count).unwrap_or(0);
        if count == 0 || count > GROUPED_RECEIVES {
            return Err(Failed::argument(format!("a group of {count} receives")));
        }
        if data.is_null() || sizes.is_null() || tags.is_null() || registrations.is_null() {
            return Err(Failed::argument("a list is missing"));
        }
        let mut places = Vec::with_capacity(count);
        for nth in 0..count {
            // SAFETY: each list has as many entries as NCCL says, and the registrations are what `reg_mr` handed over.
            let (at, size, tag, registration) = unsafe {
                (
                    *data.add(nth) as usize,
                    *sizes.add(nth),
                    *tags.add(nth),
                    (*registrations.add(nth)).cast::<Registration>().as_ref(),
                )
            };
            let (memory, offset) = receiving.state.place(registration, at, size)?;
            places.push((memory, offset, size as u64, tag));
        }
        let landings: Vec<Landing<'_>> = places
            .iter()
            .map(|(memory, offset, len, tag)| Landing {
                memory,
                offset: *offset,
                len: *len,
                tag: *tag,
            })
            .collect();
        let posted = receiving.receiver.receive(&landings)?;
        // SAFETY: NCCL gives the place for the request.
        unsafe { put(request, pending(&receiving.state, posted)) }
    })
}

/// Host memory needs no flush.
unsafe extern "C" fn iflush(
    _receiving: *mut c_void,
    _count: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _registrations: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guarded("flushing", || {
        // SAFETY: NCCL gives the place for the request.
        unsafe { put(request, std::ptr::null_mut()) }
    })
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> NcclResult {
    guarded("a message", || {
        // SAFETY: NCCL gives the place for the answer, and what `isend` or `irecv` handed over; one thread at a time looks at a request.
        let pending = unsafe {
            put(done, 0)?;
            request.cast::<Pending>().as_mut()
        };
        let pending = pending.ok_or_else(|| Failed::argument("no request was given"))?;
        match pending.request.poll() {
            None => return pending.keep_waiting(),
            Some(Err(error)) => return Err(error.into()),
            Some(Ok(lens)) if !sizes.is_null() => {
                for (nth, len) in lens.iter().enumerate() {
                    // SAFETY: NCCL gives a place for each message of the request.
                    unsafe { sizes.add(nth).write(c_int::try_from(*len).unwrap_or(c_int::MAX)) };
                }
            }
            Some(Ok(_)) => {}
        }
        // SAFETY: NCCL forgets a request that is done, so nobody else has it from now on.
        drop(unsafe { reclaim::<Pending>(request) });
        // SAFETY: as above.
        unsafe { put(done, 1) }
    })
}

impl Pending {
    fn keep_waiting(&mut self) -> Result<(), Failed> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks % LOOKS_PER_CLOCK == 1 {
            let since = self.since.get_or_insert_with(Instant::now);
            if since.elapsed() > self.state.options().wait {
                return Err(late("a message has not met its counterpart"));
            }
        }
        Ok(())
    }
}

unsafe extern "C" fn close_send(sending: *mut c_void) -> NcclResult {
    guarded("closing", || {
        // SAFETY: it is what `connect` handed over, and NCCL gives it back once.
        drop(unsafe { reclaim::<Sending>(sending) });
        Ok(())
    })
}

unsafe extern "C" fn close_recv(receiving: *mut c_void) -> NcclResult {
    guarded("closing", || {
        // SAFETY: it is what `accept` handed over, and NCCL gives it back once.
        drop(unsafe { reclaim::<Receiving>(receiving) });
        Ok(())
    })
}

unsafe extern "C" fn close_listen(listening: *mut c_void) -> NcclResult {
    guarded("closing", || {
        // SAFETY: it is what `listen` handed over, and NCCL gives it back once.
        drop(unsafe { reclaim::<Listening>(listening) });
        Ok(())
    })
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guarded("ending the net", || {
        // SAFETY: it is what `init` handed over, and NCCL gives it back once.
        drop(unsafe { reclaim::<Arc<State>>(context) });
        Ok(())
    })
}
