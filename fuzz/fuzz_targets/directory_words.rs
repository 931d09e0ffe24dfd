#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_protocol::harness::directory_words(bytes));
