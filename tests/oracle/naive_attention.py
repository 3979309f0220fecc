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

    Returns:
        [num_queries, num_heads, head_dim], float64.
    """
    query = first_position + torch.arange(len(q))[:, None]
    key = torch.arange(len(k))[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return attention_over(q, k, v, ~hidden, scale, cap)


def attention_over(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float | None = None) -> Tensor:
    """Attends over what `visible`, bool [num_queries, num_keys], says."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
