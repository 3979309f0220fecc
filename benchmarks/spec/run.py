"""`python -m benchmarks spec`: speed-ups of speculative decoding, measured and predicted, and losses of the gate.

Two questions, each answered by alternating pairs of runs of the same prompts without and with drafts:

    fixed    one request, k drafts in every step: is the speed-up the predicted one?
    gate     1 to 64 requests, num_speculative_tokens "auto": is it ever slower than no drafts?

And one that needs no clock:

    alpha    one request, one draft in every step: how many are accepted, and how many would be if they were accepted
             with probability min(1, p/q), which changes tokens?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from tqdm.auto import tqdm

from benchmarks.goals import GATE
from benchmarks.spec.synthetic import SyntheticProposer, predicted_speedup
from benchmarks.spec.watched import ObservedDrafter, Overlap
from twostroke.config.checks import check_choice, check_int
from twostroke.config.load import LoadConfig
from twostroke.config.speculation import AUTO, MAX_AUTO_DRAFTS, MAX_DRAFTS, SpeculativeConfig
from twostroke.errors import InvalidParameter
from twostroke.measure.report import (
    DEFAULT_FOLDER,
    BenchResult,
    check_folder,
    median,
    model_name,
    record,
    settings,
)
from twostroke.measure.spec.measure import (
    PromptIds,
    SpecEngine,
    SpecRun,
    Task,
    prompts,
)
from twostroke.measure.workload_options import check_name
from twostroke.model.model_files import find_model_of
from twostroke.startup.prepared import Drafter, ProvidedDrafter
from twostroke.tables import plain_table, print_table

SYNTHETIC = "synthetic"
MODEL_BASED = ("early_exit", "draft_model", "medusa", "eagle")
"""Methods that draw drafts from a distribution."""
CONTROL = "none"
"""Method of a second engine without drafts, instead of one with the gate: shows the difference of two equal engines."""
KNOWN = (SYNTHETIC, "ngram", *MODEL_BASED, CONTROL)

_LISTS: Mapping[str, tuple[float, float]] = {
    "acceptances": (0.0, 1.0),
    "gate_acceptances": (0.0, 1.0),
    "num_drafts": (1, MAX_DRAFTS),
    "batch_sizes": (1, 1024),
    "temperatures": (0.0, 100.0),
}
"""Options that are lists with commas: the range of their numbers, which are whole if the limits are."""
_REMEDY = "Give numbers with commas between, or '' for none."


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOptions:
    """Methods and workloads of the comparison."""

    methods: str = ",".join(KNOWN)
    """Drafting methods, separated by commas; none: a second engine without drafts, to show the scatter."""
    acceptances: str = "0.5,0.7,0.9"
    """Acceptances of the synthetic proposer, in the runs with fixed numbers of drafts."""
    num_drafts: str = "1,2,3,4,5,6,7,8"
    """Numbers of drafts in every step, in the runs with fixed numbers."""
    gate_acceptances: str = "0,0.3,0.6,0.8,1"
    """Acceptances of the synthetic proposer, in the runs with the gate."""
    batch_sizes: str = "1,4,16,64"
    """Simultaneous requests, in the runs with the gate; empty skips the gate."""
    temperatures: str = "0,0.8,1"
    """Temperatures of the comparison with classical acceptance, for the methods that draft from a model's distribution;
    empty skips the comparison."""
    task: Task = "code"
    """Prompts of all methods but synthetic; use random for a model with random weights."""
    draft_model: str | None = None
    """Model of draft_model; default: the one that comes with the embedded model."""
    exit_layer: int | None = None
    """Exit layer of early_exit; default: the first that the model was trained for."""
    prompt_tokens: int = 128
    output_tokens: int = 128
    """Output tokens of each request."""
    rounds: int = 7
    """Pairs of runs; results are medians."""
    name: str = "spec"
    """Name of the written file."""
    results: Path = DEFAULT_FOLDER
    """Folder for the result."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        for method in self.who:
            if method not in KNOWN:
                limit = f"names {method!r}; known: {', '.join(KNOWN)}"
                raise InvalidParameter("methods", self.methods, limit, "Name some of these with commas between.")
        check_choice("task", self.task, get_args(Task))
        for name in _LISTS:
            self.numbers(name)
        for name in ("prompt_tokens", "output_tokens", "rounds"):
            check_int(name, getattr(self, name), 2, 1 << 20)
        for name, method in (("draft_model", "draft_model"), ("exit_layer", "early_exit")):
            if getattr(self, name) is not None and method not in self.who:
                limit = f"changes nothing: {method!r} is not among the methods ({self.methods})"
                raise InvalidParameter(name, getattr(self, name), limit, "Name the method, or leave it out.")
        check_name(self.name)

    @property
    def who(self) -> tuple[str, ...]:
        """Names of the methods, each once."""
        return tuple(dict.fromkeys(filter(None, self.methods.split(","))))

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return the numbers of an option; empty for an empty string.

        Raises:
            InvalidParameter: an entry is no number, not whole where it has to be, or out of range.
        """
        (low, high), given, found = _LISTS[name], getattr(self, name), list[float]()
        for part in filter(None, given.split(",")):
            try:
                found.append(float(part))
            except ValueError:
                limit = f"has {part!r}, which is no number; from {low:g} to {high:g}"
                raise InvalidParameter(name, given, limit, _REMEDY) from None
            if not low <= found[-1] <= high:
                raise InvalidParameter(name, given, f"has {part}; from {low:g} to {high:g}", _REMEDY)
            if isinstance(low, int) and not found[-1].is_integer():
                limit = f"has {part}, which is no whole number; from {low} to {high}"
                raise InvalidParameter(name, given, limit, _REMEDY)
        return tuple(found)

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of an option with whole numbers."""
        return tuple(map(int, self.numbers(name)))


