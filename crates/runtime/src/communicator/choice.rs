//! By what a call runs where the caller does not say, and whether its program does what it should.

use std::collections::HashSet;

use weft_plan::Bytes;
use weft_plan::algorithms::Algorithm;
use weft_plan::collective::{Collective, Problem};
use weft_plan::cost::{Candidate, Placement, PlacementError, Selector};
use weft_plan::schedule::{Program, verify};

use super::prepare::CallError;
use crate::settings::AlgorithmChoice;

/// A program of more ranks, or of more ranks × steps, is not run through op by op while a call waits: it is right for the same reason as
/// the smaller ones.
const VERIFIED_RANKS: u32 = 64;
const VERIFIED_STEPS: u64 = 1 << 14;
/// So many programs are remembered.
const VERIFIED_MAX: usize = 4096;
/// So many problems are remembered with their selectors.
const SELECTORS_MAX: usize = 64;

/// What a choice depends on. It is the same on all ranks, so that all choose the same.
#[derive(Debug)]
pub(super) struct Choice {
    placement: Placement,
    /// Where ranks are for the sake of choosing alike wherever they are.
    reference: Placement,
    settings: Settled,
    /// Made when a problem is first met, the latest first; with the placement that it is for.
    selectors: Vec<(Manner, Selector)>,
    /// The programs that are known to do what their collectives ask.
    verified: HashSet<(Problem, Candidate)>,
}

/// What the settings say.
#[derive(Clone, Debug, Default)]
pub(super) struct Settled {
    /// All calls are deterministic.
    pub(super) deterministic: bool,
    pub(super) algorithms: Vec<AlgorithmChoice>,
}

/// What is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// The least time.
    Fastest,
    /// The same bits wherever the ranks are, and whatever the ways between them cost.
    Deterministic,
}

impl Choice {
    pub(super) fn new(placement: Placement, settings: Settled) -> Result<Choice, PlacementError> {
        Ok(Choice {
            placement,
            reference: Placement::reference(placement.grid.ranks())?,
            settings,
            selectors: Vec::new(),
            verified: HashSet::new(),
        })
    }

    /// How many channels there are between two ranks.
    pub(super) fn channels(&self) -> u16 {
        self.placement.channels
    }

    /// By what a problem with so many bytes in the larger of a rank's buffers is done: as the settings say, else as the costs do.
    pub(super) fn choose(&mut self, problem: &Problem, bytes: Bytes, manner: Manner) -> Option<Candidate> {
        if let Collective::SendReceive { .. } = problem.collective {
            return Some(Algorithm::Direct.into());
        }
        let name = problem.collective.name();
        let mut settled = self
            .settings
            .algorithms
            .iter()
            .filter(|choice| choice.collective == name);
        let settled = settled.find(|choice| self.program(problem, choice.candidate).is_some());
        if let Some(choice) = settled {
            return Some(choice.candidate);
        }
        let manner = match self.settings.deterministic {
            true => Manner::Deterministic,
            false => manner,
        };
        self.selector(problem, manner).choose(bytes)
    }

    /// The program of a candidate, where it is for this problem and there are enough channels.
    pub(super) fn program(&self, problem: &Problem, candidate: Candidate) -> Option<Box<dyn Program>> {
        let program = candidate.program(problem, self.placement.grid)?;
        Some(program).filter(|program| program.shape().channels <= self.placement.channels)
    }

    /// Makes sure, once for every problem, that a program does what is asked of it. Sizes have no part in that.
    pub(super) fn check(
        &mut self,
        problem: &Problem,
        candidate: Candidate,
        program: &dyn Program,
    ) -> Result<(), CallError> {
        let shape = program.shape();
        let steps = u64::from(shape.ranks) * u64::from(shape.steps);
        let small = shape.ranks <= VERIFIED_RANKS && steps <= VERIFIED_STEPS;
        if !small || self.verified.contains(&(*problem, candidate)) {
            return Ok(());
        }
        let faulty = |fault| CallError::Faulty {
            by: candidate.to_string(),
            fault,
        };
        verify(problem, program).map_err(faulty)?;
        if self.verified.len() >= VERIFIED_MAX {
            self.verified.clear();
        }
        self.verified.insert((*problem, candidate));
        Ok(())
    }

