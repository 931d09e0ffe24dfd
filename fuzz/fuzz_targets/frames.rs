#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_fabric::harness::tcp_frames(bytes));
