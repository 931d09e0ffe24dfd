//! Loops over the tokens, heads and parts of a stretch, made as short as they can be.

use crate::Datatype;
use crate::pages::Pages;

use super::{ConversionError, Elements, Factor, PagedEnd, Scales, Stretch};

/// Bytes of a scale that lies in memory: an f32.
pub const SCALE_BYTES: u64 = 4;

/// Loops, the outermost first, around runs of elements that touch at both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nest {
    /// The outermost first; one that is done once does nothing.
    pub loops: [Loop; 3],
    /// Elements of a run; of a [`NestKind::Move`] and a [`NestKind::MoveScales`] bytes.
    pub run: u64,
    /// What becomes of a run.
    pub kind: NestKind,
}

/// How often, and how many bytes further each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// How often.
    pub count: u64,
    /// How far apart what is read is.
    pub from: u64,
    /// How far apart what is written is.
    pub to: u64,
    /// The same of the scales of what is read.
    pub from_scale: u64,
    /// The same of the scales of what is written.
    pub to_scale: u64,
}

/// What becomes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestKind {
    /// Bytes of elements, as they are.
    Move,
    /// Bytes of scales, as they are.
    MoveScales,
    /// Elements are multiplied with what they are scaled by, and with the inverse of what they will be, each time rounded to f32, and then to nearest.
    Cast {
        from: Datatype,
        to: Datatype,
        from_scale: Scale,
        to_scale: Scale,
    },
}

/// What elements are multiplied with to be numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    One,
    Fixed(Factor),
    /// An f32 in memory, one for the run, which is the elements of one unit. Written, it is chosen as [`encode_block`](crate::datatype::quantized::encode_block) does.
    Beside,
}

impl NestKind {
    /// Whether bytes stay as they are.
    pub fn is_move(&self) -> bool {
        !matches!(self, NestKind::Cast { .. })
    }
    /// Bytes of one element of a run, as it is read and as it is written.
    pub fn sizes(&self) -> (u64, u64) {
        match self {
            NestKind::Cast { from, to, .. } => (from.size() as u64, to.size() as u64),
            _ => (1, 1),
        }
    }
    /// Whether the scales are looked at run by run, or chosen.
    fn has_scales(&self) -> bool {
        let of = |scale: &Scale| *scale == Scale::Beside;
        matches!(self, NestKind::Cast { from_scale, to_scale, .. } if of(from_scale) || of(to_scale))
    }
}

impl Nest {
    /// How many runs there are.
    pub fn runs(&self) -> u64 {
        self.loops.iter().map(|each| each.count).product()
    }
    /// Of elements.
    pub fn bytes_read(&self) -> u64 {
        self.bytes(self.kind.sizes().0)
    }
    /// Of elements.
    pub fn bytes_written(&self) -> u64 {
        self.bytes(self.kind.sizes().1)
    }
    fn bytes(&self, size: u64) -> u64 {
        match self.kind {
            NestKind::MoveScales => 0,
            _ => self.runs() * self.run * size,
        }
    }

    /// One past the last byte that a stretch reads, reads of scales, writes, writes of scales.
    pub(super) fn ends(&self, at: &Stretch) -> [u64; 4] {
        let last = |of: fn(&Loop) -> u64| self.loops.iter().map(|each| (each.count - 1) * of(each)).sum::<u64>();
        let (read, written) = self.kind.sizes();
        let mut ends = [0; 4];
        if self.kind == NestKind::MoveScales {
            ends[1] = at.from_scales + last(|each| each.from) + self.run;
            ends[3] = at.to_scales + last(|each| each.to) + self.run;
            return ends;
        }
        ends[0] = at.from + last(|each| each.from) + self.run * read;
        ends[2] = at.to + last(|each| each.to) + self.run * written;
        if let NestKind::Cast {
            from_scale, to_scale, ..
        } = self.kind
        {
            if from_scale == Scale::Beside {
                ends[1] = at.from_scales + last(|each| each.from_scale) + SCALE_BYTES;
            }
            if to_scale == Scale::Beside {
                ends[3] = at.to_scales + last(|each| each.to_scale) + SCALE_BYTES;
            }
        }
        ends
    }

    /// Fewer and longer loops that do the same: what touches at both ends becomes one, what is done once is no loop, and what is written goes forward.
    fn shortened(mut self) -> Nest {
        let mut loops: Vec<Loop> = self.loops.into_iter().filter(|each| each.count > 1).collect();
        loops.sort_by_key(|each| std::cmp::Reverse((each.to, each.from)));
        let (read, written) = self.kind.sizes();
        // A run that has a scale of its own stays as it is.
        while !self.kind.has_scales()
            && let Some(last) = loops.last()
            && (last.from, last.to) == (self.run * read, self.run * written)
        {
            self.run *= last.count;
            loops.pop();
        }
        let goes_on = |outer: &Loop, inner: &Loop| {
            let next = |stride: u64| stride * inner.count;
            (outer.from, outer.to) == (next(inner.from), next(inner.to))
                && (!self.kind.has_scales()
                    || (outer.from_scale, outer.to_scale) == (next(inner.from_scale), next(inner.to_scale)))
        };
        let mut joined: Vec<Loop> = Vec::new();
        for inner in loops {
            match joined.last_mut() {
                Some(outer) if goes_on(outer, &inner) => {
                    *outer = Loop {
                        count: outer.count * inner.count,
                        ..inner
                    };
                }
                _ => joined.push(inner),
            }
        }
        let mut loops = [Loop::ONCE; 3];
        let first = loops.len() - joined.len();
        loops[first..].copy_from_slice(&joined);
        Nest { loops, ..self }
    }
}