    fn selector(&mut self, problem: &Problem, manner: Manner) -> &Selector {
        let same = |(known, selector): &(Manner, Selector)| *known == manner && selector.is_for(problem);
        match self.selectors.iter().position(same) {
            Some(at) => self.selectors[..=at].rotate_right(1),
            None => {
                let placement = match manner {
                    Manner::Fastest => self.placement,
                    Manner::Deterministic => self.reference,
                };
                self.selectors.truncate(SELECTORS_MAX - 1);
                self.selectors.insert(0, (manner, Selector::new(*problem, placement)));
            }
        }
        &self.selectors[0].1
    }
}

#[cfg(test)]
mod tests {
    use weft_plan::algorithms::Grid;
    use weft_plan::collective::Sizes;
    use weft_plan::{Platform, Rank};

    use super::*;

    fn choice(grid: Grid, across: &str, settings: Settled) -> Choice {
        let placement = Placement::over(&Platform::laptop(), grid, &[across]).unwrap();
        Choice::new(placement, settings).unwrap()
    }

    fn problems(ranks: u32) -> Vec<Problem> {
        let (sizes, root) = (Sizes::Equal, Rank(ranks - 1));
        let collectives = [
            Collective::AllReduce,
            Collective::AllGather { sizes },
            Collective::ReduceScatter { sizes },
            Collective::Broadcast { root },
            Collective::Reduce { root },
            Collective::Gather { root, sizes },
            Collective::Scatter { root, sizes },
            Collective::AllToAll { sizes },
            Collective::Barrier,
        ];
        collectives.map(|collective| Problem::new(collective, ranks)).to_vec()
    }

    #[test]
    fn what_the_selector_says_runs() {
        for (nodes, local) in [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 4)] {
            let grid = Grid { nodes, local };
            let mut choice = choice(grid, "tcp", Settled::default());
            for problem in problems(grid.ranks()) {
                let selector = Selector::new(problem, choice.placement);
                for bytes in [0, 1 << 10, 64 << 10, 1 << 20, 256 << 20].map(Bytes) {
                    for problem in [problem, problem.in_place()] {
                        let chosen = choice.choose(&problem, bytes, Manner::Fastest);
                        assert_eq!(chosen, selector.choose(bytes), "{problem:?}");
                        let program = chosen.and_then(|chosen| choice.program(&problem, chosen));
                        assert!(program.is_some(), "{problem:?} by {chosen:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_deterministic_is_chosen_alike_wherever_the_ranks_are() {
        let grids = [Grid::flat(4), Grid { nodes: 4, local: 1 }, Grid { nodes: 2, local: 2 }];
        let mut choices: Vec<Choice> = grids
            .iter()
            .flat_map(|grid| ["tcp", "verbs"].map(|across| choice(*grid, across, Settled::default())))
            .collect();
        choices[1].placement.channels = 1;
        for problem in problems(4) {
            for bytes in [8, 4 << 10, 1 << 20, 64 << 20].map(Bytes) {
                let all = choices.iter_mut().map(|choice| {
                    let chosen = choice.choose(&problem, bytes, Manner::Deterministic)?;
                    choice.program(&problem, chosen).map(|_| chosen)
                });
                let all: Vec<Option<Candidate>> = all.collect();
                assert!(all[0].is_some() && all.iter().all(|one| *one == all[0]), "{all:?}");
            }
        }
    }

    #[test]
    fn settings_come_first_where_they_can() {
        let settings = Settled {
            algorithms: vec!["all-reduce=ring".parse().unwrap(), "broadcast=ring/4".parse().unwrap()],
            ..Settled::default()
        };
        let mut choice = choice(Grid::flat(4), "tcp", settings);
        let mut chosen = |collective| {
            let chosen = choice.choose(&Problem::new(collective, 4), Bytes(64), Manner::Fastest);
            chosen.unwrap().to_string()
        };
        assert_eq!(chosen(Collective::AllReduce), "ring");
        assert_eq!(chosen(Collective::Broadcast { root: Rank(1) }), "ring/4");
        assert_eq!(chosen(Collective::Barrier), "direct");
    }

    #[test]
    fn a_program_that_does_something_else_is_refused() {
        let from = |root| Problem::new(Collective::Broadcast { root: Rank(root) }, 3);
        let program = Algorithm::Direct.program(&from(1), Grid::flat(3)).unwrap();
        let mut choice = choice(Grid::flat(3), "tcp", Settled::default());
        let direct = Algorithm::Direct.into();
        for _ in 0..2 {
            choice.check(&from(1), direct, &*program).unwrap();
            let refused = choice.check(&from(0), direct, &*program);
            assert!(matches!(refused, Err(CallError::Faulty { .. })), "{refused:?}");
        }
    }
}
