#![no_main]

use weft_plan::platform::Platform;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(platform) = Platform::from_toml(text) {
        assert_eq!(Platform::from_toml(&platform.to_toml()), Ok(platform));
    }
});
