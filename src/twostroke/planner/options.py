"""What `twostroke plan` and its --search are asked, and `twostroke replay` of a trace: of an event log everything is in
the log.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from twostroke.config.checks import number, switch, text, whole_number, whole_numbers
from twostroke.config.load import MAX_RANKS
from twostroke.config.pools import MAX_WORKERS
from twostroke.config.scheduler import MAX_PER_STEP
from twostroke.config.sizes import read_sizes
from twostroke.cost.price import check_price_per_hour
from twostroke.errors import InvalidParameter, shown
from twostroke.measure.figure import check_png
from twostroke.measure.workload import Lengths
from twostroke.planner.back_test import LEAST_REQUESTS
from twostroke.planner.devices import find_device
from twostroke.planner.placement import LatencyLimits
from twostroke.simulation.settings import MOST_FACTOR

DEFAULT_PROMPTS = "128,512,2048,8192"
DEFAULT_MAX_TOKENS = 16
"""Output tokens of a request that does not set max_tokens."""
DEFAULT_OTHERS = "L4,A100-80,H100-SXM"

MAX_BYTES = 1 << 50
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The machine, the load, and what else is to be compared."""

    memory: int | None = None
    """Bytes of memory to plan with, such as 24GB; default: the named device's, or what is free on this machine now."""
    device_name: str | None = None
    """Plan for a GPU whose figures are published, such as H100-SXM, instead of this machine. With tensor_parallel_size
    each rank has one."""
    price_per_hour: float | None = None
    """Price of an hour, in any money; adds costs to the output. Without --search it pays for all ranks' devices; with
    --search it pays for one GPU of the named kind, or for this whole machine, whose cores share it."""
    prompt: str | None = None
    """Text of one prompt, or @FILE: print its tokens as the server counts them, KV bytes, time to first token,
    price."""
    chat: bool = False
    """Render the prompt with the chat template, as one message of a user."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Output tokens of that prompt."""
    requests: int | None = None
    """Concurrent users: print whether so many of the longest requests fit (see --max-model-len)."""
    batch: int = 1
    """Requests of a step that verifies drafts, at most max_num_seqs: what binds it with 0 to 8 drafts each."""
    prompt_lengths: str = DEFAULT_PROMPTS
    """Prompt tokens that the time to the first token is asked for, with commas between; those that no request may have
    are left out."""
    context: int | None = None
    """Tokens that each decoding request has; default: 1024, or half of the longest request where that is less."""
    link_bytes_per_s: float | None = None
    """Of the link between two pools, prefill and decode: whether transfers would hide behind prefills."""
    compare: str = DEFAULT_OTHERS
    """Devices to compare with, with commas between; 'none' for none."""
    measured: Path | None = None
    """After a run: the file that its --event-log wrote; what was planned is printed beside it, with the error."""
    png: Path | None = None
    """File to draw the frontier of throughput and latency into, as PNG; its name ends in .png."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        _check_machine(self)
        for name in ("context", "requests", "batch", "max_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, MAX_TOKENS)
        if self.prompt is not None:
            text("prompt", self.prompt)
        switch("chat", self.chat)
        check_png(self.png)
        self._check_prompt()
        check_price_per_hour(self.price_per_hour)
        if self.link_bytes_per_s is not None:
            number("link_bytes_per_s", self.link_bytes_per_s, 0, 1e15, "more than 0", low_open=True)
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
        """The lengths that are asked for."""
        return whole_numbers("prompt_lengths", self.prompt_lengths, 1, MAX_TOKENS)

    @property
    def others(self) -> tuple[str, ...]:
        """The devices to compare with."""
        if self.compare == "none":
            return ()
        return tuple(dict.fromkeys(part.strip() for part in self.compare.split(",") if part.strip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The machine, and how much smaller requests are to be."""

    device_name: str | None = None
    """Of a trace: floors of a GPU whose figures are published, such as H100-SXM, instead of this machine's calibration.
    With tensor_parallel_size each rank has one."""
    memory: int | None = None
    """Of a trace: bytes of memory to plan with, such as 24GB; default: the named device's, or what is free on this
    machine now."""
    trace_divisor: int = 1
    """Of a trace: lengths are divided by this and rounded up, prefixes stay shared; with 64 the block size should be
    8."""

    def __post_init__(self) -> None:
        """Checks what needs no trace."""
        _check_machine(self)
        whole_number("trace_divisor", self.trace_divisor, 1)


def _check_machine(options: PlanOptions | TraceOptions) -> None:
    read_sizes(options, "memory")
    if options.memory is not None:
        whole_number("memory", options.memory, 1, MAX_BYTES)
    if options.device_name is not None:
        find_device(options.device_name)


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
