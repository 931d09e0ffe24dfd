use super::*;

#[test]
fn shipped_scenarios_hold_together() {
    for name in Scenario::names() {
        let scenario = Scenario::from_toml(Scenario::shipped(name).unwrap()).unwrap();
        assert_eq!(scenario.name, name);
        let text = toml::to_string(&scenario).unwrap();
        assert_eq!(Scenario::from_toml(&text).unwrap(), scenario);
    }
}

#[test]
fn small_ones_run_and_give_the_same_again() {
    for name in ["ring", "incast", "permutation", "degraded-nic", "training"] {
        let scenario = Scenario::from_toml(Scenario::shipped(name).unwrap()).unwrap();
        let answers = scenario.run().unwrap();
        assert_eq!(answers.len(), scenario.fidelities.len());
        assert_eq!(scenario.run().unwrap(), answers);
    }
}

#[test]
fn faults_cost_time() {
    let text = Scenario::shipped("degraded-nic").unwrap();
    let time = |text: &str| Scenario::from_toml(text).unwrap().run().unwrap()[1].time;
    let healthy = text.split("[[faults]]").next().unwrap();
    assert!(time(text).as_secs_f64() > 1.4 * time(healthy).as_secs_f64());
}

fn complaint(old: &str, new: &str) -> String {
    let text = Scenario::shipped("degraded-nic").unwrap();
    assert!(text.contains(old));
    Scenario::from_toml(&text.replacen(old, new, 1))
        .unwrap_err()
        .to_string()
}

#[test]
fn mistakes_are_told_with_line_and_field() {
    for (old, new, message) in [
        (
            "nodes = 4",
            "nodes = 0",
            "line 7, at `system.fabric.nodes`: 0 is less than 1",
        ),
        (
            "left = 0.5",
            "left = 1.5",
            "line 16, at `faults[0].left`: 1.5 is not between 0 and 1",
        ),
        (
            "rank = 3",
            "rank = 99",
            "line 15, at `faults[0].rank`: 99 is not between 0 and 31",
        ),
        (
            "rank = 3\n",
            "",
            "line 14, at `faults[0].rank`: a fault is at a rank or at a link",
        ),
        (
            "\"all-reduce\"",
            "\"all-redcue\"",
            "line 10, at `workload.collective`: there is no collective `all-redcue`",
        ),
        (
            "\"rail-ring\"",
            "\"pairwise\"",
            "line 11, at `workload.algorithm`: not for this collective and so many ranks",
        ),
        (
            "bytes = \"256 MiB\"",
            "bytes = \"256 MiB\"\nranks = 31",
            "line 13, at `workload.ranks`: 31 ranks do not fill whole nodes of 8",
        ),
    ] {
        assert_eq!(complaint(old, new), message);
    }
    let unknown = complaint("bytes =", "size =");
    assert!(unknown.starts_with("line 12, column 1, at `size`"), "{unknown}");
    let unit = complaint("100 µs", "100 parsecs");
    assert!(unit.starts_with("line 21, column 8, at `from`"), "{unit}");
    let system = complaint("dgx-h100", "dgx-z100");
    assert_eq!(system, "line 6, at `system.name`: there is no system `dgx-z100`");
}

#[test]
fn mistakes_about_training_are_told_with_line_and_field() {
    let text = Scenario::shipped("training").unwrap();
    for (old, new, message) in [
        (
            "\"llama-3.1-405b\"",
            "\"lama-405\"",
            "line 10, at `workload.model`: no model is called \"lama-405\"",
        ),
        (
            "tensor = 8",
            "tensor = 7",
            "line 12, at `workload.parallel`: 512 GPUs are not a multiple of 112",
        ),
        (
            "micro = 1",
            "micro = 0",
            "line 13, at `workload.batch.micro`: micro is zero",
        ),
        (
            "[\"analytical\"]",
            "[\"flow\"]",
            "line 3, at `fidelities`: a step of training has a closed form alone",
        ),
        (
            "precision =",
            "gpus = 4096\nprecision =",
            "line 11, at `workload.gpus`: 4096 is not between 1 and 512",
        ),
        ("tokens = 8192", "tokns = 8192", "line 13, column "),
    ] {
        assert!(text.contains(old));
        let said = Scenario::from_toml(&text.replacen(old, new, 1))
            .unwrap_err()
            .to_string();
        assert!(said.starts_with(message), "{said}");
    }
}

/// What links carried adds up: every byte that ranks send leaves by one link and comes by one.
#[test]
fn what_links_carried_adds_up() {
    let text = Scenario::shipped("ring").unwrap();
    let answers = Scenario::from_toml(text).unwrap().run_by_link().unwrap();
    let (flow, packet) = (&answers[1], &answers[2]);
    // 62 steps of half a mebibyte, from every rank; all but four of them stay on their node, and take two links there.
    let sent = 62.0 * 32.0 * f64::from(1 << 19);
    let scale_up: f64 = flow.carried[..64].iter().sum();
    assert!((scale_up / (2.0 * sent * 28.0 / 32.0) - 1.0).abs() < 1e-6, "{scale_up}");
    let (flows, packets): (f64, f64) = (flow.carried.iter().sum(), packet.carried.iter().sum());
    assert!((1.0..1.05).contains(&(packets / flows)), "{packets} {flows}");
    assert!(answers[0].carried.is_empty());
    assert!(!flow.message_spans.is_empty());
    assert!(flow.spans.iter().all(|span| span.sent.0 > 0 && span.from.is_some()));
}
