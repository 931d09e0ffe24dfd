//! What every call of NIXL's goes through: the functions of an engine, in NIXL's own words, and the objects behind its pointers. No panic comes out.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;
use std::sync::Arc;

use weft::Direction;

use crate::abi::{
    API_VERSION, BlobDescriptor, DRAM, Descriptor, Destructors, EngineHead, Functions, InitParams, MemNumber,
    MetaDescriptors, MetadataHead, OpNumber, OptionalArguments, Plugin, READ, RequestHead, Status, Table, VRAM, WRITE,
};
use crate::engine::{Described, Engine, Given, Metadata};
use crate::parameters::{OFFERED, OWN_NAME};
use crate::request::{Pairing, Request, Stage, Wanted};
use crate::stdcxx::{CxxMap, CxxString, CxxVector, Library, Pair};
use crate::trouble::Trouble;

/// An engine, as NIXL holds it.
#[repr(C)]
struct EngineObject {
    head: EngineHead,
    engine: Engine,
    library: Library,
}

#[repr(C)]
struct MetadataObject {
    head: MetadataHead,
    metadata: Metadata,
}

#[repr(C)]
struct RequestObject {
    head: RequestHead,
    request: Request,
}

pub static PLUGIN: Plugin = Plugin {
    api_version: API_VERSION,
    create_engine,
    destroy_engine,
    name,
    version,
    options,
    memories: plugin_memories,
};

static ENGINE: Table<Functions> = Table {
    offset_to_top: 0,
    type_info: null(),
    functions: Functions {
        destructors: Destructors {
            complete: keep::<EngineObject>,
            deleting: delete_engine,
        },
        supports_remote: yes,
        supports_local: yes,
        supports_notifications: yes,
        memories,
        register,
        deregister,
        connect,
        disconnect,
        unload,
        prepare,
        post,
        check,
        release,
        view_remote: no_view,
        view_local: no_view,
        release_view,
        public_data,
        connection,
        load_connection,
        load_remote,
        load_local,
        notifications,
        notify,
        query,
        estimate,
    },
};

static METADATA: Table<Destructors> = Table {
    offset_to_top: 0,
    type_info: null(),
    functions: Destructors {
        complete: keep::<MetadataObject>,
        deleting: delete::<MetadataObject>,
    },
};

static REQUEST: Table<Destructors> = Table {
    offset_to_top: 0,
    type_info: null(),
    functions: Destructors {
        complete: keep::<RequestObject>,
        deleting: delete::<RequestObject>,
    },
};

/// A destructor of something whose memory somebody else gives back: nobody makes such objects but this module, so nobody else can.
unsafe extern "C" fn keep<T>(_this: *mut c_void) {}

unsafe extern "C" fn delete<T>(this: *mut c_void) {
    // SAFETY: it was made by `Box::into_raw` of this type, whose table named this function.
    let object = unsafe { Box::from_raw(this.cast::<T>()) };
    let _ = catch_unwind(AssertUnwindSafe(move || drop(object)));
}

unsafe extern "C" fn delete_engine(this: *mut c_void) {
    // SAFETY: likewise.
    unsafe { destroy_engine(this.cast()) }
}

/// Runs a call. What goes wrong is told in the log, and by number.
fn call(doing: &str, act: impl FnOnce() -> Result<Status, Trouble>) -> Status {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(status)) => status,
        Ok(Err(trouble)) => {
            trouble.log(doing);
            trouble.status()
        }
        // The hook has told of it.
        Err(_) => Status::Unknown,
    }
}

/// Something that NIXL points to.
///
/// # Safety
/// It is null, or points to one that stays.
unsafe fn given<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Trouble> {
    // SAFETY: as the caller says.
    unsafe { pointer.as_ref() }.ok_or_else(|| Trouble::Invalid(format!("{what} is null")))
}

/// # Safety
/// As [`given`].
unsafe fn text<'a>(pointer: *const CxxString, what: &str) -> Result<&'a str, Trouble> {
    // SAFETY: as the caller says.
    let string = unsafe { given(pointer, what) }?;
    std::str::from_utf8(string.bytes()).map_err(|_| Trouble::Invalid(format!("{what} is not UTF-8")))
}

/// # Safety
/// An engine of this module's.
unsafe fn engine<'a>(this: *mut EngineHead) -> &'a EngineObject {
    // SAFETY: NIXL calls these functions with the objects whose table names them, and with no others.
    unsafe { &*this.cast::<EngineObject>() }
}

