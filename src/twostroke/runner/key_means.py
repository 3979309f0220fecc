"""Mean key of each KV head, which is subtracted from keys before quantized KV stores them (layers/attention.py).

Means are not in the weights: a pass over a short text finds them when a model is loaded. The mean is the one that the
text's keys, before rotation, would have over the first `_POSITIONS` positions. In pairs of dimensions that rotate fast
it is about zero.

The means have the same bits wherever the model's activations have, and so have the stored keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.config.kv_format import KVFormat, is_quantized, resolve_kv_format
from twostroke.config.model import ModelConfig
from twostroke.config.rope import RopeConfig
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.attention import AttentionMetadata
from twostroke.layers.elementwise import MIN_POSITIONS, Rotary, Rotation
from twostroke.layers.row_split import RowSplit
from twostroke.model.decoder import DecoderModel
from twostroke.runner.kv_storage import KVStorage

TEXT = """The keeper of the lighthouse had counted 312 ships since March. "None of them stopped," she said, and closed \
the window. In 1874 her grandfather had seen nine in a year; he wrote each of them down, with the wind, the sail and \
the hour.

def mean(values: list[float]) -> float:
    return sum(values) / len(values)  # fails where there are none

1. Wash the rice until the water is clear. 2. Boil it for 12 minutes. 3. Let it rest.
Der Zug nach Norden kommt um sieben. Le train du soir est en retard. The committee shall publish its report within 30 \
days of the hearing, unless both parties agree otherwise in writing.
"""
"""Number of tokens read from the start of the text."""
_POSITIONS = 2048
"""Positions over which keys are averaged. SmolLM2-135M-Instruct and Gemma 3 270M lose less with this than with 512 or
8,192."""
_BLOCK_SIZE = 16


def key_means_bytes(model: ModelConfig, kv_format: KVFormat, bytes_per_element: int) -> int:
    """Return the bytes of the means on each rank, which keeps those of all heads."""
    if not is_quantized(kv_format):
        return 0
    return bytes_per_element * sum(spec.kv_size for spec in model.layers if spec.centers_keys)


def center_keys(
    model: DecoderModel,
    encode: Callable[[str], Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    split: RowSplit,
) -> None:
    """Make a model subtract means from the keys it quantizes; every rank has to call this.

    Args:
        model: maths and weights.
        encode: encoder of the model's tokenizer, from text to token ids.
        dtype: type of activations.
        device: device of the model.
        split: distribution of heads among ranks.
    """
    token_ids = encode(TEXT)
    if len(token_ids) < 2:  # a tokenizer that has no tokens for the text
        token_ids = (0, 0)
    model.center_keys(key_means(model, token_ids, dtype, device, split))


@torch.inference_mode()
def key_means(
    model: DecoderModel, token_ids: Sequence[int], dtype: torch.dtype, device: torch.device, split: RowSplit
) -> dict[int, Tensor]:
    """Return the means of rotated keys, of all ranks; every rank has to call this.

    Args:
        model: maths and weights.
        token_ids: tokens of a text; at least two.
        dtype: type of activations.
        device: device of the model.
        split: distribution of heads among ranks.

    Returns:
        [num_kv_heads, head_dim] in the type of activations, by layer, for layers with `centers_keys`.
    """
    config = model.config
    token_ids = token_ids[: min(MIN_POSITIONS, config.max_context)]
    num_tokens = len(token_ids)
    specs = [spec.for_rank(split.size) for spec in config.kv_specs]
    kv_format = resolve_kv_format("auto", str(dtype).removeprefix("torch."))
    layout = KVLayout.of(specs, block_size=_BLOCK_SIZE, kv_format=kv_format)
    kv = KVStorage(layout, layout.run_blocks(num_tokens), device)
    rows = kv.contiguous_page_ids(num_tokens)
    attention = AttentionMetadata.build(
        query_start_loc=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=[np.array([row], np.int32) for row in rows],
        layout=kv.attention_layout(model.num_heads),
        operators=model.attention,
    )
    input_ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    model.forward(input_ids, torch.arange(num_tokens, device=device), attention, kv)
    num_positions = min(_POSITIONS, config.max_context)
    rotations = {kind: _rotations(*kind, max(num_positions, num_tokens)) for kind in config.ropes}
    means: dict[int, Tensor] = {}
    for group_id, row in enumerate(rows):
        of_layers = _keys_of_group(model, kv, group_id, row)[:, :num_tokens]
        for layer_id, keys in zip(layout.groups[group_id].layer_ids, of_layers, strict=True):
            spec = config.layers[layer_id]
            if spec.centers_keys:
                rotation = None if spec.rope is None else rotations[spec.rope, spec.kv.head_dim]
                own = _mean(keys, rotation, num_positions).to(device, dtype)
                (whole,) = split.gather_heads(own[None], [spec.kv.num_kv_heads])
                means[layer_id] = whole[0]
    return means


def key_means_of_groups(model: DecoderModel, layout: KVLayout) -> list[NDArray[np.float32]]:
    """Return the means that a model was given, per KV group [layers, num_kv_heads of all ranks, head_dim]."""
    found: list[NDArray[np.float32]] = []
    for group in layout.groups:
        kv = model.config.layers[group.layer_ids[0]].kv
        whole = torch.zeros(kv.num_kv_heads, kv.head_dim)
        of_layers = [model.key_means.get(layer_id, whole).float().cpu() for layer_id in group.layer_ids]
        found.append(torch.stack(of_layers).numpy())
    return found


def _keys_of_group(model: DecoderModel, kv: KVStorage, group_id: int, row: list[int]) -> Tensor:
    """Return the keys of all layers of a KV group, float32 [layers, tokens of the row, num_kv_heads, head_dim]."""
    layout, group = kv.layout, kv.layout.groups[group_id]
    pages = kv.tensors[group_id][row, :, 0]  # [pages, layers, num_kv_heads, bytes of a head]
    read = model.attention[group.spec].read_heads
    heads = read(pages.flatten(0, 2), layout.kv_format, group.spec.head_dim, values=False)
    by_page = heads.cpu().view(*pages.shape[:3], layout.block_size, -1)
    return by_page.permute(1, 0, 3, 2, 4).flatten(1, 2)


def _mean(keys: Tensor, rotation: Rotation | None, num_positions: int) -> Tensor:
    """Return the mean of rotated keys over positions, float64 [num_kv_heads, head_dim].

    The first token's key is unlike all others, and does not count. Sums have one order everywhere.

    Args:
        keys: [num_tokens, num_kv_heads, head_dim], rotated by their positions.
        rotation: cos and signed sin of all positions; None if keys are not rotated.
        num_positions: number of positions averaged over.
    """
    keys = keys.double()
    if rotation is None:
        return keys[1:].cumsum(0)[-1] / (len(keys) - 1)
    cos, signed_sin = rotation
    own_cos, own_sin = cos[: len(keys)], signed_sin[: len(keys)]
    turned_back = (keys * own_cos - _partners(keys) * own_sin) / (own_cos.square() + own_sin.square())
    mean = turned_back[1:].cumsum(0)[-1] / (len(keys) - 1)
    mean_cos, mean_sin = (of_all[:num_positions].cumsum(0)[-1] / num_positions for of_all in rotation)
    return mean * mean_cos + _partners(mean) * mean_sin


def _rotations(rope: RopeConfig, head_dim: int, num_positions: int) -> Rotation:
    """Return cos and signed sin of the first positions, float64 [num_positions, 1, head_dim]."""
    rotary = Rotary(rope, head_dim, max_model_len=num_positions, dtype=torch.float32, device=torch.device("cpu"))
    cos, signed_sin = rotary(torch.arange(num_positions))
    return cos.double(), signed_sin.double()


def _partners(vectors: Tensor) -> Tensor:
    """Return vectors with their halves exchanged, so that each number of a rotated pair is replaced by the other."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)
