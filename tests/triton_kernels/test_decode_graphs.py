"""Recorded passes: the tokens of steps launched kernel by kernel, and nothing in them that a graph would not repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strict_recorder import StrictRecorder
from triton_device import device
from twostroke import LLM, SamplingParams
from twostroke.kernels.cuda import attention as cuda_attention
from twostroke.kernels.cuda.attention_plan import TileSizes
from twostroke.runner import decode_graphs
from twostroke.startup import loading

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of the interpreter
    pytest.mark.skipif(device().type == "cuda", reason="a stand-in for what the card has itself"),
]
PROMPTS = [[5, 6, 7], [9] * 17, [8] * 4]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=4, ignore_eos=True) for i in range(3)]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> StrictRecorder:
    strict = StrictRecorder()
    monkeypatch.setattr(loading, "_recorder", lambda device: strict)
    monkeypatch.setattr(decode_graphs, "PART_ROWS", 8)
    monkeypatch.setattr(cuda_attention, "TILE_SIZES", TileSizes(tile_rows=16, chunk=8, segment=16))
    return strict


def tokens(model: Path, **settings: Any) -> list[list[int]]:
    settings = {"kernels": "triton", "threads": 1, "num_kv_blocks": 24, "block_size": 8, "max_model_len": 40} | settings
    with LLM(str(model), **settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize(
    ("name", "settings", "is_split"),
    [
        ("qwen3", {"async_scheduling": True}, False),
        ("mistral", {"kv_cache_dtype": "int8", "quantization": "int4"}, True),
        ("gpt_oss", {"dtype": "bfloat16"}, False),
    ],
)
def test_tokens_are_those_without(
    name: str,
    settings: dict[str, Any],
    is_split: bool,
    recorder: StrictRecorder,
    random_models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_attention, "num_multiprocessors", lambda device: 1000 if is_split else 1)
    model = random_models[name]
    with monkeypatch.context() as without:
        without.setattr(loading, "_recorder", lambda device: None)
        expected = tokens(model, **settings)
    assert tokens(model, **settings) == expected
    assert sum(recording.num_replays for recording in recorder.recordings) >= 2


def test_experts_in_few_bits_are_not_recorded(recorder: StrictRecorder, random_models: dict[str, Path]) -> None:
    """They are multiplied one after the other, those that a step hits."""
    tokens(random_models["gpt_oss"], quantization="int8")
    assert not recorder.recordings


def test_steps_with_prompts_are_recorded_as_well(
    recorder: StrictRecorder, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside decodes, in passes of a fixed size; a step that is larger is launched."""
    monkeypatch.setattr(decode_graphs, "_MIXED_BUCKET_STEP", 8)
    model, settings = random_models["mistral"], {"max_num_batched_tokens": 10, "max_num_seqs": 3}
    with monkeypatch.context() as without:
        without.setattr(loading, "_recorder", lambda device: None)
        expected = tokens(model, **settings)
    sizes: list[tuple[int, int]] = []
    record = decode_graphs.DecodeGraphs._record

    def noted(self: decode_graphs.DecodeGraphs, size: decode_graphs.FixedSize) -> Any:
        found = record(self, size)
        if found is not None:
            sizes.append((size.num_tokens, size.num_seqs))
        return found

    monkeypatch.setattr(decode_graphs.DecodeGraphs, "_record", noted)
    assert tokens(model, **settings) == expected
    assert [size for size in sizes if size[0] > size[1]], sizes
    sizes.clear()
    monkeypatch.setattr(decode_graphs, "MIXED_CONTEXT", 2)
    assert tokens(model, **settings) == expected
    assert not [size for size in sizes if size[0] > size[1]], sizes


def test_steps_that_need_more_than_a_pass_has_run_without(
    recorder: StrictRecorder, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "num_multiprocessors", lambda device: 1000)
    monkeypatch.setattr(decode_graphs, "PART_ROWS", 1)
    model = random_models["qwen3"]
    with LLM(str(model), kernels="triton", threads=1, num_kv_blocks=24, max_model_len=40) as llm:
        llm.generate([{"prompt_token_ids": PROMPTS[1]}], PARAMS[0])
    assert not recorder.recordings


def test_steps_go_on_where_nothing_can_be_recorded(
    random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    class Full:
        def record(self, work: object) -> Any:
            tries.append(work)
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "_recorder", lambda device: None)
    with LLM(str(random_models["qwen3"]), kernels="triton", threads=1, num_kv_blocks=24, max_model_len=40) as llm:
        expected = llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS[0])[0].outputs[0].token_ids
    monkeypatch.setattr(loading, "_recorder", lambda device: Full())
    with LLM(str(random_models["qwen3"]), kernels="triton", threads=1, num_kv_blocks=24, max_model_len=40) as llm:
        assert llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS[0])[0].outputs[0].token_ids == expected
    assert len(tries) == 1


def test_an_empty_plan_writes_nothing(random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording a pass runs it, while others' KV is in the memory."""
    seen: list[bool] = []

    class WatchedCommunicator(StrictRecorder):
        def record(self, work: Any) -> Any:
            before = runner().kv.tensor.clone()
            recording = super().record(work)
            seen.append(torch.equal(before, runner().kv.tensor))
            return recording

    strict = WatchedCommunicator()
    monkeypatch.setattr(loading, "_recorder", lambda device: strict)
    with LLM(str(random_models["qwen3"]), kernels="triton", threads=1, num_kv_blocks=24, max_model_len=40) as llm:

        def runner() -> Any:
            return llm.engine.engine._executor._runner  # type: ignore[attr-defined]

        llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS[0])
    assert seen
    assert all(seen)


def test_the_recorder_notices_what_a_graph_would_not_repeat() -> None:
    """A number, a shape or an address that changes."""
    here, there, numbers = torch.ones(4), torch.ones(4), iter(np.arange(1.0, 9.0))
    where = [here]
    for work in (lambda: _long(here) + float(next(numbers)), lambda: _long(where[0])):
        where[0] = here
        recording = StrictRecorder().record(work)
        where[0] = there
        with pytest.raises(AssertionError, match="a graph would not do"):
            recording.replay()
    steady = StrictRecorder().record(lambda: _long(here))
    here.fill_(3.0)
    steady.replay()
    assert torch.equal(steady.output, _long(here))


def _long(x: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = x * 2
    return x
