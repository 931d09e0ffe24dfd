//! The tables whose rows this room can predict, one file for each model.

mod kernels;
mod kv;
mod nccl;
mod serving;
mod training;

use super::TruthTable;

/// Every table that there is a model for.
pub fn tables() -> Vec<Box<dyn TruthTable>> {
    vec![
        Box::new(nccl::OneNode),
        Box::new(nccl::NcclTests),
        Box::new(kernels::AllReduce),
        Box::new(kernels::TokenExchanges),
        Box::new(kernels::ExpertsFew),
        Box::new(kernels::ExpertsMany),
        Box::new(kernels::ExpertsPublished),
        Box::new(kv::KvTransfers),
        Box::new(training::TrainingSteps),
        Box::new(training::MegatronBridge),
        Box::new(serving::Serving),
    ]
}
