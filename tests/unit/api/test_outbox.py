"""What is written in one turn of the loop leaves at its end, in order, and is never lost by closing."""

from __future__ import annotations

import asyncio

from twostroke.api.outbox import Outbox, OutboxTransport


class Wire(asyncio.Transport):
    """Keeps what is sent, a packet each."""

    def __init__(self, sent: list[tuple[str, bytes]], name: str) -> None:
        super().__init__()
        self._sent, self._name = sent, name

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._sent.append((self._name, bytes(data)))

    def close(self) -> None:
        self._sent.append((self._name, b"closed"))

    def abort(self) -> None:
        self._sent.append((self._name, b"aborted"))


def test_a_turn_is_sent_together() -> None:
    sent: list[tuple[str, bytes]] = []

    async def turns() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        a, b = (OutboxTransport(Wire(sent, name), outbox) for name in "ab")
        a.write(b"1")
        b.write(b"2")
        a.write(b"3")
        assert not sent
        await asyncio.sleep(0)
        assert sent == [("a", b"13"), ("b", b"2")]
        b.write(b"4")
        await asyncio.sleep(0)
        a.write(b"5")
        a.close()
        b.write(b"6")
        b.abort()
        await asyncio.sleep(0)

    asyncio.run(turns())
    assert sent[2:] == [("b", b"4"), ("a", b"5"), ("a", b"closed"), ("b", b"aborted")]
