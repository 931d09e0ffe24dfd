//! The copier and the memory of a device, on a device.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_gpu::{
    Copier, Device, DeviceMemory, EXPORT_BYTES, GpuError, PIECES_MAX, Piece, Pinned, PinnedRange, STAY, is_pinned,
};
use weft_testing::{Need, has};

/// Numbers by chance, the same every time.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

#[derive(Clone, PartialEq)]
#[repr(align(4096))]
struct Page([u8; 4096]);

fn device() -> Option<Arc<Device>> {
    has(Need::Gpu).then(|| Device::open(0).expect("a device"))
}

/// Copies between device memory and host bytes, by the copier itself.
struct Bench {
    copier: Copier,
    pinned: Pinned,
}

impl Bench {
    fn new(device: &Arc<Device>, len: usize) -> Bench {
        Bench {
            copier: Copier::new(device, STAY).expect("a copier"),
            pinned: Pinned::allocate(device, len).expect("host memory"),
        }
    }

    fn put(&mut self, to: &DeviceMemory, bytes: &[u8]) {
        assert!(bytes.len() <= self.pinned.len() && bytes.len() as u64 <= to.len());
        // SAFETY: both are so long, and the copy is waited for.
        unsafe {
            self.pinned.as_ptr().copy_from(bytes.as_ptr(), bytes.len());
            let piece = Piece {
                to: to.address(),
                from: self.pinned.address(),
                len: bytes.len() as u64,
            };
            let ticket = self.copier.begin(&[piece], false).expect("a copy");
            self.copier.wait(ticket).expect("copied");
        }
    }

    fn get(&mut self, from: &DeviceMemory) -> Vec<u8> {
        let mut bytes = vec![0; from.len() as usize];
        // SAFETY: as above.
        unsafe {
            let piece = Piece {
                to: self.pinned.address(),
                from: from.address(),
                len: from.len(),
            };
            let ticket = self.copier.begin(&[piece], false).expect("a copy");
            self.copier.wait(ticket).expect("copied");
            bytes.as_mut_ptr().copy_from(self.pinned.as_ptr(), bytes.len());
        }
        bytes
    }
}

#[test]
fn lists_of_any_pieces_are_copied_and_nothing_else() {
    let Some(device) = device() else { return };
    const LEN: usize = 3 << 20;
    let mut bench = Bench::new(&device, LEN);
    let (from, to) = (
        DeviceMemory::allocate(&device, LEN as u64).expect("memory"),
        DeviceMemory::allocate(&device, LEN as u64).expect("memory"),
    );
    for seed in 0..60 {
        let mut chance = Chance(seed);
        let (source, mut expected) = (chance.bytes(LEN), chance.bytes(LEN));
        bench.put(&from, &source);
        bench.put(&to, &expected);
        // Pieces that do not overlap where they are written: one in each cell.
        let cell = [64, 1000, 4096, 70_000][seed as usize % 4];
        let cells = (LEN as u64 / cell).min(PIECES_MAX as u64);
        let aligned = seed % 3 == 0;
        let mut pieces = Vec::new();
        for nth in 0..cells {
            let mut len = chance.below(cell + 1);
            let mut at = nth * cell + chance.below(cell - len + 1);
            let mut out = chance.below(LEN as u64 - len + 1);
            if aligned {
                (len, at, out) = (len / 16 * 16, (nth * cell).next_multiple_of(16), out / 16 * 16);
                len = len.min(((nth + 1) * cell).saturating_sub(at));
            }
            pieces.push(Piece {
                to: to.address() + at,
                from: from.address() + out,
                len,
            });
            expected[at as usize..(at + len) as usize].copy_from_slice(&source[out as usize..(out + len) as usize]);
        }
        // SAFETY: every piece lies in its memory, which lives until the copy has ended.
        let ticket = unsafe { bench.copier.begin(&pieces, seed % 2 == 1) }.expect("a copy");
        let copied = bench.copier.wait(ticket).expect("copied");
        assert_eq!(copied.read_sum, copied.written_sum);
        assert_eq!(copied.read_sum != 0, seed % 2 == 1);
        assert!(bench.get(&to) == expected, "seed {seed}");
    }
}

