//! Files as places of an agent: spills and fetches as ordinary transfers, with spans, checksums, deadlines, commits; and what is refused.

use std::time::Duration;

use weft::{Agent, Direct, Error, FileError, FileOptions, Place, Run, Spans};

fn agent(settings: &[(&str, &str)]) -> Agent {
    let mut builder = Agent::builder("files").set("transports", "shared_memory");
    for (key, value) in settings {
        builder = builder.set(key, value);
    }
    builder.start().expect("an agent")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) >> 3) as u8 ^ (i >> 12) as u8).collect()
}

const LEN: usize = 8 << 20;

#[test]
fn a_spill_comes_back_as_it_was() {
    for io in ["auto", "threads"] {
        let (agent, folder) = (agent(&[("file.io", io)]), folder());
        let file = agent.open_file(folder.path().join("spill"), FileOptions::sized(LEN as u64));
        let file = file.expect("a file");
        assert_eq!((file.len(), file.place()), (LEN as u64, Place::File));
        let (out, back) = (
            agent.allocate(LEN).expect("memory"),
            agent.allocate(LEN).expect("memory"),
        );
        out.write(0, &pattern(LEN));
        let copy = |from, to| {
            agent
                .copy(from, to)
                .expect("a copy")
                .checksum(true)
                .post()
                .expect("posted")
                .wait()
        };
        copy(&out, &file).expect("written");
        copy(&file, &back).expect("read");
        assert!(back.to_vec() == out.to_vec(), "{io}");
        assert!(
            std::fs::read(folder.path().join("spill")).expect("readable") == pattern(LEN),
            "{io}"
        );
    }
}

#[test]
fn spans_choose_bytes_on_both_sides() {
    let (agent, folder) = (agent(&[]), folder());
    let file = agent
        .open_file(folder.path().join("blocks"), FileOptions::sized(LEN as u64))
        .expect("a file");
    let memory = agent.register_vec(pattern(LEN)).expect("memory");
    let block = 64 << 10;
    let near = Spans::strided(Run {
        offset: 100,
        len: block,
        stride: 2 * block,
        count: 30,
    });
    let far = Spans::paged(0, block, (0..30).rev());
    agent
        .copy(&memory, &file)
        .expect("a copy")
        .spans(near.clone(), far.clone())
        .post()
        .expect("posted")
        .wait()
        .expect("written");
    let back = agent.allocate(LEN).expect("memory");
    agent
        .copy(&file, &back)
        .expect("a copy")
        .spans(far, near.clone())
        .post()
        .expect("posted")
        .wait()
        .expect("read");
    let (wanted, found) = (memory.to_vec(), back.to_vec());
    for span in near.pieces(0..near.bytes()) {
        let range = span.offset as usize..(span.offset + span.len) as usize;
        assert!(wanted[range.clone()] == found[range], "{span:?}");
    }
}

#[test]
fn a_file_goes_to_another_through_the_hosts_memory() {
    let (agent, folder) = (agent(&[]), folder());
    std::fs::write(folder.path().join("old"), pattern(LEN)).expect("a file");
    let old = agent
        .open_file(folder.path().join("old"), FileOptions::default().write(false))
        .expect("a file");
    let new = agent
        .open_file(folder.path().join("new"), FileOptions::sized(LEN as u64))
        .expect("a file");
    agent
        .copy(&old, &new)
        .expect("a copy")
        .post()
        .expect("posted")
        .wait()
        .expect("copied");
    assert!(std::fs::read(folder.path().join("new")).expect("readable") == pattern(LEN));
    // What was opened for reading is not written.
    let refused = agent.copy(&new, &old).expect("a copy").post().expect("posted").wait();
    assert!(refused.is_err());
    assert!(std::fs::read(folder.path().join("old")).expect("readable") == pattern(LEN));
}

#[test]
fn a_commit_gives_the_name_and_nothing_else_does() {
    let (agent, folder) = (agent(&[]), folder());
    let path = folder.path().join("checkpoint");
    std::fs::write(&path, b"the old one").expect("a file");
    let memory = agent.register_vec(pattern(LEN)).expect("memory");
    let new = agent
        .open_file(&path, FileOptions::sized(LEN as u64).replace(true))
        .expect("a file");
    agent
        .copy(&memory, &new)
        .expect("a copy")
        .post()
        .expect("posted")
        .wait()
        .expect("written");
    assert_eq!(std::fs::read(&path).expect("readable"), b"the old one");
    for _ in 0..2 {
        agent
            .copy(&memory, &new)
            .expect("a copy")
            .commit()
            .post()
            .expect("posted")
            .wait()
            .expect("committed");
        assert!(std::fs::read(&path).expect("readable") == pattern(LEN));
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 1);
}

#[test]
fn what_is_no_place_is_refused_with_the_reason() {
    let (agent, folder) = (agent(&[]), folder());
    let open = |options| agent.open_file(folder.path().join("none"), options);
    assert!(
        matches!(open(FileOptions::default()), Err(Error::File(error)) if matches!(*error, FileError::Open { .. }))
    );
    let directory = agent.open_file(folder.path(), FileOptions::default().write(false));
    assert!(matches!(directory, Err(Error::File(error)) if matches!(*error, FileError::NotAFile { .. })));
    let proc_file = agent.open_file(
        "/proc/self/cmdline",
        FileOptions::default().write(false).direct(Direct::On),
    );
    assert!(matches!(proc_file, Err(Error::File(_))));
}

#[test]
fn a_released_file_is_refused_and_a_cut_one_is_told() {
    let (agent, folder) = (agent(&[]), folder());
    let path = folder.path().join("file");
    let file = agent.open_file(&path, FileOptions::sized(LEN as u64)).expect("a file");
    let memory = agent.allocate(LEN).expect("memory");
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("there")
        .set_len(4096)
        .expect("cut");
    let cut = agent
        .copy(&file, &memory)
        .expect("a copy")
        .post()
        .expect("posted")
        .wait();
    assert!(cut.expect_err("cut").to_string().contains("not there any more"));
    file.release(Duration::from_secs(10)).expect("released");
    let refused = agent.copy(&memory, &file).expect("a copy").post();
    assert!(refused.is_err());
}

#[test]
fn cancelled_spills_leave_their_memory_alone() {
    let (agent, folder) = (agent(&[]), folder());
    let file = agent
        .open_file(folder.path().join("file"), FileOptions::sized(4 * LEN as u64))
        .expect("a file");
    let memory = agent.allocate(4 * LEN).expect("memory");
    for _ in 0..5 {
        let read = agent.copy(&file, &memory).expect("a copy").post().expect("posted");
        read.cancel();
        let _ = read.wait();
        memory.write(0, &vec![7; 4 * LEN]);
        std::thread::sleep(Duration::from_millis(5));
        assert!(memory.to_vec().iter().all(|byte| *byte == 7));
    }
}
