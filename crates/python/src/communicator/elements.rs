//! What a Python object holds: bytes, and of which type; and by which name a reduction goes.

use std::sync::{Arc, LazyLock};

use pyo3::prelude::*;
use pyo3::types::PyMemoryView;
use weft::{Datatype, Function, HostMemory, Operator, Part, Reduction};

use super::request::nothing;
use crate::errors::invalid;
use crate::memory::{Memory, of_object};

pub struct Elements {
    pub part: Part,
    pub datatype: Datatype,
}

impl Elements {
    pub fn nothing() -> Elements {
        Elements {
            part: nothing(),
            datatype: Datatype::U8,
        }
    }

    pub fn maybe(object: Option<&Bound<'_, PyAny>>, datatype: Option<&str>, writable: bool) -> PyResult<Elements> {
        object.map_or_else(
            || Ok(Elements::nothing()),
            |object| Elements::of(object, datatype, writable),
        )
    }

    /// The elements of registered memory, or of anything with the buffer protocol or DLPack.
    pub fn of(object: &Bound<'_, PyAny>, datatype: Option<&str>, writable: bool) -> PyResult<Elements> {
        let datatype = match datatype {
            Some(name) => name
                .parse()
                .map_err(|error: weft::UnknownDatatype| invalid(error.to_string()))?,
            None => datatype_of(object)?,
        };
        if let Ok(memory) = object.cast::<Memory>() {
            let memory = memory.get();
            if writable && !memory.writable {
                return Err(invalid("this memory is read-only, so nothing can be received into it"));
            }
            let part = Part::from(&memory.inner);
            return Ok(Elements { part, datatype });
        }
        let shared = of_object(object, writable)?;
        // SAFETY: the owner keeps the memory where it is until it is dropped, which the call does last. Python objects hand
        // their memory out to many at once, so nobody holds a Rust reference to it.
        let host = unsafe { HostMemory::from_raw(shared.start, shared.len, Box::new(shared.owner)) };
        Ok(Elements {
            part: host.into(),
            datatype,
        })
    }
}

/// What the object says of its elements. Memory that says nothing holds bytes.
fn datatype_of(object: &Bound<'_, PyAny>) -> PyResult<Datatype> {
    if object.is_instance_of::<Memory>() {
        return Ok(Datatype::U8);
    }
    // Arrays and tensors of every library name their elements alike.
    if let Ok(dtype) = object.getattr("dtype") {
        let name = dtype.str()?.to_string();
        let known = by_dtype(name.strip_prefix("torch.").unwrap_or(&name));
        return known.ok_or_else(|| invalid(format!("elements of {name} are not known: name a datatype")));
    }
    let Ok(view) = PyMemoryView::from(object) else {
        return Ok(Datatype::U8);
    };
    let format: String = view.getattr("format")?.extract()?;
    let size: usize = view.getattr("itemsize")?.extract()?;
    by_format(&format, size).ok_or_else(|| invalid(format!("elements of format {format:?} are not known")))
}

fn by_dtype(name: &str) -> Option<Datatype> {
    Some(match name {
        "float64" => Datatype::F64,
        "float32" => Datatype::F32,
        "float16" => Datatype::F16,
        "bfloat16" => Datatype::Bf16,
        "float8_e4m3fn" => Datatype::Fp8E4m3,
        "float8_e5m2" => Datatype::Fp8E5m2,
        "int8" => Datatype::I8,
        "int16" => Datatype::I16,
        "int32" => Datatype::I32,
        "int64" => Datatype::I64,
        "uint8" | "bool" => Datatype::U8,
        "uint16" => Datatype::U16,
        "uint32" => Datatype::U32,
        "uint64" => Datatype::U64,
        _ => return None,
    })
}

/// A format of Python's `struct` of one element in the byte order of this machine.
fn by_format(format: &str, size: usize) -> Option<Datatype> {
    let native = if cfg!(target_endian = "little") { '<' } else { '>' };
    let letter = format.trim_start_matches(['@', '=', native]);
    Some(match (letter, size) {
        ("d", 8) => Datatype::F64,
        ("f", 4) => Datatype::F32,
        ("e", 2) => Datatype::F16,
        ("b", 1) => Datatype::I8,
        ("B" | "c" | "?", 1) => Datatype::U8,
        ("h", 2) => Datatype::I16,
        ("H", 2) => Datatype::U16,
        ("i" | "l", 4) => Datatype::I32,
        ("I" | "L", 4) => Datatype::U32,
        ("q" | "l", 8) => Datatype::I64,
        ("Q" | "L", 8) => Datatype::U64,
        _ => return None,
    })
}

/// Reductions of bits, which are the same for all types.
#[derive(Debug)]
struct Bits {
    combine: fn(u8, u8) -> u8,
}

impl Function for Bits {
    fn combine(&self, into: &mut [u8], from: &[u8]) {
        for (into, from) in into.iter_mut().zip(from) {
            *into = (self.combine)(*into, *from);
        }
    }
}

/// What is there beside the built-in reductions. Each is made once, because calls are told apart by where their function lies.
static BITS: LazyLock<[(&str, Arc<dyn Function>); 3]> = LazyLock::new(|| {
    [
        ("band", Arc::new(Bits { combine: |a, b| a & b })),
        ("bor", Arc::new(Bits { combine: |a, b| a | b })),
        ("bxor", Arc::new(Bits { combine: |a, b| a ^ b })),
    ]
});

pub fn operator(name: &str) -> PyResult<Operator> {
    if let Ok(reduction) = name.parse::<Reduction>() {
        return Ok(reduction.into());
    }
    let bits = BITS.iter().find(|(known, _)| *known == name);
    let (_, function) = bits.ok_or_else(|| {
        invalid(format!(
            "{name:?} is no reduction: there are sum, prod, min, max, avg, band, bor and bxor"
        ))
    })?;
    Ok(Operator::from(function.clone()))
}

/// The names of all of them, in the order of their numbers.
pub fn operator_names() -> impl Iterator<Item = &'static str> {
    let named = Reduction::ALL.into_iter().map(Reduction::name);
    named.chain(BITS.iter().map(|(name, _)| *name))
}

/// By number: the built-in ones in their order, then those of bits.
pub fn numbered_operator(number: usize) -> Option<Operator> {
    match Reduction::ALL.get(number) {
        Some(reduction) => Some((*reduction).into()),
        None => {
            let (_, function) = BITS.get(number - Reduction::ALL.len())?;
            Some(Operator::from(function.clone()))
        }
    }
}
