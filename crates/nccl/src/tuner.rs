//! The tuner: which algorithm and protocol a collective runs by, from Weft's model of the machine (`model::device`).
//!
//! NCCL gives a table of what it expects each pair to cost, and takes the cheapest. For those that Weft has a model of, on the system that `NCCL_WEFT_SYSTEM` names, the
//! fastest is made the cheapest, and NCCL's log says which and why. Where no system is named, where the model knows nothing of a call, and where the two are nearly the
//! same, NCCL's choice stays.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use weft_model::device::{DeviceModel, DeviceOptions};
use weft_model::system::System;
use weft_plan::algorithms::Grid;
use weft_plan::collective::Sizes;
use weft_plan::{Bytes, Collective, Rank};

use crate::abi::{LOG_INFO, Logger, NcclResult, SUBSYSTEM_TUNING, Tuner};
use crate::boundary::{Failed, guarded, log, log_to};
use crate::options::Options;

/// NCCL's functions by number, those that there is a model of.
const FUNCTIONS: [(c_int, Collective); 5] = [
    (0, Collective::Broadcast { root: Rank(0) }),
    (1, Collective::Reduce { root: Rank(0) }),
    (2, Collective::AllGather { sizes: Sizes::Equal }),
    (3, Collective::ReduceScatter { sizes: Sizes::Equal }),
    (4, Collective::AllReduce),
];
/// NCCL's algorithms and protocols by number, likewise.
const ALGORITHMS: [(usize, &str); 5] = [(0, "Tree"), (1, "Ring"), (4, "NVLS"), (5, "NVLSTree"), (6, "PAT")];
const PROTOCOLS: [(usize, &str); 3] = [(0, "LL"), (1, "LL128"), (2, "Simple")];
/// What a choice must gain over NCCL's own.
const WORTH: f64 = 0.95;

/// What NCCL looks for, from 2.28 on.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v5: Tuner = Tuner {
    name: c"Weft".as_ptr(),
    init,
    get_coll_info,
    finalize,
};

/// What is known of a communicator.
#[derive(Debug)]
struct Context {
    system: Option<System>,
    grid: Grid,
    /// Of what choices the log has told: the function, and the power of two of the size.
    told: Mutex<BTreeSet<(c_int, u32)>>,
}

/// A pair, and how long the model says that it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    algorithm: usize,
    protocol: usize,
    micros: f64,
}

