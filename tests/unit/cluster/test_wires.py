"""Sockets on a network: only peers with the key are accepted."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from twostroke.cluster.process_sockets import NetworkEnd, NetworkSockets, engine_ends

SOON_MS, LATE_MS = 500, 20_000


@pytest.fixture
def both() -> Generator[tuple[NetworkSockets, Any, Any]]:
    """A gateway's wires, and the sockets of the process at their end."""
    public, secret = zmq.curve_keypair()
    engine_public, engine_secret = zmq.curve_keypair()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = listeners[0].getsockname()[1], listeners[1].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        end = NetworkEnd((listeners[0].detach(), listeners[1].detach()), engine_public, engine_secret, public)
        end.write(Path(folder))
        context = zmq.Context()
        commands, reports = engine_ends(context, Path(folder))
        assert not list(Path(folder).iterdir()), "the secret key is left behind"
        yield NetworkSockets("127.0.0.1", ports, engine_public, public, secret), commands, reports
        commands.close()
        reports.close()
        context.term()


def says(wires: NetworkSockets, commands: Any, reports: Any, patience_ms: int) -> tuple[bool, bool]:
    """Return whether a command and a report arrived."""
    with zmq.Context() as context:
        to_engine, from_engine = wires.ends(context)
        to_engine.send(b"a command", zmq.NOBLOCK)
        is_heard = bool(commands.poll(patience_ms)) and commands.recv() == b"a command"
        try:
            reports.setsockopt(zmq.SNDTIMEO, patience_ms)
            reports.send(b"a report")
            hears = bool(from_engine.poll(patience_ms)) and from_engine.recv() == b"a report"
        except zmq.Again:
            hears = False
        to_engine.close()
        from_engine.close()
    return is_heard, hears


def test_the_gateway_is_heard_and_hears(both: tuple[NetworkSockets, Any, Any]) -> None:
    assert says(*both, LATE_MS) == (True, True)


def test_strangers_are_not_heard_and_change_nothing(both: tuple[NetworkSockets, Any, Any]) -> None:
    """With keys of their own, with another process's key in mind, and without any."""
    wires, commands, reports = both
    public, secret = zmq.curve_keypair()
    for stranger in (
        replace(wires, public_key=public, secret_key=secret),
        replace(wires, public_key=wires.public_key, secret_key=secret),
        replace(wires, engine_key=public),
    ):
        assert says(stranger, commands, reports, SOON_MS) == (False, False)
    with zmq.Context() as context, context.socket(zmq.PUSH) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://127.0.0.1:{wires.ports[0]}")
        plain.send(b"a command")
        assert not commands.poll(SOON_MS)
    with socket.create_connection(("127.0.0.1", wires.ports[0])) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert says(wires, commands, reports, LATE_MS) == (True, True)
