"""Statements about KV formats equal the measured figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from twostroke import LLM
from twostroke.config.kv_format import (
    INT4_PERPLEXITY_RISE,
    INT4_PERPLEXITY_RISE_OF_CODER,
    INT4_PERPLEXITY_RISE_OF_GEMMA,
    INT8_PERPLEXITY_RISE,
    INT8_PERPLEXITY_RISE_OF_CODER,
    INT8_PERPLEXITY_RISE_OF_GEMMA,
    kv_format_warning,
)

ROOT = Path(__file__).parents[3]
DECISION = "docs/decisions/008-a-kv-format-is-a-codec.md"
SMOLLM2, CODER, PEERS = "quality-kv-smollm2", "quality-qwen-coder", "quality-smollm2"
GEMMA = "quality-kv-gemma3-270m"
POSITIONS = {SMOLLM2: 2048, CODER: 2048, PEERS: 2048, GEMMA: 2048}


def rise_of(result: str, row: str, base: str = "base") -> float:
    """Return the rise of a row's perplexity over its engine's own, on the tokens of docs/measurements.md."""
    content = json.loads((ROOT / "benchmarks/results" / f"{result}.json").read_text())
    assert content["workload"]["text"] == "LICENSE"
    rows = {name: content["results"][name]["against_float32"] for name in (row, base)}
    assert rows[row]["positions"] == rows[base]["positions"] == POSITIONS[result]
    return rows[row]["perplexity"] / rows[base]["perplexity"] - 1


def test_the_warning_tells_the_measured_rise_and_where_it_is_from() -> None:
    assert pytest.approx(rise_of(SMOLLM2, "kv_cache_dtype=int4"), abs=5e-5) == INT4_PERPLEXITY_RISE
    assert pytest.approx(rise_of(SMOLLM2, "kv_cache_dtype=int8"), abs=5e-5) == INT8_PERPLEXITY_RISE
    assert pytest.approx(rise_of(CODER, "kv_cache_dtype=int8"), abs=5e-5) == INT8_PERPLEXITY_RISE_OF_CODER
    assert pytest.approx(rise_of(CODER, "kv_cache_dtype=int4"), abs=5e-5) == INT4_PERPLEXITY_RISE_OF_CODER
    assert pytest.approx(rise_of(GEMMA, "kv_cache_dtype=int8"), abs=5e-5) == INT8_PERPLEXITY_RISE_OF_GEMMA
    assert pytest.approx(rise_of(GEMMA, "kv_cache_dtype=int4"), abs=5e-5) == INT4_PERPLEXITY_RISE_OF_GEMMA
    warning = kv_format_warning("int4") or ""
    assert f"{INT4_PERPLEXITY_RISE_OF_GEMMA:.1%} on Gemma 3 270M" in warning
    assert f"{INT4_PERPLEXITY_RISE:.1%} on SmolLM2-135M-Instruct" in warning
    assert f"{INT4_PERPLEXITY_RISE_OF_CODER:.1%} on Qwen2.5-Coder-1.5B" in warning
    told_of = {
        SMOLLM2: INT8_PERPLEXITY_RISE,
        CODER: INT8_PERPLEXITY_RISE_OF_CODER,
        GEMMA: INT8_PERPLEXITY_RISE_OF_GEMMA,
    }
    for result, told in told_of.items():
        assert f"int8: {told:.1%}; {result}.json" in warning
    assert "our LICENSE" in warning


@pytest.mark.parametrize(
    "path", ["src/twostroke/config/cache.py", "docs/features.md", "docs/gpu.md", DECISION, "CHANGELOG.md"], ids=str
)
def test_whoever_tells_the_figure_tells_its_model_and_text(path: str) -> None:
    text = " ".join((ROOT / path).read_text().split())
    (sentence,) = (text[max(0, at - 400) : at + 200] for at in [text.index(f"{INT4_PERPLEXITY_RISE:.1%}")])
    assert "SmolLM2-135M-Instruct" in sentence
    assert "LICENSE" in sentence
    if path.endswith(".md"):
        assert f"{SMOLLM2}.json" in sentence


@pytest.mark.parametrize("path", ["src/twostroke/config/cache.py", "docs/features.md", "docs/gpu.md"])
def test_whoever_tells_of_int4_to_users_tells_all_three_models(path: str) -> None:
    text = " ".join((ROOT / path).read_text().split())
    rises = {
        "Gemma 3 270M": INT4_PERPLEXITY_RISE_OF_GEMMA,
        "SmolLM2-135M-Instruct": INT4_PERPLEXITY_RISE,
        "Qwen2.5-Coder-1.5B": INT4_PERPLEXITY_RISE_OF_CODER,
    }
    for model, rise in rises.items():
        assert re.search(rf"{model} (on our LICENSE )?by {rise:.1%}", text), model


def test_the_decision_tells_the_measured_rises() -> None:
    text = (ROOT / DECISION).read_text()
    rows = {row[0]: row[3:] for row in re.findall(r"^\|" + r" ([^|]*) \|" * 7 + "$", text, re.MULTILINE)}
    smollm2, coder = rows["SmolLM2-135M-Instruct"], rows["Qwen2.5-Coder-1.5B"]
    assert smollm2[:2] == (f"{INT8_PERPLEXITY_RISE:.1%}", f"{INT4_PERPLEXITY_RISE:.1%}")
    assert coder[:2] == (f"{INT8_PERPLEXITY_RISE_OF_CODER:.1%}", f"{INT4_PERPLEXITY_RISE_OF_CODER:.1%}")
    assert smollm2[3].startswith(f"{rise_of(PEERS, 'llama.cpp, KV q4_0', 'llama.cpp'):.1%} ")
    embedded = json.loads((ROOT / "benchmarks/results/quality.json").read_text())["results"]["kv_cache_dtype=int4"]
    assert f"(`quality.json`, before 045) int4 raises perplexity by only {embedded['perplexity_rise']:.1%}." in text


def test_an_engine_warns_at_start_of_int4_alone(random_models: dict[str, Path]) -> None:
    for kv_cache_dtype, count in (("int4", 1), ("int8", 0)):
        options = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": 1 << 22, "threads": 1}
        with LLM(str(random_models["llama"]), **options) as llm:
            assert sum(line == f"note     {kv_format_warning('int4')}" for line in llm.engine.startup_lines) == count
