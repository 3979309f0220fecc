"""Measure an exported model on the held-out modules, compare it with the n-gram baseline, and write the figures.

Bits per byte count every token of a module and the end of text after it, divided by the module's UTF-8 bytes.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import os
import platform
import random
import subprocess
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from training.corpus import SourceFile, load_corpus
from training.export import load_exported
from training.model import KVCache, LlamaModel
from training.ngram import KneserNey
from training.tokenizer import END_OF_TEXT
from training.train import Tokens, encode_files

CHUNK = 512
RANGES: tuple[int, ...] = (0, 1, 3, 7)
"""Compared ranges of positions, in chunks: the first 512, then those that end at 1,024, 2,048 and 4,096."""
ROOT = Path(__file__).resolve().parent.parent


@torch.no_grad()
def window_bits(model: LlamaModel, ids: Tensor, score_from: int) -> dict[int, NDArray[np.float64]]:
    """Return the bits of each token of one window [T + 1] from ``score_from`` on, for each depth: [T - score_from]."""
    states = model.hidden_states(ids[None, :-1])
    bits = {}
    for depth, state in states.items():
        logits = model.head(state[0, score_from:])
        bits[depth] = (F.cross_entropy(logits, ids[score_from + 1 :], reduction="none") / math.log(2)).double().numpy()
    return bits


def as_windows(document: Tokens, end: int) -> Tensor:
    """Return a document [n] after an end-of-text token, so that its first token is predicted too: [n + 1]."""
    return torch.from_numpy(np.concatenate(([end], document)).astype(np.int64))


def bits_per_byte(model: LlamaModel, documents: list[Tokens], num_bytes: int, end: int) -> dict[int, float]:
    """Return the bits per byte of each depth; tokens have at least a quarter of the context before them if
    available."""
    context = model.config.max_position_embeddings
    before = context // 4
    totals: dict[int, float] = {}
    for document in tqdm(documents, desc="bits per byte", leave=False):
        ids = as_windows(document, end)
        scored = 0
        while scored < len(document):
            begin = max(0, scored - before)
            window = ids[begin : begin + context + 1]
            for depth, bits in window_bits(model, window, scored - begin).items():
                totals[depth] = totals.get(depth, 0.0) + float(bits.sum())
            scored = begin + len(window) - 1
    return {depth: total / num_bytes for depth, total in totals.items()}


def bits_by_position(
    model: LlamaModel, documents: list[Tokens], tokenizer: Tokenizer, end: int, seed: int, count: int = 32
) -> dict[str, dict[int, float]]:
    """Return the bits per byte of the *same* tokens at several ranges of positions.

    ``count`` chunks of 512 tokens are drawn from those with enough text before them, and each is scored once for each
    range, with that much context.  A difference between ranges then comes only from the context, not from the typical
    beginnings of modules.
    """
    chunks = model.config.max_position_embeddings // CHUNK
    places = [(d, c) for d, document in enumerate(documents) for c in range(chunks - 1, len(document) // CHUNK)]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    table: dict[str, dict[int, float]] = {}
    num_bytes = 0
    for number, chunk in tqdm(chosen, desc="by position", leave=False):
        ids = as_windows(documents[number], end)
        stop = (chunk + 1) * CHUNK
        num_bytes += len(tokenizer.decode(documents[number][stop - CHUNK : stop].tolist()).encode())
        for distance in RANGES:
            window = ids[(chunk - distance) * CHUNK : stop + 1]
            row = table.setdefault(f"{distance * CHUNK}-{(distance + 1) * CHUNK}", {})
            for depth, bits in window_bits(model, window, distance * CHUNK).items():
                row[depth] = row.get(depth, 0.0) + float(bits.sum())
    return {name: {depth: bits / num_bytes for depth, bits in row.items()} for name, row in table.items()}


def draft_agreement(model: LlamaModel, documents: list[Tokens], end: int, length: int = 1024) -> dict[int, float]:
    """Return how often an early exit's most likely token equals the full depth's, in the first tokens of each
    module."""
    same: dict[int, int] = {}
    total = 0
    for document in documents:
        ids = as_windows(document[:length], end)[None, :-1]
        with torch.no_grad():
            best = {depth: model.head(state).argmax(-1) for depth, state in model.hidden_states(ids).items()}
        total += ids.shape[1]
        for depth in model.config.exit_layers:
            same[depth] = same.get(depth, 0) + int((best[depth] == best[model.config.num_hidden_layers]).sum())
    return {depth: count / total for depth, count in same.items()}


@dataclass(frozen=True)
class Site:
    """A function whose body is to be completed: the module's text up to the body, and the function's own header."""

    name: str
    context: str
    header: str
    indent: int


def find_sites(file: SourceFile) -> list[Site]:
    """Return all functions of a module with a body of at least two statements besides the docstring."""
    lines = file.text.splitlines(keepends=True)
    sites = []
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documented = ast.get_docstring(node) is not None
        body = node.body[documented:]
        header_end = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        if len(body) < 2 or body[0].lineno == node.lineno or header_end is None:
            continue
        context, header = "".join(lines[:header_end]), "".join(lines[node.lineno - 1 : header_end])
        sites.append(Site(f"{file.path}:{node.name}", context, header, node.col_offset))
    return sites


def choose_sites(files: Sequence[SourceFile], count: int, seed: int) -> list[Site]:
    """Return ``count`` functions of the held-out modules, drawn without replacement."""
    sites = [site for file in files if file.split == "heldout" for site in find_sites(file)]
    return random.Random(seed).sample(sites, count)


def prompt_ids(tokenizer: Tokenizer, site: Site, limit: int) -> list[int]:
    """Return the tokens of the end of the context, cut at the first line that fits into ``limit`` tokens."""
    lines = site.context.splitlines(keepends=True)
    kept: list[str] = []
    for line in reversed(lines):
        if len(tokenizer.encode("".join([line, *kept])).ids) > limit:
            break
        kept.insert(0, line)
    return tokenizer.encode("".join(kept)).ids


def left_function(text: str, indent: int) -> int | None:
    """Return the position of the first line of ``text`` outside the body of a function at ``indent``, else None.

    Only finished lines count. An unindented line inside a string or a bracket also counts, which is rare.
    """
    position = 0
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if bare and line.endswith("\n") and len(line) - len(line.lstrip()) <= indent and bare[0] not in ")]}":
            return position
        position += len(line)
    return None


@torch.no_grad()
def complete(
    model: LlamaModel, tokenizer: Tokenizer, site: Site, generator: torch.Generator | None, limit: int, prompt: int
) -> tuple[str, bool]:
    """Complete a body, greedily or (with ``generator``) at temperature 0.8 and top-p 0.95.

    Returns the text and whether the model itself ended the function (by a dedent or the end of text).
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    cache: KVCache = []
    fed = torch.tensor([prompt_ids(tokenizer, site, prompt)])
    written: list[int] = []
    depth = model.config.num_hidden_layers
    while len(written) < limit:
        logits = model.head(model.hidden_states(fed, cache=cache)[depth][0, -1])
        token = int(logits.argmax()) if generator is None else sample(logits, generator)
        if token == end:
            return tokenizer.decode(written), True
        written.append(token)
        fed = torch.tensor([[token]])
        if "\n" in tokenizer.decode([token]):
            text = tokenizer.decode(written)
            left = left_function(text, site.indent)
            if left is not None:
                return text[:left], True
    return tokenizer.decode(written), False


