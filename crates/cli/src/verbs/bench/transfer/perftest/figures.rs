//! What was measured of one size, as perftest prints it.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::Mode;
use super::counters::Counted;

/// One line of a table, and one JSON object.
pub trait Figures: Serialize {
    fn heading() -> String;
    fn line(&self) -> String;
}

/// A stream of messages. What perftest calls MB is 2^20 bytes.
#[derive(Debug, Serialize)]
pub struct Stream {
    pub mode: Mode,
    pub transport: String,
    pub paths: usize,
    pub bytes: u64,
    /// Blocks of which each message consists, and their size.
    pub blocks: u64,
    pub block_bytes: u64,
    pub iterations: u64,
    pub depth: u64,
    pub bw_peak_mib_per_sec: f64,
    pub bw_average_mib_per_sec: f64,
    pub bw_average_gbit_per_sec: f64,
    pub msg_rate_mpps: f64,
    pub blocks_per_sec: f64,
    pub verified: bool,
    /// What the two ends' transports counted for every 1,024 blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_1024_blocks: Option<Counted>,
}

/// Times of single messages, in microseconds.
#[derive(Debug, Serialize)]
pub struct Latency {
    pub mode: Mode,
    pub transport: String,
    pub paths: usize,
    pub bytes: u64,
    pub iterations: u64,
    pub t_min_us: f64,
    pub t_max_us: f64,
    pub t_typical_us: f64,
    pub t_avg_us: f64,
    pub t_stdev_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
}

/// When each message of a stream was posted and done, from the start of the stream on, in order.
#[derive(Debug, Default)]
pub struct Times {
    pub posted: Vec<Duration>,
    pub done: Vec<Duration>,
}

impl Times {
    /// Messages a second: at the best, and all in all. The best is that of a tenth of the messages that follow each other, from the post
    /// of its first to the end of its last.
    pub fn rates(&self) -> (f64, f64) {
        let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64().max(1e-9);
        let average = self.done.last().map_or(0.0, |last| rate(self.done.len(), *last));
        let tenth = (self.done.len() / 10).max(1);
        let ends = self.done.iter().skip(tenth - 1);
        let tenths = self.posted.iter().zip(ends);
        let best = tenths.map(|(posted, done)| rate(tenth, done.saturating_sub(*posted)));
        (best.fold(average, f64::max), average)
    }
}

impl Latency {
    /// The figures of at least one sample. `share`: what part of each sample is the latency, a half of a round trip.
    pub fn of(samples: &[Duration], share: f64) -> Latency {
        let mut us: Vec<f64> = samples
            .iter()
            .map(|time| time.as_nanos() as f64 * share / 1e3)
            .collect();
        us.sort_unstable_by(f64::total_cmp);
        let count = us.len().max(1) as f64;
        let average = us.iter().sum::<f64>() / count;
        let variance = us.iter().map(|t| (t - average).powi(2)).sum::<f64>() / count;
        let quantile = |share: f64| {
            let rank = (share * us.len() as f64).ceil() as usize;
            us.get(rank.clamp(1, us.len().max(1)) - 1).copied().unwrap_or(0.0)
        };
        Latency {
            mode: Mode::WriteLat,
            transport: String::new(),
            paths: 0,
            bytes: 0,
            iterations: us.len() as u64,
            t_min_us: quantile(0.0),
            t_max_us: quantile(1.0),
            t_typical_us: quantile(0.5),
            t_avg_us: average,
            t_stdev_us: variance.sqrt(),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
        }
    }
}

impl Figures for Stream {
    fn heading() -> String {
        format!(
            "  {:>9} {:>12} {:>16} {:>19} {:>19} {:>14}",
            "#bytes", "#iterations", "BW peak[MiB/s]", "BW average[MiB/s]", "BW average[Gb/s]", "MsgRate[Mpps]"
        )
    }
    fn line(&self) -> String {
        let mut line = format!(
            "  {:>9} {:>12} {:>16.2} {:>19.2} {:>19.3} {:>14.6}",
            self.bytes,
            self.iterations,
            self.bw_peak_mib_per_sec,
            self.bw_average_mib_per_sec,
            self.bw_average_gbit_per_sec,
            self.msg_rate_mpps
        );
        if self.blocks > 1 {
            // Writing into a string cannot fail.
            let _ = write!(line, "\n            {:.0} blocks/s", self.blocks_per_sec);
        }
        if let Some(counted) = &self.per_1024_blocks {
            let _ = write!(line, "\n            per 1024 blocks: {counted}");
        }
        line
    }
}

impl Figures for Latency {
    fn heading() -> String {
        let mut heading = format!("  {:>9} {:>12}", "#bytes", "#iterations");
        for title in ["t_min", "t_max", "t_typical", "t_avg", "t_stdev", "99%", "99.9%"] {
            let _ = write!(heading, " {:>13}", format!("{title}[µs]"));
        }
        heading
    }
    fn line(&self) -> String {
        let mut line = format!("  {:>9} {:>12}", self.bytes, self.iterations);
        for us in [
            self.t_min_us,
            self.t_max_us,
            self.t_typical_us,
            self.t_avg_us,
            self.t_stdev_us,
            self.p99_us,
            self.p999_us,
        ] {
            let _ = write!(line, " {us:>13.2}");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_summed_up_as_perftest_does() {
        let samples: Vec<Duration> = (1..=1000).rev().map(|us| Duration::from_micros(2 * us)).collect();
        let found = Latency::of(&samples, 0.5);
        assert_eq!(
            (found.t_min_us, found.t_max_us, found.t_typical_us),
            (1.0, 1000.0, 500.0)
        );
        assert_eq!((found.p99_us, found.p999_us, found.iterations), (990.0, 999.0, 1000));
        assert!((found.t_avg_us - 500.5).abs() < 1e-9 && (found.t_stdev_us - 288.675).abs() < 0.01);
        assert_eq!(Latency::heading().chars().count(), found.line().chars().count());
    }

    #[test]
    fn the_best_tenth_is_the_peak() {
        // A hundred messages one after the other, one every millisecond, except for ten that take a tenth of one.
        let mut at = Duration::ZERO;
        let mut times = Times::default();
        for i in 0..100 {
            times.posted.push(at);
            at += Duration::from_micros(if (40..50).contains(&i) { 100 } else { 1000 });
            times.done.push(at);
        }
        let (peak, average) = times.rates();
        assert!((peak - 10_000.0).abs() < 1.0, "{peak}");
        assert!((average - 100.0 / 0.091).abs() < 1.0, "{average}");
        assert_eq!(Times::default().rates(), (0.0, 0.0));
    }
}
