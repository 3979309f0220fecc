"""The operators a model is made of, chosen once per device.

Layers call what they were given here and never a backend by name. A backend is one value of `Operators`; its plan of
a step's attention is its own business and opaque to the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[num_rows, K] -> [num_rows, N]; each row's bits independent of the others."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The constants of one KV group: its heads and how its storage is cut up."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    layers_per_block: int
    window: int | None
    """Tokens a query sees, itself included; None sees all."""

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_per_block(self) -> int:
        """Rows of a block in the storage seen as [rows, block_size * head_dim]."""
        return self.layers_per_block * 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Operators:
    """One backend; kernels/reference documents shapes and numerics of each, and every backend is tested against it."""

    name: str
    pack_linear: Callable[[Tensor, Tensor | None], Linear]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate_heads_: Callable[[Tensor, Tensor, Tensor], None]
    silu_and_mul: Callable[[Tensor], Tensor]
    query_tiles: Callable[[int, int, int, torch.dtype, torch.device], tuple[int, ...]]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[[Tensor, Tensor, Any, int, float], Tensor]


def operators_for(device: torch.device) -> Operators:
    """The backend of a device: torch's own operators everywhere, until a faster one is registered for it."""
    import os
    if not os.environ.get("REF"):
        from twostroke.kernels.native import operators as n, _native
        _native.set_num_threads(torch.get_num_threads())
        return Operators("native", n.PackedLinear, n.rms_norm, n.rotate_heads_, n.silu_and_mul, n.query_tiles, n.plan_attention, n.paged_attention)
    from twostroke.kernels.reference import attention, attention_plan, elementwise, linear

    del device  # the reference runs wherever torch does
    return Operators(
        name="reference",
        pack_linear=linear.PackedLinear,
        rms_norm=elementwise.rms_norm,
        rotate_heads_=elementwise.rotate_heads_,
        silu_and_mul=elementwise.silu_and_mul,
        query_tiles=attention.query_tiles,
        plan_attention=attention_plan.plan_attention,
        paged_attention=attention.paged_attention,
    )
