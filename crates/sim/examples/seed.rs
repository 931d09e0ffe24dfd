fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let (from, n) = (args[0], args[1]);
    let mut total = std::collections::BTreeMap::new();
    let t = std::time::Instant::now();
    let mut steps = 0;
    for seed in from..from + n {
        let detail = if n == 1 {
            weft_sim::seeds::Detail::Lines
        } else {
            weft_sim::seeds::Detail::HashOnly
        };
        let o = weft_sim::seeds::run(seed, detail);
        steps += o.steps;
        for (k, v) in &o.ends {
            *total.entry(k.clone()).or_insert(0u64) += v;
        }
        if n == 1 {
            println!("{}", o.trace);
        }
        if let Some(v) = o.violation {
            println!("seed {seed}: {v}");
        }
        if n == 1 {
            println!("{} notifications {} steps", o.tally, o.steps);
        }
    }
    println!("{total:?} {steps} steps {:?}", t.elapsed());
}