def sample(logits: Tensor, generator: torch.Generator, temperature: float = 0.8, top_p: float = 0.95) -> int:
    """Return one token from the logits [V]: the smallest set of likeliest tokens that holds ``top_p`` of the mass."""
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def logical_lines(text: str) -> tuple[list[str], bool]:
    """Return the complete logical lines of ``text``, and whether nothing unfinished followed them."""
    ends: list[int] = []
    finished = True
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE and token.string:
                ends.append(token.end[0])  # noqa: PERF401 - those before an error are kept
    except (tokenize.TokenError, IndentationError, SyntaxError):
        finished = False
    physical = text.splitlines(keepends=True)
    starts = [0, *ends[:-1]]
    lines = ["".join(physical[a:b]) for a, b in zip(starts, ends, strict=False)]
    return lines, finished and not "".join(physical[ends[-1] if ends else 0 :]).strip()


def first_code(line: str) -> str:
    """Return the first physical line of a logical line that is neither blank nor a comment."""
    return next((part for part in line.splitlines() if part.strip() and not part.lstrip().startswith("#")), "")


def cut_body(header: str, body: str, ended: bool) -> str | None:
    """Return the function with its body cut at the last full statement; None if it does not parse or is empty.

    A body that the model ended itself must parse as it is.  From one that reached the token limit, the unfinished last
    line is removed, and block headers without a block. If a ``try`` then still lacks its handler, the whole statement
    is removed, because no part of it is complete.  Nothing else is cut: an earlier error counts.
    """
    if ended:
        return parsed(header + body)
    lines, finished = logical_lines(header + body)
    if finished and lines and body.rpartition("\n")[2].strip():
        lines.pop()  # a line without its line feed may lack its rest
    while lines and (lines[-1].rstrip().endswith(":") or first_code(lines[-1]).lstrip().startswith("@")):
        lines.pop()
    result = parsed("".join(lines))
    if result is None:
        widths = [len(first_code(line)) - len(first_code(line).lstrip()) for line in lines]
        inner = min(widths[1:], default=0)
        clause = ("else", "elif", "except", "finally")
        starts = [
            i
            for i in range(1, len(lines))
            if widths[i] == inner and not first_code(lines[i]).lstrip().startswith(clause)
        ]
        if starts and any(first_code(line).strip() == "try:" for line in lines[starts[-1] :]):
            result = parsed("".join(lines[: starts[-1]]))
    return result


