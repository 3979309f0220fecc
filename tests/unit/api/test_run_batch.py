"""A batch over an engine that only echoes, and can die; and over the real one."""

from __future__ import annotations

import asyncio
import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile.fields import fields_of, value_of, wrong_for
from benchmarks.reproduce.hostile_files import BATCH, KINDS, mutated_copy
from twostroke.api.batch_file import BatchRequest, read_requests
from twostroke.api.calls import CALLS
from twostroke.api.context import ServerContext
from twostroke.api.protocol.fields import MAX_CONTAINERS
from twostroke.api.protocol.shapes import CHECKED_BYTES
from twostroke.api.run_batch import BatchCount, answer_file, run_batch
from twostroke.client.engine_client import EngineHealth, EngineState
from twostroke.client.input_processor import InputProcessor
from twostroke.client.load import EngineLoad, LoadMeter
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.config.engine import EngineConfig
from twostroke.config.server import ServerConfig
from twostroke.engine.facts import EngineFacts
from twostroke.errors import EngineError, EngineUnavailable, InvalidParameter
from twostroke.model.model_files import find_model
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.request import FinishReason

TOKENIZER = find_model("embedded", with_weights=False).tokenizer()
FACTS = EngineFacts(
    model="echo",
    tokenizer_path="",
    max_model_len=4096,
    max_logprobs=20,
    vocab_size=4096,
    hidden_size=64,
    eos_token_ids=(0,),
    max_num_seqs=4,
    num_blocks=100_000,
    block_size=16,
    prefix_tokens=16,
    uses_priority=False,
    serves_background=True,
    is_fair=False,
    dtype="float32",
    kv_cache_dtype="f32",
    kernels="reference",
    num_threads=1,
    kv_bytes_per_token=1,
    num_layers=1,
    architecture="LlamaForCausalLM",
    num_parameters=1000,
    quantization=None,
    weight_bytes=4000,
    startup_lines=(),
)


class EchoEngine:
    """Answers each prompt with itself, some rounds of the loop later; the prompt "die" kills it.

    Args:
        deaths: how often "die" does so before it is answered like any other.
        comes_back: whether it is started again.
    """

    def __init__(self, deaths: int = 0, *, comes_back: bool = True) -> None:
        self.facts, self.tokenizer, self.inputs = FACTS, TOKENIZER, InputProcessor.of_engine(FACTS, TOKENIZER)
        self.deaths, self.comes_back = deaths, comes_back
        self.state = EngineState.RUNNING
        self.prompts: list[str] = []
        self.streams: set[EchoStream] = set()
        self.most_streams = 0

    def now_s(self) -> float:
        return 0.0

    def health(self) -> EngineHealth:
        health = EngineHealth(self.state, "it is gone.")
        if self.state is EngineState.STARTING:  # the look was at a dead one; by the next, it is back
            self.state = EngineState.RUNNING
        return health

    def generate(self, submission: Submission) -> EchoStream:
        if self.state is not EngineState.RUNNING:
            raise EngineUnavailable("it is being started again.")
        assert submission.kind is OutputKind.FINAL
        text = TOKENIZER.decode(submission.prompt.prompt_token_ids)
        self.prompts.append(text)
        stream = EchoStream(self, submission.request_id or "", text)
        self.streams.add(stream)
        self.most_streams = max(self.most_streams, len(self.streams))
        return stream

    @property
    def is_idle(self) -> bool:
        return not self.streams

    def load(self, tenant: str) -> EngineLoad:
        return LoadMeter(FACTS.max_num_seqs, is_fair=False).load(tenant)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> bool:
        return False

    def die(self) -> None:
        self.deaths -= 1
        self.state = EngineState.STARTING if self.comes_back else EngineState.FAILED
        for stream in self.streams:
            stream.is_dead = True


