//! `weft nixl`: what puts Weft under programs that use NIXL, as variables to set.
//!
//! NIXL loads every back end from one directory. This makes one, with links to NIXL's own plug-ins and to the shared object that this command is in, which is a
//! plug-in, too; and it looks first whether the NIXL that is there calls what Weft's has ([`weft_nixl::interface`]). Plug-ins look for their libraries by the way
//! from where they are, so what lies around NIXL's own directory is linked around the new one.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Deserialize;
use weft_nixl::interface::{Unlike, compare};

use crate::complaint::{Complain, Complaint, Exit};
use crate::python;

/// Print the variables that put Weft under programs that use NIXL
///
/// `eval "$(weft nixl)"` sets them for a shell and all that it starts. Then name the back end WEFT wherever a program lets you name one. Nothing of NIXL is
/// changed: its plug-ins are linked, and Weft beside them, in a directory of the user's cache.
#[derive(Debug, Args)]
pub struct Nixl {
    /// Weft also in the place of this back end, for programs that do not let one choose
    #[arg(long = "as", value_name = "NAME")]
    others: Vec<Other>,
    /// The Python that NIXL is installed for; by default the one that runs this command, else python3
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
    /// The directory of NIXL's own plug-ins, where NIXL is not a Python package
    #[arg(long, value_name = "DIR", conflicts_with = "python")]
    plugins: Option<PathBuf>,
    /// The directory to make; by default one in the user's cache
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The shared object of Weft; by default the one that this command is in, or that was built with it
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
}

/// Back ends that programs hard-wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
enum Other {
    Ucx,
    Libfabric,
}

/// The name of Weft's own back end.
const OWN: &str = "WEFT";

/// What Python tells of its NIXL: which one is loaded depends on more than what is installed, so it is loaded and looked at.
const ASK: &str = r#"
import importlib.metadata, json
told = {}
try:
    import nixl
    told["version"] = importlib.metadata.version("nixl")
except ImportError as error:
    told["missing"] = str(error)
except importlib.metadata.PackageNotFoundError:
    told["version"] = "of unknown version"
for line in open("/proc/self/maps"):
    path = line.rstrip("\n").partition("/")[2]
    if path.endswith("/libnixl.so"):
        told["library"] = "/" + path
print("WEFT " + json.dumps(told))
"#;

#[derive(Debug, Default, Deserialize)]
struct Told {
    version: Option<String>,
    missing: Option<String>,
    library: Option<PathBuf>,
}

/// An installed NIXL.
struct Installed {
    version: String,
    plugins: PathBuf,
}

impl Nixl {
    pub fn run(self) -> Result<(), Complaint> {
        if !weft_nixl::SUPPORTED {
            return Err(Complaint::new(
                Exit::Failed,
                "Weft's back end of NIXL is there for x86-64 only.",
            ));
        }
        let library = match &self.library {
            Some(path) => path.clone(),
            None => own_library()?,
        };
        let library =
            fs::canonicalize(&library).or_complain(Exit::Usage, || format!("{} is not a file.", library.display()))?;
        let installed = match &self.plugins {
            Some(plugins) => Installed {
                version: "of unknown version".to_owned(),
                plugins: plugins.clone(),
            },
            None => ask(&python::interpreter(self.python.as_deref()))?,
        };
        let theirs = plugins(&installed.plugins)?;
        check(&installed, &theirs)?;
        let around = Around::of(&installed.plugins)?;
        let mut links = around.links()?;
        links.extend(plugin_links(&theirs, &self.others, &library, &around.inner));
        let directory = match &self.dir {
            Some(directory) => directory.clone(),
            None => cache()?.join(mark(&links)),
        };
        let directory = make(&directory, &links, &around.inner)?;
        self.tell(&installed, &directory)
    }