def parsed(function: str) -> str | None:
    """Return ``function`` (at any indentation) if it parses and has a statement besides its docstring, else None."""
    try:
        tree = ast.parse("if 1:\n" + function if function[:1].isspace() else function)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    node = tree.body[0] if tree.body else None
    node = node.body[0] if isinstance(node, ast.If) and node.body else node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return function if statements else None


def check_completions(
    model: LlamaModel, tokenizer: Tokenizer, sites: list[Site], seed: int, greedy: bool, limit: int, prompt: int
) -> dict[str, object]:
    """Complete every site and count the bodies that parse."""
    rows = []
    for index, site in enumerate(tqdm(sites, desc="greedy" if greedy else "sampled", leave=False)):
        generator = None if greedy else torch.Generator().manual_seed(seed + index)
        body, ended = complete(model, tokenizer, site, generator, limit, prompt)
        function = cut_body(site.header, body, ended)
        rows.append(
            {
                "site": site.name,
                "parses": function is not None,
                "ended": ended,
                "body": body,
                "kept": None if function is None else function[len(site.header) :],
            }
        )
    return {
        "parse": sum(bool(row["parses"]) for row in rows),
        "of": len(rows),
        "ended_by_model": sum(bool(row["ended"]) for row in rows),
        "kept_lines_mean": float(np.mean([str(r["kept"]).count("\n") for r in rows if r["parses"]] or [0.0])),
        "rows": rows,
    }


def baseline(
    library: list[Tokens], tests: list[Tokens], held_out: list[Tokens], num_bytes: int, vocab_size: int, end: int
) -> dict[str, float]:
    """Return the bits per byte of 5-grams trained on the library files alone and with the test files."""
    results = {}
    for name, documents in (("library", library), ("library and tests", library + tests)):
        model = KneserNey(documents, vocab_size, order=5, start=end)
        results[name] = model.bits_of(held_out) / num_bytes
    return results


