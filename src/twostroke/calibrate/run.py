"""`twostroke calibrate`: measurement of step times, and of the cost and acceptance of drafts, on this machine.

measure/steps.py times steps of all kinds. Drafts are measured with one request at a time:

    v(n)      steps of an engine whose drafts are free and wrong, so that each step has the size that is asked for.
              Sizes alternate, so that other processes on the machine slow all sizes alike
    drafters  for each drafter two engines, with 1 draft and with the most drafts in every step: drafting time and
              acceptance. v(2) is timed again between them, and their times are corrected by it

The outputs must equal those without drafts; otherwise the measurement fails. Other processes can only make a step
longer, so the lower quartile of the times of one kind counts.

Prompts are pieces of a text, by default the embedded code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
from tqdm.auto import tqdm

from twostroke.calibrate.options import CalibrateOptions
from twostroke.config.cache import CacheConfig
from twostroke.config.checks import parse_ints
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import MAX_DRAFTS, Method, SpeculativeConfig
from twostroke.cost.calibration import Calibration, DrafterFigures, Timing, check_writable, seconds_at
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_fit import fit_step_model
from twostroke.cost.step_model import StepTimeModel
from twostroke.errors import ClientError, InvalidParameter, SetupError
from twostroke.hardware import Hardware
from twostroke.measure.report import model_name, settings
from twostroke.measure.spec.measure import DecodeStep, PromptIds, SpecEngine, SpecRun, acceptance_of, prompts, read_text
from twostroke.measure.steps import measure_steps
from twostroke.model.model_files import find_model, find_model_of
from twostroke.speculation.proposer import DraftRequest, Drafts
from twostroke.startup.calibrated import place_to_write
from twostroke.startup.prepared import Drafter, ProvidedDrafter
from twostroke.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class FixedSizeDrafter:
    """A drafter that proposes a set number of wrong drafts for one request, so that a step has a set size."""

    numbers: Sequence[int] = (0,)
    """Numbers of drafts for one step after the other, in a cycle."""
    _num_steps: int = field(default=0)

    def repeat(self, numbers: Sequence[int]) -> None:
        """Restart with these numbers of drafts."""
        self.numbers, self._num_steps = numbers, 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        number = self.numbers[self._num_steps % len(self.numbers)]
        self._num_steps += 1
        return [Drafts((0,) * min(number, request.num_drafts)) for request in requests]

    def forget(self, row: int, num_tokens: int) -> None:
        """Do nothing: no state is kept."""


def pieces(
    data: Path | None, count: int, length: int, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> list[PromptIds]:
    """Return `count` prompts of `length` token ids, from places that the seed selects.

    Raises:
        InvalidParameter: the text cannot be read, or is shorter than a prompt.
    """
    if data is None:
        return prompts("code", count, length, tokenizer, vocab_size, seed, "context_tokens")
    ids = tokenizer.encode(read_text("data", data), add_special_tokens=False)
    if len(ids) < length:
        limit = f"has {len(ids)} tokens; a prompt has {length}"
        raise InvalidParameter("data", str(data), limit, "Give a longer text, or a smaller --context-tokens.")
    rng = Random(seed)
    begins = [rng.randrange(len(ids) - length + 1) for _ in range(count)]
    return [tuple(ids[begin : begin + length]) for begin in begins]


def calibrate(
    options: CalibrateOptions | None = None, load: LoadConfig | None = None, *, progress: bool = False
) -> tuple[Calibration, Path]:
    """Measure, save, and return the calibration and its path.

    Raises:
        InvalidParameter: a setting does not go with the model, or a file cannot be read or written.
        SetupError: the model cannot be loaded.
    """
    options, load = options or CalibrateOptions(), load or LoadConfig()
    _check_load(load, options)
    output = options.output or place_to_write(find_model_of(load).path, load)
    check_writable(output)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs
    )
    cache = CacheConfig(kv_cache_dtype=options.kv_cache_dtype)
    drafting = _drafting(options, load, progress) if options.drafts else None
    measured = measure_steps(load, scheduler, cache, progress=progress)
    step_times = fit_step_model(measured.steps)
    step_s, drafters, left_out = drafting or (_by_model(step_times, measured.layers, options), (), {})
    found = Calibration(
        model=model_name(load.model),
        load=settings(load),
        machine=Hardware.of_this_machine().as_json(),
        context_tokens=options.context_tokens,
        most_drafts=options.most_drafts,
        step_s=step_s,
        step_times=step_times,
        limits=measured.limits,
        scheduler=settings(scheduler),
        cache=settings(cache),
        drafters=drafters,
        left_out=left_out,
    )
    found.write(output)
    return found, output


def _by_model(step_times: StepTimeModel, layers: Layers, options: CalibrateOptions) -> tuple[Timing, ...]:
    """Return v(n) from the fitted model, where it is not measured directly."""
    works = [(size, layers.work([(options.context_tokens, size, size)])) for size in options.step_sizes]
    return tuple(Timing(size, step_times.seconds(work)) for size, work in works)


def _drafting(
    options: CalibrateOptions, load: LoadConfig, progress: bool
) -> tuple[tuple[Timing, ...], tuple[DrafterFigures, ...], dict[str, str]]:
    """Return v(n), the figures of every drafter, and the methods that cannot be used with the model, with reasons."""
    drafters: list[DrafterFigures] = []
    left_out: dict[str, str] = {}
    with closing(_DraftingBench(options, load)) as bench:
        step_s = bench.step_times()
        for config in tqdm(list(bench.configs()), desc="drafters", leave=False, disable=not progress):
            try:
                drafters.append(bench.figures(config, step_s))
            except (ClientError, SetupError) as error:
                if _is_asked_for(config, options):
                    raise
                left_out[config.method] = str(error)
    return step_s, tuple(drafters), left_out


def _check_load(load: LoadConfig, options: CalibrateOptions) -> None:
    """Refuse load settings that have no effect here or would make the result wrong."""
    if options.drafts and load.load_format == "dummy":
        limit = "random weights give no meaningful acceptance of drafts"
        raise InvalidParameter("load_format", load.load_format, limit, "Add --no-drafts, for step times alone.")
    if options.drafts and not load.batch_invariant:
        limit = "outputs with and without drafts are compared, and need not be equal then"
        raise InvalidParameter("batch_invariant", False, limit, "Add --no-drafts, for step times alone.")
    if load.event_log is not None:
        limit = "is for one engine; a calibration runs many"
        raise InvalidParameter("event_log", str(load.event_log), limit, "Leave it out.")
    if load.max_logprobs != LoadConfig().max_logprobs:
        limit = "changes nothing: a calibration requests no log-probabilities"
        raise InvalidParameter("max_logprobs", load.max_logprobs, limit, "Leave it out.")


def _is_asked_for(config: SpeculativeConfig, options: CalibrateOptions) -> bool:
    """Return whether the user named this method or gave its model or layers; others may be left out."""
    is_layer = config.method == "early_exit" and options.exit_layers is not None
    return options.asked is not None or config.model is not None or is_layer


class _DraftingBench:
    """The model, its prompts, and its outputs without drafts."""

    def __init__(self, options: CalibrateOptions, load: LoadConfig) -> None:
        files = find_model_of(load)
        model = files.config()
        of_tokenizer = files if load.tokenizer is None else find_model(load.tokenizer, with_weights=False)
        self._options, self._load = options, load
        self._exit_layers_to_try = _exit_layers(options.exit_layers, model.num_layers)
        self._longest = options.context_tokens + max(options.output_tokens, _num_timed_outputs(options.step_sizes))
        given = load.max_model_len
        if given is not None and given < self._longest:
            limit = f"is less than the {self._longest} tokens that prompts and outputs take"
            remedy = "Leave it out, or give smaller --context-tokens, --output-tokens or --sizes."
            raise InvalidParameter("max_model_len", given, limit, remedy)
        count = 1 + options.prompts  # the first prompt warms up
        self._prompts = pieces(
            options.data, count, options.context_tokens, of_tokenizer.tokenizer(), model.vocab_size, options.seed
        )
        self._guesses = FixedSizeDrafter()
        free = SpeculativeConfig(method="ngram", num_speculative_tokens=MAX_DRAFTS)
        self._plain_engine = self._engine(free, lambda _: ProvidedDrafter(self._guesses, "set numbers of guesses"))
        self._plain: dict[PromptIds, tuple[int, ...]] = {}
        """Output without drafts, by prompt."""

    def close(self) -> None:
        """Close the engine and free its memory."""
        self._plain_engine.close()

    def step_times(self) -> tuple[Timing, ...]:
        """Run all prompts without drafts, and return v(n)."""
        self._guesses.repeat((0,))
        for prompt in self._prompts:
            self._plain |= self._plain_engine.run([prompt], self._options.output_tokens).outputs
        return self._timed(self._options.step_sizes)

    def _timed(self, sizes: Sequence[int]) -> tuple[Timing, ...]:
        """Return the seconds of steps of these numbers of query tokens."""
        numbers = [size - 1 for size in reversed(sizes)]  # the largest first: an output's end has no room
        steps: list[DecodeStep] = []
        while True:
            self._guesses.repeat(numbers)
            steps += self._plain_engine.run([self._prompts[0]], _num_timed_outputs(sizes)).steps
            counts = Counter(step.num_drafts for step in steps)
            if all(counts[number] >= self._options.repeats for number in numbers):
                return tuple(Timing(size, _step_s(steps, size - 1)) for size in sizes)

    def configs(self) -> Iterator[SpeculativeConfig]:
        """Yield a config for every drafting method to measure."""
        for method in get_args(Method):
            if self._options.asked is not None and method not in self._options.asked:
                continue
            if method == "early_exit":
                for layer in self._exit_layers_to_try:
                    yield SpeculativeConfig(method=method, exit_layer=layer)
            else:
                yield SpeculativeConfig(method=method, model=self._options.companions.get(method))

    def figures(self, config: SpeculativeConfig, step_s: Sequence[Timing]) -> DrafterFigures:
        """Measure one drafting method.

        Raises:
            ClientError, SetupError: the model has no such drafter.
        """
        most, num_outputs = self._options.most_drafts, self._options.output_tokens
        many = self._runs(config, most, self._prompts, num_outputs)
        (now,) = self._timed((2,))
        few = self._runs(config, 1, self._prompts[:2], min(num_outputs, 2 * self._options.repeats))
        with_room = [step for run in many for step in _with_kv_blocks(run, most)]
        steps = {1: [s for run in few for s in run.steps], most: [s for run in many for s in run.steps]}
        drift = now.seconds / seconds_at(step_s, 2)
        verify_s = _step_s(steps[1], 1) if any(step.num_drafts == 1 for step in steps[1]) else now.seconds
        return DrafterFigures(
            method=config.method,
            exit_layer=config.exit_layer,
            model=config.model,
            acceptance=acceptance_of(step for run in (*many, *few) for step in run.steps) or 0.0,
            share=sum(bool(step.rounds) for step in with_room) / max(1, len(with_room)),
            draft_s=tuple(Timing(k, _draft_s(steps[k], k) / drift) for k in sorted(steps)),
            extra_s=max(0.0, verify_s - now.seconds) / drift,
        )

    def _runs(
        self, config: SpeculativeConfig, num_drafts: int, prompts: Sequence[PromptIds], num_outputs: int
    ) -> list[SpecRun]:
        with closing(self._engine(replace(config, num_speculative_tokens=num_drafts))) as engine:
            runs = [engine.run([prompt], num_outputs) for prompt in prompts]
        for prompt, run in zip(prompts, runs, strict=True):
            assert run.outputs[prompt] == self._plain[prompt][:num_outputs], f"drafts have changed a token: {config}"
        return runs[1:]

    def _engine(
        self, speculation: SpeculativeConfig, wrap_drafter: Callable[[Drafter], Drafter] | None = None
    ) -> SpecEngine:
        length = self._longest if self._load.max_model_len is None else self._load.max_model_len
        return SpecEngine(self._load, 1, length, speculation, wrap_drafter)


def _exit_layers(given: str | None, num_layers: int) -> Sequence[int]:
    if given is None:
        return range(1, num_layers)
    layers = parse_ints("exit_layers", given, 1, 10_000)
    if layers[-1] >= num_layers:
        limit = f"has {layers[-1]}; the model has {num_layers} layers, and an early exit uses fewer"
        raise InvalidParameter("exit_layers", given, limit, f"Give layers from 1 to {num_layers - 1}.")
    return layers


def _num_timed_outputs(sizes: Sequence[int]) -> int:
    """Return the outputs of a run that has room for each size twice; the first token comes from the prefill."""
    return 1 + sizes[-1] + 2 * len(sizes)


def _with_kv_blocks(run: SpecRun, num_drafts: int) -> list[DecodeStep]:
    """Return the steps with more than `num_drafts` tokens left; near the end there is nothing to draft."""
    num_left = sum(step.num_tokens for step in run.steps)
    found: list[DecodeStep] = []
    for step in run.steps:
        if num_left > num_drafts:
            found.append(step)
        num_left -= step.num_tokens
    return found


def _step_s(steps: Sequence[DecodeStep], num_drafts: int) -> float:
    """Return the seconds of the steps with `num_drafts` drafts, drafting excluded."""
    return _lower_quartile([step.step_s - step.draft_s for step in steps if step.num_drafts == num_drafts])


def _draft_s(steps: Sequence[DecodeStep], num_drafts: int) -> float:
    """Return the seconds to propose `num_drafts` drafts; if no lookup found so many, of all steps."""
    of_size = [step.draft_s for step in steps if step.num_drafts == num_drafts]
    return _lower_quartile(of_size or [step.draft_s for step in steps])


def _lower_quartile(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.25))
