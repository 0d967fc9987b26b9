//! One attempt at an output, on one decode group and, where that group wants it, one prefill worker.
//!
//! ```text
//! open ── Reserved ──┬─ prefilled_here ─────────────────────────────────────▶ Done
//!                    └─▶ Computing ── FirstToken ──▶ HandingOff ── HandoffDone ──▶ Done
//! ```
//! The states are those of the prefill side; the decode stream lives through all of them, because it *is* the
//! reservation. Both streams are watched in every state, so that the death of either ends the leg, and with it the
//! other. Tokens must come with ascending index, without gap or repeat: anything else would reach the client as wrong
//! text.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use futures::{FutureExt, StreamExt, TryStreamExt};
use longreach_proto::worker::{
    ClientStream, DecodeEvent, GenerateRequest, GroupInfo, KvLayout, OutputToken, PrefillEvent, PrefillInfo,
    Reservation, RunRequest,
};
use longreach_types::{FinishReason, Prompt, SamplingParams, WorkerId};
use tonic::Status;

use super::{Dispatcher, Fault, fault::Cause};
use crate::{
    call::CallContext,
    health::Outcome,
    workers::{Decode, Demand, Fit, Lease, Prefill, Role},
};

/// What a leg is to do.
pub(crate) struct Work<'a> {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: &'a SamplingParams,
    pub(crate) priority: i32,
    pub(crate) session: Option<&'a str>,
    /// Workers that have failed this output before.
    pub(crate) failed: &'a [WorkerId],
    /// How the tokens that are out were computed; `None` as long as there are none. Another layout is another model or
    /// other roundings, and so other tokens.
    pub(crate) layout: Option<&'a KvLayout>,
}

/// What happens on a leg.
#[derive(Clone, Debug)]
pub(crate) enum LegEvent {
    /// A decode group has reserved blocks.
    Accepted { cached_len: usize },
    /// The next token.
    Token { token: OutputToken, cached_len: usize },
    /// The output is complete.
    Finish(FinishReason),
}

/// One attempt, accepted by a decode group. Dropping it cancels the work on both sides.
pub(crate) struct Leg {
    decode: Side<Decode, DecodeEvent>,
    /// What the decode group said before the first token was here. It is at most one event: the group's next one is
    /// not read until this one is consumed.
    early: Option<DecodeEvent>,
    prefill: PrefillSide,
    /// Index of the token that must come next.
    next_idx: usize,
    /// The group has sent a token.
    is_decoding: bool,
    /// Set when the first token ended the output.
    ending: Option<FinishReason>,
    /// How the group holds KV.
    layout: KvLayout,
}

/// A call to a worker, and the account of its work.
struct Side<R: Role, E> {
    lease: Lease<R>,
    events: ClientStream<E>,
    /// Set when the worker has taken the work.
    is_accepted: Arc<AtomicBool>,
}

enum PrefillSide {
    /// The first token is awaited.
    Computing(Side<Prefill, PrefillEvent>),
    /// The first token is here; KV may still be on its way.
    HandingOff(Side<Prefill, PrefillEvent>),
    /// Nothing more is expected, or nothing ever was.
    Done,
}

impl<R: Role, E> Side<R, E> {
    /// The next event; the end of the stream is `None`.
    async fn next(&mut self) -> Result<Option<E>, Fault> {
        match self.events.next().await {
            None => Ok(None),
            Some(Ok(event)) => Ok(Some(event)),
            Some(Err(status)) => Err(fault(&self.lease, &status)),
        }
    }
}

