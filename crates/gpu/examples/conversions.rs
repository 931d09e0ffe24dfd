//! What conversions of blocks take, by the device's clock, beside the card's own copy: 256 MiB of K and V in bf16, in blocks of 16 KiB to 1 MiB that lie anywhere.
//!
//! `cargo run --release -p weft-gpu --example conversions`
//!
//! GB/s are bytes that were read and bytes that were written, halved, so that a copy and a conversion are told alike.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, cuCtxSetCurrent, cuDevicePrimaryCtxRetain, cuMemcpyDtoDAsync_v2};
use weft_gpu::{ConversionEnds, Converter, Device, DeviceMemory, DeviceProgram, Moment, Stream};
use weft_plan::Datatype;
use weft_plan::conversion::{Conversion, Elements, Factor, Narrowing, PagedEnd, SCALE_BYTES, Scales, convert};
use weft_plan::pages::{Pages, PagesShape, PagesStrides, Table};

const BYTES: u64 = 256 << 20;
const ELEMENTS: u64 = 128;
const RUNS: usize = 15;
/// Heads, and tokens of a block.
const SHAPES: [(u64, u64); 4] = [(2, 16), (8, 16), (32, 16), (32, 64)];

/// Numbers by chance.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 31)
    }
    fn shuffled(&mut self, count: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..count).collect();
        (1..all.len())
            .rev()
            .for_each(|nth| all.swap(nth, (self.next() % (nth as u64 + 1)) as usize));
        all
    }
}

struct Bench {
    device: Arc<Device>,
    converter: Converter,
    stream: Stream,
    from: DeviceMemory,
    to: DeviceMemory,
    chance: Chance,
}

/// How heads and tokens lie in a block.
#[derive(Clone, Copy)]
enum Order {
    HeadsFirst,
    TokensFirst,
}

impl Order {
    /// K and V in each block.
    fn pages(self, blocks: u64, tokens: u64, heads: u64, unit_bytes: u64) -> Pages {
        let (token, head) = match self {
            Order::HeadsFirst => (unit_bytes, tokens * unit_bytes),
            Order::TokensFirst => (heads * unit_bytes, unit_bytes),
        };
        let part = tokens * heads * unit_bytes;
        let shape = PagesShape {
            blocks,
            tokens,
            heads: 0..heads,
            parts: 2,
            unit_bytes,
        };
        let strides = PagesStrides {
            base: 0,
            part,
            block: 2 * part,
            token,
            head,
        };
        Pages::with_strides(shape, strides).expect("dense pages")
    }
}

/// A conversion, and where its ends lie from the beginning of the two memories on.
type Placed = (Conversion, ConversionEnds);

impl Bench {
    /// GB/s of the median.
    fn measure(&self, bytes: u64, work: impl Fn() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
        let mut took = Vec::new();
        for _ in 0..RUNS + 2 {
            let (before, after) = (Moment::unmarked(&self.device)?, Moment::unmarked(&self.device)?);
            before.mark(&self.stream)?;
            work()?;
            after.mark(&self.stream)?;
            self.stream.synchronize()?;
            took.push(after.since(&before)?.as_secs_f64());
        }
        took.drain(..2);
        took.sort_by(f64::total_cmp);
        Ok(bytes as f64 / took[RUNS / 2] / 1e9)
    }

    fn run(&self, placed: &[Placed]) -> Result<f64, Box<dyn Error>> {
        let all: Vec<_> = placed
            .iter()
            .map(|(conversion, ends)| {
                let ends = ConversionEnds {
                    from: self.from.address() + ends.from,
                    from_scales: self.from.address() + ends.from_scales,
                    to: self.to.address() + ends.to,
                    to_scales: self.to.address() + ends.to_scales,
                };
                (conversion, ends)
            })
            .collect();
        let prepared = self.converter.prepare(&DeviceProgram::new(&all)?)?;
        let moved = |(conversion, _): &Placed| conversion.bytes_read() + conversion.bytes_written();
        let bytes = placed.iter().map(moved).sum::<u64>() / 2;
        self.measure(bytes, || {
            // SAFETY: all of it lies within the two memories, which live until the program ends.
            Ok(unsafe { self.converter.launch(&prepared, self.stream.handle()) }?)
        })
    }