impl Candidate {
    fn name(&self) -> String {
        let of = |names: &[(usize, &'static str)], at| {
            names
                .iter()
                .find(|(number, _)| *number == at)
                .map_or("?", |(_, name)| *name)
        };
        format!("{}/{}", of(&ALGORITHMS, self.algorithm), of(&PROTOCOLS, self.protocol))
    }
}

impl Context {
    /// What the model says of every pair that NCCL holds possible.
    fn candidates(
        &self,
        collective: Collective,
        bytes: u64,
        possible: impl Fn(usize, usize) -> bool,
    ) -> Vec<Candidate> {
        let Some(system) = &self.system else { return Vec::new() };
        let Ok(device) = DeviceModel::placed(system, self.grid) else {
            return Vec::new();
        };
        let mut candidates = Vec::new();
        for (algorithm, algorithm_name) in ALGORITHMS {
            for (protocol, protocol_name) in PROTOCOLS {
                if !possible(algorithm, protocol) {
                    continue;
                }
                let ways = DeviceOptions::parse(&format!("NCCL_ALGO={algorithm_name} NCCL_PROTO={protocol_name}"));
                if let Ok(estimate) = device.predict(collective, Bytes(bytes), &ways) {
                    candidates.push(Candidate {
                        algorithm,
                        protocol,
                        micros: estimate.time.as_secs_f64() * 1e6,
                    });
                }
            }
        }
        candidates
    }
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _comm: u64,
    ranks: usize,
    nodes: usize,
    logger: Option<Logger>,
    _domains: *mut c_void,
    _constants: *mut c_void,
) -> NcclResult {
    log_to(logger);
    guarded("starting the tuner", || {
        if context.is_null() {
            return Err(Failed::argument("there is nowhere to put the context"));
        }
        let system = system(&Options::of_process()?)?;
        let nodes = u32::try_from(nodes).unwrap_or(1).max(1);
        let ranks = u32::try_from(ranks).unwrap_or(1).max(1);
        let grid = Grid {
            nodes,
            local: (ranks / nodes).max(1),
        };
        let text = match &system {
            Some(system) => format!(
                "weft: tuning for {nodes} nodes of {} with {} ranks each",
                system.name, grid.local
            ),
            None => "weft: NCCL_WEFT_SYSTEM names no system, so NCCL chooses by itself".to_owned(),
        };
        log(LOG_INFO, SUBSYSTEM_TUNING, &text);
        let told = Mutex::default();
        let made = Box::new(Context { system, grid, told });
        // SAFETY: NCCL gives the place for the context.
        unsafe { context.write(Box::into_raw(made).cast()) };
        Ok(())
    })
}

/// One that is shipped, by its name, or a file.
fn system(options: &Options) -> Result<Option<System>, Failed> {
    let Some(name) = &options.system else { return Ok(None) };
    let wrong = |error: &dyn std::fmt::Display| {
        let text = format!("NCCL_WEFT_SYSTEM is {name:?}: {error}");
        Failed::new(NcclResult::INVALID_USAGE, text)
    };
    let found = match name.ends_with(".toml") {
        true => {
            let file = std::fs::read_to_string(name).map_err(|error| wrong(&error))?;
            System::from_toml(&file)
        }
        false => System::named(name),
    };
    found.map(Some).map_err(|error| wrong(&error))
}

unsafe extern "C" fn get_coll_info(
    context: *mut c_void,
    function: c_int,
    bytes: usize,
    _pipelined: c_int,
    costs: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> NcclResult {
    guarded("choosing an algorithm", || {
        let (algorithms, protocols) = (
            usize::try_from(algorithms).unwrap_or(0),
            usize::try_from(protocols).unwrap_or(0),
        );
        // SAFETY: the context is what `init` made.
        let context = unsafe { context.cast::<Context>().as_ref() };
        let collective = FUNCTIONS.iter().find(|(number, _)| *number == function);
        let (Some(context), Some((_, collective)), false) = (context, collective, costs.is_null()) else {
            return Ok(());
        };
        // SAFETY: what NCCL gives as a pointer to pointers is a table of so many rows and columns, one after the other.
        let table = unsafe { std::slice::from_raw_parts_mut(costs.cast::<f32>(), algorithms * protocols) };
        context.choose(function, *collective, bytes as u64, table, protocols);
        Ok(())
    })
}

impl Context {
    /// Makes the pair that the model holds for the fastest the cheapest of NCCL's table, where that is another than NCCL's own and worth it.
    fn choose(&self, function: c_int, collective: Collective, bytes: u64, table: &mut [f32], protocols: usize) {
        let cost = |algorithm: usize, protocol: usize| {
            let at = (protocol < protocols).then(|| algorithm * protocols + protocol)?;
            table.get(at).copied().filter(|cost| *cost >= 0.0)
        };
        let candidates = self.candidates(collective, bytes, |algorithm, protocol| {
            cost(algorithm, protocol).is_some()
        });
        let fastest = candidates.iter().min_by(|a, b| a.micros.total_cmp(&b.micros));
        let possible = table.iter().enumerate().filter(|(_, cost)| **cost >= 0.0);
        let own = possible
            .min_by(|a, b| a.1.total_cmp(b.1))
            .map(|(at, _)| (at / protocols, at % protocols));
        let (Some(fastest), Some(own)) = (fastest.copied(), own) else {
            return;
        };
        // What there is no model of cannot be compared.
        let Some(own) = candidates
            .iter()
            .find(|candidate| (candidate.algorithm, candidate.protocol) == own)
        else {
            return;
        };
        let changed = fastest.micros < own.micros * WORTH;
        if changed {
            table[fastest.algorithm * protocols + fastest.protocol] = 0.0;
        }
        let size = bytes.max(1).ilog2();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert((function, size)) {
            let chosen = if changed { &fastest } else { own };
            let why = match changed {
                true => format!("NCCL's own choice, {}, would take {:.1}", own.name(), own.micros),
                false => "which is NCCL's own choice".to_owned(),
            };
            let (what, name) = (collective.name(), chosen.name());
            let text = format!(
                "weft: {what} of {bytes} B by {name}, {:.1} us by the model; {why}",
                chosen.micros
            );
            log(LOG_INFO, SUBSYSTEM_TUNING, &text);
        }
    }
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guarded("ending the tuner", || {
        if !context.is_null() {
            // SAFETY: it is what `init` made, and NCCL gives it back once.
            drop(unsafe { Box::from_raw(context.cast::<Context>()) });
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(system: Option<&str>) -> Context {
        Context {
            system: system.map(|name| System::named(name).unwrap()),
            grid: Grid { nodes: 1, local: 8 },
            told: Mutex::default(),
        }
    }

    /// Seven algorithms by three protocols, all impossible but rings and trees, all the same to NCCL but one.
    fn table(own: (usize, usize)) -> Vec<f32> {
        let mut table = vec![-1.0; 21];
        for algorithm in [0, 1] {
            for protocol in 0..3 {
                table[algorithm * 3 + protocol] = 10.0;
            }
        }
        table[own.0 * 3 + own.1] = 5.0;
        table
    }

    #[test]
    fn the_fastest_by_the_model_is_made_the_cheapest() {
        let context = context(Some("dgx-h100"));
        // Nobody would send a gigabyte by LL.
        let mut costs = table((0, 0));
        context.choose(4, Collective::AllReduce, 1 << 30, &mut costs, 3);
        let chosen: Vec<usize> = (0..21).filter(|at| costs[*at] == 0.0).collect();
        assert_eq!(chosen.len(), 1, "{costs:?}");
        assert_ne!(chosen[0] % 3, 0, "not by LL");
        assert!(
            costs[2 * 3..].iter().all(|cost| *cost == -1.0),
            "what is impossible stays so"
        );
    }

    #[test]
    fn nccls_choice_stays_where_nothing_better_is_known() {
        let without = context(None);
        let mut costs = table((0, 0));
        without.choose(4, Collective::AllReduce, 1 << 30, &mut costs, 3);
        assert_eq!(costs, table((0, 0)));
        let with = context(Some("dgx-h100"));
        let candidates = with.candidates(Collective::AllReduce, 1 << 30, |algorithm, _| algorithm < 2);
        let best = candidates.iter().min_by(|a, b| a.micros.total_cmp(&b.micros)).unwrap();
        let own = (best.algorithm, best.protocol);
        let mut costs = table(own);
        with.choose(4, Collective::AllReduce, 1 << 30, &mut costs, 3);
        assert_eq!(costs, table(own));
    }

    #[test]
    fn a_system_that_there_is_not_is_refused() {
        let options = Options {
            system: Some("dgx-h999".to_owned()),
            ..Options::default()
        };
        assert!(super::system(&options).unwrap_err().text.contains("dgx-h999"));
    }
}
