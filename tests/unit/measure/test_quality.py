"""The command's own arithmetic, and one look through the real engine."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from gguf_files import fixture
from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.errors import InvalidParameter, SetupError, UnknownParameter
from twostroke.measure.peers.peer import Peer
from twostroke.measure.quality import peer
from twostroke.measure.quality.configuration import RESERVED, keywords_of
from twostroke.measure.quality.distance import FLOAT32, Distance, DistributionModel, Window, stored_distributions
from twostroke.measure.quality.run import (
    KV_CONFIGURATIONS,
    MAX_PERPLEXITY_RISE,
    MIN_TEXT_TOKENS,
    QualityOptions,
    QualityRow,
    print_quality,
    run_quality,
)
from twostroke.measure.quality.scoring import ANSWER, CUE, Document, Perplexity, needles, perplexity, windows
from twostroke.model.model_files import find_model


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
    quality = run_quality(options)
    base, int8, other = quality.rows
    assert base.rise == 0
    assert other.score == base.score  # the same bits on any number of threads, in any blocks and batch
    assert 0 < abs(int8.rise) < 0.2
    assert set(base.found) == {0, 64, 256}
    saved = json.loads((tmp_path / "quality.json").read_text())
    assert saved["results"]["quantization=int8"]["perplexity_rise"] == int8.rise
    # the model's own type is float32 here: only the order of sums differs
    assert base.distance is not None
    assert base.distance.mean_kl < 1e-6
    assert base.distance.top1_agreement == 1.0
    assert int8.distance is not None
    assert 1e-6 < int8.distance.mean_kl < int8.distance.max_kl
    for row in quality.rows:  # what the engine scores through its scheduler, to the rounding of a mean
        assert row.distance is not None
        assert row.distance.num_positions == row.score.num_tokens
        assert row.distance.perplexity == pytest.approx(row.score.per_token, rel=1e-6)
    assert saved["results"]["quantization=int8"]["against_float32"]["mean_kl"] == int8.distance.mean_kl
    shown = io.StringIO()
    print_quality(quality, Console(width=200, file=shown))
    assert "mean KL" in shown.getvalue()
    assert "passage tokens" in shown.getvalue()
    without = replace(quality, rows=tuple(replace(row, found={}) for row in quality.rows))
    print_quality(without, Console(width=200, file=(shown_without := io.StringIO())))
    assert "tokens of a passage" not in shown_without.getvalue(), "there are no such columns"
    assert "--configuration quantization=int8" in saved["command"]


def test_limits_and_refusals() -> None:
    limit = MAX_PERPLEXITY_RISE["quantization=int4"]
    score = Perplexity(1, 1, 1.0)
    assert QualityRow("quantization=int4", score, {}, limit, limit).holds
    assert not QualityRow("quantization=int4", score, {}, limit + 1e-9, limit).holds
    with pytest.raises(InvalidParameter, match="NAME=VALUE"):
        QualityOptions(configuration=("int8",))
    with pytest.raises(UnknownParameter, match="quantisation"):
        QualityOptions(configuration=("quantisation=int8",))


def test_a_gguf_file_is_scored_in_the_formats_it_can_be_loaded_in(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("what is scored, and found again " * 24)
    model, text = str(fixture("llama-q4_0")), tmp_path / "text"
    options = QualityOptions(model=model, text=text, num_needles=1, threads=1, results=tmp_path)
    assert [row.configuration for row in run_quality(options).rows] == ["", *KV_CONFIGURATIONS]
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
    """Each setting's default can be written; None means that it is not given."""
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


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_float32_side_is_that_of_transformers(random_models: dict[str, Path], family: str) -> None:
    """The text takes two passes of up to 512 tokens, and some of qwen2's layers have a window."""
    ids = [(7 * i * i + 3 * i) % 256 for i in range(600)]
    config = EngineConfig.from_keywords(model=str(random_models[family]), max_model_len=640, threads=1, **FLOAT32)
    ours = torch.cat(list(DistributionModel(config, 640, as_numbers=True).log_probs(Window(tuple(ids), 100))))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(random_models[family]).float().eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, 99:-1].log_softmax(-1)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-3


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_what_is_measured_is_what_an_engine_computes(random_models: dict[str, Path], kv_cache_dtype: str) -> None:
    ids = [(7 * i * i + 3 * i) % 256 for i in range(90)]
    given: dict[str, Any] = {"max_model_len": 128, "threads": 1, "kv_cache_dtype": kv_cache_dtype}
    config = EngineConfig.from_keywords(model=str(random_models["qwen2"]), **given)
    measured = torch.cat(list(DistributionModel(config, 128).log_probs(Window(tuple(ids), 1))))
    with LLM(str(random_models["qwen2"]), **given) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params)
    assert output.prompt_logprobs is not None
    computed = [found[token].logprob for found, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if found]
    of_tokens = measured[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert of_tokens.tolist() == pytest.approx(computed, abs=1e-5)


def test_a_distance_is_the_definition() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]), torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    distance = Distance()
    distance.add(p[:1].log(), q[:1].log(), [0])
    distance.add(p[1:].log(), q[1:].log(), [1])
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    second = 0.2 * math.log(2) + 0.7 * math.log(7 / 8)
    assert distance.mean_kl == pytest.approx((first + second) / 2, rel=1e-6)
    assert distance.max_kl == pytest.approx(first, rel=1e-6)
    assert distance.top1_agreement == 0.5
    assert distance.perplexity == pytest.approx(math.sqrt(1 / (0.25 * 0.8)), rel=1e-6)
    assert distance.float32_perplexity == pytest.approx(math.sqrt(1 / (0.5 * 0.7)), rel=1e-6)


