use super::*;
use crate::seeded::Seeded;
use proptest::prelude::*;

/// Ranks that agree, form a group and agree on that, while chance kills some of them and loses, repeats and delays what they say.
struct World {
    chance: Seeded,
    ranks: Vec<Player>,
    /// Sender, receiver, and what it says.
    network: Vec<(usize, usize, Vec<u8>)>,
    loss: f64,
}

struct Player {
    part: Option<Agreement>,
    alive: bool,
    /// Never calls, though it is alive.
    hangs: bool,
    answer: Option<(Vec<Rank>, u64)>,
    left_out: bool,
}

/// How many calls had ended well at a rank before they began to agree.
fn ended_at(rank: usize) -> u64 {
    100 - (rank as u64 * 7) % 5
}

impl World {
    fn new(ranks: u32, hanging: u32, loss: f64, seed: u64) -> World {
        let mut chance = Seeded::new(seed);
        let hanging: Vec<u64> = chance
            .shuffled(ranks.into())
            .into_iter()
            .take(hanging as usize)
            .collect();
        let player = |rank: u64| Player {
            part: None,
            alive: true,
            hangs: hanging.contains(&rank),
            answer: None,
            left_out: false,
        };
        World {
            ranks: (0..u64::from(ranks)).map(player).collect(),
            network: Vec::new(),
            chance,
            loss,
        }
    }

    fn post(&mut self, own: usize) {
        // Who dies may have said a part of what it was going to say.
        let Some(part) = self.ranks[own].part.as_mut() else {
            return;
        };
        while let Some((to, message)) = part.next_message() {
            let copies = match (self.chance.chance(self.loss), self.chance.chance(self.loss)) {
                (true, _) => 0,
                (false, true) => 2,
                (false, false) => 1,
            };
            for _ in 0..copies {
                self.network.push((own, to.0 as usize, message.to_bytes()));
            }
            if self.chance.chance(0.1) {
                return;
            }
        }
    }

    fn deliver(&mut self) {
        if self.network.is_empty() {
            return;
        }
        let at = self.chance.below(self.network.len() as u64) as usize;
        let (from, to, bytes) = self.network.swap_remove(at);
        let message = AgreementMessage::from_bytes(&bytes).unwrap();
        match &mut self.ranks[to] {
            Player { alive: false, .. } => {}
            Player { part: Some(part), .. } => part.on_message(Rank(from as u32), message),
            // Whoever has not begun keeps it until it does, or for ever.
            Player { hangs: false, .. } => self.network.push((from, to, bytes)),
            Player { .. } => {}
        }
    }

    /// A rank looks at what was decided, and goes on.
    fn go_on(&mut self, own: usize) {
        let Some(decision) = self.ranks[own].part.as_ref().and_then(Agreement::decision).cloned() else {
            return;
        };
        let player = &self.ranks[own];
        if player.answer.is_some() || player.left_out {
            return;
        }
        if !decision.members.contains(&Rank(own as u32)) {
            self.ranks[own].left_out = true;
        } else if decision.content {
            self.ranks[own].answer = Some((decision.members, decision.ended));
        } else {
            let alive = decision.members.iter().all(|rank| self.ranks[rank.0 as usize].alive);
            let formed = alive && self.chance.chance(0.8);
            if let Some(part) = &mut self.ranks[own].part {
                part.next_round(formed);
            }
        }
    }

