use proptest::prelude::*;

use super::*;

/// What the model must reach, as (table, quantity, median, 90th percentile): a little above what it reaches, so that it cannot get worse
/// unnoticed.
const BOUNDS: &[(&str, &str, f64, f64)] = &[
    ("aic_nccl", "time", 0.05, 0.16),
    ("nccl_tests_public", "time", 0.08, 0.25),
    ("aic_custom_allreduce", "time", 0.08, 0.40),
    ("aic_nvl72_alltoall", "all", 0.08, 0.22),
    ("aic_deepep_ll", "all", 0.07, 0.18),
    ("aic_deepep_normal", "all", 0.09, 0.23),
    ("deepep_readme", "all", 0.15, 0.85),
    ("kv_transfer", "time", 0.12, 0.20),
    ("training_steps", "step time", 0.045, 0.13),
    ("megatron_bridge_perf", "step time", 0.045, 0.18),
    ("aic_e2e_serving", "TPOT", 0.15, 0.55),
    ("aic_e2e_serving", "TTFT", 0.25, 0.95),
];

fn report(name: &str) -> Accuracy {
    let table = tables().into_iter().find(|table| table.name() == name).unwrap();
    let (_, text) = shipped().find(|(shipped, _)| *shipped == name).unwrap();
    check(&*table, text, &mut Systems::default()).unwrap()
}

#[test]
fn predictions_stay_as_near_to_measurements_as_they_are() {
    for (name, quantity, median, p90) in BOUNDS {
        let report = report(name);
        let overall = report
            .lines
            .iter()
            .find(|line| line.quantity == *quantity && line.system.is_none())
            .unwrap();
        assert!(overall.rows > 0, "{name}");
        assert!(overall.median <= *median && overall.p90 <= *p90, "{name}: {overall:?}");
    }
}

fn complaint(text: &str) -> ValidateError {
    let tables = tables();
    check(&*tables[0], text, &mut Systems::default()).unwrap_err()
}

#[test]
fn what_is_wrong_with_a_file_has_a_line_and_a_column() {
    let heading = "system,op_name,num_gpus,bytes,time_us\n";
    assert_eq!(complaint(""), ValidateError::NoHeading);
    assert_eq!(
        complaint("system,op_name\n"),
        ValidateError::NoColumn { column: "num_gpus" }
    );
    let said = complaint(&format!("{heading}\nh100,all_reduce,8,many,3\n")).to_string();
    assert!(said.contains("line 3") && said.contains("bytes"), "{said}");
    assert_eq!(
        complaint(&format!("{heading}h100,all_reduce,8\n")),
        ValidateError::Ragged {
            line: 2,
            cells: 3,
            columns: 5
        }
    );
    assert_eq!(
        complaint(&format!("{heading}\"h100,all_reduce\n")),
        ValidateError::OpenQuotation { line: 2 }
    );
    assert!(matches!(
        complaint(&format!("{heading}h100,all_reduce,,8,9\n")),
        ValidateError::TruthRow(Unpredicted::Nothing { line: 2, .. })
    ));
}

#[test]
fn cells_in_quotation_marks_hold_anything() {
    let text = "note,system,op_name,num_gpus,bytes,time_us\n\"a, \"\"b\"\"\nc\",h100,all_reduce,8,8,15\n";
    let tables = tables();
    let report = check(&*tables[0], text, &mut Systems::default()).unwrap();
    assert_eq!(report.lines[0].rows, 1);
}

#[test]
fn a_quantile_is_between_its_neighbours() {
    assert_eq!(quantile(&[], 0.5), 0.0);
    assert_eq!(quantile(&[3.0], 0.9), 3.0);
    assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), 2.5);
}

proptest! {
    #[test]
    fn rows_of_any_kind_are_predicted_or_refused_and_never_a_panic(
        table in 0usize..8,
        cells in proptest::collection::vec("h100_sxm|gb200|all_reduce|dispatch|normal|-?[0-9]{1,9}|[ -~]{0,6}", 0..12),
    ) {
        let tables = tables();
        let table = &tables[table % tables.len()];
        let heading = table.columns().join(",");
        let row: Vec<String> = (0..table.columns().len())
            .map(|nth| cells.get(nth).cloned().unwrap_or_else(|| "8".to_owned()))
            .collect();
        let _ = check(&**table, &format!("{heading}\n{}\n", row.join(",")), &mut Systems::default());
    }
}
