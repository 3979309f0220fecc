"""The links between two pools: bytes that travel as they are computed, and share what there is.

Each process has a link of its own, of one rate in each direction. Prefixes that come from the same process, or go to
the same, share its link in equal parts, as connections of the same kind do: a thread of its own fetches each.

    rate of a transfer = link / max(transfers that flow from its giver, transfers that flow to its taker)

What a link has left because the other end of one of its transfers is shared by more is not dealt out again: with
several processes in both pools that is a little too slow, with one in either it is exact.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Transfer:
    """The bytes of one prefix on their way."""

    giver: str
    taker: str
    pieces: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    """Still to be computed: when each is there, and its bytes."""
    is_whole: bool = False
    """No other pieces come."""
    num_ready: float = 0.0
    """Bytes that are there and have not gone."""
    num_bytes: int = 0
    """Of all pieces so far."""
    busy_s: float = 0.0
    """While bytes went."""
    arrived: Callable[[], object] = lambda: None
    """Is to be called when all of it has come."""

    def add(self, pieces: Iterable[tuple[float, int]]) -> None:
        """More that is computed, in its order."""
        for ready_s, num_bytes in pieces:
            if num_bytes:
                self.pieces.append((ready_s, num_bytes))
                self.num_bytes += num_bytes

    @property
    def is_done(self) -> bool:
        """All of it has come."""
        return self.is_whole and not self.pieces and not self.num_ready


class Link:
    """All transfers under way, at one rate for each process and direction.

    Args:
        bytes_per_s: of a process's link; more than 0.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._transfers: list[Transfer] = []
        self._now_s = 0.0

    def begin(self, transfer: Transfer, now_s: float) -> None:
        """A prefix is fetched from now on."""
        self._let_flow(now_s)
        self._transfers.append(transfer)

    def drop(self, transfer: Transfer) -> None:
        """Nobody wants it any more."""
        if transfer in self._transfers:
            self._transfers.remove(transfer)

    def advance(self, to_s: float) -> list[Transfer]:
        """Lets bytes flow until then; returns the transfers that are done, which are forgotten."""
        self._let_flow(to_s)
        done = [transfer for transfer in self._transfers if transfer.is_done]
        if done:
            self._transfers = [transfer for transfer in self._transfers if not transfer.is_done]
        return done

    @property
    def next_s(self) -> float | None:
        """When something changes, where a transfer may be done by that; None: none will be without more pieces."""
        return self._next_change_s() if any(transfer.is_whole for transfer in self._transfers) else None

    def _next_change_s(self) -> float | None:
        times = [transfer.pieces[0][0] for transfer in self._transfers if transfer.pieces]
        times += [self._now_s + transfer.num_ready / rate for transfer, rate in self._rates()]
        return min(times, default=None)

    def _rates(self) -> list[tuple[Transfer, float]]:
        """Of those whose bytes flow, bytes a second."""
        flowing = [transfer for transfer in self._transfers if transfer.num_ready]
        from_giver = Counter(transfer.giver for transfer in flowing)
        to_taker = Counter(transfer.taker for transfer in flowing)
        return [(t, self._bytes_per_s / max(from_giver[t.giver], to_taker[t.taker])) for t in flowing]

    def _let_flow(self, to_s: float) -> None:
        self._take_what_is_ready()
        while (next_s := self._next_change_s()) is not None and next_s <= to_s:
            self._flow(next_s)
            self._take_what_is_ready()
        self._flow(max(self._now_s, to_s))

    def _flow(self, to_s: float) -> None:
        """At rates that stay as they are until then."""
        for transfer, rate in self._rates():
            is_through = self._now_s + transfer.num_ready / rate <= to_s  # the very sum that `to_s` may be
            transfer.num_ready = 0.0 if is_through else max(0.0, transfer.num_ready - rate * (to_s - self._now_s))
            transfer.busy_s += to_s - self._now_s
        self._now_s = to_s

    def _take_what_is_ready(self) -> None:
        for transfer in self._transfers:
            while transfer.pieces and transfer.pieces[0][0] <= self._now_s:
                transfer.num_ready += transfer.pieces.popleft()[1]
