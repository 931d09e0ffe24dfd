#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft::harness::name_server_frames(bytes));
