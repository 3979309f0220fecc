"""Train the embedded model; see README.md in this folder.

The schedule follows the share of the budget that is spent (wall-clock minutes or tokens), so the run ends on time
on any machine, and a resumed run continues at its checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import SourceFile, dump_manifest, load_corpus, manifest
from training.export import export_model
from training.model import LlamaModel, ModelConfig
from training.optimiser import MuonAdam
from training.report import Report
from training.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer, training_texts

Tokens = NDArray[np.uint16]
LossFunction = Callable[..., tuple[Tensor, dict[int, Tensor]]]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run, stored in its checkpoint."""

    minutes: float | None = 60.0
    tokens: int | None = None
    seed: int = 1234
    batch_tokens: int = 8192
    micro_tokens: int = 1024
    # (share of the budget at which the phase ends, sequence length)
    phases: tuple[tuple[float, int], ...] = ((0.75, 512), (0.88, 1024), (1.0, 4096))
    muon_lr: float = 0.005
    adam_lr: float = 0.006
    weight_decay: float = 0.1
    warmup: float = 0.01
    decay_from: float = 0.55
    final_lr: float = 0.02
    clip: float = 1.0
    exit_weight: float = 0.25
    exit_stride: int = 4
    test_share: float = 0.2
    precision: str = "bfloat16"
    model: ModelConfig = field(default_factory=ModelConfig)

    def learning_rate(self, done: float) -> float:
        """Return the factor on the peak rate at the share ``done`` of the budget: warm-up, constant, linear decay."""
        if done < self.warmup:
            return max(done / self.warmup, 0.01)
        if done < self.decay_from:
            return 1.0
        left = max(1.0 - done, 0.0) / (1.0 - self.decay_from)
        return self.final_lr + (1.0 - self.final_lr) * left

    def sequence_length(self, done: float) -> int:
        """Return the sequence length of the phase that contains ``done``."""
        return next((length for end, length in self.phases if done < end), self.phases[-1][1])


class Sampler:
    """Batches of windows, as a function of the seed and of (epoch, cursor, length) only, so a run can resume.

    An epoch cuts all library documents (in a new order, from a random offset) and the share ``test_share`` of the
    windows of the test documents into windows of one length, and visits them in random order.
    """

    def __init__(
        self, library: list[Tokens], tests: list[Tokens], test_share: float, seed: int, state: tuple[int, int, int]
    ) -> None:
        self.library, self.tests, self.test_share, self.seed = library, tests, test_share, seed
        self.epoch, self.cursor, self.length = state
        self._streams: list[Tokens] = []
        self._windows: list[tuple[int, int]] = []
        if self.length:
            self._lay_out()

    @property
    def state(self) -> tuple[int, int, int]:
        """State for a checkpoint: epoch, cursor and length."""
        return self.epoch, self.cursor, self.length

    def _lay_out(self) -> None:
        rng = np.random.default_rng((self.seed, self.epoch))
        self._streams, self._windows = [], []
        for number, (documents, share) in enumerate(((self.library, 1.0), (self.tests, self.test_share))):
            order = rng.permutation(len(documents))
            stream = np.concatenate([documents[i] for i in order]) if documents else np.zeros(0, np.uint16)
            first = int(rng.integers(self.length))
            starts = np.arange(first, len(stream) - self.length, self.length)
            chosen = rng.permutation(starts)[: math.ceil(len(starts) * share)]
            self._streams.append(stream)
            self._windows += [(number, int(start)) for start in chosen]
        self._windows = [self._windows[i] for i in rng.permutation(len(self._windows))]

    def batch(self, count: int, length: int) -> Tensor:
        """Return the next ``count`` windows with their following token: [count, length + 1], int64."""
        if length != self.length:
            self.epoch, self.cursor, self.length = self.epoch + 1, 0, length
            self._lay_out()
        rows = []
        while len(rows) < count:
            if self.cursor >= len(self._windows):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._lay_out()
            number, start = self._windows[self.cursor]
            rows.append(self._streams[number][start : start + length + 1].astype(np.int64))
            self.cursor += 1
        return torch.from_numpy(np.stack(rows))


def encode_files(tokenizer: Tokenizer, files: Iterable[SourceFile], split: str) -> list[Tokens]:
    """Return one array for each file of ``split``, with the end-of-text token after it."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = [file.text for file in files if file.split == split]
    return [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def gradient_worker(
    config: TrainConfig, compiled: bool, parameters: list[Tensor], gradients: list[Tensor], tasks: Any, results: Any
) -> None:
    """Add the gradient of each task to the worker's own shared ``gradients``: the body of a worker process.

    A task is (windows [b, T + 1], weight) or None to stop; a result is the plain loss of each depth times the weight.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    Thread(target=end_with_parent, daemon=True).start()
    model = LlamaModel(config.model)
    for own, shared, gradient in zip(model.parameters(), parameters, gradients, strict=True):
        own.data, own.grad = shared, gradient
    loss_of = torch.compile(model.loss, dynamic=False) if compiled else model.loss
    while (task := tasks.get()) is not None:
        rows, weight = torch.from_numpy(task[0]), task[1]
        results.put(add_gradient(config, loss_of, rows, weight))


