"""The GGUF files that llama.cpp made hold the models they are said to hold, and transformers agrees with its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from fixtures.gguf import models
from fixtures.gguf.layout import gguf_name
from fixtures.gguf.vocabularies import TEXTS, VOCABULARIES, Vocabulary, byte_alphabet

_FOLDER = Path(models.__file__).parent
_LOGITS: dict[str, Any] = json.loads((_FOLDER / "logits.json").read_text())


def _next_token_logits(config: dict[str, Any], weights: dict[str, NDArray[np.float32]]) -> torch.Tensor:
    """Return the logits of transformers' model after the recorded prompt. [vocab_size]"""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    state = {name: torch.from_numpy(weight.copy()) for name, weight in weights.items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(torch.tensor([_LOGITS["prompt_token_ids"]])).logits
    return logits[0, -1]


@pytest.mark.parametrize("name", models.MODELS)
def test_the_float_model_gives_the_logits_of_llama_cpp(name: str) -> None:
    """This includes the rotation of q and k: another order of rows gives completely different logits."""
    recorded = torch.tensor(_LOGITS["logits"][f"{name}-f32"])
    found = _next_token_logits(*models.float_model(name))
    torch.testing.assert_close(found, recorded, atol=2e-4, rtol=0)
    assert recorded.std() > 0.5


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_half_precision_files_hold_rounded_weights(name: str, dtype: torch.dtype) -> None:
    """Norms stay in float32, as llama.cpp keeps them. It rounds activations to the type of the weights, too."""
    recorded = torch.tensor(_LOGITS["logits"][f"{name}-{'f16' if dtype == torch.float16 else 'bf16'}"])
    config, weights = models.float_model(name)
    rounded = {
        parameter: weight if weight.ndim == 1 else torch.from_numpy(weight).to(dtype).float().numpy()
        for parameter, weight in weights.items()
    }
    found = _next_token_logits(config, rounded)
    assert (found - recorded).abs().max() < 8 * torch.finfo(dtype).eps * recorded.abs().max()


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.gguf")), ids=lambda path: path.stem)
def test_files_hold_the_weights_that_gguf_dequantizes(path: Path) -> None:
    """The comparison is limited by llama.cpp's rounding of activations: a wrong order or scale is 10 times as far."""
    config, float_weights = models.float_model(path.stem.rsplit("-", 1)[0])
    found = _next_token_logits(config, _dequantized(path, config, float_weights))
    recorded = torch.tensor(_LOGITS["logits"][path.stem])
    assert (found - recorded).square().mean().sqrt() < 0.08 * recorded.std()


def _dequantized(
    path: Path, config: dict[str, Any], shaped_alike: dict[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """The weights of a file under Hugging Face's names and in its order of rows."""
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors.keys() - {"rope_freqs.weight"} == {gguf_name(name) for name in shaped_alike}
    weights: dict[str, NDArray[np.float32]] = {}
    for name, like in shaped_alike.items():
        tensor = tensors[gguf_name(name)]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(like.shape)
        rotated = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        num_heads = rotated.get(name.split(".")[-2])
        if config["model_type"] == "llama" and num_heads:
            pairs = weight.reshape(num_heads, -1, 2, like.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(like.shape)
        weights[name] = weight
    return weights


def test_every_file_has_its_logits_and_every_family_its_tokens() -> None:
    files = {path.stem for path in _FOLDER.glob("*.gguf")}
    assert files == _LOGITS["logits"].keys() - {"llama-wide-f32", "qwen3-wide-f32"}
    tokenizations = json.loads((_FOLDER / "tokenizations.json").read_text())["tokenizations"]
    for family, vocabulary in VOCABULARIES.items():
        assert [entry["text"] for entry in tokenizations[family]] == TEXTS
        for entry in tokenizations[family]:
            assert _bytes_of(entry["plain_token_ids"], vocabulary) == bytes.fromhex(entry["decoded"])


def _bytes_of(token_ids: list[int], vocabulary: Vocabulary) -> bytes:
    pieces = [vocabulary.tokens[token_id] for token_id in token_ids]
    if vocabulary.model == "gpt2":
        byte_of = {character: byte for byte, character in byte_alphabet().items()}
        return bytes(byte_of[character] for piece in pieces for character in piece)
    return b"".join(
        bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else piece.replace("▁", " ").encode() for piece in pieces
    )
