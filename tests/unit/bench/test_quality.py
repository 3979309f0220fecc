"""The command's own arithmetic, and one look through the real engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gguf_files import fixture
from twostroke import LLM, SamplingParams
from twostroke.bench.quality.configuration import RESERVED, keywords_of
from twostroke.bench.quality.run import KV_CONFIGURATIONS, MIN_TEXT_TOKENS, MOST_RISE, QualityOptions, Row, run_quality
from twostroke.bench.quality.scoring import ANSWER, CUE, Document, Perplexity, needles, perplexity, windows
from twostroke.config.engine import EngineConfig
from twostroke.errors import InvalidParameter, SetupError, UnknownParameter


@pytest.mark.parametrize(("num_tokens", "context"), [(2, 128), (128, 128), (129, 128), (1000, 128), (1001, 130)])
def test_every_token_but_the_first_is_scored_once(num_tokens: int, context: int) -> None:
    cut = windows(num_tokens, context)
    assert [at for _, first, end in cut for at in range(first, end)] == list(range(1, num_tokens))
    for i, (begin, first, end) in enumerate(cut):
        assert end - begin <= context
        assert first - begin == (1 if i == 0 else context // 4)


def test_perplexity_is_that_of_the_log_probabilities(random_models: dict[str, Path]) -> None:
    ids = tuple(range(40, 90))
    with LLM(str(random_models["llama"]), threads=1, kv_cache_memory=1 << 24) as llm:
        found = perplexity(llm, [Document(ids, 49)], 200)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scores = llm.generate([{"prompt_token_ids": list(ids)}], params)[0].prompt_logprobs or []
    nats = -sum((scores[i] or {})[ids[i]].logprob for i in range(1, len(ids)))
    assert (found.num_tokens, found.num_bytes) == (49, 49)
    assert math.isclose(found.per_token, math.exp(nats / 49))
    assert math.isclose(found.bits_per_byte, nats / math.log(2) / 49)


def test_a_needle_stands_at_its_distance() -> None:
    text = Document(tuple(range(5000)), 5000)
    for needle in needles([text], (0, 64, 900), 3, seed=1):
        passage = needle.token_ids[-(CUE + ANSWER) :]
        places = [i for i in range(len(needle.token_ids)) if needle.token_ids[i : i + len(passage)] == passage]
        assert places[-1] - places[0] == needle.distance


def test_a_look_at_a_small_model(random_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("what is scored, and found again " * 12)
    options = QualityOptions(
        model=str(random_models["llama"]),
        text=tmp_path / "text",
        configuration=("quantization=int8", "threads=2,block_size=32,max_num_seqs=3,enable_prefix_caching=False"),
        num_needles=2,
        threads=1,
        results=tmp_path,
    )
    base, int8, other = run_quality(options)
    assert base.rise == 0
    assert other.score == base.score  # the same bits on any number of threads, in any blocks and batch
    assert 0 < abs(int8.rise) < 0.2
    assert set(base.found) == {0, 64, 256}
    saved = json.loads((tmp_path / "quality.json").read_text())
    assert saved["results"]["quantization=int8"]["perplexity_rise"] == int8.rise
    assert "--configuration quantization=int8" in saved["command"]


def test_limits_and_refusals() -> None:
    limit = MOST_RISE["quantization=int4"]
    score = Perplexity(1, 1, 1.0)
    assert Row("quantization=int4", score, {}, limit, limit).holds
    assert not Row("quantization=int4", score, {}, limit + 1e-9, limit).holds
    with pytest.raises(InvalidParameter, match="NAME=VALUE"):
        QualityOptions(configuration=("int8",))
    with pytest.raises(UnknownParameter, match="quantisation"):
        QualityOptions(configuration=("quantisation=int8",))


def test_a_gguf_file_is_scored_in_the_formats_it_can_be_loaded_in(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("what is scored, and found again " * 24)
    model, text = str(fixture("llama-q4_0")), tmp_path / "text"
    options = QualityOptions(model=model, text=text, num_needles=1, threads=1, results=tmp_path)
    assert [row.configuration for row in run_quality(options)] == ["", *KV_CONFIGURATIONS]
    saved = (tmp_path / "quality.json").read_text()
    assert json.loads(saved)["config"]["model"] == "llama-q4_0.gguf"
    assert model not in saved
    options = QualityOptions(model=model, text=text, configuration=("quantization=int8",), results=tmp_path)
    with pytest.raises(SetupError, match="quantized already"):
        run_quality(options)


def test_a_configuration_has_the_types_of_the_configs() -> None:
    text = "enable_chunked_prefill=False, enable-prefix-caching=true,ageing_s=0.5,threads=2,policy=priority"
    found = keywords_of(text)
    expected = {
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "ageing_s": 0.5,
        "threads": 2,
        "policy": "priority",
    }
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_every_setting_can_be_written_or_is_reserved() -> None:
    """As its default is; None is what a setting has that is not given."""
    config = EngineConfig()
    for part in (config.load, config.cache, config.scheduler):
        for name in part.__dataclass_fields__:
            value: Any = getattr(part, name)
            if name in RESERVED:
                with pytest.raises(InvalidParameter, match=r"Settable: dtype, quantization, .*block_size.*ageing_s"):
                    keywords_of(f"{name}=1")
            elif value is not None:
                assert keywords_of(f"{name}={value}") == {name: value}


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        ("threads=two", "must be a whole number"),
        ("ageing_s=soon", "must be a number"),
        ("ageing_s=nan", "more than 0"),
        ("enable_prefix_caching=1", "must be true or false"),
        ("threads=1,threads=2", "threads twice"),
        ("threads=0", "4096"),
        ("model=elsewhere", "--model"),
        ("max_model_len=64", "--context"),
    ],
)
def test_configurations_that_mean_nothing_are_refused(configuration: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        QualityOptions(configuration=(configuration,))


def test_a_text_that_is_too_short_is_refused(random_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hi\n")
    options = QualityOptions(model=str(random_models["llama"]), text=tmp_path / "text", threads=1, results=tmp_path)
    with pytest.raises(InvalidParameter, match=rf"has \d tokens; at least {MIN_TEXT_TOKENS}"):
        run_quality(options)
    with pytest.raises(InvalidParameter, match=f"at least {MIN_TEXT_TOKENS}"):
        QualityOptions(max_text_tokens=MIN_TEXT_TOKENS - 1)
    assert not (tmp_path / "quality.json").exists()
