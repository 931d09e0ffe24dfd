//! Holds the examples together, and compiles and runs the one in the README.

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;
