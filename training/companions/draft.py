"""Draft model: a small Llama with the target's vocabulary, distilled from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.companions.target import Target, TargetStates
from training.export import hf_config
from training.model import LlamaModel, ModelConfig
from twostroke.train.medusa_heads import soft_cross_entropy

DRAFT = ModelConfig(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    exit_layers=(),
)
TRUTH = 0.1
"""Share of the text's own next token in the loss; the rest is the target's distribution."""


class Draft(nn.Module):
    """The draft model, with a single loss, since it drafts all positions in the same way."""

    name = "draft"
    weights: tuple[float, ...] = (1.0,)

    def __init__(self, seed: int, config: ModelConfig = DRAFT) -> None:
        super().__init__()
        self.llama = LlamaModel(config, seed)

    @classmethod
    def load(cls, folder: Path, target: Target) -> Draft:
        """Return the drafter that :meth:`export` wrote."""
        values = json.loads((folder / "config.json").read_text())
        draft = cls(0, ModelConfig.from_dict({**values, "exit_layers": ()}))
        draft.llama.load_state_dict(load_file(folder / "model.safetensors"))
        return draft

    def losses(self, seen: TargetStates, following: Tensor) -> Tensor:
        """Return the loss [1]: cross-entropy to the target's softmax and, in part, to the following tokens [B, T]."""
        logits = self.llama(seen.tokens, seen.logits.dtype)
        truth = F.cross_entropy(logits.float().flatten(0, 1), following.flatten())
        return ((1.0 - TRUTH) * soft_cross_entropy(logits, seen.logits) + TRUTH * truth)[None]

    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors of a LlamaForCausalLM; the tokenizer is the target's."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: value.to("cpu", torch.bfloat16).contiguous() for name, value in self.llama.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        values = hf_config(self.llama.config)
        del values["early_exit_layers"]
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
