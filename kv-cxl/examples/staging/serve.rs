//! Serves a workload: queue, accelerator, device, and `kv-staging`'s controller between them.

use std::collections::VecDeque;

use kv_staging::{
    ClaimId, Controller, ControllerOptions, DecodeOptions, DecodeProjection, Effect, Object,
    ObjectId, RateModel, RateOptions, Report, Reservation, Retrieval, StagingNeed, TimeToReady,
    TimeToUse, Work,
};

use crate::{
    device::{Device, Event},
    gpu::{Gpu, Turn},
    policies::Kind,
    workload::{Setting, Workload, bytes, ns},
};

/// How often policies that look at time are asked, besides at every event.
const TICK_NS: u64 = 50_000_000;

/// Virtual or real time.
pub(crate) trait Clock {
    /// Waits until `at_ns` or, in real time, somewhat less; returns what it is then.
    fn wait_until(&mut self, at_ns: u64) -> u64;
}

/// Jumps.
pub(crate) struct Virtual;

impl Clock for Virtual {
    fn wait_until(&mut self, at_ns: u64) -> u64 {
        at_ns
    }
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// By request, from arrival to first token.
    pub(crate) ttft_ns: Vec<u64>,
    /// By request, from its start to its data.
    pub(crate) wait_ns: Vec<u64>,
    pub(crate) report: Report,
    pub(crate) end_ns: u64,
    /// Requests in the queue, over time.
    pub(crate) queue_mean: f64,
    /// For each that came to the head of a queue: time until use less time until ready, then.
    pub(crate) margins_s: Vec<f64>,
}

pub(crate) struct Server<'a, D> {
    setting: &'a Setting,
    workload: &'a Workload,
    device: D,
    controller: Controller,
    uses: Option<DecodeProjection>,
    rate: RateModel,
    gpu: Gpu,
    queue: VecDeque<(ClaimId, usize)>,
    /// Started, and waiting to become ready.
    pending: Vec<ClaimId>,
    effects: Vec<Effect>,
    now_ns: u64,
    started_ns: Vec<u64>,
    head: Option<(ClaimId, u64, u64)>,
    outcome: Outcome,
    queue_ns: u128,
}

/// Time until ready by the rate of the device, which is asked what it has.
struct Ready<'a, D> {
    rate: &'a RateModel,
    device: &'a D,
}

impl<D: Device> TimeToReady for Ready<'_, D> {
    fn time_to_ready_ns(&self, need: &StagingNeed<'_>, now_ns: u64) -> u64 {
        let is_cold = |object: &&Object| !self.device.is_resident(index(object.id));
        let cold: Vec<Object> = need.cold.iter().filter(is_cold).copied().collect();
        self.rate.time_to_ready_ns(&StagingNeed { cold: &cold, ..*need }, now_ns)
    }
}

/// Knows nothing: claims are then taken in their order.
struct Unknown;

impl TimeToUse for Unknown {
    fn time_to_use_ns(&self, _claim: ClaimId, _now_ns: u64) -> Option<u64> {
        None
    }
}

fn index(id: ObjectId) -> usize {
    usize::try_from(id.0).expect("ids are indices")
}

impl<'a, D: Device> Server<'a, D> {
    pub(crate) fn new(
        setting: &'a Setting,
        workload: &'a Workload,
        kind: &Kind,
        reservation: Reservation,
        device: D,
    ) -> Self {
        let mut options = ControllerOptions::new(bytes(setting.budget_gib));
        options.reservation = reservation;
        // The device works on one object at a time, and who is next is decided when it is free.
        options.in_flight_bytes_max = 1;
        let uses = kind.estimate().map(|(outputs, quantile_percent)| {
            let mut decode = DecodeOptions::new(
                setting.slots,
                ns(setting.iteration_s),
                ns(setting.iteration_s_per_request),
            );
            decode.horizon_ns = 4_000_000_000;
            (decode.outputs, decode.quantile_percent) = (outputs, quantile_percent);
            let mut uses = DecodeProjection::new(decode);
            workload.history.iter().for_each(|tokens| uses.learn(*tokens));
            uses
        });
        Self {
            setting,
            workload,
            device,
            controller: kind.controller(options, setting),
            uses,
            rate: RateModel::new(RateOptions::new(bytes(setting.staging_gib_s))),
            gpu: Gpu::new(setting),
            queue: VecDeque::new(),
            pending: Vec::new(),
            effects: Vec::new(),
            now_ns: 0,
            started_ns: vec![0; workload.requests.len()],
            head: None,
            outcome: Outcome {
                ttft_ns: vec![0; workload.requests.len()],
                wait_ns: vec![0; workload.requests.len()],
                ..Outcome::default()
            },
            queue_ns: 0,
        }
    }

