//! Two sessions joined by a pipe.
