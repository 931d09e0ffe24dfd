//! What the engines of a world of hand-offs do, what befalls them, and what is held against what they were told.

use weft_plan::Time;
use weft_plan::spans::paired;
use weft_protocol::HostBytes;
use weft_protocol::hand_off::{AskedShare, HandedOff, Message, Over, Overlap, Reason, Reserve};

use super::engine::{Prompt, Stage, Step, TOKENS_MAX};
use super::{Broken, HandOffPlay, Order, Tick};

/// In a thousand.
const REOPEN: u64 = 15;

impl HandOffPlay {
    pub(super) fn on_act(&mut self) -> Result<(), Broken> {
        if self.actions_left == 0 {
            self.arrange(Time::ZERO, Tick::Calm, 0);
            return Ok(());
        }
        self.actions_left -= 1;
        let pace = [20, 2_000, 60_000][self.chance.below(3) as usize];
        let pace = Time::from_us(self.chance.below(pace));
        self.arrange(pace, Tick::Act, 0);
        let index = self.chance.below(self.nodes.len() as u64) as usize;
        let mut roll = self.chance.below(1000);
        let mut falls = |chance: u64| {
            let hit = roll < chance;
            roll = roll.wrapping_sub(chance);
            hit
        };
        if falls(self.plan.crash) {
            return match self.nodes[index].agent.is_some() {
                true => self.kill(index),
                false => Ok(()),
            };
        }
        if falls(REOPEN) {
            return self.close(index);
        }
        if falls(self.plan.cut) {
            self.cut(index);
            return Ok(());
        }
        if falls(self.plan.freeze) {
            self.freeze(index);
            return Ok(());
        }
        if falls(self.plan.reset) {
            let pick = self.chance.next_u64();
            self.world.reset_path(pick);
            return Ok(());
        }
        if self.shape.gossip && self.chance.chance(0.3) {
            return self.gossip();
        }
        self.begin_prompt(false)
    }

    fn cut(&mut self, index: usize) {
        let other = self.chance.below(self.nodes.len() as u64) as usize;
        if other != index {
            let duration = Time::from_us(100 << self.chance.below(13));
            let (a, b) = (self.nodes[index].id, self.nodes[other].id);
            self.world.cut(a, b, duration);
            if self.chance.chance(0.6) {
                self.world.cut(b, a, duration);
            }
        }
    }

    fn freeze(&mut self, index: usize) {
        if self.nodes[index].agent.is_some() && self.nodes[index].frozen_until.is_none() {
            let duration = Time::from_us(self.chance.below(600_000));
            self.nodes[index].frozen_until = Some(self.world.now().saturating_add(duration));
            self.world.count(|tally| tally.freezes += 1);
            self.arrange(duration, Tick::Thaw, index as u64);
        }
    }

    /// Somebody who knows the secret says what makes no sense, to somebody.
    fn gossip(&mut self) -> Result<(), Broken> {
        let (from, to) = (
            self.nodes.len() - 1,
            self.chance.below(self.nodes.len() as u64 - 1) as usize,
        );
        if self.nodes[from].frozen_until.is_some() {
            return Ok(());
        }
        if self.nodes[from].peers.len() < self.nodes.len() {
            self.connect(from, to);
        }
        let hand_off = format!("p{}", self.chance.below(self.prompts.len().max(1) as u64));
        let landing = self.chance.below(20);
        let layers = vec![0];
        let words = match self.chance.below(8) {
            0 => Message::Renew { hand_off }.encode(),
            1 => Message::Done { hand_off, readers: 1 }.encode(),
            2 => Message::Heard { hand_off }.encode(),
            3 => Message::Failed {
                landing,
                why: Over::Stopped,
            }
            .encode(),
            4 => Message::Landed {
                landing,
                layers,
                upto: TOKENS_MAX,
                bytes: 1,
                way: "gossip".to_owned(),
            }
            .encode(),
            5 => Message::Reserve(Reserve {
                hand_off,
                landing,
                tokens: 0..self.chance.below(TOKENS_MAX) + 1,
                prompt_tokens: TOKENS_MAX,
                digest: [self.chance.below(20) as u8; 32],
                blocks: 1 + self.chance.below(9),
                readers: 1,
                lasts: Time::from_secs(1),
                shares: vec![AskedShare {
                    heads: 0..1 + self.chance.below(5),
                    layers,
                }],
            })
            .encode(),
            6 => Message::Describe.encode(),
            _ => {
                let mut noise = vec![0; self.chance.below(80) as usize];
                self.chance.fill(&mut noise);
                [vec![1, self.chance.below(9) as u8], noise].concat()
            }
        };
        let peers = self.nodes[from].peers.clone();
        let node = &mut self.nodes[from];
        if let (Some(agent), Some(station)) = (&mut node.agent, &mut node.station) {
            let now = agent.now();
            peers
                .into_iter()
                .for_each(|peer| station.say(&mut agent.core, peer, &words, now));
        }
        self.turn(from)
    }