    fn tell(&self, installed: &Installed, directory: &Path) -> Result<(), Complaint> {
        outln!("# NIXL {}, which calls what this back end has.", installed.version);
        outln!("export NIXL_PLUGIN_DIR={}", quoted(directory));
        match self.others.is_empty() {
            true => {
                outln!("# Then name the back end {OWN}, alone:");
                outln!(
                    r#"#   vLLM     "kv_connector_extra_config": {{"backends": ["{OWN}"]}} in --kv-transfer-config"#
                );
                outln!("#   SGLang   export SGLANG_DISAGGREGATION_NIXL_BACKEND={OWN}");
                outln!("#   LMCache  nixl_backends: [\"{OWN}\"]");
                outln!("# Programs that do not let one choose: weft nixl --as ucx");
            }
            false => {
                for other in &self.others {
                    outln!(
                        "# {} is Weft there. Both ends of a transfer must have it so.",
                        other.name()
                    );
                }
            }
        }
        Ok(())
    }
}

impl Other {
    fn name(self) -> &'static str {
        match self {
            Other::Ucx => "UCX",
            Other::Libfabric => "LIBFABRIC",
        }
    }
}

/// The shared object that has the plug-in in it: the Python package's, if this is inside of it, else the one that cargo has built with the program.
fn own_library() -> Result<PathBuf, Complaint> {
    let program = std::env::current_exe().or_complain(Exit::Failed, || {
        "The system does not say where this program is.".to_owned()
    })?;
    let here = own_library as fn() -> Result<PathBuf, Complaint> as usize;
    let maps = fs::read_to_string("/proc/self/maps")
        .or_complain(Exit::Failed, || "The system does not say what is loaded.".to_owned())?;
    let carrier = maps.lines().find_map(|line| carrier(line, here));
    if let Some(carrier) = carrier.filter(|carrier| *carrier != program) {
        return Ok(carrier);
    }
    const FILE: &str = "libweft_nixl.so";
    let beside = program.parent().unwrap_or(Path::new("."));
    let places = [
        beside.join(FILE),
        beside.join("deps").join(FILE),
        beside.join("../lib").join(FILE),
    ];
    places.into_iter().find(|place| place.exists()).ok_or_else(|| {
        Complaint::new(Exit::Failed, format!("There is no {FILE} beside {}.", program.display()))
            .try_this("the Python package has it inside: pip install . ; or cargo build --release -p weft-nixl, and --library FILE")
    })
}

/// The file that a line of `/proc/self/maps` is of, if an address lies in it.
fn carrier(line: &str, address: usize) -> Option<PathBuf> {
    let (range, rest) = line.split_once(' ')?;
    let (begin, end) = range.split_once('-')?;
    let (begin, end) = (
        usize::from_str_radix(begin, 16).ok()?,
        usize::from_str_radix(end, 16).ok()?,
    );
    let path = &rest[rest.find('/')?..];
    (begin..end).contains(&address).then(|| PathBuf::from(path))
}

/// Asks a Python for its NIXL.
fn ask(python: &Path) -> Result<Installed, Complaint> {
    let shown = python.display();
    let (told, complaint) = match python::ask::<Told>(python, ASK)? {
        Ok(told) => (told, String::new()),
        Err(complaint) => (Told::default(), complaint),
    };
    match (told.version, told.library.as_deref().and_then(Path::parent)) {
        (Some(version), Some(directory)) => Ok(Installed {
            version,
            plugins: directory.join("plugins"),
        }),
        _ => {
            let why = told.missing.unwrap_or(complaint);
            let complaint = Complaint::new(Exit::Failed, format!("NIXL is not installed for {shown}: {why}"));
            Err(complaint.try_this("pip install nixl; or name the Python that has it: weft nixl --python PROGRAM; or its plug-ins: --plugins DIR"))
        }
    }
}

