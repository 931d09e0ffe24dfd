//! Cases of collectives, what is in every input, and what a loop over all inputs makes of it.

use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Buffer, Collective, Counts, Partition, Problem, Sizes};
use weft_plan::schedule::Program;
use weft_plan::{Datatype, Rank, Reduction};
use weft_protocol::Seeded;

#[derive(Clone, Debug)]
pub struct Case {
    pub problem: Problem,
    pub counts: Counts,
    pub datatype: Datatype,
    pub reduction: Reduction,
    pub seed: u64,
}

impl Case {
    /// Some collective of so many ranks, with at most so many elements a block.
    pub fn random(ranks: u32, most: u64, seed: u64) -> Case {
        let mut chance = Seeded::new(seed);
        let root = Rank(chance.below(ranks.into()) as u32);
        let sizes = [Sizes::Equal, Sizes::Varying][chance.below(2) as usize];
        let collective = match chance.below(10) {
            0 => Collective::AllReduce,
            1 => Collective::AllGather { sizes },
            2 => Collective::ReduceScatter { sizes },
            3 => Collective::Broadcast { root },
            4 => Collective::Reduce { root },
            5 => Collective::Gather { root, sizes },
            6 => Collective::Scatter { root, sizes },
            7 => Collective::AllToAll { sizes },
            8 => Collective::SendReceive {
                from: root,
                to: Rank((root.0 + 1) % ranks),
            },
            _ => Collective::Barrier,
        };
        let apart = Problem::new(collective, ranks);
        let problem = match chance.chance(0.5) && apart.in_place().check().is_ok() {
            true => apart.in_place(),
            false => apart,
        };
        let datatype = Datatype::ALL[chance.below(Datatype::ALL.len() as u64) as usize];
        let reduction = Reduction::ALL[chance.below(Reduction::ALL.len() as u64) as usize];
        let mut several = |count: u32| (0..count).map(|_| chance.below(most + 1)).collect();
        let counts = match (collective.sizes(), collective) {
            (Sizes::Equal, _) => Counts::Equal(most),
            (Sizes::Varying, Collective::AllToAll { .. }) => Counts::PerPair(several(ranks * ranks)),
            (Sizes::Varying, _) => Counts::PerRank(several(ranks)),
        };
        Case {
            problem,
            counts,
            datatype,
            reduction,
            seed,
        }
    }

    pub fn partition(&self, program: &dyn Program) -> Partition {
        Partition::new(&self.problem, self.counts.clone(), program.shape().pieces).unwrap()
    }
    fn elements(&self, rank: Rank, buffer: Buffer, block: u32) -> u64 {
        let partition = Partition::new(&self.problem, self.counts.clone(), 1).unwrap();
        partition.block(self.problem.block_size(rank, buffer, block))
    }
}

/// Every algorithm that is for this problem, with the ranks on as many nodes as can be.
pub fn programs(problem: &Problem) -> Vec<(Algorithm, Box<dyn Program>)> {
    let grids = (1..=problem.ranks)
        .filter(|nodes| problem.ranks.is_multiple_of(*nodes))
        .map(|nodes| Grid {
            nodes,
            local: problem.ranks / nodes,
        });
    let mut programs = Vec::new();
    for grid in grids {
        let flat = grid == Grid::flat(problem.ranks);
        let suited = Algorithm::ALL
            .iter()
            .filter(|algorithm| flat || depends_on_nodes(**algorithm));
        programs.extend(suited.filter_map(|algorithm| Some((*algorithm, algorithm.program(problem, grid)?))));
    }
    programs
}

fn depends_on_nodes(algorithm: Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::Hierarchical | Algorithm::RailRing | Algorithm::RailDoubling
    )
}

/// What is in a rank's input: numbers so small that no order of reductions rounds or overflows.
pub fn filled(case: &Case, rank: Rank, bytes: usize) -> Vec<u8> {
    let mut chance = Seeded::new(case.seed ^ u64::from(rank.0) << 32);
    let size = case.datatype.size();
    let mut filled = vec![0; bytes];
    for at in (0..bytes).step_by(size) {
        // At most eight ones in a sum, and at most eight twos in a product.
        let low = match case.reduction {
            Reduction::Prod => 1,
            _ => 0,
        };
        let value = if rank.0 < 8 { low + chance.below(2) as u8 } else { low };
        number(case.datatype, value, &mut filled[at..at + size]);
    }
    filled
}

/// 0, 1 or 2, in any type.
fn number(datatype: Datatype, value: u8, into: &mut [u8]) {
    let float = f32::from(value);
    match datatype {
        Datatype::F64 => into.copy_from_slice(&f64::from(value).to_ne_bytes()),
        Datatype::F32 => into.copy_from_slice(&float.to_ne_bytes()),
        Datatype::Bf16 => into.copy_from_slice(&((float.to_bits() >> 16) as u16).to_ne_bytes()),
        Datatype::F16 => into.copy_from_slice(&[0u16, 0x3c00, 0x4000][usize::from(value)].to_ne_bytes()),
        Datatype::Fp8E4m3 => into[0] = [0, 0x38, 0x40][usize::from(value)],
        Datatype::Fp8E5m2 => into[0] = [0, 0x3c, 0x40][usize::from(value)],
        Datatype::I8 | Datatype::U8 => into[0] = value,
        Datatype::I16 | Datatype::U16 => into.copy_from_slice(&u16::from(value).to_ne_bytes()),
        Datatype::I32 | Datatype::U32 => into.copy_from_slice(&u32::from(value).to_ne_bytes()),
        Datatype::I64 | Datatype::U64 => into.copy_from_slice(&u64::from(value).to_ne_bytes()),
    }
}

/// What a rank must end with.
pub fn reference(case: &Case, rank: Rank) -> Vec<u8> {
    let Case { problem, datatype, .. } = case;
    let size = datatype.size();
    let blocks = |of: Rank, buffer| (0..problem.blocks(of, buffer)).map(move |block| (of, block));
    let input = |of: Rank| {
        let elements: u64 = blocks(of, Buffer::Input)
            .map(|(of, block)| case.elements(of, Buffer::Input, block))
            .sum();
        filled(case, of, elements as usize * size)
    };
    // A block of a rank's input.
    let block = |of: Rank, block: u32| {
        let start: u64 = (0..block).map(|before| case.elements(of, Buffer::Input, before)).sum();
        let len = case.elements(of, Buffer::Input, block);
        input(of)[start as usize * size..(start + len) as usize * size].to_vec()
    };
    let all = || (0..problem.ranks).map(Rank);
    let reduced = |at: u32| {
        let parts: Vec<Vec<u8>> = all().map(|of| block(of, at)).collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut sum = vec![0; parts[0].len()];
        match case.reduction {
            Reduction::Avg => datatype.average(problem.ranks.into(), &mut sum, &parts).unwrap(),
            reduction => datatype.fold(reduction, &mut sum, &parts).unwrap(),
        }
        sum
    };
    if problem.blocks(rank, Buffer::Output) == 0 {
        return Vec::new();
    }
    match problem.collective {
        Collective::AllReduce | Collective::Reduce { .. } => reduced(0),
        Collective::ReduceScatter { .. } => reduced(rank.0),
        Collective::AllGather { .. } | Collective::Gather { .. } => all().flat_map(|of| block(of, 0)).collect(),
        Collective::Broadcast { root } => block(root, 0),
        Collective::Scatter { root, .. } => block(root, rank.0),
        Collective::AllToAll { .. } => all().flat_map(|of| block(of, rank.0)).collect(),
        Collective::SendReceive { from, .. } => block(from, 0),
        Collective::Barrier => Vec::new(),
    }
}