    // The life of a prompt.

    /// A new prompt, and what becomes of it: computed and then fetched, or pushed while it is computed.
    fn begin_prompt(&mut self, in_calm: bool) -> Result<(), Broken> {
        let pushed = self.chance.chance(0.5);
        let Some(number) = self.add_prompt(pushed, in_calm) else {
            return Ok(());
        };
        let tokens = self.prompts[number].tokens;
        let mut holder = Vec::new();
        if pushed {
            holder.push(Step::Compute);
            let mut upto = 0;
            while upto < tokens {
                upto = (upto + 1 + self.chance.below(tokens)).min(tokens);
                holder.push(Step::Chunk(upto));
                if self.chance.chance(0.1) {
                    holder.extend([Step::Preempt, Step::Compute]);
                    upto = 0;
                }
            }
        }
        holder.push(if pushed && self.chance.chance(0.15) {
            Step::Stop
        } else {
            Step::Offer
        });
        if self.chance.chance(0.1) {
            holder.push(Step::Stop);
        }
        let reader: &[Step] = match self.chance.below(10) {
            0 => &[],
            1 => &[Step::Want, Step::Leave],
            2 | 3 => &[Step::Want, Step::Fetch, Step::Leave],
            _ => &[Step::Want, Step::Fetch],
        };
        // Of a prompt that is fetched, the reading side hears when it is offered.
        let mut steps: Vec<Step> = Vec::new();
        let (mut holder, mut reader) = (holder.into_iter().peekable(), reader.iter().copied().peekable());
        while holder.peek().is_some() || reader.peek().is_some() {
            let first = !pushed && !steps.contains(&Step::Offer);
            let holds = first || reader.peek().is_none() || holder.peek().is_some() && self.chance.chance(0.5);
            steps.extend(if holds { holder.next() } else { reader.next() });
        }
        for step in steps {
            let wait = match self.chance.below(12) {
                0 => self.shape.lease.saturating_mul(2).min(Time::from_secs(3)),
                1..=4 => Time::from_ms(50),
                _ => Time::from_us(500),
            };
            let wait = Time::from_ns(self.chance.below(wait.as_ns()));
            self.prompts[number].life.push_back((wait, step));
        }
        self.go_on(number);
        Ok(())
    }

    fn add_prompt(&mut self, pushed: bool, in_calm: bool) -> Option<usize> {
        // An engine that has lost a rank computes nothing.
        if self.nodes[..self.shape.holders]
            .iter()
            .any(|node| node.station.is_none())
        {
            return None;
        }
        let tokens = 1 + self.chance.below(TOKENS_MAX);
        let there = self.holders.take(tokens, in_calm, &mut self.chance)?;
        let number = self.prompts.len();
        let first = match self.chance.chance(0.3) {
            // Whole blocks are there already.
            true => self.chance.below(tokens) / self.readers.block_tokens() * self.readers.block_tokens(),
            false => 0,
        };
        self.prompts.push(Prompt {
            number,
            pushed,
            tokens,
            first,
            there,
            here: Vec::new(),
            lease: None,
            stage: Stage::Computing,
            life: Default::default(),
            freed: vec![None; self.shape.holders],
            fenced: vec![true; self.shape.holders],
            wanted: false,
            fetched: false,
            ended: vec![None; self.shape.readers],
            bereaved: false,
            given_up: false,
            in_calm,
        });
        Some(number)
    }

    fn go_on(&mut self, number: usize) {
        if let Some((wait, _)) = self.prompts[number].life.front() {
            self.arrange(*wait, Tick::Life, number as u64);
        }
    }

    pub(super) fn on_life(&mut self, number: usize) -> Result<(), Broken> {
        let fenced = self.prompts[number].fenced.iter().all(|fenced| *fenced);
        let Some((_, step)) = self.prompts[number].life.front().copied() else {
            return Ok(());
        };
        let holds = !matches!(step, Step::Want | Step::Fetch | Step::Leave);
        if holds && !fenced && step != Step::Stop {
            self.arrange(Time::from_ms(1), Tick::Life, number as u64);
            return Ok(());
        }
        self.prompts[number].life.pop_front();
        self.go_on(number);
        self.step(number, step)
    }

