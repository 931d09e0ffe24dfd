//! Every place keeps the same promises, also when a holder is killed without a word.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weft::rendezvous::{Rendezvous, RendezvousError, RendezvousOptions, World};
use weft_protocol::Epoch;

const PATIENCE: Duration = Duration::from_secs(20);
const SECRET: &[u8] = b"a secret of the test";

fn options() -> RendezvousOptions {
    RendezvousOptions {
        job: "test".to_owned(),
        lease: Duration::from_secs(1),
    }
}

fn world(rank: u32, port: u16) -> World {
    World {
        rank,
        size: 4,
        local_rank: None,
        master: "127.0.0.1".to_owned(),
        master_port: port,
        job: None,
    }
}

fn by_world(rank: u32, port: u16) -> Rendezvous {
    Rendezvous::by_world(&world(rank, port), 0, SECRET, options()).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// What any place must do, seen by two that share it.
fn keeps_its_promises(here: &Rendezvous, there: &Rendezvous) {
    let held = here.register("prefill / 0", "tcp:127.0.0.1:4000", Epoch(7)).unwrap();
    let found = there.lookup("prefill / 0", PATIENCE).unwrap();
    assert_eq!((found.address.as_str(), found.epoch), ("tcp:127.0.0.1:4000", Epoch(7)));
    let second = there
        .register("prefill / 0", "tcp:127.0.0.1:5000", Epoch(8))
        .unwrap_err();
    assert!(
        matches!(&second, RendezvousError::NameTaken { holder, .. } if holder == "tcp:127.0.0.1:4000"),
        "{second}"
    );
    let other = there.register("decode", "tcp:127.0.0.1:6000", Epoch(9)).unwrap();
    let names: Vec<_> = here.list().unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["decode", "prefill / 0"]);
    drop(held);
    gone(there, "prefill / 0");
    let again = there.register("prefill / 0", "tcp:127.0.0.1:7000", Epoch(10)).unwrap();
    assert_eq!(here.lookup("prefill / 0", PATIENCE).unwrap().epoch, Epoch(10));
    drop((other, again));
    assert!(matches!(
        here.lookup("", PATIENCE),
        Err(RendezvousError::BadName { .. })
    ));
    assert!(matches!(
        here.register("x\n", "a", Epoch(1)),
        Err(RendezvousError::BadName { .. })
    ));
    // Who waits for a change gets it when somebody comes, and when somebody goes.
    gone(there, "decode");
    gone(there, "prefill / 0");
    std::thread::scope(|scope| {
        let known = there.list().unwrap();
        assert_eq!(there.list_changed(&known, Duration::from_millis(50)).unwrap(), known);
        let waiting = scope.spawn(move || there.list_changed(&known, PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let held = here.register("new", "tcp:127.0.0.1:8000", Epoch(12)).unwrap();
        let come = waiting.join().unwrap();
        assert_eq!(come.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["new"]);
        let waiting = scope.spawn(move || there.list_changed(&come, PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        assert_eq!(waiting.join().unwrap(), []);
    });
    // Who waits for a name gets it when it is taken.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| there.lookup("late", PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let held = here.register("late", "tcp:127.0.0.1:8000", Epoch(11)).unwrap();
        assert_eq!(waiting.join().unwrap().epoch, Epoch(11));
        drop(held);
    });
}

fn gone(place: &Rendezvous, name: &str) {
    let start = Instant::now();
    while place.lookup(name, Duration::ZERO).is_ok() {
        assert!(start.elapsed() < PATIENCE, "{name} is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(
        place.lookup(name, Duration::ZERO),
        Err(RendezvousError::NotFound { .. })
    ));
}

/// Starts this binary again as a process that registers `victim` and waits to be killed.
fn holder(place: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "holds_a_name_until_killed", "--nocapture"])
        .env("HOLD_A_NAME_AT", place)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(
        lines.map_while(Result::ok).any(|line| line.contains("holding")),
        "the holder could not register"
    );
    child
}

