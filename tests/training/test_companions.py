"""The companions' recipe on nano configurations: what they learn, what is written, what acceptance counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from training.companions import acceptance
from training.companions.__main__ import kept_record
from training.companions.draft import Draft
from training.companions.eagle import Eagle, branch_attention
from training.companions.medusa import Medusa
from training.companions.run import CompanionRun
from training.companions.target import Target, feature_layers
from training.model import LlamaModel, ModelConfig, rope_tables, rotate
from training.train import TrainConfig

NANO = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    exit_layers=(2,),
)
NANO_DRAFT = replace(NANO, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, exit_layers=())
CHOSEN = torch.arange(0, 64, 2)
NAMES = ("draft", "medusa", "eagle")


def nano_target() -> Target:
    """Random, and sharper than a fresh model, so that there is something to learn from it."""
    model = LlamaModel(NANO, seed=3)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30.0)
    return Target(model, torch.float32)


def nano_companion(name: str, target: Target) -> Draft | Medusa | Eagle:
    if name == "draft":
        return Draft(1, NANO_DRAFT)
    return Medusa(target) if name == "medusa" else Eagle(target, 1, CHOSEN)


def documents(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(np.cumsum(rng.integers(0, 3, 300)) % NANO.vocab_size).astype(np.uint16) for _ in range(6)]


def nano_run(name: str, checkpoint: dict[str, Any] | None = None, tokens: int = 64 * 12) -> CompanionRun:
    config = TrainConfig(
        minutes=None,
        tokens=tokens,
        batch_tokens=64,
        micro_tokens=32,
        phases=((0.5, 16), (1.0, 32)),
        precision="float32",
        model=NANO,
    )
    target = nano_target()
    return CompanionRun(nano_companion(name, target), target, config, (documents(0), documents(1)), checkpoint)


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- training


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_every_loss(name: str) -> None:
    losses = np.array(list(nano_run(name, tokens=64 * 60).steps()))
    assert (losses[-5:].mean(0) < losses[:5].mean(0) - 0.1).all(), (losses[:5].mean(0), losses[-5:].mean(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_exactly(name: str, tmp_path: Path) -> None:
    straight = nano_run(name)
    expected = list(straight.steps())
    first = nano_run(name)
    got = [first.step() for _ in range(5)]
    first.save(tmp_path / "run.pt")
    second = nano_run(name, torch.load(tmp_path / "run.pt", weights_only=True))
    got += list(second.steps())
    assert got == expected
    for key, value in straight.companion.state_dict().items():
        assert torch.equal(value, second.companion.state_dict()[key]), key


def test_the_target_is_not_trained() -> None:
    run = nano_run("eagle")
    before = {name: value.clone() for name, value in run.target.model.state_dict().items()}
    run.step()
    for name, value in run.target.model.state_dict().items():
        assert torch.equal(value, before[name]), name


# --- what each predicts


def test_features_are_the_inputs_of_three_layers() -> None:
    assert feature_layers(9) == (2, 4, 6)
    target = nano_target()
    tokens = random_tokens(1, 8)
    seen = target.see(tokens)
    cos, sin = rope_tables(NANO, 8)
    x, inputs = F.embedding(tokens, target.head), []
    for layer in target.model.model.layers:
        inputs.append(x)
        x, _ = layer(x, cos, sin)
    torch.testing.assert_close(seen.features, torch.cat([inputs[2], inputs[3], inputs[3]], dim=-1))
    torch.testing.assert_close(seen.logits, target.model(tokens))


def test_a_head_learns_the_token_two_places_on() -> None:
    """A head whose output is the target's own state at p + 1 + i has the loss of the target itself there."""
    target = nano_target()
    seen = target.see(random_tokens(2, 12))
    medusa = Medusa(target)
    entropy = -(seen.logits.softmax(-1) * seen.logits.log_softmax(-1)).sum(-1)

    def clairvoyant(x: Tensor, head: int) -> Tensor:
        return seen.normed[:, 1 + head : 1 + head + x.shape[1]]

    medusa.heads.forward = clairvoyant  # type: ignore[method-assign]
    losses = medusa.losses(seen, seen.tokens)
    for i, loss in enumerate(losses):
        torch.testing.assert_close(loss, entropy[:, 1 + i : 1 + i + 12 - 4].mean())


def one_by_one(eagle: Eagle, features: Tensor, tokens: Tensor, start: int, steps: int) -> list[Tensor]:
    """Drafting as an engine does it: one sequence, a KV cache, the layer's own state as the next input."""
    layer, cos, sin = eagle.eagle.midlayer, eagle.cos, eagle.sin
    keys, values, found = [], [], []
    fc = eagle.eagle.fc(features[0])
    y = fc[start]
    for position in range(start + steps):
        h = fc[position] if position <= start else y
        embedded = eagle.table[tokens[0, position + 1]]
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(h)))
        q, k, v = (getattr(layer.self_attn, f"{name}_proj")(x).view(1, -1, 1, 16) for name in "qkv")
        here = (cos[position : position + 1], sin[position : position + 1])
        keys.append(rotate(k, *here))
        values.append(v)
        out = F.scaled_dot_product_attention(
            rotate(q, *here), torch.cat(keys, 2), torch.cat(values, 2), enable_gqa=True
        )
        y = h + layer.self_attn.o_proj(out.reshape(-1))
        y = y + layer.mlp(layer.post_attention_layernorm(y))
        if position >= start:
            found.append(eagle.eagle.norm(y))
    return found


