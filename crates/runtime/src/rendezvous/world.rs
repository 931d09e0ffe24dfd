//! What the launcher left in the environment: who we are among the processes that it started, and where the first one is.

use weft_protocol::memory::Digest;

use super::RendezvousError;

/// One more process than this is a mistyped variable.
const SIZE_MAX: u32 = 1 << 24;
/// Where jobs meet whose launcher names no port: above the registered ports and below those that the kernel hands out, one place a job.
const JOB_PORT_FIRST: u16 = 20_000;
const JOB_PORTS: u64 = 10_000;
/// What launchers of MPI tell their jobs apart by, the same in all processes of one.
const MPI_JOBS: &[&str] = &[
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
    "PMI_JOBID",
    "PMI_PORT",
];

const RANK_VARIABLES: &str = "RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK, SLURM_PROCID";

/// The group of processes that a launcher (torchrun, MPI or Slurm) started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    pub rank: u32,
    pub size: u32,
    /// The position among the processes of this host, where the launcher tells it.
    pub local_rank: Option<u32>,
    /// The host of rank 0.
    pub master: String,
    pub master_port: u16,
    /// What tells this job from others that may have come to the same place, where nobody said where to meet.
    pub job: Option<String>,
}

/// The variables of one launcher.
struct Launcher {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
    /// How many processes it has started on this host.
    local_size: &'static str,
    /// How one tells its processes something.
    adding: &'static str,
}

