//! Dimensions of memory by their strides, however they are nested.

/// How dimensions do not fit into each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misfit {
    Overlap {
        dimension: &'static str,
        stride: u64,
        extent: u64,
    },
    TooLarge,
}

/// How many bytes dimensions of a name, a stride and a count take, around units of so many bytes. From the innermost out, each must step over all
/// that lies within it. A count of one never steps.
pub(crate) fn extent<const N: usize>(
    unit_bytes: u64,
    mut dimensions: [(&'static str, u64, u64); N],
) -> Result<u64, Misfit> {
    dimensions.sort_by_key(|&(_, stride, count)| if count == 1 { 0 } else { stride });
    let mut extent = unit_bytes;
    for (dimension, stride, count) in dimensions {
        if count == 1 {
            continue;
        }
        if stride < extent {
            return Err(Misfit::Overlap {
                dimension,
                stride,
                extent,
            });
        }
        let last = stride.checked_mul(count - 1);
        extent = last.and_then(|last| last.checked_add(extent)).ok_or(Misfit::TooLarge)?;
    }
    Ok(extent)
}
