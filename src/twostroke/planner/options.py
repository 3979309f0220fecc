"""Options of `twostroke plan`, of its --search, and of `twostroke replay` for a trace.

The replay of an event log needs none: the log holds everything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from twostroke.config.checks import check_bool, check_int, check_number, check_text, parse_ints
from twostroke.config.load import MAX_RANKS
from twostroke.config.pools import MAX_WORKERS
from twostroke.config.scheduler import MAX_PER_STEP
from twostroke.config.sizes import read_sizes
from twostroke.cost.price import check_price_per_hour
from twostroke.errors import InvalidParameter, shown
from twostroke.measure.figure import check_png
from twostroke.measure.workload import Lengths
from twostroke.planner.back_test import MIN_REQUESTS
from twostroke.planner.devices import find_device
from twostroke.planner.placement import LatencyLimits
from twostroke.simulation.settings import MAX_FACTOR

DEFAULT_PROMPTS = "128,512,2048,8192"
DEFAULT_MAX_TOKENS = 16
"""Output tokens of a request that does not set max_tokens."""
DEFAULT_OTHERS = "L4,A100-80,H100-SXM"

MAX_BYTES = 1 << 50
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Machine, load, and comparisons of a plan."""

    memory: int | None = None
    """Bytes of memory to plan with, such as 24GB; default: the memory of the named device, or what is free on this
    machine."""
    device_name: str | None = None
    """Plan for a GPU with published figures, such as H100-SXM, instead of this machine; with tensor_parallel_size, one
    per rank."""
    price_per_hour: float | None = None
    """Price of an hour, in any currency; adds costs to the output. Without --search it pays for all ranks' devices;
    with --search it pays for one GPU of the named kind, or for this whole machine, whose cores share it."""
    prompt: str | None = None
    """Text of one prompt, or @FILE: print its tokens as the server counts them, KV bytes, time to first token and
    price."""
    chat: bool = False
    """Render the prompt with the chat template, as one user message."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Output tokens of that prompt."""
    requests: int | None = None
    """Concurrent users: print whether that many of the longest requests fit (see --max-model-len)."""
    batch: int = 1
    """Requests in a step that verifies drafts, at most max_num_seqs; print its bound with 0 to 8 drafts each."""
    prompt_lengths: str = DEFAULT_PROMPTS
    """Prompt lengths for the time to first token, comma-separated; lengths above the longest request are left out."""
    context: int | None = None
    """Context tokens of each decoding request; default: 1024, or half of the longest request if that is less."""
    link_bytes_per_s: float | None = None
    """Bandwidth of the link between a prefill and a decode pool, in bytes/s; print whether transfers would hide behind
    prefills."""
    compare: str = DEFAULT_OTHERS
    """Devices to compare with, comma-separated; 'none' for none."""
    measured: Path | None = None
    """Event log that a run wrote (--event-log); print the measured figures and the error of the plan."""
    png: Path | None = None
    """PNG file for a plot of the frontier of throughput and latency; its name ends in .png."""

    def __post_init__(self) -> None:
        """Check everything that needs no model."""
        _check_machine(self)
        for name in ("context", "requests", "batch", "max_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, MAX_TOKENS)
        if self.prompt is not None:
            check_text("prompt", self.prompt)
        check_bool("chat", self.chat)
        check_png(self.png)
        self._check_prompt()
        check_price_per_hour(self.price_per_hour)
        if self.link_bytes_per_s is not None:
            check_number("link_bytes_per_s", self.link_bytes_per_s, 0, 1e15, "more than 0", low_open=True)
        _ = self.prompts
        for name in self.others:
            find_device(name, "compare")

    def _check_prompt(self) -> None:
        if self.prompt is not None:
            return
        if self.chat:
            raise InvalidParameter("chat", True, "changes nothing without a prompt", "Give --prompt.")
        if self.max_tokens != DEFAULT_MAX_TOKENS:
            raise InvalidParameter("max_tokens", self.max_tokens, "changes nothing without a prompt", "Give --prompt.")

    @property
    def prompts(self) -> tuple[int, ...]:
        """Prompt lengths to plan for."""
        return parse_ints("prompt_lengths", self.prompt_lengths, 1, MAX_TOKENS)

    @property
    def others(self) -> tuple[str, ...]:
        """Devices to compare with."""
        if self.compare == "none":
            return ()
        return tuple(dict.fromkeys(part.strip() for part in self.compare.split(",") if part.strip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Machine for a trace, and the divisor of its lengths."""

    device_name: str | None = None
    """Traces: GPU with published figures, such as H100-SXM, whose floors replace this machine's calibration; with
    tensor_parallel_size, one per rank."""
    memory: int | None = None
    """Traces: bytes of memory to plan with, such as 24GB; default: the memory of the named device, or what is free on
    this machine."""
    trace_divisor: int = 1
    """Traces: divide lengths by this and round up; prefixes stay shared. With 64 the block size should be 8."""

    def __post_init__(self) -> None:
        """Check everything that needs no trace."""
        _check_machine(self)
        check_int("trace_divisor", self.trace_divisor, 1)


def _check_machine(options: PlanOptions | TraceOptions) -> None:
    read_sizes(options, "memory")
    if options.memory is not None:
        check_int("memory", options.memory, 1, MAX_BYTES)
    if options.device_name is not None:
        find_device(options.device_name)


MAX_RATE_FACTORS = 32
MAX_REQUESTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Workload, latency limits and candidates of a placement search."""

    search: bool = False
    """Search prefill : decode workers, ranks and token budgets for the most requests a second, per GPU or core, that
    keep --ttft-target-s and --tpot-target-s, in simulated time. One process without a split is always a candidate.
    --price-per-hour is then of one GPU, or of this whole machine."""
    workload: Path | None = None
    """Mooncake trace, or event log of serve --event-log; or give --request-rate with --input-len and --output-len
    instead."""
    trace_divisor: int = 1
    """Divide the lengths of a trace by this."""
    request_rate: float | None = None
    """Mean number of requests a second, with random arrivals."""
    input_len: str = "512"
    """Prompt tokens of a request: a number, uniform:LOW:HIGH or exponential:MEAN."""
    output_len: str = "128"
    """Output tokens of a request, in the same forms."""
    num_requests: int = 200
    """Number of requests to simulate, at least 10: the first of a trace or log, or as many at --request-rate."""
    seed: int = 0
    """Seed of arrivals and lengths at --request-rate."""
    ttft_target_s: float = 1.0
    """Limit of the time to the first token, in seconds."""
    tpot_target_s: float = 0.05
    """Limit of the mean time per later token, in seconds."""
    attainment: float = 0.99
    """Share of the requests that must keep both limits."""
    budgets: str = "256,512,1024,2048"
    """Values of max_num_batched_tokens to try, comma-separated."""
    ranks: str | None = None
    """Tensor-parallel ranks of a worker to try, comma-separated; default: 1,2,4 on a named device, and the calibrated
    ones on this machine."""
    calibrations: str = ""
    """Files of `twostroke calibrate --output` with other --threads or ranks, comma-separated; each is a kind of worker
    to try besides the calibration of this machine."""
    max_devices: int | None = None
    """Maximum GPUs, or cores of this machine, of a candidate; default: 8 GPUs, or all cores."""
    max_workers: int = 4
    """Maximum workers of a split, prefill and decode together."""
    rate_factors: str = "0.25,0.5,0.75,1,1.5,2,3,4,6,8,12,16,24,32"
    """Rates to try, as multiples of the workload's, comma-separated; a candidate goes up until it misses a limit."""
    runners_up: int = 4
    """Number of candidates to show besides the winner."""

    def __post_init__(self) -> None:
        """Check everything that needs no model."""
        if not self.search:
            self._refuse_without_search()
            return
        for name in ("ttft_target_s", "tpot_target_s"):
            check_number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000 seconds", low_open=True)
        check_number("attainment", self.attainment, 0, 1, "more than 0 and at most 1 (a share)", low_open=True)
        check_int("trace_divisor", self.trace_divisor, 1)
        check_int("num_requests", self.num_requests, MIN_REQUESTS, MAX_REQUESTS)
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_int("max_workers", self.max_workers, 1, MAX_WORKERS)
        check_int("runners_up", self.runners_up, 0, 1000)
        if self.max_devices is not None:
            check_int("max_devices", self.max_devices, 1, 1 << 20)
        _ = (self.token_budgets, self.rank_counts, self.factors)
        self._check_workload()

    @property
    def limits(self) -> LatencyLimits:
        """Latency limits to keep."""
        return LatencyLimits(
            ttft_target_s=self.ttft_target_s, tpot_target_s=self.tpot_target_s, attainment=self.attainment
        )

    @property
    def token_budgets(self) -> tuple[int, ...]:
        """Token budgets to try."""
        return parse_ints("budgets", self.budgets, 1, MAX_PER_STEP)

    @property
    def rank_counts(self) -> tuple[int, ...] | None:
        """Numbers of ranks to try; None: the default."""
        return None if self.ranks is None else parse_ints("ranks", self.ranks, 1, MAX_RANKS)

    @property
    def factors(self) -> tuple[float, ...]:
        """Multiples of the workload's rate, rising, without duplicates."""
        found: set[float] = set()
        for part in filter(None, (part.strip() for part in self.rate_factors.split(","))):
            try:
                factor = float(part)
            except ValueError as error:
                raise InvalidParameter(
                    "rate_factors", self.rate_factors, f"has {shown(part)}, which is no number"
                ) from error
            check_number("rate_factors", factor, 0, MAX_FACTOR, f"more than 0 and at most {MAX_FACTOR}", low_open=True)
            found.add(factor)
        if not 0 < len(found) <= MAX_RATE_FACTORS:
            raise InvalidParameter("rate_factors", self.rate_factors, f"must name 1 to {MAX_RATE_FACTORS} rates")
        return tuple(sorted(found))

    @property
    def calibration_files(self) -> tuple[Path, ...]:
        """Calibration files besides the one of this machine."""
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
            check_number("request_rate", self.request_rate, 0, 1e6, limit, low_open=True)
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
