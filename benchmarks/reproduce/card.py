"""A card compared with its limits: decode, prefill, idle time, transformers' batching, and the effect of each setting.

One command fits into the minutes for which a card is lent. `--full` takes Qwen3-8B's shape with random weights on an
NVIDIA GPU. Without it a tiny shape runs the same way, on a card if there is one and on the processors otherwise, and
nothing is claimed. `--model` names a folder instead; if it has no weights, they are random. Each figure is printed at
once, and a part that fails does not affect the others. A run that is interrupted, or ended by a time limit, keeps its
measurements.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.card.arithmetic import (
    decode_claims,
    idle_claims,
    prefill_claims,
    setting_claims,
    throughput_claims,
)
from benchmarks.card.machine import Processors, TracedSteps, Tracer, find_machine, measure_limits
from benchmarks.card.shapes import QWEN3_8B, TINY, is_alike, write_shape
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import with_values
from benchmarks.transformers_peer import TransformersBatching
from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.model import ModelConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.errors import EngineError, SetupError, TwostrokeError
from twostroke.events import EventRing
from twostroke.kernels.dispatch import operators_for
from twostroke.log import get_logger
from twostroke.measure.figure import bar_chart
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import settings
from twostroke.measure.sweep.points import DecodePoint, measure_decode, measure_prefill, output_length
from twostroke.measure.workload import (
    SMALL_VOCAB_SIZE,
    Lengths,
    SyntheticSpec,
    Workload,
    synthetic,
    workload_of_lengths,
)
from twostroke.model.checkpoint import read_model_config
from twostroke.model.model_files import find_folder_only

log = get_logger(__name__)

SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("graphs off", {"enforce_eager": True}),
    ("asynchronous scheduling off", {"async_scheduling": False}),
    ("not batch-invariant", {"batch_invariant": False}),
    ("kernels=reference", {"kernels": "reference"}),
)
"""Settings to compare with the default, the slowest last: a name, and fields of LoadConfig or SchedulerConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSizes:
    """Sizes of the measurements."""

    batch: int
    """Simultaneous requests, and slots."""
    context: int
    """Prompt tokens of requests whose decodes are timed."""
    steps: int
    """Decode steps at each point; results are medians."""
    setting_steps: int
    """Decode steps at each point, for the compared settings."""
    traced_steps: int
    prefill: int
    """Tokens of the timed prompt, computed in one step."""
    repeats: int
    """Repetitions of that prompt, and of the workload."""
    requests: int
    """Requests of the workload, which transformers gets, too."""
    prompts: Lengths
    outputs: Lengths
    limit_s: float
    """Seconds after which no further part begins."""


FULL = CardSizes(
    batch=64,
    context=512,
    steps=64,
    setting_steps=24,
    traced_steps=20,
    prefill=8192,
    repeats=3,
    requests=192,
    prompts=Lengths.uniform(64, 448),
    outputs=Lengths.exponential(128),
    limit_s=480.0,
)
SMALL = CardSizes(
    batch=8,
    context=16,
    steps=6,
    setting_steps=4,
    traced_steps=2,
    prefill=64,
    repeats=1,
    requests=12,
    prompts=Lengths.uniform(4, 24),
    outputs=Lengths.exponential(6),
    limit_s=240.0,
)
_PEER_MEMORY_ON_PROCESSORS = {"num_blocks": 32, "page_size": 32, "max_batch_tokens": 256}
"""Settings of transformers' KV cache on a processor, where it cannot query the memory as on a card."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measure everything, one part after the other.

    Raises:
        MissingHardware: `full` without a card.
        SetupError: the model cannot be loaded.
    """
    machine = find_machine(needs_card=options.full)
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(options, machine, _subject(options, machine, Path(folder)))
        with _terminated_like_interrupted():
            bench.run()
        return bench.result()


@contextmanager
def _terminated_like_interrupted() -> Generator[None]:
    """Raise KeyboardInterrupt at SIGTERM, too, which an external time limit sends."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The measured model and its settings."""

    folder: Path
    name: str
    """Name of the model for the result."""
    config: ModelConfig
    load: LoadConfig


