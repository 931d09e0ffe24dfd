//! Raw declarations of libraries that a machine may or may not have, and tables of their functions, filled at run time.
//!
//! Nothing here decides anything: names, layouts and values are those of the library's own header, so that the two can be laid side
//! by side. What may be called when, and in which order things end, is the business of the room that calls.

pub mod verbs;
