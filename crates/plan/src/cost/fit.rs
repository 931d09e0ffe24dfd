//! A link's cost from measurements of it.
//!
//! Transfers span from nanoseconds to seconds, so it is the relative error whose squares are minimised: the smallest transfer
//! counts as much as the largest. Costs below zero are not costs, so that the minimum is sought among those that are not.

use thiserror::Error;

use super::LinkCost;
use crate::units::{Bandwidth, Bytes, Picos};

/// How long one transfer took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    pub bytes: Bytes,
    pub spans: u64,
    pub time: Picos,
}

/// The cost that explains the measurements best, and how well it does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    pub cost: LinkCost,
    /// `|predicted - measured| / measured`, over all measurements.
    pub mean_relative_error: f64,
    pub worst_relative_error: f64,
}

/// Measurements that determine no cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FitError {
    #[error("{given} measurements; a cost needs at least {needed}")]
    TooFew { given: usize, needed: usize },
    #[error("measurement {index} took no time at all")]
    NoTime { index: usize },
    #[error("all transfers are of one size, which tells latency and bandwidth not apart")]
    OneSize,
}

/// Fits a cost to measurements. Where all transfers have as many spans, what a span costs is counted as latency.
///
/// ```
/// use weft_plan::cost::{Measurement, fit};
/// use weft_plan::{Bandwidth, Bytes, LinkCost, Picos};
/// let cost = LinkCost {
///     latency: Picos::from_us(3),
///     per_span: Picos::from_ns(50),
///     bandwidth: Bandwidth::from_gigabytes_per_sec(8.0),
/// };
/// let measured = [(4096, 1), (4096 * 64, 64), (1 << 20, 1), (1 << 26, 1024)]
///     .map(|(bytes, spans)| Measurement { bytes: Bytes(bytes), spans, time: cost.time(Bytes(bytes), spans) });
/// let fit = fit(&measured)?;
/// assert!(fit.worst_relative_error < 1e-3);
/// # Ok::<(), weft_plan::cost::FitError>(())
/// ```
pub fn fit(measurements: &[Measurement]) -> Result<Fit, FitError> {
    const NEEDED: usize = 2;
    if measurements.len() < NEEDED {
        return Err(FitError::TooFew {
            given: measurements.len(),
            needed: NEEDED,
        });
    }
    if let Some(index) = measurements.iter().position(|m| m.time == Picos::ZERO) {
        return Err(FitError::NoTime { index });
    }
    if measurements.iter().all(|m| m.bytes == measurements[0].bytes) {
        return Err(FitError::OneSize);
    }

    let [latency, per_span, per_byte] = least_squares(measurements);
    let cost = LinkCost {
        latency: Picos::from_ps(latency.round() as u64),
        per_span: Picos::from_ps(per_span.round() as u64),
        bandwidth: if per_byte > 0.0 {
            // A float that does not fit becomes the largest integer.
            Bandwidth::from_bytes_per_sec((1e12 / per_byte).round().max(1.0) as u64)
        } else {
            Bandwidth::MAX
        },
    };
    let errors = measurements.iter().map(|m| {
        let (measured, predicted) = (m.time.as_ps() as f64, cost.time(m.bytes, m.spans).as_ps() as f64);
        (predicted - measured).abs() / measured
    });
    Ok(Fit {
        cost,
        mean_relative_error: errors.clone().sum::<f64>() / measurements.len() as f64,
        worst_relative_error: errors.fold(0.0, f64::max),
    })
}

/// Picoseconds of latency, per span and per byte.
///
/// Of the eight choices of which terms are zero, the best among those whose other terms come out positive is the minimum
/// over all costs that are not negative: with three terms, trying all is both exact and shortest.
fn least_squares(measurements: &[Measurement]) -> [f64; 3] {
    // Divided by the time, each row reads "predicted / measured = 1"; divided by its largest entry, no column drowns another.
    let mut rows: Vec<[f64; 3]> = measurements
        .iter()
        .map(|m| {
            let time = m.time.as_ps() as f64;
            [1.0 / time, m.spans as f64 / time, m.bytes.0 as f64 / time]
        })
        .collect();
    let mut scale = [0.0f64; 3];
    for row in &rows {
        (0..3).for_each(|k| scale[k] = scale[k].max(row[k]));
    }
    for row in &mut rows {
        (0..3).filter(|&k| scale[k] > 0.0).for_each(|k| row[k] /= scale[k]);
    }

    let loss = |x: &[f64; 3]| -> f64 {
        let residual = |row: &[f64; 3]| (0..3).map(|k| row[k] * x[k]).sum::<f64>() - 1.0;
        rows.iter().map(|row| residual(row).powi(2)).sum()
    };
    // Fewer terms come first and a later choice must be clearly better, so that terms that nothing tells apart stay out:
    // latency before the cost of a span.
    let choices: [&[usize]; 7] = [&[2], &[0], &[1], &[0, 2], &[1, 2], &[0, 1], &[0, 1, 2]];
    let mut best = ([0.0; 3], f64::INFINITY);
    for terms in choices {
        if let Some(x) = solve(&rows, terms)
            && x.iter().all(|v| *v >= 0.0)
        {
            let loss = loss(&x);
            if loss < best.1 * (1.0 - 1e-9) - 1e-15 * rows.len() as f64 || best.1.is_infinite() {
                best = (x, loss);
            }
        }
    }
    let x = best.0;
    std::array::from_fn(|k| if scale[k] > 0.0 { x[k] / scale[k] } else { 0.0 })
}

