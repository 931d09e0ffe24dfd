//! Blocks of a prompt, from the process that computed them to another one that goes on with them. There is no engine around.

use std::time::Duration;

use weft::Agent;
use weft::hand_off::{Cache, Event, HandOff, Layer, Options, Wanted};
use weft::pages::Pages;

type Anything = Result<(), Box<dyn std::error::Error>>;

fn main() -> Anything {
    let role = std::env::args().nth(1);
    let agent = Agent::builder(role.as_deref().unwrap_or("prefill"))
        .secret("of two processes")
        .start()?;
    // Both caches have one layer; blocks of 16 tokens here, and of 32 there.
    let block_tokens = if role.is_none() { 16 } else { 32 };
    let pages = Pages::heads_first(64, block_tokens, 0..4, 256)?;
    let memory = agent.allocate(pages.end() as usize)?;
    let layer = Layer {
        name: "layer".into(),
        region: 0,
        granule: 1,
        pages,
    };
    let cache = Cache::new(vec![("model".into(), "example".into())], 0, 1, vec![layer])?;
    let hand_off = HandOff::open(&agent, cache, std::slice::from_ref(&memory), Options::default())?;
    match role {
        // A prompt of 60 tokens lies in four blocks. Whoever has the ticket may fetch it.
        None => {
            memory.write(0, &vec![7; memory.len() as usize]);
            let ticket = hand_off.offer("prompt 1", &[3, 9, 4, 40], 60, b"the tokens")?;
            let decode = std::process::Command::new(std::env::current_exe()?)
                .args([
                    "decode",
                    &ticket.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
                ])
                .status()?;
            assert!(decode.success());
        }
        Some(_) => {
            let text = std::env::args().nth(2).ok_or("a ticket")?;
            let ticket: Result<Vec<u8>, _> = (0..text.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&text[at..at + 2], 16))
                .collect();
            let name = hand_off.want(&ticket?, b"the tokens", 1)?;
            let wanted = Wanted {
                blocks: vec![8, 1],
                tokens: 0..60,
                prompt_tokens: 60,
                digest: [0; 32],
            };
            hand_off.fetch(&name, wanted)?;
        }
    }
    match hand_off
        .next_event(Duration::from_secs(10))?
        .ok_or("nothing happened")?
    {
        Event::Ended { name, outcome } => println!("decode has {name}: {} bytes", outcome?.bytes),
        Event::Free { name, why } => println!("prefill has the blocks of {name} back: {why}"),
        other => println!("{other:?}"),
    }
    Ok(())
}
