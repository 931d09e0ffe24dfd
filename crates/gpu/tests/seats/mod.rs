//! Seats of ranks that send tokens to experts: what is in them, and what has to be there afterwards.

use std::sync::Arc;

use weft_gpu::{
    Buffers, Collectives, CombineBuffers, Device, DeviceSlice, DispatchBuffers, Moe, MoeError, MoeHandle, MoeSettings,
    Received, Sent, Stream, Team, TeamSettings,
};

use crate::rows::{Chance, Guarded, POISON, Two, eight, error_of_eight};

/// How tokens find experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// Different ones by chance.
    Any,
    /// All tokens to the first of one expert; their others by chance.
    One(u32),
    /// By chance, the same expert several times, and numbers that are none of an expert's.
    Careless,
    /// None for anybody.
    None,
}

impl Gate {
    pub fn experts(self, of: &MoeSettings, tokens: u32, chance: &mut Chance) -> Vec<i32> {
        let mut all = Vec::new();
        for _ in 0..tokens {
            let mut own: Vec<i32> = Vec::new();
            if let Gate::One(expert) = self {
                own.push(expert as i32);
            }
            while own.len() < of.top_k as usize {
                let expert = chance.below(of.experts.into()) as i32;
                match self {
                    Gate::None => own.push(-1),
                    Gate::Careless => own.push(match chance.below(8) {
                        0 => -1,
                        1 => of.experts as i32,
                        2 => i32::MIN,
                        3 | 4 => *own.first().unwrap_or(&expert),
                        _ => expert,
                    }),
                    _ if own.contains(&expert) => {}
                    _ => own.push(expert),
                }
            }
            all.extend(own);
        }
        all
    }
}

/// What a rank has in a test.
pub struct Seat {
    pub stream: Stream,
    pub tokens: u32,
    pub input: Guarded,
    pub experts: Guarded,
    pub weights: Guarded,
    pub rows: Guarded,
    pub scales: Guarded,
    pub counts: Guarded,
    pub row_experts: Guarded,
    pub row_weights: Guarded,
    pub results: Guarded,
    pub output: Guarded,
    pub x: Vec<u8>,
    pub chosen: Vec<i32>,
    pub gate: Vec<f32>,
}

impl Seat {
    pub fn dispatch(&self) -> DispatchBuffers {
        DispatchBuffers {
            tokens: self.tokens,
            input: self.input.slice(),
            experts: self.experts.slice(),
            weights: self.weights.slice(),
            rows: self.rows.slice(),
            scales: self.scales.slice(),
            counts: self.counts.slice(),
            row_experts: self.row_experts.slice(),
            row_weights: self.row_weights.slice(),
        }
    }
    pub fn combine(&self) -> CombineBuffers {
        CombineBuffers {
            input: self.results.slice(),
            weights: self.weights.slice(),
            output: self.output.slice(),
        }
    }
    /// What a token has of an expert: all of its weights, or nothing.
    pub fn weight(&self, of: &MoeSettings, token: u32, expert: u32) -> Option<f32> {
        let at = (token * of.top_k) as usize;
        let own = self.chosen[at..at + of.top_k as usize].iter().zip(&self.gate[at..]);
        let found: Vec<f32> = own
            .filter(|(chosen, _)| **chosen == expert as i32)
            .map(|(_, weight)| *weight)
            .collect();
        (!found.is_empty()).then(|| found.iter().sum())
    }
}

pub struct Table {
    pub moe: Moe,
    pub seats: Vec<Seat>,
    pub handles: Vec<MoeHandle>,
}

pub fn bytes_of<T: Copy, const N: usize>(all: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    all.iter().flat_map(|one| bytes(*one)).collect()
}

pub fn ints(bytes: &[u8]) -> Vec<i32> {
    bytes
        .chunks_exact(4)
        .map(|four| i32::from_ne_bytes(four.try_into().expect("four")))
        .collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_ne_bytes(four.try_into().expect("four")))
        .collect()
}

