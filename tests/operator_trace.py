"""A hook on the operators of a model: the calls of a pass, in order, with the sizes that identify each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import twostroke.startup.preparation as preparation
from twostroke.config.layer_spec import Activation
from twostroke.kernels.interface import (
    AttentionOperator,
    FusedLayer,
    GroupShape,
    LayerParts,
    Linear,
    Operators,
    Scoring,
    Weight,
)
from twostroke.kernels.tree_mask import TreeMasks
from twostroke.model.decoder import DecoderModel
from twostroke.sampling.sampler import SampledTokens, Sampler


@dataclass(frozen=True)
class Call:
    """One call of a part of the engine."""

    what: str
    """Name: embed, product, gated product, append k v, attend, layer in one call, logits, sample."""
    rows: int
    """Number of computed tokens."""
    size: int = 0
    """Columns of a product's result."""
    kv_len: int = 0
    """Number of tokens whose K and V attention reads, of one sequence."""


Layers = Literal["in one call", "by parts"]
"""How a trace runs layers: as a plain request does, in one call where the back end has one, or by their parts."""


@dataclass
class Attended:
    """One call of attention: its input, its output, and the K and V in storage when it returns."""

    qkv: Tensor
    output: Tensor
    softmax_scale: float
    before: Tensor
    """The contents of the sequence's slots before the call: float32 [2, kv_len, num_kv_heads, head_dim]."""
    after: Tensor


@dataclass
class Trace:
    """The calls since `clear`."""

    layers: Layers = "by parts"
    calls: list[Call] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)
    kv: list[Tensor] = field(default_factory=list)
    """The sequence's K and V in storage after each layer: float32 [2, kv_len, num_kv_heads, head_dim]."""
    hidden: list[Tensor] = field(default_factory=list)
    """Hidden states after the layers, and the logits."""

    def clear(self) -> None:
        for found in (self.calls, self.attended, self.kv, self.hidden):
            found.clear()


def trace_operators(monkeypatch: pytest.MonkeyPatch, layers: Layers = "by parts") -> Trace:
    """Record the calls of every engine that is built from now on. The results do not change."""
    trace = Trace(layers)
    operators_for = preparation.operators_for

    def traced(*args: Any, **given: Any) -> Operators:
        return _traced(operators_for(*args, **given), trace)

    monkeypatch.setattr(preparation, "operators_for", traced)
    _record_sampling(monkeypatch, trace)
    return trace