class EchoStream:
    def __init__(self, engine: EchoEngine, request_id: str, text: str) -> None:
        self.engine, self.request_id, self.text = engine, request_id, text
        self.is_dead = False
        self.work = asyncio.ensure_future(self.answer())

    async def answer(self) -> None:
        for _ in range(len(self.text) % 7 + 2):  # answers arrive in another order than requests
            await asyncio.sleep(0)
        if self.text == "die" and self.engine.deaths > 0:
            self.engine.die()

    def listen(self, wake: Callable[[], object], handler: object = None) -> None:
        self.work.add_done_callback(lambda _: wake())

    def take(self) -> list[RequestOutput]:
        if not self.work.done():
            return []
        if self.is_dead:
            raise EngineError("the engine died under the request.")
        part = CompletionOutput(0, self.text, (1, 2), None, None, FinishReason.LENGTH, None, 0)
        return [RequestOutput(self.request_id, self.text, (3,), None, [part], finished=True)]

    def close(self) -> None:
        self.work.cancel()
        self.engine.streams.discard(self)


def line(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    whole = {"model": "m", "prompt": prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": whole}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(engine: EchoEngine, requests: Path, output: Path, *, strict: bool = False, **more: Any) -> BatchCount:
    context = ServerContext.of(engine, ServerConfig(strict=strict), "m")
    return asyncio.run(run_batch(context, requests, output, progress=False, **more))


def results(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def texts(path: Path) -> dict[str, str]:
    return {name: row["response"]["body"]["choices"][0]["text"] for name, row in results(path).items()}


def test_every_request_is_answered_by_its_id(tmp_path: Path) -> None:
    prompts = {f"r{i}": "x" * i for i in range(1, 41)}
    requests = write(tmp_path / "in", *itertools.starmap(line, prompts.items()))
    engine = EchoEngine()
    assert answer(engine, requests, tmp_path / "out") == BatchCount(answered=40)
    assert texts(tmp_path / "out") == prompts
    assert list(texts(tmp_path / "out")) != list(prompts)
    assert engine.most_streams == 2 * FACTS.max_num_seqs
    assert not engine.streams


def test_a_bound_on_what_is_held_is_kept(tmp_path: Path) -> None:
    engine = EchoEngine()
    answer(engine, write(tmp_path / "in", *(line(f"r{i}", "x") for i in range(9))), tmp_path / "out", max_concurrency=3)
    assert engine.most_streams == 3


def test_a_second_run_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    rows = [line(f"r{i}", f"p{i}") for i in range(10)]
    answer(EchoEngine(), write(tmp_path / "in", *rows[:6]), tmp_path / "out")
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole[:-30])  # as if the first run had been killed while it wrote
    engine = EchoEngine()
    found = answer(engine, write(tmp_path / "in", *rows), tmp_path / "out")
    assert found == BatchCount(answered=5, done_before=5)
    assert len(engine.prompts) == 5
    assert texts(tmp_path / "out") == {f"r{i}": f"p{i}" for i in range(10)}


def test_lines_fail_alone_and_as_the_server_says_it(tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    rows = [
        line("other", "x", model="gpt"),
        line("hot", "x", temperature=-1),
        line("typed", "x", n="two"),
        line("stream", "x", stream=True),
        line("suffix", "x", suffix="y"),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        "no request",
        line("good", "fine"),
    ]
    found = answer(EchoEngine(), write(tmp_path / "in", *rows), tmp_path / "out")
    assert (found.answered + found.refused, found.bad_lines) == (7, 1)
    of = results(tmp_path / "out")
    told = {name: row["response"]["body"]["error"] for name, row in of.items() if name in {"other", "hot", "typed"}}
    assert told["other"]["code"] == "model_not_found"
    assert told["hot"]["param"] == "temperature"
    assert told["typed"]["param"] == "n"
    statuses = {str(name): row["response"] and row["response"]["status_code"] for name, row in of.items()}
    assert statuses.pop("chat") in (200, 400)  # the embedded model has no chat template of its own
    assert statuses == {
        "other": 404, "hot": 400, "typed": 400, "stream": 400, "suffix": 400, "None": None, "good": 200
    }  # fmt: skip
    again = answer(EchoEngine(), tmp_path / "in", tmp_path / "out")
    assert again == BatchCount(done_before=8)


def test_unknown_fields_are_refused_when_strict(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", line("a", "x", flavour=1), line("b", "x", flavour=1))
    assert answer(EchoEngine(), requests, tmp_path / "lax").answered == 2
    assert answer(EchoEngine(), requests, tmp_path / "strict", strict=True).refused == 2


def test_long_parameters_are_refused_as_the_server_refuses_them(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", line("long", "x", stop=["a" * 40_000]), line("good", "x", stop=["a"]))
    assert answer(EchoEngine(), requests, tmp_path / "out").refused == 1
    told = results(tmp_path / "out")["long"]["response"]
    assert told["status_code"] == 400
    assert "--max-parameter-items" in told["body"]["error"]["message"]


def test_requests_whose_engine_died_are_asked_again(tmp_path: Path) -> None:
    rows = [line("a", "longer"), line("b", "die"), line("c", "x")]
    found = answer(EchoEngine(deaths=1), write(tmp_path / "in", *rows), tmp_path / "out")
    assert found == BatchCount(answered=3)


def test_a_request_that_kills_every_engine_ends_with_an_error(tmp_path: Path) -> None:
    rows = [line("b", "die"), *(line(f"r{i}", "x") for i in range(12))]
    engine = EchoEngine(deaths=99)
    found = answer(engine, write(tmp_path / "in", *rows), tmp_path / "out", max_concurrency=1)
    assert engine.prompts.count("die") == 2
    assert found == BatchCount(answered=12, refused=1)
    assert results(tmp_path / "out")["b"]["response"]["status_code"] == 500


def test_an_engine_that_is_gone_ends_the_run_and_keeps_the_results(tmp_path: Path) -> None:
    rows = [line("a", "x"), line("b", "die"), line("c", "x")]
    requests = write(tmp_path / "in", *rows)
    with pytest.raises(EngineError, match=r"it is gone\. Run it again"):
        answer(EchoEngine(deaths=1, comes_back=False), requests, tmp_path / "out", max_concurrency=1)
    assert set(results(tmp_path / "out")) == {"a"}
    assert answer(EchoEngine(), requests, tmp_path / "out") == BatchCount(answered=2, done_before=1)


def test_the_real_engine_says_what_it_says_elsewhere(tmp_path: Path) -> None:
    rows = [line(f"r{i}", f"def f{i}(", model="embedded", max_tokens=4, temperature=0) for i in range(3)]
    requests = write(tmp_path / "in", *rows)
    run = answer_file(EngineConfig(), ServerConfig(), requests, tmp_path / "out", progress=False)
    assert asyncio.run(run) == BatchCount(answered=3)
    of = results(tmp_path / "out")
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in of.values()} == {4}


def test_files_are_looked_at_before_the_model_is_loaded(tmp_path: Path) -> None:
    nothing = EngineConfig()
    with pytest.raises(InvalidParameter, match="requests="):
        asyncio.run(answer_file(nothing, ServerConfig(), tmp_path / "none", tmp_path / "out"))
    with pytest.raises(InvalidParameter, match="max_concurrency=0"):
        asyncio.run(answer_file(nothing, ServerConfig(), tmp_path / "none", tmp_path / "out", max_concurrency=0))


def test_large_values_of_every_wrong_type_fail_alone(tmp_path: Path) -> None:
    """Each field with a value that is wrong for it, the kinds in turn: none ends the batch, and none is answered."""
    rows: list[bytes] = []
    for url, kind in CALLS.items():
        schema = kind.body.model_json_schema()
        operation = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
        for number, field in enumerate(fields_of({**schema, "paths": {url: operation}})):
            wrong = wrong_for(field)
            body = field.body(value_of(wrong[number % len(wrong)], 100_000))
            head = b'{"custom_id": "%b %b", "method": "POST", "url": "%b", "body": ' % tuple(
                part.encode() for part in (url, field.path, url)
            )
            rows.append(head + body + b"}\n")
    good = json.dumps(line("good", "fine")).encode() + b"\n"
    (tmp_path / "in").write_bytes(b"".join([*rows, good]))
    found = answer(EchoEngine(), tmp_path / "in", tmp_path / "out")
    assert found.answered + found.refused + found.bad_lines == len(rows) + 1
    assert found.answered >= 1
    told = [json.loads(row) for row in (tmp_path / "out").read_text().splitlines()]
    assert len(told) == len(rows) + 1 > 60
    for row in told:
        assert row["error"] is not None or row["response"]["status_code"] in (200, 400, 404), row["custom_id"]
        assert len(json.dumps(row)) < 2000, "no value is sent back"
    (last,) = (row["response"] for row in told if row["custom_id"] == "good")
    assert last["body"]["choices"][0]["text"] == "fine"


def with_body(url: str, body: str) -> bytes:
    return f'{{"custom_id": "large", "method": "POST", "url": "{url}", "body": {body}}}\n'.encode()


PADDING = f'"user": "{"u" * CHECKED_BYTES}"'
PARTS = ",".join(['{"type": "text", "text": "["}'] * 3)
MESSAGES = ",".join([f'{{"role": "user", "content": [{PARTS}]}}'] * (MAX_CONTAINERS // 5 + 1))


@pytest.mark.parametrize(
    ("url", "body", "status", "told"),
    [
        ("/v1/completions", f'{{"prompt": {"[1.5" + ",1.5" * 30_000}]}}', 400, "a whole number"),
        ("/v1/chat/completions", f'{{"messages": [{MESSAGES}]}}', 413, "more than 32768 lists and objects"),
        ("/v1/completions", f'{{"prompt": "x", {PADDING}, "zz": {"9" * 5000}}}', 400, "not valid JSON"),
        ("/v1/completions", f'{{"prompt": "x", {PADDING}, "max_tokens": 2}}', 200, ""),
        ("/v1/completions", f'{{"prompt": "x", {PADDING}, "stop": [1]}}', 400, "stop"),
    ],
)
def test_large_bodies_have_the_limits_of_the_http_doors(
    tmp_path: Path, url: str, body: str, status: int, told: str
) -> None:
    (tmp_path / "in").write_bytes(with_body(url, body))
    answer(EchoEngine(), tmp_path / "in", tmp_path / "out")
    response = results(tmp_path / "out")["large"]["response"]
    assert response["status_code"] == status
    assert told in response["body"].get("error", {}).get("message", "")


def test_a_large_line_that_is_nested_too_deeply_is_no_request(tmp_path: Path) -> None:
    body = f'{{"prompt": "x", {PADDING}, "zz": {"[" * 5000}{"]" * 5000}}}'
    (tmp_path / "in").write_bytes(with_body("/v1/completions", body) + json.dumps(line("good", "fine")).encode())
    assert answer(EchoEngine(), tmp_path / "in", tmp_path / "out") == BatchCount(answered=1, bad_lines=1)


def test_nothing_is_made_of_a_large_body_before_its_shape_is_right(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(with_body("/v1/completions", f'{{"prompt": ["a", {{}}{",{}" * 300_000}]}}'))
    (found,) = read_requests(tmp_path / "in", frozenset(CALLS))
    assert isinstance(found, BatchRequest)
    assert isinstance(found.body, bytes)
    tracemalloc.start()
    answer(EchoEngine(), tmp_path / "in", tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(found.body)


@pytest.mark.parametrize("seed", range(60))
def test_a_mutated_file_never_ends_the_batch(tmp_path: Path, seed: int) -> None:
    """Through the whole path: each line has one result, and a second run finds them all."""
    kind = KINDS["batch file"]
    (tmp_path / "sound").mkdir()
    kind.write(tmp_path / "sound")
    requests = mutated_copy(kind, tmp_path / "sound", tmp_path / "copy", seed) / BATCH
    found = answer(EchoEngine(), requests, tmp_path / "out")
    told = [json.loads(row) for row in (tmp_path / "out").read_text().splitlines()]
    assert found.answered + found.refused + found.bad_lines == len(told)
    for row in told:
        assert row["error"] is not None or row["response"]["status_code"] in (200, 400, 404, 413), row
    again = answer(EchoEngine(), requests, tmp_path / "out")
    assert again == BatchCount(done_before=len(told))


def test_half_a_character_in_any_text_of_a_line_is_refused(tmp_path: Path) -> None:
    rows = [
        line("a\ud800", "x"),
        line("url", "x") | {"url": "\ud800"},
        line("prompt", "\ud800"),
        line("model", "x", model="\ud800"),
        line("name", "x", **{"\ud800": 1}),
        line("value", "x", temperature="\ud800"),
        line("inner", "x", stream_options={"\ud800": 1}),
        line("good", "fine"),
    ]
    found = answer(EchoEngine(), write(tmp_path / "in", *rows), tmp_path / "out")
    assert found.answered + found.refused + found.bad_lines == len(rows)
    assert results(tmp_path / "out")["good"]["response"]["status_code"] == 200
    assert answer(EchoEngine(), tmp_path / "in", tmp_path / "out") == BatchCount(done_before=len(rows))
