"""Claims: a figure predicted before it was measured, and the rule that compares the two."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from twostroke.config.checks import check_bool, check_int
from twostroke.config.load import MAX_THREADS, LoadConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.hardware import Hardware
from twostroke.measure.figure import Draw
from twostroke.measure.report import last_part, model_name
from twostroke.measure.workload import Lengths, SyntheticSpec, Workload, synthetic, workload_of_lengths
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table


class MissingHardware(SetupError):
    """Error for a reproduction that this machine lacks something for: "all" skips it, asking for it by name is
    refused."""


DEFAULT_TRACES = Path("traces")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions:
    """Options of the reproductions of results of the field."""

    full: bool = False
    """Use the sizes of published results; otherwise a quick run with small ones."""
    model: str = "embedded"
    """Model folder for everything that needs a model."""
    label: str | None = None
    """Suffix of the result's file name, as in doctor-loads-LABEL.json; default: the model's file name."""
    threads: int | None = None
    """Threads of the model's operators; default: the processors this process may use."""
    traces: Path = DEFAULT_TRACES
    """Folder with the Mooncake traces, for the results that replay them."""
    results: Path = Path("benchmarks/results")
    """Folder for JSON and PNG; small sizes are saved next to the full ones as NAME-small."""
    plots: bool = True
    """Draw a PNG for each JSON (needs the extra 'bench')."""
    with_model: bool = True
    """Run what needs a model; False only keeps the counters, which are exact."""
    seed: int = 0
    """Seed of every workload."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        for name in ("full", "plots", "with_model"):
            check_bool(name, getattr(self, name))
        if self.label is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", self.label):
            limit = "must be letters, digits, dots, dashes and underscores: it becomes part of a file name"
            raise InvalidParameter("label", self.label, limit)
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS)
        check_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def model_name(self) -> str:
        """Name of the model for results, without its place."""
        return model_name(self.model)

    @property
    def traces_name(self) -> str:
        """Name of the folder with the traces for results, without its place."""
        return last_part(self.traces)

    def load(self, max_model_len: int) -> LoadConfig:
        """Return the settings of the model, with a context of `max_model_len` tokens."""
        return LoadConfig(model=self.model, threads=self.threads, max_model_len=max_model_len)

    def drawn(
        self, count: int, prompts: Lengths, outputs: Lengths, *, rate: float | None = None, seed: int = 0
    ) -> Workload:
        """Return random requests; `seed` is added to the command's own.

        Args:
            count: number of requests.
            prompts: lengths of prompts.
            outputs: lengths of outputs.
            rate: arrivals per second; None: all at once.
            seed: another workload for each.
        """
        return synthetic(
            SyntheticSpec(
                num_requests=count,
                prompt_lengths=prompts,
                output_lengths=outputs,
                request_rate=rate,
                vocab_size=self.vocab_size(),
                seed=self.seed + seed,
            )
        )

    def workload_of_lengths(self, lengths: Sequence[tuple[int, int]], *, seed: int = 0) -> Workload:
        """Return requests with these lengths of prompt and output; `seed` is added to the command's own."""
        return workload_of_lengths(lengths, vocab_size=self.vocab_size(), seed=self.seed + seed)

    def vocab_size(self) -> int:
        """Return the number of token ids that workloads may use: the model's, or 4096 without a model."""
        if not self.with_model:
            return 4096
        return find_model(self.model).config().vocab_size


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure, its prediction and its rule."""

    what: str
    predicted: float | None
    """Predicted figure; None: the measured one is only reported."""
    measured: float
    rule: str
    """Condition in words."""
    holds: bool | None
    """Whether the condition holds; None without one."""

    @classmethod
    def equal(cls, what: str, predicted: int, measured: int) -> Claim:
        """Return a claim about a counter: equal to the prediction."""
        return cls(what, predicted, measured, "equal", predicted == measured)

    @classmethod
    def within(cls, what: str, predicted: float, measured: float, share: float) -> Claim:
        """Return a claim of a relative error of at most `share`."""
        slack = 1e-12 * abs(predicted)  # 2.1 is within 5 % of 2.0, despite rounding
        holds = abs(measured - predicted) <= share * abs(predicted) + slack
        return cls(what, predicted, measured, f"within {share:.2g}" if share < 0.01 else f"within {share:.0%}", holds)

    @classmethod
    def at_least(cls, what: str, bound: float, measured: float, predicted: float | None = None) -> Claim:
        """Return a claim of a lower bound, optionally with a prediction."""
        return cls(what, predicted, measured, f">= {bound:g}", measured >= bound)

    @classmethod
    def at_most(cls, what: str, bound: float, measured: float, predicted: float | None = None) -> Claim:
        """Return a claim of an upper bound, optionally with a prediction."""
        return cls(what, predicted, measured, f"<= {bound:g}", measured <= bound)

    def judged(self, when: bool) -> Claim:
        """Return this claim, only reported unless `when`: times of small runs prove nothing."""
        return self if when else replace(self, rule="reported", holds=None)

    @classmethod
    def reported(cls, what: str, measured: float, predicted: float | None = None) -> Claim:
        """Return a figure without a condition."""
        return cls(what, predicted, measured, "reported", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A reproduced result of the field: the claims and their data."""

    claims: tuple[Claim, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further data for the JSON."""
    remarks: tuple[str, ...] = ()
    """Skipped parts, with reasons."""
    title: str = ""
    """Title, if it depends on the size; empty: that of the study."""
    draw: Draw | None = None
    figure_size: tuple[float, float] = (7.0, 4.0)
    """Width and height in inches."""
    warmup: int = 0
    repeats: int = 1
    hardware: Hardware | None = None
    """Measured hardware, if it is more than this machine's processors."""

    @property
    def holds(self) -> bool:
        """Whether no claim failed."""
        return all(claim.holds is not False for claim in self.claims)


def table(title: str, claims: Sequence[Claim]) -> Table:
    """Return a table of predictions and measurements."""
    rows = plain_table(("figure",), ("predicted", "measured", "off by"), title)
    rows.add_column("rule")
    rows.add_column("")
    for claim in claims:
        off = "" if not claim.predicted else f"{claim.measured / claim.predicted - 1:+.1%}"
        verdict = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: ""}[claim.holds]
        predicted = "" if claim.predicted is None else _number(claim.predicted)
        rows.add_row(claim.what, predicted, _number(claim.measured), off, claim.rule, verdict)
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:.4g}"
