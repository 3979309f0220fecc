"""Attention of one request, dense and in float64: every query, every key, a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attends causally.

    Args:
        q: [num_queries, num_heads, head_dim], the first at `first_position`.
        k: [num_keys, num_kv_heads, head_dim], from position 0 on.
        v: like k.
        first_position: of the queries.
        window: keys a query sees, itself included; None for all.
        scale: factor on the scores.
        cap: scores are cap * tanh(score / cap); None for as they are.
        sinks: [num_heads], the score of a key without a value; None for none.
        slopes: [num_heads], what a score loses per token between query and key; None for nothing.

    Returns:
        [num_queries, num_heads, head_dim], float64.
    """
    query = first_position + torch.arange(len(q))[:, None]
    key = torch.arange(len(k))[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    bias = None if slopes is None else slopes.double()[:, None, None] * (key - query)
    return attention_over(q, k, v, ~hidden, scale, cap, sinks, bias)


def attention_over(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over what `visible`, bool [num_queries, num_keys], allows; `bias` [num_heads, num_queries, num_keys]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)
