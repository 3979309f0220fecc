"""Options of `twostroke plan --search`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from twostroke.config.checks import number, whole_number, whole_numbers
from twostroke.config.load import MAX_RANKS
from twostroke.config.pools import MAX_WORKERS
from twostroke.config.scheduler import MAX_PER_STEP
from twostroke.errors import InvalidParameter, shown
from twostroke.measure.workload import Lengths
from twostroke.planner.back_test import LEAST_REQUESTS
from twostroke.planner.placement import LatencyLimits
from twostroke.simulation.settings import MOST_FACTOR

MAX_RATE_FACTORS = 32
MAX_REQUESTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The workload, the limits, and the candidates of a placement search."""

    search: bool = False
    """Search prefill : decode workers, ranks and token budgets for the most requests a second, per GPU or core, that
    keep --ttft-target-s and --tpot-target-s, in simulated time. One process without a split is always a candidate.
    --price-per-hour is then of one GPU, or of this whole machine."""
    workload: Path | None = None
    """A Mooncake trace, or an event log that serve --event-log wrote; or give --request-rate with --input-len and
    --output-len instead."""
    trace_divisor: int = 1
    """Divide the lengths of a trace by this."""
    request_rate: float | None = None
    """Requests a second that arrive at random."""
    input_len: str = "512"
    """Prompt tokens of a request: a number, uniform:LOW:HIGH or exponential:MEAN."""
    output_len: str = "128"
    """Output tokens of a request, in the same forms."""
    num_requests: int = 200
    """Requests to simulate, 10 and more: the first of a trace or log, or this many at --request-rate."""
    seed: int = 0
    """Seed of arrivals and lengths at --request-rate."""
    ttft_target_s: float = 1.0
    """Limit of the time to the first token, in seconds."""
    tpot_target_s: float = 0.05
    """Limit of the mean time per later token, in seconds."""
    attainment: float = 0.99
    """Share of the requests that must keep both limits."""
    budgets: str = "256,512,1024,2048"
    """Values of max_num_batched_tokens to try, with commas between."""
    ranks: str | None = None
    """Ranks of a worker to try (tensor parallel), with commas between; default: 1,2,4 on a named device, and on this
    machine those that are calibrated."""
    calibrations: str = ""
    """Files that `twostroke calibrate --output` wrote with other --threads or ranks, with commas between: each is a
    kind of worker to try beside the calibration of this machine."""
    max_devices: int | None = None
    """Most GPUs, or cores of this machine, of a candidate; default: 8 GPUs, or all cores."""
    max_workers: int = 4
    """Most workers of a split, prefill and decode together."""
    rate_factors: str = "0.25,0.5,0.75,1,1.5,2,3,4,6,8,12,16,24,32"
    """Rates to try, as multiples of the workload's own, with commas between; a candidate goes up until it misses a
    limit."""
    runners_up: int = 4
    """Candidates to show beside the winner."""

    def __post_init__(self) -> None:
        """Check the values that need no model."""
        if not self.search:
            self._refuse_without_search()
            return
        for name in ("ttft_target_s", "tpot_target_s"):
            number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000 seconds", low_open=True)
        number("attainment", self.attainment, 0, 1, "more than 0 and at most 1 (a share)", low_open=True)
        whole_number("trace_divisor", self.trace_divisor, 1)
        whole_number("num_requests", self.num_requests, LEAST_REQUESTS, MAX_REQUESTS)
        whole_number("seed", self.seed, 0, 2**32 - 1)
        whole_number("max_workers", self.max_workers, 1, MAX_WORKERS)
        whole_number("runners_up", self.runners_up, 0, 1000)
        if self.max_devices is not None:
            whole_number("max_devices", self.max_devices, 1, 1 << 20)
        _ = (self.token_budgets, self.rank_counts, self.factors)
        self._check_workload()

    @property
    def limits(self) -> LatencyLimits:
        """The limits to keep."""
        return LatencyLimits(
            ttft_target_s=self.ttft_target_s, tpot_target_s=self.tpot_target_s, attainment=self.attainment
        )

    @property
    def token_budgets(self) -> tuple[int, ...]:
        """The token budgets to try."""
        return whole_numbers("budgets", self.budgets, 1, MAX_PER_STEP)

    @property
    def rank_counts(self) -> tuple[int, ...] | None:
        """The numbers of ranks to try; None: the default."""
        return None if self.ranks is None else whole_numbers("ranks", self.ranks, 1, MAX_RANKS)

    @property
    def factors(self) -> tuple[float, ...]:
        """The multiples of the workload's rate, rising, without duplicates."""
        found: set[float] = set()
        for part in filter(None, (part.strip() for part in self.rate_factors.split(","))):
            try:
                factor = float(part)
            except ValueError as error:
                raise InvalidParameter(
                    "rate_factors", self.rate_factors, f"has {shown(part)}, which is no number"
                ) from error
            number("rate_factors", factor, 0, MOST_FACTOR, f"more than 0 and at most {MOST_FACTOR}", low_open=True)
            found.add(factor)
        if not 0 < len(found) <= MAX_RATE_FACTORS:
            raise InvalidParameter("rate_factors", self.rate_factors, f"must name 1 to {MAX_RATE_FACTORS} rates")
        return tuple(sorted(found))

    @property
    def calibration_files(self) -> tuple[Path, ...]:
        """The calibration files besides the one of this machine."""
        return tuple(Path(part.strip()) for part in self.calibrations.split(",") if part.strip())

    def lengths(self, name: str) -> Lengths:
        """Return the distribution in `input_len` or `output_len`; a number alone is a fixed number of tokens."""
        text: str = getattr(self, name)
        return Lengths.parse(f"fixed:{text}" if text.strip().isdecimal() else text, name)

    def _check_workload(self) -> None:
        _ = (self.lengths("input_len"), self.lengths("output_len"))
        if self.workload is None and self.request_rate is None:
            remedy = "Add --workload FILE, or --request-rate 2 --input-len 512 --output-len 128."
            raise InvalidParameter("search", True, "needs a workload", remedy)
        if self.workload is None:
            if self.trace_divisor != 1:
                raise InvalidParameter("trace_divisor", self.trace_divisor, "changes nothing without a trace")
            limit = "more than 0 and at most 1000000 requests a second"
            number("request_rate", self.request_rate, 0, 1e6, limit, low_open=True)
            return
        self._refuse(("request_rate", "input_len", "output_len", "seed"), "changes nothing beside a workload")
        if not self.workload.is_file():  # before a calibration is asked for, which takes minutes
            limit = "is a folder" if self.workload.is_dir() else "is no file"
            raise InvalidParameter("workload", str(self.workload), limit, "Give a Mooncake trace or an event log.")

    def _refuse_without_search(self) -> None:
        names = tuple(field.name for field in fields(self) if field.name != "search")
        self._refuse(names, "changes nothing without a search", "Add --search, or leave it out.")

    def _refuse(self, names: tuple[str, ...], limit: str, remedy: str = "Leave it out.") -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise InvalidParameter(name, getattr(self, name), limit, remedy)
