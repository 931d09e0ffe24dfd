#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_model::harness::trace(bytes));
