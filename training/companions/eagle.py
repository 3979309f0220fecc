"""EAGLE-3's layer (Li et al. 2025, arXiv:2503.01840) for the embedded model.

B is the batch, S the starts of drafts, H the hidden size, W the draft vocabulary, D the size of a head.

A draft that starts at position p reads the target's states up to p and the token at p + 1. Its step k is at position
p + k, reads its own state of the previous step and the token at p + k + 1, and predicts the token at p + k + 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.companions.target import Target, TargetStates
from training.model import MLP, CastLinear, ModelConfig, RMSNorm, rope_tables, rotate
from twostroke.train.medusa_heads import soft_cross_entropy

KeyValue = tuple[Tensor, Tensor]


def branch_attention(q: Tensor, trunk: KeyValue, branch: list[KeyValue], block: int = 256) -> Tensor:
    """Return the attention of one step of all drafts: [B, N, S, D] -> [B, N, S, D].

    The draft that starts at p sees the keys of step 0 up to p (``trunk``, [B, K, S, D]) and, of each later step, only
    its own key (``branch``, the same shape): the contents of its KV cache while serving.
    """
    batch, heads, length, size = q.shape
    kv_heads = trunk[0].shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, length, size) * size**-0.5
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        rows = grouped[:, :, :, start:end]
        scores = rows @ trunk[0][:, :, None, :end].mT
        hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        own = [(rows * key[:, :, None, start:end]).sum(-1, keepdim=True) for key, _ in branch]
        scores = torch.cat([scores.masked_fill(hidden, float("-inf")), *own], dim=-1).float().softmax(-1).to(q.dtype)
        mixed = scores[..., :end] @ trunk[1][:, :, None, :end]
        for i, (_, value) in enumerate(branch):
            mixed = mixed + scores[..., end + i : end + i + 1] * value[:, :, None, start:end]
        outputs.append(mixed)
    return torch.cat(outputs, dim=3).reshape(batch, heads, length, size)


class EagleAttention(nn.Module):
    """Grouped-query attention whose input is an embedding next to a state: [.., 2H] -> [.., H]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = CastLinear(2 * config.hidden_size, self.heads * self.head_dim)
        self.k_proj = CastLinear(2 * config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = CastLinear(2 * config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = CastLinear(self.heads * self.head_dim, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """Return [B, S, H] and the (key, value) of a step, for [B, S, 2H] and the (key, value) of the previous
        steps."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        steps = [*past, (k, v)]
        out = branch_attention(q, steps[0], steps[1:])
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class MidLayer(nn.Module):
    """The single layer; called ``midlayer`` in published checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, h: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, past: list[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        """Return the next states [B, S, H] and this step's (key, value) for states and embeddings [B, S, H]."""
        attended, kept = self.self_attn(
            torch.cat((self.input_layernorm(embedded), self.hidden_norm(h)), dim=-1), cos, sin, past
        )
        y = h + attended
        return y + self.mlp(self.post_attention_layernorm(y)), kept


class EagleModel(nn.Module):
    """Weights, with the names of the published checkpoints."""

    def __init__(self, config: ModelConfig, draft_vocab: int) -> None:
        super().__init__()
        self.fc = CastLinear(3 * config.hidden_size, config.hidden_size)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = CastLinear(config.hidden_size, draft_vocab)


class Eagle(nn.Module):
    """EAGLE-3 drafter, trained on its own states for as many steps as it has weights ("training-time test")."""

    name = "eagle"
    weights: tuple[float, ...] = (1.0, 0.8, 0.64)
    cos: Tensor
    sin: Tensor
    table: Tensor
    chosen: Tensor

    def __init__(self, target: Target, seed: int, chosen: Tensor) -> None:
        """Take ``chosen`` [W]: the tokens of the draft vocabulary, ascending."""
        super().__init__()
        self.config = target.config
        self.eagle = EagleModel(self.config, len(chosen))
        cos, sin = rope_tables(self.config, self.config.max_position_embeddings)
        for name, value in {"cos": cos, "sin": sin, "table": target.head.clone(), "chosen": chosen}.items():
            self.register_buffer(name, value, persistent=name == "chosen")
        self._init_weights(target, seed)

    @classmethod
    def load(cls, folder: Path, target: Target) -> Eagle:
        """Return the drafter that :meth:`export` wrote."""
        tensors = load_file(folder / "model.safetensors")
        d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
        chosen = d2t + torch.arange(len(d2t))
        if not torch.equal(chosen, t2d.nonzero()[:, 0]):
            raise ValueError(f"{folder}: d2t and t2d name different tokens")
        eagle = cls(target, 0, chosen)
        eagle.eagle.load_state_dict(tensors)
        return eagle

    @torch.no_grad()
    def _init_weights(self, target: Target, seed: int) -> None:
        """Draw normal weights from one seed; head and norm begin as the target's, ``fc`` as the latest state."""
        generator = torch.Generator().manual_seed(seed)
        hidden = self.config.hidden_size
        for name, parameter in self.eagle.named_parameters():
            if parameter.ndim == 2:
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5, generator=generator)
        self.eagle.fc.weight.mul_(0.1)[:, 2 * hidden :] += torch.eye(hidden)
        self.eagle.norm.weight.copy_(target.model.model.norm.weight)
        self.eagle.lm_head.weight.copy_(target.head[self.chosen])

    def unroll(self, features: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """Return the normed states [B, S, H] of each step, for drafts that start at each of the S positions.

        ``features`` is [B, S, 3H]; ``tokens`` [B, S + steps] are the text from the first position on.
        """
        length = features.shape[1]
        embedded = F.embedding(tokens, self.table).to(features.dtype)
        h, past, found = self.eagle.fc(features), [], []
        for k in range(steps):
            cos, sin = (table[k : k + length].to(features.dtype) for table in (self.cos, self.sin))
            h, kept = self.eagle.midlayer(h, embedded[:, k + 1 : k + 1 + length], cos, sin, past)
            past.append(kept)
            found.append(self.eagle.norm(h))
        return found

    def losses(self, seen: TargetStates, following: Tensor) -> Tensor:
        """Return the losses [steps]: cross-entropy of each step to the target's softmax over the draft vocabulary."""
        steps = len(self.weights)
        length = seen.tokens.shape[1] - steps
        teacher = seen.logits[:, :, self.chosen]
        states = self.unroll(seen.features[:, :length], seen.tokens, steps)
        return torch.stack(
            [
                soft_cross_entropy(self.eagle.lm_head(y), teacher[:, k + 1 : k + 1 + length])
                for k, y in enumerate(states)
            ]
        )

    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors in the published layout; d2t and t2d map the two vocabularies."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: value.to("cpu", torch.bfloat16).contiguous() for n, value in self.eagle.state_dict().items()}
        chosen = self.chosen.cpu()
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool).scatter_(0, chosen, True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self._config(), indent=2) + "\n")

    def _config(self) -> dict[str, Any]:
        config = self.config
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(self.chosen),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }
