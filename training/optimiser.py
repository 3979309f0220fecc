"""Muon for matrices and Adam for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from training.train import TrainConfig


def orthogonalise(matrices: Tensor) -> Tensor:
    """Run five quintic Newton-Schulz steps: [n, rows, cols] with rows <= cols, to singular values near one."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x


class MuonAdam(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for the embedding, the output head and the norms.

    Muon's orthogonalised momentum needs about half the training tokens of AdamW on a model of this kind, and costs a
    few per cent of a step.  Its update is scaled by 0.2 * sqrt(larger side) to AdamW's usual size.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        tables = ("embed_tokens.weight", "lm_head.weight")
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.endswith(tables)]
        embedding = [p for n, p in model.named_parameters() if p.ndim == 2 and n.endswith(tables)]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "muon": True, "peak": config.muon_lr, "decay": config.weight_decay},
            {"params": embedding, "muon": False, "peak": config.adam_lr, "decay": 0.0},
            {"params": vectors, "muon": False, "peak": config.adam_lr, "decay": 0.0},
        ]
        super().__init__(groups, {"lr": 0.0})
        self.low_precision = config.precision == "bfloat16"

    def set_rate(self, factor: float) -> None:
        """Set each group to ``factor`` of its peak rate."""
        for group in self.param_groups:
            group["lr"] = group["peak"] * factor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter once from its gradient."""
        for group in self.param_groups:
            if group["muon"]:
                self._step_muon(group["params"], group["lr"], group["decay"])
            else:
                self._step_adam(group["params"], group["lr"])

    @torch.no_grad()
    def _step_muon(self, parameters: Iterable[Tensor], rate: float, decay: float) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            momentum = state["momentum"]
            momentum.lerp_(parameter.grad, 0.05)
            ahead = parameter.grad.lerp(momentum, 0.95)  # Nesterov
            wide = ahead if ahead.shape[0] <= ahead.shape[1] else ahead.mT
            by_shape.setdefault(tuple(wide.shape), []).append((parameter, wide))
        for shape, pairs in by_shape.items():
            stacked = torch.stack([wide for _, wide in pairs])
            updates = orthogonalise(stacked.bfloat16() if self.low_precision else stacked).float()
            for (parameter, _), update in zip(pairs, updates, strict=True):
                turned = update if tuple(parameter.shape) == shape else update.mT
                parameter.mul_(1.0 - rate * decay)
                parameter.add_(turned, alpha=-rate * 0.2 * max(shape) ** 0.5)

    def _step_adam(self, parameters: Iterable[Tensor], rate: float) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            assert parameter.grad is not None
            state["step"] += 1
            state["mean"].lerp_(parameter.grad, 0.1)
            state["square"].lerp_(parameter.grad.square(), 0.05)
            mean = state["mean"] / (1.0 - 0.9 ** state["step"])
            root = (state["square"] / (1.0 - 0.95 ** state["step"])).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, root, value=-rate)
