//! Which transports an agent starts, from its settings.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use weft_fabric::cuda::CudaHere;
use weft_fabric::file::{FileHere, FileHereOptions, Means};
#[cfg(feature = "s3")]
use weft_fabric::object::{ObjectHere, ObjectHereOptions};
use weft_fabric::shared_memory::Foreign;
use weft_fabric::tcp::{Tcp, TcpOptions, TlsOptions};
use weft_fabric::verbs::{AtomicsBy, Mtu, OnDemandPaging, RailOptions, RegistrationOptions, Verbs, VerbsOptions};
use weft_fabric::{Clock, Live, SharedMemory, SharedMemoryOptions};
use weft_protocol::agent::{Reach, Slot};
use weft_protocol::region::Epoch;

use crate::error::Error;
use crate::settings::{AtomicsChoice, FileIo, ForeignMemory, Settings, TransportChoice, When, long_enough};

/// Equal at two agents that can share memory: the same boot of the same host, and the same network namespace, which is where the
/// sockets that hand memory over have their names.
pub(crate) fn host_identity() -> String {
    let namespace = std::fs::read_link("/proc/thread-self/ns/net").unwrap_or_default();
    format!(
        "{}/{}",
        weft_fabric::shared_memory::host_identity(),
        namespace.display()
    )
}

/// Starts them in the order of preference. Those that other hosts can reach need a secret that cannot be guessed.
pub(crate) fn start(
    settings: &Settings,
    secret: &[u8],
    epoch: Epoch,
    clock: Clock,
) -> Result<Vec<Slot<dyn Live>>, Error> {
    let mut slots: Vec<Slot<dyn Live>> = Vec::new();
    for (preference, choice) in (0..).zip(&settings.transports) {
        match choice {
            TransportChoice::SharedMemory => {
                let options = SharedMemoryOptions {
                    foreign: match settings.shared_memory_foreign {
                        ForeignMemory::Auto => Foreign::Auto,
                        ForeignMemory::ProcessVm => Foreign::ProcessVm,
                        ForeignMemory::Bounce => Foreign::Bounce,
                    },
                    inline_bytes_max: settings.inline_bytes.0,
                    helper: settings.shared_memory_helper,
                    gpu_stay: settings.gpu_stay,
                    ..SharedMemoryOptions::default()
                };
                let transport = SharedMemory::start(options, epoch, clock).map_err(failed("shared_memory"))?;
                slots.push(Slot {
                    reach: Reach::SameHost,
                    preference,
                    paths: 1,
                    transport: Box::new(transport),
                });
            }
            TransportChoice::Tcp => {
                let tls = tls_options(settings)?;
                for rail in rails(settings) {
                    let options = tcp_options(settings, rail, tls.clone());
                    if !options.listen.ip().is_loopback() {
                        long_enough(secret, || format!("an agent that listens on {}", options.listen))?;
                    }
                    let transport = Tcp::start(options, epoch, clock).map_err(failed("tcp"))?;
                    slots.push(Slot {
                        reach: Reach::Anywhere,
                        preference,
                        paths: 1,
                        transport: Box::new(transport),
                    });
                }
            }
            TransportChoice::Verbs => {
                let started = verbs(settings, secret, epoch, clock)?;
                slots.extend(started.into_iter().map(|transport| Slot {
                    reach: Reach::Anywhere,
                    preference,
                    paths: 1,
                    transport: Box::new(transport) as Box<dyn Live>,
                }));
            }
        }
    }
    // Nothing is asked of the kernel before a file is opened, unless it must be io_uring.
    let files = FileHere::start(epoch, file_options(settings)).map_err(failed("file"))?;
    slots.push(Slot {
        reach: Reach::Here,
        preference: 0,
        paths: 1,
        transport: Box::new(files),
    });
    #[cfg(feature = "s3")]
    {
        // Nobody is asked for anything before an object is moved.
        let options = ObjectHereOptions::default()
            .depth(settings.object_depth)
            .staging_bytes(settings.object_staging.0);
        let objects = ObjectHere::start(epoch, clock, options).map_err(failed("object"))?;
        slots.push(Slot {
            reach: Reach::Here,
            preference: 0,
            paths: 1,
            transport: Box::new(objects),
        });
    }
    if CudaHere::is_likely() {
        // Nothing is loaded before a device's memory is registered.
        let transport = CudaHere::start(epoch, settings.gpu_stay).map_err(failed("cuda"))?;
        slots.push(Slot {
            reach: Reach::Here,
            preference: 0,
            paths: 1,
            transport: Box::new(transport),
        });
    }
    Ok(slots)
}

