//! All-reduce kernels of inference engines: small sums, read or pushed in one or two shots, and NCCL for the rest.

use super::{DeviceModel, DeviceModelError, DeviceOptions};
use crate::system::ScaleUpKind;
use weft_plan::collective::Collective;
use weft_plan::units::{Bytes, Picos};

/// From this size on NCCL takes over: vLLM below it, SGLang up to it.
const LARGEST: f64 = (8 << 20) as f64;
/// From these sizes on, two shots: up to four ranks, and more.
const TWO_SHOT_FOUR: f64 = (512 << 10) as f64;
const TWO_SHOT_MORE: f64 = (256 << 10) as f64;
/// The share of the memory's bandwidth at which an input is copied into registered memory, read and written.
const COPY: f64 = 0.43;

/// Whose kernel it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceKernel {
    Vllm,
    Sglang,
    TensorRt,
}

impl DeviceModel<'_> {
    /// How long an engine's own all-reduce takes within a domain; `eager` where it is not replayed from a graph.
    pub fn all_reduce_kernel(
        &self,
        kernel: ReduceKernel,
        bytes: Bytes,
        eager: bool,
    ) -> Result<Picos, DeviceModelError> {
        let system = self.system;
        let own = &system.kernels.all_reduce;
        let size = bytes.0 as f64;
        let n = f64::from(self.grid.ranks());
        let nccl = self
            .predict(Collective::AllReduce, bytes, &DeviceOptions::default())?
            .time
            .as_secs_f64();
        // Without NVLink they are for pairs only.
        let possible = self.grid.nodes == 1 && (system.scale_up.kind != ScaleUpKind::Pcie || self.grid.local <= 2);
        let seconds = match kernel {
            _ if !possible => nccl,
            ReduceKernel::TensorRt => match &system.kernels.pushed {
                Some(pushed) if bytes <= pushed.largest => {
                    let link = system.scale_up.bandwidth.bytes_per_sec() as f64 * pushed.efficiency;
                    nccl.min(pushed.start.as_secs_f64() + (n - 1.0) * size / link)
                }
                _ => nccl,
            },
            ReduceKernel::Vllm if size >= LARGEST => nccl,
            ReduceKernel::Sglang if size > LARGEST => nccl,
            ReduceKernel::Vllm | ReduceKernel::Sglang => {
                let bandwidth = own.bandwidth.bytes_per_sec() as f64;
                let one_shot = match self.grid.local {
                    0..=2 => true,
                    3..=4 => size < TWO_SHOT_FOUR,
                    _ => size < TWO_SHOT_MORE,
                };
                own.barrier.as_secs_f64()
                    + match one_shot {
                        true => (n - 1.0) * size / bandwidth,
                        false => own.second_barrier.as_secs_f64() + 2.0 * (n - 1.0) / n * size / bandwidth,
                    }
            }
        };
        let memory = system.gpu.memory_bandwidth.bytes_per_sec() as f64 * COPY;
        Ok(seconds_to_time(match eager {
            true => (seconds + size / memory).max(own.eager.as_secs_f64()),
            false => seconds,
        }))
    }
}

pub(super) fn seconds_to_time(seconds: f64) -> Picos {
    Picos::from_ps((seconds.max(0.0) * 1e12).round() as u64)
}
