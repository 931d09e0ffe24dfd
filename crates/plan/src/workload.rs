//! What runs on a cluster: models, and what a step of training or of serving them takes.
//!
//! A [`model::Model`] is a description from which parameters, operations and bytes are counted; nothing here is measured. What the
//! counts cost is the business of [`crate::cost`].

pub mod model;
pub mod serving;
