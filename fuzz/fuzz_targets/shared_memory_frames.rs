#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_fabric::harness::shared_memory_frames(bytes));
