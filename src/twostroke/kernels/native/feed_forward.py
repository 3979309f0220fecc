"""Feed-forward half of a layer in one call: an MLP (csrc/layer.hpp), or experts (csrc/experts.hpp)."""

from __future__ import annotations

import torch

from twostroke.kernels.feed_forward_parts import ExpertParts, MLPParts
from twostroke.kernels.native.experts import NativeExpertLinears, NativeGatedExperts, native_router_rules
from twostroke.kernels.native.extension import address, native
from twostroke.kernels.native.linear import NativeGated, NativeLinear, Panels


def bound_mlp(parts: MLPParts) -> native.FeedForward | None:
    """Bind an MLP; None if a part is of another backend, has several formats, or pads its inputs."""
    panels = _panels_of(parts)
    return None if panels is None else native.GatedMlp(*(one.bound for one in panels))


def bound_experts(parts: ExpertParts) -> native.FeedForward | None:
    """Bind experts; None in the same cases as for an MLP."""
    logits, inner, down = parts.logits, parts.inner, parts.down
    if not isinstance(inner, NativeGatedExperts) or not isinstance(down, NativeExpertLinears):
        return None
    if not isinstance(logits, NativeLinear) or inner.panels[0].pads_inputs or down.panels[0].pads_inputs:
        return None
    assert logits.panels.dtype is torch.float32, logits.panels.dtype
    shared = None if parts.shared is None else _panels_of(parts.shared)
    if parts.shared is not None and shared is None:
        return None
    return native.Experts(
        logits.panels.bound,
        native_router_rules(parts.router.spec),
        address(parts.router.correction),
        address(parts.router.expert_scales),
        address(parts.router.counts),
        inner.bound,
        down.bound,
        *((None, None) if shared is None else (one.bound for one in shared)),
    )


def _panels_of(parts: MLPParts) -> tuple[Panels, Panels] | None:
    """Return the weights of an MLP; None if it cannot be bound."""
    inner, down = parts
    if not isinstance(inner, NativeGated) or not isinstance(down, NativeLinear):
        return None
    return None if inner.panels.pads_inputs or down.panels.pads_inputs else (inner.panels, down.panels)
