"""A fuzzer of schedules: in each, the answer to a request has the bits of the request alone.

Each request is answered alone first, without a prefix cache, on one thread. The hash of an answer covers every token
and every bit of the log-probabilities. Each schedule then draws settings and arrivals, and compares hashes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.schedules.requests import LONG_MODEL_LEN, FuzzRequest, draw_requests, draw_schedule
from twostroke import LLM, RequestOutput
from twostroke.client.input_processor import PromptDict
from twostroke.client.output_processor import OutputKind

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswersAlone:
    """Answers of a model's requests alone."""

    requests: Sequence[FuzzRequest]
    token_ids: Sequence[tuple[int, ...]]
    hashes: Sequence[str]
    window: int = 0
    """Window of layers that have KV blocks of their own, which a request takes as well; 0: no layer has one."""

    @classmethod
    def of(cls, model: str, settings: Settings, window: int = 0) -> AnswersAlone:
        """Run one request after the other.

        Args:
            model: a folder or a file.
            settings: of the format, beside those of an engine without choices.
            window: of layers that have KV blocks of their own; 0: no layer has one.
        """
        requests = draw_requests()
        alone = {
            "enable_prefix_caching": False,
            "threads": 1,
            "max_model_len": LONG_MODEL_LEN,
            "num_kv_blocks": 80,
        }
        with LLM(model, **{**alone, **settings}) as llm:
            found = [llm.generate([{"prompt_token_ids": list(one.prompt)}], one.params)[0] for one in requests]
        token_ids, hashes = [tuple(one.outputs[0].token_ids) for one in found], [answer_hash(one) for one in found]
        return cls(requests, token_ids, hashes, window)

    @property
    def hash(self) -> str:
        """Hash of all answers, in order."""
        return hashlib.sha256("".join(self.hashes).encode()).hexdigest()


@dataclass(slots=True)
class FuzzOutcome:
    """Counts of schedules, and what they found."""

    num_schedules: int = 0
    num_answers: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    differing: list[str] = field(default_factory=list[str])
    """Answers of another hash, missing answers and errors, each with its seed and settings."""


def answer_hash(output: RequestOutput) -> str:
    """Return the hash of every token and every bit of the log-probabilities."""
    completion = output.outputs[0]
    content = hashlib.sha256(struct.pack(f"<{len(completion.token_ids)}q", *completion.token_ids))
    for scores in (completion.logprobs or [], output.prompt_logprobs or []):
        for at in scores:
            for token, found in (at or {}).items():
                content.update(struct.pack("<qd", token, found.logprob))
    return content.hexdigest()


def run_schedules(
    model: str,
    alone: AnswersAlone,
    seeds: Iterable[int],
    settings: Settings,
    drafts: Sequence[Settings] = ({},),
    advance: Callable[[], object] = lambda: None,
) -> FuzzOutcome:
    """Run a schedule for each seed, and compare each answer with the request's answer alone.

    Args:
        model: a folder or a file.
        alone: answers of the requests alone.
        seeds: of the schedules.
        settings: of all schedules; they override what is drawn.
        drafts: more settings, which take turns.
        advance: called after each schedule.
    """
    outcome = FuzzOutcome()
    for seed in seeds:
        given = {**settings, **drafts[seed % len(drafts)]}
        try:
            _run_schedule(model, alone, seed, given, outcome)
        except Exception as error:  # an engine that fails is a finding, and the next seed may have another
            outcome.differing.append(f"schedule {seed}: {type(error).__name__}: {error}")
        outcome.num_schedules += 1
        advance()
    return outcome


def _run_schedule(model: str, alone: AnswersAlone, seed: int, given: Settings, outcome: FuzzOutcome) -> None:
    rng, drawn = Random(seed), draw_schedule(seed)
    config = {**drawn.settings, "num_kv_blocks": drawn.num_blocks(alone.window), **given}
    arrivals = list(zip(drawn.arrivals, drawn.priorities, strict=True))
    index_of, outputs = dict[str, int](), dict[int, RequestOutput]()
    with LLM(model, **config) as llm:
        engine = llm.engine
        while arrivals or engine.has_work:
            while arrivals and (not engine.has_work or rng.random() >= drawn.pause):
                index, priority = arrivals.pop()
                request = alone.requests[index]
                prompt = PromptDict(prompt_token_ids=list(request.prompt))
                index_of[engine.submit(prompt, request.params, priority=priority, kind=OutputKind.FINAL)] = index
            for output in engine.step():
                if output.finished:
                    outputs[index_of[output.request_id]] = output
    for index in index_of.values():
        output = outputs.get(index)
        if output is None or answer_hash(output) != alone.hashes[index]:
            outcome.differing.append(f"schedule {seed}, request {index}: {config}")
    outcome.num_answers += len(outputs)
    outcome.num_preemptions += sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics)
    outcome.num_cached_tokens += sum(output.num_cached_tokens for output in outputs.values())
