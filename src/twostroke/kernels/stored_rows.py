"""StoredRows: where the rows of a matrix lie in files, for a backend that packs them from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twostroke.kernels.quantized_weight import QuantizedFormat


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows of whole blocks of one of ggml's types, each anywhere in a file."""

    type_name: str
    """Of the blocks, as ggml names it."""
    format: QuantizedFormat
    """Of the weight that they become."""
    files: npt.NDArray[np.int32]
    """Descriptors of open files, [N]"""
    offsets: npt.NDArray[np.int64]
    """Bytes from the begin of the file, [N]"""
    check: Callable[[], None]
    """Call it when all are read: it raises CorruptCheckpoint where a file has changed. It keeps the files open."""

    def of_rows(self, rows: slice) -> StoredRows:
        """Return where some of the rows lie."""
        return replace(self, files=self.files[rows], offsets=self.offsets[rows])

    @staticmethod
    def stack(parts: Sequence[StoredRows]) -> StoredRows | None:
        """Return where the rows of several matrices lie, one under the other; None where they are of several types."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(part.type_name != first.type_name for part in parts):
            return None

        def check() -> None:
            for part in parts:
                part.check()

        files, offsets = (np.concatenate(found) for found in zip(*((p.files, p.offsets) for p in parts), strict=True))
        return StoredRows(first.type_name, first.format, files, offsets, check)
