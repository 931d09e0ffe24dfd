//! `weft_communicator` and `weft_call`.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use weft::{Call, Candidate, Communicator, Datatype, JoinOptions, Part, Pending, Rank, Reduction};

use crate::agent::AgentHandle;
use crate::arguments::{
    Out, Plain, duration, duration_if_any, one_of, structure, structure_or_default, text, text_if_any,
};
use crate::boundary::{Handle, Object, ask, free, guarded, handle_out, on};
use crate::check_version;
use crate::event::Events;
use crate::failure::Failed;
use crate::memory::host_memory;
use crate::status::Status;

#[derive(Debug)]
pub struct CommunicatorObject {
    communicator: Communicator,
    events: Arc<Events>,
}

impl Object for CommunicatorObject {
    const NAME: &'static str = "communicator";
    const MARK: u64 = 0x7765_6674_636f_6d6d;
}

pub type CommunicatorHandle = Handle<CommunicatorObject>;

#[derive(Debug)]
pub struct CallObject {
    pending: Pending,
}

impl Object for CallObject {
    const NAME: &'static str = "call";
    const MARK: u64 = 0x7765_6674_6361_6c6c;
}

pub type CallHandle = Handle<CallObject>;

/// A `weft_datatype`, as C hands it in: any number.
pub type DatatypeNumber = i32;
/// A `weft_reduction`, likewise.
pub type ReductionNumber = i32;

/// `weft_join_options`.
#[derive(Debug)]
#[repr(C)]
pub struct JoinOptionsOfC {
    pub size: usize,
    pub name: *const c_char,
    pub rank: u32,
    pub rank_count: u32,
    pub timeout_ns: u64,
    pub deadline_ns: u64,
}

// SAFETY: numbers and a raw pointer, for all of which zero is a value.
unsafe impl Plain for JoinOptionsOfC {
    const FIRST_SIZE: usize = 40;
}

/// `weft_call_options`.
#[derive(Debug)]
#[repr(C)]
pub struct CallOptions {
    pub size: usize,
    pub deadline_ns: u64,
    pub algorithm: *const c_char,
    pub deterministic: i32,
    pub all_or_nothing: i32,
}

