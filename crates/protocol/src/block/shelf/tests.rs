use super::*;
use crate::block::{HitRule, Part, checksum};

const BLOCK: u32 = 5000;

fn shape() -> Shape {
    Shape::new(vec![Part::new("kv", BLOCK, HitRule::AllBlocks)]).unwrap()
}

fn header() -> Header {
    Header::first([7; 16], Geometry::new(BLOCK, 10 * 8192, 20 * 8192).unwrap(), &shape())
}

fn options() -> ShelfOptions {
    ShelfOptions::new(Medium::Files(Durability::Process))
}

fn started(options: ShelfOptions) -> Shelf {
    let mut shelf = Shelf::in_files(header(), &shape(), options);
    shelf.start();
    shelf
}

fn id(number: u64) -> BlockId {
    crate::block::trace::id(number)
}

const TENANT: TenantKey = TenantKey(5);

fn payload_sum(number: u64) -> u64 {
    checksum(&vec![number as u8; BLOCK as usize])
}

fn place(shelf: &mut Shelf, number: u64, parent: Option<u64>, now: Time) -> Result<Write, PutRefused> {
    match shelf.put(TENANT, id(number), parent.map(id), 1, now)? {
        ShelfPut::Write(write) => Ok(write),
        ShelfPut::AlreadyThere => panic!("block {number} is there"),
    }
}

fn sealed(write: &Write, number: u64) -> Sealed {
    let mut open = write.open.clone();
    open.fill(0, 0, BLOCK, payload_sum(number)).unwrap();
    open.seal().unwrap()
}

fn events(shelf: &mut Shelf) -> Vec<ShelfEvent> {
    std::iter::from_fn(|| shelf.next_event()).collect()
}

/// Puts a block whose writes go well.
fn put(shelf: &mut Shelf, number: u64, parent: Option<u64>) -> (u32, u64) {
    let write = place(shelf, number, parent, Time::ZERO).unwrap();
    shelf.on_written(write.put, Ok(sealed(&write, number)), Time::ZERO);
    while let Some(pages) = shelf.next_pages(Time::ZERO) {
        shelf.on_pages(pages.extent, Ok(()), Time::ZERO);
    }
    assert_ne!(shelf.parts_of(&id(number)), 0);
    (write.extent, write.offset)
}

#[test]
fn a_block_is_found_when_its_record_is_written_and_not_before() {
    let mut shelf = started(options());
    let write = place(&mut shelf, 1, None, Time::ZERO).unwrap();
    assert_eq!(shelf.next_pages(Time::ZERO), None);
    shelf.on_written(write.put, Ok(sealed(&write, 1)), Time::ZERO);
    assert!(shelf.parts_of(&id(1)) == 0 && shelf.read(&id(1), Time::ZERO).is_none());
    let pages = shelf.next_pages(Time::ZERO).unwrap();
    assert_eq!(
        (pages.pages.as_slice(), pages.bytes.len(), pages.commit),
        (&[0][..], PAGE_BYTES, false)
    );
    assert_eq!(shelf.next_pages(Time::ZERO), None, "one write of an extent at a time");
    shelf.on_pages(pages.extent, Ok(()), Time::ZERO);
    assert_eq!(
        events(&mut shelf),
        [ShelfEvent::PutDone {
            put: write.put,
            id: id(1),
            ended: Ok(())
        }]
    );
    let read = shelf.read(&id(1), Time::ZERO).unwrap();
    assert_eq!(
        shelf.end_read(read.read, Ok(payload_sum(1)), Time::ZERO),
        Verdict::Right
    );
    let read = shelf.read(&id(1), Time::ZERO).unwrap();
    assert_eq!(
        shelf.end_read(read.read, Ok(payload_sum(2)), Time::ZERO),
        Verdict::Wrong
    );
    assert!(shelf.read(&id(1), Time::ZERO).is_none());
    assert_eq!(shelf.wrongs().next().map(|wrong| wrong.id), Some(id(1)));
}

