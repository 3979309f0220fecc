"""gpt-oss in MXFP4: experts of a random model in the layout that is published, and the same numbers in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks, uint8 [E, N, K / 32, 16], and scales, uint8 [E, N, K / 32], of a weight [E, N, K].

    The nearest numbers, by a scale whose largest is at least the group's.
    """
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = torch.frexp(groups.abs().amax(-1) / 6.0).exponent
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).unflatten(-1, (16, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)


@torch.no_grad()
def write_mxfp4(folder: Path, model: Any) -> dict[str, Tensor]:
    """Write transformers' gpt-oss `model` with experts in 4 bits, and give it their numbers; return what is written."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = packed(parameter.transpose(1, 2))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": ["GptOssForCausalLM"], "quantization_config": _CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
