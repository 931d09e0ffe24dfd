//! Two connected ends in two processes, over one transport: what `demo` and `bench` measure.

use std::fmt;
use std::time::{Duration, Instant};

use weft::{Agent, Direction, Memory, Peer, Prepared, Remote};
use weft_plan::Spans;

use crate::complaint::{Complaint, Exit};
use crate::ends::{self, Allocation, Overrides, PATIENCE};
use crate::partner::{Partner, REGION, Role};

/// A transport, and for shared memory the kind of memory it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// Between processes of one machine, memory that Weft allocated
    #[value(name = "shared_memory")]
    SharedMemory,
    /// Between processes of one machine, memory that somebody else allocated
    #[value(name = "shared_memory.foreign")]
    SharedMemoryForeign,
    /// Between processes of one machine, memory of the first GPU at both ends
    #[value(name = "shared_memory.gpu")]
    SharedMemoryGpu,
    /// Between processes of one machine, memory of the first GPU here and host memory there
    #[value(name = "shared_memory.gpu_host")]
    SharedMemoryGpuHost,
    /// Through a socket
    #[value(name = "tcp")]
    Tcp,
    /// Through a socket, memory of the first GPU here and host memory there, by way of host memory here
    #[value(name = "tcp.gpu")]
    TcpGpu,
    /// By RDMA network cards, over all their rails
    #[value(name = "verbs")]
    Verbs,
}

impl Way {
    /// The transport's name in the settings.
    pub fn transport(self) -> &'static str {
        match self {
            Way::SharedMemory | Way::SharedMemoryForeign | Way::SharedMemoryGpu | Way::SharedMemoryGpuHost => {
                "shared_memory"
            }
            Way::Tcp | Way::TcpGpu => "tcp",
            Way::Verbs => "verbs",
        }
    }

    /// Here and there.
    fn allocations(self) -> (Allocation, Allocation) {
        match self {
            Way::SharedMemory | Way::Tcp | Way::Verbs => (Allocation::Mapped, Allocation::Mapped),
            Way::SharedMemoryForeign => (Allocation::Foreign, Allocation::Foreign),
            Way::SharedMemoryGpu => (Allocation::Gpu, Allocation::Gpu),
            // A staged transfer stops here, so the other end of a socket has host memory.
            Way::SharedMemoryGpuHost | Way::TcpGpu => (Allocation::Gpu, Allocation::Mapped),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::SharedMemory => "shared_memory",
            Way::SharedMemoryForeign => "shared_memory.foreign",
            Way::SharedMemoryGpu => "shared_memory.gpu",
            Way::SharedMemoryGpuHost => "shared_memory.gpu_host",
            Way::Tcp => "tcp",
            Way::TcpGpu => "tcp.gpu",
            Way::Verbs => "verbs",
        })
    }
}

/// Who the two ends are and how much memory each has.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    pub here: &'a str,
    pub there: &'a str,
    pub region_bytes: u64,
    pub echo: bool,
    /// Where the partner listens, if it is not to be started here.
    pub at: Option<&'a str>,
}

/// How long to wait for the second and further rails of a transport.
const RAILS_WAIT: Duration = Duration::from_secs(5);

/// This process's end, the connection, and the partner at the other end of it.
#[derive(Debug)]
pub struct Pair {
    pub local: Memory,
    pub remote: Remote,
    pub peer: Peer,
    pub agent: Agent,
    // Last, so that the other end is there until this one has closed.
    pub partner: Partner,
}

