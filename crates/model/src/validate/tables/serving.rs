//! What clients of serving engines saw, end to end.

use super::super::{Compared, Systems, TruthRow, TruthTable, Unpredicted};
use crate::workload::serving::measured::EndToEnd;
use weft_plan::units::Picos;

#[derive(Debug)]
pub(super) struct Serving;

impl TruthTable for Serving {
    fn name(&self) -> &'static str {
        "aic_e2e_serving"
    }

    fn columns(&self) -> &'static [&'static str] {
        &[
            "system",
            "backend",
            "model_path",
            "mode",
            "isl",
            "osl",
            "silicon_ttft_ms",
            "silicon_tpot_ms",
        ]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let name = row.need_text("system")?;
        let system = systems.named(name)?;
        let unsupported = |reason: String| Unpredicted::Unsupported {
            system: name.to_owned(),
            reason,
        };
        let column = |column: &str| row.text(column);
        let measured = EndToEnd::read(&system, &column).map_err(|error| unsupported(error.to_string()))?;
        let predicted = measured
            .estimate(&system)
            .map_err(|error| unsupported(error.to_string()))?;
        let ms = |time: Picos| time.as_secs_f64() * 1e3;
        let compared = |quantity, predicted: Picos, measured: Picos| Compared {
            system: name.to_owned(),
            quantity,
            predicted: ms(predicted),
            measured: ms(measured),
        };
        Ok(vec![
            compared("TPOT", predicted.per_token, measured.per_token),
            compared("TTFT", predicted.first_token, measured.first_token),
        ])
    }
}