/// What an expert makes of an element, rounded as its results are.
pub fn expert_of(expert: u32, x: f64) -> f64 {
    x * (1.0 + f64::from(expert % 7) * 0.25) + f64::from(expert % 5)
}

impl Table {
    /// `tokens` of each rank.
    pub fn new(
        device: &Arc<Device>,
        team: &Arc<Team>,
        of: MoeSettings,
        tokens: &[u32],
        gate: Gate,
        chance: &mut Chance,
    ) -> Table {
        let moe = Moe::new(team, of).expect("kernels");
        let bytes = moe.shape().bytes();
        let seats = tokens
            .iter()
            .map(|tokens| {
                let (rows, routed) = (
                    u64::from(*tokens) * u64::from(of.hidden) * 2,
                    u64::from(tokens * of.top_k) * 4,
                );
                let seat = Seat {
                    stream: Stream::new(device).expect("a stream"),
                    tokens: *tokens,
                    input: Guarded::new(device, rows),
                    experts: Guarded::new(device, routed),
                    weights: Guarded::new(device, routed),
                    rows: Guarded::new(device, bytes.rows),
                    scales: Guarded::new(device, bytes.scales),
                    counts: Guarded::new(device, bytes.counts),
                    row_experts: Guarded::new(device, bytes.row_experts),
                    row_weights: Guarded::new(device, bytes.row_weights),
                    results: Guarded::new(device, bytes.results),
                    output: Guarded::new(device, rows),
                    x: chance.rows(Two::Bf16, (tokens * of.hidden) as usize),
                    chosen: gate.experts(&of, *tokens, chance),
                    gate: (0..tokens * of.top_k).map(|_| chance.number()).collect(),
                };
                seat.input.write(&seat.x);
                seat.experts.write(&bytes_of(&seat.chosen, i32::to_ne_bytes));
                seat.weights.write(&bytes_of(&seat.gate, f32::to_ne_bytes));
                seat
            })
            .collect::<Vec<Seat>>();
        let handles = seats.iter().map(|_| moe.handle().expect("a handle")).collect();
        Table { moe, seats, handles }
    }

    /// Puts something else on every stream: its first work may make the driver wait for the device, for ever if that waits for it.
    pub fn warm_up(&self, device: &Arc<Device>) {
        let alone = Team::in_process(device, 1, TeamSettings::default()).expect("a team");
        for seat in &self.seats {
            let calls = Collectives::new(&alone, 0).expect("a rank");
            let own = |input: DeviceSlice, output: DeviceSlice| Buffers { input, output };
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { calls.all_gather(seat.stream.handle(), own(seat.input.slice(), seat.output.slice()), 8) }
                .expect("a copy");
            seat.stream.synchronize().expect("an end");
        }
    }

    pub fn of(&self) -> &MoeSettings {
        self.moe.shape().settings()
    }

    /// `each`: a launch for every rank, on its stream; else one for all.
    pub fn dispatch(&mut self, each: bool) -> Result<(), MoeError> {
        if !each {
            let buffers: Vec<DispatchBuffers> = self.seats.iter().map(Seat::dispatch).collect();
            // SAFETY: the memory lives until the streams have been waited for.
            return unsafe {
                self.moe
                    .dispatch_all(self.seats[0].stream.handle(), &buffers, &mut self.handles)
            };
        }
        for (rank, (seat, handle)) in self.seats.iter().zip(&mut self.handles).enumerate() {
            // SAFETY: as above.
            unsafe { self.moe.dispatch(seat.stream.handle(), rank, &seat.dispatch(), handle) }?;
        }
        Ok(())
    }

