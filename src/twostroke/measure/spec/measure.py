"""Run of prompts through one engine, with the drafts and times from its event log.

The prompts are code that the embedded model was not trained on, to continue or to repeat: modules of Python's own
library that its training held out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from twostroke.batch import NewRequest, ScheduledBatch
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.step_model import UNKNOWN_TIMES
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.generation import GenerationRequest
from twostroke.errors import InvalidParameter
from twostroke.events import Event, StepCommitted, StepScheduled
from twostroke.measure.report import median
from twostroke.plain_words import reason_of
from twostroke.sampling_params import SamplingParams
from twostroke.startup.assembly import build_engine
from twostroke.startup.prepared import Drafter
from twostroke.tokenizer.tokenizer import Tokenizer

PromptIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Step without prompt tokens."""

    num_requests: int
    num_drafts: int
    """Draft tokens that were verified, over all requests."""
    rounds: tuple[tuple[int, int], ...]
    """Numbers of draft tokens and of accepted ones, for each request with drafts."""
    num_tokens: int
    """Tokens generated in the step."""
    step_s: float
    """Seconds from the decision to the result."""
    draft_s: float
    """Seconds of drafting, included in `step_s`."""


def acceptance_of(steps: Iterable[DecodeStep]) -> float | None:
    """Return the accepted share of the draft tokens that were examined; those after a rejected one are not."""
    rounds = [a_round for step in steps for a_round in step.rounds]
    tried = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
    return sum(accepted for _, accepted in rounds) / tried if tried else None


@dataclass(frozen=True, slots=True)
class SpecRun:
    """Decode steps of a run, and its output tokens."""

    outputs: dict[PromptIds, tuple[int, ...]]
    steps: tuple[DecodeStep, ...]
    decode_s: float
    """Seconds from the end of the last prefill to the end of the run."""

    @property
    def rate(self) -> float:
        """Tokens per second of decode."""
        return sum(step.num_tokens for step in self.steps) / self.decode_s

    @property
    def acceptance(self) -> float | None:
        """Acceptance, as defined by `acceptance_of`."""
        return acceptance_of(self.steps)

    @property
    def tokens_per_round(self) -> float | None:
        """Mean tokens per pass of requests with drafts."""
        rounds = [a_round for step in self.steps for a_round in step.rounds]
        return 1 + sum(accepted for _, accepted in rounds) / len(rounds) if rounds else None

    @property
    def drafts_per_round(self) -> float:
        """Mean draft tokens per pass, over all requests and steps."""
        num_passes = sum(step.num_requests for step in self.steps)
        return sum(step.num_drafts for step in self.steps) / max(1, num_passes)

    @property
    def drafting_share(self) -> float:
        """Share of passes with draft tokens to verify; a proposer may have none."""
        return sum(len(step.rounds) for step in self.steps) / max(1, sum(step.num_requests for step in self.steps))

    def verify_s(self, num_tokens: int | None = None) -> float:
        """Return the median seconds of a step without drafting, of steps with `num_tokens` query tokens if any ran."""
        of_size = [s for s in self.steps if num_tokens in (None, s.num_requests + s.num_drafts)]
        return median([step.step_s - step.draft_s for step in of_size or self.steps])

    def draft_s(self) -> float:
        """Return the median seconds of drafting in steps that verified drafts."""
        return median([step.draft_s for step in self.steps if step.num_drafts] or [0.0])


