"""The KV self-check at a real engine whose KV memory loses bits."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twostroke import RequestOutput, SamplingParams
from twostroke.batch import NewRequest, ScheduledBatch, StepResult
from twostroke.client.text_engine import build_text_engine
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import KVFormat
from twostroke.errors import EngineError, InvalidParameter
from twostroke.events import KVBlockChecked, StepScheduled
from twostroke.explain.segments import Label
from twostroke.explain.timeline import timeline_of
from twostroke.kv_check import KVCheck, KVDifference, Verdict, tolerance
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.model_runner import Executor
from twostroke.scheduler.replay import replay

PROMPT = [(7 * i) % 251 for i in range(70)]
OTHER = [(11 * i + 3) % 251 for i in range(50)]
SHORT = SamplingParams(max_tokens=6, temperature=0.9, seed=5, ignore_eos=True, logprobs=1)
LONG = SamplingParams(max_tokens=60, temperature=0.9, seed=6, ignore_eos=True)
CHECKED = 2
"""The entry of four that the first check looks at: int(0.618 * 4)."""


class Watched:
    """The real executor, its KV memory in reach."""

    max_in_flight = 1

    def __init__(self, inner: Executor, *, is_delayed: bool = False) -> None:
        self.inner = inner
        self.results: deque[StepResult] = deque()
        self.max_in_flight = 2 if is_delayed else 1
        runner: Any = inner._runner  # type: ignore[attr-defined]
        self.kv: KVStorage = runner._kv
        self.storage = self.kv.tensors[0]
        self.num_blocks = self.kv.num_blocks
        self.tables: dict[str, list[list[int]]] = {}
        self.num_checks = 0

    def add_request(self, request: NewRequest) -> None:
        self.inner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        for scheduled in batch.requests:
            rows = self.tables.setdefault(scheduled.request_id, [[] for _ in scheduled.block_tables])
            for row, update in zip(rows, scheduled.block_tables, strict=True):
                if update.block_ids:
                    row[update.start :] = update.block_ids
        self.inner.submit(batch)
        self.results.append(self.inner.collect())

    def collect(self) -> StepResult:
        return self.results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        self.num_checks += 1
        return self.inner.check_kv(check, token_ids)

    def close(self) -> None:
        self.inner.close()


class Bench:
    """An engine to run prompts on."""

    def __init__(self, model: str, *, rate: float = 1.0, is_delayed: bool = False, **config: Any) -> None:
        self.executors: list[Watched] = []

        def around(inner: Executor) -> Executor:
            self.executors.append(Watched(inner, is_delayed=is_delayed))
            return self.executors[0]

        config = {"threads": 1, "num_kv_blocks": 80, "max_model_len": 256, "kv_check_rate": rate} | config
        self.engine = build_text_engine(EngineConfig.from_keywords(model=model, **config), around)
        self.executor = self.executors[0]

    def submit(self, prompt: Sequence[int], params: SamplingParams = SHORT) -> str:
        return self.engine.submit({"prompt_token_ids": list(prompt)}, params)

    def drain(self) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        while self.engine.has_work:
            done |= {output.request_id: output for output in self.engine.step() if output.finished}
        return done

    def run(self, prompt: Sequence[int], params: SamplingParams = SHORT) -> RequestOutput:
        request_id = self.submit(prompt, params)
        return self.drain()[request_id]

    def table(self, request_id: str) -> list[list[int]]:
        (rows,) = [rows for name, rows in self.executor.tables.items() if name.startswith(f"{request_id}#")]
        return rows

    def head(self, block_id: int, layer: int, values: bool) -> Tensor:
        """Return uint8 [bytes per head] of the first KV head; writing to it simulates memory errors."""
        return self.executor.storage[block_id, layer, int(values), 0]

    @property
    def checks(self) -> list[KVBlockChecked]:
        return [event for event in self.engine.engine.recent_events if isinstance(event, KVBlockChecked)]

    @property
    def verdicts(self) -> list[Verdict]:
        return [event.verdict for event in self.checks]


def answer(output: RequestOutput) -> Any:
    (one,) = output.outputs
    return one.token_ids, one.finish_reason, [[(t, p.logprob) for t, p in at.items()] for at in one.logprobs or []]


def flip(head: Tensor, kv_format: KVFormat) -> None:
    """Flip an exponent bit, or half of the codes' range, of several numbers, so that small numbers do not matter."""
    stride = {"f32": 4, "bf16": 2, "int8": 1, "int4": 1}[kv_format]
    high = {"f32": 0x40, "bf16": 0x40, "int8": 0x80, "int4": 0x88}[kv_format]
    head[stride - 1 : 64 * stride : stride] ^= high


