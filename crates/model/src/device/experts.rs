//! Tokens on their way to experts and back: dispatch and combine of a mixture of experts.
//!
//! A token goes to `top_k` of the experts, which are spread evenly over the ranks, so that it goes to fewer ranks than experts. What is
//! paid for is a message for every expert (few tokens), or a copy for every rank (many tokens), over NVLink within a domain and
//! NICs beyond; or the SMs that copy, where they are fewer than the links need.

use super::reduce_kernel::seconds_to_time;
use super::{DeviceModel, DeviceModelError};
use weft_plan::units::Picos;

/// Scales go along with quantised tokens, and a header with every message.
const SCALE_GROUP: f64 = 128.0;
const SCALE_BYTES: f64 = 4.0;
const MESSAGE_HEADER: f64 = 16.0;
/// What the first message between nodes takes longer.
const ACROSS_START: f64 = 9e-6;
const ACROSS_START_COMBINE: f64 = 13e-6;
/// What all ranks take to tell each other, across nodes, how much will come.
const NOTIFY: f64 = 34e-6;
/// How much more SMs have to do where sums are made on the way between nodes.
const FORWARDED_SUMS: f64 = 1.48;

/// What every rank hands over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertLoad {
    /// Of each rank.
    pub tokens: f64,
    pub hidden: f64,
    pub top_k: f64,
    pub experts: f64,
}

/// To the experts, or back from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenDirection {
    Dispatch,
    Combine,
}

/// How tokens are exchanged within a large domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenExchange {
    Prepare,
    /// With a handshake.
    Dispatch,
    Combine,
    /// The same, with tokens made smaller before.
    CombineQuantized,
    /// Straight into the other's memory.
    Put,
    Get,
}

impl ExpertLoad {
    /// To how many of `places` a token goes, if its experts are drawn at random.
    pub fn reached(&self, places: f64) -> f64 {
        places * (1.0 - (1.0 - 1.0 / places).powf(self.top_k))
    }
}

