//! What a gauge measures on a device, and what it refuses. No figure is asserted but those that a device could not have without being broken.

mod rows;

use rows::device;
use weft_gpu::{Collective, CollectiveError, Gauge, Way, device_costs};
use weft_plan::cost::kernels::DeviceCosts;
use weft_plan::{Bandwidth, Datatype, Picos, Reduction};

fn all_reduce(bytes: u64) -> Collective {
    Collective::AllReduce {
        count: bytes / 2,
        datatype: Datatype::Bf16,
        reduction: Reduction::Sum,
    }
}

#[test]
fn a_device_says_what_it_is() {
    let Some(device) = device() else { return };
    let facts = device.facts().expect("facts");
    println!("{facts:?}");
    assert_eq!(facts.name, device.name());
    assert!(facts.driver >= 13000 && facts.capability >= (8, 0), "{facts:?}");
    assert!(facts.memory_bytes > 1 << 30 && facts.cache_bytes > 1 << 20, "{facts:?}");
    // Without it there would be no team among processes.
    assert!(facts.shared_by_descriptor, "{facts:?}");
}

#[test]
fn constants_are_measured_of_every_way() {
    let Some(device) = device() else { return };
    let costs = device_costs(&device).expect("costs");
    println!("{costs:?}");
    assert!(costs.flag > Picos::ZERO && costs.flag <= costs.signal, "{costs:?}");
    assert!(costs.launch > Picos::ZERO && costs.copy < costs.memory, "{costs:?}");
    for way in Way::ALL {
        let cost = costs.of(way);
        assert!(
            cost.latency > Picos::ZERO && cost.bandwidth < Bandwidth::MAX,
            "{way:?}: {costs:?}"
        );
    }
}

#[test]
fn calls_of_every_way_are_timed_and_longer_ones_take_longer() {
    let Some(device) = device() else { return };
    for ranks in [2, 5, 8] {
        let gauge = Gauge::new(&device, ranks, 64 << 20, DeviceCosts::default()).expect("a gauge");
        for way in Way::ALL {
            let took = gauge.time(all_reduce(64 << 10), Some(way), 5).expect("a time");
            assert!(took > Picos::ZERO, "{ranks} {way:?}");
        }
        let time = |bytes| gauge.time(all_reduce(bytes), None, 3).expect("a time");
        assert!(time(64 << 20) > time(1 << 10), "{ranks}");
        let too_long = gauge.time(all_reduce(65 << 20), None, 1);
        assert!(
            matches!(too_long, Err(CollectiveError::BufferTooSmall { .. })),
            "{too_long:?}"
        );
        let no_way = gauge.time(all_reduce(64 << 20), Some(Way::OneShot), 1);
        assert_eq!(no_way, Err(CollectiveError::NotThisWay));
    }
}
