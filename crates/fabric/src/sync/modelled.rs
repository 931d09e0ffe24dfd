//! What is shared, as the model checker follows it.
//!
//! Loom keeps every value that an atomic ever had, and lets a load answer any of those that the orderings permit. So words in mapped memory are stood in for by
//! atomics of loom's, found by address; the bytes beside them stay what they are, and a cell for each place notices whoever reads or writes them while
//! another thread may write.
//!
//! Where a model says less, or more, than a machine does:
//!
//! - Loom follows fences of the one order that all threads agree on (`SeqCst`), but takes accesses in that order for `AcqRel`. Here there is a fence
//!   between a store and a load that are both in that order, and nowhere else: each of the two is then needed, and a model fails where either is weakened. Between two
//!   stores or two loads the language promises more than the model has, so that code which relies on that would be called wrong, and never the other way
//!   round. What the fence does beyond that, to the words of weaker accesses beside the two, is more than the language promises; the rings
//!   have no such words, and the ledger and the hazard have a fence of their own.
//! - Of the two barriers of which one costs nothing, [`order_own`] and [`order_others`], each is a fence here, as the kernel promises of the two together.
//! - Loom looks for a race between a store and the *last* access before it. A thread that loads its own word before it stores there would hide those of
//!   others, so it says that the word is its own ([`own_value`]).
//! - Loom's `unpark` hands over everything at once, whether or not the other thread ever parks. So threads park here on a lock of their own.
//! - A sleeper is never woken for no reason, and its time is never over, so that a wake-up that is lost is a deadlock, which loom reports.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc as Plain;
use std::time::Duration;

use loom::sync::{Condvar, Mutex};

pub(crate) use loom::cell::UnsafeCell;
pub(crate) use loom::sync::Arc;
pub(crate) use loom::sync::atomic::{Ordering, fence};

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        #[derive(Debug)]
        pub(crate) struct $name(loom::sync::atomic::$name);

        impl Default for $name {
            fn default() -> $name {
                $name::new(0)
            }
        }

        #[allow(dead_code, reason = "what one width needs the other may have")]
        impl $name {
            pub(crate) fn new(value: $value) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }
            pub(crate) fn load(&self, order: Ordering) -> $value {
                before_load(order);
                self.0.load(order)
            }
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, order);
                after_store(order);
            }
            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                before_load(order);
                let before = self.0.swap(value, order);
                after_store(order);
                before
            }
            pub(crate) fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                before_load(order);
                let before = self.0.fetch_add(value, order);
                after_store(order);
                before
            }
            pub(crate) fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                before_load(order);
                let before = self.0.fetch_max(value, order);
                after_store(order);
                before
            }
            pub(crate) fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                before_load(success);
                let before = self.0.compare_exchange(from, to, success, failure);
                if before.is_ok() {
                    after_store(success);
                }
                before
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

loom::thread_local! {
    /// Whether this thread has stored something in the order that all threads agree on, and loaded nothing in it since.
    static STORED: Cell<bool> = Cell::new(false);
}

fn after_store(order: Ordering) {
    if order == Ordering::SeqCst {
        STORED.with(|stored| stored.set(true));
    }
}

fn before_load(order: Ordering) {
    if order == Ordering::SeqCst && STORED.with(|stored| stored.replace(false)) {
        fence(Ordering::SeqCst);
    }
}

pub(crate) fn own_value(word: &AtomicU64) -> u64 {
    // SAFETY: the caller says that no other thread writes it; loom complains otherwise.
    unsafe { word.0.unsync_load() }
}

pub(crate) fn own_half(word: &AtomicU32) -> u32 {
    // SAFETY: only its owner writes it, and asks here; loom complains otherwise.
    unsafe { word.0.unsync_load() }
}

/// Words in memory that several threads of a model map: those of one address are the same, so nothing may be unmapped before the end of a model.
#[derive(Clone, Debug)]
pub(crate) struct SharedWords {
    base: *mut u8,
    stood_in: Plain<StoodIn>,
}

// SAFETY: as on a machine; and the threads of a model take turns on one.
unsafe impl Send for SharedWords {}
// SAFETY: loom switches between threads at its own operations only, and every word is one of those.
unsafe impl Sync for SharedWords {}

