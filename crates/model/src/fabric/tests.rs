use super::*;
use proptest::prelude::*;
use weft_plan::units::Rank;

const WIRE: Wire = Wire {
    bandwidth: Bandwidth::from_bytes_per_sec(50_000_000_000),
    latency: Picos::from_ns(500),
};

fn tree(hosts: u32, tiers: u32, radix: u32, oversubscription: u32) -> Fabric {
    Fabric::FatTree {
        hosts,
        tiers,
        radix,
        oversubscription,
        wire: WIRE,
    }
}

fn any_fabric() -> impl Strategy<Value = Fabric> {
    let wire = WIRE;
    prop_oneof![
        (1u32..200).prop_map(move |ports| Fabric::SingleSwitch { ports, wire }),
        (2u32..40).prop_map(move |ports| Fabric::Direct { ports, wire }),
        (1u32..300, 2u32..4, 1u32..4).prop_map(|(hosts, tiers, o)| {
            let radix = 8 * (o + 1);
            tree(hosts, tiers, radix, o)
        }),
        (1u32..40, 1u32..9, 2u32..4).prop_map(move |(nodes, rails, tiers)| Fabric::RailClos {
            nodes,
            rails,
            tiers,
            radix: 16,
            oversubscription: 1,
            wire
        }),
        prop::collection::vec(2u32..8, 1..4).prop_map(move |sides| Fabric::Torus { sides, wire }),
        (2u32..9, 1u32..5, 1u32..4, 2u32..5).prop_map(move |(groups, routers, hosts, global)| Fabric::Dragonfly {
            groups: groups.min(routers * global + 1),
            routers,
            hosts,
            global,
            wire,
            global_wire: None
        }),
        (2u32..9, 1u32..5, 1u32..5, 1u32..4).prop_map(move |(groups, leaves, spines, hosts)| {
            Fabric::DragonflyPlus {
                groups: groups.min(spines * 2 + 1),
                leaves,
                spines,
                hosts,
                global: 2,
                wire,
                global_wire: None,
            }
        }),
    ]
}

proptest! {
    #[test]
    fn routes_lead_from_port_to_port(fabric in any_fabric(), picks in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>()), 20)) {
        let Ok(network) = fabric.build() else { return Ok(()) };
        for (from, to, way) in picks {
            let (from, to) = (Port(from % network.ports()), Port(to % network.ports()));
            let ways = network.ways(from, to);
            prop_assert_eq!(ways, network.ways(to, from));
            let way = way % (ways + network.detours(from, to));
            let (mut there, mut back) = (Vec::new(), Vec::new());
            network.route(from, to, way, &mut there);
            network.route(to, from, way, &mut back);
            prop_assert_eq!(there.len(), back.len());
            prop_assert!(there.len() <= network.route_links_max() as usize);
            let mut at = Vertex(from.0);
            for link in &there {
                prop_assert!(link.0 < network.links());
                let link = network.link(*link);
                prop_assert_eq!(link.from, at);
                at = link.to;
            }
            prop_assert_eq!(at, Vertex(to.0));
        }
    }

    #[test]
    fn a_sprayed_route_and_its_bundles_are_the_same_links(nodes in 1u32..200, tiers in 2u32..4, a in any::<u32>(), b in any::<u32>()) {
        let fabric = Fabric::RailClos { nodes, rails: 4, tiers, radix: 16, oversubscription: 1, wire: WIRE };
        let Ok(network) = fabric.build() else { return Ok(()) };
        let (a, b) = (Port(a % network.ports()), Port(b % network.ports()));
        let meet = network.meet(a, b);
        let mut bundles: Vec<BundleId> = (1..=meet).map(|level| network.up(a, level)).collect();
        bundles.extend((1..=meet).rev().map(|level| network.down(b, level)));
        let mut used = std::collections::BTreeMap::new();
        for way in 0..network.ways(a, b) {
            let mut route = Vec::new();
            network.route(a, b, way, &mut route);
            prop_assert_eq!(route.len(), bundles.len());
            for (link, bundle) in route.iter().zip(&bundles) {
                let bundle = network.bundle(*bundle);
                prop_assert!((bundle.first.0..bundle.first.0 + bundle.width).contains(&link.0));
                *used.entry(*link).or_insert(0u32) += 1;
            }
        }
        // All links of a bundle equally often.
        for bundle in bundles {
            let bundle = network.bundle(bundle);
            let each = network.ways(a, b) / bundle.width;
            prop_assert!((0..bundle.width).all(|nth| used[&LinkId(bundle.first.0 + nth)] == each));
        }
    }

    #[test]
    fn every_link_has_a_way_back(fabric in any_fabric()) {
        let Ok(network) = fabric.build() else { return Ok(()) };
        let mut cables = std::collections::BTreeMap::new();
        for link in (0..network.links()).map(|link| network.link(LinkId(link))) {
            *cables.entry((link.from, link.to)).or_insert(0i32) += 1;
        }
        for ((from, to), count) in &cables {
            prop_assert_eq!(Some(count), cables.get(&(*to, *from)));
        }
    }
}

#[test]
fn a_full_tree_has_the_ports_of_the_textbook() {
    for radix in [4, 8, 16] {
        let hosts = radix * radix * radix / 4;
        let network = tree(hosts, 3, radix, 1).build().unwrap();
        assert_eq!(network.ports(), hosts);
        assert_eq!(network.links(), 2 * 3 * hosts);
        assert_eq!(
            network.bisection().bytes_per_sec(),
            u64::from(hosts) / 2 * WIRE.bandwidth.bytes_per_sec()
        );
        assert!(tree(hosts + 1, 3, radix, 1).build().is_err());
    }
}

