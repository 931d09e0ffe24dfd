//! What tests of kernels over rows share: a device, numbers by chance, and elements of two bytes or one as f64.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use weft_gpu::{Device, DeviceMemory, DeviceSlice, Team, TeamSettings};
use weft_plan::datatype::E4m3;
use weft_testing::{Need, has};

/// What lies before and after an output, and must stay as it is.
pub const GUARD: u64 = 256;
pub const POISON: u8 = 0xa5;

pub fn device() -> Option<Arc<Device>> {
    // One team that is never used keeps the kernels loaded from test to test.
    static KEPT: OnceLock<(Arc<Device>, Arc<Team>)> = OnceLock::new();
    let open = || {
        // Streams that share one of the driver's queues wait for each other, and here kernels of one stream wait for those of others.
        // SAFETY: before the driver is loaded, and nothing else here changes the environment.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
        let device = Device::open(0).expect("a device");
        let team = Team::in_process(&device, 1, TeamSettings::default()).expect("a team");
        (device, team)
    };
    has(Need::Gpu).then(|| KEPT.get_or_init(open).0.clone())
}

/// A deadline that is long for a call, and short for whoever waits for the tests.
pub fn settings() -> TeamSettings {
    TeamSettings {
        deadline: Duration::from_secs(5),
        ..TeamSettings::default()
    }
}

/// Numbers by chance, the same every time.
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    /// Between -1 and 1, of very different magnitudes now and then.
    pub fn number(&mut self) -> f32 {
        let chance = self.next();
        let value = (chance >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match chance % 16 {
            0 => value * 1e-3,
            1 => value * 8.0,
            _ => value,
        }
    }
    pub fn rows(&mut self, of: Two, count: usize) -> Vec<u8> {
        (0..count).flat_map(|_| of.bits(self.number()).to_ne_bytes()).collect()
    }
}

/// Elements of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Two {
    Bf16,
    F16,
}

impl Two {
    /// Shorter by cutting, which is as good as any other number.
    pub fn bits(self, value: f32) -> u16 {
        let bits = value.to_bits();
        match self {
            Two::Bf16 => (bits >> 16) as u16,
            Two::F16 => {
                let exponent = (bits >> 23 & 0xff) as i32 - 112;
                let sign = (bits >> 16 & 0x8000) as u16;
                match exponent {
                    1..31 => sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16,
                    _ => sign,
                }
            }
        }
    }

    pub fn value(self, bits: u16) -> f64 {
        match self {
            Two::Bf16 => f64::from(f32::from_bits(u32::from(bits) << 16)),
            Two::F16 => {
                let (sign, exponent, mantissa) = (bits >> 15, i32::from(bits >> 10 & 31), f64::from(bits & 1023));
                let magnitude = match exponent {
                    0 => mantissa * 2f64.powi(-24),
                    31 => f64::NAN,
                    _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
                };
                if sign == 1 { -magnitude } else { magnitude }
            }
        }
    }

    pub fn values(self, bytes: &[u8]) -> Vec<f64> {
        let pairs = bytes.chunks_exact(2);
        pairs
            .map(|two| self.value(u16::from_ne_bytes([two[0], two[1]])))
            .collect()
    }

    /// How far a number that was rounded once from f32 may be from what it was.
    pub fn error(self, of: f64) -> f64 {
        match self {
            Two::Bf16 => of.abs() * 2f64.powi(-8) * 1.001 + 1e-9,
            Two::F16 => of.abs() * 2f64.powi(-11) * 1.001 + 2f64.powi(-25) * 1.001,
        }
    }
}

/// fp8 e4m3 as it is, and how far one may be from what it was.
pub fn eight(byte: u8) -> f64 {
    f64::from(E4m3(byte).to_f32())
}

pub fn error_of_eight(of: f64) -> f64 {
    of.abs() / 16.0 * 1.001 + 2f64.powi(-10) * 1.01
}

/// Memory with room around it that nobody may touch.
pub struct Guarded {
    memory: DeviceMemory,
    bytes: u64,
}

impl Guarded {
    pub fn new(device: &Arc<Device>, bytes: u64) -> Guarded {
        let memory = DeviceMemory::allocate(device, bytes.next_multiple_of(16) + 2 * GUARD).expect("memory");
        let guarded = Guarded { memory, bytes };
        guarded.poison();
        guarded
    }
    pub fn poison(&self) {
        let whole = vec![POISON; self.memory.len() as usize];
        self.memory.write(0, &whole).expect("poisoned");
    }
    pub fn slice(&self) -> DeviceSlice {
        DeviceSlice {
            address: self.memory.address() + GUARD,
            bytes: self.bytes,
        }
    }
    pub fn write(&self, bytes: &[u8]) {
        self.memory.write(GUARD, bytes).expect("written");
    }
    /// What is in it; what is around it must be as it was.
    pub fn read(&self, what: &str) -> Vec<u8> {
        let mut all = vec![0; self.memory.len() as usize];
        self.memory.read(0, &mut all).expect("read");
        let end = (GUARD + self.bytes) as usize;
        let around = all[..GUARD as usize].iter().chain(&all[end..]);
        assert!(
            around.into_iter().all(|byte| *byte == POISON),
            "{what}: written outside"
        );
        all[GUARD as usize..end].to_vec()
    }
}
