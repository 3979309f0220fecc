"""Train, export and measure the drafters of the embedded model; see ../README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from training import model
from training.companions import eagle
from training.companions.acceptance import CONTEXT, NUM_DRAFTS, TEMPERATURE, measure
from training.companions.draft import Draft
from training.companions.eagle import Eagle
from training.companions.medusa import Medusa
from training.companions.run import CompanionRun
from training.companions.target import Target, load_target
from training.corpus import dump_manifest, load_corpus, manifest
from training.evaluate import ROOT, commit, processor
from training.train import Tokens, TrainConfig, config_from_dict, encode_files, keep_freed_memory

NAMES = ("draft", "medusa", "eagle")
EMBEDDED = ROOT / "src" / "twostroke" / "embedded"
FIGURES = ROOT / "benchmarks" / "results" / "companions.json"
DRAFT_VOCAB = 3072
"""Vocabulary of EAGLE's head: these tokens are 97 % of the library's text, and the rest would be a fifth of its
bytes."""
RECIPE = TrainConfig(
    minutes=60.0,
    batch_tokens=2048,
    phases=((0.7, 512), (0.9, 1024), (1.0, 2048)),
    decay_from=0.4,
)

MUON_RATES = {"draft": 0.005, "medusa": 0.01, "eagle": 0.005}
"""Learning rates of Muon. Medusa's separate matrices allow twice that of a model; at 0.03 the loss stays at 6 nats."""


def corpus_tokens(folder: Path) -> dict[str, list[Tokens]]:
    """Return the documents of each split, encoded once per corpus and kept in ``folder``."""
    files, left_out = load_corpus()
    text = dump_manifest(manifest(files, left_out))
    stored, kept = folder / "manifest.json", folder / "tokens.npz"
    if not (stored.exists() and kept.exists() and stored.read_text() == text):
        tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
        arrays: dict[str, Any] = {}
        for split in ("library", "test", "heldout"):
            documents = encode_files(tokenizer, files, split)
            arrays[split], arrays[f"{split}_ends"] = np.concatenate(documents), np.cumsum([len(d) for d in documents])
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(kept, **arrays)
        stored.write_text(text)
    with np.load(kept) as arrays:
        return {s: np.split(arrays[s], arrays[f"{s}_ends"][:-1]) for s in ("library", "test", "heldout")}