    fn step(&mut self, number: usize, step: Step) -> Result<(), Broken> {
        let (holders, readers) = (
            0..self.shape.holders,
            self.shape.holders..self.shape.holders + self.shape.readers,
        );
        let prompt = &mut self.prompts[number];
        let stopped = prompt.stage == Stage::Stopped;
        match step {
            Step::Compute | Step::Chunk(_) | Step::Preempt | Step::Offer | Step::Stop if stopped => Ok(()),
            Step::Compute => self.order(holders, &Order::Compute(number)),
            Step::Chunk(upto) => {
                for layer in 0..self.shape.layers {
                    self.order(holders.clone(), &Order::Computed(number, Some(layer), upto))?;
                }
                Ok(())
            }
            Step::Preempt => {
                for rank in holders.clone() {
                    prompt.fenced[rank] = prompt.freed[rank].is_some();
                }
                self.order(holders, &Order::Preempt(number))
            }
            Step::Offer => {
                let Some(lease) = self.holders.slots.take(self.shape.lease, self.world.now().as_ns()) else {
                    return Ok(());
                };
                (prompt.lease, prompt.stage) = (Some(lease), Stage::Offered);
                if !prompt.pushed {
                    let tokens = prompt.tokens;
                    for rank in holders.clone() {
                        (0..self.shape.layers).for_each(|layer| self.fill(rank, number, layer, tokens));
                    }
                }
                self.order(holders, &Order::Offer(number, lease))
            }
            Step::Stop => self.stop(number),
            Step::Want => {
                let whole = self.nodes[readers.clone()].iter().all(|node| node.station.is_some());
                prompt.wanted = whole && (prompt.pushed || prompt.lease.is_some());
                if !prompt.wanted {
                    return Ok(());
                }
                self.order(readers, &Order::Want(number))
            }
            Step::Fetch => {
                if !prompt.wanted {
                    return Ok(());
                }
                let in_calm = prompt.in_calm;
                match self.readers.take(prompt.tokens, in_calm, &mut self.chance) {
                    Some(here) => {
                        for rank in readers.clone() {
                            self.check_images(rank, here.clone())?;
                        }
                        (self.prompts[number].here, self.prompts[number].fetched) = (here, true);
                        self.order(readers, &Order::Fetch(number))?;
                        self.give_back(number);
                        Ok(())
                    }
                    None => self.order(readers, &Order::Leave(number)),
                }
            }
            Step::Leave if !prompt.wanted => Ok(()),
            Step::Leave => self.order(readers, &Order::Leave(number)),
        }
    }

    /// Tells the ranks that still hold a prompt to give it up. One that has given it back may be in another life by now, that knows nothing of it.
    fn stop(&mut self, number: usize) -> Result<(), Broken> {
        self.prompts[number].stage = Stage::Stopped;
        for rank in 0..self.shape.holders {
            if self.prompts[number].freed[rank].is_none() {
                self.order(rank..rank + 1, &Order::Stop(number))?;
            }
        }
        Ok(())
    }

    /// In calm, a prompt that waits for its turn for longer than a lease.
    pub(super) fn probe_long_wait(&mut self) -> Result<(), Broken> {
        let wait = Time::from_ns(self.shape.lease.as_ns() / 2 * 5);
        let life = [
            (Time::ZERO, Step::Offer),
            (Time::from_us(50), Step::Want),
            (wait, Step::Fetch),
        ];
        self.probe(false, &life)
    }

    /// In calm, one that is fetched at once and one that is pushed.
    pub(super) fn probe_rest(&mut self) -> Result<(), Broken> {
        let soon = Time::from_us(50);
        self.probe(false, &[(soon, Step::Offer), (soon, Step::Want), (soon, Step::Fetch)])?;
        let pushed = [
            Step::Want,
            Step::Fetch,
            Step::Compute,
            Step::Chunk(TOKENS_MAX),
            Step::Offer,
        ];
        self.probe(true, &pushed.map(|step| (soon, step)))
    }

