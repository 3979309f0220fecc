"""From measured times to claims: shares of the card's limits. Pure: costs, seconds and rates in, claims out.

decode     floor = (weights + KV that is read and written) / copy rate        share = floor / time of a step
prefill    operations of the prompt / matrix rate                             share = that / TTFT
idle       1 - busy seconds of a step / time of a step
           busy: at least one kernel, copy or fill runs (a union of intervals, from a trace of some steps);
           the time of a step is from a run without the profiler, which slows the host, not the kernels
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.claim import Claim
from twostroke.cost.step_cost import StepCost

DECODE_SHARE, PREFILL_SHARE, IDLE_SHARE, TIMES_TRANSFORMERS = 0.8, 0.6, 0.05, 2.0
"""Goals of the claims."""
WAIT_S = 20e-6
"""Shortest gap that is caused by the host; gaps between kernels of one graph last one or two microseconds."""


class Interval(NamedTuple):
    """Work of the device, in seconds from any origin."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """Busy time of the device during some steps."""

    num_steps: int
    busy_s: float
    span_s: float
    """Seconds from the first work to the last."""
    waits_s: float
    """Seconds in gaps of WAIT_S and more."""

    @classmethod
    def of(cls, work: Iterable[Interval], num_steps: int) -> Busy | None:
        """Return the busy time of a trace of `num_steps` whole steps; None for an empty one.

        >>> Busy.of([Interval(0.0, 2.0), Interval(1.0, 3.0), Interval(4.0, 5.0)], num_steps=2)
        Busy(num_steps=2, busy_s=4.0, span_s=5.0, waits_s=1.0)
        """
        ordered = sorted(work)
        if not ordered:
            return None
        busy_s = waits_s = 0.0
        begin_s, end_s = ordered[0]
        for interval in ordered[1:]:
            if interval.begin_s > end_s:
                gap_s = interval.begin_s - end_s
                waits_s += gap_s if gap_s >= WAIT_S else 0.0
                busy_s += end_s - begin_s
                begin_s, end_s = interval
            else:
                end_s = max(end_s, interval.end_s)
        return cls(num_steps, busy_s + end_s - begin_s, end_s - ordered[0].begin_s, waits_s)

    def idle_share(self, step_s: float) -> float:
        """Return the idle share of steps that take `step_s` without the profiler; 0 if that is less than their work."""
        return max(0.0, 1 - self.busy_s / self.num_steps / step_s)

    @property
    def traced_idle_share(self) -> float:
        """Idle share of the traced steps, whose host the profiler slows."""
        return 1 - self.busy_s / self.span_s

    @property
    def traced_wait_share(self) -> float:
        """Share of the traced steps in gaps long enough to be caused by the host."""
        return self.waits_s / self.span_s


def decode_claims(num_requests: int, step_s: float, cost: StepCost, copied_bytes_per_s: float) -> tuple[Claim, ...]:
    """Return the claims about steps in which `num_requests` requests decode and nothing else happens.

    Args:
        num_requests: at once.
        step_s: median time of a step.
        cost: of such a step.
        copied_bytes_per_s: of a large copy on the device, read and written.
    """
    floor_s = cost.num_bytes / copied_bytes_per_s
    what = f"decode, batch {num_requests}"
    return (
        Claim.at_least(f"{what}: share of the bandwidth floor", DECODE_SHARE, floor_s / step_s),
        Claim.reported(f"{what}: step, ms", 1e3 * step_s, 1e3 * floor_s),
        Claim.reported(f"{what}: tokens/s", num_requests / step_s, num_requests / floor_s),
    )


def prefill_claims(
    num_tokens: int, ttft_s: float, costs: Sequence[StepCost], multiplied_per_s: float
) -> tuple[Claim, ...]:
    """Return the claims about one prompt alone.

    Args:
        num_tokens: of the prompt.
        ttft_s: until its first token.
        costs: of its prefill steps.
        multiplied_per_s: operations per second of a large product of matrices.
    """
    floor_s = sum(cost.operations for cost in costs) / multiplied_per_s
    what = f"prefill of {num_tokens} tokens"
    return (
        Claim.at_least(f"{what}: share of the matrix rate", PREFILL_SHARE, floor_s / ttft_s),
        Claim.reported(f"{what}: TTFT, ms", 1e3 * ttft_s, 1e3 * floor_s),
    )


def idle_claims(num_requests: int, busy: Busy, step_s: float) -> tuple[Claim, ...]:
    """Return the claims about the idle time of decode steps.

    Args:
        num_requests: at once.
        busy: of steps that were traced.
        step_s: median time of a step without tracing.
    """
    what = f"idle, batch {num_requests}"
    return (
        Claim.at_most(f"{what}: share of a step in which nothing runs", IDLE_SHARE, busy.idle_share(step_s)),
        Claim.reported(f"{what}: the same of traced steps", busy.traced_idle_share),
        Claim.reported(f"{what}: traced, in gaps of {1e6 * WAIT_S:.0f} us and more", busy.traced_wait_share),
    )


def throughput_claims(num_slots: int, ours_tok_s: float, theirs_tok_s: float) -> tuple[Claim, ...]:
    """Return the claim about the same requests through both engines, with equally many slots.

    Args:
        num_slots: requests that may run at once.
        ours_tok_s: output tokens per second.
        theirs_tok_s: of transformers' continuous batching.
    """
    what = f"throughput, {num_slots} slots: ours / transformers' continuous batching"
    return (Claim.at_least(what, TIMES_TRANSFORMERS, ours_tok_s / theirs_tok_s),)


def setting_claims(name: str, of_what: str, time_s: float, default_s: float | None) -> tuple[Claim, ...]:
    """Return the claims about a setting's effect on the time of a step or a prompt.

    Args:
        name: of the setting.
        of_what: description of the timed work.
        time_s: with the setting.
        default_s: without it; None if that could not be measured.
    """
    what = f"{name}: {of_what}"
    reported = Claim.reported(f"{what}, ms", 1e3 * time_s)
    if default_s is None:
        return (reported,)
    return Claim.reported(f"{what}: the default's time / this one's", default_s / time_s), reported
