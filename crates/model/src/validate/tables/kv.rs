//! Transfers of KV caches, with the NICs in words.

use super::super::{Compared, Systems, TruthRow, TruthTable, Unpredicted};
use crate::handover::{handover, handover_rate};
use weft_plan::units::{Bandwidth, Bytes};

#[derive(Debug)]
pub(super) struct KvTransfers;

impl TruthTable for KvTransfers {
    fn name(&self) -> &'static str {
        "kv_transfer"
    }

    fn columns(&self) -> &'static [&'static str] {
        &["case", "setup"]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let label = row.need_text("case")?;
        let setup = row.need_text("setup")?;
        let nics = match stated(setup) {
            Some(nics) => nics,
            None => systems
                .named(setup.split_whitespace().next().unwrap_or(""))?
                .node_rate(),
        };
        let bytes = row.number("kv_bytes")?.map(|bytes| Bytes(bytes.max(0.0) as u64));
        let (quantity, predicted, measured) = match (row.number("transfer_ms")?, row.number("bandwidth_GBps")?, bytes) {
            (Some(ms), _, Some(bytes)) if ms > 0.0 => ("time", handover(bytes, nics).as_secs_f64() * 1e3, ms),
            // A rate is compared as the time of a byte.
            (None, Some(rate), bytes) if rate > 0.0 => {
                let block = bytes.filter(|_| label.contains("block"));
                let predicted = handover_rate(block, nics).bytes_per_sec() as f64 / 1e9;
                ("time", 1.0 / predicted, 1.0 / rate)
            }
            _ => {
                return Err(Unpredicted::Unsupported {
                    system: label.to_owned(),
                    reason: "neither a time nor a rate".to_owned(),
                });
            }
        };
        Ok(vec![Compared {
            system: label.to_owned(),
            quantity,
            predicted,
            measured,
        }])
    }
}

/// The rate of all NICs that the words state: `(200 GB/s)`, `4x200 Gbps`, `16x400G`.
fn stated(setup: &str) -> Option<Bandwidth> {
    if let Some((before, _)) = setup.split_once(" GB/s") {
        let digits = before.rsplit(|c: char| !c.is_ascii_digit() && c != '.').next()?;
        if let Ok(rate) = digits.parse::<f64>() {
            return Some(Bandwidth::from_gigabytes_per_sec(rate));
        }
    }
    setup.split(|c: char| c.is_whitespace() || c == ',').find_map(|word| {
        let (count, rate) = word.split_once(['x', '×'])?;
        let digits: String = rate.chars().take_while(char::is_ascii_digit).collect();
        let (count, rate) = (count.parse::<f64>().ok()?, digits.parse::<f64>().ok()?);
        Some(Bandwidth::from_gigabytes_per_sec(count * rate / 8.0))
    })
}
