"""Progress lines of a training run, and its checkpoints."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from training.model import LlamaModel

if TYPE_CHECKING:
    from training.train import Run, Tokens


def quick_loss(model: LlamaModel, documents: list[Tokens], dtype: torch.dtype, device: str) -> dict[int, float]:
    """Return the loss on a small, fixed sample of held-out windows (the first 1,024 tokens of each document), in nats
    per token."""
    sums: dict[int, float] = {}
    total = 0
    for document in documents:
        ids = torch.from_numpy(document[:1025].astype(np.int64))[None].to(device)
        exits = dict.fromkeys(model.config.exit_layers, 0.0)
        _, plain = model.loss(ids[:, :-1], ids[:, 1:], dtype, exits)
        for number, value in plain.items():
            sums[number] = sums.get(number, 0.0) + value.item() * (ids.shape[1] - 1)
        total += ids.shape[1] - 1
    return {number: value / total for number, value in sums.items()}


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write a temporary file and rename it, so that a kill never leaves half a checkpoint."""
    temporary = folder / "checkpoint.tmp"
    torch.save(run.checkpoint(), temporary)
    os.replace(temporary, folder / "checkpoint.pt")


class Report:
    """Progress bar, and a line of figures with a checkpoint every ``save_every`` seconds."""

    def __init__(self, run: Run, folder: Path, held_out: list[Tokens], bytes_per_token: float, every: float) -> None:
        self.run, self.folder, self.held_out, self.every = run, folder, held_out, every
        self.bits_per_nat = 1.0 / (math.log(2) * bytes_per_token)
        self.saved = time.monotonic()
        self.smooth: dict[int, float] = {}
        done = int(1000 * run.done)
        self.bar = tqdm(total=1000, initial=done, mininterval=5.0, bar_format="{l_bar}{bar:20}| {postfix}")

    def step(self, losses: dict[int, float]) -> None:
        """Record one step's losses."""
        self.smooth = {k: 0.95 * self.smooth.get(k, v) + 0.05 * v for k, v in losses.items()}
        run, progress = self.run, self.run.progress
        left = progress.seconds * (1.0 / max(run.done, 1e-6) - 1.0)
        self.bar.set_postfix_str(
            f"step {progress.step} loss {self.smooth[max(self.smooth)]:.3f} {progress.tokens / 1e6:.2f}M tok "
            f"{progress.tokens / progress.seconds:,.0f} tok/s T {run.sampler.length} ETA {left / 60:.1f} min",
            refresh=False,
        )
        self.bar.update(int(1000 * run.done) - self.bar.n)
        if time.monotonic() - self.saved > self.every or run.done >= 1.0:
            self.save()

    def save(self) -> None:
        """Measure the held-out sample, print a line and write a checkpoint."""
        run, progress = self.run, self.run.progress
        held = quick_loss(run.model, self.held_out, run.dtype, run.device)
        row = {"step": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 1)}
        row |= {f"train_{k}": round(v, 4) for k, v in self.smooth.items()}
        row |= {f"heldout_bpb_{k}": round(v * self.bits_per_nat, 4) for k, v in held.items()}
        progress.history.append(row)
        print("\n" + json.dumps(row), flush=True)
        save_checkpoint(run, self.folder)
        self.saved = time.monotonic()