/// One transport a rail. Where nobody has asked for it, absence is ordinary, and so is a rail that does not start.
fn verbs(settings: &Settings, secret: &[u8], epoch: Epoch, clock: Clock) -> Result<Vec<Verbs>, Error> {
    let wanted = settings.is_set("transports") || settings.is_set("verbs.devices");
    let rail_options = RailOptions {
        devices: settings.verbs_devices.clone(),
        gid_index: settings.verbs_gid_index,
    };
    let rails = match weft_fabric::verbs::rails(&rail_options) {
        Ok(rails) => rails,
        Err(reason) if wanted => return Err(failed("verbs")(reason)),
        Err(reason) => {
            tracing::debug!(%reason, "no RDMA");
            return Ok(Vec::new());
        }
    };
    if let Err(reason) = long_enough(secret, || "an RDMA rail".to_owned()) {
        if wanted {
            return Err(reason.into());
        }
        tracing::warn!(%reason, "no RDMA");
        return Ok(Vec::new());
    }
    let options = verbs_options(settings);
    let mut started = Vec::with_capacity(rails.len());
    for rail in rails {
        let name = rail.name();
        match Verbs::start(options.clone(), rail, epoch, clock) {
            Ok(transport) => started.push(transport),
            Err(error) if wanted => return Err(failed("verbs")(error)),
            Err(error) => tracing::warn!(rail = name, %error, "an RDMA rail did not start"),
        }
    }
    Ok(started)
}

fn file_options(settings: &Settings) -> FileHereOptions {
    FileHereOptions::default()
        .means(match settings.file_io {
            FileIo::Auto => Means::Auto,
            FileIo::IoUring => Means::Ring,
            FileIo::Threads => Means::Thread,
        })
        .depth(settings.file_depth)
        .registered_bytes(settings.file_registered.0)
        .staging_bytes(settings.file_staging.0)
}

fn verbs_options(settings: &Settings) -> VerbsOptions {
    VerbsOptions {
        traffic_class: settings.verbs_traffic_class,
        service_level: settings.verbs_service_level,
        timeout: settings.verbs_timeout.into(),
        retries: settings.verbs_retries,
        mtu: settings.verbs_mtu.and_then(|bytes| Mtu::from_bytes(bytes.into())),
        atomics: match settings.verbs_atomics {
            AtomicsChoice::Auto => AtomicsBy::Auto,
            AtomicsChoice::Device => AtomicsBy::Device,
            AtomicsChoice::Host => AtomicsBy::Host,
        },
        registration: RegistrationOptions {
            odp: match settings.verbs_odp {
                When::Auto => OnDemandPaging::Auto,
                When::On => OnDemandPaging::Always,
                When::Off => OnDemandPaging::Never,
            },
            ..RegistrationOptions::default()
        },
        ..VerbsOptions::default()
    }
}

/// One TCP transport per local address, or a single one where the kernel chooses.
fn rails(settings: &Settings) -> Vec<Option<IpAddr>> {
    match settings.tcp_rails.as_slice() {
        [] => vec![None],
        rails => rails.iter().copied().map(Some).collect(),
    }
}

fn tcp_options(settings: &Settings, rail: Option<IpAddr>, tls: Option<TlsOptions>) -> TcpOptions {
    let listen = match rail {
        // Several cannot share a port that was asked for on a wildcard, so each listens on its own address.
        Some(address) => SocketAddr::new(address, settings.listen.port()),
        None => settings.listen,
    };
    TcpOptions {
        listen,
        advertise: settings.advertise,
        source: rail,
        connections: settings.tcp_connections as u32,
        silence_max: settings.silence_max.into(),
        tls,
        ..TcpOptions::default()
    }
}

