"""The causes of the time that a sequence spends between two processes, in words.

    prompt computed        room for its KV       last byte                                arrival at the receiver
         | wait: step | wait: kv  |     transfer     | transfer (word of it) | wait: step     |

The receiver looks for news between two steps. While one runs there, a sequence whose KV is complete waits for it. So
does one whose fetching has not begun. Pieces that take no time are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from twostroke.events import KVImportEnded
from twostroke.explain.causes import Cause, of_waiting_for
from twostroke.explain.engine_view import DecidedStep, EngineView
from twostroke.explain.segments import Label


@dataclass(frozen=True, slots=True)
class KVWay:
    """The path of a prefix to the receiver, as far as the history knows it."""

    place: str
    """Name of the receiver."""
    room_s: float = -inf
    """Time at which blocks were allocated there."""
    holders: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests that held blocks there at that time, with their tokens."""
    step_before: DecidedStep | None = None
    """The step there that ended last before that, at `stepped_s`."""
    stepped_s: float = -inf
    ended: KVImportEnded | None = None
    """The end of the fetch; None while it is in progress."""


def of_handing_over(
    source: str, prefilled_s: float, arrival_s: float, way: KVWay | None, receiver: EngineView
) -> Iterator[tuple[Cause, float]]:
    """Yield each cause of the time between two processes, and its end; the last one ends with the arrival.

    Args:
        source: the process that computed the prompt.
        prefilled_s: time at which the prompt was computed.
        arrival_s: time at which the receiver admitted the sequence.
        way: path of its KV; None: not known.
        receiver: state of the receiver at the arrival.
    """
    fetched = None if way is None else way.ended
    transfer = of_transfer(source, prefilled_s, fetched)
    if way is not None and fetched is not None:
        if min(way.stepped_s, fetched.begin_s) > prefilled_s:
            is_known = way.step_before is not None and way.step_before.time_s < fetched.begin_s
            step = way.step_before if is_known else None
            yield _at(fetched.process, of_waiting_for(step, "")), fetched.begin_s
        if way.stepped_s > fetched.begin_s:
            yield Cause(Label.WAIT_KV, f"for blocks at {fetched.process}", way.holders), way.room_s
        step, there_s = receiver.last_step, max(prefilled_s, fetched.done_s)
        if step is not None and receiver.last_result_s > there_s:
            yield transfer, max(there_s, step.time_s)
            yield _at(fetched.process, of_waiting_for(step, "")), arrival_s
            return
    yield transfer, arrival_s


def _at(process: str, cause: Cause) -> Cause:
    """Return the same cause with its place."""
    return Cause(cause.label, f"at {process} {cause.reason}", cause.because_of)


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
    duration_s = fetched.done_s - fetched.first_byte_s
    told = f"{_amount(fetched.num_bytes)} from {source} in {duration_s * 1e3:,.3f} ms"
    if duration_s <= 0:
        return Cause(Label.TRANSFER, told)
    hidden_s = min(max(prefilled_s - fetched.first_byte_s, 0.0), duration_s)
    drift = f"; numerics differ: {fetched.drift}" if fetched.drift else ""
    busy_s = fetched.busy_s or duration_s  # layers come as they are computed: in between nothing is on its way
    rate = f"{fetched.num_bytes / busy_s / 1e9:,.2f} GB/s while bytes came"
    return Cause(Label.TRANSFER, f"{told} ({rate}), {hidden_s / duration_s:.0%} of it during the prefill{drift}")


def of_resuming(cause: str) -> Cause:
    """The process that ran it is no more, or was to hand it to one that is no more."""
    return Cause(Label.RESUME, f"{cause.rstrip('.')}; it goes on from what was delivered")


def _amount(num_bytes: int) -> str:
    """In words.

    >>> _amount(999), _amount(2_500_000)
    ('0.001 MB', '2.500 MB')
    """
    return f"{num_bytes / 1e6:,.3f} MB"
