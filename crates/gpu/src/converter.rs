//! Conversions of blocks by a device: what is read and what is written lie in memory that it reaches.

use std::ffi::c_void;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::conversion::Conversion;

use crate::application::{Launch, Module};
use crate::device::{Device, GpuError};
use crate::memory::DeviceMemory;
use crate::program::{ConversionEnds, DeviceProgram, ProgramError, ProgramWords};
use crate::stream::Stream;

const TEXT: &str = include_str!("../kernels/convert.ptx");
const THREADS: u32 = 256;
const WARPS_A_BLOCK: u32 = THREADS / 32;
/// As the kernel says by its bounds.
const BLOCKS_A_MULTIPROCESSOR: u32 = 3;

/// Why a conversion was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConvertError {
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// What converts on a device.
#[derive(Debug)]
pub struct Converter {
    device: Arc<Device>,
    module: Module,
    stream: Stream,
}

/// A program whose stretches the device has, to be launched again and again.
#[derive(Debug)]
pub struct PreparedConversion {
    launches: Vec<(String, ProgramWords, DeviceMemory)>,
    bytes: u64,
}

impl PreparedConversion {
    /// Bytes that it writes, scales not counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Converter {
    /// The driver compiles the kernel for the device now.
    pub fn new(device: &Arc<Device>) -> Result<Converter, GpuError> {
        Ok(Converter {
            device: device.clone(),
            module: Module::load(device, TEXT)?,
            stream: Stream::new(device)?,
        })
    }

    /// Whose memory it converts.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Brings a program to the device, and waits until it is there.
    pub fn prepare(&self, program: &DeviceProgram) -> Result<PreparedConversion, GpuError> {
        let mut launches = Vec::with_capacity(program.launches.len());
        for launched in &program.launches {
            let list = launched.list();
            let memory = DeviceMemory::allocate(&self.device, list.len() as u64)?;
            memory.write(0, &list)?;
            launches.push((launched.kernel(), launched.words(memory.address()), memory));
        }
        let bytes = program.bytes();
        Ok(PreparedConversion { launches, bytes })
    }

    /// Puts a program on a stream, as the driver and frameworks know it.
    ///
    /// # Safety
    /// What the program reads and writes, and what was prepared, must stay until it has ended, and must be memory that the device reaches; this must stay too, and the stream must be one of
    /// this device's.
    pub unsafe fn launch(&self, prepared: &PreparedConversion, stream: u64) -> Result<(), GpuError> {
        for (kernel, words, _) in &prepared.launches {
            let most = self.device.multiprocessors() * BLOCKS_A_MULTIPROCESSOR;
            let how = Launch {
                grid: (words.units.div_ceil(WARPS_A_BLOCK).clamp(1, most), 1),
                threads: THREADS,
                stream,
            };
            let mut words = *words;
            let mut parameters = [(&raw mut words).cast::<c_void>()];
            // SAFETY: the kernel takes these words and nothing else; the rest is the caller's promise.
            unsafe { self.module.launch(kernel, how, &mut parameters) }?;
        }
        Ok(())
    }

    /// Converts, each between places of its own, and waits until it is done.
    ///
    /// # Safety
    /// The ends must be memory that the device reaches, and as long as [`Conversion::ends`] says.
    pub unsafe fn convert(&self, conversions: &[(&Conversion, ConversionEnds)]) -> Result<(), ConvertError> {
        let prepared = self.prepare(&DeviceProgram::new(conversions)?)?;
        // SAFETY: the caller's promise; what was prepared lives until the stream has been waited for.
        let launched = unsafe { self.launch(&prepared, self.stream.handle()) };
        self.stream.synchronize()?;
        Ok(launched?)
    }
}

impl Drop for Converter {
    fn drop(&mut self) {
        // The kernel is let go of after it has ended.
        let _ = self.stream.synchronize();
    }
}
