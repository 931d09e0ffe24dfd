//! One rank of one group, on an agent: it meets the others, makes calls, and finds out who is to blame when one fails.

use std::sync::Arc;

use weft_plan::{Rank, Time};
use weft_protocol::group::{
    Abort, Board as _, Exchange as _, Execution, Failing, Far, Forming, Hello, Notes, Reference, Seat as _, Stuck,
    Trouble, Turn, View,
};
use weft_protocol::transfer::PeerId;
use weft_protocol::{HostBytes as _, Memory as _, Progress, VecMemory};

use super::wish::Wish;
use crate::seat::{SharedAgent, SimSeat};

/// Looks at the lanes in one turn of the world.
const LOOKS: u32 = 10_000;
/// What buffers become when they are their caller's again, so that whoever still reads them reads something else.
const OTHER: u8 = 0xee;

#[derive(Debug)]
pub(super) struct Member {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
    pub(super) seat: SimSeat,
    agent: SharedAgent,
    doing: Doing,
    far: Option<Far<SimSeat>>,
    execution: Execution,
    memory: [Arc<VecMemory>; 3],
    lent: Vec<View>,
    /// The number of the next call.
    pub(super) next: usize,
    pub(super) ended_well: u64,
}

#[derive(Debug)]
enum Doing {
    Meeting { forming: Box<Forming>, by: Time },
    Nothing,
    Calling { by: Time },
    Failing(Box<Failing>),
    LettingGo(Box<Abort>),
}

/// What has come of what a member was doing.
#[derive(Debug)]
pub(super) enum Told {
    Met,
    /// The group has not come about.
    NotMet(String),
    /// A call has ended well, with this output.
    Ended(Vec<u8>),
    Failed(Box<Abort>),
}

impl Member {
    /// Begins to meet the others, of whom some are known.
    pub(super) fn meet(agent: &SharedAgent, group: u64, rank: Rank, peers: &[Option<PeerId>], by: Time) -> Member {
        let ranks = peers.len() as u32;
        let mut notes = Notes::new(group, ranks);
        for (peer, other) in peers.iter().zip((0..).map(Rank)) {
            peer.iter().for_each(|peer| notes.knows(other, *peer));
        }
        let forming = Forming::new(Hello {
            rank,
            size: ranks,
            arena: false,
            channels: 4,
            platform: 1,
            host: format!("host{}", rank.0),
            platform_name: "simulated".to_owned(),
            transports: "simulated".to_owned(),
        });
        let forming = Box::new(forming);
        Member {
            rank,
            ranks,
            seat: agent.sit(notes),
            agent: agent.clone(),
            doing: Doing::Meeting { forming, by },
            far: None,
            execution: Execution::default(),
            memory: [0; 3].map(|_| Arc::new(VecMemory::zeroed(0))),
            lent: Vec::new(),
            next: 0,
            ended_well: 0,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.doing, Doing::Nothing)
    }

    /// What somebody has told everybody.
    pub(super) fn heard(&self) -> Option<Abort> {
        self.seat.notes(|notes| notes.abort())
    }

    /// Begins its next call. There must be none under way.
    pub(super) fn begin(&mut self, wish: &Wish, by: Time) -> Result<(), String> {
        let number = self.next;
        self.next += 1;
        let (task, buffers) = wish.made(self.rank, number, self.ranks)?;
        self.memory = buffers.map(|bytes| Arc::new(VecMemory::new(bytes)));
        self.lent = self.memory.iter().map(|memory| self.agent.lend(memory)).collect();
        let Some(far) = &mut self.far else {
            return Err("a call before the group was formed".to_owned());
        };
        let begun = self.execution.begin(&task, number as u64, &mut self.lent.clone(), far);
        begun.map_err(|trouble| trouble.to_string())?;
        self.doing = Doing::Calling { by };
        if let Some(abort) = far.told() {
            self.fail(Some(Trouble::Aborted(Box::new(abort))));
        }
        Ok(())
    }

