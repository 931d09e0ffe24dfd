//! The types that settings have, and how each is written.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use weft_plan::cost::Candidate;
use weft_plan::{Bytes, Collective, Picos, Time};

/// A type that a setting can have. Written text parses back to the same value.
pub(super) trait Value: Sized {
    /// What a value looks like, for people.
    const KIND: &'static str;
    fn parse(raw: &Raw) -> Option<Self>;
    fn text(&self) -> String;
    /// The number that the bounds of a row apply to: bytes, nanoseconds, or the number itself.
    fn measure(&self) -> Option<u64> {
        None
    }
}

/// A value as a source gave it. Files have lists; everywhere else a list is text with commas.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Raw {
    Text(String),
    List(Vec<String>),
}

impl Raw {
    fn one(&self) -> Option<&str> {
        match self {
            Raw::Text(text) => Some(text.trim()),
            Raw::List(_) => None,
        }
    }

    fn items(&self) -> Vec<&str> {
        match self {
            Raw::Text(text) => text.split(',').map(str::trim).filter(|item| !item.is_empty()).collect(),
            Raw::List(items) => items.iter().map(|item| item.trim()).collect(),
        }
    }
}

impl fmt::Display for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Raw::Text(text) => f.write_str(text),
            Raw::List(items) => write!(f, "[{}]", items.join(", ")),
        }
    }
}

/// Text that must not be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Hidden(String);

impl Hidden {
    pub fn new(text: impl Into<String>) -> Hidden {
        Hidden(text.into())
    }
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Whether to do something that does not always pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Auto,
    On,
    Off,
}

/// Who carries out atomic operations over RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicsChoice {
    Auto,
    Device,
    /// The owner's processor.
    Host,
}

/// By what files are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileIo {
    Auto,
    /// An agent does not start where there is none.
    IoUring,
    Threads,
}

/// How memory that Weft did not allocate crosses between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignMemory {
    Auto,
    /// The kernel copies from one process into the other.
    ProcessVm,
    /// Both sides copy, through a shared ring.
    Bounce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    SharedMemory,
    Verbs,
    Tcp,
}

impl TransportChoice {
    pub const ALL: [TransportChoice; 3] = [
        TransportChoice::SharedMemory,
        TransportChoice::Verbs,
        TransportChoice::Tcp,
    ];

    /// The name that the transport itself goes by.
    pub fn name(self) -> &'static str {
        match self {
            TransportChoice::SharedMemory => "shared_memory",
            TransportChoice::Verbs => "verbs",
            TransportChoice::Tcp => "tcp",
        }
    }
}

/// By what a collective runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AlgorithmChoice {
    /// The collective's name.
    pub collective: &'static str,
    pub candidate: Candidate,
}

impl FromStr for AlgorithmChoice {
    type Err = NoAlgorithmChoice;
    /// As in `all-reduce=ring`, or `all-reduce=ring/4` in portions.
    fn from_str(text: &str) -> Result<AlgorithmChoice, NoAlgorithmChoice> {
        let (name, candidate) = text.split_once('=').ok_or(NoAlgorithmChoice)?;
        let known = Collective::NAMES.iter().find(|known| **known == name.trim());
        Ok(AlgorithmChoice {
            collective: known.ok_or(NoAlgorithmChoice)?,
            candidate: candidate.parse().map_err(|_| NoAlgorithmChoice)?,
        })
    }
}

/// Not a collective and an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a collective, an equals sign and an algorithm")]
pub struct NoAlgorithmChoice;

/// Where agents find each other by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousChoice {
    None,
    /// Agents of one process.
    Process,
    /// A directory that all agents can write.
    Directory(PathBuf),
    /// The cluster of etcd servers behind these URLs, separated by semicolons.
    Etcd(String),
    /// What torchrun, MPI or Slurm left in the environment.
    Environment,
}

impl Value for String {
    const KIND: &'static str = "text";
    fn parse(raw: &Raw) -> Option<String> {
        raw.one().filter(|text| !text.is_empty()).map(str::to_owned)
    }
    fn text(&self) -> String {
        self.clone()
    }
}

impl Value for Hidden {
    const KIND: &'static str = "text";
    fn parse(raw: &Raw) -> Option<Hidden> {
        String::parse(raw).map(Hidden)
    }
    fn text(&self) -> String {
        "(hidden)".to_owned()
    }
}

impl Value for PathBuf {
    const KIND: &'static str = "path";
    fn parse(raw: &Raw) -> Option<PathBuf> {
        String::parse(raw).map(PathBuf::from)
    }
    fn text(&self) -> String {
        self.display().to_string()
    }
}

impl Value for SocketAddr {
    const KIND: &'static str = "address:port";
    fn parse(raw: &Raw) -> Option<SocketAddr> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for IpAddr {
    const KIND: &'static str = "IP address";
    fn parse(raw: &Raw) -> Option<IpAddr> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for usize {
    const KIND: &'static str = "number";
    fn parse(raw: &Raw) -> Option<usize> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        self.to_string()
    }
    fn measure(&self) -> Option<u64> {
        u64::try_from(*self).ok()
    }
}

impl Value for u8 {
    const KIND: &'static str = "number";
    fn parse(raw: &Raw) -> Option<u8> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        self.to_string()
    }
    fn measure(&self) -> Option<u64> {
        Some((*self).into())
    }
}

