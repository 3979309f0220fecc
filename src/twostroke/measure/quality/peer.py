"""Distance of llama.cpp from float32 on the same GGUF file and text, for comparison with ours.

llama.cpp runs in the environment that the user names, driven as in `benchmarks compare`, with the same token ids. It
writes the logits of a window to a temporary file, of which this module reads a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.errors import InvalidParameter
from twostroke.measure.peers.peer import LLAMA_CPP, PeerFailed, PeerProcess
from twostroke.measure.quality.distance import Distance, StoredDistributions, Window
from twostroke.sampling.logprobs import num_slice_rows

KV_TYPES = {"kv_cache_dtype=int8": "q8_0", "kv_cache_dtype=int4": "q4_0"}
"""Nearest type of K and V in llama.cpp for each of our configurations."""

_ANSWER_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Figures of llama.cpp with one type of K and V, or the reason why there are none."""

    name: str
    about: dict[str, str]
    distance: Distance | None
    failure: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry for a result file."""
        found = None if self.distance is None else self.distance.as_json()
        return {"about": self.about, "failure": self.failure, "against_float32": found}


def interpreter_of(env: Sequence[str]) -> Path | None:
    """Return the Python of llama.cpp's environment; None if none was given.

    Raises:
        InvalidParameter: another engine is named, the form is not NAME=INTERPRETER, or there is no such file.
    """
    found: Path | None = None
    for pair in env:
        name, _, interpreter = pair.partition("=")
        if name != LLAMA_CPP.name or not interpreter:
            limit = f"must be {LLAMA_CPP.name}=INTERPRETER: no other engine can return all logits here"
            raise InvalidParameter("env", pair, limit)
        found = Path(interpreter).expanduser().absolute()
        if not found.is_file():
            raise InvalidParameter("env", pair, "names no file", "Give the environment's python.")
    return found


@dataclass(frozen=True, slots=True)
class PeerScorer:
    """Scorer of windows that runs llama.cpp."""

    interpreter: Path
    model: Path
    threads: int
    vocab_size: int
    folder: Path
    """Folder for the logits of a window."""

    def row(self, windows: Sequence[Window], kept: StoredDistributions, kv_type: str | None) -> PeerRow:
        """Score all windows with one type of K and V (None: llama.cpp's default)."""
        name = LLAMA_CPP.name if kv_type is None else f"{LLAMA_CPP.name}, KV {kv_type}"
        about: dict[str, str] = {}
        process: PeerProcess | None = None
        try:
            process = PeerProcess(LLAMA_CPP, self.interpreter)
            about = process.load(self._order(windows, kv_type), _ANSWER_LIMIT_S)
            distance = kept.distance(windows, partial(self._log_probs, process))
        except PeerFailed as failure:
            why = str(failure).replace(str(self.model), self.model.name)
            return PeerRow(name, about, None, why.replace(str(self.interpreter), self.interpreter.name))
        finally:
            if process is not None:
                process.close()
        return PeerRow(name, about, distance)

    def _order(self, windows: Sequence[Window], kv_type: str | None) -> dict[str, Any]:
        longest = max(len(window.token_ids) for window in windows)
        return {
            "model": str(self.model),
            "precision": "as it is",
            "activation_quantization": None,
            "threads": self.threads,
            "max_model_len": longest,
            "max_num_seqs": 1,
            "kv_cache_dtype": kv_type,
        }

    def _log_probs(self, process: PeerProcess, window: Window) -> Iterator[Tensor]:
        path = self.folder / "logits"
        num_rows = process.score(window.token_ids, window.first, path, _ANSWER_LIMIT_S)
        try:
            if path.stat().st_size != 4 * num_rows * self.vocab_size or num_rows != window.num_scored:
                raise PeerFailed(
                    f"it wrote {path.stat().st_size} bytes of logits for {window.num_scored} x {self.vocab_size}"
                )
            logits = np.memmap(path, np.float32, "r", shape=(num_rows, self.vocab_size))
            step = num_slice_rows(self.vocab_size)
            for begin in range(0, num_rows, step):
                yield torch.from_numpy(np.array(logits[begin : begin + step])).log_softmax(-1)
        finally:
            path.unlink(missing_ok=True)
