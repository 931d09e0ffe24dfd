//! Threads and handles over the pure code: the API that people call.

pub mod observe;

pub mod settings;
