"""Medusa and EAGLE heads: they guess what a plain reading of the papers guesses, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import twostroke
from compatibility.models import write_eagle
from twostroke import LLM, SamplingParams
from twostroke.errors import CorruptCheckpoint, InvalidParameter, ModelNotFound
from twostroke.model.model_files import find_model
from twostroke.speculation.chain import ChainProposer
from twostroke.speculation.eagle import EagleProposer
from twostroke.speculation.history import FeatureHistory
from twostroke.speculation.medusa import MedusaProposer
from twostroke.speculation.proposer import DraftRequest, Drafts

EMBEDDED = Path(twostroke.__file__).parent / "embedded"
TEXT = "import os\n\n\nclass DraftModelPass:\n  def __init__(self, path):\n  self.path = path\n\n    def read(self"
NUM_DRAFTS = 3

Round = tuple[list[int], tuple[int, ...]]
"""Known tokens, and what was guessed to follow."""


def recorder_of(propose: Any, rounds: list[Round]) -> Any:
    """Return a `propose` that also appends what was known and what was guessed."""

    def recording(self: Any, requests: list[DraftRequest]) -> list[Drafts]:
        known = [request.token_ids.tolist() for request in requests]
        found = propose(self, requests)
        rounds.extend(zip(known, (drafts.chain for drafts in found), strict=True))
        return found

    return recording


def drafted(method: str, kind: type[Any], monkeypatch: pytest.MonkeyPatch, repeats: int = 1) -> list[Round]:
    """Return the drafts of the engine for a text, in chunks and in a batch; the last time, of several."""
    rounds: list[Round] = []
    monkeypatch.setattr(kind, "propose", recorder_of(kind.propose, rounds))
    speculation = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings: dict[str, Any] = {"threads": 1, "dtype": "float32", "num_kv_blocks": 60, "max_num_batched_tokens": 24}
    with LLM("embedded", speculative_config=speculation, **settings) as llm:
        for _ in range(repeats):
            rounds.clear()
            outputs = llm.generate([TEXT, "def f(x):\n"], params)
        assert outputs[0].num_cached_tokens >= 16 * (repeats > 1)
    return rounds


@torch.no_grad()
def hidden_states(token_ids: list[int]) -> tuple[Tensor, ...]:
    """Return [1 + num_layers] of [num_tokens, hidden_size], by transformers: the inputs of the layers, the last one
    normed."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32, attn_implementation="eager")
    return tuple(h[0] for h in model.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states)


@torch.no_grad()
def medusa_guesses(token_ids: list[int]) -> tuple[int, ...]:
    weights = {name: t.float() for name, t in load_file(EMBEDDED / "medusa" / "medusa_lm_head.safetensors").items()}
    table = load_file(EMBEDDED / "model.safetensors")["model.embed_tokens.weight"].float()
    # of the last token but one: what the last one was drawn from
    x = hidden_states(token_ids)[-1][-2]
    heads = [x + F.silu(weights[f"{i}.0.linear.weight"] @ x + weights[f"{i}.0.linear.bias"]) for i in range(NUM_DRAFTS)]
    return tuple(int((table @ head).argmax()) for head in heads)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def rotated(x: Tensor) -> Tensor:
    """[num_tokens, heads, 64] at positions 0, 1, …"""
    angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
    cos, sin = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@torch.no_grad()
def eagle_guesses(token_ids: list[int], start: int = 0) -> tuple[int, ...]:
    """Return guesses of a model that reads the whole sequence again for each, from position `start` on."""
    w = {name: t.float() for name, t in load_file(EMBEDDED / "eagle" / "model.safetensors").items()}
    table = load_file(EMBEDDED / "model.safetensors")["model.embed_tokens.weight"].float()
    inputs = hidden_states(token_ids[:-1])
    h = torch.cat((inputs[2], inputs[4], inputs[6]), -1)[start:] @ w["fc.weight"].T
    known = list(token_ids[start:])
    layer = "midlayer."
    num_known = len(known)
    while len(known) < num_known + NUM_DRAFTS:
        embedded = table[known[1:]]
        x = torch.cat(
            (rms_norm(embedded, w[layer + "input_layernorm.weight"]), rms_norm(h, w[layer + "hidden_norm.weight"])), -1
        )
        q = rotated((x @ w[layer + "self_attn.q_proj.weight"].T).view(len(x), 4, 64))
        k = rotated((x @ w[layer + "self_attn.k_proj.weight"].T).view(len(x), 2, 64)).repeat_interleave(2, 1)
        v = (x @ w[layer + "self_attn.v_proj.weight"].T).view(len(x), 2, 64).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", scores, v).reshape(len(x), -1)
        y = h + mixed @ w[layer + "self_attn.o_proj.weight"].T
        z = rms_norm(y, w[layer + "post_attention_layernorm.weight"])
        gate = F.silu(z @ w[layer + "mlp.gate_proj.weight"].T) * (z @ w[layer + "mlp.up_proj.weight"].T)
        y = y + gate @ w[layer + "mlp.down_proj.weight"].T
        best = int((w["lm_head.weight"] @ rms_norm(y[-1], w["norm.weight"])).argmax())
        known.append(best + int(w["d2t"][best]))
        h = torch.cat((h, y[-1:]))
    return tuple(known[num_known:])