def run_spec(options: SpecOptions, load: LoadConfig) -> BenchResult:
    """Measure, save and return all figures."""
    check_folder(options.results)
    bench = _SpecBench(options, load)
    fixed = [row for method in options.who for row in bench.fixed(method)]
    gate = [row for batch in options.whole_numbers("batch_sizes") for row in bench.gate(batch)]
    alpha = [row for method in options.who if method in MODEL_BASED for row in bench.alpha(method)]
    return record(
        "python -m benchmarks spec",
        options,
        load,
        config={"load": settings(load), "options": settings(options)},
        workload={"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens},
        results={"model": model_name(load.model), "fixed": fixed, "gate": gate, "alpha": alpha},
        warmup=1,
        repeats=options.rounds,
    )


class _SpecBench:
    """The model, with engines for each drafting method."""

    def __init__(self, options: SpecOptions, load: LoadConfig) -> None:
        files = find_model_of(load)
        self._options, self._load = options, load
        self._vocab_size = files.config().vocab_size
        self._tokenizer = files.tokenizer()
        self._synthetic = SyntheticProposer(self._vocab_size)

    def fixed(self, method: str) -> list[dict[str, Any]]:
        """Measure one request; return rows by k (and, for the synthetic proposer, by acceptance)."""
        options = self._options
        rows: list[dict[str, Any]] = []
        if method == CONTROL:
            return rows
        asked = self._prompts(method, options.rounds + 1)
        plain = self._engine(1, None)
        accepted = options.numbers("acceptances") if method == SYNTHETIC else (None,)
        for k in tqdm(options.whole_numbers("num_drafts"), desc=f"{method}, fixed", leave=False, disable=None):
            engine = self._engine(1, method, k)
            for acceptance in accepted:
                pairs = self._pairs(plain, engine, [[prompt] for prompt in asked], acceptance)
                rows.append(_fixed_row(method, k, acceptance, pairs))
            engine.close()
        plain.close()
        return rows

    def gate(self, batch: int) -> list[dict[str, Any]]:
        """Measure `batch` requests with the gate; return a row per method (and acceptance)."""
        options = self._options
        rows: list[dict[str, Any]] = []
        plain = self._engine(batch, None)
        for method in tqdm(options.who, desc=f"gate, {batch} requests", leave=False, disable=None):
            engine = self._engine(batch, method, AUTO)
            asked = self._prompts(method, batch * (options.rounds + 1))
            groups = [asked[i : i + batch] for i in range(0, len(asked), batch)]
            accepted = options.numbers("gate_acceptances") if method == SYNTHETIC else (None,)
            for acceptance in accepted:
                pairs = self._pairs(plain, engine, groups, acceptance)
                rows.append(_gate_row(method, batch, acceptance, pairs))
            engine.close()
        plain.close()
        return rows

    def alpha(self, method: str) -> list[dict[str, Any]]:
        """Measure one request with one draft per step, so that no draft depends on others; return a row per
        temperature."""
        options = self._options
        temperatures = options.numbers("temperatures")
        if not temperatures:
            return []
        rows: list[dict[str, Any]] = []
        watched: list[ObservedDrafter] = []

        def watch(drafter: Drafter) -> Drafter:
            watched.append(ObservedDrafter(drafter))
            return watched[0]

        asked = self._prompts(method, options.rounds)
        with closing(self._engine(1, method, 1, watch)) as engine:
            for temperature in tqdm(temperatures, desc=f"{method}, alpha", leave=False, disable=None):
                watched[0].overlaps.clear()
                runs = [
                    engine.run([prompt], options.output_tokens, temperature, seed) for seed, prompt in enumerate(asked)
                ]
                rows += _alpha_rows(method, temperature, runs, watched[0].overlaps)
        return rows

    def _prompts(self, method: str, count: int) -> list[PromptIds]:
        task = "random" if method in (SYNTHETIC, CONTROL) else self._options.task
        return prompts(task, count, self._options.prompt_tokens, self._tokenizer, self._vocab_size)

    def _engine(
        self,
        batch: int,
        method: str | None,
        num_drafts: Any = AUTO,
        wrap_drafter: Callable[[Drafter], Drafter] | None = None,
    ) -> SpecEngine:
        length = self._options.prompt_tokens + self._options.output_tokens
        if method in (None, CONTROL):
            return SpecEngine(self._load, batch, length)
        if method == SYNTHETIC:
            speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts)
            return SpecEngine(
                self._load, batch, length, speculation, lambda _: ProvidedDrafter(self._synthetic, "synthetic")
            )
        given: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
        if method == "draft_model" and self._options.draft_model is not None:
            given["model"] = self._options.draft_model
        if method == "early_exit" and self._options.exit_layer is not None:
            given["exit_layer"] = self._options.exit_layer
        return SpecEngine(self._load, batch, length, SpeculativeConfig.read(given), wrap_drafter)

    def _pairs(
        self, plain: SpecEngine, engine: SpecEngine, groups: Sequence[Sequence[PromptIds]], acceptance: float | None
    ) -> list[tuple[SpecRun, SpecRun]]:
        """Return pairs of runs, alternating A B, B A, since the second one finds other caches.

        The first pair warms up. Both must give the same tokens.
        """
        length = self._options.output_tokens
        pairs: list[tuple[SpecRun, SpecRun]] = []
        for index, group in enumerate(groups):
            if acceptance is not None:
                self._synthetic.acceptance = acceptance
                self._synthetic.learn(plain.run(group, length).outputs)
            if index % 2:
                two, one = engine.run(group, length), plain.run(group, length)
            else:
                one, two = plain.run(group, length), engine.run(group, length)
            assert one.outputs == two.outputs, "drafts have changed a token"
            pairs.append((one, two))
        return pairs[1:]