    fn probe(&mut self, pushed: bool, life: &[(Time, Step)]) -> Result<(), Broken> {
        // There is room for it: some blocks are kept for the end.
        let Some(number) = self.add_prompt(pushed, true) else {
            return Ok(());
        };
        let tokens = self.prompts[number].tokens;
        let life = life.iter().map(|(wait, step)| match step {
            Step::Chunk(_) => (*wait, Step::Chunk(tokens)),
            _ => (*wait, *step),
        });
        self.prompts[number].life = life.collect();
        self.go_on(number);
        Ok(())
    }

    // What the ranks say.

    pub(super) fn on_free(&mut self, rank: usize, number: Option<usize>, why: Over) -> Result<(), Broken> {
        let Some(prompt) = number.filter(|number| *number < self.prompts.len()) else {
            return Ok(());
        };
        self.check_fence(rank, prompt, "free")?;
        if self.prompts[prompt].freed[rank].is_some() {
            return Err(Broken::EndedTwice { rank, prompt });
        }
        self.spoil(rank, prompt);
        self.prompts[prompt].freed[rank] = Some(why);
        self.prompts[prompt].fenced[rank] = true;
        self.give_up(prompt);
        Ok(())
    }

    pub(super) fn on_fenced(&mut self, rank: usize, number: Option<usize>) -> Result<(), Broken> {
        let Some(prompt) = number.filter(|number| *number < self.prompts.len()) else {
            return Ok(());
        };
        if self.prompts[prompt].fenced[rank] {
            return Ok(());
        }
        self.check_fence(rank, prompt, "to be computed anew")?;
        self.spoil(rank, prompt);
        self.prompts[prompt].fenced[rank] = true;
        Ok(())
    }

    fn check_fence(&self, rank: usize, prompt: usize, what: &'static str) -> Result<(), Broken> {
        let name = self.prompts[prompt].name();
        match &self.nodes[rank].station {
            Some(station) if station.machine.writes_of(&name) > 0 => Err(Broken::UnderWrite { rank, prompt, what }),
            _ => Ok(()),
        }
    }

    pub(super) fn on_ended(
        &mut self,
        index: usize,
        number: Option<usize>,
        outcome: Result<HandedOff, Reason>,
    ) -> Result<(), Broken> {
        let Some(prompt) = number.filter(|number| *number < self.prompts.len() && index >= self.shape.holders) else {
            return Ok(());
        };
        let rank = index - self.shape.holders;
        if rank >= self.shape.readers {
            return Ok(());
        }
        let state = &self.prompts[prompt];
        if state.ended[rank].is_some() {
            return Err(Broken::EndedTwice { rank: index, prompt });
        }
        match outcome {
            Ok(_) => self.check_bytes(index, prompt)?,
            Err(reason) if state.in_calm => {
                let rank = index;
                return Err(Broken::CalmFailure { rank, prompt, reason });
            }
            Err(_) => {}
        }
        self.prompts[prompt].ended[rank] = Some(true);
        // From now on nobody writes here.
        self.cover(index, prompt);
        self.give_back(prompt);
        Ok(())
    }

    /// Copies what has landed to its blocks.
    pub(super) fn settle(
        &mut self,
        index: usize,
        landing: u64,
        layers: &[u32],
        copies: &[Overlap],
    ) -> Result<(), Broken> {
        let node = &mut self.nodes[index];
        let (Some(agent), Some(station)) = (&node.agent, &mut node.station) else {
            return Ok(());
        };
        if let Some(landed) = station.landing(landing) {
            for copy in copies {
                let Some(region) = station.region(copy.near_region) else {
                    continue;
                };
                for (near, far, len) in paired(&copy.near, &copy.far, 0..copy.near.bytes()) {
                    let mut bytes = vec![0; len as usize];
                    landed.memory.bytes().read(far, &mut bytes);
                    region.memory.bytes().write(near, &bytes);
                }
            }
        }
        let now = agent.now();
        station.machine.settled(landing, layers, now);
        self.turn(index)
    }

    /// A rank has died: its engine gives up what it had to do with, as an engine that loses a worker does.
    pub(super) fn on_death(&mut self, index: usize) -> Result<(), Broken> {
        let holds = index < self.shape.holders;
        for number in 0..self.prompts.len() {
            let prompt = &mut self.prompts[number];
            if holds && prompt.freed[index].is_none() {
                (prompt.freed[index], prompt.fenced[index]) = (Some(Over::Stopped), true);
                prompt.bereaved = true;
                self.stop(number)?;
                self.give_up(number);
            } else if !holds && index < self.shape.holders + self.shape.readers {
                let rank = index - self.shape.holders;
                if prompt.wanted && prompt.ended[rank].is_none() {
                    prompt.ended[rank] = Some(false);
                    // Half of it may have been copied to its blocks; a cache that was closed stays as it is from now on.
                    if self.nodes[index].agent.is_some() {
                        self.cover(index, number);
                    }
                    let readers = self.shape.holders..self.shape.holders + self.shape.readers;
                    self.order(readers, &Order::Leave(number))?;
                }
                // Its last words may have died with it.
                self.prompts[number].bereaved = true;
                self.give_back(number);
            }
        }
        Ok(())
    }

