//! Instances that are found by their agents' names, and come and go with them.
//!
//! A worker whose instance wants to be found has an agent of the name `vllm/VERSION/MODE/ROLE/RANK/RANKS/URL`, held in a rendezvous under a
//! lease. An instance is there when all its ranks are; when it dies, its names go with their lease, and it is drained. What is read there is
//! hostile: a name that is not understood is passed over.

use std::collections::BTreeMap;
use std::io;
use std::sync::Weak;
use std::time::Duration;

use weft::rendezvous::Rendezvous;

use super::instances::{Instance, Instances, Role};

/// No instance has more workers.
const RANKS_MAX: usize = 4096;

/// So often at least the place is asked who is there, though nobody has come or gone.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// An instance, all of whose workers are there.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    pub url: String,
    pub role: Role,
    /// Where its agents are.
    pub agents: Vec<String>,
}

/// What a worker says of itself by its name.
struct Worker<'a> {
    version: u64,
    pushes: bool,
    role: Role,
    rank: usize,
    ranks: usize,
    url: &'a str,
}

/// Takes note of who comes and goes, as long as there is anybody who wants to know. While the place cannot be reached, whoever was there before
/// is taken to be.
pub fn follow(place: Rendezvous, instances: Weak<Instances>, pause: Duration) -> io::Result<()> {
    let follow = move || {
        let mut known = Vec::new();
        let mut reachable = true;
        while instances.strong_count() > 0 {
            match place.list_changed(&known, LOOK_AGAIN) {
                Ok(entries) => {
                    reachable = true;
                    let named = entries
                        .iter()
                        .map(|entry| (entry.name.as_str(), entry.address.as_str()));
                    if let Some(instances) = instances.upgrade() {
                        instances.reconcile(&present(named));
                    }
                    known = entries;
                }
                Err(error) => {
                    if reachable {
                        note!("instances cannot be found: {error}");
                    }
                    reachable = false;
                    std::thread::sleep(pause);
                }
            }
        }
    };
    // Of its own, because it waits: what a runtime has to wait for would keep the process from ending.
    let thread = std::thread::Builder::new().name("weft-instances".to_owned());
    thread.spawn(follow).map(drop)
}

/// The instances behind names of agents and their addresses.
pub fn present<'a>(agents: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Found> {
    let mut workers: BTreeMap<(&str, &str), Vec<(Worker<'_>, &str)>> = BTreeMap::new();
    for (name, address) in agents {
        if let Some(worker) = Worker::parse(name) {
            let key = (worker.url, worker.role.name());
            workers.entry(key).or_default().push((worker, address));
        }
    }
    workers.into_values().filter_map(whole).collect()
}

/// An instance, where every rank is there once and all say the same.
fn whole(mut workers: Vec<(Worker<'_>, &str)>) -> Option<Found> {
    workers.sort_by_key(|(worker, _)| worker.rank);
    let (first, _) = workers.first()?;
    let alike = workers.iter().enumerate().all(|(rank, (worker, _))| {
        (worker.rank, worker.ranks) == (rank, first.ranks)
            && (worker.version, worker.pushes) == (first.version, first.pushes)
    });
    if !alike || workers.len() != first.ranks {
        return None;
    }
    Some(Found {
        // As it is written everywhere else; what is no address of an instance is passed over.
        url: Instance::new(first.url, first.role).ok()?.url().to_owned(),
        role: first.role,
        agents: workers.iter().map(|(_, address)| (*address).to_owned()).collect(),
    })
}

impl Worker<'_> {
    fn parse(name: &str) -> Option<Worker<'_>> {
        let mut parts = name.strip_prefix("vllm/")?.splitn(6, '/');
        let version = parts.next()?.parse().ok()?;
        let pushes = match parts.next()? {
            "push" => true,
            "pull" => false,
            _ => return None,
        };
        let role = Role::named(parts.next()?)?;
        let (rank, ranks) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let sensible = rank < ranks && ranks <= RANKS_MAX;
        Some(Worker {
            version,
            pushes,
            role,
            rank,
            ranks,
            url: parts.next()?,
        })
        .filter(|_| sensible)
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::Offer;
    use super::*;

    #[test]
    fn an_instance_is_there_when_all_its_ranks_are() {
        let push = |rank: usize| format!("vllm/2/push/prefill/{rank}/2/http://a:8100");
        let (zero, one) = (push(0), push(1));
        let whole = present([(one.as_str(), "tcp:1"), (zero.as_str(), "tcp:0")].into_iter());
        let agents = vec!["tcp:0".to_owned(), "tcp:1".to_owned()];
        let url = "http://a:8100".to_owned();
        let role = Role::Prefill;
        assert_eq!(whole, [Found { url, role, agents }]);
        assert_eq!(present([(zero.as_str(), "tcp:0")].into_iter()), []);
        let pull = present([("vllm/2/pull/decode/0/1/https://b:8200/", "tcp:0")].into_iter());
        assert_eq!(pull[0].url, "https://b:8200");
    }

    #[test]
    fn names_that_mean_nothing_are_passed_over() {
        for name in [
            "",
            "vllm",
            "vllm/2/push/prefill/0/1",
            "vllm/2/push/prefill/1/1/http://a:1",
            "vllm/2/push/prefill/0/99999999/http://a:1",
            "vllm/2/shove/prefill/0/1/http://a:1",
            "vllm/2/push/prefill/0/1/ftp://a:1",
            "vllm/-1/push/prefill/0/1/http://a:1",
        ] {
            assert_eq!(present([(name, "tcp:0")].into_iter()), [], "{name}");
        }
    }

    #[test]
    fn those_that_are_found_come_and_go_and_those_that_were_named_stay() {
        let named = Instance::new("http://named:1", Role::Decode).unwrap();
        let instances = Instances::new(vec![named]);
        let urls = || {
            let present = instances.present();
            present.iter().map(|one| one.url().to_owned()).collect::<Vec<_>>()
        };
        let found = |addresses: &[&str]| Found {
            url: "http://found:1".to_owned(),
            role: Role::Prefill,
            agents: addresses.iter().map(|one| (*one).to_owned()).collect(),
        };
        let offer = || Offer {
            version: 3,
            sealed: "sealed".to_owned(),
            until: std::time::Instant::now() + Duration::from_secs(60),
        };
        instances.reconcile(&[found(&["x"])]);
        assert_eq!(urls(), ["http://named:1", "http://found:1"]);
        // Nobody has looked yet whether it answers.
        assert!(instances.next(Role::Prefill, &[]).is_none());
        instances.present()[1].seen(true);
        let taken = instances.next(Role::Prefill, &[]).unwrap();
        taken.0.offers(Some(offer()));
        instances.reconcile(&[found(&["x"])]);
        assert!(taken.0.offer().is_some());
        // It comes back as another process, of the same address.
        instances.reconcile(&[found(&["y"])]);
        assert_eq!(taken.0.offer(), None);
        // It is gone, but somebody is still waiting for its answer.
        instances.reconcile(&[]);
        assert!(instances.next(Role::Prefill, &[]).is_none());
        assert_eq!(urls().len(), 2);
        drop(taken);
        assert_eq!(urls(), ["http://named:1"]);
        instances.reconcile(&[found(&["z"])]);
        assert_eq!(urls().len(), 2);
        // Whom somebody has drained by hand stays drained, though it is still there.
        assert!(instances.drain("http://found:1"));
        instances.reconcile(&[found(&["z"])]);
        assert_eq!(urls(), ["http://named:1"]);
        instances.reconcile(&[found(&["z"])]);
        assert_eq!(urls(), ["http://named:1"]);
    }
}
