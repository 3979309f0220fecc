"""KV transfer rates between members: measured, or assumed by their transport."""

from __future__ import annotations

from collections import OrderedDict

from twostroke.config.checks import check_number
from twostroke.pools.member import Member


class Links:
    """The latest measured rates by (prefill member, decode member), up to a limit.

    Ten thousand members form up to twenty-five million pairs.

    Args:
        max_links: the limit.
    """

    def __init__(self, max_links: int) -> None:
        self._max_links = max_links
        self._bytes_per_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bytes_per_s)

    def measured(self, prefill_id: str, decode_id: str, bytes_per_s: float) -> None:
        """Record the rate of a hand-over.

        Raises:
            InvalidParameter: the rate is not above 0.
        """
        check_number("bytes_per_s", bytes_per_s, 0, 1e18, "more than 0 bytes a second", low_open=True)
        self._bytes_per_s[prefill_id, decode_id] = float(bytes_per_s)
        self._bytes_per_s.move_to_end((prefill_id, decode_id))
        if len(self._bytes_per_s) > self._max_links:
            self._bytes_per_s.popitem(last=False)

    def bytes_per_s(self, prefill: Member, decode: Member) -> float:
        """Return the measured rate, or the assumed rate of the slower member's transport
        (Transport.assumed_bytes_per_s)."""
        known = self._bytes_per_s.get((prefill.member_id, decode.member_id))
        return _assumed(prefill, decode) if known is None else known

    def assumed_bytes_per_s(self, prefill: Member, decode: Member) -> float | None:
        """Return the assumed rate of a link that was not measured; None: it was measured."""
        is_measured = (prefill.member_id, decode.member_id) in self._bytes_per_s
        return None if is_measured else _assumed(prefill, decode)

    def forget(self, member_id: str) -> None:
        """Forget a member that has left; another one may reuse its name elsewhere."""
        for pair in [pair for pair in self._bytes_per_s if member_id in pair]:
            del self._bytes_per_s[pair]


def _assumed(prefill: Member, decode: Member) -> float:
    return min(prefill.transport.assumed_bytes_per_s, decode.transport.assumed_bytes_per_s)
