"""StoredRows: where the rows of a matrix lie in files, for a backend that packs them directly from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twostroke.kernels.quantized_weight import QuantizedFormat


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows of whole blocks of one ggml type, each anywhere in a file."""

    type_name: str
    """ggml's name of the block type."""
    format: QuantizedFormat
    """Format of the weight after reading."""
    files: npt.NDArray[np.int32]
    """[N]: descriptors of open files."""
    offsets: npt.NDArray[np.int64]
    """[N]: bytes from the start of the file."""
    check: Callable[[], None]
    """Raise CorruptCheckpoint if a file has changed; call it when all rows are read. It keeps the files open."""

    def select_rows(self, rows: slice) -> StoredRows:
        """Return the location of some of the rows."""
        return replace(self, files=self.files[rows], offsets=self.offsets[rows])

    @staticmethod
    def stack(parts: Sequence[StoredRows]) -> StoredRows | None:
        """Return the rows of several matrices, stacked; None if their types differ."""
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
