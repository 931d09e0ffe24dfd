//! Names: what must be equal for a block to be the right one, and nothing cut off.

use std::fmt;

use thiserror::Error;

/// A foreign key may be this long: the keys that engines build from strings carry a model, a rank and 64 digits.
pub const KEY_BYTES_MAX: usize = 1024;

const NAMESPACE_CONTEXT: &str = "weft block namespace, version 1";
const VALUE_BYTES_MAX: usize = 4096;
const BLOCK_TOKENS_MAX: u32 = 1 << 20;

/// What KV depends on besides the tokens. Caches that leave one of these out have served wrong bytes as hits, so none has a default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Field {
    Model,
    /// Of the weights: a commit, a digest, a training step.
    Revision,
    Tokenizer,
    /// Of the keys and values as they are stored.
    Dtype,
    Quantisation,
    /// A digest of the quantisation's scales, or `none`.
    Scales,
    /// The order of heads, tokens and elements at rest.
    Layout,
    BlockTokens,
    Lora,
    /// The positional scheme with its parameters.
    Positions,
    Tenant,
}

impl Field {
    pub const ALL: [Field; 11] = [
        Field::Model,
        Field::Revision,
        Field::Tokenizer,
        Field::Dtype,
        Field::Quantisation,
        Field::Scales,
        Field::Layout,
        Field::BlockTokens,
        Field::Lora,
        Field::Positions,
        Field::Tenant,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Field::Model => "model",
            Field::Revision => "revision",
            Field::Tokenizer => "tokenizer",
            Field::Dtype => "dtype",
            Field::Quantisation => "quantisation",
            Field::Scales => "scales",
            Field::Layout => "layout",
            Field::BlockTokens => "block_tokens",
            Field::Lora => "lora",
            Field::Positions => "positions",
            Field::Tenant => "tenant",
        }
    }

    fn named(name: &str) -> Result<Field, NameError> {
        let same = |field: &Field| field.name() == name;
        Field::ALL.into_iter().find(same).ok_or_else(|| {
            let shown: String = name.chars().take(80).collect();
            let likeness = |field: &Field| strsim::normalized_damerau_levenshtein(field.name(), &shown);
            let nearest = Field::ALL
                .into_iter()
                .max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
                .expect("there are fields");
            NameError::UnknownField { name: shown, nearest }
        })
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that cannot be: fix the call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NameError {
    #[error("a namespace needs the field `{field}`; where there is nothing to say, say `none`")]
    MissingField { field: Field },
    #[error("a namespace has no field `{name}`; the nearest is `{nearest}`")]
    UnknownField { name: String, nearest: Field },
    #[error("the field `{field}` is given twice")]
    TwiceGiven { field: Field },
    #[error("the field `{field}` has {bytes} bytes; at most {VALUE_BYTES_MAX} are taken")]
    LongValue { field: Field, bytes: usize },
    #[error("a block has between 1 and {BLOCK_TOKENS_MAX} tokens, not `{value}`")]
    BlockTokens { value: String },
    #[error("a key has between 1 and {KEY_BYTES_MAX} bytes, not {bytes}; keys are never cut")]
    KeyLength { bytes: usize },
}

/// A digest of everything that KV depends on besides the tokens. Blocks of different namespaces never meet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace([u8; 32]);

impl Namespace {
    /// Takes the fields in any order. One that is missing, empty, unknown or given twice is a refusal: nothing is guessed.
    pub fn from_fields<'a>(fields: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Namespace, NameError> {
        let mut values: [Option<&str>; Field::ALL.len()] = [None; Field::ALL.len()];
        for (name, value) in fields {
            let field = Field::named(name)?;
            if value.len() > VALUE_BYTES_MAX {
                let bytes = value.len();
                return Err(NameError::LongValue { field, bytes });
            }
            if values[field as usize].replace(value).is_some() {
                return Err(NameError::TwiceGiven { field });
            }
        }
        let mut hasher = blake3::Hasher::new_derive_key(NAMESPACE_CONTEXT);
        for field in Field::ALL {
            let value = values[field as usize].filter(|value| !value.trim().is_empty());
            let value = value.ok_or(NameError::MissingField { field })?;
            let number;
            let value = match field {
                // `016` and `16` are one size.
                Field::BlockTokens => {
                    number = block_tokens(value)?.to_string();
                    &number
                }
                _ => value,
            };
            // Lengths go in first, so that no two lists of values are the same bytes.
            hasher.update(&(value.len() as u64).to_le_bytes());
            hasher.update(value.as_bytes());
        }
        Ok(Namespace(*hasher.finalize().as_bytes()))
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

fn block_tokens(value: &str) -> Result<u32, NameError> {
    let parsed = value
        .parse()
        .ok()
        .filter(|tokens| (1..=BLOCK_TOKENS_MAX).contains(tokens));
    parsed.ok_or_else(|| NameError::BlockTokens {
        value: value.chars().take(80).collect(),
    })
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({:032x})", u128::from_be_bytes(first_half(&self.0)))
    }
}

/// A block and everything before it: 128 bits of a keyed hash, so that tenants can neither guess nor force equal ones. Never zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId([u8; 16]);

// What is hashed begins with its kind, so that a key cannot pass for tokens.
const FIRST: u8 = 0;
const FURTHER: u8 = 1;
const FOREIGN: u8 = 2;

impl BlockId {
    /// The block of these tokens after `parent`, or at the beginning.
    pub fn of_tokens(namespace: &Namespace, parent: Option<BlockId>, tokens: &[u32]) -> BlockId {
        let mut hasher = blake3::Hasher::new_keyed(&namespace.0);
        match parent {
            None => hasher.update(&[FIRST]),
            Some(parent) => hasher.update(&[FURTHER]).update(&parent.0),
        };
        let mut bytes = [0; 256];
        for piece in tokens.chunks(bytes.len() / 4) {
            for (to, token) in bytes.chunks_exact_mut(4).zip(piece) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * piece.len()]);
        }
        BlockId::from_digest(hasher.finalize().as_bytes())
    }

    /// The block that an engine calls by a key of its own, whatever is in it.
    pub fn of_key(namespace: &Namespace, key: &[u8]) -> Result<BlockId, NameError> {
        if !(1..=KEY_BYTES_MAX).contains(&key.len()) {
            return Err(NameError::KeyLength { bytes: key.len() });
        }
        let mut hasher = blake3::Hasher::new_keyed(&namespace.0);
        hasher.update(&[FOREIGN]).update(key);
        Ok(BlockId::from_digest(hasher.finalize().as_bytes()))
    }

    /// Ids of a whole prompt, one a full block; tokens that fill no block have none.
    pub fn chain(namespace: &Namespace, tokens: &[u32], block_tokens: usize) -> Vec<BlockId> {
        let mut parent = None;
        let blocks = tokens.chunks_exact(block_tokens.max(1));
        let id = |piece| *parent.insert(BlockId::of_tokens(namespace, parent, piece));
        blocks.map(id).collect()
    }

    pub fn from_bytes(bytes: [u8; 16]) -> BlockId {
        BlockId(bytes)
    }

    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    fn from_digest(digest: &[u8; 32]) -> BlockId {
        let id = first_half(digest);
        // Zero means "nothing here" in files.
        BlockId(if id == [0; 16] { [1; 16] } else { id })
    }

    /// Bits that tables begin to look at.
    pub(super) fn hash(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().expect("eight bytes"))
    }

    /// Bits that have no part in [`BlockId::hash`], for whatever must not depend on it.
    pub(super) fn other_hash(&self) -> u64 {
        u64::from_le_bytes(self.0[8..].try_into().expect("eight bytes"))
    }
}

