"""The server under load: questions about its model, and requests to it as bytes.

It may be any server. Prompts are therefore token ids if it accepts them, and otherwise words of one token each. A
workload's prompts are token ids. As text, id i is word i of a short list, so what two prompts share as ids they
share as text, and a prompt of n ids has n words. A tokenizer is asked which words are one token each: text decoded
from random ids would not be encoded as the same ids.

The server's own figures of a run are the difference between two readings of /metrics (Prometheus text).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from twostroke.errors import InvalidParameter, SetupError
from twostroke.measure.serve.load import HttpClient, HttpFailure, LoadRun, Origin, PlannedRequest, run_load, run_loop
from twostroke.measure.serve.openai_wire import PATHS, EndpointName, TokenCounts, body
from twostroke.measure.workload import Workload, WorkloadRequest

MIN_WORDS = 32
"""Minimum number of words; with fewer, prompts would hardly differ."""

_REPEATS = 8

_FREQUENT_WORDS = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
    you were all her she there would their we him been has when who will no more if out so up said what its about than
    into them can only other time new some could these two may first then do any like my now over such our man me even
    most made after also did many off before must well back through years where much your way down should because long
    each just state those people too day still under last while own right place world old great year end take make
    self return def class import None True False else try except raise yield pass break continue lambda assert
    name value list str int data file path type key args line text len open read write size index count start stop
"""
CANDIDATES = tuple(_FREQUENT_WORDS.split())
"""Frequent words of English, and of Python, on which the embedded model was trained."""


def candidate_texts() -> list[str]:
    """Return texts whose token counts show which words are one token: each candidate once, then each repeated."""
    # a single word may need an extra token for its beginning; in a row, each must add exactly one
    return [f" {word}" * times for times in (1, 1 + _REPEATS) for word in CANDIDATES]


def one_token_words(num_tokens: Sequence[int]) -> list[str]:
    """Return the candidates that are one token each at any place in a text.

    Args:
        num_tokens: tokens of each of `candidate_texts`, without special tokens.

    Raises:
        InvalidParameter: too few words are one token.
    """
    once, often = num_tokens[: len(CANDIDATES)], num_tokens[len(CANDIDATES) :]
    words = [word for word, a, b in zip(CANDIDATES, once, often, strict=True) if b - a == _REPEATS]
    if len(words) < MIN_WORDS:
        limit = (
            f"{len(words)} of {len(CANDIDATES)} frequent words are one token in this tokenizer; {MIN_WORDS} are needed"
        )
        raise InvalidParameter("prompts", "text", limit, "Send token ids: --prompts token-ids.")
    return words