/// Copies follow each other at once, a little before the worker leaves, at the very moment, and long after; singly and several at a time. Whatever happens to be true of the
/// worker, each is carried out once, and nothing else is.
#[test]
fn orders_are_carried_out_whether_somebody_stays_or_leaves() {
    let Some(device) = device() else { return };
    const CELL: u64 = 24 << 10;
    const CELLS: u64 = 96;
    const LEN: u64 = CELL * CELLS;
    let (from, to) = (
        DeviceMemory::allocate(&device, LEN).expect("memory"),
        DeviceMemory::allocate(&device, LEN).expect("memory"),
    );
    let mut bench = Bench::new(&device, LEN as usize);
    let source = Chance(40).bytes(LEN as usize);
    bench.put(&from, &source);
    let mut copier = Copier::new(&device, STAY).expect("a copier");
    let mut chance = Chance(41);
    let mut expected = vec![0; LEN as usize];
    bench.put(&to, &expected);
    let mut under_way = VecDeque::new();
    let copies = 1500;
    for nth in 0..copies {
        // A whole stretch of cells, from anywhere, into cells of its own: those of a copy under way are not written again.
        let first = nth % 8 * 12;
        let count = [1, 1, 5, 12][chance.below(4) as usize];
        let odd = chance.below(4) == 0;
        let mut pieces = Vec::new();
        for cell in first..first + count {
            let len = if odd {
                chance.below(CELL + 1)
            } else {
                chance.below(CELL / 16 + 1) * 16
            };
            let out = chance.below(LEN - len + 1) / if odd { 1 } else { 16 } * if odd { 1 } else { 16 };
            let at = cell * CELL;
            pieces.push(Piece {
                to: to.address() + at,
                from: from.address() + out,
                len,
            });
            expected[at as usize..(at + len) as usize].copy_from_slice(&source[out as usize..(out + len) as usize]);
        }
        let sum = chance.below(5) == 0;
        while under_way.len() > (nth as usize / 100) % 7
            && let Some(ticket) = under_way.pop_front()
        {
            let copied = copier.wait(ticket).expect("copied");
            assert_eq!(copied.read_sum, copied.written_sum);
        }
        // SAFETY: every piece lies in its memory, which lives until the copy has ended.
        under_way.push_back(unsafe { copier.begin(&pieces, sum) }.expect("a copy"));
        let pause = match chance.below(40) {
            0..=2 => 15 + chance.below(20),
            3 => 200,
            _ => 0,
        };
        let until = Instant::now() + Duration::from_micros(pause);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
    for ticket in under_way {
        copier.wait(ticket).expect("copied");
    }
    assert!(bench.get(&to) == expected);
    assert!(copier.launches() < copies as u32, "nobody ever stayed");
}

#[test]
fn a_worker_that_stays_goes_with_its_copier() {
    let Some(device) = device() else { return };
    const LEN: u64 = 1 << 20;
    let memory = DeviceMemory::allocate(&device, 2 * LEN).expect("memory");
    for _ in 0..20 {
        let mut copier = Copier::new(&device, Duration::from_millis(1)).expect("a copier");
        for _ in 0..20 {
            let piece = Piece {
                to: memory.address() + LEN,
                from: memory.address(),
                len: LEN,
            };
            // SAFETY: within memory that lives until the copy has ended.
            let ticket = unsafe { copier.begin(&[piece], true) }.expect("a copy");
            copier.wait(ticket).expect("copied");
        }
        assert!(copier.launches() < 20);
    }
}

#[test]
fn sums_tell_of_any_difference() {
    let Some(device) = device() else { return };
    const LEN: u64 = 100_003;
    let mut bench = Bench::new(&device, LEN as usize);
    let (from, to) = (
        DeviceMemory::allocate(&device, LEN).expect("memory"),
        DeviceMemory::allocate(&device, LEN).expect("memory"),
    );
    let mut chance = Chance(7);
    let mut bytes = chance.bytes(LEN as usize);
    let mut sums = Vec::new();
    for _ in 0..40 {
        bench.put(&from, &bytes);
        let piece = Piece {
            to: to.address(),
            from: from.address(),
            len: LEN,
        };
        // SAFETY: within both memories, which live until it has ended.
        let ticket = unsafe { bench.copier.begin(&[piece], true) }.expect("a copy");
        let copied = bench.copier.wait(ticket).expect("copied");
        assert_eq!(copied.read_sum, copied.written_sum);
        assert!(!sums.contains(&copied.read_sum), "two contents have one sum");
        sums.push(copied.read_sum);
        // A bit, a byte, two words that change places.
        match sums.len() % 3 {
            0 => bytes[chance.below(LEN) as usize] ^= 1 << chance.below(8),
            1 => bytes[chance.below(LEN) as usize] ^= 0xff,
            _ => bytes.swap(
                16 * chance.below(LEN / 32) as usize,
                LEN as usize / 2 + chance.below(LEN / 32) as usize,
            ),
        }
    }
}

#[test]
fn host_memory_is_reached_where_it_lies() {
    let Some(device) = device() else { return };
    const LEN: usize = 1 << 20;
    let mut chance = Chance(3);
    // Pages are pinned once, so these two share none.
    let bytes = chance.bytes(LEN);
    let (mut source, mut sink) = (vec![Page([0; 4096]); LEN / 4096], vec![Page([0; 4096]); LEN / 4096]);
    for (page, bytes) in source.iter_mut().zip(bytes.chunks(4096)) {
        page.0.copy_from_slice(bytes);
    }
    let memory = DeviceMemory::allocate(&device, LEN as u64).expect("memory");
    let mut copier = Copier::new(&device, STAY).expect("a copier");
    // SAFETY: both vectors stay where they are until the end of the test.
    let pins = unsafe {
        [
            PinnedRange::shared(&device, source.as_ptr() as usize, LEN, true).expect("pinned"),
            PinnedRange::shared(&device, sink.as_mut_ptr() as usize, LEN, true).expect("pinned"),
        ]
    };
    for (to, from) in [
        (memory.address(), source.as_ptr() as u64),
        (sink.as_mut_ptr() as u64, memory.address()),
    ] {
        let pieces: Vec<Piece> = (0..256)
            .map(|nth| Piece {
                to: to + nth * 4096,
                from: from + nth * 4096,
                len: 4096,
            })
            .collect();
        // SAFETY: within memory that is pinned or the device's, all of which lives until it has ended.
        let ticket = unsafe {
            copier.begin_with(true, true, false, |list| {
                assert!(pieces.iter().all(|piece| list.push(*piece)));
            })
        }
        .expect("a copy");
        let copied = copier.wait(ticket.0).expect("copied");
        assert_eq!(copied.read_sum, copied.written_sum);
    }
    drop(pins);
    assert!(sink == source && sink.iter().flat_map(|page| page.0).eq(bytes));
}

#[test]
fn a_pin_lasts_until_the_last_of_those_who_share_it_has_gone() {
    let Some(device) = device() else { return };
    let mut pages = vec![Page([0; 4096]); 64];
    let (whole, part) = (pages.as_mut_ptr() as usize, pages[7..].as_mut_ptr() as usize + 100);
    // SAFETY: the pages stay where they are until the end of the test.
    let pin = |at: usize, len: usize| unsafe { PinnedRange::shared(&device, at, len, true) };
    let outer = pin(whole, 64 * 4096).expect("pinned");
    let inner = pin(part, 5000).expect("shared");
    assert!(Arc::ptr_eq(&outer, &inner));
    assert!(PinnedRange::covering(part, 5000).is_some());
    // It may go at any moment, so that nobody takes it for somebody else's.
    assert!(!is_pinned(part, 5000) && !is_pinned(whole, 64 * 4096));
    assert!(pin(whole + 63 * 4096, 2 * 4096).is_err(), "half of it is pinned");
    drop(outer);
    assert!(PinnedRange::covering(whole, 64 * 4096).is_some());
    drop(inner);
    assert!(PinnedRange::covering(part, 5000).is_none());
    drop(pin(part, 5000).expect("pinned by itself"));
    let theirs = Pinned::allocate(&device, 4096).expect("memory");
    assert!(is_pinned(theirs.as_ptr() as usize, 4096));
    // Many at once, of whom one pins and the others wait for it.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..200).for_each(|_| drop(pin(whole, 64 * 4096).expect("pinned"))));
        }
    });
}

