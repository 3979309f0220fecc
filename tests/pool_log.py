"""Event logs of several processes, written by hand."""

from __future__ import annotations

import itertools
from collections import Counter

from factories import make_layout
from twostroke.batch import AdmittedRequest, CacheEnd, Commit, Limit, ScheduledBatch, ScheduledRequest, Stroke
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.event_codec import plain
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    KVImportBegan,
    KVImportEnded,
    RequestArrived,
    RequestFinishedByCaller,
    RequestRouted,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.names import GATEWAY
from twostroke.request import Arrival, FinishReason

P, D = "prefill-0.1", "decode-0.1"
NUMBERS = itertools.count(1)
PROMPT = 10
"""Tokens of every prompt."""


class PoolLog:
    """One prompt-computing process and one that decodes, and what is said of the sequence `name`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: Counter[str] = Counter()
        for process in (P, D):
            self.start(process, 0.0)

    def start(self, process: str, at_s: float) -> None:
        settings = plain(SchedulerConfig()), plain(CacheConfig()), plain(make_layout(block_size=4))
        self.events.append(EngineStarted(at_s, process, *settings, 64, 128, "m"))

    def lose(self, process: str, at_s: float) -> None:
        self.events.append(EngineLost(at_s, process, f"{process} was ended by signal 9."))

    def route(self, name: str, at_s: float, reason: str) -> None:
        """Add the gateway's choice of a route."""
        self.events.append(RequestRouted(at_s, GATEWAY, name, D, P, reason))

    def arrive(
        self,
        process: str,
        name: str,
        at_s: float,
        *,
        arrival_s: float,
        num_tokens: int = PROMPT,
        max_tokens: int = 1,
        lend_as: int | None = None,
        import_id: int | None = None,
    ) -> None:
        arrival = Arrival(name, arrival_s, num_tokens, max_tokens, lend_as=lend_as, import_id=import_id)
        self.events.append(RequestArrived(at_s, process, name, arrival))

    def prefill(
        self,
        process: str,
        name: str,
        begin_s: float,
        end_s: float,
        *,
        cached: int = 0,
        num_tokens: int = PROMPT,
        reason: FinishReason | None = None,
    ) -> None:
        """Add a step with the whole prompt, and a token."""
        share = ScheduledRequest(name, Stroke.PREFILL, cached, num_tokens - cached, 0, True, ())
        admitted = AdmittedRequest(name, num_tokens, cached, CacheEnd.COMPLETE)
        self._step(process, begin_s, end_s, share, (admitted,), reason)

    def decode(self, process: str, name: str, begin_s: float, end_s: float, reason: FinishReason | None = None) -> None:
        share = ScheduledRequest(name, Stroke.DECODE, PROMPT + 1, 1, 0, True, ())
        self._step(process, begin_s, end_s, share, (), reason)

    def fetch(
        self,
        name: str,
        import_id: int,
        begin_s: float,
        first_s: float,
        end_s: float,
        problem: str = "",
        *,
        last_s: float = 0.0,
    ) -> None:
        """Record a fetch of four million bytes; the last arrives at `last_s`, and the receiver notes it at `end_s`."""
        self.events.append(KVImportBegan(begin_s, D, import_id, name, (b"1", b"2"), 8, ((1, 2),)))
        traffic = 0 if problem else 4_000_000, begin_s, first_s
        self.events.append(KVImportEnded(end_s, D, import_id, name, problem, *traffic, last_byte_s=last_s))

    def end(self, process: str, name: str, at_s: float, reason: FinishReason, num_tokens: int | None = None) -> None:
        """Add an abort by the client."""
        self.events.append(RequestFinishedByCaller(at_s, process, name, reason, num_tokens))

    def end_everywhere(self, name: str, at_s: float, reason: FinishReason, num_tokens: int | None = None) -> None:
        self.end(GATEWAY, name, at_s, reason, num_tokens)

    def handed_over(self, name: str, at_s: float, *, problem: str = "") -> None:
        """A whole life: prefill until 1 s, taken in at 1.5 s, three tokens in all, the last at 3 s."""
        number = next(NUMBERS)
        self.arrive(P, name, at_s + 0.25, arrival_s=at_s, lend_as=number)
        self.prefill(P, name, at_s + 0.25, at_s + 1, cached=4, reason=FinishReason.LENGTH)
        self.fetch(name, number, at_s + 0.25, at_s + 0.75, at_s + 1.25, problem)
        self.arrive(D, name, at_s + 1.5, arrival_s=at_s, num_tokens=PROMPT + 1, max_tokens=2, import_id=number)
        cached = 0 if problem else 8
        self.prefill(D, name, at_s + 1.5, at_s + 2, cached=cached, num_tokens=PROMPT + 1)
        self.decode(D, name, at_s + 2, at_s + 3, FinishReason.LENGTH)

    def _step(
        self,
        process: str,
        begin_s: float,
        end_s: float,
        share: ScheduledRequest,
        admitted: tuple[AdmittedRequest, ...],
        reason: FinishReason | None,
    ) -> None:
        number = self.steps[process]
        self.steps[process] += 1
        batch = ScheduledBatch(number, (share,), Limit.NONE, admitted=admitted)
        self.events.append(StepScheduled(begin_s, process, batch))
        commit = Commit(share.request_id, 1, finish_reason=reason)
        self.events.append(StepCommitted(end_s, process, number, (commit,)))


def died_and_resumed(log: PoolLog, name: str) -> None:
    """The decode process dies at 4 s with two tokens delivered; another computes all of it from 5 s on."""
    number = next(NUMBERS)
    log.arrive(P, name, 0.0, arrival_s=0.0, lend_as=number)
    log.prefill(P, name, 0.0, 1.0, reason=FinishReason.LENGTH)
    log.fetch(name, number, 0.0, 0.5, 1.0)
    log.arrive(D, name, 1.5, arrival_s=0.0, num_tokens=PROMPT + 1, max_tokens=3, import_id=number)
    log.prefill(D, name, 1.5, 2.0, cached=8, num_tokens=PROMPT + 1)
    log.lose(D, 4.0)
    log.start("decode-0.2", 4.5)
    log.arrive("decode-0.2", f"{name}@1", 5.0, arrival_s=0.0, num_tokens=PROMPT + 2, max_tokens=2)
    log.prefill("decode-0.2", f"{name}@1", 5.0, 6.0, num_tokens=PROMPT + 2)
    log.decode("decode-0.2", f"{name}@1", 6.0, 7.0, FinishReason.LENGTH)