impl DeviceModel<'_> {
    /// Dispatch in fp8 or combine in bf16 by a message for every expert of every token, as in DeepEP's low-latency kernels.
    pub fn experts_few(&self, load: &ExpertLoad, direction: TokenDirection) -> Result<Picos, DeviceModelError> {
        let system = self.system;
        let Some(few) = &system.kernels.experts_few else {
            return Err(DeviceModelError::NoKernel {
                system: system.name.clone(),
            });
        };
        let (start, expert, efficiency, message) = match direction {
            TokenDirection::Dispatch => (
                few.dispatch,
                few.dispatch_expert,
                few.dispatch_efficiency,
                load.hidden * (1.0 + SCALE_BYTES / SCALE_GROUP) + MESSAGE_HEADER,
            ),
            TokenDirection::Combine => (
                few.combine,
                few.combine_expert,
                few.combine_efficiency,
                load.hidden * 2.0,
            ),
        };
        let (n, local, nodes) = self.shape();
        let sent = load.tokens * load.top_k * message;
        let link = system.scale_up.bandwidth.bytes_per_sec() as f64 * efficiency;
        let within = sent * (local - 1.0) / n / link;
        let nic = system.nic_share().bytes_per_sec() as f64 * system.scale_out.efficiency;
        let across = sent * (nodes - 1.0) / nodes / nic;
        // A group of warps for every expert, and no SM without one.
        let groups = (load.experts / f64::from(system.gpu.sms)).ceil().max(1.0);
        let sms = (load.experts / groups).ceil().max(1.0);
        let on_sms = match direction {
            TokenDirection::Dispatch => load.tokens / sms * few.token_on_sm.as_secs_f64(),
            TokenDirection::Combine => 0.0,
        };
        let across_start = match (nodes > 1.0, direction) {
            (false, _) => 0.0,
            (true, TokenDirection::Dispatch) => ACROSS_START,
            (true, TokenDirection::Combine) => ACROSS_START_COMBINE,
        };
        let start = start.as_secs_f64() + load.experts * expert.as_secs_f64() + across_start;
        Ok(seconds_to_time(start + within.max(across).max(on_sms)))
    }

    /// Dispatch in fp8 or combine in bf16 by a copy for every rank, on so many SMs, as in DeepEP's normal kernels.
    pub fn experts_many(
        &self,
        load: &ExpertLoad,
        direction: TokenDirection,
        sms: f64,
    ) -> Result<Picos, DeviceModelError> {
        let system = self.system;
        let Some(many) = &system.kernels.experts_many else {
            return Err(DeviceModelError::NoKernel {
                system: system.name.clone(),
            });
        };
        let (start, on_sm, token) = match direction {
            TokenDirection::Dispatch => (
                many.dispatch,
                many.dispatch_sm,
                load.hidden * (1.0 + SCALE_BYTES / SCALE_GROUP),
            ),
            TokenDirection::Combine => (many.combine, many.combine_sm, load.hidden * 2.0),
        };
        let (n, local, nodes) = self.shape();
        let ranks = load.reached(n);
        let remote_nodes = load.reached(nodes) * (nodes - 1.0) / nodes;
        let mut copies = ranks + 2.0 * remote_nodes;
        if direction == TokenDirection::Combine && nodes > 1.0 {
            copies *= FORWARDED_SUMS;
        }
        let on_sms = copies * token / (on_sm.bytes_per_sec() as f64 * sms.max(1.0));
        let link = system.scale_up.bandwidth.bytes_per_sec() as f64 * many.efficiency;
        let within = ranks * (local - 1.0) / local * token / link;
        let nic = system.nic_share().bytes_per_sec() as f64 * system.scale_out.efficiency;
        let across = remote_nodes * token / nic;
        let notify = if nodes > 1.0 { NOTIFY } else { 0.0 };
        let start = start.as_secs_f64() + notify;
        Ok(seconds_to_time(start + load.tokens * on_sms.max(within).max(across)))
    }

    /// One step of an exchange of tokens within a large domain, of tokens of so many bytes.
    pub fn exchange_tokens(
        &self,
        load: &ExpertLoad,
        step: TokenExchange,
        token: f64,
    ) -> Result<Picos, DeviceModelError> {
        let system = self.system;
        let Some(tokens) = &system.kernels.tokens else {
            return Err(DeviceModelError::NoKernel {
                system: system.name.clone(),
            });
        };
        let (n, _, _) = self.shape();
        let byte = 1.0 / (system.scale_up.bandwidth.bytes_per_sec() as f64 * tokens.efficiency);
        let copies = load.reached(n);
        let away = copies * (n - 1.0) / n;
        let (start, doubling, each) = match step {
            TokenExchange::Prepare => (
                tokens.prepare.start,
                tokens.prepare.doubling,
                tokens.prepare.token.as_secs_f64(),
            ),
            TokenExchange::Dispatch | TokenExchange::Combine => {
                let copied = match step {
                    TokenExchange::Dispatch => &tokens.dispatch,
                    _ => &tokens.combine,
                };
                let each = copies * (copied.copy.as_secs_f64() + token * byte);
                (copied.start, copied.doubling, each)
            }
            TokenExchange::CombineQuantized => {
                let each = tokens.quantize.as_secs_f64() + copies * token * byte;
                (tokens.combine.start, tokens.combine.doubling, each)
            }
            TokenExchange::Put => (tokens.put.start, tokens.put.doubling, copies * token * byte),
            TokenExchange::Get => (tokens.get.start, tokens.get.doubling, away * token * byte),
        };
        let start = start.as_secs_f64() + n.log2() * doubling.as_secs_f64();
        Ok(seconds_to_time(start + load.tokens * each))
    }

    /// Ranks, those of a domain, and domains.
    fn shape(&self) -> (f64, f64, f64) {
        let grid = self.grid;
        (f64::from(grid.ranks()), f64::from(grid.local), f64::from(grid.nodes))
    }
}
