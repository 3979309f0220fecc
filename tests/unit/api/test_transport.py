"""A real server answers malformed bytes with an error in OpenAI's shape; other clients are unaffected."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from raw_http import connect, length, say
from server_process import ServerProcess

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt":"x","max_tokens":1}'


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    running = ServerProcess(
        *("--head-timeout-s", "3", "--body-timeout-s", "1", "--max-unfinished-body-bytes", str(4 * 2**20))
    )
    yield running
    running.stop()


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + length(BODY) + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n" + length(BODY) + b"\r\n" + BODY,
        HEAD + length(BODY) + length(BODY) + b"\r\n" + BODY,
        HEAD + length(BODY) + b"content-length: 3\r\n\r\n" + BODY,
        HEAD + b"content-length: +29\r\n\r\n" + BODY,
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"x-folded: a\r\n b\r\n" + length(BODY) + b"\r\n" + BODY,
        HEAD + b"x-space : a\r\n" + length(BODY) + b"\r\n" + BODY,
        HEAD.replace(b"\r\n", b"\n") + length(BODY).replace(b"\r\n", b"\n") + b"\n" + BODY,
        HEAD + b"host: y\r\n" + length(BODY) + b"\r\n" + BODY,
        HEAD + b"authorization: a\r\nauthorization: b\r\n" + length(BODY) + b"\r\n" + BODY,
        HEAD + b"x-nul: a\0b\r\n" + length(BODY) + b"\r\n" + BODY,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        HEAD + b"".join(b"x-%d: y\r\n" % i for i in range(200)) + b"\r\n",
        HEAD + b"x-long: " + b"y" * 70_000 + b"\r\n\r\n",
        HEAD + b"x-unended: " + b"y" * 300_000,
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\0" * 100,
    ],
)
def test_bytes_that_two_readers_could_read_differently_are_refused(served: ServerProcess, request_bytes: bytes) -> None:
    answer = say(served, request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert 400 <= status < 500, answer
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert answer.count(b"HTTP/1.1") == 1, "one request, one answer"
    assert served.http.get("/health").status_code == 200


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = HEAD + length(BODY) + b"\r\n" + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (GET + b"\x16\x03\x01 garbage", [200, 400]),
        (GET + b"nonsense\r\n\r\n", [200, 400]),
        (POST + b"}", [200, 400]),
        (HEAD + b"content-length: %d\r\n\r\n" % (len(BODY) - 1) + BODY, [400, 400]),
        (HEAD + b"\r\n" + BODY, [400, 400]),
        (POST + POST + b"\0", [200, 200, 400]),
        (GET + POST + HEAD + b"content-length: x\r\n\r\n", [200, 200, 400]),
        (POST + CHUNKED + b"zz\r\n", [200, 400]),
        (POST + GET + CHUNKED + b"5\r\nhello\r\nzz\r\n", [200, 200, 400]),
        (POST + b"GET / HTTP/3.0\r\n\r\n", [200, 400]),
        (POST + b"BREW / HTTP/1.1\r\n\r\n", [200, 400]),
        (POST + b"GET / HTTP/1.1\r\n\r\n", [200, 400]),
        (POST + b"GET /" + b"a" * 70_000, [200, 414]),
        (POST + HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n", [200, 431]),
        (POST + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + b"garbage", [200, 200]),
        (GET * 10, [200] * 9 + [400]),
    ],
    ids=lambda given: repr(given)[-60:],
)
def test_whole_requests_before_bytes_that_are_none_are_answered(
    served: ServerProcess, sent: bytes, statuses: list[int]
) -> None:
    answers = say(served, sent)
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)] == statuses, answers
    assert answers.count(b"connection: close") == 1


def test_a_stream_ends_before_bytes_behind_it_are_refused(served: ServerProcess) -> None:
    """However many bytes follow, none is kept."""
    body = b'{"prompt":"x","max_tokens":40,"ignore_eos":true,"stream":true}'
    with connect(served) as connection:
        connection.sendall(HEAD + length(body) + b"\r\n" + body)
        answers = connection.recv(65536)
        connection.sendall(b"\0" * 1_000_000)
        while chunk := connection.recv(65536):
            answers += chunk
    whole, _, refusal = answers.partition(b"0\r\n\r\n")
    assert whole.endswith(b"data: [DONE]\n\n\r\n")
    assert refusal.startswith(b"HTTP/1.1 400")


def test_who_leaves_behind_bytes_that_are_none_is_seen_to_leave(served: ServerProcess) -> None:
    body = b'{"prompt":"x","max_tokens":3000,"ignore_eos":true,"n":4}'
    with connect(served) as connection:
        connection.sendall(HEAD + length(body) + b"\r\n" + body + b"\0" * 100_000)
        served.wait_for("begun", "/server_info", lambda answer: answer.json()["health"]["num_requests"] > 0)
    served.wait_for("ended", "/server_info", lambda answer: answer.json()["health"]["num_requests"] == 0)
    aborted = re.compile(r'request_success_total\{.*finished_reason="abort".*\} 4.0')
    served.wait_for("counted", "/metrics", lambda answer: aborted.search(answer.text) is not None)


def test_who_shuts_down_its_half_has_left(served: ServerProcess) -> None:
    body = b'{"prompt":"x","max_tokens":3000,"ignore_eos":true}'
    with connect(served) as connection:
        connection.sendall(HEAD + length(body) + b"\r\n" + body)
        served.wait_for("begun", "/server_info", lambda answer: answer.json()["health"]["num_requests"] > 0)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536) == b""
        served.wait_for("ended", "/server_info", lambda answer: answer.json()["health"]["num_requests"] == 0)


def test_a_body_that_comes_after_its_answer_is_no_new_head(served: ServerProcess) -> None:
    body = b" " * 5_000_000
    with connect(served) as connection:
        connection.sendall(HEAD + length(body) + b"\r\n")
        answers = connection.recv(65536)
        assert answers.startswith(b"HTTP/1.1 413")
        connection.sendall(body)  # the rest of it is read and dropped
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while chunk := connection.recv(65536):
            answers += chunk
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"413", b"200"]


def test_a_head_that_never_ends_is_given_up_while_others_are_served(served: ServerProcess) -> None:
    with connect(served) as silent, connect(served) as dripping, connect(served) as empty:
        dripping.sendall(HEAD)
        empty.sendall(b"\r\n")
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        for connection in (silent, dripping, empty):
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")
            assert connection.recv(65536) == b""


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages"])
def test_a_body_that_never_comes_is_given_up_while_others_are_served(served: ServerProcess, path: bytes) -> None:
    head = HEAD.replace(b"/v1/completions", path)
    with connect(served) as silent, connect(served) as half, connect(served) as chunked:
        silent.sendall(head + length(BODY) + b"\r\n")
        half.sendall(head + length(BODY) + b"\r\n" + BODY[:-1])
        chunked.sendall(head + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        for connection in (silent, half, chunked):
            answer = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))  # until it is closed
            told, _, body = answer.partition(b"\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 408")
            error = json.loads(body)["error"]
            assert error["message"] == "the body did not arrive within 1 s (--body-timeout-s)."
            assert error["type"] == ("timeout_error" if path == b"/v1/messages" else "invalid_request_error")


def test_a_flood_of_nonsense_does_not_fill_the_log(served: ServerProcess) -> None:
    def lines() -> list[str]:
        return [line for line in served.lines if "Invalid HTTP request" in line]

    before = len(lines())
    for _ in range(200):
        assert say(served, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert len(lines()) - before < 50  # they would have to take 50 s


def test_an_answer_that_nobody_reads_is_ended() -> None:
    """Otherwise the answer would hold its text and its blocks for as long as the client does not read."""
    server = ServerProcess("--answer-timeout-s", "1")
    try:
        body = b'{"prompt":"x","max_tokens":3000,"ignore_eos":true,"n":8,"logprobs":20,"stream":true}'
        with connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(HEAD + length(body) + b"\r\n" + body)
            assert connection.recv(16)
            server.wait_for("ended", "/server_info", lambda answer: answer.json()["health"]["num_requests"] == 0)
            aborted = re.compile(r'request_success_total\{.*finished_reason="abort".*\} 8.0')
            server.wait_for("counted", "/metrics", lambda answer: aborted.search(answer.text) is not None)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    finally:
        server.stop()


def test_one_connection_too_many_is_told_so() -> None:
    """At a server of its own: elsewhere a connection that a test before has left may be counted for a moment longer."""
    server = ServerProcess("--max-connections", "8", "--head-timeout-s", "600")
    try:
        with contextlib.ExitStack() as held:
            for _ in range(7):  # and the client's own
                held.enter_context(connect(server)).sendall(b"G")
            assert server.http.get("/health").status_code == 200
            assert say(server).startswith(b"HTTP/1.1 503")
            assert server.http.get("/health").status_code == 200
    finally:
        server.stop()


JSONS = [
    b"\xff\xfe{}",
    b'{"prompt": "\xc3\x28"}',
    b"[" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "max_tokens": 1e400}',
    b'{"prompt": "x", "seed": 99999999999999999999999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "stop": "\\ud800"}',
    b'{"prompt": "x", "stop": ["a", "\\udfff"]}',
    b'{"prompt": "x", "bad_words": ["\\ud800"]}',
    b'{"prompt": "x", "cache_salt": "\\ud800"}',
    b'{"prompt": "x", "request_id": "\\ud800"}',
    b'{"prompt": "x", "model": "\\ud800"}',
    b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
    b'{"prompt": "x", "structured_outputs": {"regex": "\\ud800"}}',
    b'{"prompt": "x", "structured_outputs": {"choice": ["\\ud800"]}}',
    b'{"prompt": "x", "structured_outputs": {"json": {"const": "\\ud800"}}}',
    b'"text"',
    b"null",
    b"",
    b"{",
]


@pytest.mark.parametrize("body", JSONS, ids=lambda body: repr(body[:50]))
def test_json_that_is_none_is_refused(served: ServerProcess, body: bytes) -> None:
    answer = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        b'"messages": [{"role": "user", "content": "\\ud800"}]',
        b'"messages": [{"role": "\\ud800", "content": "x"}]',
        b'"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udc00"}]}]',
        b'"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "\\ud800"}, "user": "\\ud800"',
        b'"messages": [{"role": "user", "content": "x"}], "\\ud800": 1',
        b'"messages": ' + b"[" * 5000,
    ],
    ids=lambda fields: repr(fields[:60]),
)
def test_half_characters_in_a_chat_break_nothing(served: ServerProcess, fields: bytes) -> None:
    body = b'{"max_tokens": 1, ' + fields + b"}"
    answer = served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    assert served.http.get("/health").status_code == 200


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    running = ServerProcess("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    try:
        assert running.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, verify=context)
        assert answer.status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")
    finally:
        assert running.stop() == 0


def test_a_body_without_its_content_type_is_told_so(served: ServerProcess) -> None:
    answer = served.http.post("/v1/completions", content=BODY, headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "content-type: application/json" in answer.json()["error"]["message"]


def test_a_body_that_has_not_arrived_when_the_server_ends_is_answered() -> None:
    server = ServerProcess("--drain-timeout-s", "0")
    with connect(server) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        server.wait_for("connected", "/health", lambda answer: answer.status_code == 200)
        assert server.stop() == 0
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the server is shutting down")
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize(
    "framing",
    [b"1d\r\n" + BODY + b"\r\n0\r\nx", b"1d\r\n" + BODY + b"\r\n0\r\nx: y", b"1d;x", b"1d\r\n" + BODY + b"\r\n0;x"],
    ids=["name of a trailer", "value of a trailer", "extension of a chunk", "extension of the last chunk"],
)
def test_what_frames_a_body_does_not_go_on_for_ever(served: ServerProcess, framing: bytes) -> None:
    """Framing is not part of the body, so no body limit counts it; the parser keeps what is incomplete."""
    filler = b"x" * 65536
    sent = 0
    with connect(served) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + framing)
        with contextlib.suppress(ConnectionError):
            while sent < 16 * 2**20:
                connection.sendall(filler)
                sent += len(filler)
    assert sent < 16 * 2**20
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_little_framing_is_read_in_any_pieces(served: ServerProcess) -> None:
    chunks = b"".join(b"1;%b\r\n%b\r\n" % (b"e" * 4000, BODY[i : i + 1]) for i in range(len(BODY)))
    with connect(served) as connection:
        connection.sendall(HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (chunks, b"0\r\n", b"x-trailer: ", b"y" * 30_000, b"\r\n\r\n"):
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200"), answer


def test_unfinished_bodies_have_a_total_bound(served: ServerProcess) -> None:
    """The one that came first is given up, at once; who sends a whole body beside them is served."""
    part = b'{"prompt":"' + b"x" * 3_000_000
    head = HEAD + length(part + b" ") + b"\r\n"
    with connect(served) as first, connect(served) as second, connect(served) as third:
        first.sendall(head + part)
        second.sendall(head + part)
        answer = b""
        while b"}}" not in answer:
            answer += first.recv(65536)
        third.sendall(head + b'{"prompt":"')
        assert answer.startswith(b"HTTP/1.1 503")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "--max-unfinished-body-bytes" in error["message"]
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
