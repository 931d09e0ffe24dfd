//! What one worker holds, so completely described that another can name any byte of it; and which bytes two of them have in common.
//!
//! From two descriptions either end computes which heads of which layers both have and where these lie. Degrees of tensor parallelism, sizes of
//! blocks and orders of memory may differ. What the numbers mean may not: two ends whose meanings differ refuse each other, by name.

use std::ops::Range;

use thiserror::Error;
use weft_plan::Spans;
use weft_plan::pages::{Pages, PagesError, PagesShape, PagesStrides, Table, pair};

use crate::wire::{DecodeError, Reader, Writer};

/// No model has more layers, and no description more words about what it means.
pub const LAYERS_MAX: usize = 1024;
const MEANINGS_MAX: usize = 64;
const WORD_BYTES_MAX: usize = 256;
/// A description travels as one message.
pub const CACHE_BYTES_MAX: usize = 48 << 10;

/// Where the blocks of a layer lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    pub name: String,
    /// Which of the worker's regions holds it.
    pub region: u32,
    /// How many tokens are packed together and cannot be told apart. The tokens of `pages` are such granules.
    pub granule: u64,
    pub pages: Pages,
}

impl Layer {
    fn heads(&self) -> &Range<u64> {
        &self.pages.shape().heads
    }
    fn block_tokens(&self) -> u64 {
        // Checked when the cache was made.
        self.granule * self.pages.shape().tokens
    }
}

/// All that one worker of an engine holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// What must be equal at both ends for the bytes to mean the same, as pairs of a name and a value.
    meaning: Vec<(String, String)>,
    rank: u32,
    ranks: u32,
    layers: Vec<Layer>,
}

/// A cache that cannot be described.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CacheError {
    #[error("a cache has 1 to {LAYERS_MAX} layers, each with a name of its own")]
    Layers,
    #[error("a cache has at most {MEANINGS_MAX} words of meaning, and no word more than {WORD_BYTES_MAX} bytes")]
    Words,
    #[error("rank {rank} of {ranks}")]
    Rank { rank: u32, ranks: u32 },
    #[error("the blocks of all layers have the same number of tokens, more than none")]
    BlockSizes,
    #[error("the description has {len} bytes, and one message carries {CACHE_BYTES_MAX}")]
    TooLong { len: usize },
    #[error(transparent)]
    Pages(#[from] PagesError),
}

/// Two ends that cannot hand blocks to each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Mismatch {
    #[error("{}", tell(.differences))]
    Meaning { differences: Vec<Difference> },
    #[error("no worker there holds head {head} of {layer}")]
    NoSuchHead { layer: String, head: u64 },
    #[error("there is no layer {layer} here")]
    NoSuchLayer { layer: String },
    #[error("{layer} packs {here} tokens together here and {there} there")]
    Granule { layer: String, here: u64, there: u64 },
    #[error("{layer}: {error}")]
    Pages { layer: String, error: PagesError },
}

/// What a word means at either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub name: String,
    pub here: String,
    pub there: String,
}

fn tell(differences: &[Difference]) -> String {
    let one = |of: &Difference| format!("{} is {:?} here and {:?} there", of.name, of.here, of.there);
    differences.iter().map(one).collect::<Vec<String>>().join("; ")
}

/// Heads of a layer that come from one of several workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pub worker: usize,
    /// By its place in the cache of whoever wants it.
    pub layer: usize,
    pub heads: Range<u64>,
}

/// Bytes of a region here and the same bytes of a region there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    pub near_region: u32,
    pub near: Spans,
    pub far_region: u32,
    pub far: Spans,
}

/// Whose tokens lie in which blocks.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    pub cache: &'a Cache,
    pub blocks: &'a [u64],
}

