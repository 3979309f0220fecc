"""The engine from prompt to output, on a random model: ends, failures, seeds, logs."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from model_folders import write_random_model
from twostroke import LLM, RequestOutput, SamplingParams
from twostroke.batch import NewRequest, ScheduledBatch, StepResult
from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.output_processor import OutputKind
from twostroke.client.text_engine import TextEngine, build_text_engine
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.engine.event_sinks import read_events
from twostroke.errors import (
    CorruptCheckpoint,
    DoesNotFit,
    EngineError,
    InvalidParameter,
    InvalidPrompt,
    ModelNotFound,
    SetupError,
    UnknownParameter,
)
from twostroke.events import RequestFinishedByCaller, StepScheduled
from twostroke.explain.timeline import timeline_of
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.outputs import JoinedDeltas
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.replay import replay
from twostroke.startup import loading, memory
from twostroke.startup.handover_setup import numerics_facts

PROMPT = {"prompt_token_ids": list(range(10, 60))}


@pytest.fixture(scope="module")
def folder(random_models: dict[str, Path]) -> str:
    return str(random_models["llama"])


def text_engine(model: str, wrap_executor: Callable[[Executor], Executor] | None = None, **config: Any) -> TextEngine:
    config = {"kv_cache_memory": 1 << 24, "threads": 1} | config
    return build_text_engine(EngineConfig.from_keywords(model=model, **config), wrap_executor)


def drain(engine: TextEngine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


class DelayedExecutor:
    """Hands a result out only after the next batch was decided: the loop of a device that runs beside the host."""

    max_in_flight = 2

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.results: deque[StepResult] = deque()
        self.deepest = 0

    def add_request(self, request: NewRequest) -> None:
        self.inner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        self.inner.submit(batch)
        self.results.append(self.inner.collect())
        self.deepest = max(self.deepest, len(self.results))

    def collect(self) -> StepResult:
        return self.results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        return self.inner.check_kv(check, token_ids)

    def close(self) -> None:
        self.inner.close()


def test_deciding_a_step_ahead_changes_no_token(folder: str) -> None:
    params = [
        SamplingParams(max_tokens=3 + i, seed=i, temperature=0.9, stop="e" if i % 3 == 0 else (), logprobs=1)
        for i in range(12)
    ]
    # the next step is decided before the engine knows that the text is complete
    params += [SamplingParams(seed=i, min_tokens=i, structured_outputs={"regex": "[a-z]{3}"}) for i in range(4)]
    prompts = [{"prompt_token_ids": list(range(i, 2 * i + 5))} for i in range(len(params))]

    def run(engine: TextEngine) -> list[Any]:
        ids = [engine.submit(p, q) for p, q in zip(prompts, params, strict=True)]
        done = drain(engine)
        return [(done[i].outputs[0].token_ids, done[i].outputs[0].text, done[i].outputs[0].logprobs) for i in ids]

    executors: list[DelayedExecutor] = []

    def delayed(inner: Executor) -> Executor:
        executors.append(DelayedExecutor(inner))
        return executors[-1]

    in_turn = run(text_engine(folder, max_num_seqs=4, max_num_batched_tokens=16))
    ahead = run(text_engine(folder, delayed, max_num_seqs=4, max_num_batched_tokens=16))
    assert ahead == in_turn
    assert executors[0].deepest == 2, "no batch was ever decided ahead"


def test_abort_frees_blocks_at_once(folder: str) -> None:
    engine = text_engine(folder)
    keep, drop = (engine.submit(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, seed=1)) for _ in range(2))
    for _ in range(4):
        engine.step()
    used = engine.engine.kv_usage.num_used
    assert engine.abort(drop)
    assert engine.engine.kv_usage.num_used < used
    assert not engine.abort(drop), "it had ended"
    outputs = drain(engine)
    assert [str(c.finish_reason) for c in outputs[drop].outputs] == ["abort"]
    assert len(outputs[keep].outputs[0].token_ids) == 30
    assert engine.engine.kv_usage.num_used == 0


def test_a_request_that_ends_in_the_queue_leaves_nothing_behind(folder: str) -> None:
    engine = text_engine(folder, max_num_seqs=1)
    first = engine.submit(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    queued = engine.submit(PROMPT, SamplingParams(max_tokens=4))
    engine.step()
    engine.abort(queued)
    outputs = drain(engine)
    assert {str(outputs[queued].outputs[0].finish_reason), str(outputs[first].outputs[0].finish_reason)} == {
        "abort",
        "length",
    }
    assert outputs[queued].outputs[0].token_ids == ()


def test_a_poisoned_request_fails_alone(tmp_path: Path) -> None:
    """The embedding of token 7 is NaN: a request with it gets an error, all others get their usual tokens."""
    folder = write_random_model(tmp_path, "llama", tie_word_embeddings=False)
    healthy = {
        f"r{i}": ({"prompt_token_ids": [20 + i] * (3 + i)}, SamplingParams(max_tokens=9, seed=i)) for i in range(4)
    }

    def run(engine: TextEngine, poison: bool) -> dict[str, RequestOutput]:
        for name, (prompt, params) in healthy.items():
            engine.submit(prompt, params, request_id=name)
        if poison:
            engine.submit({"prompt_token_ids": [20, 7, 21]}, SamplingParams(max_tokens=9), request_id="poison")
        return drain(engine)

    expected = run(text_engine(str(folder)), poison=False)
    engine = text_engine(str(folder), num_kv_blocks=64, kv_cache_memory=None)
    model = engine.engine._executor._runner._model  # type: ignore[attr-defined]
    model._rows_of.args[0][7] = float("nan")  # a file that holds it is not loaded
    for _ in range(3):  # blocks that held NaN are used again
        outputs = run(engine, poison=True)
        poisoned = outputs.pop("poison")
        assert str(poisoned.outputs[0].finish_reason) == "error"
        assert "not finite" in (poisoned.error or "")
        assert {n: o.outputs[0].token_ids for n, o in outputs.items()} == {
            n: o.outputs[0].token_ids for n, o in expected.items()
        }
    assert engine.engine.kv_usage.num_used == 0


def test_a_step_that_fails_takes_only_its_requests_along(folder: str) -> None:
    class Breaks:
        max_in_flight = 1

        def __init__(self, inner: Executor) -> None:
            self.inner, self.steps = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def submit(self, batch: ScheduledBatch) -> None:
            self.steps += 1
            if self.steps == 3:
                self.inner._runner._model.forward = lambda *_: 1 / 0  # type: ignore[attr-defined]
            self.inner.submit(batch)
            if self.steps == 3:
                del self.inner._runner._model.forward  # type: ignore[attr-defined]

    engine = text_engine(folder, Breaks, max_num_seqs=1)  # type: ignore[arg-type]
    broken = engine.submit(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    later = engine.submit(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    outputs = drain(engine)
    assert str(outputs[broken].outputs[0].finish_reason) == "error"
    assert "division by zero" in (outputs[broken].error or "")
    assert len(outputs[later].outputs[0].token_ids) == 8


def test_stop_strings_end_a_request_and_never_leak(folder: str) -> None:
    engine = text_engine(folder)
    free = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    text = drain_one(engine, free).outputs[0].text
    stop = text[10:13]
    ended = drain_one(engine, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=stop))
    assert ended.outputs[0].text == text[: text.index(stop)]
    assert ended.outputs[0].stop_reason == stop
    assert str(ended.outputs[0].finish_reason) == "stop"
    assert engine.engine.kv_usage.num_used == 0
    (end,) = [event for event in engine.engine.recent_events if isinstance(event, RequestFinishedByCaller)]
    assert end.num_output_tokens == len(ended.outputs[0].token_ids)


def drain_one(engine: TextEngine, params: SamplingParams, prompt: Any = None) -> RequestOutput:
    request_id = engine.submit(prompt or PROMPT, params)
    return drain(engine)[request_id]


def test_several_sequences_share_a_seed_and_differ(folder: str) -> None:
    engine = text_engine(folder)
    several = drain_one(engine, SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True))
    assert [c.index for c in several.outputs] == [0, 1, 2, 3]
    assert len({c.token_ids for c in several.outputs}) == 4
    alone = drain_one(engine, SamplingParams(seed=5, max_tokens=12, ignore_eos=True))
    assert alone.outputs[0].token_ids == several.outputs[0].token_ids


def test_an_assigned_seed_repeats_the_request(folder: str) -> None:
    engine = text_engine(folder)
    first, second = (drain_one(engine, SamplingParams(max_tokens=16, ignore_eos=True)) for _ in range(2))
    assert first.outputs[0].seed != second.outputs[0].seed
    again = drain_one(engine, SamplingParams(max_tokens=16, ignore_eos=True, seed=first.outputs[0].seed))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("budget", [512, 7, 1])
def test_prompt_logprobs_are_those_of_transformers(folder: str, budget: int) -> None:
    ids = [3, 250, 17, 17, 90, 200, 1, 44, 60, 61, 62, 9, 255, 30, 31, 8, 77]
    params = SamplingParams(max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    engine = text_engine(folder, max_num_batched_tokens=budget)
    found = [drain_one(engine, params, {"prompt_token_ids": ids}).prompt_logprobs for _ in range(2)]
    assert found[0] == found[1], "a prefix-cache hit would leave positions out"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found[0] is not None
    assert found[0][0] is None
    for position, entry in enumerate(found[0][1:], start=1):
        assert entry is not None
        assert next(iter(entry)) == ids[position]
        assert set(expected[position - 1].topk(3).indices.tolist()) <= set(entry)
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[position - 1, token_id].item(), abs=1e-4)


def test_the_log_alone_decides_everything_again(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    config = {"event_log": path, "num_kv_blocks": 13, "kv_cache_memory": None, "max_model_len": 200}
    engine = text_engine(folder, policy="priority", max_num_seqs=6, max_num_batched_tokens=24, **config)
    secret = list(range(200, 240))
    names = [
        engine.submit(
            {"prompt_token_ids": secret + [i] * (i * 3)},
            SamplingParams(max_tokens=20 + 5 * i, seed=i, n=1 + (i == 4), stop="e" if i == 2 else ()),
            priority=i % 3,
            cache_salt="salt" if i % 4 == 0 else None,
        )
        for i in range(9)
    ]
    for _ in range(5):
        engine.step()
    engine.abort(names[7])
    outputs = drain(engine)
    engine.close()
    events = list(read_events(path))
    steps = [e for e in events if isinstance(e, StepScheduled) and not e.batch.is_empty]
    assert any(e.batch.preempted_request_ids for e in steps), "nothing was preempted: the test is too easy"
    assert replay(events) is None
    assert all(e.cost is not None and e.cost.bound in ("compute", "memory") for e in steps)
    for line in path.read_text().splitlines():
        assert "token_ids" not in json.dumps(json.loads(line)), line
    for name in names:
        timeline, output = timeline_of(events, name), outputs[name]
        assert [str(lane.finish_reason) for lane in timeline.lanes] == [str(o.finish_reason) for o in output.outputs]
        assert [lane.num_output_tokens for lane in timeline.lanes] == [len(o.token_ids) for o in output.outputs]
        assert timeline.is_complete
        if output.metrics is not None and name != names[7]:  # of the aborted one the caller's clock has the end
            assert timeline.end_s - timeline.begin_s == pytest.approx(output.metrics.e2e_s, abs=1e-9)


def test_a_bad_event_log_is_refused_before_a_weight_is_read(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loading, "load_model", load_nothing)
    with pytest.raises(InvalidParameter, match="event_log="):
        text_engine(folder, event_log=tmp_path)
    log = tmp_path / "events.jsonl"
    with pytest.raises(AssertionError, match="weights"):
        text_engine(folder, event_log=log)
    assert log.read_bytes() == b"", "opened before, closed again"


@pytest.mark.parametrize(("given", "counted"), [({}, 640), ({"max_model_len": 100}, 100)], ids=["model's", "user's"])
def test_the_tables_of_the_context_are_kept_free(
    folder: str, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], counted: int
) -> None:
    lengths: list[int] = []

    def more_than_there_is(*_: Any, max_model_len: int, **__: Any) -> int:
        lengths.append(max_model_len)
        return 1 << 60

    monkeypatch.setattr(memory, "context_bytes", more_than_there_is)
    with pytest.raises(DoesNotFit, match=r"1,152,921,504,606,846,976 for the tables .* lower --max-model-len"):
        text_engine(folder, **given)
    assert lengths == [counted]


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 50}, "max_logprobs"),
    ({"logit_bias": {100_000: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": [5, 100_000]}, "allowed_token_ids"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    # the random models' ids are those of the bytes in rising order: 64 is "a", 256 ends the text
    ({"allowed_token_ids": [256], "min_tokens": 1}, "allowed_token_ids.*min_tokens=1 excludes"),
    ({"allowed_token_ids": [5, 256], "stop_token_ids": [5], "min_tokens": 2}, "allowed_token_ids.*min_tokens=2"),
    ({"allowed_token_ids": [64], "bad_words": ["a"], "min_tokens": 1}, "to draw: bad_words forbids"),
    ({"allowed_token_ids": [64, 256], "bad_words": ["a"], "min_tokens": 1}, "allowed_token_ids.*min_tokens.*bad_words"),
    ({"stop_token_ids": range(320), "min_tokens": 1}, "stop_token_ids.*leaves no token"),
]


@pytest.mark.parametrize(("given", "names"), BAD_PARAMS, ids=lambda v: str(v))
def test_bad_parameters_are_refused_and_disturb_nobody(folder: str, given: dict[str, Any], names: str) -> None:
    engine = text_engine(folder)
    good = engine.submit(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    with pytest.raises(InvalidParameter, match=names):
        engine.submit(PROMPT, SamplingParams(**given))
    assert len(drain(engine)[good].outputs[0].token_ids) == 5


BAD_PROMPTS: list[tuple[Any, type[Exception]]] = [
    ("", InvalidPrompt),
    ({"prompt_token_ids": []}, InvalidPrompt),
    ({"prompt_token_ids": [320]}, InvalidPrompt),
    ({"prompt_token_ids": [-1]}, InvalidPrompt),
    ({"prompt_token_ids": ["a"]}, InvalidPrompt),
    ({"prompt_token_ids": [1] * 640}, InvalidPrompt),
    ({"prompt": "a", "prompt_token_ids": [1]}, InvalidPrompt),
    ({"promt": "a"}, UnknownParameter),
    (17, InvalidPrompt),
]


@pytest.mark.parametrize(("prompt", "error"), BAD_PROMPTS, ids=lambda v: str(v)[:40])
def test_bad_prompts_are_refused_and_disturb_nobody(folder: str, prompt: Any, error: type[Exception]) -> None:
    engine = text_engine(folder)
    good = engine.submit(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    with pytest.raises(error):
        engine.submit(prompt, SamplingParams())
    assert len(drain(engine)[good].outputs[0].token_ids) == 5


def test_a_refused_prompt_takes_its_call_along(folder: str) -> None:
    with LLM(folder, kv_cache_memory=1 << 24, threads=1) as llm:
        with pytest.raises(InvalidPrompt):
            llm.generate([PROMPT, {"prompt_token_ids": []}])
        assert not llm.engine.has_work
        assert len(llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_names_and_priorities(folder: str) -> None:
    engine = text_engine(folder)
    engine.submit(PROMPT, request_id="mine")
    with pytest.raises(InvalidParameter, match="in use"):
        engine.submit(PROMPT, request_id="mine")
    with pytest.raises(InvalidParameter, match="this engine has another"):
        engine.submit(PROMPT, priority=1)
    with pytest.raises(UnknownParameter, match="max_num_seqs"):
        LLM(folder, max_num_seq=3)


def test_a_log_that_cannot_be_written_does_not_stop_the_engine(folder: str) -> None:
    engine = text_engine(folder, event_log=Path("/dev/full"))
    assert len(drain_one(engine, SamplingParams(max_tokens=4, ignore_eos=True)).outputs[0].token_ids) == 4
    engine.close()


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"cache_salt": 5}, "must be a string"),
        ({"cache_salt": "\ud800"}, "surrogate"),
        ({"cache_salt": ""}, "must not be empty"),
        ({"cache_salt": "é" * 600}, "1200 bytes"),
        ({"request_id": ""}, "empty"),
        ({"kind": "deltas"}, "must be one of 'delta', 'cumulative', 'final'"),
        ({"kind": None}, "must be one of 'delta'"),
        ({"request_id": 7}, "must be a string"),
        ({"request_id": ["x"]}, "must be a string"),
        ({"request_id": "a\udfff"}, "surrogate"),
        ({"request_id": "x" * 1025}, "1025 bytes"),
        ({"priority": True}, "whole number"),
        ({"priority": 1.0}, "whole number"),
        ({"priority": None}, "whole number"),
        ({"priority": 2**31 + 1}, "2147483648"),
        ({"priority": -(2**31) - 1}, "2147483648"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(folder: str, bad: dict[str, Any], match: str) -> None:
    engine = text_engine(folder, policy="priority")
    with pytest.raises(InvalidParameter, match=match):
        engine.submit(PROMPT, SamplingParams(max_tokens=2), **({"request_id": "mine"} | bad))
    assert not engine.has_work
    engine.submit(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), request_id="mine", priority=-(2**31))
    assert len(drain(engine)["mine"].outputs[0].token_ids) == 2


def test_a_request_that_the_engine_refuses_is_taken_back(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its sequences or none: the first had been queued when the second was refused."""
    engine = text_engine(folder)
    add_request = engine.engine.add_request

    def refuses_the_second(request: Any) -> None:
        if request.new_request.sample_index == 1:
            raise MemoryError("no room")
        add_request(request)

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine, "add_request", refuses_the_second)
        with pytest.raises(MemoryError):
            engine.submit(PROMPT, SamplingParams(n=3, max_tokens=3), request_id="mine")
    assert not engine.has_work
    engine.submit(PROMPT, SamplingParams(n=3, max_tokens=3, ignore_eos=True), request_id="mine")
    assert [len(c.token_ids) for c in drain(engine)["mine"].outputs] == [3, 3, 3]


