//! What two connected agents cost that do nothing.

use std::time::Duration;

use weft_plan::Time;

use super::{Transfer, print_json};
use crate::complaint::Complaint;
use crate::ends::Overrides;
use crate::pair::{Cast, Pair};
use crate::verbs::cpu_time_ns;

impl Transfer {
    pub(super) fn idle(&self, overrides: &Overrides) -> Result<(), Complaint> {
        const WATCH: Duration = Duration::from_secs(10);
        let cast = Cast {
            here: "bench",
            there: "partner",
            region_bytes: 4096,
            echo: false,
            at: self.connect(),
        };
        let mut pair = Pair::start(self.transport[0], cast, overrides)?;
        let before = (cpu_time_ns(), pair.partner.cpu_time_ns()?);
        std::thread::sleep(WATCH);
        let after = (cpu_time_ns(), pair.partner.cpu_time_ns()?);
        let (here, there) = (Time::from_ns(after.0 - before.0), Time::from_ns(after.1 - before.1));
        if self.json {
            return print_json(&serde_json::json!({
                "idle_seconds": WATCH.as_secs(),
                "connecting_agent_cpu_ms": here.as_secs_f64() * 1e3,
                "accepting_agent_cpu_ms": there.as_secs_f64() * 1e3,
            }));
        }
        outln!(
            "  Two connected agents, idle for {} s, used this much CPU time:",
            WATCH.as_secs()
        );
        outln!("  {here:.2} where the connection was made, {there:.2} where it was accepted");
        Ok(())
    }
}