#[test]
fn a_slot_that_is_read_is_nobody_elses() {
    let mut shelf = started(options());
    let first = put(&mut shelf, 1, None);
    let read = shelf.read(&id(1), Time::ZERO).unwrap();
    assert!(shelf.evict(id(1)));
    for number in 2..19 {
        assert_ne!(put(&mut shelf, number, None), first);
    }
    assert_eq!(
        shelf.end_read(read.read, Ok(payload_sum(1)), Time::ZERO),
        Verdict::Right
    );
    let mut taken = (19..60).map(|number| put(&mut shelf, number, None));
    assert!(taken.any(|place| place == first));
}

#[test]
fn a_disk_that_is_full_is_left_alone_until_a_probe_goes_through() {
    let mut shelf = started(options());
    let write = place(&mut shelf, 1, None, Time::ZERO).unwrap();
    shelf.on_written(write.put, Err(Trouble::NoRoom), Time::ZERO);
    assert!(matches!(
        shelf.condition(),
        Condition::Aside {
            trouble: Trouble::NoRoom,
            reads_too: false,
            ..
        }
    ));
    let refused = place(&mut shelf, 2, None, Time::from_ms(1)).unwrap_err();
    assert_eq!(
        refused,
        PutRefused::Aside {
            trouble: Trouble::NoRoom
        }
    );
    // One probe, and no second one beside it.
    let probe = place(&mut shelf, 3, None, Time::from_ms(100)).unwrap();
    assert!(place(&mut shelf, 4, None, Time::from_ms(101)).is_err());
    shelf.on_written(probe.put, Ok(sealed(&probe, 3)), Time::from_ms(102));
    assert_eq!(shelf.condition(), Condition::Serving);
    let pages = shelf.next_pages(Time::from_ms(102)).unwrap();
    shelf.on_pages(pages.extent, Ok(()), Time::from_ms(103));
    let tally = shelf.tally();
    assert_eq!(
        (tally.puts, tally.stored, tally.refused, tally.failed, tally.under_way),
        (4, 1, 2, 1, 0)
    );
    assert_eq!((shelf.counts().set_aside, shelf.counts().returned), (1, 1));
}

#[test]
fn records_that_cannot_be_written_are_not_tried_in_a_loop() {
    let mut shelf = started(options());
    let write = place(&mut shelf, 1, None, Time::ZERO).unwrap();
    shelf.on_written(write.put, Ok(sealed(&write, 1)), Time::ZERO);
    let pages = shelf.next_pages(Time::ZERO).unwrap();
    shelf.on_pages(pages.extent, Err(Trouble::DeviceFailed), Time::ZERO);
    assert_eq!(shelf.next_pages(Time::from_ms(1)), None);
    let due = shelf.next_timeout().unwrap();
    let pages = shelf.next_pages(due).expect("the record that may be there is erased");
    assert_eq!(pages.bytes[..RECORD_BYTES], Record::erased());
}

#[test]
fn a_purge_waits_for_records_that_may_be_on_the_disk_although_their_put_failed() {
    let mut shelf = started(options());
    let write = place(&mut shelf, 1, None, Time::ZERO).unwrap();
    shelf.on_written(write.put, Ok(sealed(&write, 1)), Time::ZERO);
    let pages = shelf.next_pages(Time::ZERO).unwrap();
    // It failed, and is half there all the same.
    shelf.on_pages(pages.extent, Err(Trouble::Late), Time::ZERO);
    events(&mut shelf);
    shelf.purge(TENANT);
    assert_eq!(events(&mut shelf), []);
    let pages = shelf.next_pages(Time::from_secs(1)).unwrap();
    shelf.on_pages(pages.extent, Ok(()), Time::from_secs(1));
    assert!(matches!(
        events(&mut shelf)[..],
        [ShelfEvent::PurgeDone { ended: Ok(_), .. }]
    ));
}

