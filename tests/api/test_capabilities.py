"""The capabilities that the server reports are the ones that it has."""

from __future__ import annotations

from typing import Any

import pytest

from server_process import ServerProcess


@pytest.fixture(scope="module")
def capabilities(server: ServerProcess) -> dict[str, Any]:
    return server.http.get("/v1/capabilities").json()


def test_model_and_limits(capabilities: dict[str, Any], server: ServerProcess) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert capabilities["model"]["names"] == [model["id"]]
    assert capabilities["limits"]["max_model_len"] == model["max_model_len"]
    assert capabilities["model"]["embedding_dimensions"] == 256
    assert capabilities["model"]["has_chat_template"] is True
    assert capabilities["priority"] is True


def test_every_endpoint_is_there(capabilities: dict[str, Any], server: ServerProcess) -> None:
    schema = server.http.get("/openapi.json").json()
    assert set(capabilities["endpoints"]) == set(schema["paths"])
    for path, told in capabilities["endpoints"].items():
        assert {method.lower() for method in told["methods"]} == set(schema["paths"][path])


MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "import", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
}
VALUES: dict[str, Any] = {
    "suffix": "x",
    "verbosity": "low",
    "modalities": ["audio"],
    "functions": [{"name": "f"}],
    "chat_template": "x",
    "background": True,
    "truncation": "auto",
    "top_logprobs": 1,
    "previous_response_id": "resp_1",
}
"""Where an object will not do."""


@pytest.mark.parametrize("path", MINIMAL)
def test_what_is_said_to_be_refused_is_refused_by_name(
    capabilities: dict[str, Any], server: ServerProcess, path: str
) -> None:
    refused = capabilities["endpoints"][path]["refused"]
    assert refused
    for name, why in refused.items():
        answer = server.post(path, MINIMAL[path] | {name: VALUES.get(name, {"some": "thing"})})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400, (name, message)
        assert name in message, message
        assert why in message, message


@pytest.mark.parametrize("path", MINIMAL)
def test_no_field_of_the_tables_is_unknown(capabilities: dict[str, Any], server: ServerProcess, path: str) -> None:
    told = capabilities["endpoints"][path]
    names = [*told["supported"], *told["bookkeeping"], *told["refused"]]
    empty = dict.fromkeys(name for name in names if name not in MINIMAL[path])
    answer = server.post(path, empty | MINIMAL[path])
    assert answer.status_code == 200, answer.text
    assert "x-ignored-params" not in answer.headers


ASKS = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hello"}]}, "max_completion_tokens"),
    "/v1/responses": ({"input": "hello"}, "max_output_tokens"),
}


@pytest.mark.parametrize("path", ASKS)
def test_the_servers_limit_on_answers_is_told_and_holds_where_a_request_sets_none(
    capabilities: dict[str, Any], reasoning_server: ServerProcess, path: str
) -> None:
    limits = reasoning_server.http.get("/v1/capabilities").json()["limits"]
    assert (capabilities["limits"]["default_max_tokens"], limits["default_max_tokens"]) == (None, 12)
    body, limit = ASKS[path]
    body = {**body, "temperature": 0}

    def num_tokens(**more: Any) -> int:
        usage = reasoning_server.post(path, body | more).json()["usage"]
        return usage.get("completion_tokens", usage.get("output_tokens"))

    assert num_tokens() == 12
    assert num_tokens(**{limit: None}) == 12
    assert num_tokens(**{limit: 20}) == 20, "a request's own limit takes precedence"
    assert num_tokens(**{limit: 3}) == 3
    if path == "/v1/chat/completions":
        assert num_tokens(min_tokens=15) == 15, "a default refuses nothing"


def test_a_completion_keeps_openais_default(reasoning_server: ServerProcess) -> None:
    answer = reasoning_server.post("/v1/completions", {"prompt": "x", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_parsers(capabilities: dict[str, Any], reasoning_server: ServerProcess) -> None:
    other = reasoning_server.http.get("/v1/capabilities").json()
    assert (capabilities["reasoning"]["parser"], other["reasoning"]["parser"]) == (None, "deepseek_r1")
    assert "hermes" in capabilities["tool_calls"]["known_parsers"]
    assert "auto" not in capabilities["tool_calls"]["tool_choice"]
    assert {"json", "regex", "grammar", "choice"} <= set(capabilities["structured_outputs"])
