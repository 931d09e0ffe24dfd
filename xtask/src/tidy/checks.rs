//! What is looked for. A check gives, for each thing that is not as the house wants it, how much of it there is.

use std::collections::{BTreeMap, HashMap};

use super::source::{LineKind, Source};

/// How much, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    pub amount: usize,
    pub place: String,
}

pub type Findings = BTreeMap<String, Finding>;

/// Code lines of a file.
pub const LINES_MAX: usize = 700;
/// Characters of a line of a page.
pub const WIDTH_MAX: usize = 100;
/// The rooms whose types are read side by side. The others wrap them for a language or a command, by the same names on purpose.
const LIBRARIES: &[&str] = &["plan", "model", "protocol", "fabric", "gpu", "sys", "sim", "runtime"];
/// The rooms whose API is for others to build on.
const PUBLISHED: &[&str] = &["runtime", "plan", "protocol", "gpu", "c"];
/// The rooms in which nothing public may be there for tests alone.
const PURE: &[&str] = &["plan", "model", "protocol"];

/// Names of public types that stand for several things.
pub fn names(sources: &[Source]) -> Findings {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources {
        let examined = LIBRARIES.contains(&source.room()) && source.path.contains("/src/") && is_rust(source);
        for line in source
            .lines
            .iter()
            .filter(|line| examined && line.kind == LineKind::Code)
        {
            if let Some(name) = public_type(&line.text) {
                places.entry(name.to_owned()).or_default().push(source.path.clone());
            }
        }
    }
    let several = places.into_iter().filter(|(_, places)| places.len() > 1);
    let finding = |places: Vec<String>| Finding {
        amount: places.len(),
        place: places.join(", "),
    };
    several.map(|(name, places)| (name, finding(places))).collect()
}

/// Files with more lines of code than one reads in one go.
pub fn lengths(sources: &[Source]) -> Findings {
    let code = |source: &Source| source.count(|kind| matches!(kind, LineKind::Code | LineKind::Test));
    let long = sources
        .iter()
        .filter(|source| is_program(source) && code(source) > LINES_MAX);
    long.map(|source| (source.path.clone(), of(code(source), ""))).collect()
}

/// Pages with lines that are wider than a screen beside another. What cannot be broken does not count: code, and tables.
pub fn widths(pages: &[(String, String)]) -> Findings {
    let mut found = Findings::new();
    for (path, text) in pages {
        let mut in_code = false;
        let mut wide = Vec::new();
        for (nth, line) in text.lines().enumerate() {
            in_code ^= line.trim_start().starts_with("```");
            let prose = !in_code && !line.trim_start().starts_with(['|', '<', '[', '!', '#']);
            if prose && line.chars().count() > WIDTH_MAX && line.trim().contains(' ') {
                wide.push((nth + 1).to_string());
            }
        }
        if !wide.is_empty() {
            // A page counts once, however many of its lines: one that is excused may be written on.
            let lines = wide.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
            found.insert(path.clone(), of(1, &format!("{} lines, as {lines}", wide.len())));
        }
    }
    found
}

/// Unsafe blocks whose reason is another block's.
pub fn borrowed_reasons(sources: &[Source]) -> Findings {
    let mut found = Findings::new();
    for source in sources.iter().filter(|source| is_rust(source)) {
        let borrowed = |text: &str| {
            let reason = text
                .trim()
                .strip_prefix("// SAFETY:")
                .unwrap_or("")
                .trim()
                .to_lowercase();
            [
                "as above",
                "as said above",
                "as below",
                "as in `",
                "likewise",
                "the same.",
                "see above",
            ]
            .iter()
            .any(|start| reason.starts_with(start))
        };
        let lines: Vec<usize> = (1..)
            .zip(&source.lines)
            .filter(|(_, line)| line.kind == LineKind::Comment && borrowed(&line.text))
            .map(|(nth, _)| nth)
            .collect();
        if let Some(first) = lines.first() {
            found.insert(source.path.clone(), of(lines.len(), &format!("from line {first} on")));
        }
    }
    found
}

/// Public items that nothing but tests, or nothing at all, speaks of.
pub fn unused(sources: &[Source]) -> Findings {
    let mut spoken: HashMap<&str, usize> = HashMap::new();
    for source in sources.iter().filter(|source| is_program(source)) {
        // What examples and benchmarks use is used.
        let examples = source.path.contains("/examples/") || source.path.contains("/benches/");
        for line in &source.lines {
            if line.kind == LineKind::Code || examples && line.kind == LineKind::Test {
                for word in words(&line.text) {
                    *spoken.entry(word).or_default() += 1;
                }
            }
        }
    }
    let mut found = Findings::new();
    for source in sources {
        let examined = PURE.contains(&source.room()) && source.path.contains("/src/") && is_rust(source);
        for line in source
            .lines
            .iter()
            .filter(|line| examined && line.kind == LineKind::Code)
        {
            // Once is its own definition.
            if let Some(name) = public_item(&line.text)
                && spoken.get(name).is_some_and(|times| *times == 1)
            {
                found.insert(format!("{}::{name}", source.room()), of(1, &source.path));
            }
        }
    }
    found
}

/// Public items without a word on what they are, by room. A field that says it by its name counts too: nobody else decides that it does.
pub fn undocumented(sources: &[Source]) -> Findings {
    let mut found = Findings::new();
    for source in sources {
        if !PUBLISHED.contains(&source.room()) || !source.path.contains("/src/") || !is_rust(source) {
            continue;
        }
        let mut is_told = false;
        for (nth, line) in source.lines.iter().enumerate() {
            let text = line.text.trim();
            if line.kind == LineKind::Code && !is_told && (public_item(text).is_some() || is_public_field(text)) {
                let place = format!("as in {}:{}", source.path, nth + 1);
                let finding = found
                    .entry(format!("crates/{}", source.room()))
                    .or_insert(of(0, &place));
                finding.amount += 1;
            }
            // Attributes stand between an item and what is said of it.
            is_told = text.starts_with("///") || text.starts_with("#[doc") || is_told && text.starts_with("#[");
        }
    }
    found
}

