use proptest::prelude::*;

use super::*;

#[test]
fn every_shipped_system_is_read_by_its_name_and_written_back() {
    let mut seen = std::collections::HashSet::new();
    for name in System::names() {
        let system = System::named(name).unwrap();
        assert_eq!(system.name, name);
        assert_eq!(System::from_toml(&system.to_toml()), Ok(system.clone()));
        for known in system.aliases.iter().chain([&system.name]) {
            assert!(seen.insert(known.clone()), "{known} is two systems");
        }
        assert!(system.gpu.flops(Precision::Bf16).is_some());
    }
}

#[test]
fn a_file_says_only_what_differs_from_its_base() {
    let h100 = System::named("dgx-h100").unwrap();
    let p5 = System::named("p5").unwrap();
    assert_eq!(p5.gpu, h100.gpu);
    assert_eq!(p5.scale_out.nics, 32);
    assert_eq!(p5.node_rate(), h100.node_rate());
    let own = System::from_toml("base = \"p5\"\nname = \"mine\"\n[gpu.tflops]\nbf16 = 800.0\n").unwrap();
    assert_eq!(own.gpu.flops(Precision::Bf16), Some(8e14));
    assert_eq!(own.gpu.flops(Precision::Fp8), h100.gpu.flops(Precision::Fp8));
    assert!(own.aliases.is_empty());
}

fn complaint(text: &str) -> String {
    System::from_toml(text).unwrap_err().to_string()
}

#[test]
fn whatever_is_wrong_has_a_line_and_a_field() {
    complains_of(
        "base = \"dgx-h100\"\nname = \"x\"\n\n[scale_out]\nnics = \"many\"\n",
        "line 5",
        "scale_out.nics",
    );
    complains_of("base = \"dgx-h100\"\nname = \"x\"\n[gpu]\nsm = 3\n", "line 4", "gpu.sm");
    complains_of(
        "base = \"dgx-h100\"\nname = \"x\"\n[node]\ngpus = 0\n",
        "line 4",
        "node.gpus",
    );
    complains_of(
        "base = \"dgx-h100\"\nname = \"x\"\n[gpu.tflops]\nfp8 = -1.0\n",
        "line 4",
        "gpu.tflops.fp8",
    );
    complains_of("name = \"x\"\nbase = \"dgx-x\"\n", "line 2", "base");
    complains_of("name = \"x\n", "line 1", "name");
    assert!(complaint("name = \"x\"\n").contains("missing field"));
}

fn complains_of(text: &str, line: &str, field: &str) {
    let complaint = complaint(text);
    assert!(complaint.contains(line) && complaint.contains(field), "{complaint}");
}

#[test]
fn an_unknown_name_is_an_error() {
    assert!(matches!(
        System::named("dgx-x100"),
        Err(SystemError::NoSuchSystem { .. })
    ));
}

proptest! {
    #[test]
    fn a_changed_file_is_refused_or_read_and_never_a_panic(at in 0usize..4096, new in "[ -~\n]{0,4}", whole in "\\PC{0,80}") {
        let (_, text) = shipped::FILES[at % shipped::FILES.len()];
        let mut changed: Vec<char> = text.chars().collect();
        let at = at % changed.len();
        changed.splice(at..at + 1, new.chars());
        let changed: String = changed.into_iter().collect();
        let _ = System::from_toml(&changed);
        let _ = System::from_toml(&whole);
    }
}

#[test]
fn the_file_of_every_system_is_found_by_all_its_names() {
    for name in System::names() {
        let system = System::named(name).unwrap();
        for name in system.aliases.iter().map(String::as_str).chain([name]) {
            assert_eq!(
                System::from_toml(System::shipped(name).unwrap()).unwrap(),
                system,
                "{name}"
            );
        }
    }
    assert_eq!(System::shipped("nothing of the kind"), None);
}
