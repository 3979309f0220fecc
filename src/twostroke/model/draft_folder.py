"""A folder with a drafting head: its config.json, and its few tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from twostroke.config.fields import read_count
from twostroke.errors import CorruptCheckpoint, ModelNotFound
from twostroke.model.checkpoint import Checkpoint, read_json

_PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")
"""Pickle files in which some heads are published; only tensors are loaded from them, no code is run."""


class DraftFolder:
    """A folder with a drafting head, opened, with tensor names and shapes known.

    Raises:
        ModelNotFound: there is no config.json, or there are no tensors.
        CorruptCheckpoint: a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / "config.json")
        if config is None:
            raise ModelNotFound(f"{path} has no config.json, so it holds no drafting heads.")
        self.config: dict[str, Any] = config
        self._pickled = self._read_pickle()
        self._checkpoint = None if self._pickled is not None else Checkpoint(path)
        self.shapes: dict[str, tuple[int, ...]] = (
            {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}
            if self._pickled is not None
            else self._checkpoint.shapes
            if self._checkpoint is not None
            else {}
        )

    def tensor(self, name: str) -> Tensor:
        """Return one of the tensors in `shapes`.

        Raises:
            CorruptCheckpoint: a number is not finite, so that no draft would ever be accepted.
        """
        if self._pickled is not None:
            tensor = self._pickled[name]
        else:
            assert self._checkpoint is not None, "one of the two was opened"
            tensor = self._checkpoint.read(name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CorruptCheckpoint(f"{self.path}: {name} has numbers that are not finite. Download it again.")
        return tensor

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number of config.json."""
        return read_count(self.config, name, default)

    def check_counts(self, expected: Mapping[str, int], why: str) -> None:
        """Raise CorruptCheckpoint if config.json has another number; an absent number is not checked here."""
        for name, number in expected.items():
            if self.count(name, number) != number:
                raise CorruptCheckpoint(f"{self.path}: config.json has a {name} of {self.count(name)}{why}.")

    def check_shape(self, name: str, expected: tuple[int | None, ...], why: str = "") -> None:
        """Raise CorruptCheckpoint if a tensor is missing or has another shape; None in `expected` allows any size."""
        found = self.shapes.get(name)
        if found is None:
            raise CorruptCheckpoint(f"{self.path} has no tensor {name!r}.")
        if len(found) != len(expected) or any(e not in (None, f) for e, f in zip(expected, found, strict=True)):
            sizes = " x ".join("any" if size is None else str(size) for size in expected)
            raise CorruptCheckpoint(f"{self.path}: {name} has the shape {list(found)}, expected {sizes}{why}.")

    def _read_pickle(self) -> dict[str, Tensor] | None:
        paths = [self.path / name for name in _PICKLES if (self.path / name).is_file()]
        if not paths or any(self.path.glob("*.safetensors")):
            return None
        try:
            found: Any = torch.load(paths[0], map_location="cpu", weights_only=True)
        except Exception as error:  # a file that is not a pickle of tensors may raise anything
            raise CorruptCheckpoint(f"{paths[0]} cannot be read as tensors ({error}). Download it again.") from error
        if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in cast(dict[str, Any], found).values()):
            raise CorruptCheckpoint(f"{paths[0]} does not hold tensors by name. Download it again.")
        return cast(dict[str, Tensor], found)