/// Certificates and keys from their files, where TLS is asked for.
fn tls_options(settings: &Settings) -> Result<Option<TlsOptions>, Error> {
    let Settings {
        tcp_tls_cert: Some(certificate),
        tcp_tls_key: Some(key),
        tcp_tls_roots: Some(roots),
        ..
    } = settings
    else {
        return Ok(None);
    };
    let unreadable = |path: &PathBuf| {
        let path = path.clone();
        move |source| Error::Certificate {
            path,
            source: Arc::new(source),
        }
    };
    let all = |path: &PathBuf| -> Result<Vec<Vec<u8>>, Error> {
        let found = CertificateDer::pem_file_iter(path).map_err(unreadable(path))?;
        found.map(|c| c.map(|c| c.to_vec()).map_err(unreadable(path))).collect()
    };
    Ok(Some(TlsOptions {
        certificates: all(certificate)?,
        key: PrivateKeyDer::from_pem_file(key)
            .map_err(unreadable(key))?
            .secret_der()
            .to_vec(),
        roots: all(roots)?,
        server_name: settings.tcp_tls_name.clone().unwrap_or_else(|| "weft".to_owned()),
    }))
}

fn failed<E: std::error::Error + Send + Sync + 'static>(transport: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Transport {
        transport,
        source: Arc::new(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Sources;

    fn started(sources: &Sources) -> Result<Vec<&'static str>, Error> {
        let settings = Settings::from_sources(sources).expect("valid settings");
        let slots = start(&settings, &[7; 16], Epoch(1), Clock::start())?;
        Ok(slots.iter().map(|slot| slot.transport.capabilities().name).collect())
    }

    #[test]
    fn rdma_is_left_out_where_it_is_not_and_must_be_there_where_it_was_named() {
        if weft_fabric::verbs::rails(&RailOptions::default()).is_ok() {
            return;
        }
        let default = started(&Sources::default()).expect("absence is ordinary");
        let here: &[&str] = if cfg!(feature = "s3") {
            &["file", "object"]
        } else {
            &["file"]
        };
        assert_eq!(default, [&["shared_memory", "tcp"], here].concat());
        for (key, value) in [("transports", "verbs,tcp"), ("verbs.devices", "mlx5_0")] {
            let refused = started(&Sources::default().set(key, value));
            assert!(
                matches!(refused, Err(Error::Transport { transport: "verbs", .. })),
                "{key}: {refused:?}"
            );
        }
    }

    #[test]
    fn a_short_secret_stays_within_this_host() {
        for (listen, secret, fits) in [
            ("127.0.0.1:0", &b"short"[..], true),
            ("0.0.0.0:0", b"sixteen bytes of", true),
            ("0.0.0.0:0", b"fifteen bytes o", false),
        ] {
            let sources = Sources::default().set("transports", "tcp").set("listen", listen);
            let settings = Settings::from_sources(&sources).expect("valid settings");
            let started = start(&settings, secret, Epoch(1), Clock::start());
            match started {
                Ok(_) => assert!(fits, "{listen}"),
                Err(Error::Secret(error)) => assert!(!fits, "{listen}: {error}"),
                Err(other) => panic!("{listen}: {other}"),
            }
        }
    }

    #[test]
    fn transports_are_preferred_in_the_order_of_their_names() {
        let sources = Sources::default().set("transports", "tcp,shared_memory");
        let settings = Settings::from_sources(&sources).expect("valid settings");
        let slots = start(&settings, &[7; 16], Epoch(1), Clock::start()).expect("both work everywhere");
        let order: Vec<_> = slots
            .iter()
            .map(|slot| (slot.transport.capabilities().name, slot.preference))
            .collect();
        assert_eq!(order[..2], [("tcp", 0), ("shared_memory", 1)]);
    }

    #[test]
    fn rails_are_by_default_what_the_transport_means_them_to_be() {
        let settings = Settings::from_sources(&Sources::default()).expect("the defaults are valid");
        let (ours, theirs) = (verbs_options(&settings), VerbsOptions::default());
        assert_eq!((ours.timeout, ours.retries), (theirs.timeout, theirs.retries));
        assert_eq!(
            (ours.traffic_class, ours.service_level, ours.mtu),
            (theirs.traffic_class, theirs.service_level, theirs.mtu)
        );
    }

    #[test]
    fn files_are_by_default_reached_as_the_transport_means_them_to_be() {
        let settings = Settings::from_sources(&Sources::default()).expect("the defaults are valid");
        assert_eq!(file_options(&settings), FileHereOptions::default());
    }

    #[test]
    fn packets_have_sizes_that_devices_know() {
        let with = |value: &str| Settings::from_sources(&Sources::default().set("verbs.mtu", value));
        assert_eq!(verbs_options(&with("2048").expect("a size")).mtu, Some(Mtu::Bytes2048));
        assert!(with("1500").is_err() && with("8192").is_err());
    }
}
