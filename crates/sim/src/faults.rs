//! What goes wrong, how often, and how often it has.

use std::fmt;

use weft_plan::Time;

/// How likely each fault is. [`Faults::NONE`] is a network as one wishes it were.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// A message, or one attempt at a packet, is lost.
    pub loss: f64,
    /// It arrives twice.
    pub duplication: f64,
    /// It arrives much later than it should, after others that were sent after it.
    pub delay: f64,
    /// A message comes again and again for seconds, whatever has become of its sender meanwhile: somebody has recorded it.
    pub replay: f64,
    /// A packet arrives but its sender never learns of it, and sends it again.
    pub unacknowledged: f64,
    /// A side that gives a path up does not say so, and what it has queued goes on being sent.
    pub mute: f64,
    /// A bit changes on the wire, in messages and in moves that carry a checksum.
    pub flip: f64,
    /// A release finds a peer inside and has to be called again.
    pub busy_release: f64,
    /// A post is accepted in part although there is room.
    pub short_post: f64,
    /// How early at most a target may believe a deadline to be over, because it knows the poster's clock only so well.
    pub clock_error_max: Time,
}

impl Faults {
    pub const NONE: Faults = Faults {
        loss: 0.0,
        duplication: 0.0,
        delay: 0.0,
        replay: 0.0,
        unacknowledged: 0.0,
        mute: 0.0,
        flip: 0.0,
        busy_release: 0.0,
        short_post: 0.0,
        clock_error_max: Time::ZERO,
    };
}

/// How often each fault was injected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub losses: u64,
    pub duplicates: u64,
    pub delays: u64,
    pub replays: u64,
    pub unacknowledged: u64,
    pub flips: u64,
    pub busy_releases: u64,
    pub short_posts: u64,
    pub partitions: u64,
    pub crashes: u64,
    pub restarts: u64,
    pub freezes: u64,
    pub pulled_cables: u64,
    pub closed_paths: u64,
    pub given_up_paths: u64,
}

impl Tally {
    /// Every count by its name.
    pub fn rows(&self) -> [(&'static str, u64); 15] {
        [
            ("losses", self.losses),
            ("duplicates", self.duplicates),
            ("long delays", self.delays),
            ("replays", self.replays),
            ("unacknowledged packets", self.unacknowledged),
            ("bit flips", self.flips),
            ("busy releases", self.busy_releases),
            ("short posts", self.short_posts),
            ("partitions", self.partitions),
            ("crashes", self.crashes),
            ("restarts", self.restarts),
            ("freezes", self.freezes),
            ("cables pulled", self.pulled_cables),
            ("paths cut", self.closed_paths),
            ("paths given up", self.given_up_paths),
        ]
    }

    pub fn add(&mut self, other: &Tally) {
        self.losses += other.losses;
        self.duplicates += other.duplicates;
        self.delays += other.delays;
        self.replays += other.replays;
        self.unacknowledged += other.unacknowledged;
        self.flips += other.flips;
        self.busy_releases += other.busy_releases;
        self.short_posts += other.short_posts;
        self.partitions += other.partitions;
        self.crashes += other.crashes;
        self.restarts += other.restarts;
        self.freezes += other.freezes;
        self.pulled_cables += other.pulled_cables;
        self.closed_paths += other.closed_paths;
        self.given_up_paths += other.given_up_paths;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, count)) in self.rows().into_iter().enumerate() {
            write!(f, "{}{count} {name}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
