//! `cargo xtask door-test NAME`: Weft inside of somebody else's stack, as it is installed from PyPI, end to end. One file a stack.
//!
//! These installs are large, so none of it runs in the suite; each makes an environment of its own under `target/door`.

mod jax;
mod nccl;
mod nixl;
mod ray;
mod sglang;
mod training;
mod vllm_nixl;

use std::process::ExitCode;

use crate::command::Error;

#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    door: Door,
}

#[derive(clap::Subcommand)]
enum Door {
    /// Weft as a back end of NIXL: the interface, NIXL's own tests, faults beside UCX, speed beside UCX.
    Nixl(nixl::Arguments),
    /// vLLM's NixlConnector over Weft, with NIXL and without.
    VllmNixl(vllm_nixl::Arguments),
    /// SGLang's prefill and decode apart, over Weft in NIXL's place.
    Sglang(sglang::Arguments),
    /// Tensors from actor to actor of Ray's.
    Ray(ray::Arguments),
    /// Weft's plug-ins for NCCL: the tables that NCCL asks for, and those tables in two processes.
    Nccl(nccl::Arguments),
    /// Arrays of JAX's in transfers, and an all-reduce in its compiled programs.
    Jax(jax::Arguments),
    /// PyTorch's own: DDP, FSDP2, tensor and pipeline parallel, compiled collectives; losses beside Gloo's.
    Fsdp(training::Fsdp),
    /// A GPT of Megatron-Core: tensors, pipelines, data; losses beside Gloo's.
    Megatron(training::Megatron),
    /// DeepSpeed's ZeRO 1 to 3; losses beside Gloo's.
    Deepspeed(training::Deepspeed),
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    match &arguments.door {
        Door::Nixl(arguments) => nixl::run(arguments),
        Door::VllmNixl(arguments) => vllm_nixl::run(arguments),
        Door::Sglang(arguments) => sglang::run(arguments),
        Door::Ray(arguments) => ray::run(arguments),
        Door::Nccl(arguments) => nccl::run(arguments),
        Door::Jax(arguments) => jax::run(arguments),
        Door::Fsdp(arguments) => arguments.run(),
        Door::Megatron(arguments) => arguments.run(),
        Door::Deepspeed(arguments) => arguments.run(),
    }
}