/// Commands, of `weft` and of the house, that a page does not tell of. `help` is the help of all verbs of `weft`, `tasks` the names of the house's.
pub fn untold(help: &str, tasks: &[String], command_line: &str, contributing: &str) -> Findings {
    let mut found = Findings::new();
    let verbs = help
        .lines()
        .filter_map(|line| line.strip_prefix("$ weft ")?.strip_suffix(" --help"));
    for verb in verbs {
        // A page that shows `weft store stat` and speaks of `verify` has told of both.
        let told = verb.split(' ').all(|word| mentions(command_line, word));
        if !told {
            found.insert(format!("weft {verb}"), of(1, "docs/command-line.md"));
        }
    }
    for task in tasks {
        if !contributing.contains(&format!("cargo xtask {task}")) {
            found.insert(format!("cargo xtask {task}"), of(1, "CONTRIBUTING.md"));
        }
    }
    found
}

fn mentions(page: &str, word: &str) -> bool {
    let named = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    page.split(|c| !named(c)).any(|other| other == word)
}

fn of(amount: usize, place: &str) -> Finding {
    let place = place.to_owned();
    Finding { amount, place }
}

fn is_rust(source: &Source) -> bool {
    source.path.ends_with(".rs")
}

fn is_program(source: &Source) -> bool {
    is_rust(source) || source.path.ends_with(".py")
}

fn public_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (kind, rest) = rest.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "union", "type"].contains(&kind);
    is_type.then(|| first_word(rest))
}

fn public_item(line: &str) -> Option<&str> {
    let mut rest = line.trim_start().strip_prefix("pub ")?;
    while let Some(shorter) = ["unsafe ", "async ", "const fn "].iter().find_map(|word| {
        let shorter = rest.strip_prefix(word)?;
        Some((shorter, word.ends_with("fn ")))
    }) {
        rest = shorter.0;
        if shorter.1 {
            return Some(first_word(rest));
        }
    }
    let (kind, rest) = rest.split_once(' ')?;
    let is_item = ["struct", "enum", "trait", "union", "type", "fn", "const", "static"].contains(&kind);
    is_item.then(|| first_word(rest))
}

fn is_public_field(line: &str) -> bool {
    let name = line.strip_prefix("pub ").and_then(|rest| rest.split_once(':'));
    name.is_some_and(|(name, _)| !name.contains([' ', '(']))
}

fn first_word(text: &str) -> &str {
    words(text).next().unwrap_or("")
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let text = text.split("//").next().unwrap_or(text);
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn house() -> Vec<Source> {
        vec![
            Source::of(
                "crates/plan/src/a.rs",
                "pub struct Way;\npub fn used() {}\npub fn idle() {}\npub const fn still() {}\n#[cfg(test)]\nmod tests {\n    fn t() { idle() }\n}\n",
            ),
            Source::of("crates/sim/src/b.rs", "pub enum Way { A }\nfn f() { used() } // idle\n"),
            Source::of(
                "crates/python/src/c.rs",
                "pub struct Way;\n// SAFETY: as above.\n// SAFETY: it is ours.\n",
            ),
            Source::of("crates/cli/src/d.rs", &"x();\n".repeat(701)),
        ]
    }

    #[test]
    fn a_name_of_two_types_is_found_and_wrappers_may_have_it_too() {
        let found = names(&house());
        assert_eq!(found.keys().collect::<Vec<_>>(), ["Way"]);
        assert_eq!(found["Way"].amount, 2);
    }

    #[test]
    fn long_files_borrowed_reasons_and_items_for_tests_alone_are_found() {
        assert_eq!(lengths(&house())["crates/cli/src/d.rs"].amount, 701);
        assert_eq!(borrowed_reasons(&house())["crates/python/src/c.rs"].amount, 1);
        let found: Vec<String> = unused(&house()).into_keys().collect();
        assert_eq!(found, ["plan::idle", "plan::still"]);
    }

    #[test]
    fn what_is_public_and_says_nothing_of_itself_is_counted() {
        let text = "/// Told.\n#[derive(Debug)]\npub struct A {\n    pub x: u8,\n    /// Told.\n    pub y: u8,\n    z: u8,\n}\npub fn b() {}\n";
        let found = undocumented(&[
            Source::of("crates/plan/src/a.rs", text),
            Source::of("crates/cli/src/a.rs", text),
        ]);
        assert_eq!(
            found
                .into_iter()
                .map(|(room, finding)| (room, finding.amount))
                .collect::<Vec<_>>(),
            [("crates/plan".to_owned(), 2)]
        );
    }

    #[test]
    fn wide_prose_is_found_and_tables_and_code_are_left_alone() {
        let wide = "word ".repeat(30);
        let page = format!("{wide}\n\n| {wide} |\n\n```sh\n{wide}\n```\n");
        let found = widths(&[("docs/a.md".to_owned(), page)]);
        assert_eq!(found["docs/a.md"].amount, 1);
    }

    #[test]
    fn what_no_page_tells_of_is_found() {
        let help = "$ weft --help\n$ weft store stat --help\n$ weft copy --help\n";
        let page = "weft store ls\nalso stat, and copying";
        let found = untold(help, &["test".to_owned(), "tidy".to_owned()], page, "cargo xtask test");
        assert_eq!(found.into_keys().collect::<Vec<_>>(), ["cargo xtask tidy", "weft copy"]);
    }
}