impl Pair {
    pub fn start(way: Way, cast: Cast<'_>, overrides: &Overrides) -> Result<Pair, Complaint> {
        let overrides = overrides.with("transports", way.transport());
        let (here, there) = way.allocations();
        let role = Role {
            name: cast.there,
            region_bytes: cast.region_bytes,
            allocation: there,
            echo: cast.echo,
        };
        let partner = match cast.at {
            Some(at) => Partner::hire(role, way.transport(), at, &overrides)?,
            None => Partner::spawn(role, &overrides)?,
        };
        let agent = overrides.start(cast.here)?;
        let local = ends::acquire(&agent, cast.region_bytes, here)?;
        let peer = agent
            .connect(partner.address())
            .map_err(|error| ends::explain(&error, &format!("The two processes did not connect over {way}.")))?;
        let remote = peer
            .region(REGION, PATIENCE)
            .map_err(|error| ends::explain(&error, "The second process published no region."))?;
        // The session is up with the first path; what is measured is all of them. A rail that leads nowhere is not waited for.
        let start = Instant::now();
        while peer.paths(way.transport()) < agent.rails(way.transport()) && start.elapsed() < RAILS_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Pair {
            local,
            remote,
            peer,
            agent,
            partner,
        })
    }

    pub fn prepare(&self, plan: Plan) -> Result<Prepared, Complaint> {
        let builder = match plan.direction {
            Direction::Read => self.peer.read(&self.local, &self.remote),
            Direction::Write => self.peer.write(&self.local, &self.remote),
        };
        let builder = builder.spans(plan.near, plan.far).checksum(plan.checksum);
        match plan.deadline {
            Some(deadline) => builder.deadline(deadline),
            None => builder,
        }
        .prepare()
        .map_err(|error| ends::explain(&error, "The transfer could not be prepared."))
    }
}

/// Which bytes go where, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    pub direction: Direction,
    pub near: Spans,
    pub far: Spans,
    pub checksum: bool,
    /// As the settings say, where there is none.
    pub deadline: Option<Duration>,
}

impl Plan {
    pub fn new(direction: Direction, near: Spans, far: Spans) -> Plan {
        Plan {
            direction,
            near,
            far,
            checksum: false,
            deadline: None,
        }
    }

    pub fn checksum(self, checksum: bool) -> Plan {
        Plan { checksum, ..self }
    }

    pub fn deadline(self, deadline: Duration) -> Plan {
        Plan {
            deadline: Some(deadline),
            ..self
        }
    }
}

/// Posts a prepared transfer once and says how long it took, from post to done.
pub fn once(prepared: &Prepared) -> Result<Duration, Complaint> {
    let start = Instant::now();
    let outcome = prepared.post().and_then(|transfer| transfer.wait());
    let elapsed = start.elapsed();
    match outcome {
        Ok(_) => Ok(elapsed),
        Err(error) => Err(ends::explain(
            &error,
            "A transfer between two healthy processes failed.",
        )),
    }
}

/// The measured times of one transfer posted again and again.
#[derive(Clone, Debug)]
pub struct Samples(Vec<Duration>);

/// The most samples that are kept of one measurement.
const SAMPLES_MAX: usize = 20_000;
const SAMPLES_MIN: usize = 3;
const WARM_UPS: usize = 1;

impl Samples {
    /// Posts again and again for about `budget`, a few times at least.
    pub fn take(prepared: &Prepared, budget: Duration) -> Result<Samples, Complaint> {
        for _ in 0..WARM_UPS {
            once(prepared)?;
        }
        let start = Instant::now();
        let mut times = Vec::new();
        while times.len() < SAMPLES_MIN || (start.elapsed() < budget && times.len() < SAMPLES_MAX) {
            times.push(once(prepared)?);
        }
        Ok(Samples::of(times))
    }

    pub fn of(mut times: Vec<Duration>) -> Samples {
        times.sort_unstable();
        Samples(times)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The time that `share` of the samples do not exceed. There is at least one sample.
    pub fn quantile(&self, share: f64) -> Duration {
        let index = (share * self.0.len() as f64).ceil() as usize;
        self.0[index.clamp(1, self.0.len()) - 1]
    }

    pub fn median(&self) -> Duration {
        self.quantile(0.5)
    }
}

/// The complaint that verification failed.
pub fn differs(what: &str, offset: u64) -> Complaint {
    Complaint::new(Exit::Differs, format!("Byte {offset} of {what} is not what was sent."))
        .try_this("this is a fault in Weft or in the machine; please report it with the output of `weft doctor --json`")
}