    pub fn combine(&self, each: bool) -> Result<(), MoeError> {
        if !each {
            let buffers: Vec<CombineBuffers> = self.seats.iter().map(Seat::combine).collect();
            // SAFETY: as above.
            return unsafe {
                self.moe
                    .combine_all(self.seats[0].stream.handle(), &buffers, &self.handles)
            };
        }
        for (rank, (seat, handle)) in self.seats.iter().zip(&self.handles).enumerate() {
            // SAFETY: as above.
            unsafe { self.moe.combine(seat.stream.handle(), rank, &seat.combine(), handle) }?;
        }
        Ok(())
    }

    pub fn settle(&self, what: &str) {
        for (rank, seat) in self.seats.iter().enumerate() {
            seat.stream.synchronize().expect(what);
            self.moe.check(rank).expect(what);
        }
    }

    /// That a row is a token's, as it was sent.
    pub fn check_row(&self, what: &str, got: &[u8], scales: &[f32], token: &[u8]) {
        match self.of().sent {
            Sent::Bf16 => assert!(got == token, "{what}: another row"),
            Sent::Fp8 => {
                let x = Two::Bf16.values(token);
                for (nth, x) in x.chunks_exact(128).enumerate() {
                    let most = x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    let scale = f64::from(scales[nth]);
                    assert!(
                        (scale * 448.0 - most).abs() <= most * 1e-6,
                        "{what}: scale {scale} of {most}"
                    );
                    for (x, got) in x.iter().zip(&got[nth * 128..]) {
                        let of = x / scale;
                        assert!(
                            (eight(*got) - of).abs() <= error_of_eight(of),
                            "{what}: {} for {of}",
                            eight(*got)
                        );
                    }
                }
            }
        }
    }

