use std::sync::Arc;

use weft_protocol::HostBytes;

use super::*;
use crate::memory::{AllocateOptions, udmabuf};
use crate::verbs::{RailOptions, rails};
use weft_protocol::memory::VecMemory;

#[test]
fn access_becomes_exactly_these_flags() {
    let local = sys::IBV_ACCESS_LOCAL_WRITE;
    assert_eq!(RemoteAccess::NONE.flags(), local);
    assert_eq!(
        RemoteAccess::from(Access::READ).flags(),
        local | sys::IBV_ACCESS_REMOTE_READ
    );
    assert_eq!(
        RemoteAccess::from(Access::WRITE).flags(),
        local | sys::IBV_ACCESS_REMOTE_WRITE
    );
    let all = RemoteAccess {
        read: true,
        write: true,
        atomic: true,
    };
    let remote = sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
    assert_eq!(all.flags(), local | remote);
}

#[test]
fn pinned_memory_is_read_from_the_status() {
    assert_eq!(
        parse_pinned("VmLck:\t 4 kB\nVmPin:\t     132 kB\n"),
        Some(Bytes(132 << 10))
    );
    for text in [
        "",
        "VmPin:",
        "VmPin: x kB",
        "VmPin: 99999999999999999999 kB",
        "VmPin: 18446744073709551615 kB",
    ] {
        assert_eq!(parse_pinned(text), None, "{text}");
    }
}

#[test]
fn memory_without_an_address_and_memory_without_bytes_are_refused() {
    assert!(matches!(
        Source::of(&VecMemory::zeroed(8)),
        Err(RegistrationError::UnknownMemory)
    ));
    assert!(matches!(
        Source::of(&HostMemory::from_vec(Vec::new())),
        Err(RegistrationError::Empty)
    ));
}

fn registrations(options: RegistrationOptions) -> Registrations {
    let rail = rails(&RailOptions::default()).unwrap().remove(0);
    Registrations::new(&ProtectionDomain::new(&rail.device).unwrap(), options)
}

fn allocate(len: usize) -> Arc<dyn Memory> {
    Arc::new(HostMemory::allocate(len, AllocateOptions::default()).unwrap())
}

const READ_WRITE: RemoteAccess = RemoteAccess {
    read: true,
    write: true,
    atomic: false,
};

#[test]
#[ignore = "needs an RDMA device"]
fn local_registrations_are_shared_and_remote_ones_are_not() {
    let mut registrations = registrations(RegistrationOptions::default());
    for memory in [
        allocate(1 << 20),
        Arc::new(HostMemory::from_vec(vec![7; 100_001])) as Arc<dyn Memory>,
    ] {
        let before = registrations.counts();
        let first = registrations.register(&memory, RemoteAccess::NONE).unwrap();
        let second = registrations.register(&memory, RemoteAccess::NONE).unwrap();
        assert_eq!((first.lkey(), first.len()), (second.lkey(), memory.len()));
        let remote = registrations.register(&memory, READ_WRITE).unwrap();
        let other = registrations.register(&memory, READ_WRITE).unwrap();
        assert_ne!(remote.rkey(), other.rkey(), "two regions, two keys");
        assert_eq!(remote.iova(), first.iova());
        let lkey = first.lkey();
        for registration in [first, second, remote, other] {
            registrations.release(registration, Time::ZERO);
        }
        let again = registrations.register(&memory, RemoteAccess::NONE).unwrap();
        assert_eq!(again.lkey(), lkey, "kept for a while");
        let counts = registrations.counts();
        assert_eq!((counts.made - before.made, counts.reused - before.reused), (3, 2));
        registrations.release(again, Time::ZERO);
    }
    assert!(registrations.next_timeout().is_some());
    registrations.sweep(Time::MAX);
    assert_eq!(registrations.next_timeout(), None);
}

#[test]
#[ignore = "needs an RDMA device"]
fn what_cannot_be_pinned_is_refused_with_its_reason() {
    let mut registrations = registrations(RegistrationOptions::default());
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            1 << 16,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(address, libc::MAP_FAILED);
    // SAFETY: nobody reads or writes it, which is what the promise is about; the mapping is never taken away.
    let unmapped: Arc<dyn Memory> = Arc::new(unsafe { HostMemory::from_raw(address.cast(), 1 << 16, Box::new(())) });
    let error = registrations.register(&unmapped, READ_WRITE).unwrap_err();
    assert!(matches!(error, RegistrationError::NotWritable), "{error:?}");

    if !registrations.domain.device().has_on_demand_paging() {
        registrations.options.odp = OnDemandPaging::Always;
        let error = registrations.register(&allocate(4096), READ_WRITE).unwrap_err();
        assert!(matches!(error, RegistrationError::NoOnDemandPaging { .. }), "{error:?}");
        registrations.options.odp = OnDemandPaging::Auto;
    }
    under_a_small_limit(|| {
        let error = registrations.register(&allocate(1 << 20), READ_WRITE).unwrap_err();
        match error {
            RegistrationError::LockedMemoryLimit { bytes, limit, .. } => {
                assert_eq!((bytes, limit), (Bytes(1 << 20), Bytes(64 << 10)));
            }
            other => panic!("{other:?}"),
        }
        registrations.register(&allocate(4096), READ_WRITE).map(drop).unwrap();
    });
}

/// Runs on a thread without the capability to pass the limit, and with a small one.
fn under_a_small_limit(act: impl FnOnce() + Send) {
    let mut before = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the answer has a place.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut before) }, 0);
    let small = libc::rlimit {
        rlim_cur: 64 << 10,
        rlim_max: before.rlim_max,
    };
    // SAFETY: a plain call. Only this test pins memory in its process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &small) }, 0);
    let ran = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            drop_capabilities();
            act();
        });
        thread.join()
    });
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &before) }, 0);
    ran.unwrap();
}

/// Of the calling thread alone.
fn drop_capabilities() {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let none = [[0u32; 3]; 2];
    // SAFETY: a header of version 3 is followed by two sets of three words.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, &header, none.as_ptr()) }, 0);
}

#[test]
#[ignore = "needs an RDMA device and /dev/udmabuf"]
fn dma_buf_memory_is_registered_or_refused_by_name() {
    let memory = udmabuf(1 << 20).unwrap();
    memory.write(4096, b"through the descriptor");
    let memory: Arc<dyn Memory> = Arc::new(memory);
    let mut registrations = registrations(RegistrationOptions::default());
    match registrations.register(&memory, READ_WRITE) {
        Ok(registration) => assert_eq!(registration.len(), 1 << 20),
        Err(RegistrationError::DeviceWithoutDmaBuf { device }) => eprintln!("{device} does not take dma-buf"),
        Err(other) => panic!("{other:?}"),
    }
}
