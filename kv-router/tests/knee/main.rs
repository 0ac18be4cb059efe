//! The window learner over devices in virtual time.

mod model;
use model::*;

#[test]
fn explore() {
    let jit = |jitter, drift, stalls, places| Profile { jitter, drift, stalls, places, ..CALM };
    let cases = [
        ("calm 12", jit(0., 0., 0., 12.)),
        ("calm 3", jit(0., 0., 0., 3.)),
        ("calm 1", jit(0., 0., 0., 1.)),
        ("calm 40", jit(0., 0., 0., 40.)),
        ("A 12", jit(0.3, 0.1, 0., 12.)),
        ("A 4", jit(0.3, 0.1, 0., 4.)),
        ("B 12", jit(0.85, 0.25, 0., 12.)),
        ("C 12", jit(0.85, 0.25, 0., 3.)),
        ("D 12", jit(0.85, 0.5, 0., 12.)),
        ("E 12", jit(0.3, 0.1, 0.03, 12.)),
        ("F 12/3", jit(0.3, 0.1, 0.03, 4.)),
        ("S 12/2", jit(0.3, 0.1, 0.01, 6.)),
        ("lat 2ms", Profile { latency_s: 10e-3, jitter: 0.1, ..CALM }),
    ];
    for (name, p) in cases {
        let rates: Vec<f64> = [1, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 16, 20, 24, 32, 48, 64].iter().map(|&w| {
            let r: f64 = (0..3).map(|s| Tier::fixed(p, s, w).run(100.0)).sum::<f64>() / 3.0; r }).collect();
        let best = rates.iter().copied().fold(0.0, f64::max);
        println!("{name}: {:?}", rates.iter().map(|r| (100.0 * r / best).round()).collect::<Vec<_>>());
        for start in [8, 1, 64] {
            let mut line = format!("   start {start}: ");
            let (mut short, mut long, mut moves, mut late) = (0.0, 0.0, 0, 0.0);
            let mut bases = vec![];
            let mut lates = vec![];
            for seed in 0..12 {
                let mut t = Tier::learning(p, 100 + seed, start);
                short += t.run(20.0) / 12.0;
                long += t.run(40.0) / 12.0;
                bases.push(t.knee().base());
                let before = t.moves;
                late += t.run(120.0) / 12.0;
                moves += t.moves - before;
                lates.push(t.knee().base());
            }
            line += &format!("0-20 s {:.3} 20-60 s {:.3} 60-180 s {:.3} moves/120s {:.1} bases {bases:?} late {lates:?}", short / best, long / best, late / best, f64::from(moves) / 12.0);
            println!("{line}");
        }
        for steps in [64, 24] {
            let mut l = vec![];
            for seed in 0..6 { let mut t = Tier::learning(p, 200 + seed, 8).in_steps_of(steps); t.run(60.0); l.push(t.knee().base()); }
            println!("   steps of {steps}: {l:?}");
        }
        let probes: Vec<_> = (0..6).map(|s| probe(p, s, 1000)).collect();
        println!("   probe {probes:?}");
    }
}