    fn run(&mut self, deaths: u32) {
        let count = self.ranks.len() as u64;
        let mut doomed: Vec<u64> = self.chance.shuffled(count).into_iter().take(deaths as usize).collect();
        doomed.retain(|rank| !self.ranks[*rank as usize].hangs);
        for turn in 0..15_000 {
            if self
                .ranks
                .iter()
                .all(|it| !it.alive || it.hangs || it.answer.is_some() || it.left_out)
            {
                break;
            }
            let own = self.chance.below(count) as usize;
            if doomed.contains(&(own as u64)) && self.chance.chance(0.005) {
                self.ranks[own].alive = false;
                doomed.retain(|rank| *rank != own as u64);
            }
            let Player { alive, hangs, .. } = self.ranks[own];
            if !alive || hangs {
                continue;
            }
            let ranks = count as u32;
            let late = turn > 4_000;
            self.ranks[own]
                .part
                .get_or_insert_with(|| Agreement::new(Rank(own as u32), ranks, &[], ended_at(own), Quorum::Any));
            let other = self.chance.below(count) as usize;
            let gone = !self.ranks[other].alive;
            let (again, coordinates_late) = (self.chance.chance(0.05), turn > 6_000);
            if let Some(part) = &mut self.ranks[own].part {
                if gone {
                    part.on_lost(Rank(other as u32));
                }
                if late && (part.is_coordinator() || coordinates_late) {
                    part.on_late();
                }
                if again {
                    part.repeat();
                }
            }
            self.post(own);
            for _ in 0..4 {
                self.deliver();
            }
            self.go_on(own);
        }
    }

