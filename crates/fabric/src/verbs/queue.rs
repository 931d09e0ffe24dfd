//! Safe owners of the queues on a device: completions, shared receives, queue pairs, and where datagrams go.
//!
//! Each keeps alive what it was made from, so that they end in the order that the library asks for.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use weft_sys::verbs as sys;

use super::address::Doorstep;
use super::device::{Device, ProtectionDomain, set_nonblocking};
use super::introduction::QueueEnd;
use super::rail::Rail;

/// Where completions come, and the descriptor that tells of them.
pub(super) struct CompletionQueue {
    queue: NonNull<sys::ibv_cq>,
    channel: NonNull<sys::ibv_comp_channel>,
    device: Arc<Device>,
}

// SAFETY: the library guards a completion queue with locks of its own.
unsafe impl Send for CompletionQueue {}
// SAFETY: those locks order the calls of several threads on one completion queue.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    pub(super) fn new(device: &Arc<Device>, entries: u32) -> io::Result<CompletionQueue> {
        let raw = device.library().raw();
        // SAFETY: the context is open.
        let channel = unsafe { (raw.ibv_create_comp_channel)(device.raw()) };
        let channel = NonNull::new(channel).ok_or_else(io::Error::last_os_error)?;
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: context and channel are live; no vector but the first is asked for, which every device has.
        let queue = unsafe { (raw.ibv_create_cq)(device.raw(), entries, ptr::null_mut(), channel.as_ptr(), 0) };
        let Some(queue) = NonNull::new(queue) else {
            let error = io::Error::last_os_error();
            // SAFETY: nothing was made on the channel.
            unsafe { (raw.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let made = CompletionQueue {
            queue,
            channel,
            device: Arc::clone(device),
        };
        set_nonblocking(made.channel())?;
        Ok(made)
    }

    /// Readable after a completion has come to an armed queue.
    pub(super) fn channel(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live, and its descriptor open, as long as this value.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Takes completions, and returns how many there were.
    pub(super) fn poll(&self, into: &mut [sys::ibv_wc]) -> usize {
        // SAFETY: the queue is live.
        let taken = unsafe { sys::ibv_poll_cq(self.queue.as_ptr(), into) };
        // A queue that cannot be polled any more says so by an event of the device as well.
        usize::try_from(taken).unwrap_or(0)
    }

    /// Asks to be told of the next completion.
    pub(super) fn arm(&self) {
        // SAFETY: the queue is live. Where it fails the device is gone, of which an event tells.
        unsafe { sys::ibv_req_notify_cq(self.queue.as_ptr(), false) };
    }

    /// Takes what the channel has told; returns how often it has.
    pub(super) fn acknowledge(&self) -> u32 {
        let raw = self.device.library().raw();
        let mut events = 0;
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live and does not block.
        while unsafe { (raw.ibv_get_cq_event)(self.channel.as_ptr(), &mut queue, &mut context) } == 0 {
            events += 1;
        }
        if events > 0 {
            // SAFETY: as many events of this queue, the only one of the channel, have been taken.
            unsafe { (raw.ibv_ack_cq_events)(self.queue.as_ptr(), events) };
        }
        events
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({})", self.device.name())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let raw = self.device.library().raw();
        // SAFETY: every queue that completes here holds this value, so none is left; all events have been acknowledged.
        unsafe {
            (raw.ibv_destroy_cq)(self.queue.as_ptr());
            (raw.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// Receive buffers that all paths of a rail share.
pub(super) struct ReceiveQueue {
    queue: NonNull<sys::ibv_srq>,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: the library guards a receive queue with locks of its own.
unsafe impl Send for ReceiveQueue {}
// SAFETY: those locks order the calls of several threads on one receive queue.
unsafe impl Sync for ReceiveQueue {}

impl ReceiveQueue {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, entries: u32) -> io::Result<ReceiveQueue> {
        let mut attributes = sys::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: sys::ibv_srq_attr {
                max_wr: entries,
                max_sge: 1,
                srq_limit: 0,
            },
        };
        // SAFETY: the domain is live.
        let queue = unsafe { (domain.device().library().raw().ibv_create_srq)(domain.raw(), &mut attributes) };
        Ok(ReceiveQueue {
            queue: NonNull::new(queue).ok_or_else(io::Error::last_os_error)?,
            domain: Arc::clone(domain),
        })
    }

    /// Offers buffers to the device.
    ///
    /// # Safety
    /// The pieces name registered memory that nobody reads or writes until it comes back with a completion, or the queue has ended.
    pub(super) unsafe fn offer(&self, buffers: impl Iterator<Item = (u64, sys::ibv_sge)>) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            offer(buffers, |request, refused| {
                sys::ibv_post_srq_recv(self.queue.as_ptr(), request, refused)
            })
        }
    }
}

impl fmt::Debug for ReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiveQueue({})", self.domain.device().name())
    }
}

impl Drop for ReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: every queue pair that receives from it holds this value, so none is left.
        unsafe { (self.domain.device().library().raw().ibv_destroy_srq)(self.queue.as_ptr()) };
    }
}