    /// Every row, count and number beside them, of every rank; then what the experts make of them is put where combine reads it.
    pub fn check_received(&self, what: &str) {
        let (of, ranks) = (*self.of(), self.seats.len() as u32);
        let (each, hidden) = (of.experts / ranks, of.hidden as usize);
        let row_bytes = hidden * if of.sent == Sent::Fp8 { 1 } else { 2 };
        for (rank, seat) in self.seats.iter().enumerate() {
            let what = format!("{what}: rank {rank}");
            let (rows, scales) = (seat.rows.read(&what), floats(&seat.scales.read(&what)));
            let counts = ints(&seat.counts.read(&what));
            let (row_experts, row_weights) = (
                ints(&seat.row_experts.read(&what)),
                floats(&seat.row_weights.read(&what)),
            );
            let mut results = vec![0u8; self.moe.shape().bytes().results as usize];
            let mut filled = vec![false; self.moe.shape().rows() as usize];
            let groups = hidden / 128;
            let mut take = |row: usize, source: &Seat, token: u32, of_row: &[(u32, f32)]| {
                let own = &source.x[token as usize * hidden * 2..][..hidden * 2];
                let scales = match of.sent {
                    Sent::Fp8 => &scales[row * groups..][..groups],
                    Sent::Bf16 => &[],
                };
                self.check_row(&what, &rows[row * row_bytes..][..row_bytes], scales, own);
                let made = Two::Bf16.values(own).into_iter().flat_map(|x| {
                    let sum: f64 = of_row
                        .iter()
                        .map(|(expert, weight)| f64::from(*weight) * expert_of(*expert, x))
                        .sum();
                    Two::Bf16.bits(sum as f32).to_ne_bytes()
                });
                results[row * hidden * 2..][..hidden * 2].copy_from_slice(&made.collect::<Vec<u8>>());
                assert!(!std::mem::replace(&mut filled[row], true), "{what}: row {row} twice");
            };
            let first = rank as u32 * each;
            match of.received {
                Received::Slots => {
                    for (local, expert) in (first..first + each).enumerate() {
                        for (from, source) in self.seats.iter().enumerate() {
                            let has = |token: &u32| source.weight(&of, *token, expert).is_some();
                            let sent: Vec<u32> = (0..source.tokens).filter(has).collect();
                            let slot = local * ranks as usize + from;
                            assert_eq!(counts[slot], sent.len() as i32, "{what}, expert {expert}, from {from}");
                            for (nth, token) in sent.iter().enumerate() {
                                take(slot * of.tokens_max as usize + nth, source, *token, &[(expert, 1.0)]);
                            }
                        }
                    }
                }
                Received::Compact { .. } => {
                    let mut row = 0;
                    let mut by_expert = vec![0; each as usize];
                    for (from, source) in self.seats.iter().enumerate() {
                        let begin = row;
                        for token in 0..source.tokens {
                            let here: Vec<(u32, f32)> = (first..first + each)
                                .filter_map(|expert| Some((expert, source.weight(&of, token, expert)?)))
                                .collect();
                            if here.is_empty() {
                                continue;
                            }
                            let beside = row * of.top_k as usize;
                            let mut told: Vec<(u32, f32)> = (beside..beside + of.top_k as usize)
                                .filter(|at| row_experts[*at] >= 0)
                                .map(|at| (first + row_experts[at] as u32, row_weights[at]))
                                .collect();
                            told.sort_by_key(|(expert, _)| *expert);
                            let same = told.len() == here.len()
                                && told
                                    .iter()
                                    .zip(&here)
                                    .all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-5);
                            assert!(same, "{what}, row {row}: {told:?} instead of {here:?}");
                            here.iter()
                                .for_each(|(expert, _)| by_expert[(expert - first) as usize] += 1);
                            take(row, source, token, &here);
                            row += 1;
                        }
                        assert_eq!(
                            counts[each as usize + from],
                            (row - begin) as i32,
                            "{what}, from {from}"
                        );
                    }
                    assert_eq!(counts[..each as usize], by_expert, "{what}");
                }
            }
            for (row, filled) in filled.iter().enumerate() {
                let untouched = rows[row * row_bytes..][..row_bytes].iter().all(|byte| *byte == POISON);
                assert!(*filled || untouched, "{what}: row {row} is nobody's and was written");
            }
            seat.results.write(&results);
        }
    }

    /// That every token has the sum of what its experts made of it.
    pub fn check_combined(&self, what: &str) {
        let (of, ranks) = (*self.of(), self.seats.len() as u32);
        let each = of.experts / ranks;
        for (rank, seat) in self.seats.iter().enumerate() {
            let got = Two::Bf16.values(&seat.output.read(what));
            let x = Two::Bf16.values(&seat.x);
            for token in 0..seat.tokens {
                let mine: Vec<(u32, f32)> = (0..of.experts)
                    .filter_map(|expert| Some((expert, seat.weight(&of, token, expert)?)))
                    .collect();
                for column in 0..of.hidden as usize {
                    let at = token as usize * of.hidden as usize + column;
                    let rounded = |value: f64| Two::Bf16.value(Two::Bf16.bits(value as f32));
                    let made = |(expert, weight): &(u32, f32)| f64::from(*weight) * expert_of(*expert, x[at]);
                    let parts: Vec<f64> = match of.received {
                        Received::Slots => mine
                            .iter()
                            .map(|(expert, weight)| f64::from(*weight) * rounded(expert_of(*expert, x[at])))
                            .collect(),
                        Received::Compact { .. } => (0..ranks)
                            .map(|owner| {
                                let own = mine.iter().filter(|(expert, _)| expert / each == owner);
                                rounded(own.map(made).sum())
                            })
                            .collect(),
                    };
                    let sum: f64 = parts.iter().sum();
                    let added: f64 = parts.iter().map(|part| part.abs()).sum();
                    let error = Two::Bf16.error(sum) + added * 1e-6;
                    assert!(
                        (got[at] - sum).abs() <= error,
                        "{what}: rank {rank}, token {token}, column {column}: {} instead of {sum}",
                        got[at]
                    );
                }
            }
        }
    }

    pub fn run(&mut self, what: &str, each: bool) {
        self.dispatch(each).expect(what);
        self.settle(what);
        self.check_received(what);
        self.combine(each).expect(what);
        self.settle(what);
        self.check_combined(what);
    }
}
