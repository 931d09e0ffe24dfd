//! Conversions between memories that agents register, on a device.

use std::sync::Arc;

use weft_fabric::HostMemory;
use weft_fabric::cuda::{ConversionPlaces, CudaMemory, Device, DeviceMemory, convert};
use weft_plan::Datatype;
use weft_plan::conversion::{Elements, EndBytes, Narrowing, PagedEnd, SCALE_BYTES, Scales, convert as conversion_of};
use weft_plan::pages::{Pages, Table};
use weft_protocol::Refusal;
use weft_testing::{Need, has};

fn on(device: &Arc<Device>, bytes: &[u8]) -> CudaMemory {
    let memory = DeviceMemory::allocate(device, bytes.len() as u64).expect("memory");
    memory.write(0, bytes).expect("bytes there");
    CudaMemory::new(Arc::new(memory))
}

#[test]
fn memories_of_a_device_are_converted_where_they_lie_and_others_are_refused() {
    if !has(Need::Gpu) {
        return;
    }
    let device = Device::open(0).expect("a device");
    let (near, far) = (
        Pages::heads_first(40, 16, 0..4, 256).expect("pages"),
        Pages::tokens_first(10, 64, 0..4, 128).expect("pages"),
    );
    let scales = Pages::tokens_first(10, 64, 0..4, SCALE_BYTES).expect("pages");
    let (bf16, fp8) = (
        Elements::of(Datatype::Bf16),
        Elements {
            datatype: Datatype::Fp8E4m3,
            scales: Scales::Beside(Box::new(scales.clone())),
        },
    );
    let (blocks, others) = ((0..40).rev().collect::<Vec<u64>>(), (0..10).rev().collect::<Vec<u64>>());
    let side = |pages, blocks, elements| PagedEnd {
        table: Table { pages, blocks },
        elements,
    };
    let ends = (side(&near, &blocks[..], &bf16), side(&far, &others[..], &fp8));
    let conversion = conversion_of(ends.0, ends.1, 5..630, 1..4, Narrowing::Allowed).expect("a conversion");
    let source: Vec<u8> = (0..near.end()).map(|at| (at * 7 % 251) as u8 & 0xbf).collect();
    let (mut codes, mut factors) = (vec![9u8; far.end() as usize], vec![9u8; scales.end() as usize]);
    let (from, to, to_scales) = (on(&device, &source), on(&device, &codes), on(&device, &factors));
    let places = ConversionPlaces {
        from: (&from, 0),
        from_scales: (&from, 0),
        to: (&to, 0),
        to_scales: (&to_scales, 0),
    };
    convert(&conversion, places).expect("converted");
    convert(&conversion, places).expect("and once more");
    conversion.apply(EndBytes {
        from: &source,
        from_scales: &[],
        to: &mut codes,
        to_scales: &mut factors,
    });
    let (mut found, mut found_scales) = (vec![0; codes.len()], vec![0; factors.len()]);
    to.device_memory().read(0, &mut found).expect("bytes back");
    to_scales
        .device_memory()
        .read(0, &mut found_scales)
        .expect("bytes back");
    assert!(found == codes && found_scales == factors);

    let host = HostMemory::from_vec(vec![0; codes.len()]);
    let refused = |places| convert(&conversion, places).expect_err("refused");
    assert_eq!(
        refused(ConversionPlaces {
            to: (&host, 0),
            ..places
        }),
        Refusal::Unsupported
    );
    assert_eq!(
        refused(ConversionPlaces {
            from: (&host, 0),
            ..places
        }),
        Refusal::OutOfBounds
    );
    assert_eq!(
        refused(ConversionPlaces { to: (&to, 1), ..places }),
        Refusal::OutOfBounds
    );
}