/// The plug-ins in a directory, by file name.
fn plugins(directory: &Path) -> Result<BTreeMap<String, PathBuf>, Complaint> {
    let failed = || format!("The plug-ins of NIXL in {} cannot be listed.", directory.display());
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).or_complain(Exit::Failed, failed)? {
        let entry = entry.or_complain(Exit::Failed, failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("libplugin_") && name.ends_with(".so") {
            let path = fs::canonicalize(entry.path()).or_complain(Exit::Failed, failed)?;
            found.insert(name, path);
        }
    }
    Ok(found)
}

/// That NIXL's own plug-ins have the functions that Weft's has.
fn check(installed: &Installed, theirs: &BTreeMap<String, PathBuf>) -> Result<(), Complaint> {
    for path in theirs.values() {
        let bytes = fs::read(path).or_complain(Exit::Failed, || format!("{} cannot be read.", path.display()))?;
        match compare(&bytes) {
            Ok(()) => return Ok(()),
            // Some plug-ins hide their classes.
            Err(Unlike::NoEngine) => {}
            Err(unlike) => {
                let sentence = format!("NIXL {} has another interface than this back end.", installed.version);
                let complaint = Complaint::new(Exit::Failed, sentence).because(&unlike);
                return Err(complaint.try_this(format!(
                    "a NIXL from 1.0 to 1.5, or a newer Weft. Looked at: {}",
                    path.display()
                )));
            }
        }
    }
    let sentence = format!(
        "There is no plug-in in {} that tells which interface NIXL has.",
        installed.plugins.display()
    );
    Err(Complaint::new(Exit::Failed, sentence))
}

/// What is linked: paths below the new directory, and what they lead to.
type Links = BTreeMap<PathBuf, PathBuf>;

/// NIXL's directory of plug-ins, and where it lies.
struct Around {
    /// The directory with NIXL's own libraries.
    libraries: PathBuf,
    /// The directory with that one.
    site: PathBuf,
    /// The way from the last to the plug-ins: the same in the new directory.
    inner: PathBuf,
}

impl Around {
    fn of(plugins: &Path) -> Result<Around, Complaint> {
        let failed = || format!("{} is not a directory.", plugins.display());
        let plugins = fs::canonicalize(plugins).or_complain(Exit::Usage, failed)?;
        let libraries = plugins.parent().unwrap_or(Path::new("/")).to_owned();
        let site = libraries.parent().unwrap_or(Path::new("/")).to_owned();
        let inner = plugins.strip_prefix(&site).unwrap_or(Path::new("plugins")).to_owned();
        Ok(Around { libraries, site, inner })
    }

    /// NIXL's libraries, and those that wheels bring along in directories of their own.
    fn links(&self) -> Result<Links, Complaint> {
        let mut links = Links::new();
        for (directory, wanted) in [
            (
                &self.libraries,
                (|name: &str| name.starts_with("lib") && name.contains(".so")) as fn(&str) -> bool,
            ),
            (&self.site, |name: &str| {
                name.ends_with(".libs") && !name.starts_with('.')
            }),
        ] {
            let failed = || format!("{} cannot be listed.", directory.display());
            for entry in fs::read_dir(directory).or_complain(Exit::Failed, failed)? {
                let entry = entry.or_complain(Exit::Failed, failed)?;
                let path = entry.path();
                if wanted(&entry.file_name().to_string_lossy())
                    && let Ok(inner) = path.strip_prefix(&self.site)
                {
                    links.insert(inner.to_owned(), path.clone());
                }
            }
        }
        Ok(links)
    }
}

/// NIXL's own plug-ins, but those in whose place Weft is wanted, and Weft.
fn plugin_links(theirs: &BTreeMap<String, PathBuf>, others: &[Other], library: &Path, inner: &Path) -> Links {
    let mut links: Links = theirs
        .iter()
        .map(|(name, path)| (inner.join(name), path.clone()))
        .collect();
    for name in others.iter().map(|other| other.name()).chain([OWN]) {
        links.insert(inner.join(format!("libplugin_{name}.so")), library.to_owned());
    }
    links
}

