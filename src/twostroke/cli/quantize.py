"""`twostroke quantize MODEL OUT`: a smaller copy of a model, with the same weights as quantizing on load."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from twostroke.config.load import QuantizationOnFile


def quantize(
    model: str,
    out: Path,
    *,
    quantization: QuantizationOnFile,
    group_size: int | None = None,
    quiet: bool = False,
) -> None:
    """Quantize a model ahead of time, into a folder that loads like any other (compressed-tensors).

    Parameters
    ----------
    model
        A model folder, a hub id, or 'embedded'.
    out
        The folder to write; it must not exist.
    quantization
        'int8' (a scale per channel) or 'int4' (a scale per group of weights).
    group_size
        Weights that share a scale in 'int4': 32 (the default), 64 or 128.
    quiet
        Print no progress and no figures.
    """
    from twostroke.model.quantize_folder import quantize_folder  # loads torch

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made = quantize_folder(model, out, quantization, group_size=group_size, threads=threads, progress=not quiet)
    if not quiet:
        before, after = made.bytes_before, made.bytes_after
        sys.stderr.write(f"{made.path}: {before:,} bytes of weights before, {after:,} after ({after / before:.0%})\n")
