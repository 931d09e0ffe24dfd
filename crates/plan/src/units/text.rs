//! Quantities as people write them.

use std::fmt::{self, Write as _};
use std::marker::PhantomData;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

use super::{Bandwidth, Bytes, Picos, Time};

/// Text that is not the quantity it should be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UnitError {
    #[error("nothing where a quantity should be")]
    Empty,
    #[error("`{text}` is negative")]
    Negative { text: String },
    #[error("`{text}` is not a number")]
    BadNumber { text: String },
    #[error("`{unit}` is not a unit here; known are {known}")]
    BadUnit { unit: String, known: &'static str },
    #[error("`{text}` has no unit; known are {known}")]
    NoUnit { text: String, known: &'static str },
    #[error("`{text}` is too much for 64 bits")]
    Overflow { text: String },
    #[error("`{text}` is less than the smallest quantity and more than none")]
    TooSmall { text: String },
}

/// A unit is worth `numerator / denominator` of the base unit.
struct Unit {
    name: &'static str,
    numerator: u64,
    denominator: u64,
}

const fn unit(name: &'static str, numerator: u64) -> Unit {
    Unit {
        name,
        numerator,
        denominator: 1,
    }
}

const fn bits(name: &'static str, numerator: u64) -> Unit {
    Unit {
        name,
        numerator,
        denominator: 8,
    }
}

/// What the quantities differ in.
trait Quantity: Sized {
    const EXPECTED: &'static str;
    const KNOWN: &'static str;
    const UNITS: &'static [Unit];
    /// Whether a number alone means the base unit.
    const BARE: bool;
    fn from_base(value: u64) -> Self;
}

impl Quantity for Bytes {
    const EXPECTED: &'static str = "a size such as \"64 KiB\", or a number of bytes";
    const KNOWN: &'static str = "B, KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB, PB";
    const UNITS: &'static [Unit] = &[
        unit("B", 1),
        unit("KiB", 1 << 10),
        unit("MiB", 1 << 20),
        unit("GiB", 1 << 30),
        unit("TiB", 1 << 40),
        unit("PiB", 1 << 50),
        unit("KB", 1_000),
        unit("kB", 1_000),
        unit("MB", 1_000_000),
        unit("GB", 1_000_000_000),
        unit("TB", 1_000_000_000_000),
        unit("PB", 1_000_000_000_000_000),
    ];
    const BARE: bool = true;
    fn from_base(value: u64) -> Bytes {
        Bytes(value)
    }
}

impl Quantity for Time {
    const EXPECTED: &'static str = "a time such as \"250 ms\", or a number of nanoseconds";
    const KNOWN: &'static str = "ns, µs (or us), ms, s, min, h, d";
    const UNITS: &'static [Unit] = &[
        unit("ns", 1),
        // The micro sign, the Greek letter, and what a plain keyboard has.
        unit("\u{b5}s", 1_000),
        unit("\u{3bc}s", 1_000),
        unit("us", 1_000),
        unit("ms", 1_000_000),
        unit("s", 1_000_000_000),
        unit("min", 60_000_000_000),
        unit("h", 3_600_000_000_000),
        unit("d", 86_400_000_000_000),
    ];
    const BARE: bool = false;
    fn from_base(value: u64) -> Time {
        Time(value)
    }
}

impl Quantity for Picos {
    const EXPECTED: &'static str = "a time such as \"12.3 µs\", or a number of picoseconds";
    const KNOWN: &'static str = "ps, ns, µs (or us), ms, s, min, h";
    const UNITS: &'static [Unit] = &[
        unit("ps", 1),
        unit("ns", 1_000),
        // The micro sign, the Greek letter, and what a plain keyboard has.
        unit("\u{b5}s", 1_000_000),
        unit("\u{3bc}s", 1_000_000),
        unit("us", 1_000_000),
        unit("ms", 1_000_000_000),
        unit("s", 1_000_000_000_000),
        unit("min", 60_000_000_000_000),
        unit("h", 3_600_000_000_000_000),
    ];
    const BARE: bool = false;
    fn from_base(value: u64) -> Picos {
        Picos(value)
    }
}

impl Quantity for Bandwidth {
    const EXPECTED: &'static str = "a bandwidth such as \"25 GB/s\" or \"400 Gb/s\", or a number of bytes per second";
    const KNOWN: &'static str =
        "B/s, KB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, GiB/s, and in bits b/s, Kb/s, Mb/s, Gb/s, Tb/s";
    const UNITS: &'static [Unit] = &[
        unit("B/s", 1),
        unit("KB/s", 1_000),
        unit("kB/s", 1_000),
        unit("MB/s", 1_000_000),
        unit("GB/s", 1_000_000_000),
        unit("TB/s", 1_000_000_000_000),
        unit("KiB/s", 1 << 10),
        unit("MiB/s", 1 << 20),
        unit("GiB/s", 1 << 30),
        bits("b/s", 1),
        bits("Kb/s", 1_000),
        bits("kb/s", 1_000),
        bits("Mb/s", 1_000_000),
        bits("Gb/s", 1_000_000_000),
        bits("Tb/s", 1_000_000_000_000),
    ];
    const BARE: bool = false;
    fn from_base(value: u64) -> Bandwidth {
        Bandwidth(value)
    }
}