@pytest.mark.parametrize("kind", ["delta", OutputKind.DELTA], ids=["text", "enum"])
def test_joined_deltas_are_the_final_output(folder: str, kind: Any) -> None:
    engine = text_engine(folder, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=30, n=3, seed=5, logprobs=2, prompt_logprobs=1, stop="e", bad_words=["x"])
    engine.submit(PROMPT, params, kind=OutputKind.FINAL)
    (expected,) = drain(engine).values()
    deltas, count = JoinedDeltas(), 0
    engine.submit(PROMPT, params, kind=kind, request_id=expected.request_id)
    while engine.has_work:
        for delta in engine.step():
            assert sum(len(part.token_ids) for part in delta.outputs) <= 3, "no delta repeats another"
            deltas.add(delta)
            count += 1
    assert count > 5
    assert replace(deltas.joined(), times=()) == replace(expected, times=())


def test_names_of_callers_meet_no_names_of_ours(folder: str) -> None:
    engine = text_engine(folder)
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    names = ["request-0", "a-0", "a#1.0", "request-2"]
    for name in names:
        engine.submit(PROMPT, params, request_id=name)
    engine.submit(PROMPT, SamplingParams(n=2, max_tokens=3, ignore_eos=True), request_id="a")
    made = [engine.submit(PROMPT, params) for _ in range(3)]
    assert len({*names, "a", *made}) == 8
    outputs = drain(engine)
    assert {name: [len(c.token_ids) for c in outputs[name].outputs] for name in outputs} == {
        name: [3, 3] if name == "a" else [3] for name in ("a", *names, *made)
    }