@pytest.fixture(scope="module")
def llama(random_models: dict[str, Path]) -> str:
    return str(random_models["llama"])


FORMATS: list[KVFormat] = ["f32", "bf16", "int8", "int4"]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_lost_bits_are_found_and_whoever_hit_them_gets_a_sound_answer(
    kv_format: KVFormat, kernels: str, random_models: dict[str, Path]
) -> None:
    for layer, values in itertools.product((0, 1, 2), (False, True)):
        bench = Bench(str(random_models["qwen3"]), kv_cache_dtype=kv_format, kernels=kernels)
        first = bench.run(PROMPT)
        bad = bench.table("request-0")[0][CHECKED]
        flip(bench.head(bad, layer, values), kv_format)
        again = bench.run(PROMPT)
        (check,) = bench.checks
        assert (check.verdict, check.entry, check.quarantined) == (Verdict.CORRUPTION, CHECKED, (bad,))
        assert (check.first_layer, check.suspects.ended) == (layer, ())
        assert len(check.suspects.started_over) == 1
        assert answer(again) == answer(first)
        assert again.num_cached_tokens == 0
        usage = bench.engine.engine.kv_usage
        assert (usage.num_quarantined, usage.num_used) == (1, 0)
        third = bench.run(PROMPT)
        assert bench.verdicts == [Verdict.CORRUPTION, Verdict.EXACT]
        assert (answer(third), third.num_cached_tokens) == (answer(first), 64)
        assert all(bad not in bench.table(name)[0] for name in ("request-1", "request-2"))
        assert replay(bench.engine.engine.recent_events) is None


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("model", ["qwen2", "mistral"])
def test_windows(model: str, kernels: str, random_models: dict[str, Path]) -> None:
    """With windows each KV group has its own blocks; blocks outside of a window are looked up."""
    groups = {"qwen2": 2, "mistral": 1}[model]
    for group in range(groups):
        bench = Bench(str(random_models[model]), kernels=kernels, block_size=8, max_model_len=128)
        first = bench.run(PROMPT)
        assert answer(bench.run(PROMPT)) == answer(first)
        (sound,) = bench.checks
        assert sound.verdict is Verdict.EXACT
        # the next check looks at another block; bits are lost in every block of one group
        for row in {i for rows in bench.executor.tables.values() for i in rows[group][:8]} - {0}:
            for page_id in bench.executor.kv.page_ids[group].of_blocks([row]):
                flip(bench.executor.kv.page(group, page_id)[0, 0, 0], "f32")
        assert answer(bench.run(PROMPT)) == answer(first)
        found = bench.checks[-1]
        assert found.verdict is Verdict.CORRUPTION
        assert [i for i, block_id in enumerate(found.quarantined) if block_id is not None] == [group]