/// Longer numbers than this are nobody's honest quantity, and shorter ones cannot overflow 128 bits below.
const MAX_DIGITS: usize = 20;

fn parse<Q: Quantity>(text: &str) -> Result<Q, UnitError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(UnitError::Empty);
    }
    let owned = || text.chars().take(64).collect::<String>();
    let digits = text.strip_prefix('+').unwrap_or(text);
    if digits.starts_with(['-', '\u{2212}']) {
        return Err(UnitError::Negative { text: owned() });
    }
    let number_len = digits
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(digits.len());
    let (number, unit) = digits.split_at(number_len);
    let (mantissa, scale) = decimal(number).ok_or_else(|| UnitError::BadNumber { text: owned() })?;

    let unit = unit.trim_start();
    let worth = if unit.is_empty() {
        // Nothing is nothing in every unit.
        if !Q::BARE && mantissa != 0 {
            return Err(UnitError::NoUnit {
                text: owned(),
                known: Q::KNOWN,
            });
        }
        &Q::UNITS[0]
    } else {
        Q::UNITS
            .iter()
            .find(|u| u.name == unit)
            .ok_or_else(|| UnitError::BadUnit {
                unit: unit.chars().take(64).collect(),
                known: Q::KNOWN,
            })?
    };

    let divisor = scale * u128::from(worth.denominator);
    let base = mantissa
        .checked_mul(u128::from(worth.numerator))
        .and_then(|v| v.checked_add(divisor / 2))
        .map(|v| v / divisor)
        .and_then(|v| u64::try_from(v).ok())
        .ok_or_else(|| UnitError::Overflow { text: owned() })?;
    if base == 0 && mantissa != 0 {
        return Err(UnitError::TooSmall { text: owned() });
    }
    Ok(Q::from_base(base))
}

/// `12.34` as `(1234, 100)`.
fn decimal(number: &str) -> Option<(u128, u128)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let fraction = fraction.trim_end_matches('0');
    let bad = |part: &str| part.len() > MAX_DIGITS || !part.bytes().all(|b| b.is_ascii_digit());
    // "5." and ".5" are numbers, "." is not.
    if number.len() == number.matches('.').count() || bad(whole) || bad(fraction) {
        return None;
    }
    let scale = 10u128.pow(fraction.len() as u32);
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    Some((whole.checked_mul(scale)?.checked_add(fraction)?, scale))
}

/// Units for printing, from small to large.
type Ladder = &'static [(&'static str, u64)];

const TIMES: Ladder = &[("ns", 1), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
const PICOS: Ladder = &[
    ("ps", 1),
    ("ns", 1_000),
    ("µs", 1_000_000),
    ("ms", 1_000_000_000),
    ("s", 1_000_000_000_000),
];
const BANDWIDTHS: Ladder = &[
    ("B/s", 1),
    ("KB/s", 1_000),
    ("MB/s", 1_000_000),
    ("GB/s", 1_000_000_000),
    ("TB/s", 1_000_000_000_000),
];
const BINARY: Ladder = &[
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("PiB", 1 << 50),
];
const DECIMAL: Ladder = &[
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.precision().is_some() {
            return print(f, self.0, BINARY);
        }
        // Sizes are mostly round in powers of two or of ten; the shorter exact text is what was meant.
        let exact = |ladder: Ladder| {
            let fits = |worth: u64| self.0 >= worth && (u128::from(self.0) * 1_000).is_multiple_of(u128::from(worth));
            let (name, worth) = ladder.iter().rev().find(|(_, worth)| fits(*worth))?;
            Some(exact_text(self.0, name, *worth))
        };
        let plain = exact_text(self.0, "B", 1);
        let shorter = [exact(BINARY), exact(DECIMAL), Some(plain)]
            .into_iter()
            .flatten()
            .min_by_key(String::len)
            .expect("the plain text is there");
        pad(f, &shorter)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, TIMES)
    }
}

impl fmt::Display for Picos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, PICOS)
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, BANDWIDTHS)
    }
}