#[test]
fn bad_requests_are_told_apart() {
    let Some(device) = device() else { return };
    assert!(matches!(
        Device::open(999),
        Err(GpuError::NoDevice { ordinal: 999, .. })
    ));
    assert!(matches!(
        DeviceMemory::allocate(&device, 1 << 50),
        Err(GpuError::OutOfMemory { .. } | GpuError::Call { .. })
    ));
    let here = [0u8; 16];
    // SAFETY: refused, since it is no device's memory.
    let wrong = unsafe { DeviceMemory::foreign(&device, here.as_ptr() as u64, 16, Box::new(())) };
    assert!(matches!(wrong, Err(GpuError::NotDeviceMemory { .. })), "{wrong:?}");
    let memory = DeviceMemory::allocate(&device, 4096).expect("memory");
    // SAFETY: as above.
    let long = unsafe { DeviceMemory::foreign(&device, memory.address(), 1 << 40, Box::new(())) };
    assert!(matches!(long, Err(GpuError::NotDeviceMemory { .. })), "{long:?}");
    let mut chance = Chance(11);
    for _ in 0..200 {
        let mut bytes = [0; EXPORT_BYTES];
        bytes.iter_mut().for_each(|byte| *byte = chance.next() as u8);
        bytes[0] = 1 + chance.below(2) as u8;
        bytes[10..].iter_mut().take(6).for_each(|byte| *byte = 0);
        if chance.below(4) > 0 {
            bytes[96..].copy_from_slice(device.identity());
        }
        let file = std::fs::File::open("/dev/null").expect("a file");
        let with = chance.below(2) == 0;
        let refused = DeviceMemory::import(&bytes, with.then(|| file.as_fd()), true);
        assert!(matches!(refused, Err(GpuError::BadExport)), "{refused:?}");
    }
}