def processor() -> str:
    """Return the name of the processor, for the record of a measurement."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the recipe, if it is in a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def training_record(run: Path | None) -> dict[str, object]:
    """Return the checkpoint's record of its run."""
    if run is None or not (run / "checkpoint.pt").exists():
        return {}
    checkpoint = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    progress = checkpoint["progress"]
    return {
        "steps": progress["step"],
        "tokens": progress["tokens"],
        "minutes": progress["seconds"] / 60.0,
        "tokens_per_second": progress["tokens"] / progress["seconds"],
        "config": checkpoint["config"],
        "history": progress["history"],
    }


def evaluate(folder: Path, run: Path | None, seed: int, count: int, limit: int, prompt: int) -> dict[str, object]:
    """Return all figures of an exported model."""
    model = load_exported(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    files, _ = load_corpus()
    library, tests, held_out = (encode_files(tokenizer, files, split) for split in ("library", "test", "heldout"))
    num_bytes = sum(file.num_bytes for file in files if file.split == "heldout")
    grams = baseline(library, tests, held_out, num_bytes, model.config.vocab_size, end)
    exact = bits_per_byte(model, held_out, num_bytes, end)
    best = min(grams.values())
    sites = choose_sites(files, count, seed)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "commit": commit(),
        "parameters": model.num_parameters(),
        "corpus": {
            "library_tokens": sum(map(len, library)),
            "test_tokens": sum(map(len, tests)),
            "heldout_tokens": sum(map(len, held_out)),
            "heldout_bytes": num_bytes,
        },
        "training": training_record(run),
        "ngram5_bits_per_byte": grams,
        "bits_per_byte": exact,
        "below_ngram": 1.0 - exact[model.config.num_hidden_layers] / best,
        "bits_per_byte_by_position": bits_by_position(model, held_out, tokenizer, end, seed),
        "top1_agreement_with_full_depth": draft_agreement(model, held_out, end),
        "completions": {
            "seed": seed,
            "max_tokens": limit,
            "prompt_tokens": prompt,
            "sampled": check_completions(model, tokenizer, sites, seed, False, limit, prompt),
            "greedy": check_completions(model, tokenizer, sites, seed, True, limit, prompt),
        },
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures as Markdown, for the terminal and the model card."""
    depths, grams = results["bits_per_byte"], results["ngram5_bits_per_byte"]
    positions, completions = results["bits_per_byte_by_position"], results["completions"]
    agreement = results["top1_agreement_with_full_depth"]
    last = max(map(int, depths))
    lines = ["| Held-out modules | bits per byte |", "|---|---|"]
    lines += [f"| 5-gram, modified Kneser-Ney, trained on {name} | {value:.3f} |" for name, value in grams.items()]
    for depth, value in depths.items():
        exits = f"exit after layer {depth}" if int(depth) != last else f"full depth ({depth} layers)"
        same = f" (likeliest token agrees in {agreement[depth]:.1%})" if depth in agreement else ""
        lines.append(f"| Model, {exits}{same} | {value:.3f} |")
    lines += [f"| Full depth below the better 5-gram by | {results['below_ngram']:.1%} |", ""]
    lines += ["| The same tokens at position | " + " | ".join(positions) + " |", "|---" * (len(positions) + 1) + "|"]
    for depth in depths:
        lines.append(f"| {depth} layers | " + " | ".join(f"{positions[p][depth]:.3f}" for p in positions) + " |")
    lines += ["", "| Function bodies | parse | ended by the model | lines kept (mean) |", "|---|---|---|---|"]
    for name in ("sampled", "greedy"):
        row = completions[name]
        lines.append(
            f"| {name} | {row['parse']} of {row['of']} | {row['ended_by_model']} | {row['kept_lines_mean']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Evaluate, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "src" / "twostroke" / "embedded")
    parser.add_argument("--run", type=Path, default=Path.home() / ".cache" / "twostroke" / "training")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "embedded_model.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--completions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=384)
    args = parser.parse_args()
    results = evaluate(args.model, args.run, args.seed, args.completions, args.max_tokens, args.prompt_tokens)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
