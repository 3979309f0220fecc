"""The drafting head of EAGLE-3 (Li et al. 2025, arXiv:2503.01840): one layer over the target's own hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint
from twostroke.kernels.interface import AttentionOperators, PackedSizes
from twostroke.layers.attention import AttentionMetadata, KVTensors
from twostroke.layers.elementwise import RMSNorm, Rotary
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.draft_folder import DraftFolder
from twostroke.model.llama import LlamaLayer

_LAYER = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "output.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
"""Our names of a layer's tensors, and the published ones under `midlayer.`."""


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the target's layers whose inputs published heads read: a low, a middle and a high one."""
    return 2, num_layers // 2, num_layers - 3


class EagleHead:
    """EAGLE-3 head: from the target's features at position p and the embedding of token p + 1 it drafts token p + 2.

    ```
    features of p, 3 x hidden ──fc──► h ──norm──┐
                                                ├─► attention ─► + h ─► mlp ─► + ─► y ──norm──► head: token p + 2
    embedding of token p + 1 ─────────────norm──┘
    ```

    At positions that the target has not computed, y of one position replaces the features of the next.
    """

    def __init__(self, folder: DraftFolder, target: DecoderModel, placement: Placement) -> None:
        """Read the head's weights."""
        self.config = config = eagle_config(folder)
        self._target = target
        operators, (spec,) = placement.operators, config.layers
        self.attention = AttentionOperators.of(operators, spec.num_heads, (spec.kv,), placement.dtype, placement.device)
        """The attention operators that plan the head's passes."""

        def read(name: str) -> Tensor:
            return folder.tensor(name).to(placement.dtype).to(placement.device)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(read(name), config.norm_eps, operators)

        self._fc = operators.pack_linear(read("fc.weight"), None)
        weights = {ours: torch.cat([read(f"midlayer.{part}") for part in parts]) for ours, parts in _LAYER.items()}
        self._layer = LlamaLayer(config, weights, 0, placement)
        self._hidden_norm = norm("midlayer.hidden_norm.weight")
        self._norm = norm("norm.weight")
        self._lm_head = operators.pack_linear(read("lm_head.weight"), None)
        self._embedding = read("embed_tokens.weight") if "embed_tokens.weight" in folder.shapes else None
        self._token_ids: Tensor | None = None
        """Ids in the target's vocabulary of the tokens that the head can draft; None: all."""
        if "d2t" in folder.shapes:
            shifts = folder.tensor("d2t").to(torch.int64).to(placement.device)
            self._token_ids = shifts + torch.arange(len(shifts), device=placement.device)
        self._rotary = Rotary(
            *config.ropes[0],
            max_model_len=placement.max_model_len,
            dtype=placement.dtype,
            device=placement.device,
        )

    @torch.inference_mode()
    def fused(self, features: Tensor) -> Tensor:
        """Return h [num_rows, hidden_size] for the target's features [num_rows, 3 x hidden_size]."""
        return self._fc(features)

    @torch.inference_mode()
    def forward(
        self, h: Tensor, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: KVTensors
    ) -> Tensor:
        """Run one pass of the head.

        Args:
            h: [num_rows, hidden_size] at the positions.
            token_ids: int64 [num_rows], the token after each position.
            positions: int64 [num_rows].
            attention: metadata of the step.
            kv: KV storage of the head.

        Returns:
            y [num_rows, hidden_size].
        """
        layer = self._layer
        table = self._embedding
        embedded = self._target.embed(token_ids) if table is None else F.embedding(token_ids, table)
        embedded = embedded[:, : self.config.hidden_size]  # a target may carry more values behind the residual stream
        x = torch.cat((layer.attention_norm(embedded), self._hidden_norm(h)), dim=-1)
        y = layer.output.add_to(h, layer.attend(x, self._rotary(positions), attention, kv))
        return layer.feed_forward.add_to(y, layer.mlp_norm(y))

    @torch.inference_mode()
    def logits(self, y: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] for y [num_rows, hidden_size]; -inf for tokens unknown to the
        head."""
        found = self._lm_head(self._norm(y)).float()
        if self._token_ids is None:
            return found
        whole = found.new_full((len(found), self._target.config.vocab_size), float("-inf"))
        whole[:, self._token_ids] = found
        return whole


def eagle_bytes(folder: DraftFolder, dtype: torch.dtype, sizes: PackedSizes) -> int:
    """Return the bytes of the loaded head, from the shapes in its folder.

    Args:
        folder: folder of the head.
        dtype: type of floats.
        sizes: packed sizes of a backend.
    """
    total = 0
    packed: dict[str, tuple[str, ...]] = {"fc.weight": ("fc.weight",), "lm_head.weight": ("lm_head.weight",)}
    for ours, parts in _LAYER.items():
        packed[ours] = tuple(f"midlayer.{part}" for part in parts)
    for ours, parts in packed.items():
        shapes = [folder.shapes[part] for part in parts]
        num_rows = sum(shape[0] for shape in shapes)
        if len(shapes[0]) == 1:
            total += num_rows * dtype.itemsize
        else:
            total += sizes.weight((num_rows, shapes[0][1]), None, dtype, gated=ours == "gate_up.weight")
    lone = ("embed_tokens.weight", "midlayer.hidden_norm.weight", "norm.weight")
    return total + sum(
        torch.Size(folder.shapes[name]).numel() * dtype.itemsize for name in lone if name in folder.shapes
    )


def eagle_config(folder: DraftFolder) -> ModelConfig:
    """Return the config of the head's layer, that of a one-layer Llama, whatever architecture the folder names."""
    return ModelConfig.from_hf({**folder.config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})


def check_eagle(folder: DraftFolder, target: ModelConfig, name: str) -> None:
    """Raise if a head was made for another model than `target`, or lacks a part.

    Raises:
        CorruptCheckpoint: a tensor is missing or has another size.
    """
    # the clearest error for a folder of another kind, such as a whole model
    folder.check_shape("fc.weight", (None, None))
    config, hidden = eagle_config(folder), target.hidden_size
    why = f": {name} has hidden states of {hidden} numbers and a vocabulary of {target.vocab_size}"
    (layer,) = config.layers
    q, kv, wide = layer.q_size, layer.kv_size, layer.intermediate_size
    expected: dict[str, tuple[int | None, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (None, hidden),
    }
    if "embed_tokens.weight" in folder.shapes:
        expected["embed_tokens.weight"] = (target.vocab_size, hidden)
    folder.check_counts({"hidden_size": hidden, "vocab_size": target.vocab_size}, why)
    for tensor, shape in expected.items():
        folder.check_shape(tensor, shape, why)
    known = folder.shapes["lm_head.weight"][0]
    if "d2t" in folder.shapes:
        folder.check_shape("d2t", (known,))
        _check_token_ids(folder, target.vocab_size)
    else:
        folder.check_shape("lm_head.weight", (target.vocab_size, hidden), why)


def _check_token_ids(folder: DraftFolder, vocab_size: int) -> None:
    """Raise CorruptCheckpoint if the head's tokens are not tokens of the target."""
    shifts = folder.tensor("d2t")
    if shifts.is_floating_point():
        raise CorruptCheckpoint(f"{folder.path}: d2t holds numbers of {shifts.dtype}; token ids are whole numbers.")
    token_ids = shifts.to(torch.int64) + torch.arange(len(shifts))
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise CorruptCheckpoint(f"{folder.path}: d2t names tokens {low} to {high}; the vocabulary has {vocab_size}.")