/// # Safety
/// It is null, or points to an object with virtual functions.
unsafe fn metadata<'a>(pointer: *const MetadataHead) -> Result<&'a Metadata, Trouble> {
    // SAFETY: as the caller says.
    let head = unsafe { given(pointer, "a registration") }?;
    if !std::ptr::eq(head.functions, &METADATA.functions) {
        return Err(Trouble::Invalid("a registration is another back end's".to_owned()));
    }
    // SAFETY: only objects of this type have this table.
    Ok(unsafe { &(*pointer.cast::<MetadataObject>()).metadata })
}

/// # Safety
/// As [`metadata`].
unsafe fn request<'a>(pointer: *const RequestHead) -> Result<&'a Request, Trouble> {
    // SAFETY: as the caller says.
    let head = unsafe { given(pointer, "a request") }?;
    if !std::ptr::eq(head.functions, &REQUEST.functions) {
        return Err(Trouble::Invalid("a request is another back end's".to_owned()));
    }
    // SAFETY: only objects of this type have this table.
    Ok(unsafe { &(*pointer.cast::<RequestObject>()).request })
}

/// Hands metadata out.
///
/// # Safety
/// A place for a pointer.
unsafe fn put(out: *mut *mut MetadataHead, is_private: bool, metadata: Metadata) {
    let functions = &raw const METADATA.functions;
    let object = Box::new(MetadataObject {
        head: MetadataHead { functions, is_private },
        metadata,
    });
    // SAFETY: as the caller says.
    unsafe { out.write(Box::into_raw(object).cast()) };
}

unsafe extern "C" fn create_engine(init: *const InitParams) -> *mut EngineHead {
    let made = catch_unwind(|| {
        // SAFETY: NIXL's own structure, whose parameters are there while this is called.
        let (init, agent, kind, parameters) = unsafe {
            let init = given(init, "init_params")?;
            let parameters = given(init.parameters, "customParams")?;
            (
                init,
                text(&raw const init.local_agent, "localAgent")?,
                text(&raw const init.kind, "type")?,
                parameters,
            )
        };
        let library = Library::of_process().map_err(Trouble::Invalid)?;
        let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let pairs = parameters.pairs().map(|(key, value)| (lossy(key), lossy(value)));
        let engine = Engine::start(&Described {
            agent,
            kind,
            parameters: pairs.collect(),
        })?;
        // Strings and maps of C++ point into themselves, so they are made where they stay.
        let place = Box::into_raw(Box::<EngineObject>::new_uninit());
        // SAFETY: every field is written, and the object stays where it is.
        unsafe {
            let object = place.cast::<EngineObject>();
            let head = &raw mut (*object).head;
            (&raw mut (*head).functions).write(&raw const ENGINE.functions);
            CxxString::construct(&raw mut (*head).kind, init.kind.bytes(), &library);
            CxxMap::construct(&raw mut (*head).parameters, parameters.pairs(), &library);
            (&raw mut (*head).telemetry).write(CxxVector::empty());
            (&raw mut (*head).telemetry_lock).write([0; 5]);
            (&raw mut (*head).failed).write(false);
            CxxString::construct(&raw mut (*head).local_agent, init.local_agent.bytes(), &library);
            (&raw mut (*head).telemetry_wanted).write(init.telemetry);
            (&raw mut (*object).engine).write(engine);
            (&raw mut (*object).library).write(library);
            Ok::<_, Trouble>(object.cast::<EngineHead>())
        }
    });
    match made {
        Ok(Ok(head)) => head,
        Ok(Err(trouble)) => {
            trouble.log("creating a back end");
            std::ptr::null_mut()
        }
        Err(_) => std::ptr::null_mut(),
    }
}

unsafe extern "C" fn destroy_engine(this: *mut EngineHead) {
    if this.is_null() {
        return;
    }
    // SAFETY: it was made by `create_engine`, and nobody uses it any more.
    let object = unsafe { Box::from_raw(this.cast::<EngineObject>()) };
    let _ = catch_unwind(AssertUnwindSafe(move || {
        object.engine.close();
        let mut object = object;
        let library = object.library;
        // SAFETY: as C++ made and changed them, and nobody uses them any more.
        unsafe {
            CxxString::destroy(&raw mut object.head.kind, &library);
            CxxMap::destroy(&raw mut object.head.parameters, &library);
            CxxString::destroy(&raw mut object.head.local_agent, &library);
        }
    }));
}