/// What a queue pair can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueSize {
    pub sends: u32,
    /// Without a shared receive queue.
    pub receives: u32,
    pub pieces: u32,
    pub inline_bytes: u32,
}

/// A queue pair: reliable, one end of a path; or unreliable, for introductions.
pub(super) struct QueuePair {
    pair: NonNull<sys::ibv_qp>,
    domain: Arc<ProtectionDomain>,
    _receives: Option<Arc<ReceiveQueue>>,
    _completions: Arc<CompletionQueue>,
    inline_bytes: u32,
}

// SAFETY: the library guards a queue pair with locks of its own.
unsafe impl Send for QueuePair {}
// SAFETY: those locks order the calls of several threads on one queue pair.
unsafe impl Sync for QueuePair {}

/// How a connection is made: what both ends agreed on, and what this one was told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Connecting {
    pub end: QueueEnd,
    /// The number of the first packet that this end sends.
    pub psn: u32,
    pub mtu: u8,
    /// Reads and atomics that this end answers at a time, and that it asks for.
    pub reads_here: u8,
    pub reads_there: u8,
    pub traffic_class: u8,
    pub service_level: u8,
    pub timeout_code: u8,
    pub retries: u8,
}

/// How long a peer waits before it sends again what found no buffer: 0.64 ms. Honest peers never do.
const RNR_TIMER: u8 = 12;
/// How often it does: for ever. Buffers are shared by all paths, so that one that finds none need not be at fault; who waits in vain
/// gives up at a deadline.
const RNR_RETRIES: u8 = 7;