#[test]
fn a_purge_whose_page_failed_is_not_done_by_asking_again() {
    let mut shelf = started(options());
    put(&mut shelf, 1, None);
    shelf.purge(TENANT);
    let pages = shelf.next_pages(Time::ZERO).unwrap();
    shelf.on_pages(pages.extent, Err(Trouble::Late), Time::ZERO);
    let failed = |event: &ShelfEvent| matches!(event, ShelfEvent::PurgeDone { ended: Err(_), .. });
    assert!(events(&mut shelf).iter().any(failed));
    // The record is erased in memory, and may be on the disk all the same.
    shelf.purge(TENANT);
    assert_eq!(events(&mut shelf), []);
    let pages = shelf.next_pages(Time::from_secs(1)).expect("the page is written again");
    assert_eq!(pages.bytes[..RECORD_BYTES], Record::erased());
    shelf.on_pages(pages.extent, Ok(()), Time::from_secs(1));
    let done = |event: &ShelfEvent| matches!(event, ShelfEvent::PurgeDone { ended: Ok(_), .. });
    assert!(events(&mut shelf).iter().any(done));
}

#[test]
fn a_put_under_way_does_not_outlive_the_purge_of_its_tenant() {
    for written in [false, true] {
        let mut shelf = started(options());
        let write = place(&mut shelf, 1, None, Time::ZERO).unwrap();
        let flying = written.then(|| {
            shelf.on_written(write.put, Ok(sealed(&write, 1)), Time::ZERO);
            shelf.next_pages(Time::ZERO).unwrap()
        });
        assert_eq!(shelf.purge(TENANT).1, 0);
        match flying {
            Some(pages) => shelf.on_pages(pages.extent, Ok(()), Time::ZERO),
            None => shelf.on_written(write.put, Ok(sealed(&write, 1)), Time::ZERO),
        }
        assert_eq!(shelf.parts_of(&id(1)), 0);
        assert!(events(&mut shelf).contains(&ShelfEvent::PutDone {
            put: write.put,
            id: id(1),
            ended: Err(PutFailed::Purged)
        }));
        while let Some(pages) = shelf.next_pages(Time::ZERO) {
            assert!(
                pages
                    .bytes
                    .as_chunks::<RECORD_BYTES>()
                    .0
                    .iter()
                    .all(|record| !matches!(Record::decode(record, shelf.geometry()), Found::Block(_)))
            );
            shelf.on_pages(pages.extent, Ok(()), Time::ZERO);
        }
    }
}

#[test]
fn what_was_lost_is_put_again_in_the_place_that_its_followers_keep() {
    let mut shelf = started(options());
    put(&mut shelf, 1, None);
    put(&mut shelf, 2, Some(1));
    let read = shelf.read(&id(1), Time::ZERO).unwrap();
    assert_eq!(shelf.end_read(read.read, Ok(0), Time::ZERO), Verdict::Wrong);
    assert_eq!((shelf.parts_of(&id(1)), shelf.parts_of(&id(2))), (0, 1));
    put(&mut shelf, 1, None);
    assert!(!shelf.evict(id(1)), "the second follows it still");
    assert!(shelf.evict(id(2)) && shelf.evict(id(1)));
    assert_eq!((shelf.blocks(), shelf.free_slots()), (0, 20));
    assert!(shelf.tally().balances());
}

#[test]
fn what_leaves_is_handed_down_before_its_slot_is_used_again() {
    let mut shelf = Shelf::in_memory(
        Geometry::new(BLOCK, 20 * 8192, 20 * 8192).unwrap(),
        &shape(),
        ShelfOptions {
            hand_down: true,
            ..ShelfOptions::new(Medium::Memory)
        },
    );
    for number in 1..=19 {
        let write = place(&mut shelf, number, None, Time::ZERO).unwrap();
        shelf.on_written(write.put, Ok(sealed(&write, number)), Time::ZERO);
    }
    let before = shelf.free_slots();
    let write = place(&mut shelf, 20, None, Time::ZERO).unwrap();
    let left: Vec<Read> = events(&mut shelf)
        .into_iter()
        .filter_map(|event| match event {
            ShelfEvent::Removed { read, tenant, .. } => read.filter(|_| tenant == TENANT),
            _ => None,
        })
        .collect();
    assert!(!left.is_empty() && shelf.free_slots() < before);
    for read in left {
        assert_ne!(read.offset, write.offset);
        assert_eq!(
            shelf.end_read(read.read, Ok(payload_sum(number_of(&read.id))), Time::ZERO),
            Verdict::Right
        );
    }
    assert!(shelf.free_slots() >= before);
}