impl Leg {
    /// Finds a decode group, waits until it has reserved blocks, and starts the prefill if it is not done there.
    /// Gives the leg and the number of prompt tokens the group had in its cache.
    pub(crate) async fn open(
        dispatcher: &Dispatcher,
        call: &CallContext,
        work: Work<'_>,
    ) -> Result<(Self, usize), Fault> {
        let seq_len = work.prompt.prompt_len() + work.sampling.max_tokens;
        let demand = Demand { tokens: seq_len as u64, seq_len, session: work.session, failed: work.failed };
        let partners = dispatcher.prefills.infos();
        let lease = dispatcher
            .decodes
            .pick(&demand, |info| fit(&work, &partners, info))
            .map_err(|error| Fault::from_pick(Decode::NAME, error))?;
        let next_idx = work.prompt.n_resumed;
        let request = GenerateRequest {
            request_id: call.request_id.clone(),
            prompt: work.prompt.clone(),
            sampling: work.sampling.clone(),
            priority: work.priority,
        };
        let events = lease.client.generate(call.worker_request(request)).await;
        let events = events.map_err(|status| fault(&lease, &status))?;
        let mut decode = Side { lease, events, is_accepted: Arc::new(AtomicBool::new(true)) };
        let reservation = match decode.next().await? {
            Some(DecodeEvent::Reserved(reservation)) => reservation,
            Some(_) => return Err(broken(&decode.lease, "the first event was not Reserved")),
            None => return Err(cut_short(&decode.lease)),
        };
        let (cached_len, layout) = (reservation.cached_len, reservation.layout.clone());
        if work.layout.is_some_and(|wanted| *wanted != layout) {
            // The description that it was chosen by is of an earlier life.
            let cause = Cause::Mismatch(format!("group {} holds KV in another form now", decode.lease.name));
            return Err(Fault { worker: Some(decode.lease.name.clone()), cause });
        }
        let prefill = if reservation.prefilled_here {
            PrefillSide::Done
        } else {
            PrefillSide::Computing(start_prefill(dispatcher, call, work, reservation)?)
        };
        let leg = Self { decode, early: None, prefill, next_idx, is_decoding: false, ending: None, layout };
        Ok((leg, cached_len))
    }

    /// How its group holds KV.
    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Whether all its workers had taken the work. One that was not reached cannot have been harmed by it.
    pub(crate) fn was_at_work(&self) -> bool {
        match &self.prefill {
            PrefillSide::Computing(prefill) => prefill.is_accepted.load(Ordering::Relaxed),
            PrefillSide::HandingOff(_) | PrefillSide::Done => true,
        }
    }

    /// Who may be to blame when it fails now. While KV passes between two workers it may be the way between them, so
    /// that another attempt is best made without both.
    pub(crate) fn suspects(&self) -> Vec<WorkerId> {
        match &self.prefill {
            PrefillSide::Computing(prefill) | PrefillSide::HandingOff(prefill) => {
                vec![self.decode.lease.name.clone(), prefill.lease.name.clone()]
            }
            PrefillSide::Done => vec![self.decode.lease.name.clone()],
        }
    }