impl QueuePair {
    /// Makes a queue pair with as much room for inline bytes as asked for, or else as the device has.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        receives: Option<&Arc<ReceiveQueue>>,
        mut size: QueueSize,
    ) -> io::Result<QueuePair> {
        loop {
            let mut attributes = sys::ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: completions.queue.as_ptr(),
                recv_cq: completions.queue.as_ptr(),
                srq: receives.map_or(ptr::null_mut(), |receives| receives.queue.as_ptr()),
                cap: sys::ibv_qp_cap {
                    max_send_wr: size.sends,
                    max_recv_wr: if receives.is_some() { 0 } else { size.receives },
                    max_send_sge: size.pieces,
                    max_recv_sge: if receives.is_some() { 0 } else { 1 },
                    max_inline_data: size.inline_bytes,
                },
                qp_type: match receives {
                    Some(_) => sys::IBV_QPT_RC,
                    None => sys::IBV_QPT_UD,
                },
                sq_sig_all: 0,
            };
            // SAFETY: domain and queues are live, and held by what is made here.
            let pair = unsafe { (domain.device().library().raw().ibv_create_qp)(domain.raw(), &mut attributes) };
            if let Some(pair) = NonNull::new(pair) {
                return Ok(QueuePair {
                    pair,
                    domain: Arc::clone(domain),
                    _receives: receives.cloned(),
                    _completions: Arc::clone(completions),
                    inline_bytes: attributes.cap.max_inline_data,
                });
            }
            let error = io::Error::last_os_error();
            // Devices do not say how much fits into a request, so it is found out.
            if size.inline_bytes == 0 {
                return Err(error);
            }
            size.inline_bytes /= 2;
        }
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the pair is live, and its number never changes.
        unsafe { self.pair.as_ref() }.qp_num
    }

    /// Bytes that fit into a request.
    pub(super) fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Readies an unreliable queue pair to send and to receive.
    pub(super) fn start_datagrams(&self, port: u8, qkey: u32) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_INIT,
            port_num: port,
            qkey,
            ..Default::default()
        };
        self.modify(
            &mut attributes,
            sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_QKEY,
        )?;
        attributes.qp_state = sys::IBV_QPS_RTR;
        self.modify(&mut attributes, sys::IBV_QP_STATE)?;
        attributes.qp_state = sys::IBV_QPS_RTS;
        self.modify(&mut attributes, sys::IBV_QP_STATE | sys::IBV_QP_SQ_PSN)
    }

    /// The first step of a reliable queue pair. No peer may touch any memory through it yet.
    pub(super) fn prepare(&self, port: u8) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_INIT,
            port_num: port,
            ..Default::default()
        };
        self.modify(
            &mut attributes,
            sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS,
        )
    }

    /// Connects a prepared queue pair; it can send and receive after this. Takes a second and more where the peer is not there.
    pub(super) fn connect(&self, rail: &Rail, peer: &Doorstep, how: &Connecting) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_RTR,
            path_mtu: how.mtu.into(),
            rq_psn: how.end.psn,
            dest_qp_num: how.end.qpn,
            ah_attr: route(rail, peer, how.traffic_class, how.service_level),
            max_dest_rd_atomic: how.reads_here,
            min_rnr_timer: RNR_TIMER,
            ..Default::default()
        };
        self.modify(
            &mut attributes,
            sys::IBV_QP_STATE
                | sys::IBV_QP_AV
                | sys::IBV_QP_PATH_MTU
                | sys::IBV_QP_DEST_QPN
                | sys::IBV_QP_RQ_PSN
                | sys::IBV_QP_MAX_DEST_RD_ATOMIC
                | sys::IBV_QP_MIN_RNR_TIMER,
        )?;
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_RTS,
            sq_psn: how.psn,
            max_rd_atomic: how.reads_there,
            timeout: how.timeout_code,
            retry_cnt: how.retries,
            rnr_retry: RNR_RETRIES,
            ..Default::default()
        };
        self.modify(
            &mut attributes,
            sys::IBV_QP_STATE
                | sys::IBV_QP_SQ_PSN
                | sys::IBV_QP_MAX_QP_RD_ATOMIC
                | sys::IBV_QP_TIMEOUT
                | sys::IBV_QP_RETRY_CNT
                | sys::IBV_QP_RNR_RETRY,
        )
    }

    /// Lets the peer read and write, as far as the keys that it was told reach.
    pub(super) fn admit(&self, flags: u32) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_access_flags: flags,
            ..Default::default()
        };
        self.modify(&mut attributes, sys::IBV_QP_ACCESS_FLAGS)
    }

    /// Ends everything: what was posted comes back unfinished, and what the peer sends is dropped.
    pub(super) fn fail(&self) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_ERR,
            ..Default::default()
        };
        self.modify(&mut attributes, sys::IBV_QP_STATE)
    }

    /// Empties the queue pair, so that it can be started again. What was posted does not come back any more.
    pub(super) fn reset(&self) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_RESET,
            ..Default::default()
        };
        self.modify(&mut attributes, sys::IBV_QP_STATE)
    }

    /// Posts a list of requests. On failure, the first request that was not posted is told.
    ///
    /// # Safety
    /// `list` heads a list of requests whose pieces name registered memory that lives, and stays as it is, until they have completed.
    pub(super) unsafe fn post(&self, list: *mut sys::ibv_send_wr) -> Result<(), (i32, *mut sys::ibv_send_wr)> {
        let mut refused = ptr::null_mut();
        // SAFETY: the pair is live; the rest is the caller's promise.
        match unsafe { sys::ibv_post_send(self.pair.as_ptr(), list, &mut refused) } {
            0 => Ok(()),
            // Some drivers return -1 and leave the number behind.
            error @ 1.. => Err((error, refused)),
            _ => Err((io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO), refused)),
        }
    }

    /// Offers buffers to receive datagrams in.
    ///
    /// # Safety
    /// As for [`ReceiveQueue::offer`].
    pub(super) unsafe fn offer(&self, buffers: impl Iterator<Item = (u64, sys::ibv_sge)>) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            offer(buffers, |request, refused| {
                sys::ibv_post_recv(self.pair.as_ptr(), request, refused)
            })
        }
    }

    fn modify(&self, attributes: &mut sys::ibv_qp_attr, mask: i32) -> io::Result<()> {
        // SAFETY: the pair is live and the attributes have a place.
        let answer =
            unsafe { (self.domain.device().library().raw().ibv_modify_qp)(self.pair.as_ptr(), attributes, mask) };
        match answer {
            0 => Ok(()),
            1.. => Err(io::Error::from_raw_os_error(answer)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({})", self.number())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made once and destroyed once. After it returns the device touches no memory through the pair.
        unsafe { (self.domain.device().library().raw().ibv_destroy_qp)(self.pair.as_ptr()) };
    }
}

/// Where datagrams to one rail go.
pub(super) struct AddressHandle {
    handle: NonNull<sys::ibv_ah>,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: the library guards an address handle with locks of its own.
unsafe impl Send for AddressHandle {}
// SAFETY: those locks order the calls of several threads on one address handle.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Takes a second and more where the peer is not there.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        rail: &Rail,
        peer: &Doorstep,
        traffic_class: u8,
        service_level: u8,
    ) -> io::Result<AddressHandle> {
        let mut attributes = route(rail, peer, traffic_class, service_level);
        // SAFETY: the domain is live.
        let handle = unsafe { (domain.device().library().raw().ibv_create_ah)(domain.raw(), &mut attributes) };
        Ok(AddressHandle {
            handle: NonNull::new(handle).ok_or_else(io::Error::last_os_error)?,
            domain: Arc::clone(domain),
        })
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_ah {
        self.handle.as_ptr()
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AddressHandle")
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: made once and destroyed once; no datagram that uses it is under way.
        unsafe { (self.domain.device().library().raw().ibv_destroy_ah)(self.handle.as_ptr()) };
    }
}

fn route(rail: &Rail, peer: &Doorstep, traffic_class: u8, service_level: u8) -> sys::ibv_ah_attr {
    sys::ibv_ah_attr {
        grh: sys::ibv_global_route {
            dgid: sys::ibv_gid { raw: peer.gid },
            flow_label: 0,
            sgid_index: rail.gid.index,
            hop_limit: 64,
            traffic_class,
        },
        dlid: peer.lid,
        sl: service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: rail.port,
    }
}

/// # Safety
/// As for [`ReceiveQueue::offer`].
unsafe fn offer(
    buffers: impl Iterator<Item = (u64, sys::ibv_sge)>,
    mut post: impl FnMut(*mut sys::ibv_recv_wr, &mut *mut sys::ibv_recv_wr) -> i32,
) -> io::Result<()> {
    const LIST: usize = 16;
    let mut buffers = buffers.peekable();
    while buffers.peek().is_some() {
        let mut pieces = [sys::ibv_sge::default(); LIST];
        let mut requests = [sys::ibv_recv_wr::default(); LIST];
        let mut count = 0;
        for (number, piece) in buffers.by_ref().take(LIST) {
            pieces[count] = piece;
            requests[count].wr_id = number;
            count += 1;
        }
        for i in 0..count {
            requests[i].sg_list = &raw mut pieces[i];
            requests[i].num_sge = 1;
            requests[i].next = if i + 1 < count {
                &raw mut requests[i + 1]
            } else {
                ptr::null_mut()
            };
        }
        let mut refused = ptr::null_mut();
        match post(requests.as_mut_ptr(), &mut refused) {
            0 => {}
            error @ 1.. => return Err(io::Error::from_raw_os_error(error)),
            _ => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
