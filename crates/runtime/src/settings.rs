//! The one table of settings.
//!
//! Every knob of an agent is a row of [`TABLE`]: its key, the type of its value, its default and the sentence that explains it.
//! The typed [`Settings`], the names of the environment variables, the check for unknown keys, what `weft doctor` prints and
//! `docs/settings.md` all come from the same row, so none can say something else than another.
//!
//! A value comes from the last of these sources that names it: the default, the file, the environment, the call.
//!
//! ```
//! use weft::settings::{Settings, Sources};
//!
//! let sources = Sources::default().file("weft.toml", "[tcp]\nconnections = 2").variable("WEFT_SPIN", "10us");
//! let settings = Settings::from_sources(&sources)?;
//! assert_eq!(settings.tcp_connections, 2);
//!
//! let typo = Settings::from_sources(&Sources::default().set("tcp.conections", "2")).unwrap_err();
//! assert!(typo.to_string().contains("did you mean tcp.connections?"));
//! # Ok::<(), weft::settings::SettingsError>(())
//! ```

mod page;
mod secret;
mod sources;
mod value;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use weft_plan::Bytes;

pub use page::{markdown, table};
pub use secret::SecretError;
pub(crate) use secret::long_enough;
pub use sources::{Origin, SettingsError, Sources};
pub use value::{
    AlgorithmChoice, AtomicsChoice, FileIo, ForeignMemory, Hidden, NoAlgorithmChoice, RendezvousChoice,
    TransportChoice, When,
};

use sources::Chosen;
use value::Value;

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The name in the file and in calls. A dot is a table in the file.
    pub key: &'static str,
    /// What a value looks like.
    pub kind: &'static str,
    /// Written as a user would write it; empty means unset.
    pub default: &'static str,
    /// The smallest and the largest value, for settings that have them.
    pub bounds: Option<(u64, u64)>,
    pub explanation: &'static str,
}

impl Setting {
    /// The environment variable of this setting.
    pub fn variable(&self) -> String {
        format!("WEFT_{}", self.key.replace('.', "_").to_ascii_uppercase())
    }
}

macro_rules! bounds {
    () => {
        None
    };
    ($low:literal, $high:literal) => {
        Some(($low, $high))
    };
}

