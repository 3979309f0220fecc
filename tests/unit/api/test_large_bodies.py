"""A large body is read by a thread, in steps, and the event loop has its turn between them. The words are the same."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from pydantic import model_validator
from starlette.testclient import TestClient

from twostroke.api.app import answer_errors
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import WireObject
from twostroke.api.protocol.shapes import CHECKED_BYTES
from twostroke.api.routing import BodyRoute

LARGE = {"user": "u" * CHECKED_BYTES}
USER = {"role": "user", "content": "x"}


class Noted(WireObject):
    """Notes which thread looks at its fields."""

    user: str = ""
    number: int = 0

    @model_validator(mode="before")
    @classmethod
    def note(cls, value: Any) -> Any:
        if isinstance(value, dict):
            readers.append(threading.current_thread().name)
        return value


readers: list[str] = []


@pytest.fixture
def client() -> TestClient:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/noted")
    async def noted(body: Noted) -> dict[str, Any]:
        return {"number": body.number, "reader": threading.current_thread().name}

    @router.post("/chat")
    async def chat(body: ChatRequest) -> dict[str, Any]:
        return {"unknown": body.unknown_fields, "sent": sorted(body.model_fields_set)}

    app = FastAPI()
    app.include_router(router)
    answer_errors(app)
    return TestClient(app)


def test_a_large_body_is_looked_at_once_and_not_by_the_loop(client: TestClient) -> None:
    for more, prefix in (({}, ""), (LARGE, "twostroke-large-body")):
        readers.clear()
        answer = client.post("/noted", json={"number": 7, **more}).json()
        assert answer["number"] == 7
        (reader,) = readers
        assert reader.startswith(prefix)
        assert (reader == answer["reader"]) == (not more), "the loop looks at small ones alone"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER], "temperature": 101},
        {"messages": [USER], "max_tokens": 0},
        {"messages": [USER], "logit_bias": {"5": 101}},
        {"messages": []},
        {"messages": [USER], "stream_options": {f"k{i}": 1 for i in range(100)}},
        {"messages": [USER], "cache_salt": ""},
        {"messages": [USER], "n": 129},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": ""}}]},
        {"messages": [USER], "mood": 1},
        {"messages": [USER]},
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_what_is_said_does_not_depend_on_the_size(client: TestClient, body: dict[str, Any]) -> None:
    small, large = (client.post("/chat", json={**body, **more}) for more in ({"user": "u"}, LARGE))
    assert (small.status_code, small.json()) == (large.status_code, large.json())
    assert small.status_code == (200 if body.keys() <= {"messages", "mood"} and body["messages"] else 400)
