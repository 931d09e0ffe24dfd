//! The types of the C++ standard library that NIXL hands over, as GNU's libstdc++ has laid them out since GCC 5: strings, vectors, and the map of
//! parameters.
//!
//! They are written down here, and not taken from a C++ compiler, because the machines that Weft is built on may have none, and the one that wheels are
//! built with has another standard library. The layouts are part of that library's ABI and do not change; `tests/program.rs` holds them against a compiler.
//! Memory that changes hands is allocated as C++ does it, by functions of the library that the process has loaded already.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr::{self, NonNull, null, null_mut};
use std::sync::OnceLock;

/// What is needed of the standard library at run time.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    new: unsafe extern "C" fn(usize) -> *mut c_void,
    delete: unsafe extern "C" fn(*mut c_void),
    hash: unsafe extern "C" fn(*const c_void, usize, usize) -> usize,
}

/// What `std::hash` of a string begins with.
const HASH_SEED: usize = 0xc70f_6907;

impl Library {
    /// That of this process. NIXL is written in C++, so where it is, there is one.
    pub fn of_process() -> Result<Library, String> {
        static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
        FOUND.get_or_init(Library::find).clone()
    }

    fn find() -> Result<Library, String> {
        const FILE: &CStr = c"libstdc++.so.6";
        // SAFETY: a name that ends. What is loaded already is only counted once more.
        let loaded = unsafe { libc::dlopen(FILE.as_ptr(), libc::RTLD_LAZY) };
        let symbol = |name: &CStr| {
            // Whoever replaces the operators does so for the whole program; else they are those of the library, which NIXL may have loaded for itself alone.
            for scope in [libc::RTLD_DEFAULT, loaded] {
                // SAFETY: a scope, and a name that ends.
                let found = unsafe { libc::dlsym(scope, name.as_ptr()) };
                if !found.is_null() {
                    return Ok(found);
                }
            }
            Err(format!(
                "this process has no {} with {}",
                FILE.to_string_lossy(),
                name.to_string_lossy()
            ))
        };
        let (new, delete) = (symbol(c"_Znwm")?, symbol(c"_ZdlPv")?);
        let hash = symbol(c"_ZSt11_Hash_bytesPKvmm")?;
        // SAFETY: these names carry their types: operator new(size_t), operator delete(void*), and _Hash_bytes(const void*, size_t, size_t).
        unsafe {
            Ok(Library {
                new: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(usize) -> *mut c_void>(new),
                delete: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(delete),
                hash: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void, usize, usize) -> usize>(
                    hash,
                ),
            })
        }
    }

    /// Memory for so many values. There is always some: where there is none, the operator does not return.
    fn allocate<T>(&self, count: usize) -> NonNull<T> {
        // SAFETY: it takes any size.
        let bytes = unsafe { (self.new)(count * size_of::<T>()) };
        NonNull::new(bytes.cast()).expect("memory of operator new")
    }

    /// # Safety
    /// It came from `operator new`, and nobody uses it any more.
    unsafe fn free<T>(&self, memory: *mut T) {
        // SAFETY: as the caller says.
        unsafe { (self.delete)(memory.cast()) }
    }

    fn hash(&self, bytes: &[u8]) -> usize {
        // SAFETY: so many bytes are there.
        unsafe { (self.hash)(bytes.as_ptr().cast(), bytes.len(), HASH_SEED) }
    }
}

/// `std::string`. A short one lies inside itself, so it must not be moved as Rust moves values.
#[repr(C)]
pub struct CxxString {
    data: *mut u8,
    len: usize,
    inside: Inside,
}

#[derive(Clone, Copy)]
#[repr(C)]
union Inside {
    capacity: usize,
    bytes: [u8; 16],
}

impl fmt::Debug for CxxString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(self.bytes()))
    }
}

