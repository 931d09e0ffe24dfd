#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| weft_sim::harness::scenarios(text));
