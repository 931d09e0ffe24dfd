//! Pages with their prose broken anew, so that no line is wider than a screen beside another. Paragraphs and items of lists alone are touched; tables,
//! headings, quotations, HTML and code stay to the letter, and so does every word.

use super::checks::WIDTH_MAX;

/// The page, as narrow as it can be.
pub fn reflow(page: &str) -> String {
    let mut out = Vec::new();
    let mut paragraph: Vec<&str> = Vec::new();
    let mut fence: Option<&str> = None;
    for line in page.lines() {
        let trimmed = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| trimmed.starts_with(mark));
        if let Some(open) = fence {
            out.push(line.to_owned());
            if mark == Some(open) {
                fence = None;
            }
            continue;
        }
        if mark.is_some() || !is_prose(line) {
            fence = mark;
            out.append(&mut broken(&paragraph));
            paragraph.clear();
            out.push(line.to_owned());
            continue;
        }
        if item(line).is_some() {
            out.append(&mut broken(&paragraph));
            paragraph.clear();
        }
        paragraph.push(line);
    }
    out.append(&mut broken(&paragraph));
    let mut text = out.join("\n");
    if page.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Whether a line is of a paragraph, or of an item of a list.
fn is_prose(line: &str) -> bool {
    let trimmed = line.trim_start();
    let rule = trimmed.len() >= 3 && trimmed.chars().all(|c| "-=*_ ".contains(c));
    !(trimmed.is_empty() || rule || trimmed.starts_with(['|', '#', '>', '<', '$']) || is_definition(trimmed))
}

/// `[name]: https://…`, which is no prose.
fn is_definition(line: &str) -> bool {
    line.starts_with('[') && line.contains("]: ")
}

/// The width of an item's mark, where a line begins one.
fn item(line: &str) -> Option<usize> {
    let indent = line.len() - line.trim_start().len();
    let rest = &line[indent..];
    let digits = rest.chars().take_while(char::is_ascii_digit).count();
    let mark = match digits {
        0 => rest.starts_with(['-', '*', '+']).then_some(1)?,
        _ => rest[digits..].starts_with(['.', ')']).then_some(digits + 1)?,
    };
    rest[mark..].starts_with(' ').then_some(indent + mark + 1)
}

/// The lines of one paragraph, or of one item.
fn broken(lines: &[&str]) -> Vec<String> {
    let same = || lines.iter().map(|line| (*line).to_owned()).collect();
    let Some((first, others)) = lines.split_first() else {
        return Vec::new();
    };
    let fits = lines.iter().all(|line| line.chars().count() <= WIDTH_MAX);
    let forced = lines.iter().any(|line| line.ends_with("  ") || line.ends_with('\\'));
    // Words between backquotes keep the spaces that they have; a paragraph of code by indentation is not prose.
    let indent = first.len() - first.trim_start().len();
    if fits || forced || indent >= 4 && item(first).is_none() {
        return same();
    }
    let hang = match (item(first), others.first()) {
        (_, Some(next)) => next.len() - next.trim_start().len(),
        (Some(width), None) => width,
        (None, None) => indent,
    };
    let text: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    let mut out = Vec::new();
    let mut line = " ".repeat(indent);
    let mut is_empty = true;
    for word in unbreakable(&text.join(" ")) {
        let too_wide = line.chars().count() + 1 + word.chars().count() > WIDTH_MAX;
        // A word that would begin an item, a heading or a quotation stays where it is.
        if !is_empty && too_wide && !begins_something(&word) {
            out.push(std::mem::replace(&mut line, " ".repeat(hang)));
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(&word);
        is_empty = false;
    }
    out.push(line);
    out
}

fn begins_something(word: &str) -> bool {
    item(&format!("{word} ")).is_some() || word.starts_with(['|', '#', '>', '<', '=', '$']) || !is_prose(word)
}

/// Words, those within one pair of backquotes as one.
fn unbreakable(text: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut in_code = false;
    for word in text.split(' ') {
        match out.last_mut().filter(|_| in_code) {
            Some(last) => {
                last.push(' ');
                last.push_str(word);
            }
            None => out.push(word.to_owned()),
        }
        in_code ^= word.matches('`').count() % 2 == 1;
    }
    out.retain(|word| !word.is_empty());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        text.split_whitespace().collect()
    }

    #[test]
    fn prose_is_broken_and_everything_else_stays() {
        let long = "The word that matters is `a b c d` here, and it goes on. ".repeat(4);
        let page = format!(
            "# {long}\n\n{long}\nand ends.\n\n- {long}\n  more of it.\n1. {long}\n\n| {long} |\n|---|\n\n```sh\n{long}\n```\n\n> {long}\n"
        );
        let narrow = reflow(&page);
        assert_eq!(words(&narrow), words(&page));
        assert_eq!(reflow(&narrow), narrow, "a second time changes nothing");
        let line = |start: &str| narrow.lines().find(|line| line.starts_with(start)).unwrap();
        assert!(
            line("# ").chars().count() > 200 && line("| ").chars().count() > 200 && line("> ").chars().count() > 200
        );
        assert!(line("- ").chars().count() <= WIDTH_MAX && line("The").chars().count() <= WIDTH_MAX);
        assert!(narrow.contains("\n   ") || narrow.contains("\n  "), "items hang");
        for line in narrow.lines().filter(|line| !line.starts_with(['#', '|', '>', '`'])) {
            assert_eq!(line.matches('`').count() % 2, 0, "code is not broken: {line}");
        }
    }

    #[test]
    fn no_word_becomes_an_item_a_heading_or_a_quotation() {
        for word in ["-", "12.", "#", ">", "|", "+", "*"] {
            let page = format!(
                "{} {word} {}\n",
                "x".repeat(WIDTH_MAX - 1),
                "and so on ".repeat(20).trim()
            );
            let narrow = reflow(&page);
            assert_eq!(words(&narrow), words(&page));
            assert!(
                narrow
                    .lines()
                    .skip(1)
                    .all(|line| item(line).is_none() && is_prose(line)),
                "{narrow}"
            );
        }
    }

    #[test]
    fn what_fits_and_what_is_broken_on_purpose_stay() {
        let forced = format!("{}  \nnext\n", "word ".repeat(30).trim());
        for page in ["short\nlines\n", "a\n\n\nb\n", &forced, "no newline at the end"] {
            assert_eq!(reflow(page), page);
        }
    }
}