impl Cache {
    pub fn new(meaning: Vec<(String, String)>, rank: u32, ranks: u32, layers: Vec<Layer>) -> Result<Cache, CacheError> {
        if rank >= ranks {
            return Err(CacheError::Rank { rank, ranks });
        }
        let too_long = |word: &String| word.len() > WORD_BYTES_MAX;
        if meaning.len() > MEANINGS_MAX || meaning.iter().any(|(name, value)| too_long(name) || too_long(value)) {
            return Err(CacheError::Words);
        }
        let mut names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        if layers.is_empty() || layers.len() > LAYERS_MAX || names.len() != layers.len() {
            return Err(CacheError::Layers);
        }
        if layers.iter().any(|layer| too_long(&layer.name)) {
            return Err(CacheError::Words);
        }
        let mut sizes = layers
            .iter()
            .map(|layer| layer.granule.checked_mul(layer.pages.shape().tokens));
        let first = sizes.next().flatten().filter(|tokens| *tokens > 0);
        if first.is_none() || sizes.any(|tokens| tokens != first) {
            return Err(CacheError::BlockSizes);
        }
        let cache = Cache {
            meaning,
            rank,
            ranks,
            layers,
        };
        let len = cache.encode().len();
        match len > CACHE_BYTES_MAX {
            true => Err(CacheError::TooLong { len }),
            false => Ok(cache),
        }
    }

    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }
    pub fn ranks(&self) -> u32 {
        self.ranks
    }
    pub fn block_tokens(&self) -> u64 {
        self.layers[0].block_tokens()
    }
    pub fn find(&self, name: &str) -> Option<usize> {
        self.layers.iter().position(|layer| layer.name == name)
    }

    /// Refuses an end whose bytes mean something else, and names all that differs.
    pub fn check(&self, other: &Cache) -> Result<(), Mismatch> {
        let value = |meaning: &[(String, String)], name: &str| {
            let found = meaning.iter().find(|(known, _)| known == name);
            found.map_or_else(String::new, |(_, value)| value.clone())
        };
        let mut differences: Vec<Difference> = Vec::new();
        for (name, _) in self.meaning.iter().chain(&other.meaning) {
            let (here, there) = (value(&self.meaning, name), value(&other.meaning, name));
            if here != there && differences.iter().all(|known| known.name != *name) {
                let name = name.clone();
                differences.push(Difference { name, here, there });
            }
        }
        match differences.is_empty() {
            true => Ok(()),
            false => Err(Mismatch::Meaning { differences }),
        }
    }

    /// The same layers one after the other in a single region, each with so many blocks; and how long that region is.
    ///
    /// A landing place is laid out like this. Both ends compute it, so that nothing of it travels.
    pub fn dense(&self, blocks: u64) -> Result<(Cache, u64), CacheError> {
        self.dense_of(blocks, |_| true)
    }

    /// The same with some of the layers described, for whoever needs no others.
    pub(super) fn dense_of(&self, blocks: u64, wanted: impl Fn(u32) -> bool) -> Result<(Cache, u64), CacheError> {
        let mut base = 0u64;
        let mut layers = Vec::new();
        for (nth, layer) in (0..).zip(&self.layers) {
            let shape = PagesShape {
                blocks,
                ..layer.pages.shape().clone()
            };
            let times = |a: u64, b: u64| a.checked_mul(b).ok_or(PagesError::TooLarge);
            let token = shape.unit_bytes;
            let head = times(token, shape.tokens)?;
            let part = times(head, shape.heads.end - shape.heads.start)?;
            let block = times(part, shape.parts)?;
            let pages = Pages::with_strides(
                shape,
                PagesStrides {
                    base,
                    part,
                    block,
                    token,
                    head,
                },
            )?;
            base = pages.end();
            if wanted(nth) {
                layers.push(Layer {
                    name: layer.name.clone(),
                    region: 0,
                    granule: layer.granule,
                    pages,
                });
            }
        }
        let place = Cache {
            // Whoever writes there has compared what it means before.
            meaning: Vec::new(),
            rank: self.rank,
            ranks: self.ranks,
            layers,
        };
        Ok((place, base))
    }

    /// From which of several workers which heads come, so that every head of every layer here comes once.
    ///
    /// Where several hold a head, workers beside this one in rank are preferred to always the same one, which spreads the load.
    pub fn shares(&self, others: &[&Cache]) -> Result<Vec<Share>, Mismatch> {
        let mut order: Vec<usize> = (0..others.len()).collect();
        order.sort_by_key(|nth| nth * self.ranks as usize / others.len().max(1) != self.rank as usize);
        let mut found = Vec::new();
        for (nth, layer) in self.layers.iter().enumerate() {
            let (mut wanted, end) = (layer.heads().start, layer.heads().end);
            while wanted < end {
                let held_by = |worker: &usize| {
                    let at = others[*worker].find(&layer.name)?;
                    let held = others[*worker].layers[at].heads();
                    held.contains(&wanted).then_some((*worker, held.end))
                };
                let Some((worker, upto)) = order.iter().find_map(held_by) else {
                    let layer = layer.name.clone();
                    return Err(Mismatch::NoSuchHead { layer, head: wanted });
                };
                let upto = upto.min(end);
                found.push(Share {
                    worker,
                    layer: nth,
                    heads: wanted..upto,
                });
                wanted = upto;
            }
        }
        Ok(found)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.varint(self.meaning.len() as u64);
        for (name, value) in &self.meaning {
            w.str(name).str(value);
        }
        w.varint(self.rank.into())
            .varint(self.ranks.into())
            .varint(self.layers.len() as u64);
        for layer in &self.layers {
            let (shape, strides) = (layer.pages.shape(), layer.pages.strides());
            w.str(&layer.name).varint(layer.region.into()).varint(layer.granule);
            for number in [
                shape.blocks,
                shape.tokens,
                shape.heads.start,
                shape.heads.end,
                shape.parts,
                shape.unit_bytes,
            ] {
                w.varint(number);
            }
            for number in [strides.base, strides.part, strides.block, strides.token, strides.head] {
                w.varint(number);
            }
        }
        w.buf
    }

    pub fn decode(bytes: &[u8]) -> Result<Cache, DecodeError> {
        if bytes.len() > CACHE_BYTES_MAX {
            return Err(DecodeError::TooLong);
        }
        let mut r = Reader::new(bytes);
        let mut meaning = Vec::new();
        for _ in 0..list(&mut r, MEANINGS_MAX)? {
            meaning.push((r.str(WORD_BYTES_MAX)?.to_owned(), r.str(WORD_BYTES_MAX)?.to_owned()));
        }
        let (rank, ranks) = (r.u32()?, r.u32()?);
        let mut layers = Vec::new();
        for _ in 0..list(&mut r, LAYERS_MAX)? {
            let (name, region, granule) = (r.str(WORD_BYTES_MAX)?.to_owned(), r.u32()?, r.varint()?);
            let shape = PagesShape {
                blocks: r.varint()?,
                tokens: r.varint()?,
                heads: r.varint()?..r.varint()?,
                parts: r.varint()?,
                unit_bytes: r.varint()?,
            };
            let strides = PagesStrides {
                base: r.varint()?,
                part: r.varint()?,
                block: r.varint()?,
                token: r.varint()?,
                head: r.varint()?,
            };
            let pages = Pages::with_strides(shape, strides).map_err(|_| DecodeError::Invalid)?;
            layers.push(Layer {
                name,
                region,
                granule,
                pages,
            });
        }
        r.end()?;
        Cache::new(meaning, rank, ranks, layers).map_err(|_| DecodeError::Invalid)
    }
}