def record_model(model: DecoderModel, monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Record a model's embedding and logits, which are not operators, and what its layers return."""
    embed, compute_logits, forward_layers = model.embed, model.compute_logits, model.forward_layers

    def recorded_embed(input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        trace.calls.append(Call("embed", len(input_ids)))
        return embed(input_ids, positions)

    def recorded_logits(hidden: Tensor) -> Tensor:
        trace.calls.append(Call("logits", len(hidden)))
        found = compute_logits(hidden)
        trace.hidden.append(found.clone())
        return found

    def recorded_layers(*args: Any) -> Tensor:
        found = forward_layers(*args)
        trace.hidden.append(found.clone())
        return found

    monkeypatch.setattr(model, "forward_layers", recorded_layers)
    monkeypatch.setattr(model, "embed", recorded_embed)
    monkeypatch.setattr(model, "compute_logits", recorded_logits)


def _record_sampling(monkeypatch: pytest.MonkeyPatch, trace: Trace) -> None:
    sample = Sampler.sample

    def recorded(sampler: Sampler, logits: Tensor, states: Sequence[Any]) -> SampledTokens:
        trace.calls.append(Call("sample", len(logits)))
        return sample(sampler, logits, states)

    monkeypatch.setattr(Sampler, "sample", recorded)


def _traced(operators: Operators, trace: Trace) -> Operators:
    def pack_linear(weight: Weight, bias: Tensor | None) -> Linear:
        return _TracedLinear(operators.pack_linear(weight, bias), trace)

    def pack_gated(weight: Weight, bias: Tensor | None, activation: Activation) -> Callable[[Tensor], Tensor]:
        gated = operators.pack_gated(weight, bias, activation)

        def recorded(x: Tensor) -> Tensor:
            found = gated(x)
            trace.calls.append(Call("gated product", *found.shape))
            return found

        return recorded

    def attention(*args: Any) -> AttentionOperator:
        return cast(AttentionOperator, _TracedAttention(operators.attention(*args), trace))

    def fused_layer(parts: LayerParts) -> FusedLayer | None:
        layer = operators.fused_layer(parts)
        return None if layer is None else _traced_layer(layer, trace)

    if trace.layers == "in one call":
        return replace(operators, attention=attention, fused_layer=fused_layer)
    return replace(operators, pack_linear=pack_linear, pack_gated=pack_gated, attention=attention)


def _traced_layer(layer: FusedLayer, trace: Trace) -> FusedLayer:
    """Return the layer, which records each call."""

    def recorded(
        x: Tensor, rotation: Any, storage: Tensor, plan: _Plan, layer_in_block: int, key_mean: Any = None
    ) -> Tensor:
        found = layer(x, rotation, storage, plan.inner, layer_in_block, key_mean)
        trace.calls.append(Call("layer in one call", plan.num_queries, kv_len=plan.kv_len))
        trace.kv.append(plan.stored(storage, layer_in_block))
        return found

    return cast(FusedLayer, recorded)


class _TracedLinear:
    """Wrapper of a product that records each call."""

    def __init__(self, inner: Linear, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    def __call__(self, x: Tensor) -> Tensor:
        return self._noted(self._inner(x))

    def in_float32(self, x: Tensor) -> Tensor:
        return self._noted(self._inner.in_float32(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._noted(self._inner.add_to(residual, x))

    def rows(self, ids: Tensor) -> Tensor:
        return self._inner.rows(ids)

    def _noted(self, found: Tensor) -> Tensor:
        self._trace.calls.append(Call("product", *found.shape))
        return found


@dataclass(frozen=True)
class _Plan:
    """Wrapped plan of an operator, and the place of the step's only sequence."""

    inner: Any
    shape: GroupShape
    num_queries: int
    kv_len: int
    block_ids: npt.NDArray[np.int32]
    operator: AttentionOperator

    def stored(self, storage: Tensor, layer_in_block: int) -> Tensor:
        """Return the sequence's K and V of a layer: float32 [2, kv_len, num_kv_heads, head_dim]."""
        shape = self.shape
        found: list[Tensor] = []
        for is_value in (False, True):
            heads = storage[self.block_ids.tolist(), layer_in_block, int(is_value)]  # [blocks, kv heads, bytes]
            numbers = self.operator.read_heads(
                heads.flatten(0, 1).contiguous(), shape.kv_format, shape.head_dim, values=is_value
            )
            of_blocks = numbers.view(len(self.block_ids), shape.num_kv_heads, shape.block_size, shape.head_dim)
            found.append(of_blocks.transpose(1, 2).flatten(0, 1)[: self.kv_len])
        return torch.stack(found)


class _TracedAttention:
    """Wrapper of an operator for steps of one sequence; it reads the storage before and after each call."""

    def __init__(self, inner: AttentionOperator, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        tree_masks: TreeMasks | None = None,
    ) -> _Plan:
        inner = self._inner.plan(shape, query_start_loc, seq_lens, block_table, tree_masks)
        assert len(seq_lens) == 1, "a trace is of one request"
        num_blocks = -(-int(seq_lens[0]) // shape.block_size)
        return _Plan(
            inner, shape, int(query_start_loc[1]), int(seq_lens[0]), block_table[0, :num_blocks].copy(), self._inner
        )

    def __call__(
        self,
        qkv: Tensor,
        storage: Tensor,
        plan: _Plan,
        layer_in_block: int,
        scoring: Scoring,
        qk_norm_rope: Any = None,
    ) -> Tensor:
        before = plan.stored(storage, layer_in_block)
        output = self._inner(qkv, storage, plan.inner, layer_in_block, scoring, qk_norm_rope)
        given = qkv.clone()  # as it was attended with: the native kernels turn q and k in place
        after = plan.stored(storage, layer_in_block)
        new = slice(plan.kv_len - plan.num_queries, plan.kv_len)
        if not torch.equal(before[:, new], after[:, new]):
            self._trace.calls.append(Call("append k v", plan.num_queries))
        self._trace.calls.append(Call("attend", plan.num_queries, kv_len=plan.kv_len))
        self._trace.attended.append(Attended(given, output.clone(), scoring.scale, before, after))
        self._trace.kv.append(after)
        return output
