//! `cargo xtask door-test NAME`: Weft inside of somebody else's stack, as it is installed from PyPI, end to end. One file a stack.
//!
//! These installs are large, so none of it runs in the suite; each makes an environment of its own under `target/door`.

mod dynamo;
mod hicache;
mod jax;
mod llm_d;
mod lmcache;
mod lmcache_peers;
mod nccl;
mod nixl;
mod ray;
mod sglang;
mod training;
mod vllm_nixl;
mod vllm_offload;

use std::process::{Command, ExitCode};

use crate::command::{self, Error};

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
    /// Dynamo's frontend, prefill and decode workers for vLLM, with Weft's connector.
    Dynamo(dynamo::Arguments),
    /// vLLM with Weft's connector behind the protocol of llm-d's routing sidecar, and KServe's.
    LlmD(llm_d::Arguments),
    /// Blocks from one LMCache process to another.
    LmcachePeers(lmcache_peers::Arguments),
    /// SGLang's prefill and decode apart, over Weft in NIXL's place and by its own name.
    Sglang(sglang::Arguments),
    /// A tier of vLLM's OffloadingConnector on a store: restarts, kills, damage, beside vLLM's own tier of files.
    VllmOffload(vllm_offload::Arguments),
    /// LMCache's second level on a store: restarts, damage, LMCache's own bench.
    Lmcache(lmcache::Arguments),
    /// SGLang's HiCache storage on a store: restarts, kills.
    Hicache(hicache::Arguments),
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
        Door::Dynamo(arguments) => dynamo::run(arguments),
        Door::LlmD(arguments) => llm_d::run(arguments),
        Door::LmcachePeers(arguments) => lmcache_peers::run(arguments),
        Door::Sglang(arguments) => sglang::run(arguments),
        Door::VllmOffload(arguments) => vllm_offload::run(arguments),
        Door::Lmcache(arguments) => lmcache::run(arguments),
        Door::Hicache(arguments) => hicache::run(arguments),
        Door::Ray(arguments) => ray::run(arguments),
        Door::Nccl(arguments) => nccl::run(arguments),
        Door::Jax(arguments) => jax::run(arguments),
        Door::Fsdp(arguments) => arguments.run(),
        Door::Megatron(arguments) => arguments.run(),
        Door::Deepspeed(arguments) => arguments.run(),
    }
}

/// Runs a script that says itself what it has seen, and is told by its status whether all was well.
fn told(script: &mut Command) -> Result<ExitCode, Error> {
    match command::run(script) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(Error::Failed { .. }) => Ok(ExitCode::FAILURE),
        Err(other) => Err(other),
    }
}
