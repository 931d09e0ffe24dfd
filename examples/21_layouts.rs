//! Blocks of one engine become blocks of another: of 16 tokens with heads before tokens in bf16, and of 64 with tokens before heads in fp8 with a scale for each token of each head.

use std::error::Error;

use weft::conversion::{
    ConversionError, ConversionPlace, Elements, Narrowing, PagedEnd, SCALE_BYTES, Scales, convert, run,
};
use weft::pages::{Pages, Table};
use weft::{Agent, Datatype};

const HEADS: u64 = 4;
const ELEMENTS: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let agent = Agent::builder("layouts").start()?;
    let prefill = Pages::heads_first(8, 16, 0..HEADS, 2 * ELEMENTS)?;
    let decode = Pages::tokens_first(2, 64, 0..HEADS, ELEMENTS)?;
    let scales = Pages::tokens_first(2, 64, 0..HEADS, SCALE_BYTES)?;
    let bf16 = Elements::of(Datatype::Bf16);
    let fp8 = Elements {
        datatype: Datatype::Fp8E4m3,
        scales: Scales::Beside(Box::new(scales.clone())),
    };

    // A prompt of 100 tokens: in seven blocks there, and in two here.
    let (there, here) = ([5, 0, 3, 6, 1, 7, 2], [1, 0]);
    let from = PagedEnd {
        table: Table {
            pages: &prefill,
            blocks: &there,
        },
        elements: &bf16,
    };
    let to = PagedEnd {
        table: Table {
            pages: &decode,
            blocks: &here,
        },
        elements: &fp8,
    };
    // Eight bits hold less than sixteen, and nobody loses anything without having said so.
    let refused = convert(from, to, 0..100, 0..HEADS, Narrowing::Refused);
    assert!(matches!(refused, Err(ConversionError::Lossy { .. })));
    let conversion = convert(from, to, 0..100, 0..HEADS, Narrowing::Allowed)?;

    let source = agent.allocate(prefill.end() as usize)?;
    let (codes, factors) = (
        agent.allocate(decode.end() as usize)?,
        agent.allocate(scales.end() as usize)?,
    );
    // Every element is 3 in bf16.
    source.write(0, &0x4040u16.to_le_bytes().repeat(prefill.end() as usize / 2));
    let place = ConversionPlace {
        scales: Some((&factors, 0)),
        ..ConversionPlace::of(&codes)
    };
    run(&conversion, ConversionPlace::of(&source), place)?;

    // The last token of the prompt: the greatest of a unit has the greatest code, and the code times its scale is what it was.
    let last = (99 % 64) * HEADS * ELEMENTS;
    let (mut code, mut scale) = ([0], [0; 4]);
    codes.read(last, &mut code);
    factors.read((99 % 64) * HEADS * SCALE_BYTES, &mut scale);
    let number = 448.0 * f32::from_le_bytes(scale);
    assert!(
        code == [0x7e] && (number - 3.0).abs() < 1e-5,
        "{code:?} times {scale:?}"
    );
    println!(
        "{} bytes of bf16 became {} bytes of fp8, by {} nests of loops and {} stretches; the last is {number}",
        conversion.bytes_read(),
        conversion.bytes_written(),
        conversion.nests().len(),
        conversion.stretches().len()
    );
    Ok(())
}
