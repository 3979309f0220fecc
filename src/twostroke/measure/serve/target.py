"""The server under load: its answers to small questions, and requests to it as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from twostroke.errors import SetupError
from twostroke.measure.serve.http_connection import HttpClient, HttpFailure, Origin
from twostroke.measure.serve.load import LoadRun, PlannedRequest, run_load, run_loop
from twostroke.measure.serve.openai_wire import PATHS, EndpointName, TokenCounts, body
from twostroke.measure.serve.prompts import as_text
from twostroke.measure.serve.server_metrics import MetricsReading
from twostroke.measure.workload import Workload, WorkloadRequest

_QUESTION_LIMIT_S = 60.0
_QUESTIONS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go and what all of them hold."""

    origin: Origin
    model: str
    endpoint: EndpointName = "completions"
    api_key: str | None = field(default=None, repr=False)
    words: tuple[str, ...] = ()
    """What prompts are written in; empty: they are token ids."""
    temperature: float | None = 0.0
    ignore_eos: bool = True
    token_counts: TokenCounts = "usage"
    more_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    patience_s: float | None = None
    """How long a first token is of use, said to the server in a header of ours; None says nothing."""

    def plan(self, workload: Workload, request_ids: Sequence[str] = ()) -> list[PlannedRequest]:
        """A workload's requests as bytes, so that nothing is left to do when one is due.

        Args:
            workload: its prompts hold ids below the model's vocabulary, or stand for words.
            request_ids: one each, for servers that take them (vLLM's `request_id`); empty leaves names to the server.
        """
        named = [{"request_id": name} for name in request_ids] or [{}] * len(workload)
        pairs = zip(workload.requests, named, strict=True)
        return [PlannedRequest(request.arrival_s, self._wire(request, name)) for request, name in pairs]

    def _wire(self, request: WorkloadRequest, name: Mapping[str, str]) -> bytes:
        fields: dict[str, Any] = {"model": self.model, **name}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.temperature is not None:
            fields["temperature"] = self.temperature
            if self.temperature > 0:
                fields["seed"] = request.seed
        prompt = as_text(request.prompt_token_ids, self.words) if self.words else request.prompt_token_ids
        content = body(self.endpoint, prompt, request.max_tokens, self.token_counts, {**fields, **self.more_fields})
        headers = {"accept": "text/event-stream", **authorization(self.api_key)}
        if self.patience_s is not None:
            headers["x-request-timeout"] = f"{self.patience_s:.3f}"
        return self.origin.request("POST", PATHS[self.endpoint], headers, content)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent to a target in one run."""

    target: Target
    workload: Workload
    request_ids: Sequence[str] = ()
    max_concurrency: int | None = None


def run_loads(loads: Sequence[Load], timeout_s: float = 3600.0) -> list[LoadRun]:
    """Sends several loads at once, each over connections of its own; they begin together and all are awaited."""

    async def run(load: Load) -> LoadRun:
        client = HttpClient(load.target.origin)
        try:
            plan = load.target.plan(load.workload, load.request_ids)
            return await run_load(client, plan, timeout_s=timeout_s, max_concurrency=load.max_concurrency)
        finally:
            await client.close()

    async def run_all() -> list[LoadRun]:
        return list(await asyncio.gather(*map(run, loads)))

    return run_loop(run_all())


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries the key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


class Questions:
    """Asks a server what a load generator has to know. Answers are small and are read whole."""

    def __init__(self, client: HttpClient, api_key: str | None) -> None:
        self._client = client
        self._headers = authorization(api_key)

    async def first_model(self) -> str:
        """The name of the first model that is served.

        Raises:
            SetupError: the server does not say.
        """
        answer = await self._json("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise SetupError(f"/v1/models names no model ({str(answer)[:80]}). Give --model.") from error

    async def count_tokens(self, model: str, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without those that frame a prompt (vLLM's /tokenize).

        Raises:
            SetupError: the server does not say.
        """
        at_once = asyncio.Semaphore(_QUESTIONS_AT_ONCE)

        async def count(text: str) -> int:
            async with at_once:
                asked = {"model": model, "prompt": text, "add_special_tokens": False}
                answer = await self._json("POST", "/tokenize", msgspec.json.encode(asked))
            try:
                return len(answer["tokens"])
            except (KeyError, TypeError) as error:
                raise SetupError(f"/tokenize gave no tokens ({str(answer)[:80]}). Give --tokenizer.") from error

        return list(await asyncio.gather(*(count(text) for text in texts)))

    async def metrics(self) -> MetricsReading | None:
        """A reading of /metrics; None where there is none that can be read."""
        try:
            status, content = await self._ask("GET", "/metrics")
            return MetricsReading.parse(content.decode()) if status == 200 else None
        except (SetupError, ValueError):
            return None

    async def _json(self, method: str, path: str, content: bytes | None = None) -> Any:
        status, answer = await self._ask(method, path, content)
        if status != 200:
            raise SetupError(f"{path} was answered with {status}: {answer[:300].decode('utf-8', 'replace')}")
        try:
            return msgspec.json.decode(answer)
        except msgspec.MsgspecError as error:
            raise SetupError(f"{path} was answered with what is no JSON ({error})") from error

    async def _ask(self, method: str, path: str, content: bytes | None = None) -> tuple[int, bytes]:
        answer = _WholeAnswer()
        try:
            async with asyncio.timeout(_QUESTION_LIMIT_S):
                await self._client.send(self._client.origin.request(method, path, self._headers, content), answer)
        except (HttpFailure, TimeoutError) as error:
            reason = str(error) or f"no answer within {_QUESTION_LIMIT_S:g} s"
            where = f"{self._client.origin.host}:{self._client.origin.port}"
            raise SetupError(f"{where}{path}: {reason}. Is a server running there?") from error
        return answer.status, bytes(answer.content)


class _WholeAnswer:
    """Keeps an answer; an AnswerReader."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        """See AnswerReader."""
        self.status = status

    def on_body(self, part: bytes, time_s: float) -> None:
        """See AnswerReader."""
        self.content += part