def frequent_tokens(documents: list[Tokens], count: int, vocab_size: int) -> torch.Tensor:
    """Return the ``count`` most frequent tokens, ascending."""
    counts = np.bincount(np.concatenate(documents), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def new_companion(name: str, target: Target, seed: int, library: list[Tokens]) -> Draft | Medusa | Eagle:
    """Return an untrained drafter."""
    if name == "draft":
        return Draft(seed)
    if name == "medusa":
        return Medusa(target)
    return Eagle(target, seed, frequent_tokens(library, DRAFT_VOCAB, target.config.vocab_size))


def load_companions(folder: Path, target: Target) -> dict[str, Draft | Medusa | Eagle]:
    """Return the drafters in ``folder``, by name."""
    kinds = {"draft": Draft, "medusa": Medusa, "eagle": Eagle}
    return {name: kind.load(folder / name, target) for name, kind in kinds.items() if (folder / name).is_dir()}


def kept_record(name: str) -> dict[str, Any]:
    """Return a drafter's record in the committed figures, for drafters whose checkpoint is gone; empty without one."""
    if not FIGURES.exists():
        return {}
    return json.loads(FIGURES.read_text())["companions"].get(name, {}).get("training", {})


def training_record(path: Path) -> dict[str, Any]:
    """Return a checkpoint's record of its run; empty if there is none."""
    if not path.exists():
        return {}
    checkpoint = torch.load(path, weights_only=True)
    progress = checkpoint["progress"]
    return {
        "steps": progress["step"],
        "tokens": progress["tokens"],
        "minutes": progress["seconds"] / 60.0,
        "config": checkpoint["config"],
        "history": progress["history"],
    }


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of the drafters in ``args.companions``."""
    target = load_target(EMBEDDED, torch.float32)
    companions = load_companions(args.companions, target)
    held_out = corpus_tokens(args.output)["heldout"]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "commit": commit(),
        "companions": {
            name: {
                "parameters": sum(p.numel() for p in companion.parameters()),
                "bytes": sum(path.stat().st_size for path in (args.companions / name).iterdir()),
                "training": training_record(args.output / f"{name}.pt") or kept_record(name),
            }
            for name, companion in companions.items()
        },
        "acceptance": {
            "positions": args.positions,
            "context_tokens": CONTEXT,
            "seed": args.seed,
            "temperature_of_sampled": TEMPERATURE,
            **measure(target, companions, held_out, args.positions, args.seed),
        },
    }


def table(results: dict[str, Any]) -> str:
    """Return the acceptance as Markdown."""
    lines = []
    for mode in ("greedy", "sampled"):
        lines += [f"| {mode} | 1 | 2 | 3 | 4 | 5 | tokens a pass |", "|---" * 7 + "|"]
        for name, row in results["acceptance"][mode].items():
            cells = [f"{share:.3f}" for share in row["share"]] + [""] * (NUM_DRAFTS - len(row["share"]))
            lines.append(f"| {name} | {' | '.join(cells)} | {row['tokens_a_pass']:.2f} |")
        lines.append("")
    return "\n".join(lines)


def keep_attention_eager() -> None:
    """Exclude attention from compilation: torch 2.13's compiler gives NaN for its gradient in bfloat16 with AMX."""
    model.blocked_attention = torch.compiler.disable(model.blocked_attention)
    eagle.branch_attention = torch.compiler.disable(eagle.branch_attention)


def train(run: CompanionRun, path: Path, save_every: float) -> None:
    """Run steps until the budget is spent, with a progress bar, and a line of losses and a checkpoint at intervals."""
    saved, smooth = time.monotonic(), np.zeros(0)
    bar = tqdm(total=1000, initial=int(1000 * run.done), mininterval=5.0, bar_format="{l_bar}{bar:20}| {postfix}")
    bar.set_description(run.companion.name)
    for losses in run.steps():
        smooth = np.array(losses) if not len(smooth) else 0.95 * smooth + 0.05 * np.array(losses)
        progress = run.progress
        left = progress.seconds * (1.0 / max(run.done, 1e-6) - 1.0)
        figures = " ".join(f"{value:.3f}" for value in smooth)
        bar.set_postfix_str(
            f"step {progress.step} loss {figures} {progress.tokens / 1e6:.2f}M tok "
            f"{progress.tokens / progress.seconds:,.0f} tok/s T {run.sampler.length} ETA {left / 60:.1f} min",
            refresh=False,
        )
        bar.update(int(1000 * run.done) - bar.n)
        if time.monotonic() - saved > save_every or run.done >= 1.0:
            row = {"step": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 1)}
            row |= {f"train_{i + 1}": round(float(value), 4) for i, value in enumerate(smooth)}
            progress.history.append(row)
            print("\n" + json.dumps(row), flush=True)
            run.save(path)
            saved = time.monotonic()
    bar.close()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path.home() / ".cache" / "twostroke" / "companions")
    parser.add_argument("--only", choices=NAMES, default=None, help="one companion instead of all three")
    parser.add_argument("--minutes", type=float, default=None, help="wall-clock budget of each (60, or what a run has)")
    parser.add_argument("--tokens", type=int, default=None, help="budget of each in tokens instead of minutes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in the output folder")
    parser.add_argument("--export", type=Path, default=None, help="write each to FOLDER/NAME when it is trained")
    parser.add_argument("--measure", action="store_true", help="measure instead of training")
    parser.add_argument("--companions", type=Path, default=EMBEDDED, help="folder of the companions to measure")
    parser.add_argument("--positions", type=int, default=2048, help="number of positions to measure at")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--seed", type=int, default=RECIPE.seed)
    parser.add_argument("--batch-tokens", type=int, default=RECIPE.batch_tokens)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default=RECIPE.precision)
    parser.add_argument("--threads", type=int, default=None, help="threads; default: torch's number")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--save-every", type=float, default=240.0, help="seconds between checkpoints")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train the chosen drafters, one after the other, or measure them."""
    args = parse_arguments(arguments)
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.measure:
        results = report(args)
        print(table(results))
        if args.save:
            FIGURES.write_text(json.dumps(results, indent=1) + "\n")
        return
    if args.compile:
        keep_attention_eager()
    tokens = corpus_tokens(args.output)
    dtype = torch.bfloat16 if args.precision == "bfloat16" else torch.float32
    target = load_target(EMBEDDED, dtype, args.compile)
    for name in NAMES if args.only is None else (args.only,):
        config = replace(
            RECIPE,
            minutes=None if args.tokens else args.minutes or RECIPE.minutes,
            tokens=args.tokens,
            seed=args.seed,
            batch_tokens=args.batch_tokens,
            muon_lr=MUON_RATES[name],
            precision=args.precision,
            model=target.config,
        )
        path, checkpoint = args.output / f"{name}.pt", None
        if args.resume and path.exists():
            checkpoint = torch.load(path, weights_only=True)
            budget = {"minutes": config.minutes, "tokens": config.tokens} if args.minutes or args.tokens else {}
            config = replace(config_from_dict(checkpoint["config"]), **budget)
        companion = new_companion(name, target, config.seed, tokens["library"])
        run = CompanionRun(companion, target, config, (tokens["library"], tokens["test"]), checkpoint, args.compile)
        print(f"{name}: {sum(p.numel() for p in companion.parameters()):,} parameters", flush=True)
        train(run, path, args.save_every)
        if args.export is not None:
            companion.export(args.export / name)
            print(f"exported to {args.export / name}", flush=True)


if __name__ == "__main__":
    main()
