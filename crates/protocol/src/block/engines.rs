//! Names that engines give to blocks, computed from tokens, so that a router or a warm-up can ask for a prefix before the engine does.

use sha2::{Digest, Sha256};

/// vLLM's hash of a block under `sha256_cbor`: SHA-256 over canonical CBOR of (hash of the block before, tokens, extra keys).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VllmHash(pub [u8; 32]);

/// What vLLM puts into a hash besides tokens: a LoRA's name, a salt, digests of images with where they stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extra {
    Text(String),
    Bytes(Vec<u8>),
    Int(i64),
    Tuple(Vec<Extra>),
}

impl VllmHash {
    /// The hash that stands before the first block, of an engine that was started with this `PYTHONHASHSEED`.
    pub fn root(seed: &str) -> VllmHash {
        let mut cbor = Vec::with_capacity(seed.len() + 9);
        encode_text(&mut cbor, seed);
        VllmHash(Sha256::digest(&cbor).into())
    }

    /// The block after this one. Without extra keys vLLM writes `None`, which is not the same as none of them.
    pub fn next(&self, tokens: &[u32], extra: Option<&[Extra]>) -> VllmHash {
        let mut cbor = Vec::with_capacity(64 + 5 * tokens.len());
        head(&mut cbor, ARRAY, 3);
        head(&mut cbor, BYTES, 32);
        cbor.extend_from_slice(&self.0);
        head(&mut cbor, ARRAY, tokens.len() as u64);
        for token in tokens {
            head(&mut cbor, UNSIGNED, u64::from(*token));
        }
        match extra {
            None => cbor.push(NULL),
            Some(extra) => encode_tuple(&mut cbor, extra),
        }
        VllmHash(Sha256::digest(&cbor).into())
    }

    /// What vLLM's offloading calls the block of one KV cache group: the hash, and the group's number.
    pub fn offload_key(&self, group: u32) -> [u8; 36] {
        let mut key = [0; 36];
        key[..32].copy_from_slice(&self.0);
        key[32..].copy_from_slice(&group.to_be_bytes());
        key
    }
}

// Major types of CBOR (RFC 8949), and the one simple value that is needed.
const UNSIGNED: u8 = 0;
const NEGATIVE: u8 = 1;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const NULL: u8 = 0xf6;

/// The shortest form of a type and its number, which is the canonical one.
fn head(to: &mut Vec<u8>, major: u8, number: u64) {
    let kind = major << 5;
    match number {
        0..=23 => to.push(kind | number as u8),
        24..=0xff => to.extend([kind | 24, number as u8]),
        0x100..=0xffff => {
            to.push(kind | 25);
            to.extend((number as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            to.push(kind | 26);
            to.extend((number as u32).to_be_bytes());
        }
        _ => {
            to.push(kind | 27);
            to.extend(number.to_be_bytes());
        }
    }
}

fn encode_text(to: &mut Vec<u8>, text: &str) {
    head(to, TEXT, text.len() as u64);
    to.extend(text.as_bytes());
}

fn encode_tuple(to: &mut Vec<u8>, items: &[Extra]) {
    head(to, ARRAY, items.len() as u64);
    for item in items {
        match item {
            Extra::Text(text) => encode_text(to, text),
            Extra::Bytes(bytes) => {
                head(to, BYTES, bytes.len() as u64);
                to.extend(bytes);
            }
            Extra::Int(number) if *number < 0 => head(to, NEGATIVE, !*number as u64),
            Extra::Int(number) => head(to, UNSIGNED, *number as u64),
            Extra::Tuple(items) => encode_tuple(to, items),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(hash: VllmHash) -> String {
        hash.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    // The values come from Python, with the package cbor2:
    //   h = lambda o: hashlib.sha256(cbor2.dumps(o, canonical=True)).digest()
    //   root = h("42"); a = h((root, tuple(range(16)), None))
    //   b = h((a, (23, 24, 255, 256, 65535, 65536, 151935, 4294967295, 0, …, 7), ("lora-a", ("salt", 7), b"\x01\x02", -5))); c = h((b, (), ()))
    #[test]
    fn the_chain_is_the_one_that_python_computes() {
        let zero = VllmHash::root("0");
        assert_eq!(
            hex(zero),
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
        );
        let root = VllmHash::root("42");
        assert_eq!(
            hex(root),
            "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780"
        );
        let first: Vec<u32> = (0..16).collect();
        let a = root.next(&first, None);
        assert_eq!(
            hex(a),
            "63876f948a5f9ef88191c7d6554fbeeea5c622d4da15d0d527bd352623590b0d"
        );
        let mut tokens = vec![23, 24, 255, 256, 65535, 65536, 151_935, u32::MAX];
        tokens.extend(0..8);
        let extra = [
            Extra::Text("lora-a".into()),
            Extra::Tuple(vec![Extra::Text("salt".into()), Extra::Int(7)]),
            Extra::Bytes(vec![1, 2]),
            Extra::Int(-5),
        ];
        let b = a.next(&tokens, Some(&extra));
        assert_eq!(
            hex(b),
            "a47ee1c653ae134eb2d28d3eec811008c238125146c98d54a4393997a9c9cc8d"
        );
        let c = b.next(&[], Some(&[]));
        assert_eq!(
            hex(c),
            "203a0b85091b3d55ad9383e5aa3f09f75233df23d69d82087b6154ef55c49bf0"
        );
    }

    #[test]
    fn no_extra_keys_and_an_empty_tuple_of_them_differ() {
        let root = VllmHash::root("0");
        assert_ne!(root.next(&[1], None), root.next(&[1], Some(&[])));
    }

    #[test]
    fn a_key_is_the_hash_and_the_group_with_its_high_byte_first() {
        let key = VllmHash([9; 32]).offload_key(258);
        assert_eq!(key[31..], [9, 0, 0, 1, 2]);
    }
}
