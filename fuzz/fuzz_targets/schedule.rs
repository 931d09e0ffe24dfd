#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| weft_plan::harness::schedule(text));