/// Not a test but the other process of the tests below; alone it does nothing.
#[test]
fn holds_a_name_until_killed() {
    let Ok(place) = std::env::var("HOLD_A_NAME_AT") else {
        return;
    };
    let (kind, rest) = place.split_once(':').unwrap();
    let place = match kind {
        "dir" => Rendezvous::by_directory(Path::new(rest), options()).unwrap(),
        "world" => by_world(1, rest.parse().unwrap()),
        "etcd" => Rendezvous::by_etcd(rest, options()).unwrap(),
        other => panic!("{other}"),
    };
    let _held = place.register("victim", "tcp:127.0.0.1:1", Epoch(1)).unwrap();
    println!("holding");
    loop {
        std::thread::park();
    }
}

fn forgets_a_killed_holder(place: &Rendezvous, described: &str) {
    let mut child = holder(described);
    assert_eq!(place.lookup("victim", PATIENCE).unwrap().epoch, Epoch(1));
    assert!(matches!(
        place.register("victim", "b", Epoch(2)),
        Err(RendezvousError::NameTaken { .. })
    ));
    child.kill().unwrap();
    child.wait().unwrap();
    gone(place, "victim");
    let restarted = place.register("victim", "tcp:127.0.0.1:2", Epoch(2)).unwrap();
    assert_eq!(place.lookup("victim", PATIENCE).unwrap().epoch, Epoch(2));
    drop(restarted);
}

#[test]
fn in_process() {
    keeps_its_promises(&Rendezvous::in_process("test"), &Rendezvous::in_process("test"));
    let _held = Rendezvous::in_process("one job").register("a", "b", Epoch(1)).unwrap();
    assert!(Rendezvous::in_process("another job").list().unwrap().is_empty());
}

#[test]
fn by_directory() {
    let directory = tempfile::tempdir().unwrap();
    let place = || Rendezvous::by_directory(directory.path(), options()).unwrap();
    keeps_its_promises(&place(), &place());
    forgets_a_killed_holder(&place(), &format!("dir:{}", directory.path().display()));
}

#[test]
fn a_directory_with_hostile_content() {
    let directory = tempfile::tempdir().unwrap();
    let place = Rendezvous::by_directory(directory.path(), options()).unwrap();
    let inside = directory.path().join("test");
    std::fs::write(inside.join("garbage.entry"), b"\xff\x00{").unwrap();
    std::fs::write(inside.join("huge.entry"), vec![b'x'; 1 << 20]).unwrap();
    std::fs::create_dir(inside.join("folder.entry")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", inside.join("link.entry")).unwrap();
    let _held = place.register("good", "a", Epoch(1)).unwrap();
    // Somebody else's entry under another name would send peers to the wrong place.
    std::fs::copy(inside.join("good.entry"), inside.join("copied.entry")).unwrap();
    assert_eq!(place.list().unwrap().len(), 1);
    for name in ["garbage", "huge", "copied", "folder"] {
        assert!(
            matches!(
                place.lookup(name, Duration::ZERO),
                Err(RendezvousError::BadEntry { .. })
            ),
            "{name}"
        );
    }
    assert!(place.lookup("link", Duration::ZERO).is_err());
    let traversal = place.register("../../escape", "a", Epoch(1)).unwrap();
    assert!(!directory.path().join("escape.entry").exists());
    drop(traversal);
    for job in [".", ".."] {
        let job = job.to_owned();
        let place = Rendezvous::by_directory(&inside, RendezvousOptions { job, ..options() }).unwrap();
        let _held = place.register("escape", "a", Epoch(1)).unwrap();
        for outside in [&inside, directory.path()] {
            assert!(!outside.join("escape.entry").exists(), "{}", outside.display());
        }
    }
}

#[test]
fn an_entry_from_another_host_lives_while_its_file_is_young() {
    let directory = tempfile::tempdir().unwrap();
    let place = Rendezvous::by_directory(directory.path(), options()).unwrap();
    let file = directory.path().join("test/far.entry");
    let text =
        r#"{"weft":1,"name":"far","address":"tcp:10.0.0.9:1","epoch":"ff","host":"elsewhere","process":1,"started":1}"#;
    std::fs::write(&file, text).unwrap();
    assert_eq!(place.lookup("far", Duration::ZERO).unwrap().epoch, Epoch(255));
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(60);
    std::fs::File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    assert!(matches!(
        place.lookup("far", Duration::ZERO),
        Err(RendezvousError::NotFound { .. })
    ));
    let _held = place.register("far", "tcp:10.0.0.1:1", Epoch(1)).unwrap();
    assert_eq!(place.lookup("far", Duration::ZERO).unwrap().epoch, Epoch(1));
}

#[test]
fn by_the_environment_of_a_launcher() {
    let port = free_port();
    let (first, second) = (by_world(0, port), by_world(1, port));
    keeps_its_promises(&first, &second);
    forgets_a_killed_holder(&first, &format!("world:{port}"));
}

#[test]
fn a_name_server_refuses_strangers() {
    let port = free_port();
    let first = by_world(0, port);
    let wrong = Rendezvous::by_world(&world(1, port), 0, b"another secret", options()).unwrap();
    assert!(matches!(
        wrong.register("a", "b", Epoch(1)),
        Err(RendezvousError::WrongSecret { .. })
    ));
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b""] {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _ = std::io::Write::write_all(&mut stream, garbage);
    }
    let held = first.register("a", "b", Epoch(1)).unwrap();
    assert_eq!(first.list().unwrap().len(), 1);
    drop(held);
}

