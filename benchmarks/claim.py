"""A claim: one figure predicted before it was measured, and the rule by which the two are held against each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from twostroke.config.checks import switch, whole_number
from twostroke.config.load import MAX_THREADS, LoadConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.hardware import Hardware
from twostroke.measure.figure import Draw
from twostroke.measure.report import last_part, model_name
from twostroke.measure.workload import Lengths, SyntheticSpec, Workload, of_lengths, synthetic
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table


class NotOnThisMachine(SetupError):
    """What a reproduction is about is not here: "all" leaves it out, and asking for it by name is refused."""


DEFAULT_TRACES = Path("traces")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions:
    """How results of the field are reproduced."""

    full: bool = False
    """The sizes that published results are made with; otherwise a quick look at small ones."""
    model: str = "embedded"
    """Model folder for everything that needs a model."""
    label: str | None = None
    """Suffix of the result's file name, as in doctor-loads-LABEL.json; default: the model's file name."""
    threads: int | None = None
    """Threads of the model's operators; default: the processors this process may use."""
    traces: Path = DEFAULT_TRACES
    """Folder with the Mooncake traces, for the results that replay them."""
    results: Path = Path("benchmarks/results")
    """Where JSON and PNG go; small sizes are saved beside the full ones as NAME-small."""
    plots: bool = True
    """Draw a PNG beside each JSON (needs the extra 'bench')."""
    with_model: bool = True
    """False leaves out what needs a model, and keeps the counters, which are exact."""
    seed: int = 0
    """Of every workload."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        for name in ("full", "plots", "with_model"):
            switch(name, getattr(self, name))
        if self.label is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", self.label):
            limit = "must be letters, digits, dots, dashes and underscores: it becomes part of a file name"
            raise InvalidParameter("label", self.label, limit)
        if self.threads is not None:
            whole_number("threads", self.threads, 1, MAX_THREADS)
        whole_number("seed", self.seed, 0, 2**32 - 1)

    @property
    def model_name(self) -> str:
        """For results, which say what was measured and not where it lay."""
        return model_name(self.model)

    @property
    def traces_name(self) -> str:
        """The same of the folder with the traces."""
        return last_part(self.traces)

    def load(self, max_model_len: int) -> LoadConfig:
        """The model, with a context of that many tokens."""
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

    def of_lengths(self, lengths: Sequence[tuple[int, int]], *, seed: int = 0) -> Workload:
        """Return requests of these lengths of prompt and output; `seed` is added to the command's own."""
        return of_lengths(lengths, vocab_size=self.vocab_size(), seed=self.seed + seed)

    def vocab_size(self) -> int:
        """Token ids that workloads may use: the model's, or any when there is none."""
        if not self.with_model:
            return 4096
        return find_model(self.model).config().vocab_size


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure."""

    what: str
    predicted: float | None
    """None when nothing was predicted: the figure is only reported."""
    measured: float
    rule: str
    """What has to hold, in words."""
    holds: bool | None
    """None when nothing has to."""

    @classmethod
    def equal(cls, what: str, predicted: int, measured: int) -> Claim:
        """Counters: the very same number."""
        return cls(what, predicted, measured, "equal", predicted == measured)

    @classmethod
    def within(cls, what: str, predicted: float, measured: float, share: float) -> Claim:
        """Off by at most this share of the prediction."""
        slack = 1e-12 * abs(predicted)  # 2.1 is within 5 % of 2.0, whatever floats make of it
        holds = abs(measured - predicted) <= share * abs(predicted) + slack
        return cls(what, predicted, measured, f"within {share:.2g}" if share < 0.01 else f"within {share:.0%}", holds)

    @classmethod
    def at_least(cls, what: str, bound: float, measured: float, predicted: float | None = None) -> Claim:
        """A lower bound, perhaps beside a prediction."""
        return cls(what, predicted, measured, f">= {bound:g}", measured >= bound)

    @classmethod
    def at_most(cls, what: str, bound: float, measured: float, predicted: float | None = None) -> Claim:
        """An upper bound, perhaps beside a prediction."""
        return cls(what, predicted, measured, f"<= {bound:g}", measured <= bound)

    def judged(self, when: bool) -> Claim:
        """The same claim; only reported unless `when`. Times of small runs are a look, they prove nothing."""
        return self if when else replace(self, rule="reported", holds=None)

    @classmethod
    def reported(cls, what: str, measured: float, predicted: float | None = None) -> Claim:
        """Nothing has to hold."""
        return cls(what, predicted, measured, "reported", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A result of the field, reproduced: the claims, and what they rest on."""

    claims: tuple[Claim, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Everything else worth keeping in the JSON."""
    remarks: tuple[str, ...] = ()
    """What was left out, and why."""
    title: str = ""
    """Where it depends on the size; empty: that of the study."""
    draw: Draw | None = None
    figure_size: tuple[float, float] = (7.0, 4.0)
    """Inches."""
    warmup: int = 0
    repeats: int = 1
    hardware: Hardware | None = None
    """What it was measured on, where that is more than this machine's processors."""

    @property
    def holds(self) -> bool:
        """Whether no claim failed."""
        return all(claim.holds is not False for claim in self.claims)


def table(title: str, claims: Sequence[Claim]) -> Table:
    """Prediction beside measurement, for people."""
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
