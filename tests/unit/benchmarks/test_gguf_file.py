"""A model folder as GGUF, read back by the format's own package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize

from benchmarks.compare.gguf_file import _rope_factors, write_gguf  # type: ignore[reportPrivateUsage]
from model_folders import write_random_model
from twostroke.config.rope import RopeConfig
from twostroke.errors import SetupError, UnsupportedModel
from twostroke.layers.elementwise import inverse_frequencies
from twostroke.model.checkpoint import Checkpoint


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    reader = GGUFReader(path)
    return reader, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize(("file_type", "tolerance"), [("BF16", 0.004), ("F16", 0.001), ("Q8_0", 0.01), ("Q4_0", 0.11)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_tensor_is_there_and_is_the_folders(
    family: str, file_type: str, tolerance: float, random_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = random_models[family]
    _, tensors = _read(write_gguf(folder, file_type, tmp_path, progress=False))
    checkpoint = Checkpoint(folder)
    assert len(tensors) == len(checkpoint.shapes)
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.2.ffn_down.weight": "model.layers.2.mlp.down_proj.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for theirs, ours in pairs.items():
        found = dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        expected = checkpoint.read(ours).float().numpy()
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected), theirs


def test_llama_rows_are_paired_and_qwen3_rows_are_not(random_models: dict[str, Path], tmp_path: Path) -> None:
    for family, heads in (("llama", 4), ("qwen3", None)):
        folder = random_models[family]
        _, tensors = _read(write_gguf(folder, "BF16", tmp_path, progress=False))
        tensor = tensors["blk.0.attn_q.weight"]
        found = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        expected = Checkpoint(folder).read("model.layers.0.self_attn.q_proj.weight").bfloat16().float()
        if heads is not None:
            # element j of the first half and element j of the second become neighbours
            per_head = expected.view(heads, 2, -1, expected.shape[1])
            expected = torch.stack([per_head[:, 0], per_head[:, 1]], dim=2).reshape(expected.shape)
        assert torch.equal(found, expected), family


def test_a_second_call_finds_the_file_and_a_changed_folder_makes_another(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", "llama")
    first = write_gguf(folder, "Q8_0", tmp_path, progress=False)
    written = first.stat().st_mtime_ns
    assert write_gguf(folder, "Q8_0", tmp_path, progress=False) == first
    assert first.stat().st_mtime_ns == written
    os.utime(folder / "config.json", ns=(1, 1))
    assert write_gguf(folder, "Q8_0", tmp_path, progress=False) != first


def test_the_vocabulary_is_the_tokenizers(random_models: dict[str, Path], tmp_path: Path) -> None:
    reader, _ = _read(write_gguf(random_models["qwen3"], "BF16", tmp_path, progress=False))
    vocab = json.loads((random_models["qwen3"] / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 320
    assert all(tokens[i] == token for token, i in vocab.items())
    assert tokens[256] == "<|end|>"


def test_llama3s_factors_are_what_the_rotary_table_is_divided_by() -> None:
    fields = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    fields |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = RopeConfig.from_hf({"rope_scaling": fields, "rope_theta": 5e5, "max_position_embeddings": 131072})
    scaled, _ = inverse_frequencies(rope, 64)
    plain = 5e5 ** (-torch.arange(0, 64, 2).double() / 64)
    factors = _rope_factors(rope, 64)
    assert factors is not None
    torch.testing.assert_close(factors.double(), plain / scaled.double(), rtol=1e-5, atol=0)
    assert factors.max() == 32.0
    assert factors.min() == 1.0


def test_what_cannot_be_converted_is_refused(random_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="MistralForCausalLM"):
        write_gguf(random_models["mistral"], "BF16", tmp_path, progress=False)
    odd = write_random_model(tmp_path / "odd", "llama", hidden_size=48, intermediate_size=96)
    with pytest.raises(SetupError, match="multiples of 32"):
        write_gguf(odd, "Q4_0", tmp_path, progress=False)
    assert not list(tmp_path.glob("*.gguf"))
    (odd / "tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match=r"tokenizer\.json"):
        write_gguf(odd, "BF16", tmp_path, progress=False)
