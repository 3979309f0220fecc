"""A small real server of OpenAI's API whose tokens are words, and one that answers with given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class WordServer:
    """Answers "w w w ..." to everything; every knob is a behaviour that servers have."""

    api_key: str | None = None
    quota: int | None = None
    """Requests that are answered; more are refused with 429. None answers all."""
    gather: int = 0
    """Streams begin when so many requests have come at once: a sender that waits for answers never gets there."""
    tokens_a_chunk: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    def __post_init__(self) -> None:
        self._gathered = asyncio.Event()

    def app(self) -> Starlette:
        posts = {"/v1/completions": self.complete, "/v1/chat/completions": self.complete, "/tokenize": self.tokenize}
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        return Starlette(routes=[*routes, Route("/v1/models", self.models), Route("/metrics", self.metrics)])

    def models(self, request: Request) -> Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "wrong key", "type": "authentication_error"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "words", "object": "model"}]})

    async def tokenize(self, request: Request) -> Response:
        words = (await request.json())["prompt"].split()
        return JSONResponse({"count": len(words), "tokens": list(range(len(words)))})

    def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# TYPE words:requests_total counter\n"
            f'words:requests_total{{model_name="words"}} {len(self.bodies)}\n'
            "# TYPE words:ttft_seconds histogram\n"
            f'words:ttft_seconds_bucket{{le="+Inf"}} {len(self.bodies)}\n'
            f"words:ttft_seconds_sum {0.5 * len(self.bodies)}\nwords:ttft_seconds_count {len(self.bodies)}\n"
        )

    async def complete(self, request: Request) -> Response:
        asked = await request.json()
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "wrong key", "type": "authentication_error"}}, 401)
        if self.quota is not None and len(self.bodies) >= self.quota:
            return JSONResponse({"error": {"message": "full", "type": "overloaded"}}, 429, headers={"retry-after": "2"})
        self.bodies.append(asked)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way >= self.gather:
            self._gathered.set()
        return StreamingResponse(self.stream(asked), media_type="text/event-stream")

    async def stream(self, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            if self.gather:
                await self._gathered.wait()
            is_chat = "messages" in asked
            prompt = asked["messages"][0]["content"].split() if is_chat else asked["prompt"]
            prompt_tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
            if is_chat:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            total = asked.get("max_tokens") or asked["max_completion_tokens"]
            counts_along = asked.get("stream_options", {}).get("continuous_usage_stats", False)
            for begin in range(0, total, self.tokens_a_chunk):
                done = min(begin + self.tokens_a_chunk, total)
                text = " w" * (done - begin)
                choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if done == total else None}
                choice |= {"delta": {"content": text}} if is_chat else {"text": text}
                if asked.get("return_token_ids"):
                    choice["token_ids"] = [7] * (done - begin)
                yield _event({"choices": [choice], "usage": _usage(prompt_tokens, done) if counts_along else None})
            if asked.get("stream_options", {}).get("include_usage"):
                yield _event({"choices": [], "usage": _usage(prompt_tokens, total)})
            yield b"data: [DONE]\n\n"
        finally:
            self.under_way -= 1


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": 3}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "prompt_tokens_details": details}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextlib.contextmanager
def serving(server: WordServer) -> Iterator[str]:
    """Serve on a free port, in a thread; yield the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runner = uvicorn.Server(uvicorn.Config(server.app(), log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            runner.should_exit = True
            thread.join()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(*connections: Sequence[bytes | None]) -> AsyncIterator[str]:
    """A server that plays a script to each connection in turn, and then closes it; its base URL.

    In a script, None waits for the next request, and bytes are sent as one write.
    """
    scripts = iter(connections)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for part in next(scripts, ()):
                if part is None:
                    head = await reader.readuntil(b"\r\n\r\n")
                    lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                    await reader.readexactly(int(lengths[0]) if lengths else 0)
                else:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected, as some tests require
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(play, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
