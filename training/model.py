"""The embedded model in plain torch: a Llama with losses at two early exits.

Shapes in this file: B is the batch, T the sequence, H the hidden size, V the vocabulary,
N the attention heads, K the key/value heads and D the size of a head.

Parameter names are those of ``LlamaForCausalLM`` in transformers, so an export only casts and copies.
Master weights stay in float32; each layer casts its weight to the dtype of the activations, so the same module
trains in bfloat16 (the gradients of several micro-batches are still summed in float32) and evaluates in float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KVCache = list[tuple[Tensor, Tensor]]
"""One (key, value) pair for each layer, both [B, K, T, D]."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model; the defaults are the embedded model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 9
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    exit_layers: tuple[int, ...] = (3, 6)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for a checkpoint or a report."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> ModelConfig:
        """Return the config that :meth:`to_dict` gave; unknown keys are ignored."""
        known = {f.name for f in fields(cls)}
        kept = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
        return cls(**kept)  # type: ignore[arg-type]


class CastLinear(nn.Module):
    """A linear layer without bias that casts its float32 weight to the dtype of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for [..., in]."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 for activations of any dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] for [..., H]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embedding, both [length, D], in the half-split order of Llama."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, heads, T, D] by the tables [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, block: int = 256) -> Tensor:
    """Compute causal attention over blocks of queries: [B, N, T, D], [B, K, T, D] twice -> [B, N, T, D].

    On a CPU torch's fused kernel took half of a training step at 512 tokens. Plain products of this size run at full
    speed, the compiler fuses the softmax, and a block skips the keys that come after it.
    """
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(batch, kv_heads, heads // kv_heads, length, size) * size**-0.5
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        rows = grouped[:, :, :, start:end].reshape(batch, kv_heads, -1, size)
        scores = (rows @ k[:, :, :end].mT).view(batch, kv_heads, -1, end - start, end)
        hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
        mixed = weights.view(batch, kv_heads, -1, end) @ v[:, :, :end]
        outputs.append(mixed.view(batch, heads, end - start, size))
    return torch.cat(outputs, dim=2)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = CastLinear(config.hidden_size, self.heads * self.head_dim)
        self.k_proj = CastLinear(config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = CastLinear(config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = CastLinear(self.heads * self.head_dim, config.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return [B, T, H] and the (key, value) of all positions, for [B, T, H] and the tables of these T positions."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        if past is None and not x.is_cuda:
            return self.o_proj(blocked_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)), (k, v)
        group = self.heads // self.kv_heads
        wide_k, wide_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if past is None or length == 1:
            out = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=length > 1)
        else:
            # Several new positions after old ones: position i sees the whole past and the new positions up to i.
            total = k.shape[2]
            mask = torch.ones(length, total, dtype=torch.bool, device=x.device).tril(total - length)
            out = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class MLP(nn.Module):
    """Gated feed-forward part of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = CastLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = CastLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = CastLinear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, H] for [B, T, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm, with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return [B, T, H] and this layer's (key, value), for [B, T, H]."""
        attended, kept = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Decoder(nn.Module):
    """Embedding, layers and final norm; called ``model`` in the names of the exported weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaModel(nn.Module):
    """The whole model; the output head is the embedding matrix (tied)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(seed)

    def _init_weights(self, seed: int) -> None:
        """Draw normal weights from one seed; projections into the residual start smaller by the root of the depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * self.config.num_hidden_layers) ** 0.5
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)

    def hidden_states(
        self,
        tokens: Tensor,
        dtype: torch.dtype = torch.float32,
        cache: KVCache | None = None,
        stop_layer: int | None = None,
    ) -> dict[int, Tensor]:
        """Run [B, T] token ids; return the raw states [B, T, H] by number of layers (each exit and the last).

        With ``cache`` (empty at first) the new positions follow the cached ones, and the cache is extended in place.
        """
        past_length = cache[0][0].shape[2] if cache else 0
        stop = self.config.num_hidden_layers if stop_layer is None else stop_layer
        cos = self.cos[past_length : past_length + tokens.shape[1]].to(dtype)
        sin = self.sin[past_length : past_length + tokens.shape[1]].to(dtype)
        x = F.embedding(tokens, self.model.embed_tokens.weight).to(dtype)
        states: dict[int, Tensor] = {}
        for index in range(stop):
            past = cache[index] if cache is not None and index < len(cache) else None
            x, kept = self.model.layers[index](x, cos, sin, past)
            if cache is not None:
                if index < len(cache):
                    cache[index] = kept
                else:
                    cache.append(kept)
            if index + 1 in self.config.exit_layers or index + 1 == stop:
                states[index + 1] = x
        return states

    def head(self, states: Tensor) -> Tensor:
        """Apply the final norm and the tied head, the same for every exit: [..., H] -> [..., V]."""
        x = self.model.norm(states)
        return F.linear(x, self.model.embed_tokens.weight.to(x.dtype))

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logits of the full depth: [B, T] -> [B, T, V]."""
        return self.head(self.hidden_states(tokens, dtype)[self.config.num_hidden_layers])

    def loss(
        self, tokens: Tensor, targets: Tensor, dtype: torch.dtype, exits: dict[int, float], stride: int = 1
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the weighted mean cross-entropy of the full depth and of ``exits`` (number of layers -> weight).

        ``tokens`` and ``targets`` are [B, T].  An exit's loss is taken on one position in ``stride``: the head costs
        as much as two layers here, and sampling does not bias the exit's gradient.
        Returns the weighted loss and the plain loss of each depth, in nats per token.
        """
        depth = self.config.num_hidden_layers
        states = self.hidden_states(tokens, dtype)
        plain: dict[int, Tensor] = {}
        total = torch.zeros((), device=tokens.device)
        for number, weight in {**exits, depth: 1.0}.items():
            step = 1 if number == depth else stride
            # Sequences begin at random places, so a fixed phase samples positions without bias.
            logits = self.head(states[number][:, ::step])
            plain[number] = F.cross_entropy(logits.float().flatten(0, 1), targets[:, ::step].flatten())
            total = total + weight * plain[number]
        return total, {k: v.detach() for k, v in plain.items()}

    def num_parameters(self) -> int:
        """Return the number of trained values (the tied head counts once)."""
        return sum(p.numel() for p in self.parameters())