/// Not a test but the other process of the one below; alone it does nothing.
#[test]
fn reads_what_was_exported() {
    let Ok(number) = std::env::var("WEFT_TEST_EXPORT") else {
        return;
    };
    let device = Device::open(0).expect("a device");
    let mut bytes = [0; EXPORT_BYTES];
    std::io::stdin().read_exact(&mut bytes).expect("a description");
    let number: i32 = number.parse().expect("a number");
    // SAFETY: the parent left the descriptor open for this process alone.
    let file = (number >= 0).then(|| unsafe { OwnedFd::from_raw_fd(number) });
    let theirs = DeviceMemory::import(&bytes, file.as_ref().map(AsFd::as_fd), true).expect("imported");
    let mut bench = Bench::new(&device, theirs.len() as usize);
    let read = bench.get(&theirs);
    assert!(read == Chance(5).bytes(read.len()), "the parent's bytes");
    bench.put(&theirs, &Chance(6).bytes(read.len()));
}

#[test]
fn memory_is_reached_from_another_process() {
    let Some(device) = device() else { return };
    const LEN: usize = 300_000;
    let own = Arc::new(DeviceMemory::allocate(&device, 1 << 20).expect("memory"));
    // Memory within an allocation, as frameworks hand it out.
    // SAFETY: the owner is what holds it.
    let inner = unsafe { DeviceMemory::foreign(&device, own.address() + 512, LEN as u64, Box::new(own.clone())) }
        .expect("memory");
    let mut bench = Bench::new(&device, LEN);
    bench.put(&inner, &Chance(5).bytes(LEN));
    let export = inner.export().expect("exported");
    let number = export.file.as_ref().map_or(-1, |file| file.as_raw_fd());
    if number >= 0 {
        // SAFETY: a plain call on a descriptor of ours.
        unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
    }
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "reads_what_was_exported", "--nocapture"])
        .env("WEFT_TEST_EXPORT", number.to_string())
        .stdin(Stdio::piped())
        .spawn()
        .expect("a child");
    let said = child.stdin.as_mut().expect("its input").write_all(&export.bytes);
    said.expect("described");
    assert!(child.wait().expect("an end").success());
    assert!(bench.get(&inner) == Chance(6).bytes(LEN), "what the child wrote");
}