// SAFETY: numbers and a raw pointer, for all of which zero is a value.
unsafe impl Plain for CallOptions {
    const FIRST_SIZE: usize = 32;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_communicator_from_env(
    abi_version: u32,
    name: *const c_char,
    communicator: *mut *mut CommunicatorHandle,
) -> Status {
    guarded(|| {
        // SAFETY: as the header says: a text that ends, and a place for a handle.
        let (out, name) = unsafe { (handle_out(communicator, "communicator")?, text(name, "name")?) };
        check_version(abi_version)?;
        out.hand_out(CommunicatorObject {
            communicator: Communicator::from_env(name)?,
            events: Arc::default(),
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_communicator_join(
    agent: *mut AgentHandle,
    options: *const JoinOptionsOfC,
    communicator: *mut *mut CommunicatorHandle,
) -> Status {
    // SAFETY: as the header says: a handle, a structure, and a place for a handle.
    unsafe {
        on(agent, |agent| {
            let out = handle_out(communicator, "communicator")?;
            let given = structure(options, "options")?;
            let mut options = JoinOptions::new(text(given.name, "name")?, Rank(given.rank), given.rank_count);
            options.timeout = duration_if_any(given.timeout_ns).unwrap_or(options.timeout);
            options.deadline = duration_if_any(given.deadline_ns).unwrap_or(options.deadline);
            out.hand_out(CommunicatorObject {
                communicator: Communicator::join(&agent.agent, options)?,
                events: agent.events.clone(),
            });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_communicator_rank(communicator: *const CommunicatorHandle) -> u32 {
    // SAFETY: as the header says.
    unsafe { ask(communicator, u32::MAX, |object| object.communicator.rank().0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_communicator_size(communicator: *const CommunicatorHandle) -> u32 {
    // SAFETY: as the header says.
    unsafe { ask(communicator, 0, |object| object.communicator.size()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_communicator_shrink(
    communicator: *mut CommunicatorHandle,
    timeout_ns: u64,
    left: *mut *mut CommunicatorHandle,
) -> Status {
    // SAFETY: as the header says: a handle, and a place for one.
    unsafe {
        on(communicator, |object| {
            let out = handle_out(left, "left")?;
            out.hand_out(CommunicatorObject {
                communicator: object.communicator.shrink(duration(timeout_ns))?,
                events: object.events.clone(),
            });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_communicator_free(communicator: *mut CommunicatorHandle) {
    // SAFETY: as the header says.
    unsafe { free(communicator) }
}

/// What a collective is called with: elements of one kind, and so many ranks to have them.
struct Elements<'a> {
    group: &'a Communicator,
    count: usize,
    datatype: Datatype,
}

impl Elements<'_> {
    /// `count` elements, aligned as such.
    ///
    /// # Safety
    /// They are there, and nobody else touches them, until the call has ended.
    unsafe fn one(&self, data: *const c_void) -> Result<Part, Failed> {
        // SAFETY: as the caller says.
        unsafe { self.part(data, Some(self.count)) }
    }

    /// So many for each rank.
    ///
    /// # Safety
    /// As [`one`](Elements::one).
    unsafe fn each(&self, data: *const c_void) -> Result<Part, Failed> {
        let count = self.count.checked_mul(self.group.size() as usize);
        // SAFETY: as the caller says.
        unsafe { self.part(data, count) }
    }

    /// So many for each rank, which only the root has.
    ///
    /// # Safety
    /// As [`one`](Elements::one).
    unsafe fn each_at(&self, root: u32, data: *const c_void) -> Result<Part, Failed> {
        match root == self.group.rank().0 {
            // SAFETY: as the caller says.
            true => unsafe { self.each(data) },
            false => Ok(self.nothing()),
        }
    }

    /// Not looked at.
    fn nothing(&self) -> Part {
        weft::HostMemory::from_vec(Vec::new()).into()
    }

    /// # Safety
    /// As [`one`](Elements::one).
    unsafe fn part(&self, data: *const c_void, count: Option<usize>) -> Result<Part, Failed> {
        let size = self.datatype.size();
        let bytes = count.and_then(|count| count.checked_mul(size));
        let bytes = bytes.ok_or_else(|| Failed::invalid(format!("{} elements", self.count)))?;
        if !(data as usize).is_multiple_of(size) {
            let kind = self.datatype;
            return Err(Failed::invalid(format!(
                "a buffer of {kind} is not aligned to {size} bytes"
            )));
        }
        // SAFETY: as the caller says.
        Ok(unsafe { host_memory(data.cast_mut(), bytes) }?.into())
    }
}

/// Describes a call, and runs it to its end, or starts it where there is a place for a handle.
///
/// # Safety
/// A handle, a structure or null, a place for a handle or null.
unsafe fn run(
    communicator: *const CommunicatorHandle,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
    describe: impl for<'a> FnOnce(&'a Communicator) -> Result<Call<'a>, Failed>,
) -> Status {
    // SAFETY: as the caller says.
    unsafe {
        on(communicator, |object| {
            let out: Option<Out<*mut CallHandle>> = match call.is_null() {
                true => None,
                false => Some(handle_out(call, "call")?),
            };
            let options = structure_or_default(options, "options")?;
            let mut described = describe(&object.communicator)?;
            if let Some(deadline) = duration_if_any(options.deadline_ns) {
                described = described.deadline(deadline);
            }
            if let Some(algorithm) = text_if_any(options.algorithm, "algorithm")? {
                let candidate: Candidate = algorithm
                    .parse()
                    .map_err(|error: weft::UnknownCandidate| Failed::invalid(error.to_string()))?;
                described = described.algorithm(candidate);
            }
            if options.deterministic != 0 {
                described = described.deterministic();
            }
            if options.all_or_nothing != 0 {
                described = described.all_or_nothing();
            }
            match out {
                None => described.run()?,
                Some(out) => {
                    let pending = described.start()?;
                    object.events.watch(pending.clone());
                    out.hand_out(CallObject { pending });
                }
            }
            Ok(())
        })
    }
}

/// The same for a call that has elements.
///
/// # Safety
/// As [`run`].
unsafe fn run_with(
    communicator: *const CommunicatorHandle,
    (count, datatype): (usize, DatatypeNumber),
    (options, call): (*const CallOptions, *mut *mut CallHandle),
    describe: impl for<'a> FnOnce(&Elements<'a>) -> Result<Call<'a>, Failed>,
) -> Status {
    // SAFETY: as the caller says.
    unsafe {
        run(communicator, options, call, |group| {
            let datatype = one_of(&Datatype::ALL, datatype, "datatype")?;
            let elements = Elements { group, count, datatype };
            describe(&elements)
        })
    }
}

fn operator(number: ReductionNumber) -> Result<Reduction, Failed> {
    one_of(&Reduction::ALL, number, "reduction")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_barrier(
    communicator: *mut CommunicatorHandle,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe { run(communicator, options, call, |group| Ok(group.barrier())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_broadcast(
    communicator: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    root: u32,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let data = elements.one(data)?;
            Ok(elements.group.broadcast(data, Rank(root), elements.datatype))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_all_reduce(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    reduction: ReductionNumber,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let (input, output) = (elements.one(input)?, elements.one(output)?);
            let operator = operator(reduction)?;
            Ok(elements.group.all_reduce(input, output, elements.datatype, operator))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_reduce(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    reduction: ReductionNumber,
    root: u32,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let output = match root == elements.group.rank().0 {
                true => elements.one(output)?,
                false => elements.nothing(),
            };
            let (input, operator) = (elements.one(input)?, operator(reduction)?);
            let group = elements.group;
            Ok(group.reduce(input, output, Rank(root), elements.datatype, operator))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_all_gather(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let (input, output) = (elements.one(input)?, elements.each(output)?);
            Ok(elements.group.all_gather(input, output, elements.datatype))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_gather(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    root: u32,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let (input, output) = (elements.one(input)?, elements.each_at(root, output)?);
            Ok(elements.group.gather(input, output, Rank(root), elements.datatype))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_scatter(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    root: u32,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let (input, output) = (elements.each_at(root, input)?, elements.one(output)?);
            Ok(elements.group.scatter(input, output, Rank(root), elements.datatype))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_reduce_scatter(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    reduction: ReductionNumber,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let (input, output) = (elements.each(input)?, elements.one(output)?);
            let operator = operator(reduction)?;
            Ok(elements
                .group
                .reduce_scatter(input, output, elements.datatype, operator))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_all_to_all(
    communicator: *mut CommunicatorHandle,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let (input, output) = (elements.each(input)?, elements.each(output)?);
            Ok(elements.group.all_to_all(input, output, elements.datatype))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_send(
    communicator: *mut CommunicatorHandle,
    data: *const c_void,
    count: usize,
    datatype: DatatypeNumber,
    to: u32,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let data = elements.one(data)?;
            Ok(elements.group.send(data, Rank(to), elements.datatype))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_receive(
    communicator: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    datatype: DatatypeNumber,
    from: u32,
    options: *const CallOptions,
    call: *mut *mut CallHandle,
) -> Status {
    // SAFETY: as the header says.
    unsafe {
        run_with(communicator, (count, datatype), (options, call), |elements| {
            let data = elements.one(data)?;
            Ok(elements.group.receive(data, Rank(from), elements.datatype))
        })
    }
}

/// What a call has come to, if it has.
fn ended(outcome: Option<Result<(), weft::Error>>) -> Result<Status, Failed> {
    match outcome {
        None => Ok(Status::Pending),
        Some(outcome) => Ok(outcome?.into()),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_call_poll(call: *mut CallHandle) -> Status {
    // SAFETY: as the header says.
    unsafe { on(call, |object| ended(object.pending.poll())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_call_wait(call: *mut CallHandle, timeout_ns: u64) -> Status {
    // SAFETY: as the header says.
    unsafe {
        on(call, |object| match timeout_ns {
            u64::MAX => ended(Some(object.pending.wait())),
            _ => ended(object.pending.wait_for(duration(timeout_ns))),
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn weft_call_free(call: *mut CallHandle) {
    // SAFETY: as the header says.
    unsafe { free(call) }
}
