"""Drafts through the whole engine: what they save, what is counted, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import twostroke
from alone_metrics import AloneMetrics
from model_folders import VOCAB_SIZE
from twostroke import LLM, SamplingParams
from twostroke.engine.event_sinks import read_events
from twostroke.errors import InvalidParameter, ModelNotFound, SetupError, UnknownParameter
from twostroke.events import StepCommitted, StepScheduled
from twostroke.explain.timeline import timeline_of
from twostroke.metrics import families
from twostroke.outputs import DraftOutcomes
from twostroke.scheduler.replay import replay

EMBEDDED = Path(twostroke.__file__).parent / "embedded"
REPEATS = "x = 1; y = 2; " * 8


def test_one_pass_makes_a_token_and_every_draft_that_stands() -> None:
    with LLM("embedded", threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        (output,) = llm.generate([REPEATS], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        events = list(llm.engine.engine.recent_events)
    metrics = AloneMetrics("m")
    for event in events:
        metrics.observe(event)
    count = metrics.instruments
    num_accepted = sum(value for *_, value in count[families.SPEC_DECODE_NUM_ACCEPTED_TOKENS].samples())
    num_drafted = sum(value for *_, value in count[families.SPEC_DECODE_NUM_DRAFT_TOKENS].samples())
    by_position = {
        labels["position"]: value
        for _, labels, value in count[families.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS].samples()
    }
    num_tokens = len(output.outputs[0].token_ids)
    passes = [e for e in events if isinstance(e, StepCommitted) and any(c.num_tokens for c in e.commits)]
    assert num_tokens == 60
    assert num_tokens == len(passes) + num_accepted
    assert 20 < num_accepted <= num_drafted, "the text repeats itself: most drafts stand"
    assert sum(by_position.values()) == num_accepted
    assert by_position["0"] >= by_position["1"] >= by_position["2"]
    assert by_position.keys() == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "eagel"}, "speculative_config.method='eagel'.*'ngram'"),
        ({}, "needs a method: 'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0.*1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens=65.*1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}, "prompt_lookup_min=6.*which is 5"),
        (
            {"method": "ngram", "model": "m"},
            "speculative_config.model='m': is no field of method 'ngram'.*for method 'draft_model'",
        ),
        ({"method": "early_exit", "prompt_lookup_max": 2}, "prompt_lookup_max=2: is no field"),
        ({"method": "early_exit", "exit_layer": 0}, "exit_layer=0.*at least 1"),
        ({"method": "draft_model", "model": 3}, "speculative_config.model=3: must be a string"),
        ([1], "must be an object"),
        ("ngram", "must be an object"),
    ],
    ids=str,
)
def test_what_cannot_be_drafted_is_refused_before_anything_is_loaded(given: Any, told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        LLM("no such model", speculative_config=given)


def test_unknown_settings_are_named() -> None:
    with pytest.raises(UnknownParameter, match="speculative_config has no parameter 'lookup'"):
        LLM("no such model", speculative_config={"method": "ngram", "lookup": 3})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "early_exit", "exit_layer": 9}, "exit_layer=9: must be below the 9 layers of embedded"),
        ({"method": "early_exit", "exit_layer": 10**9}, "exit_layer=1000000000: must be below"),
        ({"method": "draft_model", "model": "no such model"}, "there is no folder 'no such model'"),
    ],
    ids=str,
)
def test_what_does_not_go_with_the_model_is_refused(given: Any, told: str) -> None:
    with pytest.raises((InvalidParameter, ModelNotFound), match=told):
        LLM("embedded", threads=1, num_kv_blocks=20, max_model_len=64, speculative_config=given)


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(EMBEDDED, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    by_id = {token_id: token for token, token_id in vocab.items()}
    vocab[by_id[4000]], vocab[by_id[4001]] = 4001, 4000
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(SetupError, match=f"other, the draft model, and embedded differ.*id 4000 is {by_id[4001]!r}"):
        LLM("embedded", threads=1, num_kv_blocks=20, speculative_config={"method": "draft_model", "model": str(other)})


def test_a_draft_model_of_another_size_of_vocabulary_is_refused(random_models: dict[str, Path]) -> None:
    draft = {"method": "draft_model", "model": str(random_models["llama"])}
    with pytest.raises(SetupError, match=f"vocabularies of {VOCAB_SIZE} and 4096 entries"):
        LLM("embedded", threads=1, num_kv_blocks=20, speculative_config=draft)


def test_a_draft_that_is_always_right_makes_every_pass_worth_k_plus_1_tokens() -> None:
    draft = {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 4}
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=51, ignore_eos=True)
    with LLM("embedded", threads=1, speculative_config=draft) as llm:
        (output,) = llm.generate(["def f(x):\n"], params)
        events = list(llm.engine.engine.recent_events)
    commits = [c for e in events if isinstance(e, StepCommitted) for c in e.commits]
    assert [c.num_tokens for c in commits] == [1] + [5] * 10
    assert [c.num_draft_tokens for c in commits] == [0] + [4] * 10
    assert output.metrics is not None
    assert output.metrics.drafts == DraftOutcomes(
        num_passes=11,
        num_tokens=51,
        num_verifying_passes=10,
        num_draft_tokens=40,
        num_accepted_tokens=40,
        num_accepted_tokens_per_pos=(10, 10, 10, 10),
        tokens_per_pass=51 / 11,
    )
    (lane,) = timeline_of(events, output.request_id).lanes
    assert lane.drafts == output.metrics.drafts


def test_a_request_counts_its_own_drafts_up_to_its_stop_string_and_its_timeline_agrees() -> None:
    draft = {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 4}
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=51, ignore_eos=True, n=2)
    with LLM("embedded", threads=1, speculative_config=draft) as llm:
        (whole,) = llm.generate(["def f(x):\n"], params)
        stop = whole.outputs[0].text[12:16]
        stopping = dataclasses.replace(params, stop=stop)
        outputs = llm.generate(["def f(x):\n", "import os\n"], [stopping, dataclasses.replace(params, n=1)])
        events = list(llm.engine.engine.recent_events)
    for output in outputs:
        assert output.metrics is not None
        drafts = output.metrics.drafts
        assert drafts is not None
        num_tokens = sum(len(o.token_ids) for o in output.outputs)
        assert (drafts.num_tokens, drafts.num_passes + drafts.num_accepted_tokens) == (num_tokens, num_tokens)
        lanes = timeline_of(events, output.request_id).lanes
        each = [lane.drafts for lane in lanes if lane.drafts is not None]
        assert sum(lane.num_accepted_tokens for lane in each) == drafts.num_accepted_tokens
        assert sum(lane.num_draft_tokens for lane in each) == drafts.num_draft_tokens
    assert len(outputs[0].outputs[0].token_ids) < 51, "the stop string ended it"


def test_without_drafts_there_is_nothing_to_say_of_them() -> None:
    with LLM("embedded", threads=1, num_kv_blocks=20, max_model_len=64) as llm:
        (output,) = llm.generate(["x = 1"], SamplingParams(max_tokens=3))
        (lane,) = timeline_of(llm.engine.engine.recent_events, output.request_id).lanes
    assert output.metrics is not None
    assert output.metrics.drafts is None
    assert lane.drafts is None


def test_what_drafts_take_stands_in_the_lines_at_the_start_and_in_the_capacity() -> None:
    draft = {"method": "draft_model", "model": "embedded"}
    with LLM("embedded", threads=1, kv_cache_memory=1 << 24) as llm:
        alone = llm.engine.startup_lines
    with LLM("embedded", threads=1, kv_cache_memory=1 << 24, speculative_config=draft) as llm:
        together = llm.engine.startup_lines
    (line,) = (line for line in together if line.startswith("drafts"))
    assert "7.2 M parameters" in line
    assert "bytes of KV per token" in line

    def num_blocks(lines: Sequence[str]) -> int:
        (kv,) = (line for line in lines if line.startswith("kv cache"))
        return int(kv.split("; ")[1].split(" blocks")[0].replace(",", ""))

    assert num_blocks(together) == num_blocks(alone) // 2, "a draft model as large as the target takes half"


@pytest.mark.parametrize("method", ["ngram", "draft_model", "early_exit", "medusa", "eagle"])
def test_the_log_alone_replays_what_the_gate_decided(method: str, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, allowed_token_ids=[70])
    with LLM("embedded", threads=1, event_log=str(log), speculative_config={"method": method}) as llm:
        llm.generate([REPEATS, "def f(x):\n"], params)
    events = list(read_events(log))
    assert any(isinstance(e, StepScheduled) and e.batch.drafts and e.batch.drafts.num_drafts for e in events)
    assert replay(events) is None


@pytest.mark.parametrize(
    ("dtype", "kernels", "num_bytes"),
    [
        ("bfloat16", "reference", "526,336"),
        ("bfloat16", "auto", "528,384"),  # native kernels keep a bias in float32
        ("float32", "reference", "1,052,672"),
        ("float32", "auto", "1,052,672"),
    ],
)
def test_weights_of_heads_are_counted_as_they_lie_in_memory(dtype: str, kernels: str, num_bytes: str) -> None:
    drafts: dict[str, Any] = {"speculative_config": {"method": "medusa"}}
    with LLM("embedded", threads=1, dtype=dtype, kernels=kernels, num_kv_blocks=20, **drafts) as llm:
        (line,) = (line for line in llm.engine.startup_lines if line.startswith("drafts"))
        assert f"{num_bytes} bytes of weights" in line