def end_with_parent() -> None:
    """End this process when its parent has ended, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def add_gradient(config: TrainConfig, loss_of: LossFunction, rows: Tensor, weight: float) -> dict[int, float]:
    """Add ``weight`` times the gradient of the windows [b, T + 1]; return ``weight`` times the loss of each depth."""
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    exits = dict.fromkeys(config.model.exit_layers, config.exit_weight)
    loss, plain = loss_of(rows[:, :-1], rows[:, 1:], dtype, exits, config.exit_stride)
    (loss * weight).backward()
    return {number: value.item() * weight for number, value in plain.items()}


class Workers:
    """Single-threaded processes that share the weights and take micro-batches as they become free.

    Threads of one process wait for each other at every operation, so one busy core of a shared machine would delay all
    of them. Processes that take work from a queue only lose the time that the other program takes.  The assignment of
    micro-batches depends on timing, so the rounding of the sum does too.
    """

    def __init__(self, config: TrainConfig, model: LlamaModel, count: int, compiled: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.model = model.share_memory()
        self.tasks, self.results = context.SimpleQueue(), context.SimpleQueue()
        parameters = [p.detach() for p in model.parameters()]
        self.gradients = [[torch.zeros_like(p).share_memory_() for p in parameters] for _ in range(count)]
        self.processes = [
            context.Process(
                target=gradient_worker,
                args=(config, compiled, parameters, gradients, self.tasks, self.results),
                daemon=True,
            )
            for gradients in self.gradients
        ]
        for process in self.processes:
            process.start()

    def gradient(self, parts: Iterable[tuple[Tensor, float]]) -> list[dict[int, float]]:
        """Put the weighted gradient of all parts into ``model``; return their weighted losses."""
        waiting = 0
        for rows, weight in parts:
            self.tasks.put((rows.numpy(), weight))
            waiting += 1
        losses = [self.results.get() for _ in range(waiting)]
        for parameter, *shares in zip(self.model.parameters(), *self.gradients, strict=True):
            parameter.grad = torch.stack(shares).sum(0)
            for share in shares:
                share.zero_()
        return losses

    def close(self) -> None:
        """End the processes."""
        for _ in self.processes:
            self.tasks.put(None)
        for process in self.processes:
            process.join()


class Run:
    """One training run: the model, its optimiser, its data and its progress in the budget."""

    def __init__(
        self,
        config: TrainConfig,
        library: list[Tokens],
        tests: list[Tokens],
        device: str = "cpu",
        compiled: bool = False,
        checkpoint: dict[str, object] | None = None,
        workers: int = 0,
    ) -> None:
        self.config, self.device = config, device
        self.dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        self.model = LlamaModel(config.model, config.seed).to(device)
        self.optimizer = MuonAdam(self.model, config)
        self.progress = Progress()
        state = (0, 0, 0)
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])  # type: ignore[arg-type]
            self.optimizer.load_state_dict(checkpoint["optimizer"])  # type: ignore[arg-type]
            self.progress = Progress(**checkpoint["progress"])  # type: ignore[arg-type]
            state = tuple(checkpoint["sampler"])  # type: ignore[arg-type, assignment]
        self.sampler = Sampler(library, tests, config.test_share, config.seed, state)
        self.loss: LossFunction = torch.compile(self.model.loss, dynamic=False) if compiled else self.model.loss
        self.workers = Workers(config, self.model, workers, compiled) if workers else None

    def checkpoint(self) -> dict[str, object]:
        """Return everything needed to continue from here."""
        return {
            "config": config_to_dict(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "sampler": list(self.sampler.state),
        }

    @property
    def done(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        if self.config.tokens is not None:
            return min(self.progress.tokens / self.config.tokens, 1.0)
        assert self.config.minutes is not None
        return min(self.progress.seconds / (60.0 * self.config.minutes), 1.0)

    def step(self) -> dict[int, float]:
        """Run one optimiser step; return the mean loss of each depth in nats per token."""
        started = time.monotonic()
        config, done = self.config, self.done
        length = config.sequence_length(done)
        count = max(config.batch_tokens // length, 1)
        batch = self.sampler.batch(count, length)
        per_micro = max(config.micro_tokens // length, 1)
        parts = [(part.to(self.device), len(part) / count) for part in batch.split(per_micro)]
        if self.workers:
            losses = self.workers.gradient(parts)
        else:
            losses = [add_gradient(config, self.loss, rows, weight) for rows, weight in parts]
        sums = {number: sum(loss[number] for loss in losses) for number in losses[0]}
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.set_rate(config.learning_rate(done))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += count * length
        self.progress.seconds += time.monotonic() - started
        return sums

    def steps(self) -> Iterator[dict[int, float]]:
        """Yield steps until the budget is spent."""
        while self.done < 1.0:
            yield self.step()


def config_to_dict(config: TrainConfig) -> dict[str, object]:
    """Return plain values for a checkpoint or a report."""
    values: dict[str, object] = dict(vars(config))
    values["phases"] = [list(phase) for phase in config.phases]
    values["model"] = config.model.to_dict()
    return values


def config_from_dict(values: dict[str, object]) -> TrainConfig:
    """Return the config that :func:`config_to_dict` gave."""
    kept = dict(values)
    kept["phases"] = tuple((end, length) for end, length in values["phases"])  # type: ignore[attr-defined]
    kept["model"] = ModelConfig.from_dict(values["model"])  # type: ignore[arg-type]
    return TrainConfig(**kept)  # type: ignore[arg-type]


def keep_freed_memory() -> None:
    """Ask glibc to keep large freed blocks: returning each activation to the kernel costs a third of a CPU step."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(-4, 0)  # M_MMAP_MAX: no block by mmap
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never give back
    mallopt(-2, 1 << 28)  # M_TOP_PAD: grow in large steps


