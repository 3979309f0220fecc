"""From times to claims: shares of what the card can do at best. Pure: costs, seconds and rates in, claims out.

decode     floor = (weights + KV that is read and written) / copy rate        share = floor / time of a step
prefill    operations of the prompt / matrix rate                             share = that / TTFT
idle       1 - busy seconds of a step / time of a step
           busy: at least one kernel, copy or fill runs (a union of intervals, from a trace of some steps);
           the time of a step is of a run without the profiler, which makes the host slower, not the kernels
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.claim import Claim
from twostroke.cost.step_cost import StepCost

DECODE_SHARE, PREFILL_SHARE, IDLE_SHARE, TIMES_TRANSFORMERS = 0.8, 0.6, 0.05, 2.0
"""The goals."""
WAIT_S = 20e-6
"""A gap this long is the host's doing; between kernels that one graph launches there are one or two microseconds."""


class Interval(NamedTuple):
    """Some work of the device, in seconds from anywhere."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """How much of the time of some steps the device worked."""

    num_steps: int
    busy_s: float
    span_s: float
    """From the first work to the last."""
    waits_s: float
    """In gaps of WAIT_S and more."""

    @classmethod
    def of(cls, work: Iterable[Interval], num_steps: int) -> Busy | None:
        """Of a trace of `num_steps` whole steps; None of an empty one.

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
        """Of steps that take `step_s` each without the profiler; 0 where they are said to take less than the work."""
        return max(0.0, 1 - self.busy_s / self.num_steps / step_s)

    @property
    def traced_idle_share(self) -> float:
        """Of the steps that were traced, whose host the profiler made slower."""
        return 1 - self.busy_s / self.span_s

    @property
    def traced_wait_share(self) -> float:
        """The same, of gaps that are long enough to be the host's."""
        return self.waits_s / self.span_s


def decode_claims(num_requests: int, step_s: float, cost: StepCost, copied_bytes_per_s: float) -> tuple[Claim, ...]:
    """Of steps in which so many requests decode and nothing else happens.

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
    """Of one prompt alone.

    Args:
        num_tokens: of the prompt.
        ttft_s: until its first token.
        costs: of the steps that read it.
        multiplied_per_s: operations per second of a large product of matrices.
    """
    floor_s = sum(cost.operations for cost in costs) / multiplied_per_s
    what = f"prefill of {num_tokens} tokens"
    return (
        Claim.at_least(f"{what}: share of the matrix rate", PREFILL_SHARE, floor_s / ttft_s),
        Claim.reported(f"{what}: TTFT, ms", 1e3 * ttft_s, 1e3 * floor_s),
    )


def idle_claims(num_requests: int, busy: Busy, step_s: float) -> tuple[Claim, ...]:
    """Of steps in which so many requests decode.

    Args:
        num_requests: at once.
        busy: of steps that were traced.
        step_s: median time of a step that was not.
    """
    what = f"idle, batch {num_requests}"
    return (
        Claim.at_most(f"{what}: share of a step in which nothing runs", IDLE_SHARE, busy.idle_share(step_s)),
        Claim.reported(f"{what}: the same of traced steps", busy.traced_idle_share),
        Claim.reported(f"{what}: traced, in gaps of {1e6 * WAIT_S:.0f} us and more", busy.traced_wait_share),
    )


def throughput_claims(num_slots: int, ours_tok_s: float, theirs_tok_s: float) -> tuple[Claim, ...]:
    """Of the same requests through both, with as many slots each.

    Args:
        num_slots: requests that may run at once.
        ours_tok_s: output tokens per second.
        theirs_tok_s: of transformers' continuous batching.
    """
    what = f"throughput, {num_slots} slots: ours / transformers' continuous batching"
    return (Claim.at_least(what, TIMES_TRANSFORMERS, ours_tok_s / theirs_tok_s),)


def setting_claims(name: str, of_what: str, time_s: float, default_s: float | None) -> tuple[Claim, ...]:
    """What a setting makes of the time of a step or a prompt.

    Args:
        name: of the setting.
        of_what: is timed.
        time_s: with it.
        default_s: without; None where that could not be measured.
    """
    what = f"{name}: {of_what}"
    reported = Claim.reported(f"{what}, ms", 1e3 * time_s)
    if default_s is None:
        return (reported,)
    return Claim.reported(f"{what}: the default's time / this one's", default_s / time_s), reported