def _ratios(pairs: Sequence[tuple[SpecRun, SpecRun]]) -> dict[str, float]:
    """Return the median speed-up of the pairs, and its 95 % interval (bootstrap)."""
    ratios = np.array([two.rate / one.rate for one, two in pairs])
    drawn = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"speedup": float(np.median(ratios)), "low": float(low), "high": float(high)}


def _fixed_row(
    method: str, num_drafts: int, acceptance: float | None, pairs: Sequence[tuple[SpecRun, SpecRun]]
) -> dict[str, Any]:
    found = [two.acceptance for _, two in pairs if two.acceptance is not None]
    measured = median(found) if found else 0.0
    return {
        "method": method,
        "num_drafts": num_drafts,
        "set_acceptance": acceptance,
        "acceptance": measured,
        "tokens_per_pass": median([two.tokens_per_round or 1.0 for _, two in pairs]),
        "drafts_per_pass": median([two.drafts_per_round for _, two in pairs]),
        "verify_over_plain": median([two.verify_s(1 + num_drafts) / one.verify_s() for one, two in pairs]),
        "draft_over_plain": median([two.draft_s() / one.verify_s() for one, two in pairs]),
        "plain_tokens_per_s": median([one.rate for one, _ in pairs]),
        "predicted": median([predicted_speedup(one, two, num_drafts, two.acceptance or 0.0) for one, two in pairs]),
        **_ratios(pairs),
    }


