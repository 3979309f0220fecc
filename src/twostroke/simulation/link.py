"""Links between two pools: KV bytes travel while they are computed and share the bandwidth.

Each process has one link with the same rate in each direction. Prefixes from the same process, or to the same
process, share its link equally, as connections of the same kind do: each is fetched by a thread of its own.

    rate of a transfer = link / max(transfers flowing from its sender, transfers flowing to its receiver)

Bandwidth that a transfer cannot use because its other end is shared by more transfers is not redistributed. With
several processes in both pools this is slightly too slow; with one process in either pool it is exact.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Transfer:
    """Transfer of the KV of one prefix."""

    sender: str
    receiver: str
    pieces: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    """Pieces still to be computed: (time in seconds when each is ready, its bytes)."""
    has_all_pieces: bool = False
    """Whether all pieces have been added."""
    num_ready: float = 0.0
    """Bytes that are computed and not sent yet."""
    num_bytes: int = 0
    """Bytes of all pieces added so far."""
    busy_s: float = 0.0
    """Seconds during which bytes flowed."""
    on_done: Callable[[], object] = lambda: None
    """Callback for when all bytes have arrived."""

    def add(self, pieces: Iterable[tuple[float, int]]) -> None:
        """Add pieces as (ready time, bytes), in the order in which they are computed."""
        for ready_s, num_bytes in pieces:
            if num_bytes:
                self.pieces.append((ready_s, num_bytes))
                self.num_bytes += num_bytes

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived."""
        return self.has_all_pieces and not self.pieces and not self.num_ready


class Link:
    """All active transfers, at one rate for each process and direction.

    Args:
        bytes_per_s: rate of a process's link; more than 0.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._transfers: list[Transfer] = []
        self._now_s = 0.0

    def begin(self, transfer: Transfer, now_s: float) -> None:
        """Start a transfer now."""
        self._advance_to(now_s)
        self._transfers.append(transfer)

    def drop(self, transfer: Transfer) -> None:
        """Cancel a transfer."""
        if transfer in self._transfers:
            self._transfers.remove(transfer)

    def advance(self, to_s: float) -> list[Transfer]:
        """Advance the transfers to this time; return and forget those that are done."""
        self._advance_to(to_s)
        done = [transfer for transfer in self._transfers if transfer.is_done]
        if done:
            self._transfers = [transfer for transfer in self._transfers if not transfer.is_done]
        return done

    @property
    def next_s(self) -> float | None:
        """Time of the next change after which a transfer may be done; None if none can finish without more pieces."""
        return self._next_change_s() if any(transfer.has_all_pieces for transfer in self._transfers) else None

    def _next_change_s(self) -> float | None:
        times = [transfer.pieces[0][0] for transfer in self._transfers if transfer.pieces]
        times += [self._now_s + transfer.num_ready / rate for transfer, rate in self._rates()]
        return min(times, default=None)

    def _rates(self) -> list[tuple[Transfer, float]]:
        """Return the flowing transfers with their rates in bytes per second."""
        flowing = [transfer for transfer in self._transfers if transfer.num_ready]
        from_sender = Counter(transfer.sender for transfer in flowing)
        to_receiver = Counter(transfer.receiver for transfer in flowing)
        return [(t, self._bytes_per_s / max(from_sender[t.sender], to_receiver[t.receiver])) for t in flowing]

    def _advance_to(self, to_s: float) -> None:
        self._collect_ready_pieces()
        while (next_s := self._next_change_s()) is not None and next_s <= to_s:
            self._send_until(next_s)
            self._collect_ready_pieces()
        self._send_until(max(self._now_s, to_s))

    def _send_until(self, to_s: float) -> None:
        """Send bytes until `to_s` at constant rates."""
        for transfer, rate in self._rates():
            # the same expression as in _next_change_s, so that rounding cannot make the two differ
            is_through = self._now_s + transfer.num_ready / rate <= to_s
            transfer.num_ready = 0.0 if is_through else max(0.0, transfer.num_ready - rate * (to_s - self._now_s))
            transfer.busy_s += to_s - self._now_s
        self._now_s = to_s

    def _collect_ready_pieces(self) -> None:
        for transfer in self._transfers:
            while transfer.pieces and transfer.pieces[0][0] <= self._now_s:
                transfer.num_ready += transfer.pieces.popleft()[1]