    /// All that are alive and take part have the same answer, with all of them in it.
    fn check(&self) {
        let taking_part = || {
            self.ranks
                .iter()
                .enumerate()
                .filter(|(_, player)| player.alive && !player.hangs)
        };
        let Some((_, first)) = taking_part().next() else { return };
        for (rank, player) in taking_part() {
            assert!(!player.left_out, "rank {rank} is left out");
            assert!(player.answer.is_some(), "rank {rank} has no answer: {:?}", player.part);
            assert_eq!(player.answer, first.answer, "rank {rank}");
            assert!(
                first
                    .answer
                    .as_ref()
                    .is_some_and(|(members, _)| members.contains(&Rank(rank as u32)))
            );
        }
        let hanging = self.ranks.iter().position(|player| player.hangs);
        if let (Some(hanging), Some((members, _))) = (hanging, &first.answer) {
            assert!(!members.contains(&Rank(hanging as u32)), "rank {hanging} never came");
        }
        if let Some((members, ended)) = &first.answer {
            let least = members.iter().map(|rank| ended_at(rank.0 as usize)).min();
            assert_eq!(Some(*ended), least, "what all of them have ended");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn all_that_are_alive_end_in_one_group(ranks in 1u32..8, deaths in 0u32..6, hanging in 0u32..3, loss in 0.0f64..0.4, seed: u64) {
        let hanging = hanging.min(ranks - 1);
        let mut world = World::new(ranks, hanging, loss, seed);
        world.run(deaths.min(ranks - 1 - hanging));
        world.check();
    }

    #[test]
    fn any_bytes_are_refused_or_read_back(bytes: Vec<u8>) {
        if let Ok(message) = AgreementMessage::from_bytes(&bytes) {
            prop_assert_eq!(AgreementMessage::from_bytes(&message.to_bytes()), Ok(message));
        }
    }
}

#[test]
fn a_thousand_seeds_of_deaths_at_any_point() {
    for seed in 0..1000 {
        let mut world = World::new(5, 0, 0.1, seed);
        world.run(4);
        world.check();
    }
}

#[test]
fn a_decision_that_cannot_be_is_not_heard() {
    let lists: [&[u32]; 4] = [&[], &[0, 7], &[1, 0], &[1, 1]];
    for members in lists.map(|list| list.iter().copied().map(Rank).collect::<Vec<Rank>>()) {
        let mut part = Agreement::new(Rank(0), 3, &[], 0, Quorum::Majority);
        part.on_message(
            Rank(1),
            AgreementMessage::Decided(Decision {
                round: 0,
                by: Rank(1),
                members,
                content: false,
                ended: 0,
            }),
        );
        assert_eq!(part.decision(), None);
    }
}

#[test]
fn whoever_comes_too_late_hears_that_it_is_left_out() {
    let mut parts = [1, 2].map(|rank| Agreement::new(Rank(rank), 3, &[], 0, Quorum::Majority));
    parts.iter_mut().for_each(|part| while part.next_message().is_some() {});
    // They have heard of each other, and never of rank 0.
    for _ in 0..2 {
        for own in [0, 1] {
            parts[own].on_late();
            parts[own].repeat();
            while let Some((to, message)) = parts[own].next_message() {
                if to.0 > 0 {
                    parts[to.0 as usize - 1].on_message(Rank(own as u32 + 1), message);
                }
            }
        }
    }
    let decided = parts[0].decision().expect("a decision").clone();
    assert_eq!(decided.members, [Rank(1), Rank(2)]);
    let mut late = Agreement::new(Rank(0), 3, &[], 0, Quorum::Majority);
    let (_, promise) = late.next_message().expect("a promise");
    parts[0].on_message(Rank(0), promise);
    let (to, answer) = parts[0].outbox.pop_back().expect("an answer");
    assert_eq!(to, Rank(0));
    late.on_message(Rank(1), answer);
    assert_eq!(late.decision().map(|it| &it.members[..]), Some(&[Rank(1), Rank(2)][..]));
}

/// A part of a torn group that has heard from all of its own, and of the others only what the deaths of some say.
fn part(ranks: u32, left: &[u32], dead: &[u32]) -> Agreement {
    let mut part = Agreement::new(Rank(left[0]), ranks, &[], 0, Quorum::Majority);
    for rank in (0..ranks).filter(|rank| !left.contains(rank)) {
        part.on_lost(Rank(rank));
    }
    for from in &left[1..] {
        // What is known of the dead may be known to one alone.
        let message = AgreementMessage::Promise {
            round: 0,
            to: Rank(left[0]),
            content: false,
            ended: 0,
            suspected: Vec::new(),
            dead: dead.iter().copied().map(Rank).collect(),
        };
        part.on_message(Rank(*from), message);
    }
    if left.len() == 1 {
        dead.iter().for_each(|rank| part.on_dead(Rank(*rank)));
    }
    part
}

#[test]
fn of_two_parts_one_goes_on_at_most() {
    for ranks in 1u32..7 {
        for members in 1u32..1 << ranks {
            let of = |bits: u32| (0..ranks).filter(|rank| bits >> rank & 1 != 0).collect::<Vec<u32>>();
            let others = (1 << ranks) - 1 - members;
            let decides = |left: &[u32], dead: &[u32]| part(ranks, left, dead).decision().is_some();
            let goes_on = decides(&of(members), &[]);
            let more = 2 * members.count_ones() > ranks;
            let half = 2 * members.count_ones() == ranks && members & 1 != 0;
            assert_eq!(goes_on, more || half, "{members:b} of {ranks}");
            if others != 0 {
                assert!(!goes_on || !decides(&of(others), &[]), "{members:b} and {others:b}");
                // Nobody is on the other side.
                assert!(
                    decides(&of(members), &of(others)),
                    "{members:b} of {ranks}, the others dead"
                );
            }
        }
    }
}

#[test]
fn who_has_no_quorum_is_told_who_is_missing() {
    let short = part(5, &[2, 3], &[0])
        .shortfall()
        .expect("two of four, without the lowest");
    assert_eq!((&short.missing[..], short.needed), (&[Rank(1), Rank(4)][..], 3));
    assert_eq!(
        short.to_string(),
        "2 ranks are left, of which there would have to be 3: rank 1, 4 are not known to be dead, and may go on elsewhere"
    );
    assert_eq!(part(5, &[1, 3], &[0]).shortfall(), None, "with the lowest that counts");
    let mut any = Agreement::new(Rank(1), 2, &[Rank(0)], 0, Quorum::Majority);
    assert_eq!(any.decision(), None);
    any.require(Quorum::Any);
    assert_eq!(
        any.decision().map(|decision| &decision.members[..]),
        Some(&[Rank(1)][..])
    );
}

#[test]
fn nothing_is_decided_while_one_of_those_that_are_left_follows_another() {
    let follows = |to: u32| AgreementMessage::Promise {
        round: 0,
        to: Rank(to),
        content: false,
        ended: 0,
        suspected: Vec::new(),
        dead: Vec::new(),
    };
    let mut first = Agreement::new(Rank(0), 3, &[], 0, Quorum::Majority);
    first.on_message(Rank(1), follows(0));
    first.on_message(Rank(2), follows(1));
    assert_eq!(first.decision(), None);
    first.on_message(Rank(2), follows(0));
    let all = vec![Rank(0), Rank(1), Rank(2)];
    assert_eq!(first.decision().map(|decision| decision.members.clone()), Some(all));
}
