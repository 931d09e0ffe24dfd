//! Weft under NCCL: the plug-ins that NCCL loads by `NCCL_NET_PLUGIN`, `NCCL_TUNER_PLUGIN` and `NCCL_PROFILER_PLUGIN`, in one library.
//!
//! NCCL finds a plug-in by the name of a table of functions. Their layouts are declared here by hand ([`abi`]), and checked when this is compiled; NCCL is needed
//! neither to build nor to load it. No panic gets out ([`boundary`]), and nothing that NCCL waits for is waited for without an end.
//!
//! - [`net`]: moves the bytes, over whatever Weft has between two processes: shared memory on one host, verbs and TCP between hosts.
//! - [`profiler`]: NCCL's events in Weft's trace and metrics, and who was waited for.
//! - [`tuner`]: algorithms and protocols by Weft's model of the machine.
//!
//! See docs/integrations/nccl.md for what each does and how it is set.

pub mod abi;
pub mod boundary;
pub mod net;
pub mod options;
pub mod profiler;
pub mod tuner;
