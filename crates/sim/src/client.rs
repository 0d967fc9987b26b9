//! Clients: each asks for one output, reads it fast or slowly, perhaps goes away, and holds what it gets against what an
//! undisturbed cluster would have said.

use std::{sync::Arc, time::Duration};

use longreach_router::simulation::{Output, OutputError, OutputEvent, OutputSpec};
use longreach_types::{FinishReason, RequestId, SamplingParams, TokenId};
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;

use crate::{
    model::{self, EOS, VOCAB_SIZE},
    rng::Rng,
    world::World,
};

/// Longer than any way in which a request may end.
const MAX_LIFE: Duration = Duration::from_secs(100);

/// Longer than any fault lasts.
const MAX_FAULT: Duration = Duration::from_secs(20);

/// A request may be lost if so many faults hit the cluster in its life; after fewer, if there is a way around them, not.
const MANY_FAULTS: usize = 2;

/// What goes wrong between processes that live.
const IN_BETWEEN: &[&str] = &["link cut", "connections reset", "chunk spoilt"];

/// Harm that is done to a cluster explains failures for this long: longer than the longest lease and recovery.
const AFTERMATH: Duration = Duration::from_secs(60);

/// What one client asks for, and what is right.
pub(crate) struct Request {
    pub(crate) idx: usize,
    pub(crate) spec: OutputSpec,
    expected: Vec<TokenId>,
    finish: FinishReason,
    /// After how many events it goes away.
    leaves_after: Option<usize>,
    /// The longest it waits before it reads on.
    max_pause: Option<Duration>,
    rng: Rng,
}

/// How a request ended on one router.
#[derive(Debug)]
enum Ending {
    Complete,
    Left,
    RouterLost,
    Failed { error: OutputError, accepted: bool, n_tokens: usize },
}

impl Request {
    pub(crate) fn new(world: &World, idx: usize) -> Self {
        let scenario = &world.scenario;
        let mut rng = Rng::new(scenario.seed, 1_000 + idx as u64);
        let prompt: Arc<[TokenId]> = prompt(scenario.seed, &mut rng, scenario.shape.max_prompt_len).into();
        let stop_token_ids =
            if rng.chance(200) { vec![TokenId(rng.below(VOCAB_SIZE) as u32)] } else { Vec::new() };
        let sampling = SamplingParams {
            max_tokens: rng.range(1, scenario.shape.max_tokens),
            stop_token_ids,
            ignore_eos: rng.chance(500),
            ..SamplingParams::default()
        };
        let (expected, finish) = undisturbed(&prompt, &sampling);
        let leaves = rng.chance(scenario.cancel_permille);
        let slow = rng.chance(scenario.slow_permille);
        let spec = OutputSpec {
            request_id: RequestId(format!("r{idx}")),
            prompt,
            sampling,
            priority: rng.pick(&[0, 0, 0, 1]),
            session: rng.chance(300).then(|| format!("s{}", rng.below(3))),
            eos: [EOS].into(),
        };
        Self {
            idx,
            spec,
            finish,
            leaves_after: leaves.then(|| rng.below(expected.len() + 2)),
            max_pause: slow.then(|| Duration::from_millis(rng.range(10, 400) as u64)),
            expected,
            rng,
        }
    }

    /// A request that reads to the end, and for whose failure there is no excuse.
    pub(crate) fn probe(world: &World, idx: usize) -> Self {
        Self { leaves_after: None, max_pause: None, ..Self::new(world, idx) }
    }

    /// Asks router after router until one answers.
    pub(crate) async fn run(mut self, world: Arc<World>) {
        let started = Instant::now();
        let name = self.spec.request_id.clone();
        if self.max_pause.is_some() {
            world.journal.count("slow client");
        }
        if timeout(MAX_LIFE, self.ask(&world)).await.is_err() {
            world.journal.violation(format!("{name} did not end within {:?}", started.elapsed()));
        }
    }