def _gate_row(
    method: str, batch: int, acceptance: float | None, pairs: Sequence[tuple[SpecRun, SpecRun]]
) -> dict[str, Any]:
    return {
        "method": method,
        "batch": batch,
        "set_acceptance": acceptance,
        "drafts_per_pass": median([two.drafts_per_round for _, two in pairs]),
        "most_drafts": MAX_AUTO_DRAFTS,
        "plain_tokens_per_s": median([one.rate for one, _ in pairs]),
        **_ratios(pairs),
    }


def _alpha_rows(
    method: str, temperature: float, runs: Sequence[SpecRun], overlaps: Sequence[Overlap]
) -> list[dict[str, Any]]:
    """Return one row; none if nothing was drafted."""
    rounds = [a_round for run in runs for step in run.steps for a_round in step.rounds]
    assert len(rounds) == len(overlaps), f"{len(rounds)} drafts were verified, {len(overlaps)} were seen"
    if not rounds:
        return []
    return [
        {
            "method": method,
            "temperature": temperature,
            "num_drafts": len(rounds),
            "alpha": sum(accepted for _, accepted in rounds) / len(rounds),
            "expected": float(np.mean([found.coupled for found in overlaps])),
            "at_least": float(np.mean([found.at_least for found in overlaps])),
            "classical": float(np.mean([found.classical for found in overlaps])),
        }
    ]


def print_spec(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the tables, and the batch size from which each method drafts hardly anything."""
    console = console or Console()
    if found["fixed"]:
        console.print(f"one request, {found['model']}: k drafts in every step", highlight=False)
        figures = ("k", "set a", "a", "E", "verify", "draft", "predicted", "speed-up", "95 %")
        table = plain_table(("drafts",), figures)
        for row in found["fixed"]:
            table.add_row(
                row["method"],
                str(row["num_drafts"]),
                _optional(row["set_acceptance"]),
                f"{row['acceptance']:.2f}",
                f"{row['tokens_per_pass']:.2f}",
                f"{row['verify_over_plain']:.2f}",
                f"{row['draft_over_plain']:.2f}",
                f"{row['predicted']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['low']:.2f}-{row['high']:.2f}",
            )
        print_table(table, console)
    if found["gate"]:
        console.print("the gate: num_speculative_tokens auto", highlight=False)
        table = plain_table(("drafts",), ("requests", "set a", "drafts a pass", "speed-up", "95 %", ""))
        for row in found["gate"]:
            table.add_row(
                row["method"],
                str(row["batch"]),
                _optional(row["set_acceptance"]),
                f"{row['drafts_per_pass']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['low']:.2f}-{row['high']:.2f}",
                "" if row["speedup"] >= GATE else f"below {GATE}",
            )
        print_table(table, console)
        for line in off_from(found["gate"]):
            console.print(line, highlight=False)
    if found["alpha"]:
        console.print("a draft that stands is the token itself; classical acceptance is min(1, p/q)", highlight=False)
        table = plain_table(("drafts",), ("temperature", "looked at", "a", "expected", "at least", "classical"))
        for row in found["alpha"]:
            table.add_row(
                row["method"],
                f"{row['temperature']:g}",
                str(row["num_drafts"]),
                *(f"{row[name]:.3f}" for name in ("alpha", "expected", "at_least", "classical")),
            )
        print_table(table, console)


def off_from(rows: list[Mapping[str, Any]]) -> list[str]:
    """Return for each method and acceptance the smallest number of requests with less than a tenth of a draft per
    pass."""
    lines: list[str] = []
    drafting = [row for row in rows if row["method"] != "none"]
    for method, acceptance in dict.fromkeys((row["method"], row["set_acceptance"]) for row in drafting):
        mine = [row for row in rows if (row["method"], row["set_acceptance"]) == (method, acceptance)]
        off = [row["batch"] for row in mine if row["drafts_per_pass"] < 0.1]
        who = method if acceptance is None else f"{method} at {acceptance:g}"
        lines.append(f"{who}: {f'off from {min(off)} requests on' if off else 'on at every size'}")
    return lines


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
