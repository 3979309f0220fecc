"""Requests made from the published schema, right ones and wrong ones: what a server answers, and what is left of it.

`make soak` sends more than 10,000, CI a seeded part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from benchmarks.serving.local_server import IdleState, LocalServer, at_rest
from server_process import ServerProcess
from twostroke.api.protocol.fields import FieldTreatment, field_treatments
from twostroke.api.reference import ENDPOINTS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
"""Not positive_data_acceptance: what no schema can say (a prompt longer than the context, a template that refuses a
conversation) is refused with 400."""
REFUSED_UNREAD = {413: [negative_data_rejection]}
"""Statuses that say nothing of what is wrong with the data."""
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "min_tokens": 2, "n": 2, "best_of": 2}
"""Of a request, so that ten thousand end today."""
LONG_BY_DEFAULT = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
"""What bounds them there, without which they take what the context leaves."""
PATIENCE_S = 30.0
NUM_EXAMPLES = settings().max_examples // 5
"""Of one operation, right ones and as many wrong ones."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def drilled() -> Iterator[ServerProcess]:
    """A server of its own, so that what is left of it is this module's doing."""
    server = ServerProcess("--flight-recorder-minutes", "0.1", "--tool-call-parser", "hermes")
    before = left(server)
    yield server
    assert left(server) == before
    server.stop()
    # warnings repeat the names of unknown fields, which are arbitrary
    mistakes = [line for line in server.lines if line.startswith("ERROR") and "internal error" in line]
    assert not mistakes, mistakes


def left(server: ServerProcess) -> IdleState:
    """Return what a server holds at rest, except for open files: connections may be kept."""
    return replace(at_rest(LocalServer(server.url, server.process.pid)), num_open_files=0)


def test_every_answer_is_one_that_the_schema_names(drilled: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{drilled.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    num_sent = sum(drill(operation, mode) for operation in operations for mode in MODES)
    assert num_sent >= 17 * NUM_EXAMPLES  # more than 10,000 in `make soak`


def drill(operation: Any, mode: GenerationMode) -> int:
    """Send requests to one operation; return how many."""
    can_be_wrong = operation.body or operation.query  # every text is a path
    if mode is GenerationMode.NEGATIVE and not can_be_wrong:
        return 0
    num_sent = 0

    @settings(max_examples=NUM_EXAMPLES if can_be_wrong or operation.path_parameters else 1)
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        nonlocal num_sent
        num_sent += 1
        if mode is GenerationMode.POSITIVE:
            make_servable(case.body, case.path)
        answer = case.call(timeout=PATIENCE_S)
        # a list that is too long may be a body that is too large: it is refused before it is read
        case.validate_response(answer, checks=CHECKS, excluded_checks=REFUSED_UNREAD.get(answer.status_code, []))
        if answer.status_code >= 400:
            check_error(case.path, answer.json())

    send()
    return num_sent


def check_error(path: str, body: Any) -> None:
    """Check that an error has the shape that OpenAI's, Anthropic's or Ollama's clients read."""
    if path.startswith("/api/"):
        assert body.keys() == {"error"}
        assert body["error"]
        return
    is_anthropic = path.startswith("/v1/messages")
    assert set(body) == ({"type", "error"} if is_anthropic else {"error"})
    assert set(body["error"]) == {"message", "type"} | (set() if is_anthropic else {"param", "code"})
    assert body["error"]["message"]


def make_servable(body: Any, path: str) -> None:
    """Bounds what a right request asks for, and takes out what is refused in any case, so that many are served.

    Messages are objects of any kind in the schema; almost none of these is a message. Wrong requests stay as they are.
    """
    kind = ENDPOINTS.get(f"POST {path}")
    if kind is None or not isinstance(body, dict):
        return
    for name, standing, _ in field_treatments(kind):
        if standing is FieldTreatment.REFUSED:
            body.pop(name, None)
    for name, most in MOST.items():
        if type(body.get(name)) is int:
            body[name] = min(body[name], most)
    if path in LONG_BY_DEFAULT and body.get(LONG_BY_DEFAULT[path]) is None:
        body[LONG_BY_DEFAULT[path]] = MOST["max_tokens"]
    if path in ("/api/chat", "/api/generate"):
        body["options"] = {"num_predict": MOST["max_tokens"]}
    if path in ("/v1/chat/completions", "/api/chat"):
        body["messages"] = [{"role": "user", "content": "def f("}]
    if "model" in body:
        body["model"] = "embedded"