/// Everything that comes within a moment.
fn heard(stream: &mut std::net::TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let (mut all, mut some) = (Vec::new(), [0; 1024]);
    while let Ok(n @ 1..) = std::io::Read::read(stream, &mut some) {
        all.extend_from_slice(&some[..n]);
    }
    all
}

#[test]
fn a_name_server_gives_strangers_nothing_to_try_guesses_against() {
    let port = free_port();
    let _first = by_world(0, port);
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let opening = [&b"weftname"[..], &[7; 32]].concat();
    std::io::Write::write_all(&mut stream, &opening).unwrap();
    // Its own opening, and nothing after it: a proof would be answered, a wrong one is not.
    assert_eq!(heard(&mut stream).len(), opening.len());
    std::io::Write::write_all(&mut stream, &[7; 32]).unwrap();
    assert!(heard(&mut stream).is_empty());
}

#[test]
fn strangers_at_a_name_server_are_few_and_have_little_time() {
    let port = free_port();
    let first = by_world(0, port);
    let mut slow = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut silent: Vec<_> = (0..63)
        .map(|_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap())
        .collect();
    // However slowly it talks, all of it must be said in time.
    let opening = [&b"weftname"[..], &[7; 32]].concat();
    let begun = std::time::Instant::now();
    let cut_off = opening.iter().cycle().take(1_000).any(|byte| {
        std::thread::sleep(Duration::from_millis(150));
        std::io::Write::write_all(&mut slow, &[*byte]).is_err()
    });
    assert!(cut_off, "still listened to after {:?}", begun.elapsed());
    // One more than there is room for, and the oldest goes; those who can prove themselves are not kept waiting.
    silent.extend((0..80).map(|_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap()));
    silent[63].set_read_timeout(Some(Duration::from_secs(4))).unwrap();
    let end = std::io::Read::read(&mut silent[63], &mut [0]);
    assert!(matches!(end, Ok(0)), "the oldest of too many stays: {end:?}");
    let held = first.register("a", "b", Epoch(1)).unwrap();
    assert_eq!(first.list().unwrap().len(), 1);
    drop(held);
}

#[test]
fn something_else_at_the_master_port_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = std::io::Write::write_all(&mut stream, &[b'x'; 256]);
    });
    // Rank 0 finds the port taken, takes the holder for its own server, and finds out.
    let error = by_world(0, port).register("a", "b", Epoch(1)).unwrap_err();
    assert!(matches!(error, RendezvousError::NotNameServer { .. }), "{error}");
    other.join().unwrap();
}

mod etcd {
    use super::*;

    /// A real server, on loopback, with its data in a directory that vanishes.
    struct Server {
        process: Child,
        url: String,
        _data: tempfile::TempDir,
    }

