"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from twostroke.config.checks import check_bool, check_choice, check_int, check_number
from twostroke.config.sizes import seconds
from twostroke.errors import InvalidParameter

Policy = Literal["fcfs", "priority", "fair"]
Batching = Literal["continuous", "static"]
Mixing = Literal["mixed", "prefill_first"]

MAX_PER_STEP = 1 << 24
"""Most tokens or requests per step; a larger setting is a typing error."""

MAX_AGEING_S = 1e6
"""Upper limit of ageing_s: beyond it, priority x ageing_s leaves float64 no digits for the time of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings that decide which requests run in a step, and with how many tokens."""

    max_num_batched_tokens: int = 512
    """Token budget of a step, shared by prefill chunks and decodes."""
    max_num_seqs: int = 64
    """Most running requests."""
    policy: Policy = "fcfs"
    """Order of the queue: first come first served, by priority (lower value first) with ageing, or fair among tenants,
    where the tenant served least goes first."""
    ageing_s: float = 10.0
    """Seconds of waiting that are worth one level of priority under the priority policy."""
    itl_slo: str | float | None = None
    """Limit of the time between two tokens of a request, such as 50ms. Each step takes as many prompt tokens as fit
    into it (in 99 of 100 steps), by the step times that `calibrate` fitted, or else by the machine's limits. Default:
    no limit but max_num_batched_tokens."""
    ttft_slo: str | float | None = None
    """Limit of the time to the first token, such as 300ms. A prompt that cannot meet it gives way to those that can,
    within a bound; /metrics counts the requests that met it. Without itl_slo, steps take only as many prompt tokens as
    meet it. Default: no limit."""
    flex_slowdown: float = 0.08
    """Share by which requests of service tier "flex" may make a step of other requests longer, and the wait of a
    request that arrives during one of their steps."""
    fair_prompt_weight: float = 1.0
    """Weight of a computed prompt token under the fair policy."""
    fair_output_weight: float = 2.0
    """Weight of an output token under the fair policy."""
    enable_chunked_prefill: bool = True
    """Baseline switch: False computes each prompt in one step, over the budget when it must."""
    async_scheduling: bool | None = None
    """Schedule and launch a step while the previous one runs; sampled tokens stay on the device. Default: on a GPU,
    unless another setting excludes it. On a CPU it only delays tokens by a step."""
    batching: Batching = "continuous"
    """Baseline switch: 'static' admits a batch only after the last one has ended completely."""
    mixing: Mixing = "mixed"
    """Baseline switch: 'prefill_first' never mixes prefill and decode in one step; prompts go before decodes."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            check_int(name, getattr(self, name), 1, MAX_PER_STEP)
        for name, allowed in (("policy", Policy), ("batching", Batching), ("mixing", Mixing)):
            check_choice(name, getattr(self, name), get_args(allowed))
        limit = f"more than 0 and at most {MAX_AGEING_S:g} (seconds)"
        check_number("ageing_s", self.ageing_s, 0, MAX_AGEING_S, limit, low_open=True)
        for name in ("fair_prompt_weight", "fair_output_weight"):
            check_number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000", low_open=True)
        check_number("flex_slowdown", self.flex_slowdown, 0, 10, "at least 0 and at most 10 (a share)")
        check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        self._check_slos()

    @property
    def itl_slo_s(self) -> float | None:
        """itl_slo in seconds; None: no limit."""
        return None if self.itl_slo is None else seconds("itl_slo", self.itl_slo)

    @property
    def ttft_slo_s(self) -> float | None:
        """ttft_slo in seconds; None: no limit."""
        return None if self.ttft_slo is None else seconds("ttft_slo", self.ttft_slo)

    @property
    def serves_background(self) -> bool:
        """Whether background work can run together with foreground work, a little per step."""
        return self.enable_chunked_prefill and self.batching == "continuous" and self.mixing == "mixed"

    @property
    def has_slo(self) -> bool:
        """Whether a time limit bounds the steps."""
        return self.itl_slo is not None or self.ttft_slo is not None

    def _check_slos(self) -> None:
        """Check the time limits, and the settings that they need."""
        for name, value in (("itl_slo", self.itl_slo_s), ("ttft_slo", self.ttft_slo_s)):
            if value is not None and not (self.enable_chunked_prefill and self.mixing == "mixed"):
                limit = "needs chunked prefill, mixed with decodes"
                raise InvalidParameter(name, getattr(self, name), limit, "Leave it out, or leave these on.")