    /// Goes on as far as it can now.
    pub(super) fn turn(&mut self) -> Option<Told> {
        let now = self.agent.now();
        match &mut self.doing {
            Doing::Nothing => None,
            Doing::Meeting { forming, by } => {
                let (seat, by) = (&self.seat, *by);
                let met = seat.act(|core, now| seat.notes(|notes| forming.poll(core, notes, now)));
                let failed = match met {
                    Ok(Some(_)) => {
                        let used: Vec<bool> = (0..self.ranks).map(|rank| Rank(rank) != self.rank).collect();
                        self.far = Some(Far::new(self.seat.clone(), &used, 4));
                        self.doing = Doing::Nothing;
                        return Some(Told::Met);
                    }
                    Ok(None) if now < by => return None,
                    Ok(None) => "nobody came".to_owned(),
                    Err(error) => error.to_string(),
                };
                seat.act(|core, now| seat.notes(|notes| Forming::withdraw(self.rank, core, notes, now)));
                self.doing = Doing::Nothing;
                Some(Told::NotMet(failed))
            }
            Doing::Calling { by } => {
                let by = *by;
                self.call(by, now)
            }
            Doing::Failing(_) => {
                self.go_on_failing(now);
                self.let_go()
            }
            Doing::LettingGo(_) => self.let_go(),
        }
    }

    fn call(&mut self, by: Time, now: Time) -> Option<Told> {
        let far = self.far.as_mut()?;
        let mut trouble = None;
        for _ in 0..LOOKS {
            match self.execution.turn(far, &Reference, 1) {
                Ok(Turn::Ended) => {
                    let number = self.execution.latest().number;
                    if let Some(abort) = far.told().filter(|abort| abort.is_of(number)) {
                        trouble = Some(Trouble::Aborted(Box::new(abort)));
                        break;
                    }
                    self.ended_well += 1;
                    let output = self.memory[1].snapshot();
                    self.give_back();
                    return Some(Told::Ended(output));
                }
                Ok(Turn::Moved) => continue,
                Ok(Turn::Waiting) => {}
                Err(met) => {
                    trouble = Some(met);
                    break;
                }
            }
            match far.poll(now) {
                Ok(Progress::Busy) => continue,
                Ok(Progress::Idle) => {}
                Err(met) => {
                    trouble = Some(met);
                    break;
                }
            }
            far.publish(self.execution.waiting());
            let lost = far.check_lost(|rank| self.execution.awaits(rank)).err();
            // Its last words may have come just before.
            if lost.is_some() && self.execution.turn(far, &Reference, 1) != Ok(Turn::Waiting) {
                continue;
            }
            match lost {
                Some(lost) => trouble = Some(lost),
                None if now < by => return None,
                None => {}
            }
            break;
        }
        self.fail(trouble);
        None
    }

    /// The call has failed: from now on the rank finds out why.
    fn fail(&mut self, trouble: Option<Trouble>) {
        let Some(far) = &mut self.far else { return };
        let stuck = Stuck {
            record: *self.execution.latest(),
            waiting: self.execution.waiting(),
            trouble,
        };
        let failing = Failing::new(far, self.rank, self.ranks, stuck, self.agent.now());
        self.doing = Doing::Failing(Box::new(failing));
    }

    fn go_on_failing(&mut self, now: Time) {
        let (Doing::Failing(failing), Some(far)) = (&self.doing, &mut self.far) else {
            return;
        };
        if let Some(failure) = failing.poll(far, self.execution.history(), now) {
            self.doing = Doing::LettingGo(Box::new(failure.abort));
        }
    }

    fn let_go(&mut self) -> Option<Told> {
        let (Doing::LettingGo(abort), Some(far)) = (&self.doing, &mut self.far) else {
            return None;
        };
        if self.execution.abandon(far) == Progress::Busy {
            return None;
        }
        let abort = abort.clone();
        self.give_back();
        Some(Told::Failed(abort))
    }

    /// The buffers are the caller's again.
    fn give_back(&mut self) {
        for memory in &self.memory {
            memory.write(0, &vec![OTHER; memory.len() as usize]);
        }
        self.lent.drain(..).for_each(|view| self.agent.take_back(&view));
        self.doing = Doing::Nothing;
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.seat.leave();
    }
}
