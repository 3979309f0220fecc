"""A prefill engine and a decode engine in one process, and what a gateway would say to them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lent_kv import address_by
from twostroke.batch import NewRequest, TokenLogprobs
from twostroke.config.engine import EngineConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, HandoverSettings, KVFetched
from twostroke.engine.pool_engine import PoolEngine
from twostroke.engine.token_update import TokenUpdate
from twostroke.events import Event
from twostroke.kv_transfer.transport import KVSource
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.startup.assembly import BuiltEngine, build_engine
from twostroke.startup.handover_setup import HandoverSetup

EPOCHS = itertools.count(1)
NUMBERS = itertools.count(1)


@dataclass
class Answer:
    """Answer to a request."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    hidden_state: bytes | None = None

    def take(self, update: TokenUpdate) -> None:
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.finish_reason = update.finish_reason
        self.num_draft_tokens += update.num_draft_tokens
        if update.status is not None:
            if update.status.prompt_logprobs:
                del self.prompt_logprobs[
                    update.status.prompt_logprobs_start - 1 :
                ]  # a preempted prompt is scored again
                self.prompt_logprobs += update.status.prompt_logprobs
            self.hidden_state = update.status.hidden_state or self.hidden_state
            self.num_cached_tokens = max(self.num_cached_tokens, update.status.num_cached_tokens)


class Worker:
    """An engine of a pool, driven by hand."""

    def __init__(self, config: EngineConfig, port: HandoverSettings) -> None:
        self.events: list[Event] = []
        self._said: queue.SimpleQueue[KVFetched | EndHold] = queue.SimpleQueue()
        self.epoch = next(EPOCHS)

        ends = HandoverSetup(port, self.epoch, self._said.put)
        self.built: BuiltEngine = build_engine(config, listeners=(self.events,), handover=ends)  # pyright: ignore
        assert isinstance(self.built.engine, PoolEngine)
        self.engine = self.built.engine

    def hear(self, *, wait: bool = False) -> None:
        """Pass the messages of the transfer threads to the engine; wait for the first one if asked."""
        if wait:
            self.engine.hand_over(self._said.get(timeout=30))
        while not self._said.empty():
            self.engine.hand_over(self._said.get())

    def source(self, lease_id: int) -> KVSource:
        assert self.built.lender is not None
        facts = self.built.facts
        return KVSource(self.built.lender.address, self.epoch, lease_id, facts.block_size, facts.prefix_tokens)


class TwoPools:
    """A prefill and a decode engine."""

    def __init__(
        self,
        folder: Path,
        *,
        transport: str = "shm",
        decode: dict[str, Any] | None = None,
        allows_drift: bool = False,
        **given: Any,
    ) -> None:
        address = address_by(transport, folder)
        given = {"threads": 1, "num_kv_blocks": 400, **given}
        self.prefill = Worker(EngineConfig.from_keywords(**given), HandoverSettings(lends_at=address))
        self.decode = Worker(
            EngineConfig.from_keywords(**{**given, **(decode or {})}),
            HandoverSettings(fetches=True, fetches_by_nixl=address.by_nixl, allows_drift=allows_drift),
        )

    def close(self) -> None:
        self.prefill.engine.close()
        self.decode.engine.close()

    def run(self, requests: Sequence[GenerationRequest]) -> dict[str, Answer]:
        """Run each request: prefill in one pool, decode in the other."""
        answers = {request.request_id: Answer(list(request.new_request.output_token_ids)) for request in requests}
        numbers = {request.request_id: next(NUMBERS) for request in requests}
        wanted = {request.request_id: request for request in requests}
        for request in requests:
            number, new = numbers[request.request_id], request.new_request
            token_ids, source = new.prompt_token_ids + new.output_token_ids, self.prefill.source(number)
            self.decode.engine.hand_over(FetchKV(number, request.request_id, token_ids, request.cache_salt, source))
            there = self.decode.built.facts.prefix_tokens
            here = replace(request, max_tokens=len(new.output_token_ids) + 1, lend_as=number, lend_block_size=there)
            self.prefill.engine.add_request(here)
        while self.prefill.engine.has_work:
            for update in self.prefill.engine.step():
                answer, request = answers[update.request_id], wanted[update.request_id]
                answer.take(update)
                if update.finish_reason is FinishReason.LENGTH and len(answer.token_ids) < request.max_tokens:
                    params = replace(request.new_request.params, prompt_logprobs=None)
                    new = replace(request.new_request, params=params, output_token_ids=tuple(answer.token_ids))
                    number = numbers[update.request_id]
                    self.decode.engine.add_request(replace(request, new_request=new, import_id=number))
                elif update.finish_reason is not None:
                    self.decode.engine.hand_over(DropKV(numbers[update.request_id]))
            self.prefill.hear()
        while any(
            answer.finish_reason in (None, FinishReason.LENGTH) and self._lacks(answer, wanted[name])
            for name, answer in answers.items()
        ):
            self.decode.hear(wait=not self.decode.engine.has_work)
            if self.decode.engine.has_work:
                for update in self.decode.engine.step():
                    answers[update.request_id].take(update)
        return answers

    @staticmethod
    def _lacks(answer: Answer, request: GenerationRequest) -> bool:
        return answer.finish_reason is None or len(answer.token_ids) < request.max_tokens


def sequence(name: str, prompt: Sequence[int], params: SamplingParams, seed: int = 0, **more: Any) -> GenerationRequest:
    """Return a request of token ids."""
    new = NewRequest(name, tuple(prompt), params, seed)
    return GenerationRequest(new, 0.0, params.max_tokens or 16, **more)


def alone(config: EngineConfig, requests: Sequence[GenerationRequest]) -> dict[str, Answer]:
    """Return the outputs of a single engine."""
    engine = build_engine(config).engine
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for update in engine.step():
            answers[update.request_id].take(update)
    engine.close()
    return answers