extern "C" fn name() -> *const c_char {
    const NAME: &CStr = c"WEFT";
    debug_assert_eq!(NAME.to_bytes(), OWN_NAME.as_bytes());
    NAME.as_ptr()
}

extern "C" fn version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

unsafe extern "C" fn options(place: *mut CxxMap) -> *mut CxxMap {
    let offered = OFFERED.iter().map(|key| (key.as_bytes(), &b""[..]));
    match Library::of_process() {
        // SAFETY: the caller has a place for what the function returns.
        Ok(library) => unsafe { CxxMap::construct(place, offered, &library) },
        // `nixl_plugin_init` has looked for it.
        Err(_) => unreachable!("a plug-in without its standard library is not handed out"),
    }
    place
}

fn claimed() -> CxxVector<MemNumber> {
    let all = [DRAM, VRAM];
    let claimed = if Engine::has_devices() { &all[..] } else { &all[..1] };
    Library::of_process().map_or(CxxVector::empty(), |library| CxxVector::of(claimed, &library))
}

extern "C" fn plugin_memories() -> CxxVector<MemNumber> {
    catch_unwind(claimed).unwrap_or(CxxVector::empty())
}

unsafe extern "C" fn memories(_this: *mut EngineHead) -> CxxVector<MemNumber> {
    plugin_memories()
}

unsafe extern "C" fn yes(_this: *mut EngineHead) -> bool {
    true
}

/// Memory as NIXL describes it.
fn memory(bytes: &Descriptor, place: MemNumber) -> Result<Given, Trouble> {
    let device = match place {
        DRAM => None,
        VRAM => Some(bytes.device),
        _ => return Err(Trouble::Unsupported("memory of this kind")),
    };
    Ok(Given {
        address: bytes.address,
        len: bytes.len,
        device,
    })
}

unsafe extern "C" fn register(
    this: *mut EngineHead,
    descriptor: *const BlobDescriptor,
    place: *const MemNumber,
    out: *mut *mut MetadataHead,
) -> Status {
    call("registering memory", || {
        // SAFETY: references in C++; and the memory stays until it is deregistered, which is what registering means.
        unsafe {
            let given = memory(&given(descriptor, "mem")?.bytes, *given(place, "nixl_mem")?)?;
            let own = engine(this).engine.register(given)?;
            put(out, true, Metadata::Own(Arc::new(own)));
        }
        Ok(Status::Success)
    })
}

unsafe extern "C" fn deregister(this: *mut EngineHead, pointer: *mut MetadataHead) -> Status {
    call("deregistering memory", || {
        // SAFETY: one that was handed out.
        let Metadata::Own(own) = unsafe { metadata(pointer) }? else {
            return Err(Trouble::Invalid(
                "what is to be deregistered is another agent's".to_owned(),
            ));
        };
        // SAFETY: as NIXL has it.
        let deregistered = unsafe { engine(this) }.engine.deregister(own);
        // NIXL does not ask again, so the handle goes either way; the region is revoked either way, too.
        // SAFETY: NIXL is through with it.
        unsafe { delete::<MetadataObject>(pointer.cast()) };
        deregistered.map(|()| Status::Success)
    })
}

unsafe extern "C" fn connect(this: *mut EngineHead, agent: *const CxxString) -> Status {
    call("connecting", || {
        // SAFETY: an engine, and a reference in C++.
        unsafe { engine(this).engine.connect(text(agent, "remote_agent")?)? };
        Ok(Status::Success)
    })
}

unsafe extern "C" fn disconnect(this: *mut EngineHead, agent: *const CxxString) -> Status {
    call("disconnecting", || {
        // SAFETY: likewise.
        unsafe { engine(this).engine.disconnect(text(agent, "remote_agent")?)? };
        Ok(Status::Success)
    })
}

unsafe extern "C" fn unload(_this: *mut EngineHead, pointer: *mut MetadataHead) -> Status {
    call("unloading metadata", || {
        // SAFETY: one that was handed out, which NIXL is through with.
        unsafe {
            metadata(pointer)?;
            delete::<MetadataObject>(pointer.cast());
        }
        Ok(Status::Success)
    })
}

/// What is told at the end, if anything.
///
/// # Safety
/// Null, or NIXL's structure.
unsafe fn notification<'a>(options: *const OptionalArguments) -> Option<&'a [u8]> {
    // SAFETY: as the caller says.
    let options = unsafe { options.as_ref() }?;
    options.has_notification.then(|| options.notification.bytes())
}

