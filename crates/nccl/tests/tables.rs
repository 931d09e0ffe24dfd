//! The net, driven as NCCL drives it: the library is loaded by its symbols in two processes, whose tables then talk to each other.
//!
//! Every process but the first is this binary again ([`second_process`]); they tell each other their handles by lines on pipes.

mod support;

use std::time::{Duration, Instant};

use nccl_net_weft::abi::{NcclResult, PropertiesV11, PropertiesV12};
use support::{Comms, Far, Way, library};

/// What the second process does, told by the first.
#[test]
fn second_process() {
    support::be_second();
}

#[test]
fn the_tables_are_there_and_say_what_they_are() {
    let library = library();
    let v11 = library.net::<PropertiesV11>(c"ncclNetPlugin_v11");
    let v12 = library.net::<PropertiesV12>(c"ncclNetPlugin_v12");
    // What a struct of another layout would run into.
    const GUARD: u64 = 0x5a5a_5a5a_5a5a_5a5a;
    let mut old = (std::mem::MaybeUninit::<PropertiesV11>::uninit(), GUARD);
    let mut new = (std::mem::MaybeUninit::<PropertiesV12>::uninit(), GUARD);
    let (mut first, mut second) = (0, 0);
    // SAFETY: the table is that of the library, and every place is of the type that the table says.
    let (old, new) = unsafe {
        assert_eq!((v11.devices)(&raw mut first), NcclResult::SUCCESS);
        assert_eq!((v12.devices)(&raw mut second), NcclResult::SUCCESS);
        assert_eq!((v11.get_properties)(0, old.0.as_mut_ptr()), NcclResult::SUCCESS);
        assert_eq!((v12.get_properties)(0, new.0.as_mut_ptr()), NcclResult::SUCCESS);
        assert_eq!((old.1, new.1), (GUARD, GUARD));
        (old.0.assume_init(), new.0.assume_init())
    };
    assert_eq!((first, second), (1, 1));
    for head in [old.head, new.head] {
        assert_eq!((head.ptr_support, head.max_recvs, head.net_device_type), (1, 8, 0));
        assert!(head.speed > 0 && head.max_comms > 1000);
    }
    assert_eq!((old.vdevice.ndevs, new.vdevice.ndevs, new.rail_id), (1, 1, -1));
    assert!(old.max_p2p_bytes >= 1 << 30 && new.max_coll_bytes >= 1 << 30);
}

#[test]
fn no_pointer_is_followed_where_there_is_none() {
    let net = library().net::<PropertiesV12>(c"ncclNetPlugin_v12");
    let null = std::ptr::null_mut();
    let (mut out, mut done) = (null, 0);
    // SAFETY: null is what these calls are asked about, and the other places are there.
    unsafe {
        assert_eq!((net.listen)(null, 0, null, &raw mut out), NcclResult::INVALID_ARGUMENT);
        assert_eq!(
            (net.connect)(null, 0, null, &raw mut out, null.cast()),
            NcclResult::INVALID_ARGUMENT
        );
        assert_eq!(
            (net.accept)(null, &raw mut out, null.cast()),
            NcclResult::INVALID_ARGUMENT
        );
        assert_eq!(
            (net.reg_mr)(null, null, 1, 1, &raw mut out),
            NcclResult::INVALID_ARGUMENT
        );
        assert_eq!(
            (net.isend)(null, null, 1, 0, null, null, &raw mut out),
            NcclResult::INVALID_ARGUMENT
        );
        assert_eq!(
            (net.test)(null, &raw mut done, null.cast()),
            NcclResult::INVALID_ARGUMENT
        );
        assert_eq!((net.devices)(null.cast()), NcclResult::INVALID_ARGUMENT);
        assert_eq!((net.close_send)(null), NcclResult::SUCCESS);
        assert_eq!((net.finalize)(null), NcclResult::SUCCESS);
    }
}

fn exchanges(way: Way, messages: u64) {
    let mut far = Far::start(way);
    let mut comms = Comms::connect(&mut far.pipe());
    far.say(&format!("exchange {messages} 1"));
    comms.exchange(messages, 1, 0);
    assert_eq!(far.hear(), "exchanged");
    comms.close();
    far.end();
}

#[test]
fn a_hundred_thousand_messages_both_ways_over_shared_memory() {
    exchanges(Way::SharedMemory, 100_000);
}

#[test]
fn a_hundred_thousand_messages_both_ways_over_tcp() {
    exchanges(Way::Tcp, 100_000);
}

/// What is under way when a peer goes: a receive that nothing comes for, and a long send that nobody wants.
fn loses(way: Way, signal: i32) {
    let mut far = Far::start(way);
    let comms = Comms::connect(&mut far.pipe());
    let waiting = [comms.receive_nothing(), comms.send_unwanted(1 << 20)];
    for request in waiting {
        assert_eq!(comms.test(request), (NcclResult::SUCCESS, false));
    }
    let begun = Instant::now();
    far.signal(signal);
    for request in waiting {
        let result = loop {
            match comms.test(request) {
                (NcclResult::SUCCESS, false) if begun.elapsed() < Duration::from_secs(30) => {}
                (result, done) => {
                    assert!(!done, "a message came of nowhere");
                    break result;
                }
            }
        };
        assert_eq!(result, NcclResult::REMOTE_ERROR, "after {:?}", begun.elapsed());
    }
    println!("{way:?}, signal {signal}: told after {:?}", begun.elapsed());
    comms.close();
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "and closing does not hang either"
    );
    far.kill();
}

#[test]
fn a_killed_peer_is_a_remote_error_over_shared_memory() {
    loses(Way::SharedMemory, libc::SIGKILL);
}

#[test]
fn a_killed_peer_is_a_remote_error_over_tcp() {
    loses(Way::Tcp, libc::SIGKILL);
}

#[test]
fn a_frozen_peer_is_a_remote_error_over_shared_memory() {
    loses(Way::SharedMemory, libc::SIGSTOP);
}

#[test]
fn a_frozen_peer_is_a_remote_error_over_tcp() {
    loses(Way::Tcp, libc::SIGSTOP);
}

#[test]
fn who_does_not_know_the_secret_is_not_let_in() {
    let mut far = Far::with_secret(Way::Tcp, "a secret that nobody else has");
    far.say("connect only");
    let told = Comms::refused(&mut far.pipe());
    assert_eq!(told, NcclResult::REMOTE_ERROR);
    far.kill();
}

#[test]
fn the_profiler_tells_what_collectives_took_and_who_was_waited_for() {
    let traces = support::fresh_directory();
    let text = support::profile(&traces);
    assert!(text.contains("rank 1 of 3"), "{text}");
    // Two kernels of 30 and 40 us that overlap by 10: 60 in all, of 4 MiB by two thirds, twice.
    let bus = 4.0 * 1048.576 * 4.0 / 3.0 / 60.0;
    assert!(
        text.contains(&format!(
            "AllReduce 4194304 B by ring/simple: 20 times, 60.0 us on average, 60.0 at most, {bus:.2} GB/s"
        )),
        "{text}"
    );
    assert!(text.contains("for what rank 2 sends"), "{text}");
    assert!(
        text.contains("rank 2 is waited for more than all others together"),
        "{text}"
    );
    let trace = format!("nccl-{}.json", std::process::id());
    let trace = std::fs::read_to_string(traces.join(trace)).expect("a trace");
    assert_eq!(trace.matches("\"AllReduce\"").count(), 20, "{trace}");
    std::fs::remove_dir_all(traces).expect("it is ours");
}
