//! What conversions of blocks take on the processor, in this thread's own time, beside a copy past the cache: 64 MiB of K and V in bf16, in blocks of 64 KiB that lie anywhere.
//!
//! `cargo run --release -p weft-fabric --example host_conversions`
//!
//! GB/s are bytes that were read and bytes that were written, halved, so that a copy and a conversion are told alike.

use std::error::Error;

use weft_fabric::conversion::{HostEnds, convert};
use weft_fabric::copy::copy_streaming;
use weft_plan::Datatype;
use weft_plan::conversion::{
    Conversion, Elements, Factor, Narrowing, PagedEnd, SCALE_BYTES, Scales, convert as conversion_of,
};
use weft_plan::pages::{Pages, PagesError, PagesShape, PagesStrides, Table};

const BLOCKS: u64 = 1024;
const TOKENS: u64 = 16;
const HEADS: u64 = 8;
const ELEMENTS: u64 = 128;
const RUNS: usize = 9;

/// K and V in each block; tokens before heads, or heads before tokens.
fn pages(tokens_first: bool, unit_bytes: u64, tokens: u64) -> Result<Pages, PagesError> {
    let (token, head) = match tokens_first {
        true => (HEADS * unit_bytes, unit_bytes),
        false => (unit_bytes, tokens * unit_bytes),
    };
    let part = tokens * HEADS * unit_bytes;
    let shape = PagesShape {
        blocks: BLOCKS * TOKENS / tokens,
        tokens,
        heads: 0..HEADS,
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
    Pages::with_strides(shape, strides)
}

fn own_seconds() -> f64 {
    // SAFETY: all zeros are a time.
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: the time is ours to be written.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

fn median(mut took: Vec<f64>) -> f64 {
    took.sort_by(f64::total_cmp);
    took[took.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let of = Elements::of;
    let (bf16, f16, f32) = (of(Datatype::Bf16), of(Datatype::F16), of(Datatype::F32));
    let factors = [0.05, 0.04].map(|value| Factor::new(value).expect("a scale"));
    let fixed = Elements {
        datatype: Datatype::Fp8E4m3,
        scales: Scales::PerPart(factors.to_vec()),
    };
    let beside = Elements {
        datatype: Datatype::Fp8E4m3,
        scales: Scales::Beside(Box::new(pages(true, SCALE_BYTES, TOKENS)?)),
    };
    let (nhd, hnd) = (pages(true, 2 * ELEMENTS, TOKENS)?, pages(false, 2 * ELEMENTS, TOKENS)?);
    let (long, narrow) = (pages(true, 2 * ELEMENTS, 4 * TOKENS)?, pages(true, ELEMENTS, TOKENS)?);
    let wide = pages(true, 4 * ELEMENTS, TOKENS)?;
    let scattered = |count: u64| (0..count).map(|nth| (nth * 389 + 17) % count).collect::<Vec<u64>>();
    let computed = |from: (&Pages, &Elements), to: (&Pages, &Elements)| {
        let tables = [from.0, to.0].map(|pages| scattered(pages.shape().blocks));
        let side = |(pages, elements), blocks| PagedEnd {
            table: Table { pages, blocks },
            elements,
        };
        let (from, to) = (side(from, &tables[0][..]), side(to, &tables[1][..]));
        conversion_of(from, to, 0..BLOCKS * TOKENS, 0..HEADS, Narrowing::Allowed)
    };
    let rows: Vec<(&str, Conversion)> = vec![
        ("whole blocks", computed((&nhd, &bf16), (&nhd, &bf16))?),
        ("NHD to HND", computed((&nhd, &bf16), (&hnd, &bf16))?),
        ("HND to NHD", computed((&hnd, &bf16), (&nhd, &bf16))?),
        (
            "blocks of 4 times as many tokens",
            computed((&nhd, &bf16), (&long, &bf16))?,
        ),
        ("bf16 to f32", computed((&nhd, &bf16), (&wide, &f32))?),
        ("bf16 to f16", computed((&nhd, &bf16), (&nhd, &f16))?),
        (
            "bf16 to fp8, scales of K and V",
            computed((&nhd, &bf16), (&narrow, &fixed))?,
        ),
        (
            "fp8 to bf16, scales of K and V",
            computed((&narrow, &fixed), (&nhd, &bf16))?,
        ),
        (
            "bf16 to fp8, a scale a token and head",
            computed((&nhd, &bf16), (&narrow, &beside))?,
        ),
        ("the same back", computed((&narrow, &beside), (&nhd, &bf16))?),
    ];
    let bytes = nhd.end() as usize;
    // Numbers below one, whatever they are taken for; the target has room for floats.
    let source: Vec<u8> = (0..bytes)
        .map(|at| if at % 2 == 1 { 0x3f } else { (at * 7 % 251) as u8 })
        .collect();
    let scales = 0.5f32.to_ne_bytes().repeat(bytes / ELEMENTS as usize / 2);
    let (mut target, mut chosen) = (vec![1u8; 2 * bytes], vec![1u8; scales.len()]);
    let (mut own, mut took) = (Vec::new(), vec![Vec::new(); rows.len()]);
    for _ in 0..RUNS {
        let begun = own_seconds();
        // SAFETY: both are so long.
        unsafe { copy_streaming(target.as_mut_ptr(), source.as_ptr(), bytes) };
        own.push(own_seconds() - begun);
        for ((_, conversion), took) in rows.iter().zip(&mut took) {
            let ends = HostEnds {
                from: source.as_ptr(),
                from_scales: scales.as_ptr(),
                to: target.as_mut_ptr(),
                to_scales: chosen.as_mut_ptr(),
            };
            let begun = own_seconds();
            // SAFETY: what is read and what is written is as long as the longest of the layouts.
            unsafe { convert(conversion, ends) };
            took.push(own_seconds() - begun);
        }
    }
    let own = bytes as f64 / median(own) / 1e9;
    println!("a copy of {} MiB past the cache: {own:.1} GB/s", bytes >> 20);
    for ((name, conversion), took) in rows.iter().zip(took) {
        let moved = (conversion.bytes_read() + conversion.bytes_written()) as f64 / 2.0;
        let speed = moved / median(took) / 1e9;
        println!("  {name:<40} {speed:>5.1} GB/s {:>4.0} %", 100.0 * speed / own);
    }
    Ok(())
}
