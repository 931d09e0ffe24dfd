//! NCCL beside our own collectives: the few functions of it that are needed, looked up in a library that is loaded when it is asked for.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Barrier;

use weft_gpu::{Collective, Stream};

/// As `nccl.h` has them.
const BFLOAT16: c_int = 9;
const SUM: c_int = 0;

#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([c_char; 128]);

type Handle = *mut c_void;
type Reduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Handle, u64) -> c_int;
type Move = unsafe extern "C" fn(u64, u64, usize, c_int, Handle, u64) -> c_int;
type Broadcast = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Handle, u64) -> c_int;

pub struct Nccl {
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    all_reduce: Reduce,
    reduce_scatter: Reduce,
    all_gather: Move,
    all_to_all: Move,
    broadcast: Broadcast,
    pub version: i32,
}

/// One rank's. It is never destroyed: the process ends with it.
#[derive(Clone, Copy)]
pub struct Rank(Handle);

// SAFETY: NCCL wants one thread at a time for a communicator, not always the same.
unsafe impl Send for Rank {}
// SAFETY: a copy of the handle is given to one thread at a time.
unsafe impl Sync for Rank {}

impl Nccl {
    pub fn load(path: &str) -> Result<Nccl, String> {
        let path = CString::new(path).map_err(|error| error.to_string())?;
        // SAFETY: a library that whoever started this named.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(format!("{path:?} cannot be loaded"));
        }
        let find = |name: &CStr| {
            // SAFETY: the library is loaded, and stays so.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            match found.is_null() {
                true => Err(format!("there is no {name:?} in it")),
                false => Ok(found),
            }
        };
        let mut version = 0;
        // SAFETY: the functions have the types that NCCL's header declares for them.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(find(c"ncclGetVersion")?);
            get(&mut version);
            Ok(Nccl {
                error: std::mem::transmute::<Handle, unsafe extern "C" fn(c_int) -> *const c_char>(find(
                    c"ncclGetErrorString",
                )?),
                unique_id: std::mem::transmute::<Handle, unsafe extern "C" fn(*mut UniqueId) -> c_int>(find(
                    c"ncclGetUniqueId",
                )?),
                init: std::mem::transmute::<Handle, unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int>(
                    find(c"ncclCommInitRank")?,
                ),
                all_reduce: std::mem::transmute::<Handle, Reduce>(find(c"ncclAllReduce")?),
                reduce_scatter: std::mem::transmute::<Handle, Reduce>(find(c"ncclReduceScatter")?),
                all_gather: std::mem::transmute::<Handle, Move>(find(c"ncclAllGather")?),
                all_to_all: std::mem::transmute::<Handle, Move>(find(c"ncclAlltoAll")?),
                broadcast: std::mem::transmute::<Handle, Broadcast>(find(c"ncclBroadcast")?),
                version,
            })
        }
    }

    fn check(&self, result: c_int) -> Result<(), String> {
        // Neither done nor failed: under way.
        const IN_PROGRESS: c_int = 7;
        if result == 0 || result == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: NCCL has a text for every number.
        let text = unsafe { CStr::from_ptr((self.error)(result)) };
        Err(format!("NCCL: {}", text.to_string_lossy()))
    }

    /// All ranks of one device, by a thread each, since they wait for each other.
    pub fn ranks(&self, ranks: usize) -> Result<Vec<Rank>, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: a place of its type.
        self.check(unsafe { (self.unique_id)(&mut id) })?;
        let begin = Barrier::new(ranks);
        let join = |rank: usize| {
            begin.wait();
            let mut handle = std::ptr::null_mut();
            // SAFETY: as NCCL asks: all ranks with one number, each once.
            self.check(unsafe { (self.init)(&mut handle, ranks as c_int, id, rank as c_int) })?;
            Ok(Rank(handle))
        };
        std::thread::scope(|scope| {
            let joining: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
            let joined = joining.into_iter().map(|thread| thread.join().expect("a thread"));
            joined.collect()
        })
    }

    /// The same call as ours, of bf16.
    pub fn call(
        &self,
        rank: Rank,
        collective: Collective,
        (input, output): (u64, u64),
        stream: &Stream,
    ) -> Result<(), String> {
        let stream = stream.handle();
        // SAFETY: the memory of the bench, as long as the collective says, and a stream of the same device.
        let result = unsafe {
            match collective {
                Collective::AllReduce { count, .. } => {
                    (self.all_reduce)(input, output, count as usize, BFLOAT16, SUM, rank.0, stream)
                }
                Collective::ReduceScatter { count, .. } => {
                    (self.reduce_scatter)(input, output, count as usize, BFLOAT16, SUM, rank.0, stream)
                }
                Collective::AllGather { bytes } => {
                    (self.all_gather)(input, output, bytes as usize / 2, BFLOAT16, rank.0, stream)
                }
                Collective::AllToAll { bytes } => {
                    (self.all_to_all)(input, output, bytes as usize / 2, BFLOAT16, rank.0, stream)
                }
                Collective::Broadcast { bytes, root } => {
                    let (count, root) = (bytes as usize / 2, root as c_int);
                    (self.broadcast)(input, output, count, BFLOAT16, root, rank.0, stream)
                }
            }
        };
        self.check(result)
    }
}
