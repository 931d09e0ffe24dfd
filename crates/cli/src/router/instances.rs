//! Which instances there are, which of them are well, and who is next.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use axum::http::Uri;
use axum::http::uri::{Authority, PathAndQuery};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::discovery::Found;
use super::request::Offer;

/// What an instance is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Prefill,
    Decode,
    /// Whole requests, when there is nobody of the other two.
    Plain,
}

#[derive(Debug, Error)]
#[error("`{url}` is not the address of an instance, which looks like http://host:8000 or https://host:8000")]
pub struct UrlError {
    url: String,
}

#[derive(Debug)]
pub struct Instance {
    url: String,
    pub role: Role,
    up: AtomicBool,
    draining: AtomicBool,
    under_way: AtomicU32,
    /// When it was last given a request, as the number of that request.
    turn: AtomicU64,
    failures: AtomicU32,
    /// Looks at its health, one after the other, that it has not answered in time.
    slow: AtomicU32,
    /// Whether it was found, and goes when it is not found any more. Others were named by somebody.
    found: bool,
    /// Known from its last answer, and forgotten when it is down: another process may come up in its place.
    offer: Mutex<Option<Offer>>,
    /// Where the agents of one that was found are. When they are elsewhere, it is another process.
    agents: Mutex<Vec<String>>,
}

/// What is said of an instance.
#[derive(Debug, Serialize)]
pub struct Said {
    url: String,
    role: Role,
    up: bool,
    draining: bool,
    under_way: u32,
    failures: u32,
    pushes: bool,
}

/// A request that an instance has; it ends with this.
#[derive(Debug)]
pub struct Assigned(pub Arc<Instance>);

#[derive(Debug, Default)]
pub struct Instances {
    all: Mutex<Vec<Arc<Instance>>>,
    /// Requests that have been given to anybody.
    turns: AtomicU64,
    /// Which of those that are found somebody has drained.
    left_out: Mutex<HashSet<String>>,
}

impl Instance {
    pub fn new(url: &str, role: Role) -> Result<Instance, UrlError> {
        let wrong = || UrlError { url: url.to_owned() };
        let parsed = Uri::from_str(url).map_err(|_| wrong())?;
        let scheme = parsed.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https"));
        let scheme = scheme.ok_or_else(wrong)?;
        let plain = |authority: &&Authority| !authority.as_str().contains('@');
        let authority = parsed.authority().filter(plain).ok_or_else(wrong)?;
        if !matches!(parsed.path_and_query().map(PathAndQuery::as_str), None | Some("/")) {
            return Err(wrong());
        }
        Ok(Instance {
            url: format!("{scheme}://{authority}"),
            role,
            // Until somebody has looked.
            up: AtomicBool::new(true),
            draining: AtomicBool::new(false),
            under_way: AtomicU32::new(0),
            turn: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            slow: AtomicU32::new(0),
            found: false,
            offer: Mutex::new(None),
            agents: Mutex::default(),
        })
    }

