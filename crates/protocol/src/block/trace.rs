//! Traces of prefix-cache use: requests as chains of block numbers, without text.
//!
//! One line a request, as `timestamp_ms,input_tokens,output_tokens,block_ids` under a line with these words; block numbers are separated by blanks, and
//! `a-b` is a run of consecutive ones. A number stands for a block and everything before it.

use thiserror::Error;

use super::BlockId;
use crate::Seeded;

/// The first line.
pub const HEADER: &str = "timestamp_ms,input_tokens,output_tokens,block_ids";

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub at_ms: u64,
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// From the first block on. The last one may be partly filled.
    pub blocks: Vec<u64>,
}

/// A line that says nothing, by its number, counted from one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {fault}")]
pub struct TraceError {
    pub line: usize,
    pub fault: Fault,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    #[error("a trace begins with `{HEADER}`")]
    NoHeader,
    #[error("there are {found} fields in the place of 4")]
    Fields { found: usize },
    #[error("`{text}` is not a number for {field}")]
    Number { field: &'static str, text: String },
    #[error("`{text}` is neither a block nor a run of blocks such as `7-12`")]
    Block { text: String },
    #[error("the run `{text}` goes backwards")]
    Backwards { text: String },
    #[error("a request has at most {BLOCKS_MAX} blocks")]
    TooLong,
    #[error("the request has no blocks")]
    NoBlocks,
    #[error("the block {block} is in the request twice")]
    Twice { block: u64 },
}

/// No prompt is longer, and no line makes anybody allocate more.
pub const BLOCKS_MAX: usize = 1 << 20;

/// Reads a whole trace.
pub fn parse(text: &str) -> Result<Vec<Request>, TraceError> {
    let mut lines = text.lines().enumerate();
    let begins = lines.next().is_some_and(|(_, line)| line.trim() == HEADER);
    if !begins {
        let fault = Fault::NoHeader;
        return Err(TraceError { line: 1, fault });
    }
    let full = lines.filter(|(_, line)| !line.trim().is_empty());
    let request = |(at, line)| parse_line(line).map_err(|fault| TraceError { line: at + 1, fault });
    full.map(request).collect()
}

fn parse_line(line: &str) -> Result<Request, Fault> {
    let fields: Vec<&str> = line.trim_end().split(',').take(6).collect();
    let [at, input, output, blocks] = fields[..] else {
        return Err(Fault::Fields { found: fields.len() });
    };
    let request = Request {
        at_ms: number("the time", at)?,
        input_tokens: number("the tokens of the prompt", input)?,
        output_tokens: number("the tokens of the answer", output)?,
        blocks: parse_blocks(blocks)?,
    };
    check(&request)?;
    Ok(request)
}

/// Whether a request is one that a replay can take, wherever it was read.
pub fn check(request: &Request) -> Result<(), Fault> {
    if request.blocks.is_empty() {
        return Err(Fault::NoBlocks);
    }
    if request.blocks.len() > BLOCKS_MAX {
        return Err(Fault::TooLong);
    }
    let mut sorted = request.blocks.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Fault::Twice { block: pair[0] }),
        None => Ok(()),
    }
}

fn parse_blocks(text: &str) -> Result<Vec<u64>, Fault> {
    let mut blocks = Vec::new();
    for piece in text.split_ascii_whitespace() {
        let fault = || Fault::Block { text: shown(piece) };
        let (first, last) = piece.split_once('-').unwrap_or((piece, piece));
        let first: u64 = first.parse().map_err(|_| fault())?;
        let last: u64 = last.parse().map_err(|_| fault())?;
        if last < first {
            return Err(Fault::Backwards { text: shown(piece) });
        }
        if last - first >= (BLOCKS_MAX - blocks.len()) as u64 {
            return Err(Fault::TooLong);
        }
        blocks.extend(first..=last);
    }
    Ok(blocks)
}

fn number<T: std::str::FromStr>(field: &'static str, text: &str) -> Result<T, Fault> {
    text.trim().parse().map_err(|_| Fault::Number {
        field,
        text: shown(text),
    })
}

fn shown(text: &str) -> String {
    text.chars().take(40).collect()
}

/// The id that a block of a trace has in replays: numbers are mixed well, as ids are.
pub fn id(block: u64) -> BlockId {
    let mut bytes = [0; 16];
    Seeded::new(block).fill(&mut bytes);
    BlockId::from_bytes(bytes)
}

/// For each request whether its session will come back: its last full block is read again later. It takes the future to know that; what an
/// application knows of its sessions is worth as much at most.
pub fn comes_back(requests: &[Request]) -> Vec<bool> {
    let mut later = std::collections::HashSet::new();
    let mut bits: Vec<bool> = requests
        .iter()
        .rev()
        .map(|request| {
            let last_full = request.blocks.len().saturating_sub(2);
            let back = request.blocks.get(last_full).is_some_and(|block| later.contains(block));
            later.extend(request.blocks.iter().copied());
            back
        })
        .collect();
    bits.reverse();
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_single_blocks_are_read() {
        let text = format!("{HEADER}\n7826,1392,92,0-2 9\n\n8000,5,0,4\n");
        let requests = parse(&text).unwrap();
        assert_eq!(requests[0].blocks, [0, 1, 2, 9]);
        assert_eq!(
            (requests[1].at_ms, requests[1].input_tokens, requests.len()),
            (8000, 5, 2)
        );
    }

    #[test]
    fn every_malformed_line_is_named_with_its_number() {
        let fault = |line: &str| parse(&format!("{HEADER}\n1,1,1,1\n{line}\n")).unwrap_err();
        let says = |line: &str| fault(line).to_string();
        assert_eq!(says("1,2,3"), "line 3: there are 3 fields in the place of 4");
        assert_eq!(says("1,2,3,4,5"), "line 3: there are 5 fields in the place of 4");
        assert_eq!(says("x,2,3,4"), "line 3: `x` is not a number for the time");
        assert_eq!(
            says("1,-2,3,4"),
            "line 3: `-2` is not a number for the tokens of the prompt"
        );
        assert_eq!(
            says("1,2,99999999999,4"),
            "line 3: `99999999999` is not a number for the tokens of the answer"
        );
        assert_eq!(fault("1,2,3,").fault, Fault::NoBlocks);
        assert_eq!(says("1,2,3,4 5-3"), "line 3: the run `5-3` goes backwards");
        assert_eq!(
            says("1,2,3,4 5-6-7"),
            "line 3: `5-6-7` is neither a block nor a run of blocks such as `7-12`"
        );
        assert_eq!(fault("1,2,3,0-18446744073709551615").fault, Fault::TooLong);
        assert_eq!(fault("1,2,3,0-1048575 7-7").fault, Fault::TooLong);
        assert_eq!(fault("1,2,3,4 7 4").fault, Fault::Twice { block: 4 });
        assert_eq!(parse("").unwrap_err().fault, Fault::NoHeader);
        assert_eq!(parse("1,1,1,1").unwrap_err().line, 1);
    }

    #[test]
    fn a_session_comes_back_if_its_last_full_block_does() {
        let text = format!("{HEADER}\n0,0,0,0-3\n0,0,0,0-2 5\n0,0,0,0 9 10\n0,0,0,0\n");
        assert_eq!(comes_back(&parse(&text).unwrap()), [true, false, false, false]);
    }
}
