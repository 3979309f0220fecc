"""`twostroke train-medusa` on tiny random models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model_folders import write_random_model
from twostroke.errors import InvalidParameter, ModelNotFound
from twostroke.model.model_files import find_model
from twostroke.train.backbone import Backbone
from twostroke.train.medusa import MedusaTraining, train_medusa
from twostroke.train.medusa_heads import TrainableHeads, medusa_losses
from twostroke.train.medusa_options import MedusaOptions
from twostroke.train.windows import Windows, read_tokens

OPTIONS = MedusaOptions(steps=8, num_heads=2, window=32, batch_windows=2, threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("backbone"), "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(60)))
    return path


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_random_model(tmp_path, family)
    backbone = Backbone(find_model(str(folder)), 40, 3, threads=1)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = theirs.model(tokens).last_hidden_state
    torch.testing.assert_close(backbone.states(tokens), expected, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(backbone.output_head, theirs.lm_head.weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_heads_are_written_in_the_published_layout(model: Path, text: Path, tmp_path: Path, num_layers: int) -> None:
    folder = train_medusa(str(model), text, replace(OPTIONS, output=tmp_path / "heads", num_layers=num_layers))
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    shapes = {
        f"{i}.{j}.linear.{kind}": shape
        for i in range(2)
        for j in range(num_layers)
        for kind, shape in (("weight", (64, 64)), ("bias", (64,)))
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert json.loads((folder / "config.json").read_text()) == {
        "hidden_size": 64,
        "vocab_size": 320,
        "base_model_name_or_path": str(model),
        "medusa_num_heads": 2,
        "medusa_num_layers": num_layers,
    }
    assert all(tensor.float().abs().sum() > 0 for tensor in tensors.values())


@pytest.mark.parametrize("num_layers", [1, 3])
def test_training_lowers_every_loss(model: Path, text: Path, num_layers: int) -> None:
    files = find_model(str(model))
    options = replace(OPTIONS, steps=40, learning_rate=1e-2, num_layers=num_layers)
    windows = Windows(read_tokens(text, files.tokenizer()), 32, 0)
    training = MedusaTraining(Backbone(files, 32, 2, threads=1), windows, options)
    losses = np.array([training.step() for _ in range(40)])
    assert (losses[-5:].mean(0) < losses[:5].mean(0) - 0.1).all(), (losses[:5], losses[-5:])


def test_a_resumed_run_continues_exactly(model: Path, text: Path, tmp_path: Path) -> None:
    """The rate follows the share of the budget, so the run that is broken off keeps its budget."""
    whole = train_medusa(str(model), text, replace(OPTIONS, output=tmp_path / "whole"))
    files = find_model(str(model))
    first = MedusaTraining(
        Backbone(files, 32, 2, threads=1), Windows(read_tokens(text, files.tokenizer()), 32, 0), OPTIONS
    )
    for _ in range(3):
        first.step()
    facts = torch.load(whole / "checkpoint.pt", weights_only=True)["facts"]
    (tmp_path / "parts").mkdir()
    torch.save({"facts": facts, **first.state()}, tmp_path / "parts" / "checkpoint.pt")
    parts = train_medusa(str(model), text, replace(OPTIONS, output=tmp_path / "parts", resume=True))
    for name, value in load_file(whole / "medusa_lm_head.safetensors").items():
        assert torch.equal(value, load_file(parts / "medusa_lm_head.safetensors")[name]), name


def test_portions_of_the_vocabulary_have_the_gradient_of_the_whole(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = find_model(str(model))
    backbone = Backbone(files, 32, 2, threads=1)
    token_ids = read_tokens(text, files.tokenizer())
    gradients = []
    for most in (1 << 24, 320 * 7):
        monkeypatch.setattr("twostroke.train.medusa._MAX_LOGITS", most)
        training = MedusaTraining(backbone, Windows(token_ids, 32, 0), OPTIONS)
        losses = training._backward(backbone.states(training.windows.next(2)))
        gradients.append([p.grad for p in training.heads.parameters()] + [losses])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_head_is_compared_with_the_backbone_at_its_own_place() -> None:
    """Head i reads position p and its teacher is at p + 1 + i: the loss is that of these two and no others."""
    generator = torch.Generator().manual_seed(0)
    states, output, teacher = (torch.randn(*shape, generator=generator) for shape in ((10, 8), (5, 8), (10, 5)))
    heads = TrainableHeads(2, 8)
    for i, loss in enumerate(medusa_losses(heads, output, states, teacher)):
        logits, target = states[:8] @ output.mT, teacher[1 + i : 9 + i]  # fresh heads give back what they read
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target.softmax(-1)))


def test_windows_follow_from_seed_and_place() -> None:
    token_ids = np.arange(100, dtype=np.int64)
    windows = Windows(token_ids, 16, 7)
    windows.next(4)
    again = Windows(token_ids, 16, 7, windows.place)
    for _ in range(5):
        assert torch.equal(windows.next(4), again.next(4))
    assert (windows.next(1).diff() == 1).all()
    assert Windows(token_ids[:16], 16, 7).next(2).tolist() == [list(range(16))] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"", "has 0 tokens"), (b"short", "has 5 tokens"), (b"\xff\xfe" * 99, "UTF-8")],
)
def test_a_text_that_cannot_be_used_is_refused(model: Path, tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidParameter, match=words):
        train_medusa(str(model), path, replace(OPTIONS, output=tmp_path / "heads"))
    assert not (tmp_path / "heads").exists()


def test_a_model_that_is_none_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        train_medusa(str(tmp_path / "nothing.gguf"), text, OPTIONS)


def test_a_folder_with_something_in_it_is_not_written_over(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidParameter, match="exists already"):
        train_medusa(str(model), text, replace(OPTIONS, output=tmp_path))


def test_only_the_same_run_is_resumed(model: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    with pytest.raises(InvalidParameter, match="has no checkpoint"):
        train_medusa(str(model), text, replace(OPTIONS, output=folder, resume=True))
    train_medusa(str(model), text, replace(OPTIONS, output=folder))
    wider = write_random_model(tmp_path / "wider", "llama", hidden_size=128)
    with pytest.raises(InvalidParameter, match="hidden_size is 64 there and 128 here"):
        train_medusa(str(wider), text, replace(OPTIONS, output=folder, resume=True))
    with pytest.raises(InvalidParameter, match="num_layers is 1 there and 2 here"):
        train_medusa(str(model), text, replace(OPTIONS, output=folder, resume=True, num_layers=2))
    with pytest.raises(InvalidParameter, match="num_heads is 2 there and 3 here"):
        train_medusa(str(model), text, replace(OPTIONS, output=folder, resume=True, num_heads=3))
    (folder / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(InvalidParameter, match="cannot be read as a checkpoint"):
        train_medusa(str(model), text, replace(OPTIONS, output=folder, resume=True))


def test_budgets_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="beside steps"):
        MedusaOptions(steps=1, minutes=1.0)
    with pytest.raises(InvalidParameter, match="steps"):
        MedusaOptions(steps=0)
    with pytest.raises(InvalidParameter, match="window"):
        MedusaOptions(window=4)