def test_an_aborted_name_is_in_use_until_its_last_output(folder: str) -> None:
    engine = text_engine(folder)
    engine.submit(PROMPT, SamplingParams(max_tokens=9), request_id="mine")
    engine.abort("mine")
    with pytest.raises(InvalidParameter, match="in use"):
        engine.submit(PROMPT, SamplingParams(max_tokens=9), request_id="mine")
    (last,) = engine.step()
    assert (last.request_id, str(last.outputs[0].finish_reason)) == ("mine", "abort")
    engine.submit(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), request_id="mine")
    assert str(drain(engine)["mine"].outputs[0].finish_reason) == "length"


def test_closed_twice_and_used_afterwards(folder: str, tmp_path: Path) -> None:
    engine = text_engine(folder, event_log=tmp_path / "events.jsonl")
    engine.submit(PROMPT, request_id="mine")
    for _ in range(2):
        engine.close()
    assert not engine.has_work
    for use in (lambda: engine.submit(PROMPT), engine.step, lambda: engine.abort("mine")):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_a_chat_takes_what_its_template_takes(random_models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(random_models["llama"], tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].name }}{{ mood }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    engine = text_engine(str(tmp_path / "model"))
    chat = ChatInputs(
        [{"role": "user", "content": "abc"}],
        tools=[{"name": "tool"}],
        add_generation_prompt=False,
        chat_template_kwargs={"mood": "!"},
    )
    name = engine.submit(chat, SamplingParams(max_tokens=2))
    assert drain(engine)[name].prompt == "abctool!"


def test_start_up_says_what_was_decided_for_the_user(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine = text_engine(folder, kv_cache_memory=1 << 18, tokenizer=folder, kernels="reference")
    notes = [record for record in caplog.records if "640 ->" in record.message]
    assert [record.levelname for record in notes] == ["WARNING"]
    assert any("proved independent" in line and "rows for" in line for line in engine.startup_lines)
    engine.close()


def test_whoever_gives_up_batch_invariance_is_told_and_hands_over_to_none_that_keeps_it(folder: str) -> None:
    settings = {"kv_cache_memory": 1 << 18, "tokenizer": folder, "kernels": "reference"}
    engines = [text_engine(folder, **settings, batch_invariant=keeps) for keeps in (True, False)]
    said = ["not batch-invariant" in engine.startup_lines[0] for engine in engines]
    assert said == [False, True]
    assert any("note     not batch-invariant: tokens may change" in line for line in engines[1].startup_lines)
    facts = [
        numerics_facts(
            "reference",
            "cpu",
            LoadConfig(kernels="reference", batch_invariant=keeps),
            dtype="float32",
            kv_format="f32",
            quantization=None,
        )
        for keeps in (True, False)
    ]
    assert facts[0] != facts[1]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_quantization": "none"}, "those of .* are not. Leave it out, or quantize"),
        (
            {"activation_quantization": "int8", "kernels": "reference", "quantization": "int8"},
            "activation_quantization=int8: torch's operators",
        ),
    ],
)
def test_quantizing_activations_is_refused_where_it_changes_nothing(
    folder: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        text_engine(folder, kv_cache_memory=1 << 18, **settings)


def test_memory_is_not_given_to_kv_to_the_last_byte(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.startup.memory.free_host_bytes", lambda: 1 << 28)
    with pytest.raises(DoesNotFit, match="activations of the largest step"):
        text_engine(folder, kv_cache_memory=(1 << 28) - (1 << 21))


def test_recommended_sampling_is_logged_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_random_model(tmp_path, "llama")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 256}')
    with caplog.at_level("INFO"):
        text_engine(str(model)).close()
    assert any("'temperature': 0.6, 'top_k': 20" in record.message for record in caplog.records)


def test_end_of_text_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, "llama")
    (model / "generation_config.json").write_text('{"eos_token_id": 320}')
    with pytest.raises(CorruptCheckpoint, match="eos_token_id 320 is outside vocab_size 320"):
        text_engine(str(model))


def test_tokenizers_by_name(folder: str) -> None:
    text_engine("embedded", tokenizer="embedded").close()
    with pytest.raises(ModelNotFound, match="not a hub id"):
        text_engine(folder, tokenizer="/no/such/folder")


def test_calls_from_several_threads_wait_for_each_other(folder: str) -> None:
    with LLM(folder, kv_cache_memory=1 << 24, threads=1) as llm, ThreadPoolExecutor(4) as pool:
        params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=i) for i in range(8)]
        alone = [llm.generate(PROMPT, p)[0].outputs[0].token_ids for p in params]
        together = list(pool.map(lambda p: llm.generate(PROMPT, p)[0].outputs[0].token_ids, params))
    assert together == alone
