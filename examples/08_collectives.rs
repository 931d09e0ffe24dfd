//! Collectives between processes, and what is left of them when one is killed.
//!
//! Four processes of this host reduce a buffer again and again. In the middle of it one of them is killed; the three others are told who
//! it was, form a group of those that are left, and go on. Then a new one joins them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use weft::{Agent, Communicator, Datatype, Error, JoinOptions, Memory, Rank, Reduction};

const RANKS: u32 = 4;
const VICTIM: u32 = 2;
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, number, directory] = &arguments[..] {
        return Ok(rank(number.parse()?, Path::new(directory))?);
    }
    let directory = std::env::temp_dir().join(format!("weft-collectives-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let mut ranks = (0..RANKS)
        .map(|number| start(number, &directory))
        .collect::<Result<Vec<Child>, _>>()?;
    // By now they are at work.
    std::thread::sleep(Duration::from_millis(1500));
    println!("rank {VICTIM} is killed");
    ranks[VICTIM as usize].kill()?;
    ranks.push(start(RANKS, &directory)?);
    for mut rank in ranks {
        rank.wait()?;
    }
    std::fs::remove_dir_all(directory)?;
    Ok(())
}

fn start(number: u32, directory: &PathBuf) -> std::io::Result<Child> {
    let own = std::env::current_exe()?;
    Command::new(own).arg(number.to_string()).arg(directory).spawn()
}

/// What one process does. The one after the last comes when another one has gone.
fn rank(number: u32, directory: &Path) -> Result<(), Error> {
    let agent = Agent::builder(&format!("process-{number}"))
        .secret("of this example")
        .set("rendezvous", format!("dir:{}", directory.display()))
        .start()?;
    let group = match number {
        RANKS => Communicator::join(&agent, JoinOptions::new("again", Rank(RANKS - 1), RANKS))?,
        _ => {
            let group = Communicator::join(&agent, JoinOptions::new("all", Rank(number), RANKS))?;
            let left = until_somebody_fails(&group)?;
            left.grow("again", RANKS)?
        }
    };
    let sum = ones(&agent)?;
    group.all_reduce(&sum, &sum, Datatype::F32, Reduction::Sum).run()?;
    println!(
        "process {number}, now rank {} of {}: the sum is {}",
        group.rank().0,
        group.size(),
        first(&sum)
    );
    // Nobody goes before all are done.
    group.barrier().run()
}

fn until_somebody_fails(group: &Communicator) -> Result<Communicator, Error> {
    let data = ones(group.agent())?;
    let failed = loop {
        let call = group.all_reduce(&data, &data, Datatype::F32, Reduction::Avg);
        if let Err(error) = call.deadline(PATIENCE).run() {
            break error;
        }
    };
    println!("rank {}: {failed}", group.rank().0);
    let left = group.shrink(PATIENCE)?;
    let sum = ones(group.agent())?;
    left.all_reduce(&sum, &sum, Datatype::F32, Reduction::Sum).run()?;
    println!(
        "rank {}, now rank {} of {}: the sum is {}",
        group.rank().0,
        left.rank().0,
        left.size(),
        first(&sum)
    );
    Ok(left)
}

fn ones(agent: &Agent) -> Result<Memory, Error> {
    let memory = agent.allocate(4 << 20)?;
    memory.write(0, &1f32.to_ne_bytes().repeat(1 << 20));
    Ok(memory)
}

fn first(memory: &Memory) -> f32 {
    let bytes = memory.to_vec();
    f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