/// By place. Each is made when it is first asked for, which must be before other threads can: loom complains otherwise.
#[derive(Debug, Default)]
struct StoodIn {
    words: RefCell<BTreeMap<usize, Box<AtomicU64>>>,
    halves: RefCell<BTreeMap<usize, Box<AtomicU32>>>,
    bytes: RefCell<BTreeMap<usize, Box<UnsafeCell<()>>>>,
}

std::thread_local! {
    /// By address, until the end of an order. All threads of a model run on the thread that checks it.
    static KNOWN: RefCell<BTreeMap<usize, Plain<StoodIn>>> = RefCell::default();
}

impl SharedWords {
    pub(crate) fn new(base: *mut u8) -> SharedWords {
        let stood_in = KNOWN.with(|known| Plain::clone(known.borrow_mut().entry(base.addr()).or_default()));
        SharedWords { base, stood_in }
    }

    /// # Safety
    /// As on a machine.
    pub(crate) unsafe fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the place is of this type alone, and lives as long as `self` does.
        unsafe { at_place(&self.stood_in.words, at, || AtomicU64::new(0)) }
    }

    /// # Safety
    /// As on a machine.
    pub(crate) unsafe fn half(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the caller asks from within the model, where one thread runs at a time.
        unsafe { at_place(&self.stood_in.halves, at, || AtomicU32::new(0)) }
    }

    /// # Safety
    /// As on a machine.
    pub(crate) unsafe fn reading(&self, at: usize) -> Reading {
        // SAFETY: readers come from within the model, one thread at a time.
        let cell = unsafe { at_place(&self.stood_in.bytes, at, || UnsafeCell::new(())) };
        Reading {
            _access: cell.get(),
            // SAFETY: the caller's promise.
            bytes: unsafe { self.base.add(at) },
        }
    }

    /// # Safety
    /// As on a machine.
    pub(crate) unsafe fn writing(&self, at: usize) -> Writing {
        // SAFETY: the writer comes from within the model, one thread at a time.
        let cell = unsafe { at_place(&self.stood_in.bytes, at, || UnsafeCell::new(())) };
        Writing {
            _access: cell.get_mut(),
            // SAFETY: the caller's promise.
            bytes: unsafe { self.base.add(at) },
        }
    }
}

/// # Safety
/// The answer lives as long as the map does: nothing is ever taken out of it.
unsafe fn at_place<'a, T>(places: &RefCell<BTreeMap<usize, Box<T>>>, at: usize, new: impl FnOnce() -> T) -> &'a T {
    let mut places = places.borrow_mut();
    let place = places.entry(at).or_insert_with(|| Box::new(new()));
    // SAFETY: a box stays where it is, and the caller does not outlive it.
    unsafe { &*std::ptr::from_ref(&**place) }
}

/// Bytes that nobody writes until it is dropped: loom complains otherwise.
#[derive(Debug)]
pub(crate) struct Reading {
    _access: loom::cell::ConstPtr<()>,
    bytes: *const u8,
}

impl Reading {
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.bytes
    }
}

/// Bytes that nobody else reads or writes until it is dropped.
#[derive(Debug)]
pub(crate) struct Writing {
    _access: loom::cell::MutPtr<()>,
    bytes: *mut u8,
}

impl Writing {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.bytes
    }
}

pub(crate) fn take_part_in_order() {}

pub(crate) fn order_others() {
    fence(Ordering::SeqCst);
}

pub(crate) fn order_own() {
    fence(Ordering::SeqCst);
}

/// Threads that park on a lock of their own.
pub(crate) mod thread {
    use std::cell::RefCell;
    use std::io;

    use loom::sync::{Arc, Condvar, Mutex};

    #[derive(Clone, Debug)]
    pub(crate) struct Thread(Arc<Parking>);

    #[derive(Debug, Default)]
    struct Parking {
        unparked: Mutex<bool>,
        changed: Condvar,
    }

    loom::thread_local! {
        static CURRENT: RefCell<Option<Thread>> = RefCell::new(None);
    }

    pub(crate) fn current() -> Thread {
        CURRENT.with(|thread| thread.borrow_mut().get_or_insert_with(Thread::new).clone())
    }