def test_the_smallest_difference_is_numerics(llama: str) -> None:
    bench = Bench(llama)
    first = bench.run(PROMPT)
    numbers = bench.head(bench.table("request-0")[0][CHECKED], 1, values=True).view(torch.int32)
    numbers[17] += 1  # the next float32
    assert answer(bench.run(PROMPT))[0] == answer(first)[0]
    (check,) = bench.checks
    assert (check.verdict, check.num_differences, check.first_layer) == (Verdict.NUMERICS, 1, 1)
    assert check.largest_difference is not None
    assert 0 < check.largest_difference < 2**-22
    assert (check.quarantined, bench.engine.engine.kv_usage.num_quarantined) == ((), 0)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_codes_off_by_one_are_numerics(kv_format: KVFormat, llama: str) -> None:
    bench = Bench(llama, kv_cache_dtype=kv_format)
    bench.run(PROMPT)
    codes = bench.head(bench.table("request-0")[0][CHECKED], 1, values=True)
    if kv_format == "int8":
        codes[:64] ^= 1
    else:
        codes[0] ^= 1  # each number of a vector has a share of each code
    bench.run(PROMPT)
    (check,) = bench.checks
    assert (check.verdict, check.num_differences) == (Verdict.NUMERICS, 64 if kv_format == "int8" else 16)


def test_a_nan_is_corruption(llama: str) -> None:
    bench = Bench(llama)
    bench.run(PROMPT)
    bench.head(bench.table("request-0")[0][CHECKED], 1, values=True).view(torch.float32)[3] = torch.nan
    assert answer(bench.run(PROMPT))[1] == "length"
    (check,) = bench.checks
    assert (check.verdict, check.largest_difference) == (Verdict.CORRUPTION, None)


@pytest.mark.parametrize("is_delayed", [False, True], ids=["in turn", "a step ahead"])
def test_who_has_answered_from_it_ends_in_words_and_nobody_else(llama: str, is_delayed: bool) -> None:
    expected = Bench(llama, rate=0.0, is_delayed=is_delayed)
    others = [expected.submit(OTHER, LONG), expected.submit(PROMPT)]
    fresh = expected.drain()
    bench = Bench(llama, is_delayed=is_delayed)
    reader, bystander = bench.submit(PROMPT, LONG), bench.submit(OTHER, LONG)
    for _ in range(10):
        bench.engine.step()
    bad = bench.table(reader)[0][CHECKED]
    flip(bench.head(bad, 2, values=False), "f32")
    hitting = bench.submit(PROMPT)
    done = bench.drain()
    (check,) = bench.checks
    assert len(check.suspects.ended) == len(check.suspects.started_over) == 1
    assert str(done[reader].outputs[0].finish_reason) == "error"
    assert "found corrupt" in (done[reader].error or "")
    assert 0 < len(done[reader].outputs[0].token_ids) < 60
    assert answer(done[bystander]) == answer(fresh[others[0]])
    assert answer(done[hitting]) == answer(fresh[others[1]])
    assert bench.engine.engine.kv_usage.num_used == 0
    assert replay(bench.engine.engine.recent_events) is None
    for name in (reader, bystander, hitting):
        (lane,) = timeline_of(bench.engine.engine.recent_events, name).lanes
        assert lane.is_complete
        assert sum(s.duration_s for s in lane.segments) == pytest.approx(lane.duration_s)
        checks = [s for s in lane.segments if s.label is Label.KV_CHECK]
        if not is_delayed or name == hitting:
            assert all("corrupt" in s.reason for s in checks)
            assert len(checks) == (0 if is_delayed else 1)
        assert any("found corrupt" in note for note in lane.notes) == (name != bystander)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_bad_block_is_found_behind_one_that_only_follows_it(llama: str, layer: int) -> None:
    """The checked block was computed while an earlier block was good: it differs, but is not corrupt."""
    bench = Bench(llama, max_model_len=512)
    prompt = [(5 * i) % 253 for i in range(300)]
    first = bench.run(prompt)
    chosen = int(0.618 * 18)
    for entry in (chosen - 1, 3, 0):
        bench = Bench(llama, max_model_len=512)
        bench.run(prompt)
        bad = bench.table("request-0")[0][entry]
        bench.head(bad, layer, values=True).view(torch.float32)[:] = 30.0
        assert answer(bench.run(prompt)) == answer(first)
        (check,) = bench.checks
        assert (check.entry, check.quarantined, check.first_layer) == (entry, (bad,), layer)


