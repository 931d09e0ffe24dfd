//! The order of a pipeline: one forward, one backward (1F1B), plain or with chunks that take turns.

use super::Doing;

/// More turns than these are not laid out.
const TURNS_MAX: u64 = 1 << 18;

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) stages: u32,
    pub(super) chunks: u32,
    pub(super) microbatches: u32,
}

/// Of one microbatch in one chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    pub(super) forward: f64,
    pub(super) backward: f64,
}

/// A microbatch passes a chunk of a stage, in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Turn {
    pub(super) stage: u32,
    pub(super) doing: Doing,
    pub(super) microbatch: u32,
    pub(super) chunk: u32,
    pub(super) begin: f64,
    pub(super) end: f64,
}

/// How far a stage has come.
#[derive(Clone, Copy, Debug, Default)]
struct Stage {
    free: f64,
    forward: usize,
    backward: usize,
}

/// When what had passed, forward and backward; `None` where it has not yet.
struct Passed {
    shape: Shape,
    forward: Vec<Option<f64>>,
    backward: Vec<Option<f64>>,
}

impl Shape {
    /// Microbatches × chunks of a stage, where all turns are few enough.
    pub(super) fn units(&self) -> Option<f64> {
        let units = u64::from(self.microbatches) * u64::from(self.chunks);
        let turns = units.checked_mul(2 * u64::from(self.stages))?;
        (1..=TURNS_MAX).contains(&turns).then_some(units as f64)
    }

    /// Everything that happens in a step, in no order.
    pub(super) fn turns(&self, lengths: Lengths) -> Vec<Turn> {
        let order = self.order();
        let mut passed = Passed {
            shape: *self,
            forward: vec![None; order.len() * self.stages as usize],
            backward: vec![None; order.len() * self.stages as usize],
        };
        let mut stages = vec![Stage::default(); self.stages as usize];
        let all = 2 * passed.forward.len();
        let mut turns = Vec::with_capacity(all);
        // A stage that has nothing to do in its order may leave it once, if nobody else gets on either.
        let mut strict = true;
        while turns.len() < all {
            let before = turns.len();
            for stage in 0..self.stages {
                while let Some(turn) = self.next(&order, stage, &stages[stage as usize], &passed, lengths, strict) {
                    let state = &mut stages[stage as usize];
                    state.free = turn.end;
                    let place = passed.place(turn.microbatch, turn.chunk, stage);
                    if turn.doing == Doing::Forward {
                        state.forward += 1;
                        passed.forward[place] = Some(turn.end);
                    } else {
                        state.backward += 1;
                        passed.backward[place] = Some(turn.end);
                    }
                    turns.push(turn);
                    strict = true;
                }
            }
            if turns.len() == before {
                if !strict {
                    break;
                }
                strict = false;
            }
        }
        turns
    }

    /// The units of a stage in the order in which they go forward: a microbatch for each stage, chunk by chunk.
    fn order(&self) -> Vec<(u32, u32)> {
        let mut order = Vec::new();
        let width = if self.chunks == 1 {
            self.microbatches
        } else {
            self.stages
        };
        for first in (0..self.microbatches).step_by(width.max(1) as usize) {
            for chunk in 0..self.chunks {
                order.extend((first..self.microbatches.min(first + width)).map(|microbatch| (microbatch, chunk)));
            }
        }
        order
    }

    /// How many a stage takes forward before it takes the first back.
    fn ahead(&self, stage: u32) -> usize {
        let below = (self.stages - stage - 1) as usize;
        match self.chunks {
            1 => below,
            chunks => 2 * below + (chunks as usize - 1) * self.stages as usize,
        }
    }

    /// What a stage can do next.
    fn next(
        &self,
        order: &[(u32, u32)],
        stage: u32,
        state: &Stage,
        passed: &Passed,
        lengths: Lengths,
        strict: bool,
    ) -> Option<Turn> {
        let forward = || {
            let &(microbatch, chunk) = order.get(state.forward)?;
            let since = passed.before_forward(microbatch, chunk, stage)?;
            let begin = state.free.max(since);
            Some(Turn {
                stage,
                doing: Doing::Forward,
                microbatch,
                chunk,
                begin,
                end: begin + lengths.forward,
            })
        };
        let backward = || {
            let &(microbatch, mirrored) = order.get(state.backward)?;
            let chunk = self.chunks - 1 - mirrored;
            let since = passed.before_backward(microbatch, chunk, stage)?;
            let begin = state.free.max(since);
            Some(Turn {
                stage,
                doing: Doing::Backward,
                microbatch,
                chunk,
                begin,
                end: begin + lengths.backward,
            })
        };
        let goes_forward = state.forward < order.len() && state.forward <= state.backward + self.ahead(stage);
        match (goes_forward, strict) {
            (true, true) => forward(),
            (false, true) => backward(),
            (true, false) => forward().or_else(backward),
            (false, false) => backward().or_else(forward),
        }
    }
}

impl Passed {
    fn place(&self, microbatch: u32, chunk: u32, stage: u32) -> usize {
        let unit = microbatch as usize * self.shape.chunks as usize + chunk as usize;
        unit * self.shape.stages as usize + stage as usize
    }

    /// Since when a microbatch is there to go forward.
    fn before_forward(&self, microbatch: u32, chunk: u32, stage: u32) -> Option<f64> {
        match (stage, chunk) {
            (0, 0) => Some(0.0),
            (0, chunk) => self.forward[self.place(microbatch, chunk - 1, self.shape.stages - 1)],
            (stage, chunk) => self.forward[self.place(microbatch, chunk, stage - 1)],
        }
    }

    /// Since when it is there to go back.
    fn before_backward(&self, microbatch: u32, chunk: u32, stage: u32) -> Option<f64> {
        let (last_stage, last_chunk) = (self.shape.stages - 1, self.shape.chunks - 1);
        match (stage == last_stage, chunk == last_chunk) {
            (true, true) => self.forward[self.place(microbatch, chunk, stage)],
            (true, false) => self.backward[self.place(microbatch, chunk + 1, 0)],
            (false, _) => self.backward[self.place(microbatch, chunk, stage + 1)],
        }
    }
}