    async fn ask(&mut self, world: &Arc<World>) {
        let started = Instant::now();
        loop {
            let router = self.rng.below(world.routers.len());
            match self.ask_router(world, router).await {
                Ending::Complete => world.journal.count("request complete"),
                Ending::Left => world.journal.count("client left"),
                Ending::RouterLost => {
                    world.journal.count("request repeated after its router was lost");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
                failed @ Ending::Failed { .. } => self.judge(world, router, &failed, started),
            }
            return;
        }
    }

    /// The answer of one router, checked token by token.
    async fn ask_router(&mut self, world: &Arc<World>, router: usize) -> Ending {
        let Some((router, alive)) = world.router(router) else { return Ending::RouterLost };
        let mut output = router.output(self.spec.clone());
        let (mut n_tokens, mut n_events, mut accepted) = (0, 0, false);
        loop {
            if self.leaves_after == Some(n_events) {
                world.journal.note(format_args!("r{} leaves after {n_events} events", self.idx));
                return Ending::Left;
            }
            let Some(event) = alive.run_until_cancelled(output.next()).await else {
                return Ending::RouterLost;
            };
            n_events += 1;
            match event {
                Ok(Some(OutputEvent::Accepted)) => {
                    if accepted {
                        world.journal.count("output resumed");
                    }
                    accepted = true;
                }
                Ok(Some(OutputEvent::Token(token))) => {
                    let wanted = self.expected.get(n_tokens);
                    if token.output_idx != n_tokens || wanted != Some(&token.token) {
                        world.journal.violation(format!(
                            "r{}: got token {} = {}, wanted {n_tokens} = {wanted:?}",
                            self.idx, token.output_idx, token.token
                        ));
                    }
                    n_tokens += 1;
                }
                Ok(Some(OutputEvent::Finish(reason))) => {
                    return self.check_end(world, n_tokens, reason, output).await;
                }
                Ok(None) => {
                    world.journal.violation(format!("r{}: ended without an end", self.idx));
                    return Ending::Complete;
                }
                Err(error) => {
                    world.journal.note(format_args!("r{} fails after {n_tokens} tokens: {error}", self.idx));
                    return Ending::Failed { error, accepted, n_tokens };
                }
            }
            if let Some(max_pause) = self.max_pause {
                sleep(max_pause.mul_f64(self.rng.below(1000) as f64 / 1000.0)).await;
            }
        }
    }

    async fn check_end(
        &self,
        world: &World,
        n_tokens: usize,
        reason: FinishReason,
        mut output: Output,
    ) -> Ending {
        world.journal.note(format_args!("r{} complete: {n_tokens} tokens, {reason:?}", self.idx));
        if n_tokens != self.expected.len() || reason != self.finish {
            world.journal.violation(format!(
                "r{}: ended with {n_tokens} tokens and {reason:?}, wanted {} and {:?}",
                self.idx,
                self.expected.len(),
                self.finish
            ));
        }
        if !matches!(output.next().await, Ok(None)) {
            world.journal.violation(format!("r{}: something came after the end", self.idx));
        }
        Ending::Complete
    }

    /// Whether a failure is one that a client may see.
    fn judge(&self, world: &World, router: usize, ending: &Ending, started: Instant) {
        let Ending::Failed { error, accepted, n_tokens } = ending else { return };
        let now = Instant::now();
        let recovery_window = world.scenario.recovery.recovery_window;
        // A fault that began before the request may be there still.
        let begun = started.checked_sub(MAX_FAULT).unwrap_or(started);
        let n_harms = world.services.n_harms_since(begun, |_| true);
        // Where nobody died, attempts are made and fail, one after the other. The dead are waited for.
        let n_in_between = world.services.n_harms_since(begun, |kind| IN_BETWEEN.contains(&kind));
        let troubled = world.services.last_trouble().is_some_and(|last| now - last < AFTERMATH);
        let excused = match error.code {
            Code::ResourceExhausted => *n_tokens == 0,
            Code::Unavailable | Code::Aborted if !accepted => troubled,
            Code::Unavailable | Code::Aborted => {
                // No way around a fault, or one that lasted too long. Where all are under suspicion a router can only
                // guess, so two faults may cost all attempts.
                n_harms >= MANY_FAULTS
                    || n_in_between > 0 && !world.had_calm_pair(router, started)
                    || n_harms > 0 && started.elapsed() >= recovery_window
            }
            _ => false,
        };
        if excused {
            world.journal.count(match (error.code, accepted) {
                (Code::ResourceExhausted, _) => "request refused: overloaded",
                (_, false) => "request refused: nobody ready",
                (_, true) => "request given up after it was accepted",
            });
        } else {
            world.journal.violation(format!(
                "r{} failed without excuse after {n_tokens} tokens, {n_harms} faults, {:?}: {error}",
                self.idx,
                started.elapsed()
            ));
        }
    }
}

/// What a cluster without faults, caches and workers says.
fn undisturbed(prompt: &[TokenId], sampling: &SamplingParams) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = prompt.to_vec();
    loop {
        let token = model::next_token(&tokens);
        tokens.push(token);
        let output = &tokens[prompt.len()..];
        let finish = if !sampling.ignore_eos && token == EOS {
            FinishReason::Eos(token)
        } else if sampling.stop_token_ids.contains(&token) {
            FinishReason::StopToken(token)
        } else if output.len() >= sampling.max_tokens {
            FinishReason::Length
        } else {
            continue;
        };
        return (output.to_vec(), finish);
    }
}

/// A prompt that often shares its beginning with others.
fn prompt(seed: u64, rng: &mut Rng, max_len: usize) -> Vec<TokenId> {
    let len = rng.range(1, max_len);
    let mut common = Rng::new(seed, 2_000 + rng.below(3) as u64);
    let shared_len = if rng.chance(600) { rng.below(len) } else { 0 };
    let mut token = |i: usize| {
        let source = if i < shared_len { &mut common } else { &mut *rng };
        TokenId(source.below(VOCAB_SIZE) as u32)
    };
    (0..len).map(&mut token).collect()
}