def test_half_of_the_hits_at_a_rate_of_one_half_and_none_without(llama: str) -> None:
    counts: list[int] = []
    for rate in (0.5, 0.0):
        bench = Bench(llama, rate=rate)
        for _ in range(9):
            bench.run(PROMPT)
        assert set(bench.verdicts) <= {Verdict.EXACT}
        assert len(bench.checks) == bench.executor.num_checks
        counts.append(bench.executor.num_checks)
        assert len(bench.executor.storage) == bench.executor.num_blocks + (1 if rate else 0)
    assert counts == [4, 0]


def test_a_check_that_fails_disturbs_nobody(llama: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(llama)
    first = bench.run(PROMPT)
    runner: Any = bench.executor.inner._runner  # type: ignore[attr-defined]
    runner._recomputer = None
    again = bench.run(PROMPT)
    assert (answer(again), again.num_cached_tokens) == (answer(first), 64)
    assert not bench.checks
    assert "could not be checked" in caplog.text


def test_memory_that_goes_on_failing_ends_the_engine_in_words(llama: str) -> None:
    bench = Bench(llama, num_kv_blocks=18)

    def go_on() -> None:
        for number in range(10):
            bench.run(PROMPT)
            for block_id in bench.table(f"request-{number}")[0][:4]:
                flip(bench.head(block_id, 0, values=False), "f32")

    with pytest.raises(EngineError, match="of 18 KV blocks were found corrupt"):
        go_on()
    assert bench.engine.engine.kv_usage.num_quarantined == 3


def test_it_needs_the_prefix_cache() -> None:
    with pytest.raises(InvalidParameter, match="kv_check_rate"):
        CacheConfig(kv_check_rate=0.1, enable_prefix_caching=False)
    for rate in (-0.1, 1.1, float("nan"), "1", True):
        with pytest.raises(InvalidParameter, match="kv_check_rate"):
            CacheConfig(kv_check_rate=rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_two_backends_differ_by_numerics(kv_format: KVFormat, random_models: dict[str, Path]) -> None:
    """The bound has to allow other kernels with other orders of summation."""
    found: list[Tensor] = []
    for kernels in ("auto", "reference"):
        bench = Bench(str(random_models["qwen3"]), kv_cache_dtype=kv_format, kernels=kernels, rate=0.0)
        bench.run(PROMPT)
        runner: Any = bench.executor.inner._runner  # type: ignore[attr-defined]
        blocks = bench.executor.storage[bench.table("request-0")[0][:4]]
        kv = runner._kv.layout.groups[0].spec
        read = runner._model.attention[kv].read_heads
        sides = [blocks[:, :, int(values)].flatten(0, 2) for values in (False, True)]
        found.append(
            torch.stack([read(side, kv_format, kv.head_dim, values=bool(values)) for values, side in enumerate(sides)])
        )
    native, reference = found
    relative = (native - reference).abs().amax(-1) / reference.abs().amax(-1)
    multiplied = "float32" if kv_format == "f32" else "bfloat16"
    assert float(relative.max()) < tolerance(kv_format, multiplied, 3) / 1.5
    assert (kv_format in ("f32", "int8")) <= bool(relative.any()), "the same numbers prove nothing"


def test_events_name_the_step_that_waited(llama: str) -> None:
    bench = Bench(llama)
    bench.run(PROMPT)
    bench.run(PROMPT)
    events = list(bench.engine.engine.recent_events)
    (at,) = [i for i, event in enumerate(events) if isinstance(event, KVBlockChecked)]
    before = events[at - 1]
    assert isinstance(before, StepScheduled)
    (check,) = before.batch.kv_checks
    assert (check.entry, check.context) == (CHECKED, (tuple(bench.table("request-0")[0][:CHECKED]),))