def test_eagle_goes_on_from_where_features_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that were dropped count as absent, from the start of a block on."""
    monkeypatch.setattr(FeatureHistory, "__init__", _short_memory(FeatureHistory.__init__, num_tokens=20))
    rounds = [a_round for a_round in drafted("eagle", EagleProposer, monkeypatch) if len(a_round[0]) > 40]
    assert len(rounds) > 3
    for known, found in rounds:
        assert found in {eagle_guesses(known, start)[: len(found)] for start in range(16, len(known) - 1, 16)}
    assert any(found != eagle_guesses(known)[: len(found)] for known, found in rounds), "it remembers everything"


def test_a_prefix_that_is_found_in_the_cache_was_read_by_eagle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, found in drafted("eagle", EagleProposer, monkeypatch, repeats=2)[::3]:
        assert found == eagle_guesses(known)[: len(found)]


def _short_memory(made: Any, num_tokens: int) -> Any:
    def init(self: FeatureHistory, layers: tuple[int, ...], max_tokens: int) -> None:
        del max_tokens
        made(self, layers, num_tokens)

    return init


@pytest.mark.parametrize(
    ("method", "kind", "reference"),
    [("medusa", MedusaProposer, medusa_guesses), ("eagle", EagleProposer, eagle_guesses)],
    ids=["medusa", "eagle"],
)
def test_guesses_are_those_of_the_reference(
    method: str, kind: type[Any], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = drafted(method, kind, monkeypatch)
    assert len(rounds) > 10
    for known, found in rounds[:: max(1, len(rounds) // 10)]:
        assert found == reference(known)[: len(found)]
        assert found


@torch.no_grad()
def guesses_of(model: Any, token_ids: list[int]) -> tuple[int, ...]:
    """Return the greedy continuation, reading the whole text again for every token."""
    known = list(token_ids)
    while len(known) < len(token_ids) + NUM_DRAFTS:
        known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    return tuple(known[len(token_ids) :])


def test_a_draft_model_forgets_what_was_rejected(
    random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model drafts: most drafts fall, and the next ones follow the tokens that came instead."""
    rounds: list[Round] = []
    monkeypatch.setattr(ChainProposer, "propose", recorder_of(ChainProposer.propose, rounds))
    speculation = {
        "method": "draft_model",
        "model": str(random_models["qwen3"]),
        "num_speculative_tokens": NUM_DRAFTS,
    }
    settings: dict[str, Any] = {"threads": 1, "dtype": "float32", "num_kv_blocks": 60, "max_num_batched_tokens": 24}
    with LLM(str(random_models["llama"]), speculative_config=speculation, **settings) as llm:
        prompts = [{"prompt_token_ids": list(range(40, 40 + length))} for length in (7, 50)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    drafts = [output.metrics.drafts for output in outputs if output.metrics is not None]
    assert all(found is not None and found.num_accepted_tokens < found.num_draft_tokens / 2 for found in drafts)
    theirs = AutoModelForCausalLM.from_pretrained(random_models["qwen3"], dtype=torch.float32)
    assert len(rounds) > 20
    for known, found in rounds:
        assert found == guesses_of(theirs, known)[: len(found)]


def copied(kind: str, folder: Path, **changed: Any) -> Path:
    """The companion, with some of its tensors or numbers changed; None takes one away."""
    name = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    weights = load_file(EMBEDDED / kind / name)
    config = json.loads((EMBEDDED / kind / "config.json").read_text())
    for key, value in changed.items():
        target = weights if isinstance(value, Tensor) or key in weights else config
        if value is None:
            del target[key]
        else:
            target[key] = value
    folder.mkdir()
    save_file(weights, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "changed", "told"),
    [
        (
            "medusa",
            {"0.0.linear.weight": torch.zeros(128, 128)},
            r"\[128, 128\], expected 256 x 256",
        ),
        ("medusa", {"2.0.linear.bias": None}, "has no tensor '2.0.linear.bias'"),
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads must be an integer above 0"),
        ("medusa", {"medusa_num_heads": 5}, "has no tensor '4.0.linear.weight'"),
        ("medusa", {"0.1.linear.weight": torch.zeros(256, 256)}, "1 medusa_num_layers, but head 0 has more blocks"),
        ("medusa", {"hidden_size": 512}, "config.json has a hidden_size of 512: embedded has hidden states of 256"),
        (
            "medusa",
            {"1.0.linear.bias": torch.full((256,), float("nan"))},
            "1.0.linear.bias has numbers that are not fin",
        ),
        ("eagle", {"vocab_size": 5000}, "config.json has a vocab_size of 5000: embedded has .* a vocabulary of 4096"),
        ("eagle", {"norm.weight": torch.full((256,), float("inf"))}, "norm.weight has numbers that are not finite"),
        ("eagle", {"fc.weight": torch.zeros(256, 512)}, r"fc.weight has the shape \[256, 512\], expected 256 x 768"),
        ("eagle", {"norm.weight": None}, "has no tensor 'norm.weight'"),
        ("eagle", {"d2t": torch.zeros(7, dtype=torch.int64)}, r"d2t has the shape \[7\], expected 3072"),
        ("eagle", {"d2t": None}, "lm_head.weight.*expected 4096 x 256: embedded has hidden states of 256"),
        ("eagle", {"d2t": torch.full((3072,), 4000)}, "d2t names tokens 4000 to 7071; the vocabulary has 4096"),
        ("eagle", {"d2t": torch.full((3072,), -1)}, "d2t names tokens -1 to 3070"),
        ("eagle", {"d2t": torch.zeros(3072)}, r"d2t holds numbers of torch\.float32"),
        ("eagle", {"embed_tokens.weight": torch.zeros(4096, 128)}, r"embed_tokens.*expected 4096 x 256"),
        ("eagle", {"embed_tokens.weight": torch.zeros(100, 256)}, r"embed_tokens.*expected 4096 x 256"),
        ("eagle", {"fc.weight": None}, "has no tensor 'fc.weight'"),
    ],
    ids=str,
)
def test_heads_of_another_model_are_refused(kind: str, changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path / "heads", **changed)
    with pytest.raises(CorruptCheckpoint, match=told):
        LLM("embedded", threads=1, num_kv_blocks=20, speculative_config={"method": kind, "model": str(folder)})