/// Where directories of plug-ins are kept.
fn cache() -> Result<PathBuf, Complaint> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let complaint =
        || Complaint::new(Exit::Usage, "Neither HOME nor XDG_CACHE_HOME is set.").try_this("weft nixl --dir DIR");
    Ok(cache.ok_or_else(complaint)?.join("weft/nixl"))
}

/// A name for a directory with these links, so that those of different installations do not meet.
fn mark(links: &Links) -> String {
    let mut hasher = DefaultHasher::new();
    links.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Makes the directory, or makes it right, and tells where in it the plug-ins are. Programs may be reading it meanwhile, so every name changes at once or not at all.
fn make(directory: &Path, links: &Links, inner: &Path) -> Result<PathBuf, Complaint> {
    let failed = || format!("{} cannot be made.", directory.display());
    fs::create_dir_all(directory.join(inner)).or_complain(Exit::Failed, failed)?;
    let directory = fs::canonicalize(directory).or_complain(Exit::Failed, failed)?;
    for (path, target) in links {
        let link = directory.join(path);
        if fs::read_link(&link).is_ok_and(|now| now == *target) {
            continue;
        }
        if fs::symlink_metadata(&link).is_ok_and(|there| !there.is_symlink()) {
            let complaint = Complaint::new(
                Exit::Usage,
                format!("{} is no link, and stays as it is.", link.display()),
            );
            return Err(complaint.try_this("another --dir"));
        }
        let new = link.with_extension(format!("new-{}", std::process::id()));
        match fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).or_complain(Exit::Failed, failed),
            _ => {}
        }
        let linked = symlink(target, &new).and_then(|()| fs::rename(&new, &link));
        linked.or_complain(Exit::Failed, failed)?;
    }
    // Links to plug-ins that are no more; nothing else is touched.
    let plugins = directory.join(inner);
    for entry in fs::read_dir(&plugins).or_complain(Exit::Failed, failed)?.flatten() {
        let name = entry.file_name();
        let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
        if is_link && name.to_string_lossy().starts_with("libplugin_") && !links.contains_key(&inner.join(&name)) {
            fs::remove_file(entry.path()).or_complain(Exit::Failed, failed)?;
        }
    }
    Ok(plugins)
}

/// As a shell takes it.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_behind_an_address_is_found() {
        let line = "7f0000001000-7f0000002000 r-xp 00001000 08:01 42      /usr/lib/a b/_weft.abi3.so";
        assert_eq!(
            carrier(line, 0x7f00_0000_1000),
            Some(PathBuf::from("/usr/lib/a b/_weft.abi3.so"))
        );
        assert_eq!(carrier(line, 0x7f00_0000_2000), None);
        assert_eq!(
            carrier(
                "7f0000001000-7f0000002000 rw-p 00000000 00:00 0 [heap]",
                0x7f00_0000_1000
            ),
            None
        );
        assert_eq!(carrier("", 0), None);
    }

    #[test]
    fn a_path_is_quoted_for_the_shell() {
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }

    #[test]
    fn weft_takes_the_place_of_others_only_where_it_is_wanted() {
        let theirs = BTreeMap::from([("libplugin_UCX.so".to_owned(), PathBuf::from("/nixl/libplugin_UCX.so"))]);
        let (library, inner) = (Path::new("/weft.so"), Path::new("lib/plugins"));
        let plain = plugin_links(&theirs, &[], library, inner);
        assert_eq!(
            plain[Path::new("lib/plugins/libplugin_UCX.so")],
            Path::new("/nixl/libplugin_UCX.so")
        );
        assert_eq!(plain[Path::new("lib/plugins/libplugin_WEFT.so")], library);
        let hidden = plugin_links(&theirs, &[Other::Ucx], library, inner);
        assert_eq!(hidden[Path::new("lib/plugins/libplugin_UCX.so")], library);
        assert_ne!(mark(&plain), mark(&hidden));
    }
}
