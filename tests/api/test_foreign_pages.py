"""Web pages of others: what a browser sends for them is refused; programs and the server's own page are let in."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server_process import SERVE, ServerProcess, viewing
from twostroke.api.gate import HostNames, check_state_change
from twostroke.api.http_errors import HTTPError
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter

ELSEWHERE = "http://elsewhere.example"


def is_known(names: HostNames, host: str) -> bool:
    try:
        names.check(host)
    except HTTPError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "local", "everywhere"),
    [
        ("", True, True),
        ("localhost", True, True),
        ("LocalHost:8000", True, True),
        ("localhost.", True, True),
        ("page.localhost:8000", True, True),
        ("127.0.0.1:8000", True, True),
        ("127.9.9.9", True, True),
        ("[::1]:8000", True, True),
        ("[::1]", True, True),
        ("api.example.com:443", True, True),
        ("a.b.example.org", True, True),
        ("example.org", False, False),
        ("192.168.1.5:8000", False, True),
        ("[fe80::1]:8000", False, True),
        ("twostroke:8000", False, True),
        ("gpu.local", False, True),
        ("twostroke.default.svc.cluster.local:8000", False, True),
        ("vm.internal", False, True),
        ("elsewhere.example", False, False),
        ("elsewhere.example:8000", False, False),
        ("localhost.elsewhere.example", False, False),
        ("127.0.0.1.elsewhere.example", False, False),
        ("api.example.com.elsewhere.example", False, False),
        ("[::1].elsewhere.example", False, False),
        ("localhost@elsewhere.example", False, False),
    ],
)
def test_names_of_a_server(host: str, local: bool, everywhere: bool) -> None:
    allowed = ("api.example.com", "*.example.org")
    assert is_known(HostNames("127.0.0.1", allowed), host) is local
    assert is_known(HostNames("0.0.0.0", allowed), host) is everywhere
    assert is_known(HostNames("127.0.0.1", ("*",)), host)


def test_the_bound_name_is_a_name() -> None:
    assert is_known(HostNames("10.0.0.7"), "10.0.0.7:8000")
    assert is_known(HostNames("Gpu.Example.com"), "gpu.example.com:8000")
    with pytest.raises(HTTPError, match=r"accept the host name '10.0.0.7'.*--allowed-hosts"):
        HostNames("127.0.0.1").check("10.0.0.7")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:8000", "a b", "", "*.*.example", "a/b"])
def test_what_is_no_host_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidParameter, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(name,))


def may_change(cors_origins: tuple[str, ...] = (), **headers: str) -> bool:
    try:
        check_state_change(
            {"host": "localhost:8000", **{k.replace("_", "-"): v for k, v in headers.items()}}, cors_origins
        )
    except HTTPError:
        return False
    return True


def test_who_may_change_something() -> None:
    json = "application/json"
    for own in ("http://localhost:8000", "HTTP://LOCALHOST:8000"):
        assert may_change(origin=own, authorization="Basic eDp4")
    assert may_change(authorization="Basic eDp4"), "no page: a program"
    for origin in (ELSEWHERE, "null", "http://localhost:8001", "http://localhost", "file://", ""):
        assert not may_change(origin=origin, authorization="Basic eDp4")
        assert not may_change(origin=origin, authorization="basic eDp4", content_type=json)
        assert not may_change((ELSEWHERE, "*"), origin=origin, authorization="Basic eDp4")
        assert not may_change(origin=origin)
        assert not may_change(origin=origin, content_type="text/plain")
        assert may_change(origin=origin, content_type=f"{json}; charset=utf-8"), "a browser asks first, and hears no"
        assert may_change(origin=origin, authorization="Bearer x")
        assert may_change(origin=origin, x_api_key="x")
    assert may_change((ELSEWHERE,), origin=ELSEWHERE)
    assert check_state_change({"host": "a.example", "origin": "https://a.example:443"}, ()) is None


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Server on which everything can be changed, with its keys in files."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("# of the team\n\n  ann:s3cret-of-ann  \ns3cret-plain\r\n", encoding="utf-8")
    (folder / "admin").write_text("\ufeffs3cret-admin\n", encoding="utf-8")
    running = ServerProcess(
        *("--api-key-file", str(folder / "keys"), "--admin-api-key-file", str(folder / "admin"), "--lab"),
        *("--allowed-hosts", "api.example.com", "--cors-origins", "*"),
        command=SERVE,
    )
    yield running
    running.stop()


def password(secret: str) -> str:
    return "Basic " + base64.b64encode(f"browser:{secret}".encode()).decode()


CHANGES = [
    ("POST", "/v1/completions", "s3cret-of-ann"),
    ("POST", "/v1/chat/completions", "s3cret-of-ann"),
    ("POST", "/v1/messages", "s3cret-of-ann"),
    ("POST", "/v1/responses", "s3cret-of-ann"),
    ("POST", "/v1/embeddings", "s3cret-of-ann"),
    ("POST", "/api/chat", "s3cret-of-ann"),
    ("POST", "/api/generate", "s3cret-of-ann"),
    ("POST", "/api/embed", "s3cret-of-ann"),
    ("POST", "/api/embeddings", "s3cret-of-ann"),
    ("POST", "/v1/requests/cmpl-1/abort", "s3cret-of-ann"),
    ("POST", "/v1/requests/cmpl-1/abort", "s3cret-admin"),
    ("POST", "/reset_prefix_cache", "s3cret-admin"),
    ("POST", "/pools", "s3cret-admin"),
    ("POST", "/lab/experiment", "s3cret-admin"),
    ("DELETE", "/lab/experiment", "s3cret-admin"),
]


def test_every_route_that_changes_something_is_among_them(guarded: ServerProcess) -> None:
    schema = guarded.http.get("/openapi.json", headers={"x-api-key": "s3cret-plain"}).json()
    harmless = {"/v1/messages/count_tokens", "/tokenize", "/detokenize", "/api/show"}
    found = {
        (method.upper(), path.replace("{request_id}", "cmpl-1").replace("{request_id:path}", "cmpl-1"))
        for path, methods in schema["paths"].items()
        for method in methods
        if method not in ("get", "head") and path not in harmless
    }
    assert found == {(method, path) for method, path, _ in CHANGES}


@pytest.mark.parametrize(("method", "path", "secret"), CHANGES)
def test_a_stored_password_changes_nothing_for_pages_from_elsewhere(
    guarded: ServerProcess, method: str, path: str, secret: str
) -> None:
    def status(**headers: str) -> int:
        # an empty list is not a request: a caller that is let in gets an error about that
        return guarded.http.request(method, path, json=[], headers=headers).status_code

    assert status(authorization=password(secret), origin=ELSEWHERE) == 403
    assert status(authorization=password(secret), origin="null") == 403
    let_in = {200, 400, 404}
    assert status(authorization=password(secret), origin=guarded.url) in let_in
    assert status(authorization=password(secret)) in let_in
    assert status(authorization=f"Bearer {secret}", origin=ELSEWHERE) in let_in
    assert status(authorization=password("nobody"), origin=guarded.url) == 401


def test_keys_of_files_are_keys(guarded: ServerProcess) -> None:
    def status(path: str, secret: str) -> int:
        return guarded.http.get(path, headers={"authorization": f"Bearer {secret}"}).status_code

    for secret in ("s3cret-of-ann", "s3cret-plain"):
        assert (status("/v1/models", secret), status("/server_info", secret)) == (200, 401)
    assert status("/server_info", "s3cret-admin") == 200
    for secret in ("# of the team", "ann", "s3cret"):
        assert status("/v1/models", secret) == 401
    command_line = Path(f"/proc/{guarded.process.pid}/cmdline").read_bytes()
    assert b"s3cret" not in command_line
    told = guarded.http.get("/server_info", headers={"x-api-key": "s3cret-admin"}).text
    assert "s3cret" not in told + guarded.stderr
    assert '"api_key":"set"' in told


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/completions", "/page/page.js", "/openapi.json"])
def test_another_name_is_answered_nothing(guarded: ServerProcess, path: str) -> None:
    key = {"x-api-key": "s3cret-plain"}
    for host in ("elsewhere.example", f"elsewhere.example:{guarded.url.rpartition(':')[2]}"):
        answer = guarded.http.get(path, headers={"host": host, **key})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "unknown_host"
        assert "elsewhere.example" in answer.json()["error"]["message"]
    for host in ("localhost", "127.0.0.1", "api.example.com", "[::1]:80"):
        assert guarded.http.get(path, headers={"host": host, **key}).status_code in (200, 405)


def test_anthropic_clients_read_their_own_shape(guarded: ServerProcess) -> None:
    answer = guarded.http.post("/v1/messages", json={}, headers={"host": "elsewhere.example"})
    assert answer.json()["error"]["type"] == "permission_error"


def test_without_keys_a_page_from_elsewhere_may_not_send_what_needs_no_permission(server: ServerProcess) -> None:
    body = '{"prompt": "x", "max_tokens": 1}'
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = server.http.post("/v1/completions", content=body, headers={"origin": ELSEWHERE, **kind})
        assert answer.status_code == 403
    own = {"origin": server.url, "content-type": "application/json"}
    assert server.http.post("/v1/completions", content=body, headers=own).status_code == 200


def test_a_recording_answers_to_its_own_names_too(server: ServerProcess, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    log.write_bytes(server.http.get("/flight_recorder").content)
    with viewing(log) as url:
        assert httpx.get(f"{url}/live/state").status_code == 200
        assert httpx.get(f"{url}/live/state", headers={"host": "elsewhere.example"}).status_code == 403