def test_a_folder_that_holds_no_heads_is_refused(tmp_path: Path) -> None:
    for kind in ("medusa", "eagle"):
        with pytest.raises(ModelNotFound, match=r"has no config\.json"):
            LLM("embedded", threads=1, speculative_config={"method": kind, "model": str(tmp_path)})


def test_a_model_without_companions_says_so(random_models: dict[str, Path]) -> None:
    for kind in ("medusa", "eagle", "draft_model"):
        with pytest.raises(InvalidParameter, match="model is not given: nothing of that method comes with"):
            LLM(str(random_models["llama"]), threads=1, speculative_config={"method": kind})


def test_a_model_too_shallow_for_eagle_says_so(random_models: dict[str, Path]) -> None:
    """EAGLE's features come from three different layers."""
    with pytest.raises((InvalidParameter, CorruptCheckpoint)):
        LLM(
            str(random_models["llama"]),
            threads=1,
            speculative_config={"method": "eagle", "model": str(EMBEDDED / "eagle")},
        )


def test_heads_published_as_a_pickle(tmp_path: Path) -> None:
    """FasterDecoding publishes its heads so; a pickle that wants to run code is refused."""
    weights = load_file(EMBEDDED / "medusa" / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text((EMBEDDED / "medusa" / "config.json").read_text())
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    speculation = {"method": "medusa", "model": str(tmp_path)}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM("embedded", threads=1, num_kv_blocks=20, speculative_config=speculation) as llm:
        assert len(llm.generate([TEXT], params)[0].outputs[0].token_ids) == 8
    torch.save({"0.0.linear.weight": Path}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CorruptCheckpoint, match="cannot be read as tensors"):
        LLM("embedded", threads=1, num_kv_blocks=20, speculative_config=speculation)


def test_eagle_needs_a_low_a_middle_and_a_high_layer(tmp_path: Path, random_models: dict[str, Path]) -> None:
    target = find_model(str(random_models["llama"])).config()
    write_eagle(tmp_path, target)
    drafts = {"method": "eagle", "model": str(tmp_path)}
    with pytest.raises(InvalidParameter, match=r"a high layer of 7 or more; llama\w* has 3\. Take another method"):
        LLM(str(random_models["llama"]), threads=1, num_kv_blocks=20, max_model_len=64, speculative_config=drafts)