#[test]
fn oversubscription_narrows_the_leaves_as_stated() {
    for oversubscription in [1, 2, 3, 7] {
        let network = tree(32, 2, 4 * (oversubscription + 1), oversubscription)
            .build()
            .unwrap();
        let up = network.bundle(network.up(Port(0), 2)).width;
        let hosts = (0..network.ports())
            .filter(|port| network.meet(Port(0), Port(*port)) <= 1)
            .count();
        assert_eq!(hosts as u32, up * oversubscription);
    }
}

#[test]
fn bisections_of_small_networks() {
    let bisection =
        |fabric: Fabric| fabric.build().unwrap().bisection().bytes_per_sec() / WIRE.bandwidth.bytes_per_sec();
    let wire = WIRE;
    assert_eq!(bisection(Fabric::SingleSwitch { ports: 8, wire }), 4);
    assert_eq!(bisection(Fabric::Direct { ports: 8, wire }), 16);
    assert_eq!(
        bisection(Fabric::Torus {
            sides: vec![4, 4, 8],
            wire
        }),
        32
    );
    // Three hosts for each link up: 48 hosts on two leaves of 24, eight links up each.
    assert_eq!(bisection(tree(48, 2, 32, 3)), 8);
    let dragonfly = Fabric::Dragonfly {
        groups: 4,
        routers: 3,
        hosts: 8,
        global: 1,
        wire,
        global_wire: None,
    };
    assert_eq!(bisection(dragonfly), 4);
}

#[test]
fn bad_parameters_are_told_by_field() {
    let complaint = |fabric: Fabric| fabric.build().unwrap_err().to_string();
    assert_eq!(complaint(tree(0, 2, 8, 1)), "hosts: 0 is less than 1");
    assert_eq!(complaint(tree(33, 2, 8, 1)), "hosts: 33 is more than 32");
    assert_eq!(complaint(tree(8, 4, 8, 1)), "tiers: 4 is more than 3");
    assert_eq!(complaint(tree(8, 2, 8, 2)), "radix: 8 is not a multiple of 3");
    let wire = Wire {
        bandwidth: Bandwidth::default(),
        ..WIRE
    };
    assert_eq!(
        complaint(Fabric::SingleSwitch { ports: 4, wire }),
        "wire.bandwidth: nothing moves at a bandwidth of zero"
    );
    let sides = vec![4, 1];
    assert_eq!(
        complaint(Fabric::Torus { sides, wire: WIRE }),
        "sides[1]: 1 is less than 2"
    );
    let ports = 1 << 20;
    assert_eq!(
        complaint(Fabric::Direct { ports, wire: WIRE }),
        "ports: the network would have more than 1073741824 links"
    );
    let cluster = Cluster {
        node_ranks: 8,
        node_ports: 1,
        scale_up: None,
        fabric: tree(8, 2, 8, 1),
    };
    assert_eq!(
        cluster.build().unwrap_err().to_string(),
        "scale_up: 8 ranks of a node need it"
    );
}

#[test]
fn ranks_of_a_node_meet_at_its_switch_and_others_in_the_fabric() {
    let cluster = Cluster {
        node_ranks: 8,
        node_ports: 4,
        scale_up: Some(Wire {
            bandwidth: Bandwidth::from_bytes_per_sec(450_000_000_000),
            latency: Picos::from_ns(250),
        }),
        fabric: Fabric::RailClos {
            nodes: 32,
            rails: 4,
            tiers: 3,
            radix: 16,
            oversubscription: 1,
            wire: WIRE,
        },
    };
    let topology = cluster.build().unwrap();
    assert_eq!(topology.ranks(), 256);
    assert_eq!(topology.level(Rank(0), Rank(7)), Level(0));
    assert_eq!(topology.level(Rank(0), Rank(9)), Level(1));
    assert_eq!(topology.level(Rank(0), Rank(10)), Level(2));
    assert_eq!(topology.level(Rank(0), Rank(8 * 16)), Level(3));
    assert_eq!(topology.port(Rank(9)), Port(4));
    let mut route = Vec::new();
    topology.route(Rank(0), Rank(7), 0, &mut route);
    assert_eq!(topology.latency(&route), Picos::from_ns(500));
    route.clear();
    topology.route(Rank(0), Rank(8 * 16), 5, &mut route);
    assert_eq!(topology.latency(&route), Picos::from_us(3));
    assert_eq!(topology.link_name(route[0]), "port 0 → leaf 0");
    assert_eq!(topology.link_name(route[2]), "spine 0.0 → top 5");
}

#[test]
fn a_fabric_is_read_from_a_file() {
    let text = "kind = 1";
    assert!(toml::from_str::<Fabric>(text).is_err());
    let text = "[rail-clos]\nnodes = 16\nrails = 8\ntiers = 2\nradix = 64\nwire = { bandwidth = '400 Gb/s', latency = '500 ns' }\n";
    let fabric: Fabric = toml::from_str(text).unwrap();
    assert_eq!(fabric.wire(), WIRE);
    assert_eq!(
        toml::from_str::<Fabric>(&toml::to_string(&fabric).unwrap()).unwrap(),
        fabric
    );
}