macro_rules! settings {
    ($(
        $(#[doc = $explanation:literal])+
        $field:ident: $type:ty = $key:literal, $default:literal $(, within $low:literal..=$high:literal)?;
    )*) => {
        /// Every setting there is.
        pub const TABLE: &[Setting] = &[$(
            Setting {
                key: $key,
                kind: <$type as Value>::KIND,
                default: $default,
                bounds: bounds!($($low, $high)?),
                explanation: concat!($($explanation),+),
            },
        )*];

        /// The settings of one agent, typed.
        #[derive(Clone, Debug)]
        pub struct Settings {
            $( $(#[doc = $explanation])+ pub $field: $type, )*
            origins: Vec<Origin>,
        }

        impl Settings {
            fn typed(chosen: &Chosen) -> Result<Settings, SettingsError> {
                let mut rows = TABLE.iter().enumerate();
                let mut origins = Vec::with_capacity(TABLE.len());
                $(
                    // The macro writes one field per row, so the rows cannot run out before the fields do.
                    let (index, row) = rows.next().expect("a row per field");
                    let $field: $type = chosen.parse(index, row)?;
                    origins.push(chosen.origin(index).clone());
                )*
                Ok(Settings { $($field,)* origins })
            }

            /// Every row with the value in force, as text, and where it came from. Secrets stay hidden.
            pub fn rows(&self) -> Vec<(&'static Setting, String, &Origin)> {
                let texts = [$( Value::text(&self.$field) ),*];
                TABLE.iter().zip(texts).zip(&self.origins).map(|((row, text), origin)| (row, text, origin)).collect()
            }
        }
    };
}

settings! {
    /// The agent's name, which peers see and look up; by default the host's name and the process number.
    name: Option<String> = "name", "";
    /// The address to accept TCP peers on; only this host can reach the default.
    listen: SocketAddr = "listen", "127.0.0.1:0";
    /// The address that peers are told to connect to when it differs from the one in `listen`.
    advertise: Option<IpAddr> = "advertise", "";
    /// The transports to use, best first: of those that reach a peer the first carries its transfers, and the next takes over when it is lost.
    /// One that is named here must work; by default `verbs` is left out where there is no RDMA device.
    transports: Vec<TransportChoice> = "transports", "shared_memory,verbs,tcp";
    /// The secret that all agents of one deployment share and prove to each other.
    secret: Option<Hidden> = "secret", "";
    /// A file that holds the secret, readable by its owner only; by default one that is made once per user and host.
    secret_file: Option<PathBuf> = "secret_file", "";
    /// TCP connections per peer and local address.
    tcp_connections: usize = "tcp.connections", "2", within 1..=64;
    /// A certificate chain (PEM); with it, TCP runs over TLS.
    tcp_tls_cert: Option<PathBuf> = "tcp.tls_cert", "";
    /// The private key of `tcp.tls_cert` (PEM).
    tcp_tls_key: Option<PathBuf> = "tcp.tls_key", "";
    /// The certificates that peers must be signed by (PEM).
    tcp_tls_roots: Option<PathBuf> = "tcp.tls_roots", "";
    /// The name that every agent's certificate carries; by default `weft`.
    tcp_tls_name: Option<String> = "tcp.tls_name", "";
    /// Local addresses to spread connections over, one per network card; none means that the kernel chooses.
    tcp_rails: Vec<IpAddr> = "tcp.rails", "";
    /// RDMA devices to use, or ports of them, as in `mlx5_0,mlx5_1:1`; none means all that can be used.
    verbs_devices: Vec<String> = "verbs.devices", "";
    /// The index of the address to use on every RDMA port; by default the one that reaches furthest.
    verbs_gid_index: Option<u8> = "verbs.gid_index", "", within 0..=255;
    /// The traffic class of RDMA packets; on RoCE four times the DSCP that switches sort by.
    verbs_traffic_class: u8 = "verbs.traffic_class", "0", within 0..=255;
    /// The InfiniBand service level; on RoCE the priority, where the driver takes it from here.
    verbs_service_level: u8 = "verbs.service_level", "0", within 0..=15;
    /// How long an RDMA device waits for an acknowledgement before it sends again; rounded up to 4.096 µs times a power of two.
    verbs_timeout: Duration = "verbs.timeout", "67ms", within 4_096..=8_796_093_022_208;
    /// How often an RDMA device sends again before its path is lost; 7, the most there is, means for ever to some devices.
    verbs_retries: u8 = "verbs.retries", "6", within 0..=7;
    /// The largest RDMA packet in bytes, a power of two; by default the port's own.
    verbs_mtu: Option<u16> = "verbs.mtu", "", within 256..=4096;
    /// Whether an RDMA device looks pages up as it needs them, instead of having memory pinned; auto does where pinning fails.
    verbs_odp: When = "verbs.odp", "auto";
    /// Who carries out atomic operations over RDMA; auto leaves them to devices whose own are atomic with those of processors. With
    /// device and others, all who touch a word must do it through one device, and deadlines end only the waiting.
    verbs_atomics: AtomicsChoice = "verbs.atomics", "auto";
    /// How memory that Weft did not allocate crosses between processes; auto falls back to bounce where the kernel refuses.
    shared_memory_foreign: ForeignMemory = "shared_memory.foreign", "auto";
    /// Whether a second thread helps with large copies when a core is idle.
    shared_memory_helper: bool = "shared_memory.helper", "true";
    /// How long a worker stays on a GPU after a copy, so that the next one needs no launch, once several have followed each other as soon; meanwhile it
    /// keeps up to half of each multiprocessor. 0s means never.
    gpu_stay: Duration = "gpu.stay", "20us", within 0..=1_000_000;
    /// By what files are reached; auto is io_uring where there is one, and threads for file systems in user space.
    file_io: FileIo = "file.io", "auto";
    /// Requests to files that the kernel has at a time, of one agent.
    file_depth: usize = "file.depth", "64", within 1..=4096;
    /// Host memory that is registered with io_uring, and so pinned, at most; the system's own limit (memlock) may be lower. 0B means none.
    file_registered: Bytes = "file.registered", "64MiB", within 0..=1_099_511_627_776;
    /// Memory for what goes to or from files and is not aligned.
    file_staging: Bytes = "file.staging", "8MiB", within 1_048_576..=4_294_967_296;
    /// Who serves buckets of objects, as in `http://host:port`; by default `AWS_ENDPOINT_URL`, and else Amazon.
    object_endpoint: Option<String> = "object.endpoint", "";
    /// The region that buckets are in; by default `AWS_REGION`.
    object_region: Option<String> = "object.region", "";
    /// Whether a bucket is part of the host's name, or comes first in the path; auto is the path where an endpoint is named.
    object_virtual_host: When = "object.virtual_host", "auto";
    /// Authorities (PEM) that servers of objects may be certified by, beside the system's.
    object_ca: Option<PathBuf> = "object.ca", "";
    /// Requests for objects under way at a time, of one agent.
    object_depth: usize = "object.depth", "16", within 1..=1024;
    /// Memory for what has been written of objects and not been committed.
    object_staging: Bytes = "object.staging", "256MiB", within 16_777_216..=1_099_511_627_776;
    /// How often a request for an object is made again within its deadline, where it failed for a reason that passes.
    object_retries: usize = "object.retries", "4", within 0..=100;
    /// When a request ends with an error if it names no deadline of its own.
    deadline: Duration = "deadline", "30s", within 1_000..=17_280_000_000_000_000;
    /// How often a session that has nothing to say shows that it lives.
    heartbeat: Duration = "heartbeat", "1s", within 1_000_000..=3_600_000_000_000;
    /// How long a peer may stay silent before its session is lost.
    silence_max: Duration = "silence_max", "5s", within 2_000_000..=86_400_000_000_000;
    /// Transfers up to this size may be copied in the caller's thread; larger ones never are.
    inline_bytes: Bytes = "inline_bytes", "256KiB", within 0..=1_048_576;
    /// How long a thread that waits, and the progress thread, look for work before they sleep.
    spin: Duration = "spin", "200us", within 0..=1_000_000_000;
    /// The core to pin the progress thread to; unset leaves it to the kernel.
    progress_core: Option<usize> = "progress_core", "", within 0..=4095;
    /// Whether transfers that do not say otherwise compare the bytes at both ends.
    checksum: bool = "checksum", "false";
    /// Whether memory that Weft allocates asks for huge pages: transparent ones, or, if on, reserved ones, which peers copy and cannot map.
    huge_pages: When = "huge_pages", "auto";
    /// A platform file, as `weft doctor --platform` writes it, that collectives are chosen by; the same for all ranks of a group. By default
    /// a built-in one.
    platform: Option<PathBuf> = "platform", "";
    /// By what collectives run, where a call does not say, as in `all-reduce=ring,broadcast=ring/16`, the number being that of portions; for
    /// others, and where it is not for a call, the fastest by the platform.
    collective_algorithms: Vec<AlgorithmChoice> = "collective.algorithms", "";
    /// Whether the algorithm depends on the collective, the size and the number of ranks alone, so that results have the same bits
    /// wherever the ranks are.
    collective_deterministic: bool = "collective.deterministic", "false";
    /// A file to write a Perfetto trace to.
    trace_file: Option<PathBuf> = "trace_file", "";
    /// An address to serve Prometheus metrics on, at /metrics.
    metrics_listen: Option<SocketAddr> = "metrics_listen", "";
    /// Where agents find each other by name.
    rendezvous: RendezvousChoice = "rendezvous", "none";
    /// Agents see only names of their own job.
    rendezvous_job: String = "rendezvous_job", "default";
    /// How long the entry of a dead agent stays.
    rendezvous_lease: Duration = "rendezvous_lease", "5s", within 1_000_000_000..=3_600_000_000_000;
    /// The name server of rank 0 listens on MASTER_PORT plus this.
    rendezvous_port_offset: u16 = "rendezvous_port_offset", "1", within 0..=65_535;
    /// What the command and the Python package print, as a filter of the tracing crate.
    log: String = "log", "warn";
}

impl Default for Settings {
    fn default() -> Settings {
        Settings::from_sources(&Sources::default()).expect("the defaults of the table are valid, as its tests check")
    }
}

impl Settings {
    /// From this process's file and environment.
    pub fn load() -> Result<Settings, SettingsError> {
        Settings::from_sources(&Sources::of_process()?)
    }

    pub fn from_sources(sources: &Sources) -> Result<Settings, SettingsError> {
        let settings = Settings::typed(&Chosen::new(sources)?)?;
        settings.agree()?;
        Ok(settings)
    }

    /// The bytes that agents prove to each other: from `secret`, from `secret_file`, or from the user's own file, which the
    /// first agent makes.
    pub fn shared_secret(&self) -> Result<Vec<u8>, SecretError> {
        match (&self.secret, &self.secret_file) {
            (Some(secret), _) => Ok(secret.reveal().as_bytes().to_vec()),
            (None, Some(path)) => secret::read(path),
            (None, None) => secret::read_or_make(&secret::default_path()?),
        }
    }

    /// Whether somebody has chosen the value of a setting.
    pub fn is_set(&self, key: &str) -> bool {
        let mut rows = TABLE.iter().zip(&self.origins);
        rows.any(|(row, origin)| row.key == key && *origin != Origin::Default)
    }

    /// What no single row can check.
    fn agree(&self) -> Result<(), SettingsError> {
        let needs = |key, other| Err(SettingsError::Disagree { key, other });
        if self.tcp_tls_cert.is_some() != self.tcp_tls_key.is_some() {
            return needs("tcp.tls_cert", "both it and tcp.tls_key, or neither");
        }
        if self.tcp_tls_cert.is_some() && self.tcp_tls_roots.is_none() {
            return needs("tcp.tls_cert", "tcp.tls_roots, since both ends show a certificate");
        }
        if self.silence_max <= self.heartbeat {
            return needs("silence_max", "a value above heartbeat");
        }
        if self.verbs_mtu.is_some_and(|bytes| !bytes.is_power_of_two()) {
            return needs("verbs.mtu", "256, 512, 1024, 2048 or 4096");
        }
        if self.transports.is_empty() {
            return needs("transports", "at least one transport");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_within_their_bounds() {
        let settings = Settings::default();
        assert_eq!(settings.listen.ip().to_string(), "127.0.0.1");
        assert_eq!(settings.deadline, Duration::from_secs(30));
        assert!(settings.rows().iter().all(|(_, _, origin)| **origin == Origin::Default));
    }

    #[test]
    fn a_default_prints_as_it_is_written() {
        for (row, text, _) in Settings::default().rows() {
            assert_eq!(row.default, text, "{}", row.key);
        }
    }

    #[test]
    fn keys_and_variables_are_unique() {
        let keys: std::collections::BTreeSet<_> = TABLE.iter().map(|row| row.key).collect();
        let variables: std::collections::BTreeSet<_> = TABLE.iter().map(Setting::variable).collect();
        assert_eq!((keys.len(), variables.len()), (TABLE.len(), TABLE.len()));
    }

    #[test]
    fn settings_that_need_each_other_are_checked_together() {
        let half = Sources::default().set("tcp.tls_cert", "a.pem");
        assert!(matches!(
            Settings::from_sources(&half),
            Err(SettingsError::Disagree {
                key: "tcp.tls_cert",
                ..
            })
        ));
        let silent = Sources::default().set("silence_max", "500ms");
        assert!(matches!(
            Settings::from_sources(&silent),
            Err(SettingsError::Disagree { .. })
        ));
        let none = Sources::default().set("transports", "");
        assert!(matches!(
            Settings::from_sources(&none),
            Err(SettingsError::Disagree { .. })
        ));
    }

    #[test]
    fn a_secret_is_not_printed() {
        let settings = Settings::from_sources(&Sources::default().set("secret", "hunter2")).unwrap();
        assert!(!format!("{settings:?}").contains("hunter2"));
        assert!(!table(&settings).contains("hunter2"));
        assert_eq!(settings.shared_secret().unwrap(), b"hunter2");
    }
}
