//! What the launcher left in the environment: who we are among the processes that it started, and where the first one is.

use super::RendezvousError;

/// One more process than this is a mistyped variable.
const SIZE_MAX: u32 = 1 << 24;
/// Where jobs of Slurm that name no port meet: above the registered ports, one place per job.
const SLURM_PORT_FIRST: u16 = 20_000;
const SLURM_PORTS: u32 = 10_000;

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
}

/// The variables of one launcher.
struct Launcher {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
}

/// In the order in which they are believed: torchrun inside a Slurm job speaks of its own processes.
const LAUNCHERS: &[Launcher] = &[
    Launcher {
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher {
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
    },
    Launcher {
        rank: "PMIX_RANK",
        size: &["PMIX_SIZE", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
    },
    Launcher {
        rank: "SLURM_PROCID",
        size: &["SLURM_NTASKS", "SLURM_NPROCS"],
        local_rank: "SLURM_LOCALID",
    },
];

impl World {
    pub fn of_process() -> Result<World, RendezvousError> {
        World::from_variables(|name| std::env::var(name).ok())
    }

    pub fn from_variables(variable: impl Fn(&'static str) -> Option<String>) -> Result<World, RendezvousError> {
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
            let (master, master_port) = master(&variable)?;
            return Ok(World {
                rank,
                size,
                local_rank: number(launcher.local_rank)?,
                master,
                master_port,
            });
        }
        Err(RendezvousError::NoWorld(RANK_VARIABLES))
    }
}

fn master(variable: &impl Fn(&'static str) -> Option<String>) -> Result<(String, u16), RendezvousError> {
    let host = match variable("MASTER_ADDR")
        .map(|host| host.trim().to_owned())
        .filter(|host| !host.is_empty())
    {
        Some(host) => host,
        None => {
            let nodes = variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
            let nodes = nodes.ok_or(RendezvousError::MissingVariable { name: "MASTER_ADDR" })?;
            first_node(&nodes).ok_or_else(|| bad("SLURM_STEP_NODELIST", nodes.clone()))?
        }
    };
    let port = match (variable("MASTER_PORT"), variable("SLURM_JOB_ID")) {
        (Some(port), _) => port.trim().parse().map_err(|_| bad("MASTER_PORT", port))?,
        (None, Some(job)) => {
            let number: u32 = job.trim().parse().map_err(|_| bad("SLURM_JOB_ID", job))?;
            // The remainder fits: it is below the number of ports.
            SLURM_PORT_FIRST + (number % SLURM_PORTS) as u16
        }
        (None, None) => return Err(RendezvousError::MissingVariable { name: "MASTER_PORT" }),
    };
    Ok((host, port))
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
        World::from_variables(|name| {
            variables
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, v)| (*v).to_owned())
        })
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
        let no_master = world(&[("RANK", "0"), ("WORLD_SIZE", "1")]);
        assert!(matches!(
            no_master,
            Err(RendezvousError::MissingVariable { name: "MASTER_ADDR" })
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