    pub(crate) fn park() {
        let thread = current();
        let mut unparked = thread.0.unparked.lock().expect(super::NO_PANIC);
        while !*unparked {
            unparked = thread.0.changed.wait(unparked).expect(super::NO_PANIC);
        }
        *unparked = false;
    }

    impl Thread {
        fn new() -> Thread {
            Thread(Arc::new(Parking::default()))
        }

        pub(crate) fn unpark(&self) {
            *self.0.unparked.lock().expect(super::NO_PANIC) = true;
            self.0.changed.notify_one();
        }
    }

    #[derive(Debug)]
    pub(crate) struct Builder(loom::thread::Builder);

    #[derive(Debug)]
    pub(crate) struct JoinHandle<T> {
        handle: loom::thread::JoinHandle<T>,
        thread: Thread,
    }

    impl Builder {
        pub(crate) fn new() -> Builder {
            Builder(loom::thread::Builder::new().stack_size(super::STACK_WORDS))
        }

        pub(crate) fn name(self, name: String) -> Builder {
            Builder(self.0.name(name))
        }

        pub(crate) fn spawn<T: Send + 'static>(
            self,
            run: impl FnOnce() -> T + Send + 'static,
        ) -> io::Result<JoinHandle<T>> {
            let thread = Thread::new();
            let own = thread.clone();
            let handle = self.0.spawn(move || {
                CURRENT.with(|current| *current.borrow_mut() = Some(own));
                run()
            })?;
            Ok(JoinHandle { handle, thread })
        }
    }

    impl<T> JoinHandle<T> {
        pub(crate) fn thread(&self) -> &Thread {
            &self.thread
        }

        pub(crate) fn join(self) -> std::thread::Result<T> {
            self.handle.join()
        }
    }
}

const NO_PANIC: &str = "no thread of a model goes on after a panic";

/// Whoever sleeps, as the kernel sees it: by address of the word, how often it was woken. Its lock is the kernel's.
#[derive(Default)]
struct Kernel {
    woken: Mutex<BTreeMap<usize, u64>>,
    changed: Condvar,
}

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel::default();
}

pub(crate) fn wait<'a>(words: impl Iterator<Item = (&'a AtomicU32, u32)>, _: Duration) {
    let words: Vec<_> = words.collect();
    let mut woken = KERNEL.woken.lock().expect(NO_PANIC);
    let count = |woken: &BTreeMap<usize, u64>, word: &AtomicU32| woken.get(&address(word)).copied().unwrap_or(0);
    let before: Vec<u64> = words.iter().map(|(word, _)| count(&woken, word)).collect();
    if words.iter().any(|(word, value)| word.load(Ordering::Relaxed) != *value) {
        return;
    }
    while words
        .iter()
        .zip(&before)
        .all(|((word, _), before)| count(&woken, word) == *before)
    {
        woken = KERNEL.changed.wait(woken).expect(NO_PANIC);
    }
}

pub(crate) fn wake(word: &AtomicU32) {
    let mut woken = KERNEL.woken.lock().expect(NO_PANIC);
    *woken.entry(address(word)).or_default() += 1;
    KERNEL.changed.notify_all();
}

fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

/// Explores every order of a model's steps, with at most so many switches away from a thread that could have gone on, and says how many orders there were.
#[cfg(test)]
pub(crate) fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    use std::sync::atomic::AtomicU64 as Count;
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 5_000;
    let (orders, model) = (Plain::new(Count::new(0)), Plain::new(model));
    let (counted, begun) = (Plain::clone(&orders), std::time::Instant::now());
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let model = Plain::clone(&model);
        spawn(move || model())
            .join()
            .expect("a model that panics ends the check");
        KNOWN.with(|known| known.borrow_mut().clear());
    });
    let name = std::thread::current().name().unwrap_or("a model").to_owned();
    let (orders, took) = (orders.load(Ordering::Relaxed), begun.elapsed());
    println!("{name}: {orders} orders in {:.1} s", took.as_secs_f64());
}

/// A thread of a model.
#[cfg(test)]
pub(crate) fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    let spawned = thread::Builder::new().spawn(run);
    spawned.expect("a thread of a model is always to be had")
}

/// More of a stack than loom gives.
const STACK_WORDS: usize = 1 << 15;