@torch.no_grad()
def prepare(folder: Path, resume: bool) -> tuple[Tokenizer, list[SourceFile]]:
    """Return the corpus and the tokenizer of a run; a resumed run keeps its tokenizer and checks its corpus."""
    files, left_out = load_corpus()
    text = dump_manifest(manifest(files, left_out))
    if resume:
        if (folder / "manifest.json").read_text() != text:
            raise RuntimeError("this Python's standard library is not the one that the checkpoint was trained on")
        return Tokenizer.from_file(str(folder / "tokenizer.json")), files
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(text)
    tokenizer = train_tokenizer(training_texts(files))
    save_tokenizer(tokenizer, folder, 4096)
    return tokenizer, files


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    defaults = TrainConfig()
    parser.add_argument("--output", type=Path, default=Path.home() / ".cache" / "twostroke" / "training")
    parser.add_argument("--minutes", type=float, default=None, help="wall-clock budget (60, or what a run has)")
    parser.add_argument("--tokens", type=int, default=None, help="budget in tokens instead of minutes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="CPU processes; 0 trains in this one")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--batch-tokens", type=int, default=defaults.batch_tokens)
    parser.add_argument("--micro-tokens", type=int, default=None, help="1,024 on a CPU, the whole batch on a GPU")
    parser.add_argument("--muon-lr", type=float, default=defaults.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=defaults.adam_lr)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default=defaults.precision)
    parser.add_argument("--save-every", type=float, default=240.0, help="seconds between checkpoints")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train, with a progress bar and checkpoints, and export the model at the end."""
    args = parse_arguments(arguments)
    keep_freed_memory()
    torch.set_float32_matmul_precision("high")
    workers = 0 if args.device == "cuda" else args.workers
    if workers:
        torch.set_num_threads(1)  # this process has little work: a second thread would mostly wait
    config = TrainConfig(
        minutes=None if args.tokens else args.minutes or TrainConfig().minutes,
        tokens=args.tokens,
        seed=args.seed,
        batch_tokens=args.batch_tokens,
        micro_tokens=args.micro_tokens or (1024 if args.device == "cpu" else args.batch_tokens),
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        precision=args.precision,
    )
    tokenizer, files = prepare(args.output, args.resume)
    checkpoint = None
    if args.resume:
        checkpoint = torch.load(args.output / "checkpoint.pt", map_location=args.device, weights_only=True)
        # The rate is constant in the first half, so the budget may change during that time.
        budget = {"minutes": config.minutes, "tokens": config.tokens} if args.minutes or args.tokens else {}
        config = replace(config_from_dict(checkpoint["config"]), **budget)
    library, tests, held_out = (encode_files(tokenizer, files, split) for split in ("library", "test", "heldout"))
    run = Run(config, library, tests, args.device, args.compile, checkpoint, workers)
    print(
        f"{run.model.num_parameters():,} parameters; {sum(map(len, library)):,} library tokens, "
        f"{sum(map(len, tests)):,} test tokens; {args.device}, {config.precision}, Python {platform.python_version()}",
        flush=True,
    )
    bytes_per_token = sum(f.num_bytes for f in files if f.split == "heldout") / sum(map(len, held_out))
    report = Report(run, args.output, held_out, bytes_per_token, args.save_every)
    for losses in run.steps():
        report.step(losses)
    report.bar.close()
    if run.workers:
        run.workers.close()
    export_model(run.model, args.output / "model", args.output)
    print(f"exported to {args.output / 'model'}", flush=True)


if __name__ == "__main__":
    main()
