"""`twostroke train-medusa`: heads for a frozen backbone (Medusa-1), trained on the backbone's own distribution."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from twostroke.errors import InvalidParameter
from twostroke.model.model_files import find_model
from twostroke.plain_words import reason_of
from twostroke.train.backbone import Backbone
from twostroke.train.medusa_heads import MedusaConfig, TrainableHeads, medusa_losses, save_heads
from twostroke.train.medusa_options import DEFAULT_MINUTES, MedusaOptions
from twostroke.train.windows import Windows, read_tokens

CHECKPOINT_NAME = "checkpoint.pt"
_DECAY_OF_WEIGHT = 0.8
"""Factor on each head's weight in the loss, relative to the previous head: its drafts only count if all before it are
accepted."""
_MAX_LOGITS = 1 << 24
"""Most logits computed at once; longer windows are processed in portions."""
_WARM_UP, _FINAL_RATE = 0.03, 0.05


class MedusaTraining:
    """Heads, optimizer and position in the text.

    With a budget in steps, a resumed run has the same bits as an uninterrupted one.

    Args:
        backbone: frozen.
        windows: of the text.
        options: of the run.
    """

    def __init__(self, backbone: Backbone, windows: Windows, options: MedusaOptions) -> None:
        self._backbone, self.windows, self._options = backbone, windows, options
        self.heads = TrainableHeads(options.num_heads, backbone.hidden_size, options.num_layers)
        self._optimizer = torch.optim.AdamW(self.heads.parameters(), lr=options.learning_rate, weight_decay=0.0)
        weights = torch.tensor([_DECAY_OF_WEIGHT**i for i in range(options.num_heads)])
        self._weights = weights / weights.sum()
        self.num_steps = 0
        self.seconds = 0.0

    @property
    def done(self) -> float:
        """Share of the budget that is spent."""
        if self._options.steps is not None:
            return min(self.num_steps / self._options.steps, 1.0)
        return min(self.seconds / (60.0 * (self._options.minutes or DEFAULT_MINUTES)), 1.0)

    def step(self) -> list[float]:
        """Run one update; return the mean loss of each head in nats."""
        begin_s = time.perf_counter()
        done = self.done
        rate = min(done / _WARM_UP + 0.01, 1.0) * (1.0 - (1.0 - _FINAL_RATE) * done)
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * rate
        losses = self._backward(self._backbone.states(self.windows.next(self._options.batch_windows)))
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        self.seconds += time.perf_counter() - begin_s
        return losses.tolist()

    def _backward(self, states: Tensor) -> Tensor:
        """Add the gradient of [n, T, H] in portions; each portion ends with rows that only its teacher needs."""
        output, num_heads = self._backbone.output_head, self._options.num_heads
        length = states.shape[1]
        stride = max(_MAX_LOGITS // output.shape[0], 2 * num_heads)
        total = torch.zeros(num_heads)
        for window in states:
            for start in range(0, length - num_heads, stride):
                rows = window[start : start + stride + num_heads]
                with torch.no_grad():
                    teacher = rows @ output.mT
                losses = torch.stack(medusa_losses(self.heads, output, rows, teacher))
                share = (len(rows) - num_heads) / (length - num_heads) / len(states)
                ((losses * self._weights).sum() * share).backward()
                total += losses.detach() * share
        return total

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return {
            "heads": self.heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "place": list(self.windows.place),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; the windows must have been made at that place."""
        self.heads.load_state_dict(state["heads"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps, self.seconds = state["num_steps"], state["seconds"]


def train_medusa(model: str, data: Path, options: MedusaOptions, *, progress: bool = False) -> Path:
    """Train until the budget is spent; save heads and checkpoint at intervals, and at the end.

    Args:
        model: a folder, a GGUF file, a hub id, or "embedded".
        data: UTF-8 text.
        options: of the run.
        progress: show a progress bar.

    Returns:
        The folder.

    Raises:
        InvalidParameter: the text cannot be read or is too short; the folder has another run, or none to resume.
        SetupError: the model cannot be loaded.
    """
    files = find_model(model)
    config = files.config()
    tokenizer = files.tokenizer()
    tokenizer.check_vocab(config.vocab_size)
    token_ids = read_tokens(data, tokenizer)
    window = min(options.window, config.max_context, len(token_ids))
    facts = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": options.num_heads,
        "num_layers": options.num_layers,
        "text": hashlib.sha256(token_ids.tobytes()).hexdigest(),
        "window": window,
        "batch_windows": options.batch_windows,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
    }
    folder = options.output or Path(f"{files.path.name.removesuffix('.gguf')}-medusa")
    checkpoint = _checkpoint_to_resume(folder, facts) if options.resume else None
    _make_folder(folder, options)
    backbone = Backbone(files, window, options.batch_windows, options.threads)
    place = (0, 0) if checkpoint is None else tuple(checkpoint["place"])
    training = MedusaTraining(backbone, Windows(token_ids, window, options.seed, place), options)
    if checkpoint is not None:
        training.load_state(checkpoint)
    published = MedusaConfig(config.hidden_size, config.vocab_size, model, options.num_heads, options.num_layers)
    _run(training, folder, facts, published, options, progress)
    return folder


def _run(
    training: MedusaTraining,
    folder: Path,
    facts: dict[str, Any],
    published: MedusaConfig,
    options: MedusaOptions,
    progress: bool,
) -> None:
    saved_s = time.monotonic()
    smooth: list[float] = []
    shape = "{l_bar}{bar:20}| {postfix}"
    with tqdm(total=1000, initial=int(1000 * training.done), bar_format=shape, disable=not progress) as bar:
        while training.done < 1.0:
            losses = training.step()
            smooth = [0.95 * a + 0.05 * b for a, b in zip(smooth or losses, losses, strict=True)]
            left_min = training.seconds * (1.0 / max(training.done, 1e-9) - 1.0) / 60.0
            figures = " ".join(f"{loss:.3f}" for loss in smooth)
            bar.set_postfix_str(f"step {training.num_steps}, loss {figures}, {left_min:.1f} min left", refresh=False)
            bar.update(int(1000 * training.done) - bar.n)
            if time.monotonic() - saved_s > options.save_every_s:
                _save(training, folder, facts, published)
                saved_s = time.monotonic()
    _save(training, folder, facts, published)


def _save(training: MedusaTraining, folder: Path, facts: dict[str, Any], published: MedusaConfig) -> None:
    """Save heads and checkpoint; the checkpoint is renamed into place, so that a kill never leaves half of one."""
    unfinished = folder / f"{CHECKPOINT_NAME}.tmp"
    try:
        torch.save({"facts": facts, **training.state()}, unfinished)
        os.replace(unfinished, folder / CHECKPOINT_NAME)
        save_heads(training.heads, published, folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch raises it for a full disk
        raise InvalidParameter("output", str(folder), f"cannot be written ({reason_of(error)})") from error


def _make_folder(folder: Path, options: MedusaOptions) -> None:
    """Make the output folder; refuse to overwrite a run that is not resumed."""
    if not options.resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        limit = "exists already"
        raise InvalidParameter("output", str(folder), limit, "Give --resume to go on there, or another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter("output", str(folder), f"cannot be written ({error.strerror})") from error


def _checkpoint_to_resume(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the stored state, after checking that it is of the same model, text and settings."""
    path = folder / CHECKPOINT_NAME
    if not path.is_file():
        raise InvalidParameter("resume", str(folder), f"has no {CHECKPOINT_NAME}", "Leave --resume out to begin.")
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        stored: dict[str, Any] = state.pop("facts")
    except Exception as error:  # pickle raises many types
        raise InvalidParameter("resume", str(path), f"cannot be read as a checkpoint ({error})") from error
    different = [
        f"{name} is {stored.get(name)} there and {value} here"
        for name, value in facts.items()
        if stored.get(name) != value
    ]
    if different:
        raise InvalidParameter(
            "resume", str(folder), f"is another run: {'; '.join(different)}", "Give the same model, text and settings."
        )
    return state
