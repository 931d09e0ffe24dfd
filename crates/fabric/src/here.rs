//! Paths to an agent's own places, as every transport without peers has them: opened at its own address, and over when nothing is under way on them any more.

use weft_protocol::{Failure, Loss, PathId, PeerAddress, Signal};

/// How everything on a path ends that is closed: whoever did it acts no more.
pub(crate) const LOST: Failure = Failure::PathLost {
    loss: Loss::Closed,
    fenced: true,
};

#[derive(Debug, Default)]
pub(crate) struct HerePaths {
    open: Vec<PathId>,
    /// Closed, with something still under way.
    closing: Vec<PathId>,
    next: u32,
}

impl HerePaths {
    /// Opens a path to the transport's own address, and to no other.
    pub fn open(&mut self, asked: &PeerAddress, own: &PeerAddress, ready: &mut Vec<Signal>) -> Result<PathId, Loss> {
        if asked != own {
            return Err(Loss::Unreachable);
        }
        let path = PathId(self.next);
        self.next += 1;
        self.open.push(path);
        ready.push(Signal::Opened { path });
        Ok(path)
    }

    pub fn is_open(&self, path: PathId) -> bool {
        self.open.contains(&path)
    }

    /// Takes nothing more on a path; tells whether it was open. What is under way ends as [`LOST`], and then the path [ends](HerePaths::end).
    pub fn close(&mut self, path: PathId) -> bool {
        let Some(at) = self.open.iter().position(|open| *open == path) else {
            return false;
        };
        self.open.swap_remove(at);
        self.closing.push(path);
        true
    }

    /// Says, once, that a closed path has gone, as soon as nothing is under way on it.
    pub fn end(&mut self, path: PathId, under_way: bool, ready: &mut Vec<Signal>) {
        if under_way {
            return;
        }
        if let Some(at) = self.closing.iter().position(|closing| *closing == path) {
            self.closing.swap_remove(at);
            ready.push(Signal::Lost {
                path,
                loss: Loss::Closed,
                fenced: true,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_lost_once_and_not_before_all_on_it_has_ended() {
        let own = PeerAddress("own:here".to_owned());
        let (mut paths, mut ready) = (HerePaths::default(), Vec::new());
        let strange = PeerAddress("own:there".to_owned());
        assert_eq!(paths.open(&strange, &own, &mut ready), Err(Loss::Unreachable));
        let [one, two] = [0; 2].map(|_| paths.open(&own, &own, &mut ready).expect("its own address"));
        assert!(one != two && paths.is_open(one) && paths.is_open(two));
        ready.clear();
        // One that is open does not end.
        paths.end(one, false, &mut ready);
        assert!(paths.close(one) && !paths.close(one) && !paths.is_open(one) && paths.is_open(two));
        paths.end(one, true, &mut ready);
        assert!(ready.is_empty());
        paths.end(one, false, &mut ready);
        paths.end(one, false, &mut ready);
        let lost = |signal: &Signal| matches!(signal, Signal::Lost { path, fenced: true, .. } if *path == one);
        assert!(ready.len() == 1 && lost(&ready[0]), "{ready:?}");
        let three = paths.open(&own, &own, &mut ready).expect("its own address");
        assert!(three != one && three != two, "numbers are not used again");
    }
}