    fn one(
        &mut self,
        from: (&Pages, &Elements),
        to: (&Pages, &Elements),
        ends: ConversionEnds,
    ) -> Result<Placed, Box<dyn Error>> {
        let tokens = from.0.shape().blocks * from.0.shape().tokens;
        let (near, far) = (
            self.chance.shuffled(from.0.shape().blocks),
            self.chance.shuffled(to.0.shape().blocks),
        );
        let side = |(pages, elements), blocks| PagedEnd {
            table: Table { pages, blocks },
            elements,
        };
        let heads = from.0.shape().heads.clone();
        let heads = heads.start.max(to.0.shape().heads.start)..heads.end.min(to.0.shape().heads.end);
        let conversion = convert(side(from, &near), side(to, &far), 0..tokens, heads, Narrowing::Allowed)?;
        Ok((conversion, ends))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(0)?;
    let room = BYTES + (64 << 20);
    let mut bench = Bench {
        converter: Converter::new(&device)?,
        stream: Stream::new(&device)?,
        from: DeviceMemory::allocate(&device, room)?,
        to: DeviceMemory::allocate(&device, room)?,
        device,
        chance: Chance(1),
    };
    let mut words = Vec::with_capacity(room as usize);
    while words.len() < room as usize {
        // Numbers between 1/2 and 4 of either sign, whatever they are taken for.
        words.extend(((bench.chance.next() & 0x80ff_80ff_80ff_80ff) | 0x3f00_3f00_3f00_3f00).to_ne_bytes());
    }
    bench.from.write(0, &words)?;
    bench.to.write(0, &words)?;
    let mut context: CUcontext = std::ptr::null_mut();
    // SAFETY: the driver is loaded and the device there; this thread has no other context that it wants back.
    unsafe {
        cuDevicePrimaryCtxRetain(&mut context, 0).result()?;
        cuCtxSetCurrent(context).result()?;
    }
    let (to, from, stream) = (bench.to.address(), bench.from.address(), bench.stream.handle());
    let own = bench.measure(BYTES, || {
        // SAFETY: both memories are as long.
        Ok(unsafe { cuMemcpyDtoDAsync_v2(to, from, BYTES as usize, stream as _) }.result()?)
    })?;
    println!("the card's own copy of 256 MiB: {own:.0} GB/s\n");
    let (bf16, fp8) = (Elements::of(Datatype::Bf16), Elements::of(Datatype::Fp8E4m3));
    let fixed = vec![Factor::new(0.05).expect("a scale"), Factor::new(0.04).expect("a scale")];
    let fixed = Elements {
        datatype: Datatype::Fp8E4m3,
        scales: Scales::PerPart(fixed),
    };
    for (heads, tokens) in SHAPES {
        let unit = ELEMENTS * 2;
        let block = 2 * heads * tokens * unit;
        let blocks = BYTES / block;
        use Order::{HeadsFirst, TokensFirst};
        let (hnd, nhd) = (
            HeadsFirst.pages(blocks, tokens, heads, unit),
            TokensFirst.pages(blocks, tokens, heads, unit),
        );
        let wide = TokensFirst.pages(blocks / 4, 4 * tokens, heads, unit);
        let narrow = TokensFirst.pages(blocks, tokens, heads, unit / 2);
        let none = ConversionEnds::default();
        let mut rows: Vec<(&str, Vec<Placed>)> = vec![
            ("whole blocks", vec![bench.one((&nhd, &bf16), (&nhd, &bf16), none)?]),
            ("NHD to HND", vec![bench.one((&nhd, &bf16), (&hnd, &bf16), none)?]),
            ("HND to NHD", vec![bench.one((&hnd, &bf16), (&nhd, &bf16), none)?]),
            (
                "blocks of 4 times as many tokens",
                vec![bench.one((&nhd, &bf16), (&wide, &bf16), none)?],
            ),
        ];
        if heads >= 8 {
            // Four ranks' shares of the heads become those of two.
            let mut placed = Vec::new();
            for rank in 0..4 {
                let share = |ranks: u64, of: u64| {
                    let held = heads / ranks;
                    let shape = PagesShape {
                        blocks,
                        tokens,
                        heads: of * held..(of + 1) * held,
                        parts: 2,
                        unit_bytes: unit,
                    };
                    let part = tokens * held * unit;
                    let strides = PagesStrides {
                        base: 0,
                        part,
                        block: 2 * part,
                        token: held * unit,
                        head: unit,
                    };
                    Pages::with_strides(shape, strides).expect("a share")
                };
                let (four, two) = (share(4, rank), share(2, rank / 2));
                let ends = ConversionEnds {
                    from: rank * (BYTES / 4),
                    to: rank / 2 * (BYTES / 2),
                    ..none
                };
                placed.push(bench.one((&four, &bf16), (&two, &bf16), ends)?);
            }
            rows.push(("4 ranks to 2", placed));
        }
        rows.push((
            "bf16 to fp8, scales of K and V",
            vec![bench.one((&nhd, &bf16), (&narrow, &fixed), none)?],
        ));
        rows.push((
            "fp8 to bf16, scales of K and V",
            vec![bench.one((&narrow, &fixed), (&nhd, &bf16), none)?],
        ));
        rows.push(("bf16 to fp8, no scales, NHD to HND", {
            let narrow = HeadsFirst.pages(blocks, tokens, heads, unit / 2);
            vec![bench.one((&nhd, &bf16), (&narrow, &fp8), none)?]
        }));
        let beside = Elements {
            datatype: Datatype::Fp8E4m3,
            scales: Scales::Beside(Box::new(TokensFirst.pages(blocks, tokens, heads, SCALE_BYTES))),
        };
        let scales = ConversionEnds {
            to_scales: BYTES,
            ..none
        };
        rows.push((
            "bf16 to fp8, a scale a token and head",
            vec![bench.one((&nhd, &bf16), (&narrow, &beside), scales)?],
        ));
        let scales = ConversionEnds {
            from_scales: BYTES,
            ..none
        };
        rows.push((
            "the same back",
            vec![bench.one((&narrow, &beside), (&nhd, &bf16), scales)?],
        ));
        println!("{blocks} blocks of {} KiB: {heads} heads, {tokens} tokens", block >> 10);
        for (name, placed) in rows {
            let speed = bench.run(&placed)?;
            println!("  {name:<40} {speed:>6.0} GB/s {:>4.0} %", 100.0 * speed / own);
        }
    }
    Ok(())
}
