//! What is done to bytes on a rank: copied, combined, divided.

use std::fmt;
use std::sync::Arc;

use weft_plan::{Datatype, Reduction};

use crate::memory::Memory;

/// How contributions become one.
#[derive(Clone, Debug)]
pub enum Combiner {
    Builtin {
        datatype: Datatype,
        reduction: Reduction,
    },
    /// The caller's own, on elements of so many bytes.
    Custom {
        size: usize,
        function: Arc<dyn Function>,
    },
}

/// A reduction of the caller's own. It must be associative and commutative as far as the caller cares: which operand comes first
/// depends on the algorithm, but never on timing.
pub trait Function: fmt::Debug + Send + Sync {
    /// `into[i] = into[i] ⊕ from[i]`, on whole elements.
    fn combine(&self, into: &mut [u8], from: &[u8]);
}

impl Combiner {
    /// Bytes of one element.
    pub fn size(&self) -> usize {
        match self {
            Combiner::Builtin { datatype, .. } => datatype.size(),
            Combiner::Custom { size, .. } => *size,
        }
    }
}

/// A place in memory.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    pub memory: &'a dyn Memory,
    pub offset: u64,
}

/// Moves and reduces bytes on this rank. Bounds have been checked by the caller; lengths are whole elements.
pub trait Kernels: fmt::Debug + Send + Sync {
    fn copy(&self, from: At<'_>, to: At<'_>, len: u64);
    /// `into` becomes `with ⊕ from`. `into` may be `with` or `from`; else they have nothing in common.
    fn combine(&self, how: &Combiner, with: At<'_>, from: At<'_>, into: At<'_>, len: u64);
    /// Divides a sum by the number of its contributions, in place.
    fn divide(&self, datatype: Datatype, at: At<'_>, len: u64, by: u64);
}

/// Kernels by definition: whatever memory it is, copied out, reduced as the room `plan` says, and copied back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// Bytes that are worked on at a time: a multiple of every built-in element.
const WINDOW: usize = 4096;

impl Kernels for Reference {
    fn copy(&self, from: At<'_>, to: At<'_>, len: u64) {
        let mut window = [0; WINDOW];
        for (start, len) in windows(len, WINDOW) {
            from.memory.bytes().read(from.offset + start, &mut window[..len]);
            to.memory.bytes().write(to.offset + start, &window[..len]);
        }
    }

    fn combine(&self, how: &Combiner, with: At<'_>, from: At<'_>, into: At<'_>, len: u64) {
        // Whole elements, however large the caller's own are.
        let each = (WINDOW / how.size().max(1)).max(1) * how.size().max(1);
        let (mut a, mut b) = (vec![0; each], vec![0; each]);
        for (start, len) in windows(len, each) {
            with.memory.bytes().read(with.offset + start, &mut a[..len]);
            from.memory.bytes().read(from.offset + start, &mut b[..len]);
            fold(how, &mut a[..len], &b[..len]);
            into.memory.bytes().write(into.offset + start, &a[..len]);
        }
    }

    fn divide(&self, datatype: Datatype, at: At<'_>, len: u64, by: u64) {
        let (mut sum, mut mean) = ([0; WINDOW], [0; WINDOW]);
        for (start, len) in windows(len, WINDOW) {
            at.memory.bytes().read(at.offset + start, &mut sum[..len]);
            datatype
                .average(by, &mut mean[..len], &[&sum[..len]])
                .expect("buffers of one length, in whole elements");
            at.memory.bytes().write(at.offset + start, &mean[..len]);
        }
    }
}

/// `a[i] = a[i] ⊕ b[i]`, as the room `plan` means it.
pub(super) fn fold(how: &Combiner, a: &mut [u8], b: &[u8]) {
    match how {
        Combiner::Builtin { datatype, reduction } => datatype
            .combine(*reduction, a, b)
            .expect("buffers of one length, in whole elements"),
        Combiner::Custom { function, .. } => function.combine(a, b),
    }
}

fn windows(len: u64, each: usize) -> impl Iterator<Item = (u64, usize)> {
    (0..len)
        .step_by(each)
        .map(move |start| (start, (len - start).min(each as u64) as usize))
}
