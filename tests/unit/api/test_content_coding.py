"""The decoders of request bodies: what they give, how much they read, and what they refuse."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from collections.abc import Callable, Iterable, Mapping

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from twostroke.api.answering import Message
from twostroke.api.bodies import CODINGS, MAX_LEAD_BYTES, MAX_PARTS, Decoder, decoded
from twostroke.api.http_errors import HTTPError

LIMIT = 1 << 20
CHUNKED = {"transfer-encoding": "chunked"}
ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def fed(coding: str, parts: Iterable[bytes], most: int = LIMIT) -> bytes:
    decoder = Decoder(coding, most)
    found = b"".join([decoder.feed(part) for part in parts])
    decoder.finish()
    return found


def refused(coding: str, data: bytes, most: int = LIMIT) -> HTTPError:
    with pytest.raises(HTTPError) as caught:
        fed(coding, [data], most)
    return caught.value


class Client:
    """Sends a body in pieces; counts how many were asked for."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts
        self.num_read = 0

    async def receive(self) -> Message:
        part = self._parts[self.num_read]
        self.num_read += 1
        return {"type": "http.request", "body": part, "more_body": self.num_read < len(self._parts)}

    def read(self, coding: str, most: int = LIMIT) -> bytes:
        async def whole() -> bytes:
            receive = decoded(self.receive, Headers({"content-encoding": coding, **CHUNKED}), most)
            found = b""
            while True:
                message = await receive()
                found += message["body"]
                if not message["more_body"]:
                    return found

        return asyncio.run(whole())


def test_all_codings_are_there() -> None:
    assert set(CODINGS) == set(ENCODERS)


@pytest.mark.parametrize("coding", ENCODERS)
@given(data=st.binary(max_size=2000), size=st.integers(1, 700))
def test_whatever_is_sent_in_whatever_pieces_is_what_was_meant(coding: str, data: bytes, size: int) -> None:
    assert fed(coding, pieces(ENCODERS[coding](data), size)) == data


@given(data=st.binary(min_size=1, max_size=500), size=st.integers(1, 100))
def test_deflate_without_its_header(data: bytes, size: int) -> None:
    assert fed("deflate", pieces(raw_deflate(data), size)) == data


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_several_parts_are_one_body(coding: str) -> None:
    encode = ENCODERS[coding]
    sent = encode(b"ab") + encode(b"") + encode(b"cd")
    for size in (1, 7, 1000):
        assert fed(coding, pieces(sent, size)) == b"abcd"
    assert "more than 64 parts" in str(refused(coding, encode(b"") * (MAX_PARTS + 1)))


def test_a_frame_of_zstd_that_is_to_be_skipped() -> None:
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    assert fed("zstd", [skipped + zstd.compress(b"ab")]) == b"ab"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_what_is_wrong_is_refused(coding: str) -> None:
    whole = ENCODERS[coding](b"some text that is packed " * 20)
    wrongs = [b"{}", b"\0" * 50, whole[:-1], whole[:5], whole + b"x"]
    if coding != "zstd":  # whose checksum is left out
        wrongs.append(whole[:-6] + b"\0" * 6)
    for wrong in wrongs:
        error = refused(coding, wrong)
        assert error.answer.status == 400
        assert coding in str(error)


def test_a_window_of_zstd_that_takes_much_memory_is_refused() -> None:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    sent = packer.compress(b"x" * 1000) + packer.flush()
    assert refused("zstd", sent).answer.status == 400


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_the_limit_is_one_of_what_is_meant(coding: str) -> None:
    encode = ENCODERS[coding]
    assert len(fed(coding, [encode(b"a" * 1000)], most=1000)) == 1000
    assert refused(coding, encode(b"a" * 1001), most=1000).answer.status == 413


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "gzip, gzip", "zstd, gzip"])
def test_of_a_bomb_little_is_read(coding: str) -> None:
    """At most a small part of 64 MiB is decoded if one is allowed. The outer one of two nested bombs is short."""
    bomb = bytes(64 * LIMIT)
    for name in coding.split(", "):
        bomb = ENCODERS[name](bomb)
    parts = [*pieces(bomb, max(1, len(bomb) // 50)), *[b"x" * 100] * 50]
    client = Client(parts)
    with pytest.raises(HTTPError) as caught:
        client.read(coding)
    assert caught.value.answer.status == 413
    assert client.num_read <= (50 if "," in coding else 5)


def test_bytes_that_mean_nothing_count_too() -> None:
    skipped = b"\x50\x2a\x4d\x18" + (1 << 30).to_bytes(4, "little")
    client = Client([skipped, *[b"x" * 65536] * 100])
    with pytest.raises(HTTPError) as caught:
        client.read("zstd")
    assert caught.value.answer.status == 413
    assert client.num_read == 17, "a megabyte, and no more"


def test_codings_are_undone_from_the_last_to_the_first() -> None:
    sent = zstd.compress(gzip.compress(b"abc"))
    assert Client([sent]).read("gzip, zstd") == b"abc"
    with pytest.raises(HTTPError):
        Client([sent]).read("zstd, gzip")
    for unknown in ("br", "gzip, compress", "gzip, gzip, gzip"):
        with pytest.raises(HTTPError) as caught:
            Client([sent]).read(unknown)
        assert caught.value.answer.status == 415
        assert caught.value.answer.headers["accept-encoding"] == "gzip, deflate, zstd"


def test_a_disconnect_is_handed_on() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    found = decoded(receive, Headers({"content-encoding": "gzip", **CHUNKED}), LIMIT)
    assert asyncio.run(found())["type"] == "http.disconnect"  # pyright: ignore[reportArgumentType]


def skipped(num_bytes: int) -> bytes:
    """Return a skippable frame of zstd."""
    return b"\x50\x2a\x4d\x18" + num_bytes.to_bytes(4, "little") + bytes(num_bytes)


def received(body: bytes, coding: str, most: int) -> bytes:
    left = pieces(body, 1 << 16)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def receive_all() -> bytes:
        receive_decoded = decoded(receive, Headers({"content-encoding": coding, **CHUNKED}), most)
        return b"".join([(await receive_decoded())["body"] for _ in range(len(left))])

    return asyncio.run(receive_all())


def test_megabytes_between_two_codings_that_mean_nothing_are_refused() -> None:
    """The decoder keeps up to its window of such bytes, which no limit on content counts."""
    body = zstd.compress(skipped(3 * MAX_LEAD_BYTES) + zstd.compress(b"{}"))
    assert len(body) < 10_000
    with pytest.raises(HTTPError, match="bytes longer than its content") as caught:
        received(body, "zstd, zstd", 8 * MAX_LEAD_BYTES)
    assert caught.value.answer.status == 400


@pytest.mark.parametrize("coding", ["gzip, zstd", "zstd, gzip", "zstd, zstd", "deflate, gzip"])
def test_content_that_cannot_be_compressed_passes_two_codings(coding: str) -> None:
    content = random.Random(0).randbytes(3 * MAX_LEAD_BYTES)
    body = content
    for name in coding.split(", "):
        body = ENCODERS[name](body)
    assert received(body, coding, 4 * MAX_LEAD_BYTES) == content
