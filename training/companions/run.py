"""Training run of one drafter: its optimiser, data, progress and checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from training.companions.target import Target, TargetStates
from training.optimiser import MuonAdam
from training.train import Progress, Sampler, Tokens, TrainConfig, config_to_dict


class Companion(Protocol):
    """Interface of the three drafters (each is an ``nn.Module``)."""

    name: str
    weights: tuple[float, ...]
    """Weights of the losses, one for each position that it is trained to draft."""

    def losses(self, seen: TargetStates, following: Tensor) -> Tensor:
        """Return one loss per weight, from the target's states and the token after each position [B, T]."""
        ...

    def export(self, folder: Path) -> None:
        """Write the published layout."""
        ...


class CompanionRun:
    """Training of a companion for a frozen target; a resumed run is bit-identical in one thread."""

    def __init__(
        self,
        companion: Any,
        target: Target,
        config: TrainConfig,
        documents: tuple[list[Tokens], list[Tokens]],
        checkpoint: dict[str, Any] | None = None,
        compiled: bool = False,
    ) -> None:
        self.companion, self.target, self.config = companion, target, config
        self.optimizer = MuonAdam(companion, config)
        self.progress = Progress()
        state = (0, 0, 0)
        if checkpoint is not None:
            companion.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.progress = Progress(**checkpoint["progress"])
            state = tuple(checkpoint["sampler"])
        self.sampler = Sampler(*documents, config.test_share, config.seed, state)
        self.weights = torch.tensor(companion.weights)
        self._losses = torch.compile(companion.losses, dynamic=False) if compiled else companion.losses

    def checkpoint(self) -> dict[str, Any]:
        """Return everything needed to continue from here."""
        return {
            "config": config_to_dict(self.config),
            "model": self.companion.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "sampler": list(self.sampler.state),
        }

    def save(self, path: Path) -> None:
        """Write a temporary file and rename it, so that a kill never leaves half a checkpoint."""
        temporary = path.with_suffix(".tmp")
        torch.save(self.checkpoint(), temporary)
        os.replace(temporary, path)

    @property
    def done(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        if self.config.tokens is not None:
            return min(self.progress.tokens / self.config.tokens, 1.0)
        assert self.config.minutes is not None
        return min(self.progress.seconds / (60.0 * self.config.minutes), 1.0)

    def step(self) -> list[float]:
        """Run one optimiser step; return the mean loss of each draft position in nats."""
        started = time.monotonic()
        config, done = self.config, self.done
        length = config.sequence_length(done)
        count = max(config.batch_tokens // length, 1)
        total = torch.zeros(len(self.weights))
        for part in self.sampler.batch(count, length).split(max(config.micro_tokens // length, 1)):
            losses = self._losses(self.target.see(part[:, :-1]), part[:, 1:])
            share = len(part) / count
            ((losses * self.weights).sum() * share / self.weights.sum()).backward()
            total += losses.detach() * share
        torch.nn.utils.clip_grad_norm_(self.companion.parameters(), config.clip)
        self.optimizer.set_rate(config.learning_rate(done))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += count * length
        self.progress.seconds += time.monotonic() - started
        return total.tolist()

    def steps(self) -> Iterator[list[float]]:
        """Yield steps until the budget is spent."""
        while self.done < 1.0:
            yield self.step()