def test_unrolled_steps_are_those_of_drafting_one_by_one() -> None:
    target = nano_target()
    eagle = Eagle(target, 1, CHOSEN)
    tokens = random_tokens(1, 14)
    features = target.see(tokens).features
    with torch.no_grad():
        unrolled = eagle.unroll(features[:, :10], tokens, 4)
        for start in (0, 4, 9):
            for k, state in enumerate(one_by_one(eagle, features, tokens, start, 4)):
                torch.testing.assert_close(unrolled[k][0, start], state, atol=1e-5, rtol=1e-4)


def test_attention_in_blocks_is_attention_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 11, 8, generator=generator)
    trunk, *branch = (tuple(torch.randn(2, 2, 11, 8, generator=generator) for _ in range(2)) for _ in range(3))
    torch.testing.assert_close(branch_attention(q, trunk, branch, 4), branch_attention(q, trunk, branch, 64))


# --- what is written


def test_the_draft_is_an_ordinary_llama(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    draft = Draft(1, NANO_DRAFT)
    draft.export(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = Draft.load(tmp_path, nano_target())
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours.llama(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)


def test_medusa_has_the_published_layout(tmp_path: Path) -> None:
    target = nano_target()
    medusa = Medusa(target)
    torch.nn.init.normal_(medusa.heads.linears[2].weight, generator=torch.Generator().manual_seed(0))
    medusa.export(tmp_path)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    shapes = {
        f"{i}.0.linear.{kind}": shape for i in range(4) for kind, shape in (("weight", (32, 32)), ("bias", (32,)))
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_heads"] == 4
    assert (config["hidden_size"], config["vocab_size"], config["medusa_num_layers"]) == (32, 64, 1)
    again = Medusa.load(tmp_path, target)
    assert torch.equal(again.heads.linears[2].weight, medusa.heads.linears[2].weight.bfloat16().float())


def test_eagle_has_the_published_layout(tmp_path: Path) -> None:
    target = nano_target()
    eagle = Eagle(target, 1, CHOSEN)
    eagle.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    attention = {"q": (32, 64), "k": (16, 64), "v": (16, 64), "o": (32, 32)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (32, 96),
        **{f"midlayer.self_attn.{name}_proj.weight": shape for name, shape in attention.items()},
        **{f"midlayer.mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (32, 48),
        **{f"midlayer.{name}.weight": (32,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm.weight": (32,),
        "lm_head.weight": (32, 32),
        "d2t": (32,),
        "t2d": (64,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(32), CHOSEN)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], CHOSEN)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (32, 64, 1)
    again = Eagle.load(tmp_path, target)
    for name, value in eagle.eagle.state_dict().items():
        assert torch.equal(again.eagle.state_dict()[name], value.bfloat16().float()), name


# --- what is counted


def test_a_draft_counts_where_all_before_it_stood() -> None:
    stood = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    found = acceptance.shares(stood)
    assert found["share"] == [3 / 4, 2 / 3, 1 / 2]
    assert found["given"] == [4, 3, 2]
    assert found["tokens_a_pass"] == 1 + 6 / 4


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_who_drafts_like_the_target_is_always_right(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "CONTEXT", 12)
    target = nano_target()
    twin = Draft(0, replace(NANO, exit_layers=()))
    twin.llama.load_state_dict(target.model.state_dict())
    eagle = Eagle(target, 1, CHOSEN)
    found = acceptance.measure(target, {"draft": twin, "eagle": eagle}, documents(5), 24, 0, batch=8)[mode]
    assert found["draft"]["share"] == [1.0] * 5
    assert found["eagle"]["share"][0] < 0.9
    assert set(found) == {"draft", "eagle", "exit_2"}
    assert len(found["exit_2"]["share"]) == 5


def test_drafts_are_compared_with_what_follows_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's text is written twice, once with its cache and once from scratch."""
    monkeypatch.setattr(acceptance, "CONTEXT", 12)
    target = nano_target()
    context = random_tokens(3, 12)
    passage = acceptance.write(target, context, lambda logits, i: logits.argmax(-1))
    text = context
    for _ in range(1 + acceptance.NUM_DRAFTS):
        text = torch.cat((text, target.model(text)[:, -1].argmax(-1)[:, None]), dim=1)
    assert torch.equal(passage.written, text[:, 12:])
    torch.testing.assert_close(passage.features, target.see(context).features)
    torch.testing.assert_close(passage.normed, target.see(context).normed[:, -1])


def test_a_drafter_measured_again_without_its_checkpoint_keeps_its_record() -> None:
    """Checkpoints are not committed; the committed figures tell how the drafters were trained."""
    for name in ("draft", "medusa", "eagle"):
        assert kept_record(name)["steps"] > 0
    assert kept_record("another") == {}
