//! Memory that the kernels of all ranks of a team reach: every rank brings as much, and knows that of the others by what lies before it in its own.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::cuda::{DeviceMemory, Team};
use weft_fabric::shared_memory::{DescriptorExchange, host_identity};
use weft_plan::Rank;

use super::{Card, Communicator, DeviceTeam, NoTeam, first_refusal, import_others};
use crate::error::Error;

/// This rank's part of it. The memory is the team's, and stays for as long as the team or anything of its like is there.
#[derive(Debug)]
pub struct Symmetric {
    address: u64,
    bytes: u64,
    _team: Arc<Team>,
    /// Where there are no others, nobody is told of it.
    _alone: Option<DeviceMemory>,
}

impl Symmetric {
    /// Where it lies on this rank's device.
    pub fn address(&self) -> u64 {
        self.address
    }
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl DeviceTeam {
    /// Makes memory that all ranks reach. Every rank of the team's group calls it, with the same length; `purpose` is any number that has to be the same on all of them, so that ranks that
    /// disagree about what the memory is for find that out. Or the reason why there is none, which is the same on all ranks.
    pub fn symmetric(
        &self,
        group: &Communicator,
        bytes: u64,
        purpose: u64,
        deadline: Duration,
    ) -> Result<Result<Symmetric, NoTeam>, Error> {
        let carrier = self.carrier()?;
        let (team, rank) = (carrier.team(), carrier.rank());
        let (card, own) = match prepare(team, bytes, purpose) {
            Ok((card, memory, door)) => (card, Some((memory, door))),
            Err(why) => (Card::refusal(&why), None),
        };
        let cards = group.tell_all(&card.to_bytes(), deadline)?;
        let cards: Vec<Card> = cards.iter().map(Card::from_bytes).collect();
        if let Some(none) = first_refusal(&cards) {
            return Ok(Err(none));
        }
        let mapped = match own {
            Some((memory, door)) => map(&memory, rank, &door, &cards, deadline).map(|theirs| (memory, theirs, door)),
            None => Err("nothing to share".to_owned()),
        };
        let told = match &mapped {
            Ok(_) => Card::default(),
            Err(why) => Card::refusal(why),
        };
        // All or none: a memory that some know and others do not would have another number on each.
        let told = group.tell_all(&told.to_bytes(), deadline)?;
        let told: Vec<Card> = told.iter().map(Card::from_bytes).collect();
        if let Some(none) = first_refusal(&told) {
            return Ok(Err(none));
        }
        let (memory, theirs, _door) = match mapped {
            Ok(mapped) => mapped,
            Err(why) => {
                let rank = Rank(rank as u32);
                return Ok(Err(NoTeam { rank, why }));
            }
        };
        let address = memory.address();
        let alone = match theirs.is_empty() {
            true => Some(memory),
            false => {
                team.register(memory, theirs).map_err(|error| self.explain(error))?;
                None
            }
        };
        Ok(Ok(Symmetric {
            address,
            bytes,
            _team: team.clone(),
            _alone: alone,
        }))
    }
}

/// The memory, the door at which others are given its descriptor, and what they are told.
fn prepare(team: &Arc<Team>, bytes: u64, purpose: u64) -> Result<(Card, DeviceMemory, DescriptorExchange), String> {
    if bytes == 0 {
        return Err("no memory was asked for".to_owned());
    }
    let memory = DeviceMemory::allocate(team.device(), bytes).map_err(|error| error.to_string())?;
    let export = memory.export().map_err(|error| error.to_string())?;
    let door = DescriptorExchange::open().map_err(|error| format!("no socket: {error}"))?;
    let card = Card {
        piece_bytes: bytes,
        purpose,
        export: export.bytes,
        door: door.name().to_owned(),
        host: host_identity().to_owned(),
        ..Card::default()
    };
    Ok((card, memory, door))
}

fn map(
    memory: &DeviceMemory,
    rank: usize,
    door: &DescriptorExchange,
    cards: &[Card],
    deadline: Duration,
) -> Result<Vec<DeviceMemory>, String> {
    disagreement(cards, rank).map_or(Ok(()), Err)?;
    import_others(memory, rank, door, cards, deadline)
}

/// What others want otherwise than this rank, if anybody does.
fn disagreement(cards: &[Card], rank: usize) -> Option<String> {
    let own = &cards[rank];
    let mut others = cards.iter().enumerate();
    let (other, card) = others.find(|(_, card)| card.piece_bytes != own.piece_bytes || card.purpose != own.purpose)?;
    Some(match card.piece_bytes == own.piece_bytes {
        true => format!("rank {other} wants it for something else"),
        false => format!(
            "rank {other} wants {} bytes instead of {}",
            card.piece_bytes, own.piece_bytes
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(bytes: u64, purpose: u64) -> Card {
        Card {
            piece_bytes: bytes,
            purpose,
            ..Card::default()
        }
    }

    #[test]
    fn ranks_that_disagree_find_out_who_wants_what() {
        assert_eq!(disagreement(&[card(64, 1), card(64, 1)], 1), None);
        let other_length = disagreement(&[card(64, 1), card(64, 1), card(65, 1)], 0).unwrap();
        assert_eq!(other_length, "rank 2 wants 65 bytes instead of 64");
        let other_purpose = disagreement(&[card(64, 2), card(64, 1)], 1).unwrap();
        assert_eq!(other_purpose, "rank 0 wants it for something else");
    }
}
