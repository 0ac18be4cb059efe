//! What is printed.

use std::fmt::Write;

use serde_json::Value;

use crate::rows::{Compared, Row};

/// Most of Immediate's C that `tempo_q` may take: utilisation, reservation, part.
const C_MAX: [(f64, &str, f64); 4] =
    [(0.95, "eager", 0.50), (1.05, "eager", 0.38), (0.95, "lazy", 0.45), (1.05, "lazy", 0.30)];
const KEPT_MIN: f64 = 0.97;

pub(crate) fn draw(compared: &[Compared<'_>]) -> String {
    let mut out = String::new();
    let mut heading = String::new();
    for it in compared {
        let next = place(it.row);
        if next != heading {
            let _ = writeln!(
                out,
                "\n{next}; {:.2} requests/s offered, {} seeds\n{:<11} {:>15} {:>15} {:>6} {:>16} {:>15} {:>6} {:>6} {:>6} {:>7} {:>7}",
                it.row.offered_per_s,
                it.row.runs.len(),
                "policy",
                "p95 TTFT s",
                "cut vs demand",
                "kept",
                "C GiB.s/request",
                "cut vs immed.",
                "late",
                "early",
                "block",
                "queue",
                "served"
            );
            heading = next;
        }
        line(&mut out, it);
    }
    out
}

fn place(row: &Row) -> String {
    let varied = row.varied.map(|(name, value)| format!(", {name} {value}")).unwrap_or_default();
    let (scenario, reservation) = (row.scenario, row.reservation_name());
    format!("{scenario}, utilisation {}{varied}, {reservation}", row.utilisation)
}

fn line(out: &mut String, it: &Compared<'_>) {
    let percent = |part: f64| format!("{:.1}", part * 100.0);
    let pair = |mean: f64, se: f64| format!("{mean:.2}+-{se:.2}");
    // Objects of a throttled file are small.
    let c = |mean: f64, se: f64| match mean > 0.0 && mean < 0.5 {
        true => format!("{mean:.5}+-{se:.5}"),
        false => pair(mean, se),
    };
    let cut =
        |cut: crate::statistics::Summary| format!("{}+-{} %", percent(cut.mean), percent(cut.se));
    let _ = writeln!(
        out,
        "{:<11} {:>15} {:>15} {:>6} {:>16} {:>15} {:>6} {:>6} {:>6} {:>7.2} {:>7.3}",
        it.row.policy,
        pair(it.p95_ttft_s.mean, it.p95_ttft_s.se),
        cut(it.p95_cut),
        percent(it.kept),
        c(it.c_gib_s.mean, it.c_gib_s.se),
        cut(it.c_cut),
        percent(it.row.mean(|run| run.late)),
        percent(it.row.mean(|run| run.early)),
        percent(it.row.mean(|run| run.blocked)),
        it.row.mean(|run| run.queue_mean),
        it.row.mean(|run| run.served_per_s),
    );
}

/// Who is on the front of p95 and C, and where `queue1` is better than `tempo_q`.
pub(crate) fn fronts(compared: &[Compared<'_>]) -> String {
    let mut out = String::from("\nPareto fronts of p95 TTFT and C\n");
    for point in points(compared) {
        let figures = |it: &Compared<'_>| (it.p95_ttft_s.mean, it.c_gib_s.mean);
        let is_beaten = |it: &Compared<'_>| {
            let (p95, c) = figures(it);
            point
                .iter()
                .map(|it| figures(it))
                .any(|(p, b)| p <= p95 && b <= c && (p < p95 || b < c))
        };
        let front: Vec<&str> =
            point.iter().filter(|it| !is_beaten(it)).map(|it| it.row.policy).collect();
        let _ = writeln!(out, "{}: {}", place(point[0].row), front.join(", "));
        let of = |policy| point.iter().find(|it| it.row.policy == policy);
        if let (Some(queue), Some(tempo)) = (of("queue1"), of("tempo_q")) {
            let _ = writeln!(out, "    {}", duel(queue, tempo));
        }
    }
    out
}

/// The rows of each point with more than a few policies.
fn points<'a, 'b>(compared: &'a [Compared<'b>]) -> Vec<Vec<&'a Compared<'b>>> {
    let mut points: Vec<Vec<&Compared<'b>>> = Vec::new();
    for it in compared {
        match points.last_mut() {
            Some(point) if place(point[0].row) == place(it.row) => point.push(it),
            _ => points.push(vec![it]),
        }
    }
    points.retain(|point| point.len() > 3);
    points
}

fn duel(queue: &Compared<'_>, tempo: &Compared<'_>) -> String {
    let part = |ours: f64, theirs: f64| (ours / theirs - 1.0) * 100.0;
    let p95 = part(queue.p95_ttft_s.mean, tempo.p95_ttft_s.mean);
    let c = part(queue.c_gib_s.mean, tempo.c_gib_s.mean);
    let word = match (p95 <= 0.0, c <= 0.0) {
        (true, true) => "queue1 WINS on both",
        (true, false) => "queue1 wins on p95",
        (false, true) => "queue1 wins on C",
        (false, false) => "tempo_q wins on both",
    };
    format!("{word}: against tempo_q its p95 is {p95:+.1} % and its C {c:+.1} %")
}

/// One line for each aim.
pub(crate) fn aims(compared: &[Compared<'_>]) -> String {
    let mut out = String::from("\naims\n");
    for (utilisation, reservation, c_max) in C_MAX {
        let it = compared.iter().find(|it| {
            it.row.scenario == "homogeneous"
                && it.row.policy == "tempo_q"
                && it.row.reservation_name() == reservation
                && (it.row.utilisation - utilisation).abs() < 1e-9
        });
        let Some(it) = it else { continue };
        let c = 1.0 - it.c_cut.mean;
        let met = if it.kept >= KEPT_MIN && c <= c_max { "met" } else { "MISSED" };
        let _ = writeln!(
            out,
            "{met:<6} utilisation {utilisation}, {reservation}: tempo_q keeps {:.1} % of immediate's p95 gain (at least {:.0}) at {:.1} +- {:.1} % of its C (at most {:.0})",
            it.kept * 100.0,
            KEPT_MIN * 100.0,
            c * 100.0,
            it.c_cut.se * 100.0,
            c_max * 100.0
        );
    }
    out
}

/// How far use was from readiness at the head of the queue.
pub(crate) fn margins(margins: &[Value]) -> String {
    let mut out = String::from(
        "\nmargin at the head of the queue: time until use less time until ready, s, under immediate\n",
    );
    for row in margins {
        let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let _ = writeln!(
            out,
            "{:<20} utilisation {:<5} min {:6.2}  5 % {:6.2}  median {:6.2}  95 % {:6.2}  max {:6.2}",
            row["scenario"].as_str().unwrap_or("?"),
            number("utilisation"),
            number("min_s"),
            number("p5_s"),
            number("p50_s"),
            number("p95_s"),
            number("max_s"),
        );
    }
    out
}