def as_text(token_ids: Sequence[int], words: Sequence[str]) -> str:
    """Return a prompt of ids as words; it begins with a space, so that the first word is like the others.

    >>> as_text([0, 2, 3], ["the", "of", "and"])
    ' the and the'
    """
    return "".join(f" {words[token_id % len(words)]}" for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """Sums over all labels, by sample name."""

    counters: Mapping[str, float]
    histograms: Mapping[str, tuple[float, float]]
    """Sum and count by family name."""

    @classmethod
    def parse(cls, text: str) -> MetricsReading:
        """Parse the text of /metrics.

        Raises:
            ValueError: the text is not in Prometheus format.
        """
        counters: dict[str, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.type == "counter" and sample.name.endswith("_total"):
                    counters[sample.name] += sample.value
                elif family.type in ("histogram", "summary") and sample.name == f"{family.name}_sum":
                    sums[family.name] += sample.value
                elif family.type in ("histogram", "summary") and sample.name == f"{family.name}_count":
                    counts[family.name] += sample.value
        return cls(dict(counters), {name: (sums[name], count) for name, count in counts.items()})

    def since(self, before: MetricsReading) -> dict[str, dict[str, float]]:
        """Return what was counted and observed between the two readings; unchanged values are left out.

        >>> earlier = MetricsReading({"tokens_total": 5.0}, {"ttft_seconds": (1.0, 2.0)})
        >>> MetricsReading({"tokens_total": 9.0}, {"ttft_seconds": (4.0, 4.0)}).since(earlier)
        {'counted': {'tokens_total': 4.0}, 'means': {'ttft_seconds': 1.5}}
        """
        counted = {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()}
        means: dict[str, float] = {}
        for name, (total, count) in self.histograms.items():
            old_total, old_count = before.histograms.get(name, (0.0, 0.0))
            if count > old_count:
                means[name] = (total - old_total) / (count - old_count)
        return {"counted": {name: value for name, value in counted.items() if value}, "means": means}


_QUESTION_LIMIT_S = 60.0
_QUESTIONS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """Address of the server, and the fields that all requests share."""

    origin: Origin
    model: str
    endpoint: EndpointName = "completions"
    api_key: str | None = field(default=None, repr=False)
    words: tuple[str, ...] = ()
    """Words that prompts are written in; empty: prompts are token ids."""
    temperature: float | None = 0.0
    ignore_eos: bool = True
    token_counts: TokenCounts = "usage"
    extra_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    request_timeout_s: float | None = None
    """Seconds after which a first token is useless, sent in a header of our own; None: not sent."""

    def plan(self, workload: Workload, request_ids: Sequence[str] = ()) -> list[PlannedRequest]:
        """Encode a workload's requests in advance, so that nothing is left to do when one is due.

        Args:
            workload: its token ids are below the model's vocabulary size, or stand for words.
            request_ids: one id for each request, for servers that accept them (vLLM's `request_id`); empty: the
            server chooses.
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
        content = body(self.endpoint, prompt, request.max_tokens, self.token_counts, {**fields, **self.extra_fields})
        headers = {"accept": "text/event-stream", **authorization(self.api_key)}
        if self.request_timeout_s is not None:
            headers["x-request-timeout"] = f"{self.request_timeout_s:.3f}"
        return self.origin.request("POST", PATHS[self.endpoint], headers, content)


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """Requests sent to one target in one run."""

    target: ServerTarget
    workload: Workload
    request_ids: Sequence[str] = ()
    max_concurrency: int | None = None


def run_loads(loads: Sequence[TargetLoad], timeout_s: float = 3600.0) -> list[LoadRun]:
    """Send several loads at once, each over its own connections; they begin together, and all are awaited."""

    async def run(load: TargetLoad) -> LoadRun:
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
    """Return the header with the API key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


class ServerQueries:
    """Client for the questions of a load generator; answers are small and read completely."""

    def __init__(self, client: HttpClient, api_key: str | None) -> None:
        self._client = client
        self._headers = authorization(api_key)

    async def first_model(self) -> str:
        """Return the name of the first served model.

        Raises:
            SetupError: the server gives no name.
        """
        answer = await self._json("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise SetupError(f"/v1/models names no model ({str(answer)[:80]}). Give --model.") from error

    async def count_tokens(self, model: str, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text, without special tokens (vLLM's /tokenize).

        Raises:
            SetupError: the server gives no tokens.
        """
        at_once = asyncio.Semaphore(_QUESTIONS_AT_ONCE)

        async def count(text: str) -> int:
            async with at_once:
                asked = {"model": model, "prompt": text, "add_special_tokens": False}
                answer = await self._json("POST", "/tokenize", msgspec.json.encode(asked))
            try:
                return len(answer["tokens"])
            except (KeyError, TypeError) as error:
                raise SetupError(f"/tokenize returned no tokens ({str(answer)[:80]}). Give --tokenizer.") from error

        return list(await asyncio.gather(*(count(text) for text in texts)))

    async def metrics(self) -> MetricsReading | None:
        """Return a reading of /metrics, or None if it cannot be read."""
        try:
            status, content = await self._get("GET", "/metrics")
            return MetricsReading.parse(content.decode()) if status == 200 else None
        except (SetupError, ValueError):
            return None

    async def _json(self, method: str, path: str, content: bytes | None = None) -> Any:
        status, answer = await self._get(method, path, content)
        if status != 200:
            raise SetupError(f"{path} returned status {status}: {answer[:300].decode('utf-8', 'replace')}")
        try:
            return msgspec.json.decode(answer)
        except msgspec.MsgspecError as error:
            raise SetupError(f"{path} returned invalid JSON ({error})") from error

    async def _get(self, method: str, path: str, content: bytes | None = None) -> tuple[int, bytes]:
        answer = WholeAnswer()
        try:
            async with asyncio.timeout(_QUESTION_LIMIT_S):
                await self._client.send(self._client.origin.request(method, path, self._headers, content), answer)
        except (HttpFailure, TimeoutError) as error:
            reason = str(error) or f"no answer within {_QUESTION_LIMIT_S:g} s"
            where = f"{self._client.origin.host}:{self._client.origin.port}"
            raise SetupError(f"{where}{path}: {reason}. Is a server running there?") from error
        return answer.status, bytes(answer.content)


class WholeAnswer:
    """Reader that keeps the whole answer; an `AnswerReader`."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    def on_head(self, status: int, headers: Mapping[bytes, bytes], time_s: float) -> None:
        self.status = status

    def on_body(self, part: bytes, time_s: float) -> None:
        self.content += part
