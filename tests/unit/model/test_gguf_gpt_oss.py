"""gpt-oss's GGUF files, written as llama.cpp's converter writes them: transformers' logits, from floats and MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from torch import Tensor

from oracle import naive_model
from oracle.mxfp4 import write_mxfp4
from oracle.paged_driver import PagedDriver
from twostroke.config.load import ActivationQuantization, Kernels
from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.kernels.dispatch import operators_for
from twostroke.model.decoder import Placement
from twostroke.model.gguf.names import gguf_name
from twostroke.model.loader import load_model
from twostroke.model.model_files import find_model
from twostroke.model.weight_size import weight_bytes

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 37,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 256,
    },
}
TOKEN_IDS = np.random.default_rng(0).integers(0, 199, 90).tolist()
_OWN = {"post_attention_layernorm": "post_attention_norm"}


def stacks(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a stack of a checkpoint by its name in a file; other tensors are returned unchanged."""
    block, _, last = name.rpartition(".")
    if "experts" not in block:
        return {gguf_name(name, _OWN): weight}
    layer, kind = block.split(".")[2], "bias" if last.endswith("_bias") else "weight"
    weight = weight if kind == "bias" else weight.transpose(1, 2)
    if last.startswith("down_proj"):
        return {f"blk.{layer}.ffn_down_exps.{kind}": weight}
    return {f"blk.{layer}.ffn_{part}_exps.{kind}": weight[:, place::2] for place, part in enumerate(("gate", "up"))}


def write(path: Path, model: Any, *, in_4_bits: bool, gating: int | None = None) -> None:
    """Write a file of the model, experts in MXFP4 or all in float32; the model's weights must be numbers of MXFP4."""
    config, rope = model.config, model.config.rope_parameters
    writer = GGUFWriter(str(path), "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    if gating is not None:
        writer.add_uint32("gpt-oss.expert_gating_func", gating)
    for name, weight in model.state_dict().items():
        for stored, part in stacks(name, weight).items():
            array: npt.NDArray[np.float32] = np.ascontiguousarray(part.numpy().astype(np.float32))
            if in_4_bits and stored.endswith("_exps.weight"):
                packed = quantize(array, GGMLQuantizationType.MXFP4)
                writer.add_tensor(stored, packed, raw_dtype=GGMLQuantizationType.MXFP4)
            else:
                writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' model, whose experts have numbers of MXFP4."""
    folder = tmp_path_factory.mktemp("folder")
    model = naive_model.build(folder, "GptOss", **SHAPE)
    write_mxfp4(folder, model)
    return model


@pytest.mark.parametrize("form", [("reference", None), ("auto", "none")])
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_logits_equal_transformers(
    in_4_bits: bool, form: tuple[Kernels, ActivationQuantization | None], theirs: Any, tmp_path: Path
) -> None:
    write(tmp_path / "x.gguf", theirs, in_4_bits=in_4_bits)
    files = find_model(str(tmp_path / "x.gguf"))
    config = files.config()
    assert config.layer_windows == (37, None, 37)
    source, operators = files.weights(config, None), operators_for(CPU, torch.float32, *form)
    assert source.quantization == ("gguf" if in_4_bits else None)
    model = load_model(source, config, Placement(operators, torch.float32, CPU, 256))
    driver = PagedDriver(model, num_blocks=64)
    found = driver.logits(driver.step([(driver.add(TOKEN_IDS), len(TOKEN_IDS))])[0])
    assert (found - naive_model.logits(theirs, TOKEN_IDS)).abs().max() < 1e-3


def test_a_file_takes_as_many_bytes_as_the_folder_that_is_published(theirs: Any, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", theirs, in_4_bits=True)
    write_mxfp4(tmp_path / "folder", theirs)
    sizes: list[int] = []
    for path in (tmp_path / "x.gguf", tmp_path / "folder"):
        files = find_model(str(path))
        config = files.config()
        operators = operators_for(CPU, torch.float32, "native")
        sizes.append(weight_bytes(files.weights(config, None), config, torch.float32, operators))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("gating", [0, 1, 3])
def test_softmax_over_all_or_over_what_was_chosen_is_the_same(gating: int, theirs: Any, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", theirs, in_4_bits=False, gating=gating)
    experts = find_model(str(tmp_path / "x.gguf")).config().layers[0].experts
    assert experts is not None
    assert (experts.scores, experts.is_renormalized, experts.has_biases) == ("softmax", True, True)


def test_sigmoids_are_refused(theirs: Any, tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", theirs, in_4_bits=False, gating=2)
    with pytest.raises(UnsupportedModel, match=r"gpt-oss.expert_gating_func=2 is not implemented .*; known: 1, 3\."):
        find_model(str(tmp_path / "x.gguf")).config()


def test_a_file_without_sinks_is_refused(theirs: Any, tmp_path: Path) -> None:
    write(path := tmp_path / "x.gguf", theirs, in_4_bits=False)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_sinks.weight", b"blk.1.attn_sinkx.weight"))
    files = find_model(str(path))
    with pytest.raises(CorruptCheckpoint, match=r"missing: blk.1.attn_sinks.weight; unknown: blk.1.attn_sinkx.weight"):
        files.weights(files.config(), None)
