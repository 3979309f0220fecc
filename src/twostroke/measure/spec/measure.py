"""One run of some prompts through one engine, and what its event log says of drafts and times.

The runs are asked code that the embedded model has never seen, to go on with or to write again: modules of Python's own
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
    """A step without prompt tokens."""

    num_requests: int
    num_drafts: int
    """Verified, over all requests."""
    rounds: tuple[tuple[int, int], ...]
    """Of each request with drafts: how many, and how many stood."""
    num_tokens: int
    """Made."""
    step_s: float
    """From the decision to the result."""
    draft_s: float
    """Of it, guessing."""


def acceptance_of(steps: Iterable[DecodeStep]) -> float | None:
    """Share of the drafts that were looked at that stood: behind one that falls nothing is looked at."""
    rounds = [a_round for step in steps for a_round in step.rounds]
    tried = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
    return sum(accepted for _, accepted in rounds) / tried if tried else None


@dataclass(frozen=True, slots=True)
class SpecRun:
    """The decode steps of a run, and what was generated."""

    outputs: dict[PromptIds, tuple[int, ...]]
    steps: tuple[DecodeStep, ...]
    decode_s: float
    """From the last prompt's end to the end."""

    @property
    def rate(self) -> float:
        """Tokens per second of the second stroke."""
        return sum(step.num_tokens for step in self.steps) / self.decode_s

    @property
    def acceptance(self) -> float | None:
        """See `acceptance_of`."""
        return acceptance_of(self.steps)

    @property
    def tokens_per_round(self) -> float | None:
        """Of requests with drafts, tokens of one pass."""
        rounds = [a_round for step in self.steps for a_round in step.rounds]
        return 1 + sum(accepted for _, accepted in rounds) / len(rounds) if rounds else None

    @property
    def drafts_per_round(self) -> float:
        """Over all requests and steps, drafts of one pass."""
        num_passes = sum(step.num_requests for step in self.steps)
        return sum(step.num_drafts for step in self.steps) / max(1, num_passes)

    @property
    def drafting_share(self) -> float:
        """Share of the passes that had drafts to verify; a proposer may have nothing to say."""
        return sum(len(step.rounds) for step in self.steps) / max(1, sum(step.num_requests for step in self.steps))

    def verify_s(self, num_tokens: int | None = None) -> float:
        """Median seconds of a step without its drafting; of one with so many query tokens, if any was."""
        of_size = [s for s in self.steps if num_tokens in (None, s.num_requests + s.num_drafts)]
        return median([step.step_s - step.draft_s for step in of_size or self.steps])

    def draft_s(self) -> float:
        """Median seconds of guessing, of the steps that verified drafts."""
        return median([step.draft_s for step in self.steps if step.num_drafts] or [0.0])


class SpecEngine:
    """An engine for runs that are compared.

    Args:
        load: which model.
        batch: requests at once.
        max_model_len: prompt and output.
        speculation: who drafts; None for nobody.
        around_drafter: puts another drafter around it, or in its place.
    """

    def __init__(
        self,
        load: LoadConfig,
        batch: int,
        max_model_len: int,
        speculation: SpeculativeConfig | None = None,
        around_drafter: Callable[[Drafter], Drafter] | None = None,
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
            config, listeners=(self._events,), around_drafter=around_drafter, step_times=UNKNOWN_TIMES
        ).engine
        self._num_runs = 0

    def run(self, prompts: Sequence[PromptIds], num_outputs: int, temperature: float = 0.0, seed: int = 0) -> SpecRun:
        """All at once, so many tokens each; greedily unless a temperature is given, and then all with the same seed."""
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
        """Gives its memory back."""
        self._engine.close()


def _decode_steps(events: Sequence[Event]) -> tuple[tuple[DecodeStep, ...], float]:
    """Those behind the last prompt, and how long they took, the engine's own time between them included."""
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
"""What training/corpus.py keeps out; other versions of Python have slightly other texts of the same names."""


def held_out_texts() -> list[str]:
    """One text a module."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (root / name for name in MODULES)
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def read_text(name: str, path: Path) -> str:
    """Return the text of the file that the setting `name` names.

    Raises:
        InvalidParameter: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        limit = f"cannot be read as UTF-8 text ({reason_of(error)})"
        raise InvalidParameter(name, str(path), limit, "Give a UTF-8 text.") from error


Task = Literal["code", "edit", "random"]
"""`code`: go on with a module. `edit`: a piece of code, and the beginning of the same again. `random`: token ids."""


def prompts(
    task: Task,
    count: int,
    length: int,
    tokenizer: Tokenizer,
    vocab_size: int,
    seed: int = 0,
    name: str = "prompt_tokens",
) -> list[PromptIds]:
    """So many prompts of so many tokens; the same for the same seed and version of Python.

    Args:
        task: what is asked.
        count: of prompts.
        length: of each, in tokens.
        tokenizer: makes tokens of code.
        vocab_size: of random tokens.
        seed: 0 and more.
        name: of the setting that `length` is, to refuse it by.

    Raises:
        InvalidParameter: no text has so many tokens.
    """
    dice = Random(seed)
    if task == "random":
        return [tuple(dice.randrange(16, vocab_size) for _ in range(length)) for _ in range(count)]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in held_out_texts()]
    longest = max(map(len, texts), default=0)
    if longest < length:
        limit = f"is more than the {longest} tokens of the longest text that a prompt can be a piece of"
        raise InvalidParameter(name, length, limit, "Give fewer.")
    found: list[PromptIds] = []
    while len(found) < count:
        ids = dice.choice(texts)
        begin = dice.randrange(max(1, len(ids) - length))
        piece = ids[begin : begin + length]
        if task == "edit":
            half = piece[: 3 * length // 4]
            piece = half + half[: length - len(half)]
        if len(piece) == length:
            found.append(tuple(piece))
    return found