def _subject(options: ReproduceOptions, machine: Processors, folder: Path) -> _Subject:
    """Return the user's model, or one of the predefined shapes."""
    if options.model == "embedded":
        shape, name = (QWEN3_8B, "the shape of Qwen3-8B") if options.full else (TINY, "a tiny shape")
        path = write_shape(folder / name.replace(" ", "-"), shape)
    else:
        path, name = find_folder_only(options.model, "transformers is to read the same folder"), options.model_name
    load = LoadConfig(
        model=str(path),
        tokenizer=None if (path / "tokenizer.json").is_file() else "embedded",
        load_format="auto" if any(path.glob("*.safetensors")) else "dummy",
        device=machine.device,
        threads=options.threads,
    )
    return _Subject(path, name, read_model_config(path), load)


class _Bench:
    """One run, with its measurements so far."""

    def __init__(self, options: ReproduceOptions, machine: Processors, subject: _Subject) -> None:
        self._options, self._machine, self._subject = options, machine, subject
        self._sizes = FULL if options.full else SMALL
        self._is_judged = options.full and is_alike(subject.config, QWEN3_8B)
        self._begin_s = time.monotonic()
        self._console = Console(stderr=True)
        self._claims: list[Claim] = []
        self._remarks: list[str] = []
        self._details: dict[str, Any] = {}
        self._peer: dict[str, str] = {}
        self._points: dict[int, DecodePoint] = {}
        """Decode measurements of the default settings, by batch."""
        self._ttft_s: float | None = None
        """TTFT of the timed prompt with the default settings."""
        self._ours_tok_s: float | None = None
        self._tracer = Tracer(machine)
        self._traced = TracedSteps(self._tracer)
        self._workload = synthetic(
            SyntheticSpec(
                num_requests=self._sizes.requests,
                prompt_lengths=self._sizes.prompts,
                output_lengths=self._sizes.outputs,
                vocab_size=subject.config.vocab_size,
                seed=options.seed,
            )
        )

    def run(self) -> None:
        """Run all parts, or those until an interrupt; the longest come last, since they may be skipped."""
        try:
            self._all_parts()
        except KeyboardInterrupt:
            seconds = time.monotonic() - self._begin_s
            self._remarks.append(f"interrupted after {seconds:.0f} s: what was measured by then, and nothing else")
            self._say(self._remarks[-1])

    def _all_parts(self) -> None:
        if self._machine.device == "cpu":
            self._remarks.append(f"{self._machine.name}; nothing here is a card's, and nothing is claimed")
        elif not self._is_judged:
            self._remarks.append("another shape than Qwen3-8B's: the goals are reported, not claimed")
        self._say(self._machine.name)
        limits = measure_limits(self._machine, getattr(torch, self._subject.config.dtype))
        self._details["limits"] = asdict(limits)
        self._say(
            f"it copies {limits.bytes_per_s / 1e9:,.1f} GB/s, multiplies {limits.flops_per_s / 1e12:,.2f} TFLOP/s"
        )
        self._part("the engine as it is by default", lambda: self._default(limits))
        self._machine.give_back()
        self._settings(SETTINGS[:-1])
        self._part("transformers", self._beside_transformers, optional=True)
        self._machine.give_back()
        self._settings(SETTINGS[-1:])

    def _settings(self, some: Iterable[tuple[str, dict[str, Any]]]) -> None:
        for name, changes in some:
            self._part(name, lambda name=name, changes=changes: self._setting(name, changes), optional=True)
            self._machine.give_back()

    def result(self) -> Reproduction:
        """Return the reproduction with the measurements so far."""
        sizes, load = self._sizes, self._subject.load
        self._details["seconds"] = time.monotonic() - self._begin_s
        given = {**settings(load), "model": self._subject.name}
        shares = {claim.what: claim.measured for claim in self._claims if "share of" in claim.what}
        of_sizes = {name: str(of) if isinstance(of, Lengths) else of for name, of in settings(sizes).items()}
        names, measured = [name.replace(": ", ":\n") for name in shares], list(shares.values())
        return Reproduction(
            claims=tuple(self._claims),
            config={
                "kernels": self._kernels(),
                "load": given,
                "dtype": self._subject.config.dtype,
                "transformers": self._peer,
            },
            workload={**self._workload.description, **of_sizes},
            details=self._details,
            remarks=tuple(self._remarks),
            draw=bar_chart(names, {"measured": measured}, "share", lines=(1.0,)) if shares else None,
            figure_size=(9.0, 4.0),
            warmup=1,
            repeats=sizes.repeats,
            hardware=self._machine.hardware(),
        )

    def _kernels(self) -> str:
        """Return the name of the default operators for the measured model."""
        load, dtype = self._subject.load, getattr(torch, self._subject.config.dtype)
        return operators_for(torch.device(load.device), dtype, load.kernels, batch_invariant=load.batch_invariant).name

    def _engine(self, load: LoadConfig, scheduler: SchedulerConfig) -> ModelEngine:
        """Return an engine with memory for the measurements only, so that the peer and other settings find as much
        memory."""
        sizes, decode = self._sizes, self._longest_decode()
        longest = max(decode, sizes.prefill + 2, self._workload.max_request_tokens)
        scheduler = replace(scheduler, max_num_seqs=sizes.batch, max_num_batched_tokens=max(sizes.prefill, sizes.batch))
        blocks = kv_blocks(
            max(sizes.batch * decode, sizes.prefill + 1, _most_at_once(self._workload, sizes.batch)),
            sizes.batch,
            CacheConfig().block_size,
        )
        cache = CacheConfig(enable_prefix_caching=False, num_kv_blocks=blocks)
        begin_s = time.monotonic()
        costed = EventRing(1)  # without a listener, the journal computes no costs
        engine = model_engine(replace(load, max_model_len=longest), scheduler, cache, [costed], at_submit=self._traced)
        self._say(f"loaded in {time.monotonic() - begin_s:.1f} s")
        return engine

    def _longest_decode(self) -> int:
        """Return the tokens of a request whose decodes are timed or traced."""
        sizes = self._sizes
        most = max(sizes.steps, TracedSteps.num_outputs(sizes.traced_steps))
        return sizes.context + self._num_outputs(sizes.batch, most)

    def _num_outputs(self, num_requests: int, steps: int) -> int:
        """Return the output tokens that give `steps` steps in which all requests decode."""
        sizes = self._sizes
        return output_length(num_requests, sizes.context, steps, max(sizes.prefill, sizes.batch))

    def _decode(self, engine: ModelEngine, num_requests: int, steps: int) -> DecodePoint:
        outputs = self._num_outputs(num_requests, steps)
        return measure_decode(engine, num_requests, self._sizes.context, outputs, f"decode, batch {num_requests}")

    def _default(self, limits: MachineLimits) -> Iterable[Claim]:
        """Measure the goals' figures, in separate parts."""
        with closing(self._engine(self._subject.load, SchedulerConfig())) as engine:
            self._details["startup"] = engine.startup_lines
            self._goals(engine, limits)
        return []

    def _goals(self, engine: ModelEngine, limits: MachineLimits) -> None:
        sizes = self._sizes

        def warm_up() -> Iterable[Claim]:
            self._decode(engine, sizes.batch, sizes.setting_steps)
            return []

        def decode(num_requests: int) -> Iterable[Claim]:
            point = self._points[num_requests] = self._decode(engine, num_requests, sizes.steps)
            return decode_claims(num_requests, point.tpot_s, point.cost, limits.bytes_per_s)

        def prefill() -> Iterable[Claim]:
            measure_prefill(engine, sizes.prefill, 1, "prefill, warm-up")
            point = measure_prefill(engine, sizes.prefill, sizes.repeats, "prefill")
            self._ttft_s = point.ttft_s
            return prefill_claims(sizes.prefill, point.ttft_s, point.cost, limits.flops_per_s)

        def idle() -> Iterable[Claim]:
            outputs = self._num_outputs(sizes.batch, TracedSteps.num_outputs(sizes.traced_steps))
            self._traced.arm(sizes.batch, sizes.traced_steps)
            engine.run(workload_of_lengths([(sizes.context, outputs)] * sizes.batch, vocab_size=SMALL_VOCAB_SIZE))
            busy = self._traced.take()
            if busy is None:
                raise SetupError("the profiler saw no work of the device (is it allowed to, and is CUPTI there?).")
            self._details["traced"] = asdict(busy)
            return idle_claims(sizes.batch, busy, self._points[sizes.batch].tpot_s)

        def throughput() -> Iterable[Claim]:
            num_tokens = self._workload.num_output_tokens
            seconds = [engine.run(self._workload, progress="throughput").duration_s for _ in range(sizes.repeats + 1)]
            self._ours_tok_s = num_tokens / min(seconds[1:])  # the first one warms up, as the peer's does
            return [Claim.reported(f"throughput, {sizes.batch} slots: tokens/s", self._ours_tok_s)]

        self._part("warm-up, in which kernels are compiled", warm_up)
        for num_requests in (1, sizes.batch):
            self._part(f"decode, batch {num_requests}", lambda n=num_requests: decode(n))
        self._part("prefill", prefill)
        self._part("idle", idle)
        self._part("throughput", throughput)

    def _beside_transformers(self) -> Iterable[Claim]:
        try:
            seconds = self._seconds_of_transformers(torch.inference_mode())  # the fastest
        except EngineError as error:  # some versions make tensors in their caller's mode, and change them in another
            log.warning("transformers in torch's inference mode: %s; without it", error)
            self._machine.give_back()
            seconds = self._seconds_of_transformers(torch.no_grad())
        theirs = self._workload.num_output_tokens / seconds
        reported = Claim.reported(f"throughput of transformers, {self._sizes.batch} slots: tokens/s", theirs)
        ours = self._ours_tok_s
        return [reported] if ours is None else [*throughput_claims(self._sizes.batch, ours, theirs), reported]

    def _seconds_of_transformers(self, mode: AbstractContextManager[Any]) -> float:
        sizes = self._sizes
        memory = _PEER_MEMORY_ON_PROCESSORS if self._machine.device == "cpu" else None
        dtype = self._subject.config.dtype
        with (
            mode,  # its loop runs in the mode that its caller is in
            closing(TransformersBatching(self._subject.folder, dtype, self._machine.device, memory)) as peer,
        ):
            prompts = [request.prompt_token_ids for request in self._workload.requests]
            seconds = peer.best_s(prompts, self._workload.output_lengths, sizes.batch, sizes.repeats)
            self._peer = {"version": peer.version, "attention": peer.attention}
        return seconds

    def _setting(self, name: str, changes: Mapping[str, Any]) -> Iterable[Claim]:
        sizes = self._sizes
        load, scheduler = with_values(changes, self._subject.load, SchedulerConfig())
        with closing(self._engine(load, scheduler)) as engine:
            self._decode(engine, sizes.batch, sizes.setting_steps)  # warms up
            point = self._decode(engine, sizes.batch, sizes.setting_steps)
            measure_prefill(engine, sizes.prefill, 1, "prefill, warm-up")
            ttft_s = measure_prefill(engine, sizes.prefill, sizes.repeats, "prefill").ttft_s
        default = self._points.get(sizes.batch)
        step_s = None if default is None else default.tpot_s
        decodes = setting_claims(name, f"decode, batch {sizes.batch}", point.tpot_s, step_s)
        return [*decodes, *setting_claims(name, f"prefill of {sizes.prefill} tokens", ttft_s, self._ttft_s)]

    def _part(self, name: str, work: Callable[[], Iterable[Claim]], *, optional: bool = False) -> None:
        """Run one part; report what prevents it, and continue with the others.

        Args:
            name: for display.
            work: measures, and returns the claims.
            optional: a failure is no failed claim, since nothing is claimed of the part, or it is not ours.
        """
        used_s = time.monotonic() - self._begin_s
        if used_s > self._sizes.limit_s:
            self._remarks.append(f"{name}: left out, {used_s:.0f} s were used")
            return
        self._say(name)
        try:
            found = [claim.judged(self._is_judged) for claim in work()]
        except Exception as error:  # a card is lent for minutes only: keep the other measurements
            what = str(error) if isinstance(error, TwostrokeError) else f"{type(error).__name__}: {error}"
            self._remarks.append(f"{name}: not measured. {what}")
            self._say(self._remarks[-1])
            if not isinstance(error, TwostrokeError):
                log.exception("%s failed", name)
            if not optional:
                self._claims.append(Claim.equal(f"{name}: came to its end", 1, 0))
            return
        self._claims += found
        for claim in found:
            self._say(f"  {claim.what}: {claim.measured:.4g} ({claim.rule})")

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._begin_s
        self._console.print(f"card [{seconds:5.0f} s] {text}", style="dim", highlight=False, markup=False)


def kv_blocks(num_tokens: int, num_requests: int, block_size: int) -> int:
    """Return the blocks for so many tokens of so many requests, with the last block of each not full.

    >>> kv_blocks(100, 3, 16)
    10
    """
    return -(-num_tokens // block_size) + num_requests


def _most_at_once(workload: Workload, num_slots: int) -> int:
    """Return the tokens of the longest requests that may run together."""
    return sum(sorted((request.num_tokens for request in workload.requests), reverse=True)[:num_slots])
