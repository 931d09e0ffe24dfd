//! What runs on a cluster: models, what a step of training or of serving them takes, and what is left of it when machines fail.
//!
//! A [`model::Model`] is a description from which parameters, operations and bytes are counted; nothing here is measured. What the
//! counts cost is the business of [`weft_plan::cost`].

pub mod broadcast;
pub mod goodput;
pub mod model;
pub mod serving;
pub mod trace;
pub mod training;