impl Loop {
    /// Done once, and no further for it.
    pub const ONCE: Loop = Loop {
        count: 1,
        from: 0,
        to: 0,
        from_scale: 0,
        to_scale: 0,
    };
}

/// What is done to the elements: for all parts alike, or for each part.
pub(super) enum Kinds {
    Alike(Vec<NestKind>),
    EachPart(Vec<NestKind>),
}

pub(super) fn kinds(from: &Elements, to: &Elements, parts: u64) -> Result<Kinds, ConversionError> {
    if from.datatype == to.datatype && from.fit_into(to) {
        return Ok(Kinds::Alike(match from.scales {
            Scales::Beside(_) => vec![NestKind::Move, NestKind::MoveScales],
            _ => vec![NestKind::Move],
        }));
    }
    let known = |of| matches!(of, Datatype::F32 | Datatype::F16 | Datatype::Bf16 | Datatype::Fp8E4m3);
    if !known(from.datatype) || !known(to.datatype) {
        let (from, to) = (from.datatype, to.datatype);
        return Err(ConversionError::NoCast { from, to });
    }
    let scale = |of: &Elements, part: u64| match &of.scales {
        Scales::One => Scale::One,
        Scales::PerPart(factors) => Scale::Fixed(factors[part as usize]),
        Scales::Beside(_) => Scale::Beside,
    };
    let of = |part| NestKind::Cast {
        from: from.datatype,
        to: to.datatype,
        from_scale: scale(from, part),
        to_scale: scale(to, part),
    };
    let all: Vec<NestKind> = (0..parts).map(of).collect();
    let alike = all.iter().all(|kind| *kind == all[0]);
    Ok(match alike {
        true => Kinds::Alike(all[..1].to_vec()),
        false => Kinds::EachPart(all),
    })
}

/// The nests of a stretch of so many tokens, each with the part that it begins at.
pub(super) fn nests(
    from: &PagedEnd,
    to: &PagedEnd,
    kinds: &Kinds,
    elements: u64,
    tokens: u64,
    heads: u64,
) -> Result<Vec<(u64, Nest)>, ConversionError> {
    let (near, far) = (from.table.pages, to.table.pages);
    let parts = near.shape().parts;
    // What counts its elements by 31 bits on a device has fewer than that in each stretch.
    let in_all = [
        parts,
        tokens,
        heads,
        near.shape().unit_bytes.max(far.shape().unit_bytes),
    ];
    let in_all = in_all.into_iter().try_fold(1u64, u64::checked_mul);
    if in_all.is_none_or(|bytes| bytes >= 1 << 31) {
        return Err(ConversionError::TooLarge);
    }
    let with = |kind: NestKind, parts: u64| {
        let moves_scales = kind == NestKind::MoveScales;
        // The strides of the elements, or where scales are what is moved, of these.
        let main = |side: &PagedEnd, pages: &Pages| match &side.elements.scales {
            Scales::Beside(scales) if moves_scales => scales.strides(),
            _ => pages.strides(),
        };
        let beside = |side: &PagedEnd| match &side.elements.scales {
            Scales::Beside(scales) if kind.has_scales() => Some(scales.strides()),
            _ => None,
        };
        let (a, b, c, d) = (main(from, near), main(to, far), beside(from), beside(to));
        let dimension = |count: u64, of: fn(&crate::pages::PagesStrides) -> u64| Loop {
            count,
            from: of(&a),
            to: of(&b),
            from_scale: c.as_ref().map_or(0, of),
            to_scale: d.as_ref().map_or(0, of),
        };
        let run = match kind {
            NestKind::Move => near.shape().unit_bytes,
            NestKind::MoveScales => SCALE_BYTES,
            NestKind::Cast { .. } => elements,
        };
        let loops = [
            dimension(parts, |strides| strides.part),
            dimension(tokens, |strides| strides.token),
            dimension(heads, |strides| strides.head),
        ];
        Nest { loops, run, kind }.shortened()
    };
    Ok(match kinds {
        Kinds::Alike(kinds) => kinds.iter().map(|kind| (0, with(*kind, parts))).collect(),
        Kinds::EachPart(kinds) => (0..).zip(kinds).map(|(part, kind)| (part, with(*kind, 1))).collect(),
    })
}
