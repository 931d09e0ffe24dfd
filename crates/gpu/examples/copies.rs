//! What the copier takes for lists of pieces, by the host's clock from the list to the end, beside what the device copies at most.
//!
//! `cargo run --release -p weft-gpu --example copies`

use std::time::Instant;

use weft_gpu::{Copier, Device, DeviceMemory, PIECES_MAX, Piece, Pinned};

const RUNS: usize = 41;

fn main() -> Result<(), weft_gpu::GpuError> {
    let device = Device::open(0)?;
    println!("{device:?}");
    const ROOM: u64 = 1 << 30;
    let (from, to) = (
        DeviceMemory::allocate(&device, ROOM)?,
        DeviceMemory::allocate(&device, ROOM)?,
    );
    let host = Pinned::allocate(&device, 256 << 20)?;
    let mut copier = Copier::new(&device)?;
    for (what, to, from, room, bus) in [
        ("device to device", to.address(), from.address(), ROOM, false),
        ("host to device", to.address(), host.address(), host.len() as u64, true),
        (
            "device to host",
            host.address(),
            from.address(),
            host.len() as u64,
            true,
        ),
    ] {
        for (bytes, count) in [
            (4096, 1),
            (4096, 4096),
            (16 << 10, 1024),
            (16 << 10, 4096),
            (64 << 10, 4096),
            (1 << 20, 256),
            (64 << 20, 1),
        ] {
            if bytes * count > room || count > PIECES_MAX as u64 {
                continue;
            }
            for sum in [false, true] {
                let cells = room / bytes;
                // Every cell once, in an order far from that of the addresses.
                let place = |nth: u64, by: u64| (nth * by % cells) * bytes;
                let pieces: Vec<Piece> = (0..count)
                    .map(|nth| Piece {
                        to: to + place(nth, 7_919),
                        from: from + place(nth, 104_729),
                        len: bytes,
                    })
                    .collect();
                let mut took = Vec::new();
                for _ in 0..RUNS {
                    let began = Instant::now();
                    // SAFETY: within memory that lives until the end of this function.
                    let ticket = unsafe {
                        copier.begin_with(sum, bus, false, |list| {
                            for piece in &pieces {
                                list.push(*piece);
                            }
                        })?
                    };
                    let ended = copier.wait(ticket.0)?;
                    took.push(began.elapsed().as_secs_f64() * 1e6);
                    assert_eq!(ended.read_sum, ended.written_sum);
                }
                took.sort_by(f64::total_cmp);
                let median = took[RUNS / 2];
                let rate = (bytes * count) as f64 / median / 1e3;
                let summed = if sum { ", summed" } else { "" };
                println!("{what}{summed}: {count} x {bytes}: {median:.1} us, {rate:.0} GB/s");
            }
        }
    }
    Ok(())
}