impl Value for u16 {
    const KIND: &'static str = "number";
    fn parse(raw: &Raw) -> Option<u16> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        self.to_string()
    }
    fn measure(&self) -> Option<u64> {
        Some((*self).into())
    }
}

impl Value for bool {
    const KIND: &'static str = "true or false";
    fn parse(raw: &Raw) -> Option<bool> {
        match raw.one()?.to_ascii_lowercase().as_str() {
            "true" | "on" | "yes" | "1" => Some(true),
            "false" | "off" | "no" | "0" => Some(false),
            _ => None,
        }
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for Duration {
    const KIND: &'static str = "duration";
    fn parse(raw: &Raw) -> Option<Duration> {
        let text = raw.one()?;
        let time: Time = text.parse().ok()?;
        // Finer than a nanosecond is not what anybody means, and would be rounded without a word.
        let fine = text
            .parse()
            .is_ok_and(|fine: Picos| !fine.as_ps().is_multiple_of(1_000));
        (!fine).then(|| time.into())
    }
    fn text(&self) -> String {
        plain(&Time::from(*self))
    }
    fn measure(&self) -> Option<u64> {
        u64::try_from(self.as_nanos()).ok()
    }
}

impl Value for Bytes {
    const KIND: &'static str = "size";
    fn parse(raw: &Raw) -> Option<Bytes> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        plain(self)
    }
    fn measure(&self) -> Option<u64> {
        Some(self.0)
    }
}

impl Value for When {
    const KIND: &'static str = "auto, on or off";
    fn parse(raw: &Raw) -> Option<When> {
        match raw.one()? {
            "auto" => Some(When::Auto),
            "on" | "true" => Some(When::On),
            "off" | "false" => Some(When::Off),
            _ => None,
        }
    }
    fn text(&self) -> String {
        match self {
            When::Auto => "auto",
            When::On => "on",
            When::Off => "off",
        }
        .to_owned()
    }
}

impl Value for AtomicsChoice {
    const KIND: &'static str = "auto, device or host";
    fn parse(raw: &Raw) -> Option<AtomicsChoice> {
        match raw.one()? {
            "auto" => Some(AtomicsChoice::Auto),
            "device" => Some(AtomicsChoice::Device),
            "host" => Some(AtomicsChoice::Host),
            _ => None,
        }
    }
    fn text(&self) -> String {
        match self {
            AtomicsChoice::Auto => "auto",
            AtomicsChoice::Device => "device",
            AtomicsChoice::Host => "host",
        }
        .to_owned()
    }
}

impl Value for FileIo {
    const KIND: &'static str = "auto, io_uring or threads";
    fn parse(raw: &Raw) -> Option<FileIo> {
        match raw.one()? {
            "auto" => Some(FileIo::Auto),
            "io_uring" => Some(FileIo::IoUring),
            "threads" => Some(FileIo::Threads),
            _ => None,
        }
    }
    fn text(&self) -> String {
        match self {
            FileIo::Auto => "auto",
            FileIo::IoUring => "io_uring",
            FileIo::Threads => "threads",
        }
        .to_owned()
    }
}

impl Value for ForeignMemory {
    const KIND: &'static str = "auto, process_vm or bounce";
    fn parse(raw: &Raw) -> Option<ForeignMemory> {
        match raw.one()? {
            "auto" => Some(ForeignMemory::Auto),
            "process_vm" => Some(ForeignMemory::ProcessVm),
            "bounce" => Some(ForeignMemory::Bounce),
            _ => None,
        }
    }
    fn text(&self) -> String {
        match self {
            ForeignMemory::Auto => "auto",
            ForeignMemory::ProcessVm => "process_vm",
            ForeignMemory::Bounce => "bounce",
        }
        .to_owned()
    }
}

impl Value for TransportChoice {
    const KIND: &'static str = "shared_memory, verbs or tcp";
    fn parse(raw: &Raw) -> Option<TransportChoice> {
        let text = raw.one()?;
        TransportChoice::ALL.into_iter().find(|choice| choice.name() == text)
    }
    fn text(&self) -> String {
        self.name().to_owned()
    }
}

impl Value for RendezvousChoice {
    const KIND: &'static str = "none, process, dir:PATH, etcd:URL or env";
    fn parse(raw: &Raw) -> Option<RendezvousChoice> {
        match raw.one()? {
            "none" => Some(RendezvousChoice::None),
            "process" => Some(RendezvousChoice::Process),
            "env" => Some(RendezvousChoice::Environment),
            text => match text.split_once(':')? {
                (_, "") => None,
                ("dir", path) => Some(RendezvousChoice::Directory(path.into())),
                ("etcd", url) => Some(RendezvousChoice::Etcd(url.to_owned())),
                _ => None,
            },
        }
    }
    fn text(&self) -> String {
        match self {
            RendezvousChoice::None => "none".to_owned(),
            RendezvousChoice::Process => "process".to_owned(),
            RendezvousChoice::Directory(path) => format!("dir:{}", path.display()),
            RendezvousChoice::Etcd(url) => format!("etcd:{url}"),
            RendezvousChoice::Environment => "env".to_owned(),
        }
    }
}

/// Empty text is unset.
impl<T: Value> Value for Option<T> {
    const KIND: &'static str = T::KIND;
    fn parse(raw: &Raw) -> Option<Option<T>> {
        match raw.one() {
            Some("") => Some(None),
            _ => T::parse(raw).map(Some),
        }
    }
    fn text(&self) -> String {
        self.as_ref().map(T::text).unwrap_or_default()
    }
    fn measure(&self) -> Option<u64> {
        self.as_ref().and_then(T::measure)
    }
}

impl Value for Vec<TransportChoice> {
    const KIND: &'static str = "list of shared_memory, verbs, tcp";
    fn parse(raw: &Raw) -> Option<Vec<TransportChoice>> {
        list(raw)
    }
    fn text(&self) -> String {
        listed(self)
    }
}

impl Value for AlgorithmChoice {
    const KIND: &'static str = "collective=algorithm";
    fn parse(raw: &Raw) -> Option<AlgorithmChoice> {
        raw.one()?.parse().ok()
    }
    fn text(&self) -> String {
        format!("{}={}", self.collective, self.candidate)
    }
}

impl Value for Vec<AlgorithmChoice> {
    const KIND: &'static str = "list of collective=algorithm";
    fn parse(raw: &Raw) -> Option<Vec<AlgorithmChoice>> {
        list(raw)
    }
    fn text(&self) -> String {
        listed(self)
    }
}

impl Value for Vec<String> {
    const KIND: &'static str = "list of names";
    fn parse(raw: &Raw) -> Option<Vec<String>> {
        list(raw)
    }
    fn text(&self) -> String {
        listed(self)
    }
}

impl Value for Vec<IpAddr> {
    const KIND: &'static str = "list of IP addresses";
    fn parse(raw: &Raw) -> Option<Vec<IpAddr>> {
        list(raw)
    }
    fn text(&self) -> String {
        listed(self)
    }
}

fn list<T: Value>(raw: &Raw) -> Option<Vec<T>> {
    raw.items()
        .into_iter()
        .map(|item| T::parse(&Raw::Text(item.to_owned())))
        .collect()
}

fn listed<T: Value>(items: &[T]) -> String {
    items.iter().map(T::text).collect::<Vec<_>>().join(",")
}

/// As on a command line: without the space and the letter that a shell or a keyboard makes awkward.
fn plain(quantity: &impl fmt::Display) -> String {
    quantity.to_string().replace(' ', "").replace('µ', "u")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse<T: Value>(text: &str) -> Option<T> {
        T::parse(&Raw::Text(text.to_owned()))
    }

    #[test]
    fn durations_and_sizes_read_as_people_write_them() {
        assert_eq!(parse("1.5s"), Some(Duration::from_millis(1500)));
        assert_eq!(parse("50 us"), Some(Duration::from_micros(50)));
        assert_eq!(parse("2min"), Some(Duration::from_secs(120)));
        assert_eq!(parse("64KiB"), Some(Bytes(65536)));
        assert_eq!(parse("1.5 GiB"), Some(Bytes(3 << 29)));
        assert_eq!(parse("4096"), Some(Bytes(4096)));
        for wrong in ["", "s", "1", "1 fortnight", "1..5s", "-1s", "0.5ns", "99999999999999h"] {
            assert_eq!(parse::<Duration>(wrong), None, "{wrong}");
        }
        for wrong in ["", "KiB", "1 KB2", "0.3B", "99999999TiB", "-4"] {
            assert_eq!(parse::<Bytes>(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn rendezvous_choices() {
        assert_eq!(parse("dir:/tmp/x"), Some(RendezvousChoice::Directory("/tmp/x".into())));
        assert_eq!(
            parse("etcd:http://h:2379"),
            Some(RendezvousChoice::Etcd("http://h:2379".into()))
        );
        assert_eq!(parse::<RendezvousChoice>("dir:"), None);
        assert_eq!(parse::<RendezvousChoice>("zookeeper:x"), None);
    }

    proptest! {
        #[test]
        fn durations_print_and_parse_back(nanos in 0..u64::MAX / 1_000) {
            let value = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&value.text()), Some(value));
        }

        #[test]
        fn sizes_print_and_parse_back(bytes: u64) {
            prop_assert_eq!(parse(&Bytes(bytes).text()), Some(Bytes(bytes)));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = (parse::<Duration>(&text), parse::<Bytes>(&text), parse::<Vec<IpAddr>>(&text));
            let _ = (parse::<RendezvousChoice>(&text), parse::<Vec<TransportChoice>>(&text));
        }
    }
}
