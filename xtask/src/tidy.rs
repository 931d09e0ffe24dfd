//! `cargo xtask tidy`: what the house has agreed on and no compiler looks at.
//!
//! What is not yet so stands in `xtask/tidy.toml`, with how much of it there is and why. That list may only become shorter: more of something is an
//! error, and so is less of it, until `--write` has noted it. The suite runs the same as a test.

mod checks;
mod reflow;
mod source;

use std::collections::BTreeMap;
use std::fs;
use std::process::ExitCode;

use clap::CommandFactory;
use serde::Deserialize;

use crate::command::{Error, root};
use checks::Findings;
use source::{LineKind, Source};

#[derive(clap::Args)]
pub struct Arguments {
    /// Note in xtask/tidy.toml what has become less.
    #[arg(long)]
    write: bool,
    /// Note also what is new there, for this reason.
    #[arg(long, value_name = "WHY")]
    admit: Option<String>,
    /// Break the prose of these pages anew, at 100 characters; all of them where none is named.
    #[arg(long, value_name = "PAGE", num_args = 0..)]
    reflow: Option<Vec<String>>,
    /// Print the lines of each room: code, tests and comments.
    #[arg(long)]
    rooms: bool,
}

const EXCEPTIONS: &str = "xtask/tidy.toml";
const HEAD: &str = "\
# What is not yet as `cargo xtask tidy` wants it, how much of it there is at the most, and why.
# The list may only become shorter: `cargo xtask tidy --write` notes what has become less.
";

/// By check, then by what it is about.
type Exceptions = BTreeMap<String, BTreeMap<String, Exception>>;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    most: usize,
    why: String,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    if let Some(named) = &arguments.reflow {
        return reflow_pages(named);
    }
    if arguments.rooms {
        print!("{}", rooms(&source::read(&[".rs"])?));
        return Ok(ExitCode::SUCCESS);
    }
    let found = look()?;
    let mut known = exceptions()?;
    if arguments.write || arguments.admit.is_some() {
        note(&found, &mut known, arguments.admit.as_deref());
        let path = root().join(EXCEPTIONS);
        fs::write(&path, text_of(&known)).map_err(|source| Error::File { path, source })?;
    }
    let complaints = compare(&found, &known);
    for complaint in &complaints {
        println!("{complaint}");
    }
    println!(
        "{} exceptions, {} complaints",
        known.values().map(BTreeMap::len).sum::<usize>(),
        complaints.len()
    );
    Ok(match complaints.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Everything that every check finds, by the check's name.
fn look() -> Result<BTreeMap<&'static str, Findings>, Error> {
    let sources = source::read(&[".rs", ".py"])?;
    let pages = pages()?;
    let tasks: Vec<String> = crate::Arguments::command()
        .get_subcommands()
        .filter(|task| !task.is_hide_set())
        .map(|task| task.get_name().to_owned())
        .collect();
    let untold = checks::untold(
        &source::text("crates/cli/tests/help.txt")?,
        &tasks,
        &source::text("docs/command-line.md")?,
        &source::text("CONTRIBUTING.md")?,
    );
    Ok(BTreeMap::from([
        ("names", checks::names(&sources)),
        ("lines", checks::lengths(&sources)),
        ("width", checks::widths(&pages)),
        ("reasons", checks::borrowed_reasons(&sources)),
        ("unused", checks::unused(&sources)),
        ("undocumented", checks::undocumented(&sources)),
        ("untold", untold),
    ]))
}

/// What a check wants, for who reads its complaint.
fn wanted(check: &str) -> &'static str {
    match check {
        "names" => "types have this name: rename all but one, by what each is",
        "lines" => "lines of code, and 700 are the most: split it by state",
        "width" => "page has prose wider than 100 characters: `cargo xtask tidy --reflow PAGE`",
        "reasons" => "unsafe blocks point at another's reason: say each one's own, or make one block of them",
        "unused" => "public, and nothing but tests speaks of it: delete it, or use it",
        "undocumented" => "public items say nothing of themselves: write a sentence above each",
        _ => "is told of nowhere on this page",
    }
}

fn compare(found: &BTreeMap<&'static str, Findings>, known: &Exceptions) -> Vec<String> {
    let mut complaints = Vec::new();
    for (check, findings) in found {
        let admitted = known.get(*check);
        for (subject, finding) in findings {
            let most = admitted
                .and_then(|known| known.get(subject))
                .map_or(0, |known| known.most);
            if finding.amount > most {
                let (amount, place) = (finding.amount, &finding.place);
                complaints.push(format!("{check}: {subject}: {amount} {} ({place})", wanted(check)));
            }
        }
        for (subject, exception) in admitted.into_iter().flatten() {
            let amount = findings.get(subject).map_or(0, |finding| finding.amount);
            if amount < exception.most {
                let most = exception.most;
                complaints.push(format!(
                    "{check}: {subject}: {amount} now, and {EXCEPTIONS} says {most}: `cargo xtask tidy --write`"
                ));
            }
        }
    }
    let unknown = known.keys().filter(|check| !found.contains_key(check.as_str()));
    complaints.extend(unknown.map(|check| format!("{EXCEPTIONS}: there is no check `{check}`")));
    complaints
}

