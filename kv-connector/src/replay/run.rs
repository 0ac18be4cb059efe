//! One trace served by one engine and one policy.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{
    Config, Engine, Stored, TierId,
    replay::{
        Forward, Policy, ReplayError, RunReport, Scratch, Watch, Workload, content,
        step::{Plan, Reader},
    },
};

const CLOSE_DEADLINE: Duration = Duration::from_secs(30);

/// How a trace is served.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunOptions {
    /// How the chunks of a step are read.
    pub policy: Policy,
    /// The tier that policies with one tier read from.
    pub fastest: TierId,
    /// The modelled forward pass.
    pub forward: Forward,
    /// When the engine is closed and opened again.
    pub restart: Restart,
    /// Steps begin no earlier than their arrivals, this many times faster than recorded; `None` runs them back to back.
    pub speed: Option<f64>,
}

/// When the engine is closed and opened again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Restart {
    /// Not at all.
    #[default]
    Never,
    /// After half of the steps.
    HalfWay,
}

impl RunOptions {
    /// KVBraid's policy without a restart, or another policy from the first tier.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            fastest: TierId(0),
            forward: Forward::default(),
            restart: Restart::Never,
            speed: None,
        }
    }
}

/// Serves `workload` with an engine of `config`, in fresh directories that are removed afterwards.
pub fn run(
    config: &Config,
    workload: &Workload,
    options: &RunOptions,
    watch: &dyn Watch,
) -> Result<RunReport, ReplayError> {
    let scratch = Scratch::new(config)?;
    let config = scratch.config();
    let mut runner = Runner {
        engine: Engine::open(config.clone())?,
        workload,
        options,
        report: RunReport::new(options.policy.clone(), config.tiers.len()),
        buffer: workload.buffer(),
        payload: vec![0; workload.chunk_bytes()],
    };
    let began = Instant::now();
    for step in 0..workload.steps() {
        if options.restart == Restart::HalfWay && step == workload.steps() / 2 {
            runner.close();
            runner.engine = Engine::open(config.clone())?;
            runner.report.restarted = true;
        }
        if let Some(speed) = options.speed {
            let due = Duration::from_millis(workload.start_ms(step)).div_f64(speed.max(1e-6));
            thread::sleep(due.saturating_sub(began.elapsed()));
        }
        runner.step(&workload.plan(step));
        if !watch.step() {
            return Err(ReplayError::Stopped);
        }
    }
    runner.report.wall_s = began.elapsed().as_secs_f64();
    runner.close();
    Ok(runner.report)
}

struct Runner<'a> {
    engine: Engine,
    workload: &'a Workload,
    options: &'a RunOptions,
    report: RunReport,
    /// Where a step's chunks are loaded to.
    buffer: Vec<u8>,
    /// Where a chunk's content is made before it is stored.
    payload: Vec<u8>,
}

impl Runner<'_> {
    fn step(&mut self, plan: &Plan) {
        let lease = self.engine.lookup(&plan.keys);
        let wanted = plan.wanted(lease.hits());
        self.report.lookups += plan.keys.len() as u64;
        let reader = Reader {
            engine: &self.engine,
            policy: &self.options.policy,
            fastest: self.options.fastest,
            chunk_bytes: self.workload.chunk_bytes(),
        };
        let missed = reader.load(&lease, plan, &wanted, &mut self.buffer, &mut self.report);
        let lost_tokens = missed.len() as u64 * plan.chunk_tokens;
        let looked_up = lease.hits().iter().enumerate();
        let mut computed: Vec<usize> =
            looked_up.filter(|(_, hit)| !**hit).map(|(place, _)| place).collect();
        computed.extend(missed);
        drop(lease);
        let (engine, payload, report) = (&self.engine, &mut self.payload, &mut self.report);
        let late = self.options.forward.pass(engine, wanted.tokens + lost_tokens, || {
            for place in computed {
                let key = &plan.keys[place];
                content::fill(key.digest(), payload);
                if let Stored::Refused(_) = engine.store(key, payload) {
                    report.refused += 1;
                }
            }
        });
        self.report.drain_s += late.as_secs_f64();
    }

    fn close(&mut self) {
        let closed = self.engine.close(CLOSE_DEADLINE);
        self.report.add_failures(&self.engine.stats());
        self.report.problem("chunks given up at close".to_owned(), closed.abandoned_chunks);
        self.report.problem("threads left behind at close".to_owned(), closed.leaked_threads);
    }
}
