//! One virtual machine: its qemu process, the directory it shares with the host, and what it says.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use super::{Ended, Error, Machine, file_error};
use crate::command::{self, root};

const GUEST: &str = include_str!("guest.sh");
/// Lines of the kernel's messages that are shown of a machine that died.
const LAST_LINES: usize = 15;
/// Bytes of one line that are read. A longer one is handed over in pieces.
const LINE_MAX: u64 = 64 << 10;

/// What all nodes of one run have in common.
#[derive(Debug)]
pub struct Boot<'a> {
    pub machine: &'a Machine,
    pub kernel: &'a Path,
    /// Of this run: the initramfs, and a directory for each node.
    pub directory: &'a Path,
    pub nodes: usize,
    /// The rate of the host's time stamp counter.
    pub counter_khz: u64,
}

/// What a node says, by its number.
#[derive(Debug)]
pub enum Said {
    Line(usize, String),
    /// No more lines will come: the machine is off, or dead.
    End(usize),
}

/// A running machine. Dropping it pulls the plug.
#[derive(Debug)]
pub struct Node {
    process: Child,
    index: usize,
    directory: PathBuf,
}

impl Node {
    pub fn start(boot: &Boot<'_>, index: usize, command: &str, said: Sender<Said>) -> Result<Node, Error> {
        let directory = boot.directory.join(index.to_string());
        let project = root().canonicalize().map_err(file_error(&root()))?;
        let write = |name: &str, content: &str| {
            let path = directory.join(name);
            fs::write(&path, content).map_err(file_error(&path))
        };
        fs::create_dir(&directory).map_err(file_error(&directory))?;
        write("project", &format!("{}\n", project.display()))?;
        write("guest.sh", GUEST)?;
        write("environment", &environment(boot, index, &project))?;
        write("command.sh", command)?;
        let complaints = directory.join("qemu");
        let complaints = File::create(&complaints).map_err(file_error(&complaints))?;
        // The kernel kills qemu when this process is gone, however it went.
        let mut process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
            .args(arguments(boot, index, &project))
            .current_dir(boot.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(complaints)
            .spawn()
            .map_err(|source| command::Error::NotStarted {
                program: "qemu-system-x86_64".to_owned(),
                source,
            })?;
        let stdout = process.stdout.take().expect("a pipe was asked for");
        std::thread::spawn(move || hear(BufReader::new(stdout), index, &said));
        Ok(Node {
            process,
            index,
            directory,
        })
    }

    /// How the command ended, once the machine is off.
    pub fn ended(&mut self) -> Result<Ended, Error> {
        let status = self.process.wait().map_err(file_error(&self.directory))?;
        let written = fs::read_to_string(self.directory.join("status")).unwrap_or_default();
        match written.trim().parse() {
            Ok(code) => Ok(Ended::Exited(code)),
            Err(_) => Ok(Ended::Died {
                last_words: format!("{}qemu: {status}", self.last_words()),
            }),
        }
    }

    pub fn keep_console(&self, path: &Path) -> Result<(), Error> {
        let mut kept = path.as_os_str().to_owned();
        if self.index > 0 {
            kept.push(format!(".{}", self.index));
        }
        let kept = PathBuf::from(kept);
        fs::copy(self.directory.join("console"), &kept).map_err(file_error(&kept))?;
        Ok(())
    }

    /// The end of the kernel's messages and of qemu's.
    pub fn last_words(&self) -> String {
        let tail = |name: &str| {
            let said = fs::read(self.directory.join(name)).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).into_owned();
            let lines: Vec<&str> = said.lines().collect();
            let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
            last.iter().map(|line| format!("{line}\n")).collect::<String>()
        };
        tail("console") + &tail("qemu")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Hands over line by line what the guest's programs print.
fn hear(mut output: impl BufRead, node: usize, said: &Sender<Said>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = std::io::Read::take(&mut output, LINE_MAX).read_until(b'\n', &mut line);
        if !read.is_ok_and(|bytes| bytes > 0) {
            break;
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if said.send(Said::Line(node, text)).is_err() {
            return;
        }
    }
    // Nobody listens any more if this fails.
    let _ = said.send(Said::End(node));
}

/// What the job knows of the world, in bash.
fn environment(boot: &Boot<'_>, index: usize, project: &Path) -> String {
    let quoted = project.display().to_string().replace('\'', r"'\''");
    format!(
        "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp\n\
         export NODE={index} NODES={nodes} RAILS={rails} PROJECT='{quoted}'\n",
        nodes = boot.nodes,
        rails = boot.machine.rails,
    )
}

fn arguments(boot: &Boot<'_>, index: usize, project: &Path) -> Vec<String> {
    let machine = boot.machine;
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(|word| (*word).to_owned()));
    let accelerator = if machine.kvm {
        "kvm"
    } else {
        "tcg,thread=multi,tb-size=256"
    };
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    add(&["-machine", "q35", "-accel", accelerator, "-cpu", "max"]);
    add(&[
        "-smp",
        &machine.cpus.to_string(),
        "-m",
        &format!("{}M", machine.memory_mib),
    ]);
    add(&["-kernel", &boot.kernel.to_string_lossy(), "-initrd", "initramfs"]);
    // The rate of the counter is given, and with it the length of a delay loop, which at 250 ticks a second is four times the kHz. The
    // rest leaves out what only takes time in emulation.
    add(&[
        "-append",
        &format!(
            "console=ttyS0 quiet loglevel=4 panic=-1 net.ifnames=0 tsc=reliable tsc_early_khz={khz} lpj={loops} no_timer_check \
         mitigations=off random.trust_cpu=on audit=0 lsm= cryptomgr.notests",
            khz = boot.counter_khz,
            loops = boot.counter_khz * 4,
        ),
    ]);
    add(&[
        "-serial",
        &format!("file:{index}/console"),
        "-device",
        "virtio-serial-pci",
    ]);
    // As a file, because the end of an empty standard input would count as the end of a terminal.
    add(&["-chardev", "file,id=output,path=/dev/stdout"]);
    add(&["-device", "virtserialport,chardev=output,name=output"]);
    // A guest pulls its own cables, through qemu's monitor: its interface sees that the carrier is gone, as it would of a real cable.
    add(&[
        "-chardev",
        &format!("socket,id=monitor,path={index}.monitor,server=on,wait=off"),
    ]);
    add(&["-mon", "chardev=monitor,mode=readline"]);
    add(&["-chardev", &format!("socket,id=hand,path={index}.monitor")]);
    add(&["-device", "virtserialport,chardev=hand,name=monitor"]);
    let mut share = |tag: &str, path: &str, options: &str| {
        let path = path.replace(',', ",,");
        add(&[
            "-fsdev",
            &format!("local,id={tag},path={path},security_model=none,multidevs=remap{options}"),
        ]);
        add(&["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
    };
    share("host", "/", ",readonly=on");
    share("project", &project.to_string_lossy(), "");
    share("job", &index.to_string(), "");
    if boot.nodes > 1 {
        // The last one is the cable that is no rail. Sockets are named relative to the working directory: a path has to be short.
        for cable in 0..=machine.rails {
            let (here, there) = (index, 1 - index);
            add(&[
                "-netdev",
                &format!(
                    "dgram,id=cable{cable},local.type=unix,local.path=cable{cable}.{here},remote.type=unix,remote.path=cable{cable}.{there}"
                ),
            ]);
            add(&[
                "-device",
                &format!(
                    "virtio-net-pci,netdev=cable{cable},mac=52:54:00:77:{cable:02x}:{here:02x},host_mtu=9000,romfile="
                ),
            ]);
        }
    }
    arguments
}
