"""Ratio of the two pools that fits a load, with its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.checks import check_number
from twostroke.errors import InvalidParameter
from twostroke.pools.autoscaler import streams_within_target

_MOST = float(1 << 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedRatio:
    """Number of members of each pool that a load keeps busy, with the figures behind it.

    num_prefill = prompt_tokens_per_s / prefill_tokens_per_s
    num_decode  = output_tokens_per_s / decode_tokens_per_s,    decode_tokens_per_s = n / (step_s + n x slope)
    """

    prompt_tokens_per_s: float
    """Rate of arriving prompt tokens that are not cached."""
    output_tokens_per_s: float
    """Rate of output tokens."""
    prefill_tokens_per_s: float
    """Prefill rate of one member."""
    num_streams: int
    """Number of streams, n, of one decode member within the TPOT target."""
    decode_tokens_per_s: float
    """Rate of one decode member with n streams."""
    num_prefill: float
    num_decode: float

    @property
    def prefill_per_decode(self) -> float | None:
        """P : D as one number; None if nothing is decoded."""
        return self.num_prefill / self.num_decode if self.num_decode else None

    def split(self, num_members: int) -> tuple[int, int]:
        """Divide a number of members in that ratio, at least one of each.

        The split minimizes the utilization of the busier pool; of equals it is the one with more decode members.

        Raises:
            InvalidParameter: less than two members.
        """
        if num_members < 2:
            limit = "each pool needs a member"
            raise InvalidParameter("num_members", num_members, limit, "Give two or more, or do not split the engine.")

        def busiest(num_prefill: int) -> float:
            return max(self.num_prefill / num_prefill, self.num_decode / (num_members - num_prefill))

        num_prefill = min(range(1, num_members), key=busiest)
        return num_prefill, num_members - num_prefill


def suggested_ratio(
    *,
    prompt_tokens_per_s: float,
    output_tokens_per_s: float,
    prefill_tokens_per_s: float,
    step_s: float,
    step_s_per_sequence: float,
    tpot_target_s: float,
    max_num_seqs: int,
) -> SuggestedRatio:
    """Return the ratio that fits the observed load and the measured speeds.

    Args:
        prompt_tokens_per_s: arriving prompt tokens that are not cached.
        output_tokens_per_s: output tokens that are wanted.
        prefill_tokens_per_s: of one member.
        step_s: of a decode step without streams.
        step_s_per_sequence: seconds that a stream adds to it.
        tpot_target_s: seconds for an output token.
        max_num_seqs: of one member.

    Raises:
        InvalidParameter: a rate or a time by which nothing can be divided.

    >>> ratio = suggested_ratio(prompt_tokens_per_s=3000.0, output_tokens_per_s=800.0, prefill_tokens_per_s=1000.0,
    ...                         step_s=0.03, step_s_per_sequence=0.001, tpot_target_s=0.05, max_num_seqs=64)
    >>> ratio.num_streams, round(ratio.decode_tokens_per_s), ratio.num_prefill, round(ratio.num_decode, 2)
    (20, 400, 3.0, 2.0)
    >>> ratio.split(10)
    (6, 4)
    """
    limit = "more than 0"
    check_number("prefill_tokens_per_s", prefill_tokens_per_s, 0, _MOST, limit, low_open=True)
    check_number("step_s", step_s, 0, _MOST, "0 or more seconds")
    check_number("step_s_per_sequence", step_s_per_sequence, 0, _MOST, "0 or more seconds")
    check_number(
        "step_s", step_s + step_s_per_sequence, 0, _MOST, "more than 0 where a stream adds nothing", low_open=True
    )
    check_number("tpot_target_s", tpot_target_s, 0, _MOST, limit, low_open=True)
    for name, rate in (("prompt_tokens_per_s", prompt_tokens_per_s), ("output_tokens_per_s", output_tokens_per_s)):
        check_number(name, rate, 0, _MOST, "0 or more tokens a second")
    num_streams = streams_within_target(step_s, step_s_per_sequence, tpot_target_s, max_num_seqs)
    decode_tokens_per_s = num_streams / (step_s + num_streams * step_s_per_sequence)
    return SuggestedRatio(
        prompt_tokens_per_s=prompt_tokens_per_s,
        output_tokens_per_s=output_tokens_per_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        num_streams=num_streams,
        decode_tokens_per_s=decode_tokens_per_s,
        num_prefill=prompt_tokens_per_s / prefill_tokens_per_s,
        num_decode=output_tokens_per_s / decode_tokens_per_s,
    )