impl CxxString {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as C++ has made it, so many bytes are there.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }

    /// Makes one at a place where there is none.
    ///
    /// # Safety
    /// The place is as large as a string, and it is not moved afterwards.
    pub unsafe fn construct(place: *mut CxxString, bytes: &[u8], library: &Library) {
        // SAFETY: the place is there, and what is written has room: 15 bytes and a zero inside, or as much as was allocated.
        unsafe {
            let inside = (&raw mut (*place).inside).cast::<u8>();
            let data = if bytes.len() < size_of::<Inside>() {
                inside
            } else {
                (*place).inside.capacity = bytes.len();
                library.allocate::<u8>(bytes.len() + 1).as_ptr()
            };
            ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len());
            data.add(bytes.len()).write(0);
            (*place).data = data;
            (*place).len = bytes.len();
        }
    }

    /// Gives back what it has allocated.
    ///
    /// # Safety
    /// It is one, and nobody uses it any more.
    pub unsafe fn destroy(place: *mut CxxString, library: &Library) {
        // SAFETY: as the caller says.
        unsafe {
            if (*place).data != (&raw mut (*place).inside).cast() {
                library.free((*place).data);
            }
        }
    }

    /// Puts other bytes in the place of those that it holds.
    ///
    /// # Safety
    /// It is one that C++ or this module has made.
    pub unsafe fn assign(place: *mut CxxString, bytes: &[u8], library: &Library) {
        // SAFETY: as the caller says.
        unsafe {
            CxxString::destroy(place, library);
            CxxString::construct(place, bytes, library);
        }
    }

    /// Moves one to a place where there is none.
    ///
    /// # Safety
    /// The first is one, which nobody uses any more, and the second as large as one.
    unsafe fn relocate(from: *mut CxxString, to: *mut CxxString) {
        // SAFETY: as the caller says.
        unsafe {
            let inside = (*from).data == (&raw mut (*from).inside).cast();
            ptr::copy_nonoverlapping(from, to, 1);
            if inside {
                (*to).data = (&raw mut (*to).inside).cast();
            }
        }
    }
}

/// `std::vector`, for reading.
#[derive(Debug)]
#[repr(C)]
pub struct CxxVector<T> {
    begin: *mut T,
    end: *mut T,
    capacity: *mut T,
}

impl<T> CxxVector<T> {
    pub const fn empty() -> CxxVector<T> {
        CxxVector {
            begin: null_mut(),
            end: null_mut(),
            capacity: null_mut(),
        }
    }

    pub fn as_slice(&self) -> &[T] {
        if self.begin.is_null() {
            return &[];
        }
        // SAFETY: as C++ has made it, what lies between the two are values of it.
        unsafe { std::slice::from_raw_parts(self.begin, self.end.offset_from_unsigned(self.begin)) }
    }
}

impl<T: Copy> CxxVector<T> {
    /// One that C++ is given to keep.
    pub fn of(values: &[T], library: &Library) -> CxxVector<T> {
        let begin = library.allocate::<T>(values.len()).as_ptr();
        // SAFETY: so many were allocated.
        unsafe {
            ptr::copy_nonoverlapping(values.as_ptr(), begin, values.len());
            let end = begin.add(values.len());
            CxxVector {
                begin,
                end,
                capacity: end,
            }
        }
    }
}

/// `std::pair<std::string, std::string>`.
#[derive(Debug)]
#[repr(C)]
pub struct Pair {
    first: CxxString,
    second: CxxString,
}

