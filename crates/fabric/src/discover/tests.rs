use super::*;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use tempfile::TempDir;
use weft_plan::platform::{NicKind, Platform};
use weft_plan::{Bandwidth, Bytes};

/// A machine made of files.
struct Fake {
    folder: TempDir,
}

impl Fake {
    fn new(files: &[(&str, &str)]) -> Fake {
        let fake = Fake {
            folder: tempfile::tempdir().unwrap(),
        };
        files.iter().for_each(|(path, text)| fake.write(path, text.as_bytes()));
        fake
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Some file systems wait for the disk where a file is overwritten, but not where it is new.
        let _ = fs::remove_file(&path);
        fs::write(path, bytes).unwrap();
    }

    fn link(&self, link: &str, target: &str) {
        let link = self.folder.path().join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        fs::create_dir_all(self.folder.path().join(target)).unwrap();
        symlink(self.folder.path().join(target), link).unwrap();
    }

    fn discover(&self) -> Discovery {
        machine_at(&Source {
            sys: self.folder.path().join("sys"),
            proc: self.folder.path().join("proc"),
            addresses: vec![("eth0".to_owned(), "10.0.0.1".parse().unwrap())],
            flow_control: |interface| (interface == "eth0").then_some(0b1000),
        })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max open files            20000                20000                files     \n\
                      Max locked memory         unlimited            unlimited            bytes     \n";

/// Two sockets, a GPU and an RDMA NIC: nothing is amiss.
const SERVER: &[(&str, &str)] = &[
    ("proc/sys/kernel/hostname", "node7\n"),
    ("proc/sys/kernel/yama/ptrace_scope", "0\n"),
    ("proc/meminfo", "MemTotal:       24684100 kB\nMemFree: 1 kB\n"),
    ("proc/self/limits", LIMITS),
    (
        "proc/driver/nvidia/gpus/0000:17:00.0/information",
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\n",
    ),
    ("sys/devices/system/node/online", "0-1\n"),
    ("sys/devices/system/node/node0/cpulist", "0-3,8-11\n"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  1024 kB\n"),
    ("sys/devices/system/node/node1/cpulist", "4-7,12-15\n"),
    ("sys/bus/pci/devices/0000:17:00.0/class", "0x030200\n"),
    ("sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de\n"),
    ("sys/bus/pci/devices/0000:17:00.0/numa_node", "1\n"),
    ("sys/bus/pci/devices/0000:00:01.0/class", "0x060400\n"),
    ("sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n"),
    ("sys/class/net/eth0/type", "1\n"),
    ("sys/class/net/eth0/operstate", "up\n"),
    ("sys/class/net/eth0/speed", "400000\n"),
    ("sys/class/net/eth0/mtu", "9000\n"),
    ("sys/class/net/lo/type", "772\n"),
    ("sys/class/net/lo/operstate", "unknown\n"),
    ("sys/class/net/lo/flags", "0x9\n"),
    ("sys/class/net/lo/mtu", "65536\n"),
    ("sys/module/nvidia_peermem/refcnt", "0\n"),
    ("sys/class/infiniband/mlx5_0/node_type", "1: CA\n"),
    ("sys/class/infiniband/mlx5_0/fw_ver", "28.39.1002\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/lid", "0x0\n"),
    (
        "sys/class/infiniband/mlx5_0/ports/1/gids/0",
        "fe80:0000:0000:0000:3cf6:17ff:fe15:7e4b\n",
    ),
    (
        "sys/class/infiniband/mlx5_0/ports/1/gids/1",
        "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
    ),
    (
        "sys/class/infiniband/mlx5_0/ports/1/gids/2",
        "0000:0000:0000:0000:0000:0000:0000:0000\n",
    ),
    ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0", "IB/RoCE v1\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "RoCE v2\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth0\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "eth0\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/hw_counters/np_cnp_sent", "17\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
    ("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
    ("sys/class/infiniband/mlx5_0/device/net/eth0/mtu", "9000\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
];

fn server() -> Fake {
    let fake = Fake::new(SERVER);
    fake.link(
        "sys/class/net/eth0/device",
        "sys/devices/pci0000:00/0000:18:00.0/virtio2",
    );
    fake.write("sys/devices/pci0000:00/0000:18:00.0/virtio2/numa_node", b"0\n");
    fake
}

#[test]
fn a_server_is_described_whole() {
    let Discovery {
        machine,
        limits,
        rdma,
        roce,
        nvidia_peermem,
        absent,
    } = server().discover();
    assert_eq!(absent, []);
    assert_eq!(machine.name, "node7");
    assert_eq!(machine.memory, Some(Bytes(24684100 * 1024)));
    assert_eq!(machine.core_count(), 16);
    assert_eq!(machine.numa[0].memory, Some(Bytes(1 << 20)));
    assert_eq!(machine.numa[1].cores.to_string(), "4-7,12-15");

    let [gpu] = &machine.gpus[..] else {
        panic!("{:?}", machine.gpus)
    };
    assert_eq!((gpu.name.as_str(), gpu.numa), ("NVIDIA H200", Some(1)));
    assert_eq!(gpu.pci.as_deref(), Some("0000:17:00.0"));

    let [eth0, lo] = &machine.nics[..] else {
        panic!("{:?}", machine.nics)
    };
    assert_eq!((eth0.kind, eth0.up, eth0.numa), (NicKind::Ethernet, true, Some(0)));
    assert_eq!(eth0.bandwidth, Some(Bandwidth::from_bytes_per_sec(50_000_000_000)));
    assert_eq!(eth0.addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(
        eth0.pci.as_deref(),
        Some("0000:18:00.0"),
        "the bus device above the virtio one"
    );
    assert_eq!(eth0.rdma.as_deref(), Some("mlx5_0"));
    assert_eq!((lo.kind, lo.up, lo.bandwidth), (NicKind::Loopback, true, None));

    assert_eq!(limits.open_files, Some(Bound::At(20000)));
    assert_eq!(limits.locked_memory, Some(Bound::Unlimited));
    assert_eq!(limits.ptrace_scope, Some(PtraceScope::Classic));
    assert_eq!(limits.transparent_huge_pages, Some(TransparentHugePages::Madvise));
    assert_eq!(limits.huge_pages.len(), 1);
    assert!(nvidia_peermem);
    let [device] = &rdma[..] else { panic!("{rdma:?}") };
    assert_eq!(
        (device.kind, device.firmware.as_deref()),
        (RdmaKind::Infiniband, Some("28.39.1002"))
    );
    let [port] = &device.ports[..] else {
        panic!("{device:?}")
    };
    assert_eq!(
        (port.number, port.state, port.link_layer),
        (1, PortState::Active, LinkLayer::Ethernet)
    );
    let gids: Vec<(u8, String, GidKind)> = port
        .gids
        .iter()
        .map(|gid| (gid.index, gid.to_string(), gid.kind))
        .collect();
    assert_eq!(
        gids,
        [
            (0, "fe80::3cf6:17ff:fe15:7e4b".to_owned(), GidKind::InfinibandOrRoceV1),
            (1, "10.0.0.1".to_owned(), GidKind::RoceV2),
        ]
    );
    let [hints] = &roce[..] else { panic!("{roce:?}") };
    assert_eq!(
        (hints.port.as_str(), hints.interface.as_deref()),
        ("mlx5_0:1", Some("eth0"))
    );
    assert_eq!(hints.flow_control.to_string(), "on for priority 3");
    assert_eq!(hints.congestion_control, Priorities::Unreadable);
    assert_eq!(hints.counters, [("np_cnp_sent", 17)]);
    assert_holds_together(machine);
}

#[test]
fn rdma_ports_that_cannot_be_used_have_their_reason() {
    const PORT: &str = "sys/class/infiniband/mlx5_0/ports/1";
    let why = |spoil: &dyn Fn(&Fake)| -> Vec<String> {
        let fake = server();
        spoil(&fake);
        fake.discover().absent.iter().map(ToString::to_string).collect()
    };
    let old = why(&|fake| fake.write(&format!("{PORT}/gid_attrs/types/1"), b"IB/RoCE v1\n"));
    assert!(
        old[0].starts_with("RDMA: mlx5_0:1 has no RoCE v2 address; give its interface an address"),
        "{old:?}"
    );
    let near = why(&|fake| fake.write(&format!("{PORT}/gids/1"), b"fe80::1\n"));
    assert!(near[0].contains("only one for its own link"), "{near:?}");
    let iwarp = why(&|fake| fake.write("sys/class/infiniband/mlx5_0/node_type", b"4: RNIC\n"));
    assert!(iwarp[0].contains("mlx5_0 speaks iWARP"), "{iwarp:?}");
    let apart = why(&|fake| fs::remove_dir_all(fake.path().join("sys/module")).unwrap());
    assert!(apart[0].contains("modprobe nvidia-peermem"), "{apart:?}");
    // Nothing marks, and the fake's other interface pauses nothing.
    let lossy = why(&|fake| {
        fake.write("sys/class/net/eth1/type", b"1\n");
        for index in 0..2 {
            fake.write(&format!("{PORT}/gid_attrs/ndevs/{index}"), b"eth1\n");
        }
        for (side, priority) in ["roce_np", "roce_rp"]
            .into_iter()
            .flat_map(|side| (0..8).map(move |bit| (side, bit)))
        {
            fake.write(&format!("sys/class/net/eth1/ecn/{side}/enable/{priority}"), b"0\n");
        }
    });
    assert_eq!(
        lossy,
        Vec::<String>::new(),
        "flow control that cannot be read may well be on"
    );
}

#[test]
fn a_port_without_congestion_control_and_flow_control_is_named() {
    let hints = RoceHints {
        port: "mlx5_0:1".to_owned(),
        interface: None,
        congestion_control: Priorities::On(0),
        flow_control: Priorities::On(0),
        counters: Vec::new(),
    };
    let mut absent = Vec::new();
    roce::judge(&[hints], &mut absent);
    assert!(
        absent[0]
            .to_string()
            .starts_with("lossless Ethernet: mlx5_0:1 has neither"),
        "{absent:?}"
    );
}

#[test]
fn an_empty_tree_is_a_list_of_reasons() {
    let fake = Fake::new(&[]);
    let found = fake.discover();
    assert_eq!(found.machine.name, "localhost");
    let sys = |path: &str| Reason::NotThere {
        path: fake.path().join("sys").join(path),
    };
    let why = |what: Feature| found.absent.iter().find(|a| a.what == what).map(|a| a.why.clone());
    assert_eq!(why(Feature::Numa), Some(sys("devices/system/node/online")));
    assert_eq!(why(Feature::Cores), Some(sys("devices/system/cpu/online")));
    assert_eq!(why(Feature::NetworkInterfaces), Some(sys("class/net")));
    assert_eq!(why(Feature::Rdma), Some(sys("class/infiniband")));
    assert_eq!(why(Feature::Gpus), Some(sys("bus/pci/devices")));
    assert_eq!(why(Feature::HugePages), Some(sys("kernel/mm/hugepages")));
    assert_eq!(why(Feature::ForeignMemory), None, "no Yama forbids nothing");
    assert_holds_together(found.machine);
}

#[test]
fn what_is_there_but_unusable_has_its_reason() {
    let fake = server();
    fs::remove_dir_all(fake.path().join("proc/driver")).unwrap();
    fake.write("sys/class/infiniband/mlx5_0/ports/1/state", b"1: DOWN\n");
    fake.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", b"0\n");
    fake.write(
        "sys/kernel/mm/transparent_hugepage/enabled",
        b"always madvise [never]\n",
    );
    fake.write("proc/sys/kernel/yama/ptrace_scope", b"1\n");
    fake.write(
        "proc/self/limits",
        LIMITS
            .replace("unlimited", "8388608  ")
            .replace("20000", "1024 ")
            .as_bytes(),
    );
    let found = fake.discover();
    let reasons: Vec<(Feature, String)> = found.absent.iter().map(|a| (a.what, a.why.to_string())).collect();
    let expected = [
        (Feature::Gpus, "the device 0000:17:00.0 has no driver"),
        (Feature::Rdma, "mlx5_0 is not active"),
        (Feature::LockedMemory, "8 MiB is less than 4 GiB"),
        (Feature::OpenFiles, "1024 is less than 8192"),
        (Feature::HugePages, "none are reserved"),
        (Feature::TransparentHugePages, "set to `never`"),
        (Feature::ForeignMemory, "set to `1`"),
    ];
    assert_eq!(reasons, expected.map(|(what, why)| (what, why.to_owned())));
    assert_eq!(
        found.machine.gpus.len(),
        1,
        "the hardware is there, whatever the driver does"
    );
    assert_eq!(found.limits.ptrace_scope, Some(PtraceScope::Restricted));
}

#[test]
fn an_rdma_device_without_an_interface_is_one_of_its_own() {
    let fake = Fake::new(&[
        ("sys/class/infiniband/mlx5_9/ports/1/state", "4: ACTIVE"),
        ("sys/class/infiniband/mlx5_9/ports/1/rate", "200 Gb/sec (4X HDR)"),
    ]);
    let nics = fake.discover().machine.nics;
    assert_eq!(nics.len(), 1);
    assert_eq!(
        (nics[0].name.as_str(), nics[0].kind, nics[0].up),
        ("mlx5_9", NicKind::Infiniband, true)
    );
    assert_eq!(nics[0].bandwidth, Some(Bandwidth::from_bytes_per_sec(25_000_000_000)));
}

#[test]
fn this_machine_can_be_described() {
    let found = machine();
    assert!(found.machine.core_count() > 0);
    assert_holds_together(found.machine);
}

/// Whatever was found makes a platform file that reads back.
fn assert_holds_together(machine: Machine) {
    let platform = Platform {
        name: "found".to_owned(),
        transports: Default::default(),
        machines: vec![machine],
        messages: Default::default(),
        links: Vec::new(),
    };
    platform.validate().unwrap();
    assert_eq!(Platform::from_toml(&platform.to_toml()).unwrap(), platform);
}

fn hostile_text() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        "-?[0-9]{1,30}".prop_map(String::into_bytes),
        "[0-9]{1,6}-[0-9]{1,6}(,[0-9]{1,3})?".prop_map(String::into_bytes),
        Just(b"0x".to_vec()),
        Just("9".repeat(100_000).into_bytes()),
        "Model:.{0,100}".prop_map(String::into_bytes),
        Just(b"MemTotal: 18446744073709551615 kB".to_vec()),
        Just(b"999999999999999999999 Gb/sec".to_vec()),
        Just(b"][".to_vec()),
    ]
}

#[test]
fn no_file_makes_it_panic_or_describe_a_machine_that_cannot_be() {
    let fake = server();
    let changes = prop::collection::vec((0..SERVER.len(), hostile_text()), 1..12);
    proptest!(|(changes in changes)| {
        for (which, text) in &changes {
            fake.write(SERVER[*which].0, text);
        }
        let found = fake.discover();
        found.absent.iter().for_each(|a| drop(a.to_string()));
        assert_holds_together(found.machine);
        // The tree is written once and mended after each case, for files take longer than everything else here.
        for (which, _) in &changes {
            fake.write(SERVER[*which].0, SERVER[*which].1.as_bytes());
        }
    });
}

#[test]
fn folders_pipes_and_loops_in_the_place_of_files_are_no_trouble() {
    let fake = server();
    for path in [
        "sys/class/net/eth0/mtu",
        "proc/self/limits",
        "sys/devices/system/node/online",
    ] {
        fs::remove_file(fake.path().join(path)).unwrap();
    }
    fs::create_dir(fake.path().join("sys/class/net/eth0/mtu")).unwrap();
    symlink("limits", fake.path().join("proc/self/limits")).unwrap();
    let pipe = fake.path().join("sys/devices/system/node/online");
    let pipe = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    fake.write("sys/class/net/bad name/type", b"1");
    let found = fake.discover();
    assert_eq!(found.machine.nics.len(), 2);
    assert!(found.absent.iter().any(|a| a.what == Feature::Numa));
    assert!(found.absent.iter().any(|a| a.what == Feature::OpenFiles));
    assert_holds_together(found.machine);
}
