//! Which registrations are kept after their last user has gone, and for how long.
//!
//! Pinning costs far more than using: an application that registers the same array for every request would pay for it each time.
//! Only registrations that no peer can use are kept. The memory itself is not kept alive: once its owner has let go, the
//! registration is of no use to anybody, and is never handed out again.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use weft_plan::{Bytes, Time};
use weft_protocol::Memory;

/// What may be kept without a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepOptions {
    pub count_max: usize,
    pub bytes_max: Bytes,
    pub time_max: Time,
}

impl Default for KeepOptions {
    fn default() -> KeepOptions {
        KeepOptions {
            count_max: 256,
            bytes_max: Bytes(1 << 30),
            time_max: Time::from_secs(10),
        }
    }
}

/// Registrations by the memory that they are of. `R` ends when its last [`Arc`] does.
#[derive(Debug)]
pub(super) struct Cache<R> {
    options: KeepOptions,
    kept: HashMap<usize, Kept<R>>,
    /// What has no user, in the order in which the last one left.
    idle: BTreeMap<u64, Idle>,
    idle_bytes: u64,
    next_turn: u64,
    /// How many there may be before those that nobody handed back are looked for. It grows with their number, so that inserting stays
    /// cheap.
    look_at: usize,
}

#[derive(Debug)]
struct Kept<R> {
    /// Also keeps the address from being given to another memory, so that equal addresses mean the same memory.
    memory: Weak<dyn Memory>,
    len: u64,
    registration: Arc<R>,
    /// Its place among the idle ones.
    turn: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    since: Time,
    key: usize,
}

impl<R> Cache<R> {
    pub(super) fn new(options: KeepOptions) -> Cache<R> {
        Cache {
            options,
            kept: HashMap::new(),
            idle: BTreeMap::new(),
            idle_bytes: 0,
            next_turn: 0,
            look_at: 0,
        }
    }

    /// The registration of this memory, in use or not.
    pub(super) fn reuse(&mut self, memory: &Arc<dyn Memory>) -> Option<Arc<R>> {
        let kept = self.kept.get_mut(&identity(memory))?;
        if let Some(turn) = kept.turn.take() {
            self.idle.remove(&turn);
            self.idle_bytes -= kept.len;
        }
        Some(Arc::clone(&kept.registration))
    }

    pub(super) fn insert(&mut self, memory: &Arc<dyn Memory>, registration: &Arc<R>) {
        // A share that was dropped and not handed back started no clock. Its memory is kept by its users, so without one there
        // are none.
        if self.kept.len() >= self.look_at {
            self.kept
                .retain(|_, kept| kept.turn.is_some() || kept.memory.strong_count() > 0);
            self.look_at = 2 * self.kept.len() + 1;
        }
        let kept = Kept {
            memory: Arc::downgrade(memory),
            len: memory.len(),
            registration: Arc::clone(registration),
            turn: None,
        };
        let before = self.kept.insert(identity(memory), kept);
        debug_assert!(before.is_none(), "a memory is looked for before it is registered");
    }

    /// Takes a user's share back. The last one starts the clock.
    pub(super) fn release(&mut self, memory: Arc<dyn Memory>, registration: Arc<R>, now: Time) {
        let key = identity(&memory);
        drop((memory, registration));
        if let Some(kept) = self.kept.get_mut(&key)
            && Arc::strong_count(&kept.registration) == 1
            && kept.turn.is_none()
        {
            kept.turn = Some(self.next_turn);
            self.idle.insert(self.next_turn, Idle { since: now, key });
            self.idle_bytes += kept.len;
            self.next_turn += 1;
        }
        self.sweep(now);
    }

    /// Ends what has been kept for long enough, or is too much, or belongs to a memory that is gone.
    pub(super) fn sweep(&mut self, now: Time) {
        let is_gone = |idle: &Idle| {
            self.kept
                .get(&idle.key)
                .is_none_or(|kept| kept.memory.strong_count() == 0)
        };
        let gone: Vec<u64> = self
            .idle
            .iter()
            .filter(|(_, idle)| is_gone(idle))
            .map(|(turn, _)| *turn)
            .collect();
        gone.into_iter().for_each(|turn| self.end(turn));
        while let Some((&turn, idle)) = self.idle.first_key_value() {
            let is_over = idle.since.saturating_add(self.options.time_max) <= now;
            let is_too_much = self.idle.len() > self.options.count_max || self.idle_bytes > self.options.bytes_max.0;
            if !is_over && !is_too_much {
                break;
            }
            self.end(turn);
        }
    }

    /// When the next sweep is due.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let (_, oldest) = self.idle.first_key_value()?;
        Some(oldest.since.saturating_add(self.options.time_max))
    }

    fn end(&mut self, turn: u64) {
        if let Some(kept) = self.idle.remove(&turn).and_then(|idle| self.kept.remove(&idle.key)) {
            self.idle_bytes -= kept.len;
        }
    }
}