impl CxxVector<Pair> {
    /// Adds pairs, as `emplace_back` would.
    ///
    /// # Safety
    /// It is a vector that C++ has made, and that nobody else uses meanwhile.
    pub unsafe fn extend(&mut self, more: &[(&[u8], &[u8])], library: &Library) {
        let (len, spare) = match self.begin.is_null() {
            true => (0, 0),
            // SAFETY: all three lie in one allocation.
            false => unsafe {
                (
                    self.end.offset_from_unsigned(self.begin),
                    self.capacity.offset_from_unsigned(self.end),
                )
            },
        };
        if spare < more.len() {
            let capacity = (len + more.len()).max(2 * len);
            let begin = library.allocate::<Pair>(capacity).as_ptr();
            // SAFETY: there are so many pairs, there is room for more than that, and the old memory is C++'s own.
            unsafe {
                for index in 0..len {
                    CxxString::relocate(
                        &raw mut (*self.begin.add(index)).first,
                        &raw mut (*begin.add(index)).first,
                    );
                    CxxString::relocate(
                        &raw mut (*self.begin.add(index)).second,
                        &raw mut (*begin.add(index)).second,
                    );
                }
                if !self.begin.is_null() {
                    library.free(self.begin);
                }
                self.begin = begin;
                self.end = begin.add(len);
                self.capacity = begin.add(capacity);
            }
        }
        for (first, second) in more {
            // SAFETY: there is room for all of them.
            unsafe {
                CxxString::construct(&raw mut (*self.end).first, first, library);
                CxxString::construct(&raw mut (*self.end).second, second, library);
                self.end = self.end.add(1);
            }
        }
    }
}

/// `std::unordered_map<std::string, std::string>`. It points into itself, so it must not be moved as Rust moves values.
#[derive(Debug)]
#[repr(C)]
pub struct CxxMap {
    buckets: *mut *const CxxNode,
    bucket_count: usize,
    /// The first of all nodes. Its place is that of the `next` of a node before it.
    first: *const CxxNode,
    count: usize,
    load_max: f32,
    next_resize: usize,
    only_bucket: *const CxxNode,
}

#[derive(Debug)]
#[repr(C)]
struct CxxNode {
    next: *const CxxNode,
    pair: Pair,
    hash: usize,
}

impl CxxMap {
    pub fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut next = self.first;
        std::iter::from_fn(move || {
            // SAFETY: as C++ has made it, each node leads to the next one or to none.
            let node = unsafe { next.as_ref() }?;
            next = node.next;
            Some((node.pair.first.bytes(), node.pair.second.bytes()))
        })
    }

    /// Makes one at a place where there is none. All pairs are in one bucket, until C++ adds to it; keys must differ.
    ///
    /// # Safety
    /// The place is as large as a map, and it is not moved afterwards.
    pub unsafe fn construct<'a>(
        place: *mut CxxMap,
        pairs: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
        library: &Library,
    ) {
        // SAFETY: the place is there, and so is every node that was allocated.
        unsafe {
            place.write(CxxMap {
                buckets: &raw mut (*place).only_bucket,
                bucket_count: 1,
                first: null(),
                count: 0,
                load_max: 1.0,
                next_resize: 0,
                only_bucket: null(),
            });
            for (key, value) in pairs {
                let node = library.allocate::<CxxNode>(1).as_ptr();
                CxxString::construct(&raw mut (*node).pair.first, key, library);
                CxxString::construct(&raw mut (*node).pair.second, value, library);
                (*node).hash = library.hash(key);
                (*node).next = (*place).first;
                (*place).first = node;
                (*place).count += 1;
                // A bucket names the node before its first one, which is the map itself.
                (*place).only_bucket = (&raw const (*place).first).cast();
            }
        }
    }

    /// Gives back what it has allocated.
    ///
    /// # Safety
    /// It is one, and nobody uses it any more.
    pub unsafe fn destroy(place: *mut CxxMap, library: &Library) {
        // SAFETY: as the caller says; nodes, and buckets beyond the only one, came from `operator new`.
        unsafe {
            let mut next = (*place).first.cast_mut();
            while !next.is_null() {
                let node = next;
                next = (*node).next.cast_mut();
                CxxString::destroy(&raw mut (*node).pair.first, library);
                CxxString::destroy(&raw mut (*node).pair.second, library);
                library.free(node);
            }
            if (*place).buckets != &raw mut (*place).only_bucket {
                library.free((*place).buckets);
            }
        }
    }
}

const _: () = assert!(size_of::<CxxString>() == 32 && size_of::<CxxVector<u8>>() == 24 && size_of::<CxxMap>() == 56);