fn note(found: &BTreeMap<&'static str, Findings>, known: &mut Exceptions, admit: Option<&str>) {
    for (check, findings) in found {
        let known = known.entry((*check).to_owned()).or_default();
        known.retain(|subject, _| findings.contains_key(subject));
        for (subject, finding) in findings {
            match (known.get_mut(subject), admit) {
                (Some(exception), None) => exception.most = exception.most.min(finding.amount),
                (Some(exception), Some(_)) => exception.most = finding.amount,
                (None, None) => {}
                (None, Some(why)) => {
                    let (most, why) = (finding.amount, why.to_owned());
                    known.insert(subject.clone(), Exception { most, why });
                }
            }
        }
    }
    known.retain(|_, exceptions| !exceptions.is_empty());
}

/// One exception a line.
fn text_of(known: &Exceptions) -> String {
    let quoted = |text: &str| toml::Value::from(text).to_string();
    let mut text = HEAD.to_owned();
    for (check, exceptions) in known {
        text.push_str(&format!("\n[{check}]\n"));
        for (subject, Exception { most, why }) in exceptions {
            let (subject, why) = (quoted(subject), quoted(why));
            text.push_str(&format!("{subject} = {{ most = {most}, why = {why} }}\n"));
        }
    }
    text
}

fn exceptions() -> Result<Exceptions, Error> {
    let text = source::text(EXCEPTIONS)?;
    toml::from_str(&text).map_err(|error| Error::NotUnderstood {
        program: EXCEPTIONS.to_owned(),
        said: error.to_string(),
    })
}

/// Every page of the repository, with its path.
fn pages() -> Result<Vec<(String, String)>, Error> {
    let read = source::read(&[".md"])?.into_iter();
    read.map(|page| Ok((page.path.clone(), source::text(&page.path)?)))
        .collect()
}

fn reflow_pages(named: &[String]) -> Result<ExitCode, Error> {
    for (path, text) in pages()? {
        if !named.is_empty() && !named.contains(&path) {
            continue;
        }
        let narrow = reflow::reflow(&text);
        if narrow != text {
            let file = root().join(&path);
            fs::write(&file, narrow).map_err(|source| Error::File { path: file, source })?;
            println!("{path}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn rooms(sources: &[Source]) -> String {
    let mut rooms: BTreeMap<&str, [usize; 4]> = BTreeMap::new();
    for source in sources {
        let row = rooms.entry(source.room()).or_default();
        for (count, kind) in row.iter_mut().zip([LineKind::Code, LineKind::Test, LineKind::Comment]) {
            *count += source.count(|other| other == kind);
        }
        row[3] += 1;
    }
    let mut text = format!(
        "{:<10}{:>9}{:>9}{:>10}{:>7}\n",
        "room", "code", "tests", "comments", "files"
    );
    let all = rooms
        .values()
        .fold([0; 4], |sum, row| std::array::from_fn(|i| sum[i] + row[i]));
    for (room, [code, tests, comments, files]) in rooms.into_iter().chain([("all", all)]) {
        text.push_str(&format!("{room:<10}{code:>9}{tests:>9}{comments:>10}{files:>7}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::checks::Finding;
    use super::*;

    #[test]
    fn the_house_is_tidy() {
        let (found, known) = (look().unwrap(), exceptions().unwrap());
        let complaints = compare(&found, &known);
        assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
        let without_reason = known
            .values()
            .flatten()
            .find(|(_, exception)| exception.why.trim().is_empty());
        assert_eq!(without_reason, None, "every exception says why");
    }

    #[test]
    fn more_is_refused_less_is_noted_and_nothing_grows_unsaid() {
        let found = |amount| {
            let finding = Finding {
                amount,
                place: "a.rs".to_owned(),
            };
            BTreeMap::from([("names", Findings::from([("Way".to_owned(), finding)]))])
        };
        let mut known = Exceptions::new();
        note(&found(3), &mut known, None);
        assert!(known.is_empty() && compare(&found(3), &known).len() == 1);
        note(&found(3), &mut known, Some("they are one thing in two rooms"));
        assert_eq!(compare(&found(3), &known), Vec::<String>::new());
        assert_eq!(compare(&found(4), &known).len(), 1);
        assert_eq!(compare(&found(2), &known).len(), 1);
        note(&found(4), &mut known, None);
        assert_eq!(known["names"]["Way"].most, 3, "it grows only where somebody says why");
        note(&found(2), &mut known, None);
        assert_eq!(known["names"]["Way"].most, 2);
        assert_eq!(
            toml::from_str(&text_of(&known)),
            Ok(known.clone()),
            "what is written is read again"
        );
        note(&BTreeMap::from([("names", Findings::new())]), &mut known, None);
        assert!(known.is_empty());
    }
}