/// The least squares over some of the terms by the normal equations; `None` where the rows do not tell them apart.
fn solve(rows: &[[f64; 3]], terms: &[usize]) -> Option<[f64; 3]> {
    let n = terms.len();
    let mut matrix = [[0.0f64; 4]; 3];
    for row in rows {
        for (i, &a) in terms.iter().enumerate() {
            for (j, &b) in terms.iter().enumerate() {
                matrix[i][j] += row[a] * row[b];
            }
            matrix[i][3] += row[a];
        }
    }
    let diagonal: [f64; 3] = std::array::from_fn(|i| matrix[i][i]);
    for pivot in 0..n {
        // The matrix is symmetric and positive, so that the diagonal is the pivot; what elimination leaves of it is how far
        // the term is independent of those before.
        if matrix[pivot][pivot] <= 1e-12 * diagonal[pivot] || diagonal[pivot] == 0.0 {
            return None;
        }
        for below in pivot + 1..n {
            let factor = matrix[below][pivot] / matrix[pivot][pivot];
            let upper = matrix[pivot];
            matrix[below].iter_mut().zip(upper).for_each(|(v, u)| *v -= factor * u);
        }
    }
    let mut x = [0.0; 3];
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| matrix[i][j] * x[terms[j]]).sum();
        x[terms[i]] = (matrix[i][3] - known) / matrix[i][i];
    }
    Some(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grid(cost: LinkCost) -> Vec<Measurement> {
        let mut list = Vec::new();
        for span_bytes in [64u64, 4096, 65536, 1 << 20] {
            for spans in [1u64, 8, 64, 1024] {
                let bytes = Bytes(span_bytes * spans);
                list.push(Measurement {
                    bytes,
                    spans,
                    time: cost.time(bytes, spans),
                });
            }
        }
        list
    }

    fn cost(latency_ns: u64, per_span_ns: u64, megabytes_per_sec: u64) -> LinkCost {
        LinkCost {
            latency: Picos::from_ns(latency_ns),
            per_span: Picos::from_ns(per_span_ns),
            bandwidth: Bandwidth::from_bytes_per_sec(megabytes_per_sec * 1_000_000),
        }
    }

    fn near(a: u64, b: u64, relative: f64) -> bool {
        a.abs_diff(b) as f64 <= relative * b as f64 + 2_000.0
    }

    proptest! {
        #[test]
        fn exact_measurements_give_the_cost_back(latency in 1u64..100_000, per_span in 0u64..2_000, rate in 100u64..200_000) {
            let truth = cost(latency, per_span, rate);
            let fit = fit(&grid(truth)).unwrap();
            prop_assert!(fit.worst_relative_error < 1e-3, "{fit:?}");
            prop_assert!(near(fit.cost.latency.as_ps(), truth.latency.as_ps(), 0.01), "{fit:?}");
            prop_assert!(near(fit.cost.bandwidth.bytes_per_sec(), truth.bandwidth.bytes_per_sec(), 0.01), "{fit:?}");
        }

        #[test]
        fn noise_moves_the_cost_no_further_than_itself(
            latency in 1_000u64..50_000, per_span in 10u64..500, rate in 1_000u64..50_000,
            noise in prop::collection::vec(-50i64..50, 16),
        ) {
            let mut list = grid(cost(latency, per_span, rate));
            for (m, thousandths) in list.iter_mut().zip(noise) {
                m.time = Picos::from_ps((m.time.as_ps() as f64 * (1.0 + thousandths as f64 / 1000.0)) as u64);
            }
            prop_assert!(fit(&list).unwrap().mean_relative_error < 0.06);
        }

        #[test]
        fn any_measurements_give_a_cost_or_a_reason(list in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), 0u32..64), 0..12)) {
            let list: Vec<Measurement> = list.into_iter()
                .map(|(bytes, spans, ps, shift)| Measurement { bytes: Bytes(bytes >> shift), spans: spans >> shift, time: Picos::from_ps(ps >> shift) })
                .collect();
            if let Ok(fit) = fit(&list) {
                prop_assert!(fit.cost.bandwidth > Bandwidth::default());
            }
        }
    }

    #[test]
    fn one_span_each_counts_as_latency() {
        let truth = cost(1_000, 100, 10_000);
        let list: Vec<Measurement> = grid(truth).into_iter().filter(|m| m.spans == 1).collect();
        let fit = fit(&list).unwrap();
        assert_eq!(fit.cost.per_span, Picos::ZERO);
        assert!(near(fit.cost.latency.as_ps(), 1_100_000, 0.01), "{fit:?}");
    }

    #[test]
    fn no_cost_is_negative() {
        // Larger transfers that took less time than smaller ones: no bandwidth explains that.
        let list = [(4096, 20), (8192, 15), (16384, 10)].map(|(bytes, us)| Measurement {
            bytes: Bytes(bytes),
            spans: 1,
            time: Picos::from_us(us),
        });
        let fit = fit(&list).unwrap();
        assert_eq!(fit.cost.bandwidth, Bandwidth::MAX);
        assert!(fit.cost.latency > Picos::from_us(10) && fit.cost.latency < Picos::from_us(20));
    }

    #[test]
    fn too_little_is_an_error() {
        let one = Measurement {
            bytes: Bytes(1),
            spans: 1,
            time: Picos::from_ns(1),
        };
        assert_eq!(fit(&[one]), Err(FitError::TooFew { given: 1, needed: 2 }));
        assert_eq!(fit(&[one, one]), Err(FitError::OneSize));
        let none = Measurement {
            time: Picos::ZERO,
            ..one
        };
        assert_eq!(fit(&[one, none]), Err(FitError::NoTime { index: 1 }));
    }
}