_INDIFFERENT = """
import json, sys
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "load":
        print(json.dumps({"loaded": {"kv": str(order["kv_cache_dtype"])}}), flush=True)
    else:
        rows = len(order["token_ids"]) - order["first"] - MISSING
        open(order["path"], "wb").write(bytes(4 * rows * VOCAB))
        print(json.dumps({"scored": rows}), flush=True)
"""


@pytest.mark.parametrize("missing", [0, 1])
def test_a_peer_stands_beside_ours_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """The peer finds all tokens equally likely: its perplexity is the size of the vocabulary."""
    model = fixture("llama-q4_0")
    vocab_size = find_model(str(model)).config().vocab_size
    script = tmp_path / "indifferent.py"
    script.write_text(_INDIFFERENT.replace("MISSING", str(missing)).replace("VOCAB", str(vocab_size)))
    monkeypatch.setattr(peer, "LLAMA_CPP", Peer("llama.cpp", script))
    (tmp_path / "text").write_text("what is scored, and found again " * 24)
    options = QualityOptions(
        model=str(model),
        text=tmp_path / "text",
        configuration=("kv_cache_dtype=int8",),
        env=(f"llama.cpp={sys.executable}",),
        float32_positions=300,
        num_needles=0,
        threads=1,
        results=tmp_path,
    )
    quality = run_quality(options)
    assert [row.name for row in quality.peers] == ["llama.cpp", "llama.cpp, KV q8_0"]
    content = json.loads((tmp_path / "quality.json").read_text())
    assert "--env llama.cpp=PYTHON" in content["command"]
    assert sys.executable not in json.dumps(content), "the environment's path is private"
    saved = content["results"]
    assert [saved[row.name]["about"]["kv"] for row in quality.peers] == ["None", "q8_0"]
    assert quality.holds == (not missing)
    for row in quality.peers:
        if missing:
            assert row.failure is not None
            assert "bytes of logits for" in row.failure
        else:
            assert row.distance is not None
            assert row.distance.num_positions == 300
            assert row.distance.perplexity == pytest.approx(vocab_size, rel=1e-5)
            assert row.distance.mean_kl > 0.1


def test_environments_that_mean_nothing_are_refused(random_models: dict[str, Path]) -> None:
    python = sys.executable
    for env, changes, words in (
        ("vllm=python", {}, "no other engine"),
        ("llama.cpp=/nowhere", {}, "names no file"),
        (f"llama.cpp={python}", {"model": str(random_models["llama"])}, "only GGUF files"),
        (f"llama.cpp={python}", {"model": "x.gguf", "float32_positions": 0}, "changes nothing"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            QualityOptions(env=(env,), **changes)


def test_positions_that_no_disk_holds_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="GiB of temporary files"), stored_distributions(10**12, 10**5):
        pass