fn identity(memory: &Arc<dyn Memory>) -> usize {
    Arc::as_ptr(memory).cast::<()>() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weft_protocol::memory::VecMemory;

    const OPTIONS: KeepOptions = KeepOptions {
        count_max: 3,
        bytes_max: Bytes(400),
        time_max: Time::from_secs(10),
    };

    fn memory(len: usize) -> Arc<dyn Memory> {
        Arc::new(VecMemory::zeroed(len))
    }

    fn use_once(cache: &mut Cache<u32>, memory: &Arc<dyn Memory>, number: u32, now: Time) -> u32 {
        let registration = cache.reuse(memory).unwrap_or_else(|| {
            let made = Arc::new(number);
            cache.insert(memory, &made);
            made
        });
        let found = *registration;
        cache.release(Arc::clone(memory), registration, now);
        found
    }

    #[test]
    fn a_registration_is_shared_and_kept_for_its_time() {
        let mut cache = Cache::new(OPTIONS);
        let memory = memory(8);
        assert_eq!(use_once(&mut cache, &memory, 1, Time::ZERO), 1);
        assert_eq!(use_once(&mut cache, &memory, 2, Time::from_secs(9)), 1);
        assert_eq!(cache.next_timeout(), Some(Time::from_secs(19)));
        cache.sweep(Time::from_secs(19));
        assert_eq!((cache.kept.len(), cache.next_timeout()), (0, None));
        assert_eq!(use_once(&mut cache, &memory, 3, Time::from_secs(20)), 3);
    }

    #[test]
    fn one_that_is_in_use_stays_however_long() {
        let mut cache = Cache::new(OPTIONS);
        let memory = memory(8);
        let made = Arc::new(1);
        cache.insert(&memory, &made);
        let second = cache.reuse(&memory).unwrap();
        cache.release(Arc::clone(&memory), made, Time::ZERO);
        cache.sweep(Time::MAX);
        assert_eq!(cache.reuse(&memory), Some(Arc::clone(&second)));
    }

    #[test]
    fn memory_that_is_gone_is_not_kept() {
        let mut cache = Cache::new(OPTIONS);
        let (first, second) = (memory(8), memory(8));
        use_once(&mut cache, &first, 1, Time::ZERO);
        use_once(&mut cache, &second, 2, Time::ZERO);
        drop(second);
        cache.sweep(Time::ZERO);
        assert_eq!(cache.kept.len(), 1);
        drop(first);
        cache.sweep(Time::ZERO);
        assert_eq!((cache.kept.len(), cache.idle.len(), cache.idle_bytes), (0, 0, 0));
    }

    #[test]
    fn a_share_that_is_dropped_and_not_handed_back_is_not_kept_for_ever() {
        let mut cache = Cache::new(OPTIONS);
        let in_use = memory(8);
        cache.insert(&in_use, &Arc::new(0));
        for number in 0..100 {
            cache.insert(&memory(8), &Arc::new(number));
            assert!(cache.kept.len() <= 4, "{} are kept", cache.kept.len());
        }
        assert!(cache.reuse(&in_use).is_some());
    }

    proptest! {
        #[test]
        fn bounds_hold_and_nothing_is_miscounted(
            acts in prop::collection::vec((0..8usize, 0..4u8, 0..5u64), 0..200),
        ) {
            let mut cache = Cache::new(OPTIONS);
            let mut memories: Vec<Arc<dyn Memory>> = (0..8).map(|i| memory(i * 50)).collect();
            let mut users: Vec<(usize, Arc<dyn Memory>, Arc<u32>)> = Vec::new();
            let mut now = Time::ZERO;
            let mut made = 0;
            for (which, act, seconds) in acts {
                now = now.saturating_add(Time::from_secs(seconds));
                match act {
                    0 => {
                        let memory = Arc::clone(&memories[which]);
                        let registration = cache.reuse(&memory).unwrap_or_else(|| {
                            made += 1;
                            let registration = Arc::new(made);
                            cache.insert(&memory, &registration);
                            registration
                        });
                        users.push((which, memory, registration));
                    }
                    1 if !users.is_empty() => {
                        let (_, memory, registration) = users.swap_remove(which % users.len());
                        cache.release(memory, registration, now);
                    }
                    2 => memories[which] = memory(which * 50),
                    _ => cache.sweep(now),
                }
                let idle: Vec<&Kept<u32>> = cache.kept.values().filter(|kept| kept.turn.is_some()).collect();
                prop_assert_eq!(cache.idle.len(), idle.len());
                prop_assert_eq!(cache.idle_bytes, idle.iter().map(|kept| kept.len).sum::<u64>());
                prop_assert!(cache.idle.len() <= OPTIONS.count_max && cache.idle_bytes <= OPTIONS.bytes_max.0);
                // All users of one memory share one registration.
                for (_, memory, registration) in &users {
                    let others = users.iter().filter(|(_, other, _)| Arc::ptr_eq(memory, other));
                    prop_assert!(others.into_iter().all(|(_, _, other)| Arc::ptr_eq(registration, other)));
                }
            }
            for (_, memory, registration) in users.drain(..) {
                cache.release(memory, registration, now);
            }
            memories.clear();
            cache.sweep(now);
            prop_assert_eq!(cache.kept.len(), 0);
        }
    }
}