class SpecEngine:
    """Engine for runs that are compared.

    Args:
        load: the model and how to load it.
        batch: number of concurrent requests.
        max_model_len: limit for prompt and output tokens.
        speculation: the drafting method; None for no drafts.
        wrap_drafter: wraps or replaces the drafter.
    """

    def __init__(
        self,
        load: LoadConfig,
        batch: int,
        max_model_len: int,
        speculation: SpeculativeConfig | None = None,
        wrap_drafter: Callable[[Drafter], Drafter] | None = None,
    ) -> None:
        self._events: list[Event] = []
        num_blocks = batch * -(-(max_model_len + 64) // CacheConfig().block_size)
        config = EngineConfig(
            load=replace(load, max_model_len=max_model_len),
            cache=CacheConfig(enable_prefix_caching=False, num_kv_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(2048, 10 * batch)),
            speculative_config=speculation,
        )
        self._engine: Engine = build_engine(
            config, listeners=(self._events,), wrap_drafter=wrap_drafter, step_times=UNKNOWN_TIMES
        ).engine
        self._num_runs = 0

    def run(self, prompts: Sequence[PromptIds], num_outputs: int, temperature: float = 0.0, seed: int = 0) -> SpecRun:
        """Run all prompts at once, each to `num_outputs` tokens.

        Decoding is greedy unless a temperature is given; then all requests use the same seed.
        """
        self._num_runs += 1
        self._events.clear()
        outputs: dict[str, list[int]] = {}
        params = SamplingParams(temperature=temperature, max_tokens=num_outputs, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            request_id = f"{self._num_runs}-{index}"
            outputs[request_id] = []
            new = NewRequest(request_id, prompt, params, seed=seed)
            self._engine.add_request(GenerationRequest(new, monotonic_clock(), num_outputs))
        while self._engine.has_work:
            for update in self._engine.step():
                outputs[update.request_id] += update.token_ids
        made = {prompt: tuple(outputs[f"{self._num_runs}-{i}"]) for i, prompt in enumerate(prompts)}
        steps, decode_s = _decode_steps(self._events)
        return SpecRun(made, steps, decode_s)

    def close(self) -> None:
        """Release the engine's memory."""
        self._engine.close()


def _decode_steps(events: Sequence[Event]) -> tuple[tuple[DecodeStep, ...], float]:
    """Return the steps after the last prefill, and the seconds they took, including the engine's time between them."""
    decided: dict[int, tuple[ScheduledBatch, float]] = {}
    steps: list[DecodeStep] = []
    begin_s = end_s = 0.0
    for event in events:
        if isinstance(event, StepScheduled):
            decided[event.batch.step] = event.batch, event.time_s
        elif isinstance(event, StepCommitted):
            batch, decided_s = decided.pop(event.step)
            end_s = event.time_s
            if batch.num_prefill_tokens:
                steps, begin_s = [], event.time_s
                continue
            rounds = tuple((c.num_draft_tokens, c.num_tokens - 1) for c in event.commits if c.num_draft_tokens)
            steps.append(
                DecodeStep(
                    len(batch.requests),
                    sum(drafted for drafted, _ in rounds),
                    rounds,
                    sum(commit.num_tokens for commit in event.commits),
                    event.time_s - decided_s,
                    event.draft_time_s,
                )
            )
    return tuple(steps), end_s - begin_s


MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "fractions.py",
    "getopt.py",
    "graphlib.py",
    "heapq.py",
    "json/__init__.py",
    "json/decoder.py",
    "json/encoder.py",
    "json/scanner.py",
    "json/tool.py",
    "mailbox.py",
    "pathlib.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
)
"""Modules that training/corpus.py holds out; other versions of Python have slightly different texts."""


def held_out_texts() -> list[str]:
    """Return one text for each module."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (root / name for name in MODULES)
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def read_text(name: str, path: Path) -> str:
    """Return the text of the file that the setting `name` names.

    Raises:
        InvalidParameter: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        limit = f"cannot be read as UTF-8 text ({reason_of(error)})"
        raise InvalidParameter(name, str(path), limit, "Give a UTF-8 text.") from error


Task = Literal["code", "edit", "random"]
"""Kinds of prompts. `code`: part of a module. `edit`: a piece of code, then its beginning again. `random`: random token
ids."""


def prompts(
    task: Task,
    count: int,
    length: int,
    tokenizer: Tokenizer,
    vocab_size: int,
    seed: int = 0,
    name: str = "prompt_tokens",
) -> list[PromptIds]:
    """Return `count` prompts of `length` tokens, determined by the seed and the version of Python.

    Args:
        task: kind of prompts.
        count: number of prompts.
        length: tokens of each prompt.
        tokenizer: tokenizes code.
        vocab_size: upper bound of random token ids.
        seed: 0 or more.
        name: name of the setting for `length`, for the error.

    Raises:
        InvalidParameter: no text has so many tokens.
    """
    rng = Random(seed)
    if task == "random":
        return [tuple(rng.randrange(16, vocab_size) for _ in range(length)) for _ in range(count)]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in held_out_texts()]
    longest = max(map(len, texts), default=0)
    if longest < length:
        limit = f"is more than the {longest} tokens of the longest text that prompts are taken from"
        raise InvalidParameter(name, length, limit, "Give fewer.")
    found: list[PromptIds] = []
    while len(found) < count:
        ids = rng.choice(texts)
        begin = rng.randrange(max(1, len(ids) - length))
        piece = ids[begin : begin + length]
        if task == "edit":
            half = piece[: 3 * length // 4]
            piece = half + half[: length - len(half)]
        if len(piece) == length:
            found.append(tuple(piece))
    return found