    /// Until every request is done.
    pub(crate) fn run(mut self, clock: &mut impl Clock) -> (Outcome, D) {
        let (mut arrived, mut done) = (0, 0);
        let (mut turns, mut events) = (Vec::new(), Vec::new());
        let mut look_ns = None;
        while done < self.workload.requests.len() {
            let arrival_ns = self.workload.requests.get(arrived).map(|it| it.arrival_ns);
            let waits = self.uses.is_some() && !self.queue.is_empty();
            let tick_ns = waits.then(|| self.now_ns + TICK_NS);
            let next =
                [arrival_ns, look_ns, self.gpu.next_ns(), tick_ns].into_iter().flatten().min();
            let next_ns = next.expect("requests are left, so something is to come");
            let now_ns = clock.wait_until(next_ns).max(self.now_ns);
            self.queue_ns += self.queue.len() as u128 * u128::from(now_ns - self.now_ns);
            self.now_ns = now_ns;
            self.gpu.advance(now_ns, &mut turns);
            for (claim, turn) in turns.drain(..) {
                done += usize::from(self.turn(claim, &turn));
            }
            while let Some(request) = self.workload.requests.get(arrived)
                && request.arrival_ns <= now_ns
            {
                self.arrive(arrived);
                arrived += 1;
            }
            self.device.poll(now_ns, &mut events);
            events.drain(..).for_each(|event| self.event(event));
            self.progress();
            self.tick();
            self.admit();
            self.tick();
            look_ns = self.device.poll(now_ns, &mut events);
            if !events.is_empty() {
                look_ns = Some(now_ns);
                events.drain(..).for_each(|event| self.event(event));
            }
        }
        self.outcome.report = self.controller.report(self.now_ns);
        self.outcome.end_ns = self.now_ns;
        self.outcome.queue_mean = self.queue_ns as f64 / self.now_ns.max(1) as f64;
        (self.outcome, self.device)
    }

    /// Whether a request is done.
    fn turn(&mut self, claim: ClaimId, turn: &Turn) -> bool {
        match *turn {
            Turn::First(request) => {
                self.outcome.ttft_ns[request] =
                    self.now_ns - self.workload.requests[request].arrival_ns;
                false
            }
            Turn::Done(request) => {
                if let Some(uses) = &mut self.uses {
                    uses.finish(claim, self.workload.requests[request].tokens, self.now_ns);
                }
                true
            }
        }
    }

    fn arrive(&mut self, request: usize) {
        let object = self.workload.requests[request].object;
        let bytes = self.workload.object_bytes[object];
        let named = Object { id: ObjectId(object as u128), bytes };
        let claim = self.controller.record(&[named]).expect("few claims of equal sizes");
        let retrieval_gib_s = crate::workload::bytes(self.setting.retrieval_gib_s);
        if let Some(uses) = &mut self.uses {
            let retrieval_ns = u128::from(bytes) * 1_000_000_000 / u128::from(retrieval_gib_s);
            let retrieval_ns = u64::try_from(retrieval_ns).unwrap_or(u64::MAX);
            let prefill_ns = ns(self.setting.prefill_s);
            uses.enqueue(claim, Work { retrieval_ns, prefill_ns, tokens_max: None });
        }
        self.queue.push_back((claim, request));
    }

