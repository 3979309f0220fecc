"""`twostroke train-medusa MODEL --data TEXT`: training of Medusa heads, which draft for a model, on a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twostroke.train.medusa_options import MedusaOptions


def train_medusa(
    model: str,
    *,
    data: Path,
    options: Annotated[MedusaOptions, Parameter(name="*", group="Training")] = MedusaOptions(),
    quiet: bool = False,
) -> None:
    """Train Medusa heads, which draft several tokens at once; the model's own weights do not change.

    The heads are written in the published layout every two minutes and at the end.

    Parameters
    ----------
    model
        A model folder, a GGUF file, a hub id, or 'embedded'.
    data
        A UTF-8 text file; the text should resemble what the model will write.
    quiet
        Print no progress.
    """
    from twostroke.train.medusa import train_medusa as train  # loads torch

    folder = train(model, data, options, progress=not quiet)
    if not quiet:
        sys.stderr.write(f"{folder}: {options.num_heads} heads\n")
