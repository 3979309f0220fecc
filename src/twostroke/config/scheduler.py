"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from twostroke.config.checks import number, one_of, switch, whole_number
from twostroke.config.sizes import seconds
from twostroke.errors import InvalidParameter

Policy = Literal["fcfs", "priority", "fair"]
Batching = Literal["continuous", "static"]
Mixing = Literal["mixed", "prefill_first"]

MAX_PER_STEP = 1 << 24
"""Tokens or requests; more in one step is a slip of the keyboard."""

MAX_AGEING_S = 1e6
"""Beyond, priority x ageing_s leaves no digits for the time of arrival beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step, and how much of them."""

    max_num_batched_tokens: int = 512
    """Token budget of a step, shared by prefill chunks and decodes."""
    max_num_seqs: int = 64
    """Most requests running at once."""
    policy: Policy = "fcfs"
    """Order of the queue: first come first served, by priority (lower value first) with ageing, or fair among tenants:
    who was served least goes first."""
    ageing_s: float = 10.0
    """Under the priority policy one level of priority is worth this many seconds of waiting."""
    itl_slo: str | float | None = None
    """Limit of the time between two tokens of a request, such as 50ms: each step takes as many prompt tokens as keep it
    (99 of 100 steps), by the model of step times that `calibrate` fitted, or else by the machine's limits. Default: no
    limit but max_num_batched_tokens."""
    ttft_slo: str | float | None = None
    """Limit of the time to the first token, such as 300ms. A prompt that cannot keep it gives way to those that can,
    within a bound; /metrics counts the requests that kept it. Without itl_slo, steps take no more prompt tokens than
    keep it. Default: no limit."""
    flex_slowdown: float = 0.08
    """Requests of service tier "flex" take what the others leave: they may make a step of the others longer by this
    share, and the wait of one that comes in the middle of theirs."""
    fair_prompt_weight: float = 1.0
    """Under the fair policy, what a computed prompt token counts."""
    fair_output_weight: float = 2.0
    """The same for an output token."""
    enable_chunked_prefill: bool = True
    """Baseline switch: False computes each prompt in one step, over the budget when it must."""
    async_scheduling: bool | None = None
    """Decide and launch a step while the one before it runs; the device hands the tokens on to itself. Default: on a
    GPU, where nothing speaks against it. On a CPU, which computes while it is asked, tokens only come a step later."""
    batching: Batching = "continuous"
    """Baseline switch: 'static' admits a batch only when the last one has ended as a whole."""
    mixing: Mixing = "mixed"
    """Baseline switch: 'prefill_first' never puts both strokes into one pass; prompts go before decodes."""

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            whole_number(name, getattr(self, name), 1, MAX_PER_STEP)
        for name, allowed in (("policy", Policy), ("batching", Batching), ("mixing", Mixing)):
            one_of(name, getattr(self, name), get_args(allowed))
        limit = f"more than 0 and at most {MAX_AGEING_S:g} (seconds)"
        number("ageing_s", self.ageing_s, 0, MAX_AGEING_S, limit, low_open=True)
        for name in ("fair_prompt_weight", "fair_output_weight"):
            number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000", low_open=True)
        number("flex_slowdown", self.flex_slowdown, 0, 10, "at least 0 and at most 10 (a share)")
        switch("enable_chunked_prefill", self.enable_chunked_prefill)
        if self.async_scheduling is not None:
            switch("async_scheduling", self.async_scheduling)
        self._check_slos()

    @property
    def itl_slo_s(self) -> float | None:
        """In seconds."""
        return None if self.itl_slo is None else seconds("itl_slo", self.itl_slo)

    @property
    def ttft_slo_s(self) -> float | None:
        """In seconds."""
        return None if self.ttft_slo is None else seconds("ttft_slo", self.ttft_slo)

    @property
    def serves_background(self) -> bool:
        """Whether work can be put beside other work, a little at a time."""
        return self.enable_chunked_prefill and self.batching == "continuous" and self.mixing == "mixed"

    @property
    def has_slo(self) -> bool:
        """Whether steps go by a limit of time."""
        return self.itl_slo is not None or self.ttft_slo is not None

    def _check_slos(self) -> None:
        """Times, and what has to be on for them to mean something."""
        for name, value in (("itl_slo", self.itl_slo_s), ("ttft_slo", self.ttft_slo_s)):
            if value is not None and not (self.enable_chunked_prefill and self.mixing == "mixed"):
                limit = "needs chunked prefill, mixed with decodes"
                raise InvalidParameter(name, getattr(self, name), limit, "Leave it out, or leave these on.")
