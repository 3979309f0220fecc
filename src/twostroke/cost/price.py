"""The price of tokens on a machine that is paid by the hour. Pure; the unit is the money of the price."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.checks import check_number

_TOKENS = 1_000_000
_MOST = 1e15


def check_price_per_hour(price_per_hour: object) -> None:
    """Refuse a price that is not a number above 0; None means no price.

    Raises:
        InvalidParameter: the price is not such a number.
    """
    if price_per_hour is not None:
        check_number(
            "price_per_hour",
            price_per_hour,
            0,
            _MOST,
            f"a number above 0 and up to {_MOST:g}, the price of an hour of the machine, as in 2.5",
            low_open=True,
        )


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens at a rate in tokens per second.

    >>> cost_per_million_tokens(3.6, 1000.0)
    1.0
    """
    return price_per_hour / (3600 * tokens_per_s) * _TOKENS


@dataclass(frozen=True, slots=True)
class RunCost:
    """The bill of a run: the machine is paid from start to end, also while idle."""

    price_per_hour: float
    total: float
    per_million_output_tokens: float | None
    """The whole bill over the output tokens, prompts free, as in `plan`. None: there was no output."""
    per_million_tokens: float | None
    """The whole bill over prompt and output tokens. None: there were no tokens, or prompt lengths are unknown."""

    @classmethod
    def of(
        cls, price_per_hour: float, duration_s: float, *, num_prompt_tokens: int | None, num_output_tokens: int
    ) -> RunCost:
        """Compute the bill.

        Args:
            price_per_hour: price of all machines of the run.
            duration_s: length of the run.
            num_prompt_tokens: sum over answered requests, cached tokens included; None: not known.
            num_output_tokens: sum over the same requests.

        >>> RunCost.of(3.6, 10.0, num_prompt_tokens=3000, num_output_tokens=1000)
        RunCost(price_per_hour=3.6, total=0.01, per_million_output_tokens=10.0, per_million_tokens=2.5)
        """
        total = price_per_hour * duration_s / 3600

        def per_million(num_tokens: int) -> float | None:
            return cost_per_million_tokens(price_per_hour, num_tokens / duration_s) if num_tokens else None

        everything = None if num_prompt_tokens is None else per_million(num_prompt_tokens + num_output_tokens)
        return cls(price_per_hour, total, per_million(num_output_tokens), everything)
