"""Bytes to a real server and back, for tests of HTTP itself."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from server_process import ServerProcess


def connect(server: ServerProcess) -> socket.socket:
    """Open a new connection."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def say(server: ServerProcess, *parts: bytes) -> bytes:
    """Send bytes; return everything until the server closes."""
    chunks: list[bytes] = []
    with connect(server) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for part in parts:
            connection.sendall(part)
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def receive(connection: socket.socket) -> RawAnswer:
    """Return one complete answer that has a length; the connection may stay open."""
    answer = b""
    while b"\r\n\r\n" not in answer or len((parsed := RawAnswer.parse(answer)).content) < parsed.length:
        chunk = connection.recv(65536)
        assert chunk, answer
        answer += chunk
    return parsed


def length(body: bytes) -> bytes:
    """The header that says how long a body is."""
    return b"content-length: %d\r\n" % len(body)


@dataclass(frozen=True)
class RawAnswer:
    """One answer, taken apart at its first empty line.

    Attributes:
        status: of the answer.
        headers: by their names in lower case.
        content: everything behind the head.
    """

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def length(self) -> int:
        """Bytes that the content has, by the head."""
        return int(self.headers["content-length"])

    @classmethod
    def parse(cls, answer: bytes) -> RawAnswer:
        """Parse bytes that begin with an answer."""
        head, _, content = answer.partition(b"\r\n\r\n")
        line, *headers = head.decode("latin-1").split("\r\n")
        assert line.startswith("HTTP/1.1 "), answer
        named = (header.partition(": ") for header in headers)
        return cls(int(line.split(" ")[1]), {name.lower(): value for name, _, value in named}, content)