/// Which bytes here are which bytes there: of these heads of these layers, named as here, for these tokens.
///
/// Layers that are laid out alike share what is computed, which for most models is all of them.
pub fn overlaps<'a>(
    near: Sequence,
    far: Sequence,
    wanted: impl Iterator<Item = (&'a str, Range<u64>)>,
    tokens: Range<u64>,
) -> Result<Vec<Overlap>, Mismatch> {
    type Known<'k> = (&'k Pages, &'k Pages, u64, Range<u64>, Spans, Spans);
    let mut known: Vec<Known> = Vec::new();
    let mut found = Vec::new();
    for (name, heads) in wanted {
        let of = |cache: &Cache| {
            let layer = name.to_owned();
            cache.find(name).ok_or(Mismatch::NoSuchLayer { layer })
        };
        let (here, there) = (&near.cache.layers[of(near.cache)?], &far.cache.layers[of(far.cache)?]);
        if here.granule != there.granule {
            let (layer, here, there) = (name.to_owned(), here.granule, there.granule);
            return Err(Mismatch::Granule { layer, here, there });
        }
        let same = |k: &&Known| (k.0, k.1, k.2, &k.3) == (&here.pages, &there.pages, here.granule, &heads);
        let (near_spans, far_spans) = match known.iter().find(same) {
            Some((.., near, far)) => (near.clone(), far.clone()),
            None => {
                let granules = tokens.start / here.granule..tokens.end.div_ceil(here.granule);
                let (near, far) = pair(
                    Table {
                        pages: &here.pages,
                        blocks: near.blocks,
                    },
                    Table {
                        pages: &there.pages,
                        blocks: far.blocks,
                    },
                    granules,
                    heads.clone(),
                )
                .map_err(|error| Mismatch::Pages {
                    layer: name.to_owned(),
                    error,
                })?;
                known.push((
                    &here.pages,
                    &there.pages,
                    here.granule,
                    heads,
                    near.clone(),
                    far.clone(),
                ));
                (near, far)
            }
        };
        found.push(Overlap {
            near_region: here.region,
            near: near_spans,
            far_region: there.region,
            far: far_spans,
        });
    }
    Ok(found)
}

/// The length of a list, each entry of which takes a byte at least.
pub(super) fn list(r: &mut Reader, max: usize) -> Result<usize, DecodeError> {
    let len = usize::try_from(r.varint()?).map_err(|_| DecodeError::Overflow)?;
    match len > max || len > r.remaining() {
        true => Err(DecodeError::TooLong),
        false => Ok(len),
    }
}
