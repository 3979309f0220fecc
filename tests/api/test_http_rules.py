"""Rules of RFC 9110 and 9112 for servers, as a table of requests, byte for byte, and their expected answers."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass

import pytest

from raw_http import RawAnswer, connect, length, receive, say
from server_process import ServerProcess
from twostroke.api.bodies import JSON_PATHS

BODY = b'{"prompt":"x","max_tokens":1}'
STREAM = b'{"prompt":"x","max_tokens":2,"stream":true,"ignore_eos":true}'
JSON = b"content-type: application/json\r\n"
CHUNKS = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n"


def request(line: bytes, *headers: bytes, host: bytes = b"host: localhost\r\n", body: bytes = b"") -> bytes:
    """Return a request after which the server closes the connection."""
    return line + b"\r\n" + host + b"connection: close\r\n" + b"".join(headers) + b"\r\n" + body


def get(*headers: bytes, path: bytes = b"/health", host: bytes = b"host: localhost\r\n") -> bytes:
    return request(b"GET " + path + b" HTTP/1.1", *headers, host=host)


def post(*headers: bytes, body: bytes = BODY, version: bytes = b"1.1", path: bytes = b"/v1/completions") -> bytes:
    return request(b"POST " + path + b" HTTP/" + version, JSON, *headers, body=body)


def sized(*headers: bytes, body: bytes = BODY) -> bytes:
    return post(length(body), *headers, body=body)


@dataclass(frozen=True)
class Rule:
    """One demand.

    Attributes:
        section: of the RFC, and what it says.
        sent: bytes of the request.
        status: of the one answer.
        has: expressions that match within the answer.
        lacks: expressions that do not.
    """

    section: str
    sent: bytes
    status: int
    has: tuple[bytes, ...] = ()
    lacks: tuple[bytes, ...] = ()


RULES = [
    # methods
    Rule(
        "9110 9.3.2 HEAD has no content",
        request(b"HEAD /health HTTP/1.1"),
        200,
        (rb"content-length: [1-9]", rb"\r\n\r\n$"),
    ),
    Rule("9110 9.3.2 HEAD of nothing", request(b"HEAD /nothing HTTP/1.1"), 404, (rb"\r\n\r\n$",)),
    Rule("9110 9.3.2 HEAD refused in the head", request(b"HEAD / HTTP/1.1", host=b""), 400, (rb"\r\n\r\n$",)),
    Rule(
        "9110 9.3.2 HEAD of a stream ends",
        request(b"HEAD /live/events HTTP/1.1"),
        200,
        (rb"event-stream", rb"\r\n\r\n$"),
    ),
    Rule("9110 9.3.7 OPTIONS", request(b"OPTIONS /health HTTP/1.1"), 204, (rb"allow: GET, HEAD, OPTIONS\r\n",)),
    Rule("9110 9.3.7 OPTIONS of a route", request(b"OPTIONS /tokenize HTTP/1.1"), 204, (rb"allow: POST, OPTIONS\r\n",)),
    Rule("9110 9.3.7 OPTIONS of the server", request(b"OPTIONS * HTTP/1.1"), 204, (rb"allow: GET, HEAD, POST",)),
    Rule(
        "9112 3.2.4 or by its URL",
        request(b"OPTIONS http://localhost/version HTTP/1.1"),
        204,
        (rb"allow: GET, HEAD, OPT",),
    ),
    Rule("9110 9.3.7 OPTIONS of nothing", request(b"OPTIONS /nothing HTTP/1.1"), 404),
    Rule(
        "9110 8.6 no length in a 204", request(b"OPTIONS /health HTTP/1.1"), 204, lacks=(rb"content-length", rb"transf")
    ),
    Rule("9110 15.5.6 Allow", get(path=b"/v1/completions"), 405, (rb"allow: POST, OPTIONS\r\n",)),
    Rule("9110 15.5.6 Allow of HEAD", request(b"HEAD /tokenize HTTP/1.1"), 405, (rb"allow: POST, OPT", rb"\r\n\r\n$")),
    Rule(
        "9110 15.5.6 Allow of all routes of a path",
        request(b"PUT /lab/experiment HTTP/1.1"),
        405,
        (rb"allow: GET, HEAD, POST, DELETE, OPTIONS\r\n",),
    ),
    Rule("9110 9.3.8 TRACE", request(b"TRACE /health HTTP/1.1"), 405, (rb"allow: GET, HEAD, OPTIONS",)),
    Rule("9110 9.3.6 CONNECT", request(b"CONNECT x:443 HTTP/1.1"), 501),
    Rule("9112 3 unknown method", request(b"BREW /health HTTP/1.1"), 501),
    Rule("9112 3 method is case-sensitive", request(b"get /health HTTP/1.1"), 501),
    # versions
    Rule("9110 15.6.6 version 9", request(b"GET / HTTP/9.9"), 505),
    Rule("9110 15.6.6 version 2", request(b"GET / HTTP/2.0"), 505),
    Rule("9110 15.6.6 version 1.2", get().replace(b"HTTP/1.1", b"HTTP/1.2"), 505, (rb"HTTP/1\.2 is not supported",)),
    Rule("9112 2.3 the version is case-sensitive", get().replace(b"HTTP/1.1", b"http/1.1"), 400),
    Rule("9110 15.6.6 preface of version 2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    Rule("9112 9.3 version 1.0 is closed", b"GET /health HTTP/1.0\r\n\r\n", 200, (rb"connection: close",)),
    Rule(
        "9112 6.1 no transfer coding to version 1.0",
        post(length(STREAM), body=STREAM, version=b"1.0"),
        200,
        (rb"\r\n\r\ndata: \{", rb"data: \[DONE\]\n\n$"),
        (rb"transfer-encoding", rb"\r\n[0-9a-f]+\r\n"),
    ),
    Rule(
        "9112 6.1 chunks to version 1.1", sized(body=STREAM), 200, (rb"transfer-encoding: chunked", rb"\r\n0\r\n\r\n$")
    ),
    Rule(
        "9110 15.2 nothing interim to version 1.0", post(length(BODY), b"expect: 100-continue\r\n", version=b"1.0"), 200
    ),
    Rule("9110 10.1.1 version 1.0 expects nothing", post(length(BODY), b"expect: x\r\n", version=b"1.0"), 200),
    # targets
    Rule("9112 3 target too long", get(path=b"/" + b"a" * 40_000), 414),
    Rule("9112 3 target of 8,000 bytes", get(path=b"/health?" + b"a" * 8_000), 200),
    Rule("9112 3.2.2 absolute target", get(path=b"http://localhost/health"), 200),
    Rule("9112 3.2.2 its host is what counts", get(path=b"http://localhost/health", host=b"host: y.example\r\n"), 200),
    Rule("9112 3.2.2 its scheme in any case", get(path=b"HTTP://localhost:80/health"), 200),
    Rule("9112 3.2.2 it goes before Host", get(path=b"http://y:z/health"), 400),
    Rule("9112 3.2.2 absolute target without a path", get(path=b"http://localhost"), 200, (rb"text/html",)),
    Rule("9112 3.2.2 with a query alone", get(path=b"https://localhost?a=b"), 200, (rb"text/html",)),
    Rule("9110 4.2.4 user in the target", get(path=b"http://user@localhost/health"), 400),
    Rule("9112 3.2 fragment in the target", get(path=b"/health#x"), 400, (rb"fragment",)),
    Rule("9112 3.2 and in its query", get(path=b"/health?a=b#c"), 400, (rb"fragment",)),
    Rule("9112 3.2 and in an absolute one", get(path=b"http://localhost/health#x"), 400, (rb"fragment",)),
    Rule("9112 3.2 bytes beyond ASCII", get(path="/h\u00e9alth".encode()), 400),
    Rule("9112 3.2 target is no path", get(path=b"health"), 400),
    Rule("9112 3.2.4 asterisk is for OPTIONS", get(path=b"*"), 400),
    # Host
    Rule("9112 3.2 no Host", get(host=b""), 400, (rb"'host' header",)),
    Rule("9112 3.2 two Hosts", get(b"host: localhost\r\n"), 400),
    Rule("9112 3.2 no Host by name", get(host=b"host: a b\r\n"), 400),
    Rule("9112 3.2 a URL as Host", get(host=b"host: http://x/\r\n"), 400),
    Rule("9112 3.2 empty Host", get(host=b"host:\r\n"), 200),
    Rule("9110 4.2.1 a port that there is not", get(host=b"host: localhost:99999\r\n"), 400, (rb"65535",)),
    Rule("9110 4.2.1 the first of those", get(host=b"host: localhost:65536\r\n"), 400),
    Rule("9110 4.2.1 the last port", get(host=b"host: localhost:65535\r\n"), 200),
    Rule("9110 4.2.1 zeros before a port", get(host=b"host: localhost:0000080\r\n"), 200),
    Rule("9110 4.2.1 a port without end", get(host=b"host: localhost:" + b"9" * 5000 + b"\r\n"), 400),
    Rule("9110 4.2.1 such a port in the target", get(path=b"http://localhost:65536/health"), 400),
    Rule("9112 3.2 Host with a port", get(host=b"HOST: [::1]:8000\r\n"), 200),
    # lines
    Rule("9112 2.2 empty lines before the request", b"\r\n\r\n" + get(), 200),
    Rule("9112 2.2 space before the first header", b"GET /health HTTP/1.1\r\n x: y\r\nhost: localhost\r\n\r\n", 400),
    Rule("9112 2.2 bare CR", get(b"x-cr: a\rb\r\n"), 400),
    Rule("9112 5.1 space before the colon", get(b"x-space : a\r\n"), 400),
    Rule("9112 5.2 folded header", get(b"x-folded: a\r\n b\r\n"), 400),
    Rule("9110 5.5 NUL in a value", get(b"x-nul: a\0b\r\n"), 400),
    Rule("9110 5.6.1 empty list members", get(b"connection: , ,keep-alive\r\n"), 200),
    Rule("9112 11.2 too many headers", get(*[b"x-%d: y\r\n" % i for i in range(200)]), 431),
    # bodies
    Rule("9112 6.3 two lengths", sized(b"content-length: 3\r\n"), 400),
    Rule("9112 6.3 list of lengths", post(b"content-length: 29, 29\r\n"), 400),
    Rule("9112 6.3 empty length", post(b"content-length:\r\n"), 400),
    Rule("9112 6.3 length with a sign", post(b"content-length: +29\r\n"), 400),
    Rule("9112 6.3 hexadecimal length", post(b"content-length: 0x1d\r\n"), 400),
    Rule("9112 6.3 length without end", post(b"content-length: 99999999999999999999999\r\n"), 400),
    Rule("9110 15.5.14 length too large", post(b"content-length: 99999999999\r\n", body=b""), 413),
    Rule("9112 6.1 length and chunks", sized(b"transfer-encoding: chunked\r\n"), 400),
    Rule("9112 6.1 unknown coding", post(b"transfer-encoding: gzip, chunked\r\n", body=CHUNKS), 501),
    Rule("9112 6.3 chunked is not the last", post(b"transfer-encoding: chunked, gzip\r\n", body=CHUNKS), 400),
    Rule("9112 7 chunked twice", post(b"transfer-encoding: chunked, chunked\r\n", body=CHUNKS), 400),
    Rule("9112 6.1 coding in version 1.0", post(b"transfer-encoding: chunked\r\n", body=CHUNKS, version=b"1.0"), 400),
    Rule("9112 7.1 chunks", post(b"transfer-encoding: chunked\r\n", body=CHUNKS), 200),
    Rule("9112 7 names of codings in any case", post(b"Transfer-Encoding: Chunked\r\n", body=CHUNKS), 200),
    Rule(
        "9112 7.1.1 chunk extensions are ignored",
        post(b"transfer-encoding: chunked\r\n", body=CHUNKS.replace(b"5\r\n", b'5;a=b;c="d"\r\n', 1)),
        200,
    ),
    Rule(
        "9112 7.1.1 spaces before a chunk extension are ignored",
        post(b"transfer-encoding: chunked\r\n", body=CHUNKS.replace(b"5\r\n", b"5 \t;a=b\r\n", 1)),
        200,
    ),
    Rule(
        "9110 6.5.1 trailers are no headers",
        post(
            b"transfer-encoding: chunked\r\ntrailer: x-request-id\r\n",
            body=CHUNKS[:-2] + b"x-request-id: from-the-trailer\r\nx-request-timeout: nonsense\r\n\r\n",
        ),
        200,
        lacks=(rb"from-the-trailer",),
    ),
    Rule("9112 7.1 bad chunk size", post(b"transfer-encoding: chunked\r\n", body=b"zz\r\n"), 400),
    Rule(
        "9112 7.1 a chunk without its line end",
        post(b"transfer-encoding: chunked\r\n", body=b"%x\r\n" % len(BODY) + BODY + b"0\r\n\r\n"),
        400,
    ),
    Rule(
        "9112 7.1 line feeds alone",
        post(b"transfer-encoding: chunked\r\n", body=CHUNKS.replace(b"\r\n", b"\n")),
        400,
    ),
    Rule("9112 6.3 coding identity", post(b"transfer-encoding: identity\r\n"), 400, (rb"not 'chunked'",)),
    # expectations
    Rule("9110 10.1.1 unknown expectation", sized(b"expect: miracles\r\n"), 417),
    Rule("9110 10.1.1 it may stand in a line of its own", sized(b"expect: miracles\r\nexpect: 100-continue\r\n"), 417),
    Rule(
        "9110 10.1.1 an answer instead of 100",
        post(b"content-length: 99999999\r\nexpect: 100-continue\r\n", body=b"").replace(b"connection: close\r\n", b""),
        413,
        (rb"connection: close",),
        (rb"100 Continue",),
    ),
    # types
    Rule(
        "9110 15.5.16 no JSON",
        sized().replace(b"application/json", b"text/plain"),
        415,
        (rb"accept: application/json",),
    ),
    Rule(
        "9110 8.3 two types in one",
        sized().replace(b"application/json", b"application/json, application/json"),
        415,
        (rb"the body is 'application/json, application/json'",),
    ),
    Rule("9110 5.3 two lines of types", sized(b"content-type: text/plain\r\n"), 400, (rb"\(content-type\)",)),
    Rule("9110 5.3 that say the same", sized(JSON), 400),
    Rule("6454 7.3 two origins", get(b"origin: http://localhost\r\n", b"origin: http://evil.example\r\n"), 400),
    Rule("9110 8.3.1 no subtype", sized().replace(b"application/json", b"json"), 415, (rb"the body is 'json'",)),
    Rule("9110 15.5.16 a form", sized().replace(b"application/json", b"application/x-www-form-urlencoded"), 415),
    Rule("9110 8.3 no type", sized().replace(JSON, b""), 415),
    Rule(
        "9110 8.3.1 types in any case", sized().replace(b"application/json", b'Application/JSON; Charset="UTF-8"'), 200
    ),
    Rule("9110 8.3 a type of JSON", sized().replace(b"application/json", b"application/vnd.x+json"), 200),
    Rule("8259 8.1 another charset", sized().replace(b"json\r\n", b"json; charset=utf-16\r\n"), 415, (rb"UTF-8",)),
    Rule("8259 8.1 bytes of another charset", sized(body=b'{"prompt":"\xe9","max_tokens":1}'), 400, (rb"(?i)UTF-8",)),
    Rule("9110 8.4 no coding", sized(b"content-encoding: identity\r\n"), 200),
    Rule("9110 12.5.3 unknown coding", sized(b"content-encoding: br\r\n"), 415, (rb"accept-encoding: gzip, deflate",)),
    Rule("9110 8.4 too many codings", sized(b"content-encoding: gzip, gzip, gzip\r\n"), 415),
    # lists (RFC 9110, 5.6.1)
    Rule("9110 10.1.1 no expectation at all", sized(b"expect: , ,\r\n"), 200),
    Rule("9110 5.6.1 empty members before a coding", post(b"transfer-encoding: ,chunked\r\n", body=CHUNKS), 200),
    Rule("9110 5.6.1 nothing but empty members", post(b"transfer-encoding: ,\r\n", body=CHUNKS), 400),
    Rule(
        "9110 5.3 a number in two lines",
        sized(b"x-request-timeout: 5\r\n", b"x-request-timeout: 9\r\n"),
        400,
        (rb"\(x-request-timeout\)",),
    ),
    # what the parser refuses, and why
    Rule("9110 5.1 no header name", get(b": x\r\n"), 400, (rb"not a valid HTTP request: Invalid header token",)),
    Rule("9112 2.2 line feeds without CR", get().replace(b"\r\n", b"\n"), 400, (rb"Expected CRLF",)),
    Rule("9112 3 a space behind the version", get().replace(b"1.1\r", b"1.1 \r", 1), 400, (rb"Expected CRLF",)),
    Rule("9112 3.2 a backslash for a slash", get(path=b"\\health"), 400, (rb"in url",)),
    Rule("9112 6.3 length with a space", post(b"content-length: 2 9\r\n"), 400, (rb"in Content-Length",)),
    Rule("9112 7.1 negative chunk", post(b"transfer-encoding: chunked\r\n", body=b"-1\r\n"), 400, (rb"chunk size",)),
    Rule(
        "9112 7.1 chunk of 2^68", post(b"transfer-encoding: chunked\r\n", body=b"F" * 17 + b"\r\n"), 400, (rb"verflow",)
    ),
    Rule(
        "9112 7.1 hexadecimal as in C",
        post(b"transfer-encoding: chunked\r\n", body=CHUNKS.replace(b"5\r\n", b"0x5\r\n", 1)),
        400,
        (rb"chunk size",),
    ),
    Rule("9112 7.1.1 a quote across lines", post(b"transfer-encoding: chunked\r\n", body=b'5;a="\r\n'), 400),
    Rule("9112 6.1 a parameter of a coding", post(b"transfer-encoding: chunked;q=1\r\n", body=CHUNKS), 400),
    Rule("8446 TLS without a certificate", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400),
    # bodies that are not there
    Rule("9110 8.4 coding of nothing", get(b"content-encoding: br\r\n"), 200),
    Rule("9110 8.4 coding of an empty body", get(b"content-encoding: br\r\n", length(b"")), 200),
    Rule("8259 2 no body", post(body=b""), 400, (rb"has no body; send a JSON object",)),
    # bodies that are compressed
    Rule(
        "1952 2.2 members of gzip",
        sized(b"content-encoding: gzip\r\n", body=gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        200,
    ),
    Rule("1952 2.2 zeros behind them", sized(b"content-encoding: gzip\r\n", body=gzip.compress(BODY) + bytes(9)), 400),
    Rule("9110 8.4.1 a weight of a coding", sized(b"content-encoding: gzip;q=1\r\n"), 415, (rb"accept-encoding",)),
    Rule("9110 8.4 identity many times", sized(b"content-encoding: identity, identity, ,identity\r\n"), 200),
    # what may be ignored
    Rule("9110 14.2 Range of a file", get(b"range: bytes=0-" + b"9" * 6000 + b"\r\n", path=b"/page/page.js"), 200),
    Rule("9110 13.1.3 a date that is none", get(b"if-modified-since: soon\r\n", path=b"/page/page.js"), 200),
    Rule("9110 4.2 escapes that are none", get(path=b"/v1/models/%zz%00%ff"), 404),
    Rule("9110 7.8 Upgrade", sized(b"connection: upgrade\r\nupgrade: h2c\r\n"), 200),
    Rule(
        "9110 7.8 Upgrade with chunks",
        post(b"transfer-encoding: chunked\r\nconnection: upgrade\r\nupgrade: h2c\r\n", body=CHUNKS),
        200,
    ),
    Rule("9110 14.2 Range", get(b"range: bytes=0-3\r\n"), 200),
    Rule("9110 12.5.1 Accept", get(b"accept: image/png\r\n"), 200),
    Rule("9110 13.1.2 If-None-Match", get(b'if-none-match: "x"\r\n'), 200),
    Rule("9110 5.1 unknown headers", get(b"x-whatever: 1\r\n"), 200),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.section)
def test_it_is_done(server: ServerProcess, rule: Rule) -> None:
    answer = say(server, rule.sent)
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1, answer
    parsed = RawAnswer.parse(answer)
    assert parsed.status == rule.status, answer
    assert parsed.headers["connection"] == "close"
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", parsed.headers["date"]), "9110 6.6.1"
    for expression in rule.has:
        assert re.search(expression, answer), answer
    for expression in rule.lacks:
        assert not re.search(expression, answer), answer
    if rule.status >= 400 and parsed.content:
        assert json.loads(parsed.content)["error"]["message"]


@pytest.mark.parametrize(
    "expected", [b"100-continue", b"100-CONTINUE", b", 100-continue", b"100-continue,100-continue"]
)
def test_the_body_is_asked_for_when_it_is_wanted(server: ServerProcess, expected: bytes) -> None:
    head = post(length(BODY), b"expect: " + expected + b"\r\n", body=b"")
    with connect(server) as connection:
        connection.sendall(head)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert receive(connection).status == 200


def test_a_connection_goes_on_until_it_is_told_to_end(server: ServerProcess) -> None:
    keeps = get().replace(b"connection: close\r\n", b"")
    head = keeps.replace(b"GET", b"HEAD")
    upgrade = keeps.replace(b"host: ", b"connection: upgrade\r\nupgrade: h2c\r\nhost: ")
    answer = say(server, keeps + head + upgrade + head + get())
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200"] * 5
    assert answer.count(b'"status"') == 3, "HEAD has no content"
    assert answer.count(b"connection: close") == 1


@pytest.mark.parametrize("framing", [length(BODY), b"transfer-encoding: chunked\r\n"])
@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_the_body_of_an_offer_of_another_protocol_is_read(server: ServerProcess, framing: bytes, size: int) -> None:
    """Clients of Java offer HTTP/2 with every request; the parser takes what follows for the other protocol."""
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    body = BODY if framing == length(BODY) else CHUNKS
    sent = (post(framing, offer, body=body).replace(b"connection: close\r\n", b"")) * 2 + get()
    answer = say(server, *[sent[i : i + size] for i in range(0, len(sent), size)])
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200"] * 3
    assert answer.count(b'"text_completion"') == 2


def test_head_is_get_without_its_content(server: ServerProcess) -> None:
    paths: dict[str, dict[str, object]] = server.http.get("/openapi.json").json()["paths"]
    found = [path for path, methods in paths.items() if "get" in methods and "{" not in path]
    assert len(found) > 10
    for path in [*found, "/", "/ping", "/page/page.js", "/openapi.json", "/v1/models/", "/v1/models/embedded"]:
        head = server.http.head(path)
        with server.http.stream("GET", path) as whole:
            assert head.status_code == whole.status_code, path
            assert head.headers.get("content-type") == whole.headers.get("content-type"), path
            assert ("content-length" in head.headers) == ("content-length" in whole.headers), path
        assert head.content == b""


def test_paths_that_take_json_are_those_of_the_schema(server: ServerProcess) -> None:
    paths: dict[str, dict[str, dict[str, object]]] = server.http.get("/openapi.json").json()["paths"]
    taking = {path for path, methods in paths.items() for method in methods.values() if "requestBody" in method}
    assert taking == JSON_PATHS


def test_a_list_of_models_ends_with_a_slash_or_without(server: ServerProcess) -> None:
    listed = server.http.get("/v1/models").json()
    assert server.http.get("/v1/models/").json() == listed
    assert server.http.get("/v1/models/embedded/").json() == server.http.get("/v1/models/embedded").json()
    for unknown in ("/v1/models/nobody", "/v1/models//", "/v1/models/embedded//"):
        assert server.http.get(unknown).status_code == 404
