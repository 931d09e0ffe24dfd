//! What the copier takes for lists of pieces, by the host's clock from the list to the end: launched for every copy, staying for the next one, with sums, with several
//! copies under way, and over the bus.
//!
//! `cargo run --release -p weft-gpu --example copies`

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use weft_gpu::{Copier, Device, DeviceMemory, GpuError, KeptList, Piece, Pinned, STAY, Ticket};

const ROOM: u64 = 1 << 30;
const RUNS: usize = 61;
/// Until lists are kept, and a worker stays.
const WARM_UPS: usize = 12;
const AT_ONCE: usize = 4;
const SIZES: [(u64, u64); 7] = [
    (4 << 10, 1),
    (4 << 10, 4096),
    (16 << 10, 1024),
    (16 << 10, 4096),
    (64 << 10, 4096),
    (1 << 20, 256),
    (64 << 20, 1),
];
const PACES: [(&str, Pace); 4] = [
    ("launched", Pace::Launched),
    ("staying", Pace::Staying),
    ("summed", Pace::Summed),
    ("4 at once", Pace::SeveralAtOnce),
];

/// How the copies of a column follow each other.
#[derive(Clone, Copy, PartialEq)]
enum Pace {
    Launched,
    Staying,
    Summed,
    SeveralAtOnce,
}

/// One list, to be copied again and again.
struct Job {
    pieces: Vec<Piece>,
    sum: bool,
    bus: bool,
    kept: Option<KeptList>,
}

impl Job {
    fn begin(&mut self, copier: &mut Copier) -> Result<Ticket, GpuError> {
        // SAFETY: within memory that lives until the end of the program.
        unsafe {
            if let Some(kept) = &self.kept {
                return copier.begin_kept(self.sum, self.bus, kept);
            }
            let pieces = &self.pieces;
            let (ticket, kept) = copier.begin_with(self.sum, self.bus, true, |list| {
                assert!(pieces.iter().all(|piece| list.push(*piece)), "too many pieces");
            })?;
            self.kept = kept;
            Ok(ticket)
        }
    }
}

/// Every cell once at most, in an order far from that of the addresses.
fn pieces(to: u64, from: u64, room: u64, bytes: u64, count: u64) -> Vec<Piece> {
    let cells = room / bytes;
    let place = |nth: u64, by: u64| (nth * by % cells) * bytes;
    let piece = |nth| Piece {
        to: to + place(nth, 7_919),
        from: from + place(nth, 104_729),
        len: bytes,
    };
    (0..count).map(piece).collect()
}

/// The median of a copy, in microseconds; the mean where several are under way.
fn measure(copier: &mut Copier, job: &mut Job, pace: Pace) -> Result<f64, GpuError> {
    for _ in 0..WARM_UPS {
        let ticket = job.begin(copier)?;
        copier.wait(ticket)?;
    }
    if pace == Pace::SeveralAtOnce {
        let (began, mut under_way) = (Instant::now(), VecDeque::new());
        for _ in 0..RUNS {
            if under_way.len() == AT_ONCE
                && let Some(ticket) = under_way.pop_front()
            {
                copier.wait(ticket)?;
            }
            under_way.push_back(job.begin(copier)?);
        }
        for ticket in under_way {
            copier.wait(ticket)?;
        }
        return Ok(began.elapsed().as_secs_f64() * 1e6 / RUNS as f64);
    }
    let mut took = Vec::new();
    for _ in 0..RUNS {
        let began = Instant::now();
        let ticket = job.begin(copier)?;
        let ended = copier.wait(ticket)?;
        took.push(began.elapsed().as_secs_f64() * 1e6);
        assert_eq!(ended.read_sum, ended.written_sum);
    }
    took.sort_by(f64::total_cmp);
    Ok(took[RUNS / 2])
}

fn row(what: &str, bytes: u64, cells: &[f64]) {
    print!("{what:>14}");
    for us in cells {
        print!(" {us:>8.1} {:>5.0}", bytes as f64 / us / 1e3);
    }
    println!();
}

fn main() -> Result<(), GpuError> {
    let device = Device::open(0)?;
    println!("{device:?}: microseconds and GB/s");
    let (from, to) = (
        DeviceMemory::allocate(&device, ROOM)?,
        DeviceMemory::allocate(&device, ROOM)?,
    );
    let mut state = 1u64;
    let noise: Vec<u8> = (0..64 << 20)
        .map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) as u8
        })
        .collect();
    for at in (0..ROOM).step_by(noise.len()) {
        from.write(at, &noise)?;
    }
    print!("{:>14}", "in the device");
    PACES.iter().for_each(|(title, _)| print!(" {title:>14}"));
    println!();
    for (bytes, count) in SIZES {
        let mut cells = Vec::new();
        for (_, pace) in PACES {
            let stay = match pace {
                Pace::Launched => Duration::ZERO,
                _ => STAY,
            };
            let mut copier = Copier::new(&device, stay)?;
            let mut job = Job {
                pieces: pieces(to.address(), from.address(), ROOM, bytes, count),
                sum: pace == Pace::Summed,
                bus: false,
                kept: None,
            };
            cells.push(measure(&mut copier, &mut job, pace)?);
            // It goes before the copier.
            drop(job);
        }
        row(&format!("{count} x {} K", bytes >> 10), bytes * count, &cells);
    }
    let host = Pinned::allocate(&device, 64 << 20)?;
    println!("  over the bus      to device         summed    from device         summed");
    for (bytes, count) in [(4 << 10, 1), (16 << 10, 1024), (64 << 20, 1)] {
        let mut cells = Vec::new();
        for (to, from) in [(to.address(), host.address()), (host.address(), from.address())] {
            for sum in [false, true] {
                let mut copier = Copier::new(&device, STAY)?;
                let mut job = Job {
                    pieces: pieces(to, from, host.len() as u64, bytes, count),
                    sum,
                    bus: true,
                    kept: None,
                };
                cells.push(measure(&mut copier, &mut job, Pace::Staying)?);
                drop(job);
            }
        }
        row(&format!("{count} x {} K", bytes >> 10), bytes * count, &cells);
    }
    Ok(())
}
