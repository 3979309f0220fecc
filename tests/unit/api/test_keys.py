"""Keys, quotas, and what tenants can learn of each other, at a real server."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server_process import PATIENCE_S, ServerProcess
from twostroke.api.admission import TokenBucket, TokenQuotas
from twostroke.api.gate import ADMIN_PATHS
from twostroke.api.keys import Keys
from twostroke.errors import InvalidParameter
from twostroke.explain.timeline import MASKED_REQUEST

PROMPT = "def quicksort(values):\n    '''Sorts.'''\n" * 8


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerProcess]:
    keys = [flag for key in ("ann:s3cret-of-ann", "bob:s3cret-of-bob", "s3cret:plain") for flag in ("--api-key", key)]
    running = ServerProcess(*keys, "--tokens-per-minute", "2000")
    yield running
    running.stop()


def ask(server: ServerProcess, secret: str, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    return server.post("/v1/completions", body, authorization=f"Bearer {secret}")


def guarded_tokens(server: ServerProcess, text: str) -> list[int]:
    answer = server.post("/tokenize", {"prompt": text}, authorization="Bearer s3cret-of-bob")
    return answer.json()["tokens"]


def test_names_are_told_from_secrets() -> None:
    keys = Keys(["ann:one", "ann:two", "no name:three", ":four", "five"])
    assert [keys.tenant_of(secret) for secret in (b"one", b"two")] == ["ann", "ann"]
    for secret in (b"no name:three", b":four", b"five"):
        tenant = keys.tenant_of(secret)
        assert tenant is not None
        assert tenant.startswith("key-")
    for secret in (b"", b"ann", b"ann:one", b"four", b"three"):
        assert keys.tenant_of(secret) is None


def test_a_secret_is_one_tenants() -> None:
    with pytest.raises(InvalidParameter, match="two tenants have the same secret"):
        Keys(["ann:same", "bob:same"])
    done = subprocess.run(
        [sys.executable, "-m", "twostroke", "serve", "--port", "0", "--api-key", "same", "--admin-api-key", "same"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "Use a different key for the administrator" in done.stderr


@pytest.mark.parametrize("secret", ["nobody", "ann:s3cret-of-ann", "s3cret-of-an", "S3cret-of-ann", "ann"])
def test_only_the_secret_opens(guarded: ServerProcess, secret: str) -> None:
    assert ask(guarded, secret).status_code == 401


def test_every_route_but_those_of_probes_needs_a_key_and_administration_its_own(guarded: ServerProcess) -> None:
    key = {"authorization": "Bearer s3cret-of-ann"}
    schema = guarded.http.get("/openapi.json", headers=key).json()
    routes = [(method, path) for path, methods in schema["paths"].items() for method in methods]
    assert len(routes) > 15
    for method, path in [*routes, ("get", "/openapi.json"), ("get", "/"), ("get", "/no/such/route")]:
        expected = 200 if path in ("/health", "/ready") else 403 if path in ADMIN_PATHS else 401
        assert guarded.http.request(method, path).status_code == expected, path
    for path in ADMIN_PATHS:
        response = guarded.http.request("post" if "reset" in path else "get", path, headers=key)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


def test_the_admin_key_opens_administration_and_the_page_and_nothing_else() -> None:
    server = ServerProcess("--api-key", "user-key", "--admin-api-key", "admin-key")
    admin, user = {"authorization": "Bearer admin-key"}, {"x-api-key": "user-key"}
    assert server.http.get("/server_info", headers=admin).json()["settings"]["admin_api_key"] == "set"
    assert server.http.get("/server_info", headers=user).status_code == 401
    both = ("/", "/page/page.js", "/v1/models", "/v1/models/", "/v1/models/embedded", "/metrics", "/live/state")
    for path in (*both, "/version", "/v1/capabilities", "/openapi.json"):
        for who in (user, admin, {"x-api-key": "admin-key"}, {"authorization": "Basic eDphZG1pbi1rZXk="}):
            for method in ("GET", "HEAD"):
                assert server.http.request(method, path, headers=who).status_code == 200, "the page is for both"
        refusal = server.http.get(path)
        assert refusal.status_code == 401
        assert refusal.headers["www-authenticate"].endswith('realm="twostroke"'), "RFC 9110, 11.6.1"
    assert server.http.post("/v1/completions", json={"prompt": "a"}, headers=admin).status_code == 401
    server.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    """Start a server with three tenants, one of whom has an odd name, an administrator and one slot."""
    running = ServerProcess(
        *("--api-key", "ann:a", "--api-key", "bob:b", "--api-key", "others:o"),
        *("--admin-api-key", "admin", "--max-num-seqs", "1"),
    )
    yield running
    running.stop()


def test_kv_by_tenant_names_nobody_to_another_tenant(shared: ServerProcess) -> None:
    def held(secret: str) -> dict[str, float]:
        text = shared.http.get("/metrics", headers={"authorization": f"Bearer {secret}"}).text
        found = re.findall(r'^twostroke:kv_cache_usage_perc_by_tenant\{.*tenant="([^"]+)"\} (\S+)', text, re.MULTILINE)
        return {tenant: float(share) for tenant, share in found}

    with ThreadPoolExecutor(1) as pool:
        of_ann = pool.submit(ask, shared, "a", max_tokens=400, ignore_eos=True)
        shared.wait_for("running", "/health", lambda answer: answer.json()["num_requests"] == 1)
        deadline = time.monotonic() + PATIENCE_S
        while not held("admin").get("ann"):
            assert time.monotonic() < deadline
        seen = {secret: held(secret) for secret in ("admin", "a", "b", "o")}
        assert of_ann.result().status_code == 200
    assert set(seen["admin"]) == set(seen["a"]) == {"ann"}
    for secret, name in (("b", "bob"), ("o", "others")):
        assert set(seen[secret]) == {name, "(others)"}, "her blocks are there, her name is not"
        assert seen[secret][name] == 0.0, "no tenant takes the others for itself"
        assert 0 < seen[secret]["(others)"] < 0.1
    assert held("admin") == {"ann": 0.0}, "her request has ended"


def test_a_timeline_is_for_its_own_tenant_and_names_nobody_else(shared: ServerProcess) -> None:
    server = shared

    def timeline(secret: str, name: str, **query: str) -> httpx.Response:
        key = {"authorization": f"Bearer {secret}"}
        return server.http.get(f"/v1/requests/cmpl-{name}/timeline", params=query, headers=key)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, "a", request_id="ann-4711", max_tokens=300, ignore_eos=True)
        server.wait_for("running", "/health", lambda answer: answer.json()["num_requests"] == 1)
        assert ask(server, "b", request_id="of-bob").status_code == 200
        assert first.result().status_code == 200
    for name, owner, other in (("ann-4711", "a", "b"), ("of-bob", "b", "a")):
        assert timeline(other, name).status_code == 404
        assert timeline(owner, name).json()["request_id"] == timeline("admin", name).json()["request_id"]
    assert "ann-4711" in timeline("admin", "of-bob").text, "the one slot was taken"
    for form in ("json", "text"):
        seen = timeline("b", "of-bob", format=form).text
        assert "ann" not in seen.replace("another", "")
        assert MASKED_REQUEST in seen


def test_pages_from_elsewhere_administer_nothing() -> None:
    server = ServerProcess()
    for origin, status in (("https://example.org", 403), ("null", 403), (server.url, 200)):
        assert server.http.post("/reset_prefix_cache", headers={"origin": origin}).status_code == status
    assert server.http.post("/reset_prefix_cache").status_code == 200
    server.stop()


def test_a_shared_system_prompt_is_computed_once(guarded: ServerProcess) -> None:
    """All questions of a tenant but the first find every full block of the shared instructions."""
    instructions = "# answer the question of a colleague, in one line\n" * 6
    usages = [
        ask(guarded, "s3cret-of-bob", prompt=f"{instructions}{number} + {number} = ").json()["usage"]
        for number in range(10, 18)
    ]
    shared = 16 * (len(guarded_tokens(guarded, instructions)) // 16)
    assert shared >= 48
    first, *others = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert first == 0
    assert min(others) >= shared - 16, "the last block of the instructions may hold a token of what is behind them"
    assert sum(others) / sum(usage["prompt_tokens"] for usage in usages) > 0.6


def test_no_cached_prefix_crosses_tenants_or_salts(guarded: ServerProcess) -> None:
    def cached(secret: str, salt: str | None = None) -> int:
        answer = ask(guarded, secret, cache_salt=salt)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("s3cret-of-ann") == 0
    assert cached("s3cret-of-ann") > 0
    assert cached("s3cret-of-bob") == 0
    assert cached("s3cret-of-bob", "x") == 0
    assert cached("s3cret-of-bob", "x") > 0
    assert cached("s3cret-of-ann", "x") == 0


def test_a_quota_that_is_used_up_refuses_this_tenant_alone(guarded: ServerProcess) -> None:
    answers = [ask(guarded, "plain", ignore_eos=True, max_tokens=400) for _ in range(8)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(refused) < 7
    assert {answer.status_code for answer in refused} == {429}
    assert int(refused[-1].headers["retry-after"]) >= 1
    assert refused[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert ask(guarded, "s3cret-of-bob").status_code == 200


def test_no_secret_is_ever_written(guarded: ServerProcess) -> None:
    ask(guarded, "s3cret-of-nobody")
    guarded.post("/v1/completions", {"prompt": "s3cret", "nonsense": "s3cret"}, authorization="Basic s3cret")
    information = guarded.http.get("/server_info", headers={"authorization": "Bearer s3cret-of-ann"})
    assert "s3cret" not in guarded.stderr
    assert "s3cret" not in information.text


def test_a_bucket_fills_up_to_a_minute_and_no_further() -> None:
    bucket = TokenBucket(tokens_per_minute=120)
    bucket.pay(119, now_s=0.0)
    assert bucket.wait_s(now_s=0.0) == 0.0
    bucket.pay(21, now_s=0.0)
    assert bucket.wait_s(now_s=0.0) == pytest.approx(10.0)
    assert bucket.wait_s(now_s=10.5) == 0.0
    bucket.pay(0, now_s=1000.0)
    bucket.pay(120, now_s=1000.0)
    assert bucket.wait_s(now_s=1001.0) == 0.0
    bucket.pay(4, now_s=1001.0)
    assert bucket.wait_s(now_s=1001.0) == pytest.approx(1.0)


def test_an_engine_that_was_started_again_is_not_counted_twice() -> None:
    quotas = TokenQuotas(100)
    assert quotas.wait_s("ann", 60, now_s=0.0) == 0.0
    assert quotas.wait_s("ann", 60, now_s=0.0) == 0.0
    assert quotas.wait_s("ann", 30, now_s=0.0) == 0.0, "30 more, by a new engine: 90"
    assert quotas.wait_s("ann", 45, now_s=0.0) > 0.0
    assert quotas.wait_s("bob", 0, now_s=0.0) == 0.0
