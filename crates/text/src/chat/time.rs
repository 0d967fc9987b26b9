//! `strftime_now`: the date and time in a prompt, in UTC.
//!
//! Twenty lines of calendar instead of a time library: templates ask for a date, and the machine's time zone
//! is no business of a prompt that another router of the cluster must be able to build again.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const SECONDS_PER_DAY: u64 = 86_400;

struct Moment {
    year: u64,
    /// 0 is January.
    month: usize,
    day: u64,
    day_of_year: u64,
    /// 0 is Sunday.
    weekday: usize,
    seconds: u64,
}

/// Formats a time as C's `strftime` does; a directive that is not known stays as it is.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let moment = Moment::at(time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO));
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = chars.next();
        }
        match directive.and_then(|c| moment.directive(c)) {
            Some(text) if unpadded => {
                let significant = text.trim_start_matches(['0', ' ']);
                out.push_str(if significant.is_empty() { "0" } else { significant });
            }
            Some(text) => out.push_str(&text),
            None => {
                out.push('%');
                out.extend(unpadded.then_some('-'));
                out.extend(directive);
            }
        }
    }
    out
}

impl Moment {
    fn at(since_epoch: Duration) -> Self {
        let (mut days, seconds) =
            (since_epoch.as_secs() / SECONDS_PER_DAY, since_epoch.as_secs() % SECONDS_PER_DAY);
        let weekday = ((days + 4) % 7) as usize;
        // Whole cycles of 400 years first, so that the loop is short for any time at all.
        let mut year = 1970 + days / 146_097 * 400;
        days %= 146_097;
        while days >= days_in_year(year) {
            days -= days_in_year(year);
            year += 1;
        }
        let day_of_year = days;
        let mut month = 0;
        while days >= days_in_month(year, month) {
            days -= days_in_month(year, month);
            month += 1;
        }
        Self { year, month, day: days + 1, day_of_year: day_of_year + 1, weekday, seconds }
    }

    fn directive(&self, directive: char) -> Option<String> {
        let (hour, minute, second) = (self.seconds / 3600, self.seconds / 60 % 60, self.seconds % 60);
        let hour12 = (hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month + 1),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => MONTHS[self.month].to_owned(),
            'b' | 'h' => MONTHS[self.month][..3].to_owned(),
            'A' => WEEKDAYS[self.weekday].to_owned(),
            'a' => WEEKDAYS[self.weekday][..3].to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour12:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'z' => "+0000".to_owned(),
            'Z' => "UTC".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: u64, month: usize) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of GNU date.
    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "1970-01-01 Thu 001 00:00:00 12 AM"),
            (951_782_399, "2000-02-28 Mon 059 23:59:59 11 PM"),
            (951_782_400, "2000-02-29 Tue 060 00:00:00 12 AM"),
            (1_735_689_599, "2024-12-31 Tue 366 23:59:59 11 PM"),
            (4_107_542_400, "2100-03-01 Mon 060 00:00:00 12 AM"),
        ];
        for (seconds, expected) in cases {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime("%F %a %j %T %I %p", time), expected);
        }
        let time = UNIX_EPOCH + Duration::from_secs(1_735_689_600);
        assert_eq!(strftime("%d %b %Y, %-d %B %-H, %Q %", time), "01 Jan 2025, 1 January 0, %Q %");
    }
}
