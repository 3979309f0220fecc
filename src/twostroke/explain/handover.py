"""Why a sequence was on its way from one process to another, in words."""

from __future__ import annotations

from twostroke.events import KVImportEnded
from twostroke.explain.causes import Cause
from twostroke.explain.segments import Label


def of_leaving(process: str) -> Cause:
    """Its prompt is computed there, and it goes on elsewhere; nobody has taken it in yet."""
    return Cause(Label.TRANSFER, f"from {process}, not taken in yet")


def of_transfer(source: str, prefilled_s: float, fetched: KVImportEnded | None) -> Cause:
    """Another process has taken it in.

    Args:
        source: the process that computed its prompt.
        prefilled_s: when that was done.
        fetched: how its KV came; None: nobody knows.
    """
    if fetched is None:
        return Cause(Label.TRANSFER, f"from {source}")
    if fetched.problem:
        gone = f" after {_amount(fetched.num_bytes)}" if fetched.num_bytes else ""
        return Cause(Label.TRANSFER, f"from {source}, failed{gone}: {fetched.problem}")
    if not fetched.num_bytes:
        return Cause(Label.TRANSFER, f"from {source}; no KV had to be fetched")
    duration_s = fetched.time_s - fetched.first_byte_s
    told = f"{_amount(fetched.num_bytes)} from {source} in {duration_s * 1e3:,.3f} ms"
    if duration_s <= 0:
        return Cause(Label.TRANSFER, told)
    hidden_s = min(max(prefilled_s - fetched.first_byte_s, 0.0), duration_s)
    converted = f"; converted, as numerics differ: {fetched.drift}" if fetched.drift else ""
    busy_s = fetched.busy_s or duration_s  # layers come as they are computed: in between nothing is on its way
    rate = f"{fetched.num_bytes / busy_s / 1e9:,.2f} GB/s while bytes came"
    return Cause(Label.TRANSFER, f"{told} ({rate}), {hidden_s / duration_s:.0%} of it during the prefill{converted}")


def of_resuming(cause: str) -> Cause:
    """The process that ran it is no more, or was to hand it to one that is no more."""
    return Cause(Label.RESUME, f"{cause.rstrip('.')}; it goes on from what was delivered")


def _amount(num_bytes: int) -> str:
    """In words.

    >>> _amount(999), _amount(2_500_000)
    ('0.001 MB', '2.500 MB')
    """
    return f"{num_bytes / 1e6:,.3f} MB"
