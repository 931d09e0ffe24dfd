//! What the header defines as inline functions: calls through the pointers of the context that made the object.

use std::ffi::c_int;
use std::mem::{offset_of, size_of};

use super::objects::*;
use super::table::Libibverbs;
use super::types::*;

/// Posts a list of send requests. Zero, or an error number and the first request that was not posted.
///
/// # Safety
/// `qp` is a live queue pair that no other thread destroys; `wr` heads a list of requests whose `next` and `sg_list` are valid; the
/// memory that they name stays registered, and as it is, until they have completed.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: &mut *mut ibv_send_wr) -> c_int {
    // SAFETY: a live queue pair points to the live context that made it.
    let post_send = unsafe { (*(*qp).context).ops.post_send };
    match post_send {
        // SAFETY: the caller's promises are those that the function asks for.
        Some(post_send) => unsafe { post_send(qp, wr, bad_wr) },
        None => libc::EOPNOTSUPP,
    }
}

/// Posts a list of receive requests to a queue pair without a shared receive queue.
///
/// # Safety
/// As for [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: &mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a live queue pair points to the live context that made it.
    let post_recv = unsafe { (*(*qp).context).ops.post_recv };
    match post_recv {
        // SAFETY: the caller's promises are those that the function asks for.
        Some(post_recv) => unsafe { post_recv(qp, wr, bad_wr) },
        None => libc::EOPNOTSUPP,
    }
}

/// Posts a list of receive requests to a shared receive queue.
///
/// # Safety
/// As for [`ibv_post_send`], with `srq` in the place of the queue pair.
#[inline]
pub unsafe fn ibv_post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad_wr: &mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: a live shared receive queue points to the live context that made it.
    let post_srq_recv = unsafe { (*(*srq).context).ops.post_srq_recv };
    match post_srq_recv {
        // SAFETY: the caller's promises are those that the function asks for.
        Some(post_srq_recv) => unsafe { post_srq_recv(srq, wr, bad_wr) },
        None => libc::EOPNOTSUPP,
    }
}

/// Takes completions from a queue: how many there were, or a negative number.
///
/// # Safety
/// `cq` is a live completion queue that no other thread destroys.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, completions: &mut [ibv_wc]) -> c_int {
    // SAFETY: a live completion queue points to the live context that made it.
    let poll_cq = unsafe { (*(*cq).context).ops.poll_cq };
    let room = c_int::try_from(completions.len()).unwrap_or(c_int::MAX);
    match poll_cq {
        // SAFETY: there is room for as many completions as the call is told.
        Some(poll_cq) => unsafe { poll_cq(cq, room, completions.as_mut_ptr()) },
        None => -libc::EOPNOTSUPP,
    }
}

/// Asks for an event on the completion queue's channel with the next completion, or the next solicited one.
///
/// # Safety
/// As for [`ibv_poll_cq`].
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: bool) -> c_int {
    // SAFETY: a live completion queue points to the live context that made it.
    let req_notify_cq = unsafe { (*(*cq).context).ops.req_notify_cq };
    match req_notify_cq {
        // SAFETY: the caller's promises are those that the function asks for.
        Some(req_notify_cq) => unsafe { req_notify_cq(cq, solicited_only.into()) },
        None => libc::EOPNOTSUPP,
    }
}

/// What a port is and does now. The exported function of this name fills a shorter structure; libraries that know the whole one
/// offer a pointer to be called with its size.
///
/// # Safety
/// `context` is a live context.
pub unsafe fn ibv_query_port(
    library: &Libibverbs,
    context: *mut ibv_context,
    port_num: u8,
    attributes: &mut ibv_port_attr,
) -> c_int {
    // SAFETY: the context is live.
    let around = unsafe { extension(context, offset_of!(verbs_context, query_port)) };
    // SAFETY: the extension reaches as far back as the field.
    if let Some(query_port) = around.and_then(|around| unsafe { (*around).query_port }) {
        // SAFETY: the structure is as large as the call is told.
        return unsafe { query_port(context, port_num, attributes, size_of::<ibv_port_attr>()) };
    }
    *attributes = ibv_port_attr::default();
    // SAFETY: what the exported function fills is a beginning of this structure.
    unsafe { (library.ibv_query_port)(context, port_num, attributes) }
}

/// What a device can do, what the plain query does not tell included. `None` where the library or the device's driver does not know
/// more than that.
///
/// # Safety
/// `context` is a live context.
pub unsafe fn ibv_query_device_ex(context: *mut ibv_context, attributes: &mut ibv_device_attr_ex) -> Option<c_int> {
    // SAFETY: the context is live.
    let around = unsafe { extension(context, offset_of!(verbs_context, query_device_ex)) }?;
    // SAFETY: the extension reaches as far back as the field.
    let query_device_ex = unsafe { (*around).query_device_ex }?;
    // SAFETY: the structure is as large as the call is told; no input means the default one.
    let answer = unsafe { query_device_ex(context, std::ptr::null(), attributes, size_of::<ibv_device_attr_ex>()) };
    (answer != libc::EOPNOTSUPP && answer != libc::ENOSYS).then_some(answer)
}

/// The structure around a context, if there is one and it reaches back to the field at `offset`.
unsafe fn extension(context: *mut ibv_context, offset: usize) -> Option<*mut verbs_context> {
    // SAFETY: the caller's context is live.
    if unsafe { (*context).abi_compat } as usize != VERBS_ABI_IS_EXTENDED {
        return None;
    }
    // SAFETY: `abi_compat` says that the context is the last field of a `verbs_context`. Its size stands right before the context,
    // which every such structure reaches back to.
    let around = unsafe { context.byte_sub(offset_of!(verbs_context, context)) }.cast::<verbs_context>();
    // SAFETY: as above.
    let size = unsafe { (*around).sz };
    (size >= size_of::<verbs_context>() - offset).then_some(around)
}