    // Blocks and bytes.

    /// Gives a prompt's blocks to others, once no rank holds them any more.
    fn give_up(&mut self, number: usize) {
        let prompt = &mut self.prompts[number];
        if prompt.freed.iter().all(Option::is_some) && !prompt.given_up {
            (prompt.stage, prompt.given_up) = (Stage::Stopped, true);
            self.holders.free.extend(&prompt.there);
            if let Some(lease) = prompt.lease {
                self.holders.slots.give_back(lease.slot);
            }
        }
    }

    fn give_back(&mut self, number: usize) {
        let prompt = &mut self.prompts[number];
        if prompt.fetched && prompt.ended.iter().all(Option::is_some) {
            prompt.fetched = false;
            self.readers.free.extend(&prompt.here);
        }
    }

    /// Writes a layer of a prompt to its blocks, up to a token.
    pub(super) fn fill(&mut self, rank: usize, number: usize, layer: usize, upto: u64) {
        let prompt = &self.prompts[number];
        if self.nodes[rank].station.is_none() || prompt.freed[rank].is_some() {
            return;
        }
        let content = self.holders.content(number, layer);
        for (near, far, len) in self.holders.pieces(rank, &prompt.there, 0..upto) {
            self.nodes[rank].memory[layer].write(near, &content[far as usize..(far + len) as usize]);
        }
    }

    /// Makes the bytes of a prompt's blocks others.
    fn spoil(&mut self, rank: usize, number: usize) {
        let prompt = &self.prompts[number];
        for (near, _, len) in self.holders.pieces(rank, &prompt.there, 0..prompt.tokens) {
            for memory in &self.nodes[rank].memory {
                let mut bytes = vec![0; len as usize];
                self.chance.fill(&mut bytes);
                memory.write(near, &bytes);
            }
        }
    }

    /// Covers a reader's blocks with bytes that must stay.
    fn cover(&mut self, index: usize, number: usize) {
        let (rank, prompt) = (index - self.shape.holders, &self.prompts[number]);
        if prompt.here.is_empty() {
            return;
        }
        for (near, _, len) in self.readers.pieces(rank, &prompt.here, 0..prompt.tokens) {
            let node = &mut self.nodes[index];
            for (memory, image) in node.memory.iter().zip(&mut node.image) {
                let covered = &mut image[near as usize..(near + len) as usize];
                self.chance.fill(covered);
                memory.write(near, covered);
            }
        }
    }

    fn check_bytes(&self, index: usize, number: usize) -> Result<(), Broken> {
        let (rank, prompt) = (index - self.shape.holders, &self.prompts[number]);
        for layer in 0..self.shape.layers {
            let content = self.readers.content(number, layer);
            for (near, far, len) in self.readers.pieces(rank, &prompt.here, prompt.first..prompt.tokens) {
                let mut found = vec![0; len as usize];
                self.nodes[index].memory[layer].read(near, &mut found);
                if found != content[far as usize..(far + len) as usize] {
                    let (rank, prompt) = (index, number);
                    return Err(Broken::WrongBytes {
                        rank,
                        prompt,
                        layer,
                        at: near,
                    });
                }
            }
        }
        Ok(())
    }

    /// Blocks that nobody has must be as they were left.
    pub(super) fn check_images(&self, index: usize, blocks: Vec<u64>) -> Result<(), Broken> {
        if self.nodes[index].agent.is_none() {
            return Ok(());
        }
        let rank = index - self.shape.holders;
        for block in blocks {
            for (near, _, len) in self.readers.pieces(rank, &[block], 0..self.readers.block_tokens()) {
                let node = &self.nodes[index];
                for (memory, image) in node.memory.iter().zip(&node.image) {
                    let mut found = vec![0; len as usize];
                    memory.read(near, &mut found);
                    if found != image[near as usize..(near + len) as usize] {
                        return Err(Broken::WrittenLate { rank: index, block });
                    }
                }
            }
        }
        Ok(())
    }
}