fn number_of(wanted: &BlockId) -> u64 {
    (1..60).find(|number| id(*number) == *wanted).unwrap()
}

#[test]
fn chains_come_back_as_chains() {
    let mut shelf = started(options());
    let mut index = format::extent_header(&[7; 16], 0, shelf.geometry());
    index.resize(index.len() + PAGE_BYTES, 0);
    for number in 1..=5 {
        let write = place(
            &mut shelf,
            number,
            number.checked_sub(1).filter(|parent| *parent > 0),
            Time::ZERO,
        )
        .unwrap();
        shelf.on_written(write.put, Ok(sealed(&write, number)), Time::ZERO);
    }
    let pages = shelf.next_pages(Time::ZERO).unwrap();
    index[PAGE_BYTES..].copy_from_slice(&pages.bytes);
    let next = header().opened(header().geometry, &shape()).unwrap();
    let mut again = Shelf::in_files(next, &shape(), options());
    assert_eq!(again.recover(0, &index), format::ExtentKind::Own);
    assert_eq!(again.recover(1, &[]), format::ExtentKind::Fresh);
    again.start();
    assert_eq!((again.blocks(), again.counts().recovered), (5, 5));
    assert!(!again.evict(id(2)) && again.evict(id(5)) && again.evict(id(4)));
    // A tier that was opened more often is of a time to come for one that was not.
    let mut old = Shelf::in_files(Header { epoch: 0, ..header() }, &shape(), options());
    old.recover(0, &index);
    old.start();
    assert_eq!((old.blocks(), old.counts().left_out), (0, 5));
}

#[test]
fn tenants_are_few_and_queues_are_short() {
    let mut shelf = started(ShelfOptions {
        tenants: 1,
        queue_bytes: u64::from(2 * BLOCK),
        ..options()
    });
    place(&mut shelf, 1, None, Time::ZERO).unwrap();
    let other = shelf.put(TenantKey(6), id(9), None, 1, Time::ZERO).unwrap_err();
    assert_eq!(other, PutRefused::Tenants { limit: 1 });
    place(&mut shelf, 2, None, Time::ZERO).unwrap();
    let full = place(&mut shelf, 3, None, Time::ZERO).unwrap_err();
    assert!(matches!(
        full,
        PutRefused::QueueFull {
            queued: 10_000,
            limit: 10_000
        }
    ));
    assert_eq!(
        shelf.put(TENANT, id(4), None, 0, Time::ZERO).unwrap_err(),
        PutRefused::NoParts
    );
    assert!(shelf.tally().balances());
}

#[test]
fn a_request_for_blocks_of_several_tenants_tells_each_policy_of_its_own() {
    let mut shelf = started(options());
    for (number, tenant) in [(1, 5), (2, 6), (3, 5)] {
        let put = shelf.put(TenantKey(tenant), id(number), None, 1, Time::ZERO).unwrap();
        let ShelfPut::Write(write) = put else { panic!() };
        shelf.on_written(write.put, Ok(sealed(&write, number)), Time::ZERO);
        let pages = shelf.next_pages(Time::ZERO).unwrap();
        shelf.on_pages(pages.extent, Ok(()), Time::ZERO);
    }
    assert_eq!(shelf.request(&[id(1), id(2), id(3)], Hint::default()), 3);
    assert!((1..4).all(|number| shelf.evict(id(number))));
    assert_eq!(shelf.blocks(), 0);
}