    fn event(&mut self, event: Event) {
        let now_ns = self.now_ns;
        const KNOWN: &str = "the device tells what it was asked for";
        match event {
            Event::Moved(bytes) => self.rate.completed(bytes, now_ns),
            Event::Staged(object) => {
                let id = ObjectId(object as u128);
                self.controller.object_staged(id, now_ns, &mut self.effects).expect(KNOWN);
            }
            Event::Failed(object) => {
                let id = ObjectId(object as u128);
                self.controller.object_failed(id, now_ns, &mut self.effects).expect(KNOWN);
            }
            Event::Retrieved(claim) => {
                self.controller.finish_retrieval(claim, now_ns, &mut self.effects).expect(KNOWN);
                self.gpu.loaded(claim);
                let running = self.gpu.running.iter().find(|it| it.claim == claim);
                let request = running.expect(KNOWN).request;
                self.outcome.wait_ns[request] = now_ns - self.started_ns[request];
            }
        }
        self.perform();
    }

    fn perform(&mut self) {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                Effect::Stage(object) => {
                    let bytes = self.device.stage(index(object.id), self.now_ns);
                    self.submitted(bytes);
                }
                Effect::Unprotect(object) => self.device.unprotect(index(object.id), self.now_ns),
                Effect::Ready(claim) | Effect::Failed(claim) => {
                    if let Some(at) = self.pending.iter().position(|pending| *pending == claim) {
                        self.pending.swap_remove(at);
                        self.retrieve(claim);
                    }
                }
                Effect::Released(_) => {}
            }
        }
    }

    fn submitted(&mut self, bytes: u64) {
        if bytes > 0 {
            self.rate.submitted(bytes, self.now_ns);
        }
    }

    fn progress(&mut self) {
        if let Some(uses) = &mut self.uses {
            for (claim, tokens) in self.gpu.progress() {
                uses.progress(claim, tokens, self.now_ns);
            }
        }
    }

    fn tick(&mut self) {
        let ready = Ready { rate: &self.rate, device: &self.device };
        let uses = self.uses.as_ref().map_or(&Unknown as &dyn TimeToUse, |uses| uses);
        self.controller.tick(self.now_ns, uses, &ready, &mut self.effects);
        self.perform();
    }

    /// Fills the slots, first come first served.
    fn admit(&mut self) {
        while self.gpu.has_room()
            && let Some((claim, request)) = self.queue.pop_front()
        {
            if let Some((_, since_ns, ready_ns)) = self.head.take_if(|(head, ..)| *head == claim) {
                let ahead = (self.now_ns - since_ns) as f64 - ready_ns as f64;
                self.outcome.margins_s.push(ahead / 1e9);
            }
            self.gpu.start(claim, request, self.workload.requests[request].tokens);
            self.started_ns[request] = self.now_ns;
            if let Some(uses) = &mut self.uses {
                uses.start(claim, self.now_ns);
            }
            self.retrieve(claim);
        }
        if let Some((claim, request)) = self.queue.front()
            && self.head.is_none_or(|(head, ..)| head != *claim)
        {
            let bytes = self.workload.object_bytes[self.workload.requests[*request].object];
            let cold = [Object { id: ObjectId(u128::MAX), bytes }];
            let need = StagingNeed { cold: &cold, in_flight_bytes: 0 };
            self.head = Some((*claim, self.now_ns, self.rate.time_to_ready_ns(&need, self.now_ns)));
        }
    }

    fn retrieve(&mut self, claim: ClaimId) {
        let objects = self.controller.claim(claim).expect("it is not released").objects();
        let object = index(objects[0].id);
        match self.controller.begin_retrieval(claim, self.now_ns) {
            Ok(Retrieval::Wait) => self.pending.push(claim),
            Ok(_) => {
                let bytes = self.device.retrieve(claim, object, self.now_ns);
                self.submitted(bytes);
            }
            Err(error) => unreachable!("{error}"),
        }
    }
}