unsafe extern "C" fn prepare(
    this: *mut EngineHead,
    op: *const OpNumber,
    local: *const MetaDescriptors,
    remote: *const MetaDescriptors,
    agent: *const CxxString,
    out: *mut *mut RequestHead,
    options: *const OptionalArguments,
) -> Status {
    call("preparing a transfer", || {
        // SAFETY: references in C++, and a structure or null.
        let (engine, op, local, remote, agent, notification) = unsafe {
            let (local, remote) = (given(local, "local")?, given(remote, "remote")?);
            (
                &engine(this).engine,
                *given(op, "operation")?,
                local,
                remote,
                text(agent, "remote_agent")?,
                notification(options),
            )
        };
        let direction = match op {
            READ => Direction::Read,
            WRITE => Direction::Write,
            _ => return Err(Trouble::Invalid(format!("there is no operation {op}"))),
        };
        let (here, there) = (local.list.as_slice(), remote.list.as_slice());
        if here.len() != there.len() || here.is_empty() {
            return Err(Trouble::Invalid(format!(
                "{} descriptors here and {} there",
                here.len(),
                there.len()
            )));
        }
        let pairings = here.iter().zip(there).map(|(here, there)| {
            if here.bytes.len != there.bytes.len {
                let (here, there) = (here.bytes.len, there.bytes.len);
                return Err(Trouble::Invalid(format!(
                    "a descriptor of {here} bytes here and of {there} there"
                )));
            }
            // SAFETY: NIXL keeps what it registers and loads while descriptors name it.
            let (own, their) = unsafe { (metadata(here.metadata)?, metadata(there.metadata)?) };
            Ok(Pairing {
                here: (own, here.bytes.address),
                there: (their, there.bytes.address),
                len: here.bytes.len,
            })
        });
        let request = Request::prepare(
            engine,
            &Wanted {
                direction,
                agent,
                notification,
            },
            pairings,
        )?;
        let functions = &raw const REQUEST.functions;
        let object = Box::new(RequestObject {
            head: RequestHead { functions },
            request,
        });
        // SAFETY: a reference in C++.
        unsafe { out.write(Box::into_raw(object).cast()) };
        Ok(Status::Success)
    })
}

fn told(stage: Stage) -> Status {
    match stage {
        Stage::UnderWay => Status::InProgress,
        Stage::Done => Status::Success,
    }
}

unsafe extern "C" fn post(
    this: *mut EngineHead,
    _op: *const OpNumber,
    _local: *const MetaDescriptors,
    _remote: *const MetaDescriptors,
    _agent: *const CxxString,
    handle: *mut *mut RequestHead,
    options: *const OptionalArguments,
) -> Status {
    call("posting a transfer", || {
        // SAFETY: as NIXL has it: the handle that was prepared for the very same descriptors.
        unsafe {
            request(*given(handle, "handle")?)?
                .post(&engine(this).engine, notification(options))
                .map(told)
        }
    })
}

unsafe extern "C" fn check(this: *mut EngineHead, handle: *mut RequestHead) -> Status {
    call("a transfer", || {
        // SAFETY: as NIXL has it.
        unsafe { request(handle)?.check(&engine(this).engine).map(told) }
    })
}

unsafe extern "C" fn release(_this: *mut EngineHead, handle: *mut RequestHead) -> Status {
    call("releasing a transfer", || {
        // SAFETY: as NIXL has it, which is through with it where this succeeds.
        unsafe {
            request(handle)?.end()?;
            delete::<RequestObject>(handle.cast());
        }
        Ok(Status::Success)
    })
}

unsafe extern "C" fn no_view(
    _this: *mut EngineHead,
    _descriptors: *const c_void,
    _out: *mut *mut c_void,
    _options: *const OptionalArguments,
) -> Status {
    call("prepMemView", || {
        Err(Trouble::Unsupported("a transfer that a device begins"))
    })
}

unsafe extern "C" fn release_view(_this: *mut EngineHead, _view: *mut c_void) {}

/// Hands bytes out as a string.
///
/// # Safety
/// An engine, and a string of C++.
unsafe fn answer(this: *mut EngineHead, out: *mut CxxString, bytes: &[u8]) -> Result<Status, Trouble> {
    // SAFETY: as the caller says.
    unsafe {
        given(out, "str")?;
        CxxString::assign(out, bytes, &engine(this).library);
    }
    Ok(Status::Success)
}