    impl Server {
        fn start() -> Option<Server> {
            if !weft_testing::has(weft_testing::Need::Etcd) {
                return None;
            }
            let data = tempfile::tempdir().unwrap();
            let (url, peers) = (
                format!("http://127.0.0.1:{}", free_port()),
                format!("http://127.0.0.1:{}", free_port()),
            );
            let process = Command::new("etcd")
                .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
                .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
                .args(["--initial-cluster", &format!("default={peers}"), "--data-dir"])
                .arg(data.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("etcd starts");
            let server = Server {
                process,
                url,
                _data: data,
            };
            let start = Instant::now();
            while Rendezvous::by_etcd(&server.url, options()).is_err() {
                assert!(start.elapsed() < PATIENCE, "etcd did not start");
                std::thread::sleep(Duration::from_millis(50));
            }
            Some(server)
        }

        fn place(&self) -> Rendezvous {
            Rendezvous::by_etcd(&self.url, options()).unwrap()
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    #[test]
    fn a_cluster_is_used_though_one_of_its_servers_is_gone() {
        let Some(server) = Server::start() else { return };
        let urls = format!("http://127.0.0.1:{};{}", free_port(), server.url);
        for name in ["a", "b", "c", "d"] {
            let place = Rendezvous::by_etcd(&urls, options()).unwrap();
            let _held = place.register(name, "b", Epoch(1)).unwrap();
            assert_eq!(server.place().lookup(name, PATIENCE).unwrap().epoch, Epoch(1));
        }
    }

    #[test]
    fn by_etcd() {
        let Some(server) = Server::start() else { return };
        keeps_its_promises(&server.place(), &server.place());
        forgets_a_killed_holder(&server.place(), &format!("etcd:{}", server.url));
    }

    #[test]
    fn an_entry_outlives_many_leases_while_its_holder_lives() {
        let Some(server) = Server::start() else { return };
        let (here, there) = (server.place(), server.place());
        let held = here.register("steady", "a", Epoch(1)).unwrap();
        for _ in 0..12 {
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(there.lookup("steady", Duration::ZERO).unwrap().epoch, Epoch(1));
        }
        drop(held);
    }

    #[test]
    fn slashes_do_not_let_names_of_two_jobs_meet() {
        let Some(server) = Server::start() else { return };
        let of_job = |job: &str| {
            let job = job.to_owned();
            Rendezvous::by_etcd(&server.url, RendezvousOptions { job, ..options() }).unwrap()
        };
        let (one, other, third) = (of_job("a/b"), of_job("a"), of_job("a%2fb"));
        let _one = one.register("c", "tcp:127.0.0.1:1", Epoch(1)).unwrap();
        let _other = other.register("b/c", "tcp:127.0.0.1:2", Epoch(2)).unwrap();
        let _third = third.register("c", "tcp:127.0.0.1:3", Epoch(3)).unwrap();
        for (place, name, epoch) in [(&one, "c", 1), (&other, "b/c", 2), (&third, "c", 3)] {
            assert_eq!(place.lookup(name, Duration::ZERO).unwrap().epoch, Epoch(epoch));
            let names: Vec<_> = place.list().unwrap().into_iter().map(|entry| entry.name).collect();
            assert_eq!(names, [name]);
        }
    }

    #[test]
    fn all_entries_are_listed_also_where_they_are_many() {
        let Some(server) = Server::start() else { return };
        let (here, there) = (server.place(), server.place());
        // More than come in one answer; and such that their keys sort in another way than they do.
        let names: Vec<_> = (0..40)
            .flat_map(|n| [format!("{n:02}.a"), format!("{n:02}/a")])
            .collect();
        let _held: Vec<_> = names
            .iter()
            .map(|name| here.register(name, "a", Epoch(1)).unwrap())
            .collect();
        let known = there.list().unwrap();
        assert_eq!(known.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), names);
        let (began, wait) = (Instant::now(), Duration::from_millis(300));
        assert_eq!(there.list_changed(&known, wait).unwrap(), known);
        assert!(began.elapsed() >= wait, "nothing has changed, so it must wait");
    }

    #[test]
    fn a_server_that_is_not_there_is_an_error() {
        let missing = Rendezvous::by_etcd(&format!("http://127.0.0.1:{}", free_port()), options());
        assert!(matches!(missing, Err(RendezvousError::Etcd { .. })));
        // One that takes connections and says nothing is not waited for.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", silent.local_addr().unwrap());
        assert!(matches!(
            Rendezvous::by_etcd(&url, options()),
            Err(RendezvousError::Etcd { .. })
        ));
        for bad in ["", "https://127.0.0.1:1", "http://"] {
            assert!(
                matches!(Rendezvous::by_etcd(bad, options()), Err(RendezvousError::Etcd { .. })),
                "{bad:?}"
            );
        }
    }
}