/// Exactly, or rounded where the formatter has a precision.
fn print(f: &mut fmt::Formatter<'_>, value: u64, ladder: Ladder) -> fmt::Result {
    let rung = ladder.iter().rposition(|(_, worth)| value >= *worth).unwrap_or(0);
    let Some(precision) = f.precision() else {
        let (name, worth) = ladder[rung];
        return pad(f, &exact_text(value, name, worth));
    };
    let precision = precision.min(12);
    let scale = 10u128.pow(precision as u32);
    let rounded = |rung: usize| {
        let worth = u128::from(ladder[rung].1);
        (u128::from(value) * scale + worth / 2) / worth
    };
    // 999.96 rounds to 1000.0, which is one of the next unit.
    let rung = match ladder.get(rung + 1) {
        Some(next) if rounded(rung) * u128::from(ladder[rung].1) >= u128::from(next.1) * scale => rung + 1,
        _ => rung,
    };
    let (name, _) = ladder[rung];
    let shown = rounded(rung);
    let mut text = String::with_capacity(24);
    // The base unit has no parts.
    if rung == 0 || precision == 0 {
        write!(text, "{} {name}", shown / scale)?;
    } else {
        write!(text, "{}.{:0precision$} {name}", shown / scale, shown % scale)?;
    }
    pad(f, &text)
}

fn exact_text(value: u64, name: &str, worth: u64) -> String {
    let mut text = (value / worth).to_string();
    let mut rest = u128::from(value % worth);
    if rest > 0 {
        text.push('.');
    }
    while rest > 0 {
        rest *= 10;
        text.push(char::from(b'0' + (rest / u128::from(worth)) as u8));
        rest %= u128::from(worth);
    }
    text.push(' ');
    text.push_str(name);
    text
}

/// [`fmt::Formatter::pad`] would take the precision for a length, and numbers line up at the right.
fn pad(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    let room = f.width().unwrap_or(0).saturating_sub(text.chars().count());
    let before = match f.align() {
        Some(fmt::Alignment::Left) => 0,
        Some(fmt::Alignment::Center) => room / 2,
        Some(fmt::Alignment::Right) | None => room,
    };
    let fill = f.fill();
    (0..before).try_for_each(|_| f.write_char(fill))?;
    f.write_str(text)?;
    (before..room).try_for_each(|_| f.write_char(fill))
}

struct QuantityVisitor<Q>(PhantomData<Q>);