unsafe extern "C" fn public_data(this: *mut EngineHead, pointer: *const MetadataHead, out: *mut CxxString) -> Status {
    call("describing memory", || {
        // SAFETY: as NIXL has it, and a reference in C++.
        unsafe {
            match metadata(pointer)? {
                Metadata::Own(own) => answer(this, out, &Engine::public_data(own)),
                Metadata::Their(_) => Err(Trouble::Invalid("this registration is another agent's".to_owned())),
            }
        }
    })
}

unsafe extern "C" fn connection(this: *mut EngineHead, out: *mut CxxString) -> Status {
    // SAFETY: as NIXL has it, and a reference in C++.
    call("describing the agent", || unsafe {
        answer(this, out, &engine(this).engine.connection().encode())
    })
}

unsafe extern "C" fn load_connection(
    this: *mut EngineHead,
    agent: *const CxxString,
    bytes: *const CxxString,
) -> Status {
    call("loading an agent's connection", || {
        // SAFETY: an engine, and references in C++.
        unsafe {
            engine(this)
                .engine
                .load_connection(text(agent, "remote_agent")?, given(bytes, "remote_conn_info")?.bytes())?
        };
        Ok(Status::Success)
    })
}

unsafe extern "C" fn load_remote(
    this: *mut EngineHead,
    descriptor: *const BlobDescriptor,
    place: *const MemNumber,
    agent: *const CxxString,
    out: *mut *mut MetadataHead,
) -> Status {
    call("loading a registration", || {
        // SAFETY: likewise.
        unsafe {
            let descriptor = given(descriptor, "input")?;
            let memory = memory(&descriptor.bytes, *given(place, "nixl_mem")?)?;
            let their =
                engine(this)
                    .engine
                    .load_remote(text(agent, "remote_agent")?, memory, descriptor.blob.bytes())?;
            put(out, false, Metadata::Their(Arc::new(their)));
        }
        Ok(Status::Success)
    })
}

unsafe extern "C" fn load_local(
    _this: *mut EngineHead,
    pointer: *mut MetadataHead,
    out: *mut *mut MetadataHead,
) -> Status {
    call("loading a registration of this agent", || {
        // SAFETY: one that was handed out, and a reference in C++.
        unsafe { put(out, false, metadata(pointer)?.clone()) };
        Ok(Status::Success)
    })
}

unsafe extern "C" fn notifications(this: *mut EngineHead, out: *mut CxxVector<Pair>) -> Status {
    call("taking notifications", || {
        // SAFETY: as NIXL has it.
        let object = unsafe { engine(this) };
        let told = object.engine.notifications();
        if !told.is_empty() {
            let pairs: Vec<(&[u8], &[u8])> = told
                .iter()
                .map(|(agent, message)| (agent.as_bytes(), &message[..]))
                .collect();
            // SAFETY: a reference in C++, to a vector of this call.
            let list = unsafe { out.as_mut() }.ok_or_else(|| Trouble::Invalid("notif_list is null".to_owned()))?;
            // SAFETY: likewise.
            unsafe { list.extend(&pairs, &object.library) };
        }
        Ok(Status::Success)
    })
}

unsafe extern "C" fn notify(this: *mut EngineHead, agent: *const CxxString, message: *const CxxString) -> Status {
    call("notifying", || {
        // SAFETY: an engine, and references in C++.
        unsafe {
            engine(this)
                .engine
                .notify(text(agent, "remote_agent")?, given(message, "msg")?.bytes())?
        };
        Ok(Status::Success)
    })
}

unsafe extern "C" fn query(_this: *mut EngineHead, _descriptors: *const c_void, _answers: *mut c_void) -> Status {
    call("queryMem", || Err(Trouble::Unsupported("a query of memory")))
}

unsafe extern "C" fn estimate(
    _this: *mut EngineHead,
    _op: *const OpNumber,
    _local: *const MetaDescriptors,
    _remote: *const MetaDescriptors,
    _agent: *const CxxString,
    _handle: *const *mut RequestHead,
    _duration_us: *mut i64,
    _margin_us: *mut i64,
    _method: *mut i32,
    _options: *const c_void,
) -> Status {
    call("estimateXferCost", || {
        Err(Trouble::Unsupported("an estimate of a transfer"))
    })
}
