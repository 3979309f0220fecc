"""The loss of a draft head: how far it is from the distribution that the backbone itself has at that position."""

from __future__ import annotations

from torch import Tensor

from twostroke.train.medusa_heads import TrainableHeads


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of [..., V] to the softmax of the teacher's logits [..., V], in nats."""
    return -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


def medusa_losses(heads: TrainableHeads, output: Tensor, states: Tensor, teacher: Tensor) -> list[Tensor]:
    """Head i at position p against the backbone at p + 1 + i: both are about the token at p + 2 + i.

    Args:
        heads: that are trained.
        output: the backbone's output head [V, H].
        states: final-normed [..., T, H].
        teacher: the backbone's logits [..., T, V] at the same positions.

    Returns:
        A loss for each head, over the first T - num_heads positions.
    """
    length = states.shape[-2] - heads.num_heads
    return [
        soft_cross_entropy(heads(states[..., :length, :], i) @ output.mT, teacher[..., 1 + i : 1 + i + length, :])
        for i in range(heads.num_heads)
    ]