fn first_half(digest: &[u8; 32]) -> [u8; 16] {
    digest[..16].try_into().expect("a digest has two halves")
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [(&str, &str); 11] = [
        ("model", "m"),
        ("revision", "r"),
        ("tokenizer", "t"),
        ("dtype", "bf16"),
        ("quantisation", "none"),
        ("scales", "none"),
        ("layout", "nhd"),
        ("block_tokens", "16"),
        ("lora", "none"),
        ("positions", "rope"),
        ("tenant", "a"),
    ];

    #[test]
    fn every_field_counts_and_their_order_does_not() {
        let whole = Namespace::from_fields(FIELDS).unwrap();
        assert_eq!(Namespace::from_fields(FIELDS.into_iter().rev()).unwrap(), whole);
        for at in 0..FIELDS.len() {
            let mut other = FIELDS;
            other[at].1 = "17";
            assert_ne!(Namespace::from_fields(other).unwrap(), whole, "{}", FIELDS[at].0);
        }
        let mut same = FIELDS;
        same[7].1 = "016";
        assert_eq!(Namespace::from_fields(same).unwrap(), whole);
    }

    #[test]
    fn what_is_left_out_empty_misspelt_or_given_twice_is_refused_by_name() {
        for at in 0..FIELDS.len() {
            let mut fields = FIELDS.to_vec();
            fields.remove(at);
            let field = Field::ALL[at];
            assert_eq!(Namespace::from_fields(fields), Err(NameError::MissingField { field }));
            let mut fields = FIELDS;
            fields[at].1 = " ";
            assert_eq!(Namespace::from_fields(fields), Err(NameError::MissingField { field }));
            let mut fields = FIELDS.to_vec();
            fields.push(FIELDS[at]);
            assert_eq!(Namespace::from_fields(fields), Err(NameError::TwiceGiven { field }));
        }
        let mut fields = FIELDS;
        fields[3].0 = "dtypes";
        let error = Namespace::from_fields(fields).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a namespace has no field `dtypes`; the nearest is `dtype`"
        );
        for tokens in ["0", "-1", "sixteen", "99999999"] {
            let mut fields = FIELDS;
            fields[7].1 = tokens;
            let value = tokens.to_string();
            assert_eq!(Namespace::from_fields(fields), Err(NameError::BlockTokens { value }));
        }
    }

    #[test]
    fn values_do_not_run_into_each_other() {
        let (mut left, mut right) = (FIELDS, FIELDS);
        (left[0].1, left[1].1) = ("ab", "c");
        (right[0].1, right[1].1) = ("a", "bc");
        assert_ne!(Namespace::from_fields(left), Namespace::from_fields(right));
    }

    #[test]
    fn ids_depend_on_namespace_parent_tokens_and_kind() {
        let here = Namespace::from_fields(FIELDS).unwrap();
        let mut fields = FIELDS;
        fields[10].1 = "b";
        let there = Namespace::from_fields(fields).unwrap();
        let id = BlockId::of_tokens(&here, None, &[1, 2]);
        assert_ne!(id, BlockId::of_tokens(&there, None, &[1, 2]));
        assert_ne!(id, BlockId::of_tokens(&here, Some(id), &[1, 2]));
        assert_ne!(id, BlockId::of_tokens(&here, None, &[1, 3]));
        let key = [1u32, 2].map(u32::to_le_bytes).concat();
        assert_ne!(id, BlockId::of_key(&here, &key).unwrap());
        let long: Vec<u32> = (0..1000).collect();
        let chain = BlockId::chain(&here, &long, 300);
        assert_eq!(chain.len(), 3);
        assert_eq!(chain[1], BlockId::of_tokens(&here, Some(chain[0]), &long[300..600]));
    }

    #[test]
    fn ids_are_the_first_half_of_the_keyed_hash_that_others_compute() {
        let namespace = Namespace([7; 32]);
        let whole = blake3::keyed_hash(&[7; 32], &[0, 5, 0, 0, 0, 6, 0, 0, 0]);
        assert_eq!(
            BlockId::of_tokens(&namespace, None, &[5, 6]).as_bytes(),
            &whole.as_bytes()[..16]
        );
        let many: Vec<u32> = (0..500).collect();
        let mut bytes = vec![0];
        bytes.extend(many.iter().flat_map(|token| token.to_le_bytes()));
        let whole = blake3::keyed_hash(&[7; 32], &bytes);
        assert_eq!(
            BlockId::of_tokens(&namespace, None, &many).as_bytes(),
            &whole.as_bytes()[..16]
        );
    }

    #[test]
    fn keys_are_taken_whole_or_not_at_all() {
        let namespace = Namespace::from_fields(FIELDS).unwrap();
        let mut key = vec![3; KEY_BYTES_MAX];
        let id = BlockId::of_key(&namespace, &key).unwrap();
        *key.last_mut().unwrap() = 4;
        assert_ne!(BlockId::of_key(&namespace, &key).unwrap(), id, "the last byte counts");
        key.push(0);
        let bytes = KEY_BYTES_MAX + 1;
        assert_eq!(BlockId::of_key(&namespace, &key), Err(NameError::KeyLength { bytes }));
        assert_eq!(BlockId::of_key(&namespace, &[]), Err(NameError::KeyLength { bytes: 0 }));
    }
}