    /// One that has only just come: nobody has seen it answer.
    fn found(found: &Found) -> Result<Instance, UrlError> {
        Ok(Instance {
            up: AtomicBool::new(false),
            found: true,
            agents: Mutex::new(found.agents.clone()),
            ..Instance::new(&found.url, found.role)?
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }
    /// What a look at its health, or a request to it, has shown.
    pub fn seen(&self, up: bool) {
        self.slow.store(0, Ordering::Relaxed);
        if !up {
            self.offers(None);
        }
        if self.up.swap(up, Ordering::Relaxed) && !up {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It has not answered a look at its health in time. Who is busy computing may miss one; who misses two in a row is not there.
    pub fn is_slow(&self) {
        if self.slow.fetch_add(1, Ordering::Relaxed) > 0 {
            self.seen(false);
        }
    }

    /// What it offers, as far as that is known and not too old.
    pub fn offer(&self) -> Option<Offer> {
        let offer = self.offer.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        offer.clone().filter(|offer| Instant::now() < offer.until)
    }
    pub fn offers(&self, offer: Option<Offer>) {
        *self.offer.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = offer;
    }

    /// Where its agents are now. What another process has offered is of no use.
    fn has_agents(&self, agents: &[String]) {
        let mut known = self.agents.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if *known != agents {
            *known = agents.to_vec();
            self.offers(None);
        }
    }

    fn takes_requests(&self) -> bool {
        self.is_up() && !self.draining.load(Ordering::Relaxed)
    }

    fn said(&self) -> Said {
        Said {
            url: self.url.clone(),
            role: self.role,
            up: self.is_up(),
            draining: self.draining.load(Ordering::Relaxed),
            under_way: self.under_way.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            pushes: self.offer().is_some(),
        }
    }
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Plain => "plain",
        }
    }
    pub fn named(name: &str) -> Option<Role> {
        [Role::Prefill, Role::Decode, Role::Plain]
            .into_iter()
            .find(|role| role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Assigned {
    fn to(instance: &Arc<Instance>) -> Assigned {
        instance.under_way.fetch_add(1, Ordering::Relaxed);
        Assigned(Arc::clone(instance))
    }
}

impl Drop for Assigned {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Instances {
    pub fn new(instances: Vec<Instance>) -> Instances {
        Instances {
            all: Mutex::new(instances.into_iter().map(Arc::new).collect()),
            ..Instances::default()
        }
    }

    /// Adds an instance, or takes one back that was draining.
    pub fn add(&self, instance: Instance) {
        self.left_out().remove(&instance.url);
        let mut all = self.all();
        match all
            .iter()
            .find(|known| known.url == instance.url && known.role == instance.role)
        {
            Some(known) => known.draining.store(false, Ordering::Relaxed),
            None => all.push(Arc::new(instance)),
        }
    }

    pub fn drain(&self, url: &str) -> bool {
        let url = url.trim_end_matches('/');
        let all = self.all();
        // Also one that was named: it may be found as well.
        if all.iter().any(|instance| instance.url == url) {
            self.left_out().insert(url.to_owned());
        }
        let mut named = all.iter().filter(|instance| instance.url == url).peekable();
        let any = named.peek().is_some();
        named.for_each(|instance| instance.draining.store(true, Ordering::Relaxed));
        any
    }

    /// Takes note of who is found now: adds those who are new, and drains those who are gone.
    pub fn reconcile(&self, found: &[Found]) {
        // Both at once, in the order of `drain`, so that nobody is drained in between.
        let mut all = self.all();
        let mut left_out = self.left_out();
        left_out.retain(|url| found.iter().any(|one| one.url == *url));
        let wanted: Vec<_> = found.iter().filter(|one| !left_out.contains(&one.url)).collect();
        for known in all.iter().filter(|known| known.found) {
            let there = wanted
                .iter()
                .any(|one| (&one.url, one.role) == (&known.url, known.role));
            known.draining.store(!there, Ordering::Relaxed);
        }
        for one in wanted {
            match all
                .iter()
                .find(|known| (&known.url, known.role) == (&one.url, one.role))
            {
                Some(known) => known.has_agents(&one.agents),
                // What is found has been checked to be an address.
                None => all.extend(Instance::found(one).ok().map(Arc::new)),
            }
        }
    }

    /// The one with the fewest requests, of a role, that has not been tried yet; of several the one that was idle for the longest time.
    pub fn next(&self, role: Role, tried: &[Arc<Instance>]) -> Option<Assigned> {
        let all = self.all();
        let able = all
            .iter()
            .filter(|instance| instance.role == role && instance.takes_requests());
        let fresh = able.filter(|instance| !tried.iter().any(|other| Arc::ptr_eq(instance, other)));
        let least = fresh.min_by_key(|instance| {
            let (load, turn) = (&instance.under_way, &instance.turn);
            (load.load(Ordering::Relaxed), turn.load(Ordering::Relaxed))
        })?;
        // Whoever chooses holds the lock, so that two do not choose the same.
        let turn = 1 + self.turns.fetch_add(1, Ordering::Relaxed);
        least.turn.store(turn, Ordering::Relaxed);
        Some(Assigned::to(least))
    }

    /// Whether there is one of a role that takes requests.
    pub fn anybody(&self, role: Role) -> bool {
        let all = self.all();
        all.iter()
            .any(|instance| instance.role == role && instance.takes_requests())
    }

    /// Whether there is one of a role, up or not.
    pub fn knows(&self, role: Role) -> bool {
        let all = self.all();
        all.iter()
            .any(|instance| instance.role == role && !instance.draining.load(Ordering::Relaxed))
    }

    pub fn anybody_up(&self) -> bool {
        self.all().iter().any(|instance| instance.takes_requests())
    }

    pub fn list(&self) -> Vec<Said> {
        self.all().iter().map(|instance| instance.said()).collect()
    }

    /// All instances, after those have been forgotten that are drained.
    pub fn present(&self) -> Vec<Arc<Instance>> {
        let mut all = self.all();
        all.retain(|instance| {
            !instance.draining.load(Ordering::Relaxed) || instance.under_way.load(Ordering::Relaxed) > 0
        });
        all.clone()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<Instance>>> {
        self.all.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
    fn left_out(&self) -> MutexGuard<'_, HashSet<String>> {
        self.left_out.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