    /// The next event. After `Finish`, or an error, the leg is to be dropped.
    pub(crate) async fn next(&mut self) -> Result<LegEvent, Fault> {
        if let Some(reason) = self.ending {
            return Ok(LegEvent::Finish(reason));
        }
        loop {
            let event = match &mut self.prefill {
                PrefillSide::Computing(_) => self.await_first_token().await?,
                PrefillSide::HandingOff(_) => self.await_handoff().await?,
                PrefillSide::Done => Some(self.await_decode().await?),
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    async fn await_first_token(&mut self) -> Result<Option<LegEvent>, Fault> {
        let PrefillSide::Computing(prefill) = &mut self.prefill else { return Ok(None) };
        // Both arms only take an event out of a stream. Biased, because what the prefill worker says comes first in
        // the output too.
        let first = tokio::select! {
            biased;
            event = prefill.next() => match event? {
                Some(PrefillEvent::FirstToken(first)) => first,
                Some(PrefillEvent::HandoffDone { .. }) => {
                    return Err(broken(&prefill.lease, "HandoffDone came before FirstToken"));
                }
                None => return Err(cut_short(&prefill.lease)),
            },
            event = self.decode.next(), if self.early.is_none() => {
                self.early = Some(event?.ok_or_else(|| cut_short(&self.decode.lease))?);
                return Ok(None);
            }
        };
        check_index(&prefill.lease, first.token.output_idx, self.next_idx)?;
        self.next_idx += 1;
        self.ending = first.finish;
        let PrefillSide::Computing(prefill) = std::mem::replace(&mut self.prefill, PrefillSide::Done) else {
            return Ok(None);
        };
        prefill.lease.report(Outcome::Success);
        if self.ending.is_none() {
            self.prefill = PrefillSide::HandingOff(prefill);
        }
        Ok(Some(LegEvent::Token { token: first.token, cached_len: first.cached_len }))
    }

    async fn await_handoff(&mut self) -> Result<Option<LegEvent>, Fault> {
        let PrefillSide::HandingOff(prefill) = &mut self.prefill else { return Ok(None) };
        if let Some(event) = self.early.take() {
            return self.take_decode(Some(event)).map(Some);
        }
        // Both arms only take an event out of a stream. Biased, because a token is worth more than news of KV.
        tokio::select! {
            biased;
            event = self.decode.next() => {
                let event = event?;
                self.take_decode(event).map(Some)
            }
            event = prefill.next() => {
                // A group that decodes has all KV: how the prefill stream ends no longer matters then.
                if !self.is_decoding {
                    match event? {
                        Some(PrefillEvent::HandoffDone { .. }) => {}
                        Some(PrefillEvent::FirstToken(_)) => {
                            return Err(broken(&prefill.lease, "FirstToken came twice"));
                        }
                        None => return Err(cut_short(&prefill.lease)),
                    }
                }
                self.prefill = PrefillSide::Done;
                Ok(None)
            }
        }
    }

    async fn await_decode(&mut self) -> Result<LegEvent, Fault> {
        let event = match self.early.take() {
            Some(event) => Some(event),
            None => self.decode.next().await?,
        };
        self.take_decode(event)
    }

    fn take_decode(&mut self, event: Option<DecodeEvent>) -> Result<LegEvent, Fault> {
        match event {
            Some(DecodeEvent::Token(token)) => {
                check_index(&self.decode.lease, token.output_idx, self.next_idx)?;
                self.next_idx += 1;
                // Now, not at the end: many outputs are ended here, by a stop string or a client.
                if !std::mem::replace(&mut self.is_decoding, true) {
                    self.decode.lease.report(Outcome::Success);
                }
                Ok(LegEvent::Token { token, cached_len: 0 })
            }
            Some(DecodeEvent::Finish(reason)) => {
                self.decode.lease.report(Outcome::Success);
                Ok(LegEvent::Finish(reason))
            }
            Some(DecodeEvent::Reserved(_)) => Err(broken(&self.decode.lease, "Reserved came twice")),
            None => Err(cut_short(&self.decode.lease)),
        }
    }
}

/// Starts the prefill of `work` into `reservation`. The call itself is made when the stream is first read.
fn start_prefill(
    dispatcher: &Dispatcher,
    call: &CallContext,
    work: Work<'_>,
    reservation: Reservation,
) -> Result<Side<Prefill, PrefillEvent>, Fault> {
    let n_tokens = work.prompt.tokens.len();
    let demand = Demand {
        tokens: n_tokens.saturating_sub(reservation.cached_len).max(1) as u64,
        seq_len: n_tokens,
        session: work.session,
        failed: work.failed,
    };
    let lease = dispatcher
        .prefills
        .pick(&demand, |info| if info.layout == reservation.layout { Fit::Good } else { Fit::No })
        .map_err(|error| Fault::from_pick(Prefill::NAME, error))?;
    let request = RunRequest {
        request_id: call.request_id.clone(),
        prompt: work.prompt,
        sampling: work.sampling.clone(),
        reservation,
        priority: work.priority,
    };
    let (client, request) = (lease.client.clone(), call.worker_request(request));
    let is_accepted = Arc::new(AtomicBool::new(false));
    let accepted = Arc::clone(&is_accepted);
    let opening = async move {
        let events = client.run(request).await?;
        accepted.store(true, Ordering::Relaxed);
        Ok::<_, Status>(events)
    };
    Ok(Side { lease, events: opening.into_stream().try_flatten().boxed(), is_accepted })
}

/// How well a decode group fits: one that no prefill worker can feed serves short prompts only.
fn fit(work: &Work<'_>, prefills: &[Arc<PrefillInfo>], group: &GroupInfo) -> Fit {
    if work.layout.is_some_and(|layout| *layout != group.layout) {
        return Fit::No;
    }
    let is_fed = prefills.is_empty() || prefills.iter().any(|prefill| prefill.layout == group.layout);
    if is_fed { Fit::Good } else { Fit::Poor }
}

fn check_index<R: Role>(lease: &Lease<R>, got: usize, wanted: usize) -> Result<(), Fault> {
    if got == wanted {
        return Ok(());
    }
    Err(broken(lease, &format!("output token {got} came where {wanted} was due")))
}

fn fault<R: Role>(lease: &Lease<R>, status: &Status) -> Fault {
    reported(lease, Fault::from_status(&lease.name, status))
}

fn broken<R: Role>(lease: &Lease<R>, problem: &str) -> Fault {
    reported(lease, Fault::broken(&lease.name, format!("{} worker {}: {problem}", R::NAME, lease.name)))
}

fn cut_short<R: Role>(lease: &Lease<R>) -> Fault {
    reported(lease, Fault::cut_short(&lease.name))
}

fn reported<R: Role>(lease: &Lease<R>, fault: Fault) -> Fault {
    lease.report(fault.outcome());
    fault
}