impl<Q: Quantity> de::Visitor<'_> for QuantityVisitor<Q> {
    type Value = Q;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Q::EXPECTED)
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Q, E> {
        Ok(Q::from_base(value))
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Q, E> {
        u64::try_from(value).map(Q::from_base).map_err(|_| {
            E::custom(UnitError::Negative {
                text: value.to_string(),
            })
        })
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Q, E> {
        parse(text).map_err(E::custom)
    }
}

// Traits of others cannot be implemented for every `Quantity` at once, so each is named here.
macro_rules! written_by_people {
    ($quantity:ident) => {
        impl FromStr for $quantity {
            type Err = UnitError;
            fn from_str(text: &str) -> Result<$quantity, UnitError> {
                parse(text)
            }
        }

        impl Serialize for $quantity {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $quantity {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$quantity, D::Error> {
                deserializer.deserialize_any(QuantityVisitor(PhantomData))
            }
        }
    };
}

written_by_people!(Bytes);
written_by_people!(Time);
written_by_people!(Picos);
written_by_people!(Bandwidth);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64KiB", 65536),
            (" 64 KiB ", 65536),
            ("1.5GB", 1_500_000_000),
            ("0.5 KiB", 512),
            (".5KiB", 512),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for (bytes, text) in [
            (0, "0 B"),
            (100, "100 B"),
            (4097, "4097 B"),
            (65536, "64 KiB"),
            (1536, "1536 B"),
            (1536 << 10, "1.5 MiB"),
            (1_500_000_000, "1.5 GB"),
            (1 << 30, "1 GiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(format!("{:.1}", Bytes(1_500_000_000)), "1.4 GiB");
        assert_eq!(format!("{:.1}", Bytes((1 << 20) - 1)), "1.0 MiB");
        assert_eq!(format!("[{:>8}]", Bytes(4096)), "[   4 KiB]");
    }

    #[test]
    fn times_and_bandwidths_as_people_write_them() {
        assert_eq!("12.3 µs".parse(), Ok(Picos::from_ns(12_300)));
        assert_eq!("12.3us".parse(), Ok(Picos::from_ns(12_300)));
        assert_eq!("250ms".parse(), Ok(Picos::from_ms(250)));
        assert_eq!("10s".parse(), Ok(Picos::from_secs(10)));
        assert_eq!("2 min".parse(), Ok(Picos::from_secs(120)));
        assert_eq!("0".parse(), Ok(Picos::ZERO));
        assert_eq!(Picos::from_ns(12_300).to_string(), "12.3 µs");
        assert_eq!(format!("{:.1}", Picos::from_ns(999_960)), "1.0 ms");
        assert_eq!(format!("{:.2}", Picos::from_ps(999)), "999 ps");
        assert_eq!("25 GB/s".parse(), Ok(Bandwidth::from_bytes_per_sec(25_000_000_000)));
        assert_eq!("400 Gb/s".parse(), Ok(Bandwidth::from_bytes_per_sec(50_000_000_000)));
        assert_eq!(Bandwidth::from_bytes_per_sec(12_500_000_000).to_string(), "12.5 GB/s");
        assert_eq!(
            Time::MAX.to_string().parse(),
            Ok(Time::MAX),
            "the end of time reads back"
        );
        assert_eq!("214 d".parse(), Ok(Time::from_secs(214 * 86_400)));
        assert_eq!(Time::from_ns(12_300).to_string(), "12.3 µs");
    }

    #[test]
    fn what_is_no_quantity_is_refused_with_its_reason() {
        use UnitError::*;
        let text = |s: &str| s.to_owned();
        assert_eq!("".parse::<Bytes>(), Err(Empty));
        assert_eq!("  ".parse::<Picos>(), Err(Empty));
        assert_eq!("-1 KiB".parse::<Bytes>(), Err(Negative { text: text("-1 KiB") }));
        assert_eq!("KiB".parse::<Bytes>(), Err(BadNumber { text: text("KiB") }));
        assert_eq!("1.2.3 s".parse::<Picos>(), Err(BadNumber { text: text("1.2.3 s") }));
        assert_eq!(". s".parse::<Picos>(), Err(BadNumber { text: text(". s") }));
        assert!(matches!("3 parsecs".parse::<Picos>(), Err(BadUnit { unit, .. }) if unit == "parsecs"));
        assert!(matches!("3 GB".parse::<Bandwidth>(), Err(BadUnit { .. })));
        assert!(matches!("1e9".parse::<Bytes>(), Err(BadUnit { unit, .. }) if unit == "e9"));
        assert!(matches!("10".parse::<Picos>(), Err(NoUnit { .. })));
        assert!(matches!("20000 PB".parse::<Bytes>(), Err(Overflow { .. })));
        assert!(matches!("6000 h".parse::<Picos>(), Err(Overflow { .. })));
        assert!(matches!("0.0001 ps".parse::<Picos>(), Err(TooSmall { .. })));
        assert!(matches!("9".repeat(400).parse::<Bytes>(), Err(BadNumber { text }) if text.len() == 64));
    }

    #[test]
    fn toml_takes_text_or_a_number_and_writes_text() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct File {
            size: Bytes,
            wait: Picos,
            rate: Bandwidth,
        }
        let file: File = toml::from_str("size = 4096\nwait = '1.5 µs'\nrate = '100 Gb/s'").unwrap();
        assert_eq!(
            toml::to_string(&file).unwrap(),
            "size = \"4 KiB\"\nwait = \"1.5 µs\"\nrate = \"12.5 GB/s\"\n"
        );
        let error = toml::from_str::<File>("size = -1\nwait = 0\nrate = 0").unwrap_err();
        assert!(error.message().contains("negative"), "{error}");
        let error = toml::from_str::<File>("size = 1\nwait = '3 weeks'\nrate = 0").unwrap_err();
        assert!(error.message().contains("weeks"), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(value: u64, shift in 0u32..64) {
            let value = value >> shift;
            prop_assert_eq!(Bytes(value).to_string().parse(), Ok(Bytes(value)));
            prop_assert_eq!(Time(value).to_string().parse(), Ok(Time(value)));
            prop_assert_eq!(Picos(value).to_string().parse(), Ok(Picos(value)));
            prop_assert_eq!(Bandwidth(value).to_string().parse(), Ok(Bandwidth(value)));
        }

        #[test]
        fn what_is_rounded_reads_back_nearly(value in 0u64..u64::MAX / 2, shift in 0u32..63, precision in 2usize..7) {
            let value = value >> shift;
            let near = |back: u64| (back as f64 - value as f64).abs() <= 0.006 * value as f64;
            let bytes: Bytes = format!("{:.precision$}", Bytes(value)).parse().unwrap();
            let time: Picos = format!("{:.precision$}", Picos(value)).parse().unwrap();
            let rate: Bandwidth = format!("{:.precision$}", Bandwidth(value)).parse().unwrap();
            prop_assert!(near(bytes.0) && near(time.0) && near(rate.0), "{bytes} {time} {rate} of {value}");
        }

        #[test]
        fn garbage_is_an_error_and_never_a_panic(text in ".{0,60}", number in "[0-9.+-]{0,50}") {
            for text in [text.clone(), number.clone(), format!("{number} KiB"), format!("{number}{text}")] {
                let _ = text.parse::<Bytes>();
                let _ = text.parse::<Time>();
                let _ = text.parse::<Picos>();
                let _ = text.parse::<Bandwidth>();
            }
        }
    }
}
