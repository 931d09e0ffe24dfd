//! Handing the cache of a request from the worker that has read its prompt to the one that goes on: how much, and over what.

use crate::system::System;
use crate::workload::model::Model;
use weft_plan::units::Bandwidth;

/// What the NICs that belong to so many GPUs carry together, each direction.
pub fn nics(system: &System, gpus: u32) -> Bandwidth {
    Bandwidth::from_bytes_per_sec(system.nic_share().bytes_per_sec().saturating_mul(gpus.max(1).into()))
}

/// What a request's cache takes for each of its tokens, all GPUs together, by the model and the bytes of an element.
pub fn token_bytes(model: &Model, element: f64) -> f64 {
    model
        .stacks
        .iter()
        .filter_map(|stack| Some(f64::from(stack.layers) * stack.mixer?.cached_elements()?))
        .sum::<f64>()
        * element
}