/// In the order in which they are believed: torchrun inside a Slurm job speaks of its own processes.
const LAUNCHERS: &[Launcher] = &[
    Launcher {
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        adding: "MASTER_ADDR=HOST MASTER_PORT=29500 before the command, for every rank",
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        adding: "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    },
    Launcher {
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        adding: "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
    },
    Launcher {
        rank: "PMIX_RANK",
        size: &["PMIX_SIZE", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_size: "PMIX_LOCAL_SIZE",
        adding: "MASTER_ADDR=HOST MASTER_PORT=29500 in the environment of every rank",
    },
    Launcher {
        rank: "SLURM_PROCID",
        size: &["SLURM_NTASKS", "SLURM_NPROCS"],
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
        adding: "srun --export=ALL,MASTER_ADDR=HOST,MASTER_PORT=29500",
    },
];

impl World {
    pub fn of_process() -> Result<World, RendezvousError> {
        World::from_variables(|name| std::env::var(name).ok(), std::os::unix::process::parent_id())
    }

    /// `parent` is the number of the process that has started this one: on one host the launcher, or a hand of it.
    pub fn from_variables(
        variable: impl Fn(&'static str) -> Option<String>,
        parent: u32,
    ) -> Result<World, RendezvousError> {
        let number = |name| match variable(name) {
            None => Ok(None),
            Some(value) => match value.trim().parse::<u32>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(bad(name, value)),
            },
        };
        for launcher in LAUNCHERS {
            let Some(rank) = number(launcher.rank)? else { continue };
            let mut size = None;
            for name in launcher.size {
                size = size.or(number(name)?);
            }
            let size = size.ok_or(RendezvousError::MissingVariable { name: launcher.size[0] })?;
            if !(1..=SIZE_MAX).contains(&size) {
                return Err(bad(launcher.size[0], size.to_string()));
            }
            if rank >= size {
                return Err(bad(launcher.rank, rank.to_string()));
            }
            let one_host = size == 1 || number(launcher.local_size).is_ok_and(|local| local == Some(size));
            let (master, master_port, job) = match given_master(&variable)? {
                Some((master, master_port)) => (master, master_port, None),
                None if one_host => {
                    let (port, job) = own_place(&variable, parent);
                    ("127.0.0.1".to_owned(), port, Some(job))
                }
                None => {
                    return Err(RendezvousError::NoMaster {
                        rank: launcher.rank,
                        adding: launcher.adding,
                    });
                }
            };
            return Ok(World {
                rank,
                size,
                local_rank: number(launcher.local_rank)?,
                master,
                master_port,
                job,
            });
        }
        Err(RendezvousError::NoWorld(RANK_VARIABLES))
    }
}

/// Where rank 0 is, if the environment says so.
fn given_master(variable: &impl Fn(&'static str) -> Option<String>) -> Result<Option<(String, u16)>, RendezvousError> {
    let named = variable("MASTER_ADDR").map(|host| host.trim().to_owned());
    let nodes = || variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
    let host = match (named.filter(|host| !host.is_empty()), nodes()) {
        (Some(host), _) => host,
        (None, Some(nodes)) => first_node(&nodes).ok_or_else(|| bad("SLURM_STEP_NODELIST", nodes.clone()))?,
        (None, None) => return Ok(None),
    };
    let port = match (variable("MASTER_PORT"), variable("SLURM_JOB_ID")) {
        (Some(port), _) => port.trim().parse().map_err(|_| bad("MASTER_PORT", port))?,
        (None, Some(job)) => {
            let number: u32 = job.trim().parse().map_err(|_| bad("SLURM_JOB_ID", job))?;
            job_port(number.into())
        }
        (None, None) => return Err(RendezvousError::MissingVariable { name: "MASTER_PORT" }),
    };
    Ok(Some((host, port)))
}

/// Where processes of one host meet that were told nothing, and what tells them from those of another job: all of them were started by one
/// process, whatever else is known.
fn own_place(variable: &impl Fn(&'static str) -> Option<String>, parent: u32) -> (u16, String) {
    let known = MPI_JOBS.iter().find_map(|name| variable(name));
    let job = known.map_or_else(|| format!("started by {parent}"), |job| job.chars().take(80).collect());
    let mut digest = Digest::default();
    digest.update(job.as_bytes());
    (job_port(digest.finish()), job)
}

fn job_port(number: u64) -> u16 {
    // The remainder fits: it is below the number of ports.
    JOB_PORT_FIRST + (number % JOB_PORTS) as u16
}

/// The first host of a list as Slurm writes it: `n1`, `n1,n2`, `gpu[007-012,020]`, `rack1-node[3]-ib`.
fn first_node(nodes: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = nodes.trim();
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        name.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (inside, after) = rest[end + 1..].split_once(']')?;
        name.push_str(inside.split([',', '-']).next()?);
        rest = after;
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    (!name.is_empty() && name.len() <= 255 && name.chars().all(plain)).then_some(name)
}

fn bad(name: &'static str, value: String) -> RendezvousError {
    RendezvousError::BadVariable {
        name,
        value: value.chars().take(80).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn world(variables: &[(&str, &str)]) -> Result<World, RendezvousError> {
        let given = |name| {
            let mut variables = variables.iter();
            variables.find(|(key, _)| *key == name).map(|(_, v)| (*v).to_owned())
        };
        World::from_variables(given, 4711)
    }

    #[test]
    fn each_launcher_is_understood() {
        let master = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        let with = |rest: &[(&'static str, &'static str)]| world(&[&master[..], rest].concat()).unwrap();
        let torchrun = with(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("SLURM_PROCID", "0"),
        ]);
        assert_eq!((torchrun.rank, torchrun.size, torchrun.local_rank), (3, 8, Some(1)));
        assert_eq!((torchrun.master.as_str(), torchrun.master_port), ("10.0.0.1", 29500));
        let open_mpi = with(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")]);
        assert_eq!((open_mpi.rank, open_mpi.size), (1, 2));
        assert_eq!(with(&[("PMI_RANK", "0"), ("PMI_SIZE", "4")]).size, 4);
        let slurm = world(&[
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NODELIST", "gpu[007-010],x"),
            ("SLURM_JOB_ID", "123456"),
        ])
        .unwrap();
        assert_eq!((slurm.master.as_str(), slurm.master_port), ("gpu007", 23456));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        assert!(matches!(world(&[]), Err(RendezvousError::NoWorld(_))));
        assert!(matches!(
            world(&[("RANK", "0")]),
            Err(RendezvousError::MissingVariable { name: "WORLD_SIZE" })
        ));
        let no_port = world(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")]);
        assert!(matches!(
            no_port,
            Err(RendezvousError::MissingVariable { name: "MASTER_PORT" })
        ));
        for (rank, size) in [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0"), ("0", "99999999")] {
            let wrong = world(&[
                ("RANK", rank),
                ("WORLD_SIZE", size),
                ("MASTER_ADDR", "a"),
                ("MASTER_PORT", "1"),
            ]);
            assert!(
                matches!(wrong, Err(RendezvousError::BadVariable { .. })),
                "{rank} {size}"
            );
        }
    }

    #[test]
    fn the_variables_of_mpi_are_enough_on_one_host() {
        let open_mpi = |rank, job| {
            world(&[
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
                ("PMIX_NAMESPACE", job),
            ])
            .unwrap()
        };
        let (first, last) = (open_mpi("0", "prterun-a-1@1"), open_mpi("3", "prterun-a-1@1"));
        assert_eq!((first.master.as_str(), last.rank), ("127.0.0.1", 3));
        assert_eq!((first.master_port, &first.job), (last.master_port, &last.job));
        let other = open_mpi("0", "prterun-a-2@1");
        assert!(other.job != first.job && other.master_port != first.master_port);
        // Without any name of the job, all that it has in common is who started it.
        let mpich = |rank| world(&[("PMI_RANK", rank), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2")]).unwrap();
        assert_eq!(mpich("0").master_port, mpich("1").master_port);
        assert_eq!(mpich("0").job.as_deref(), Some("started by 4711"));
        assert!((JOB_PORT_FIRST..JOB_PORT_FIRST + JOB_PORTS as u16).contains(&mpich("0").master_port));
    }

    #[test]
    fn on_several_hosts_the_message_says_what_to_add() {
        for (variables, says) in [
            (
                vec![
                    ("OMPI_COMM_WORLD_RANK", "1"),
                    ("OMPI_COMM_WORLD_SIZE", "4"),
                    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ],
                "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
            ),
            (
                vec![("PMI_RANK", "1"), ("PMI_SIZE", "4")],
                "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
            ),
        ] {
            let text = world(&variables).unwrap_err().to_string();
            assert!(text.contains(says) && text.contains("rank 0"), "{text}");
        }
    }

    #[test]
    fn the_first_node_of_a_list() {
        assert_eq!(first_node("n1,n2").as_deref(), Some("n1"));
        assert_eq!(first_node("rack[2-3]-node[01,4]").as_deref(), Some("rack2-node01"));
        assert_eq!(first_node("gpu[3").as_deref(), None);
        assert_eq!(first_node("a b").as_deref(), None);
        assert_eq!(first_node("").as_deref(), None);
    }

    proptest! {
        #[test]
        fn no_list_panics(list: String) {
            let _ = first_node(&list);
        }
    }
}
