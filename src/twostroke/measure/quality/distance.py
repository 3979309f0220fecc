"""Distance of a model's distributions from those of float32 arithmetic on the same weights.

The float32 distributions are computed once and kept in a temporary file, so that memory holds only a few rows of the
vocabulary at a time:

    float32       log p  ──>  file [positions, vocab_size]
    each format   log q  ──>  KL(p || q) = sum p (log p - log q),  argmax q = argmax p?,  -log q[next token]

DistributionModel is a model that returns its distribution over the whole vocabulary at every position of a text. It
uses the engine's own loader, operators and KV storage, so K and V are read as they are stored. It has no scheduler:
a token's logits do not depend on the batch or on the chunks, so its results equal a server's bit for bit.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import is_quantized
from twostroke.config.load import DEFAULT_GROUP_SIZE
from twostroke.errors import InvalidParameter
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.layers.attention import AttentionMetadata
from twostroke.layers.row_split import RowSplit
from twostroke.model.decoder import Placement
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.loader import load_model
from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource
from twostroke.runner.key_means import center_keys
from twostroke.runner.kv_storage import KVStorage
from twostroke.sampling.logprobs import num_slice_rows
from twostroke.startup.preparation import prepare
from twostroke.startup.prepared import Prepared

_GIB = 2**30

LogProbs = Callable[["Window"], Iterable[Tensor]]
"""Function that returns the log-probabilities of a window's scored positions, a few rows at a time: float32 [rows,
vocab_size]."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model reads in one pass, and the index from which they are scored."""

    token_ids: tuple[int, ...]
    first: int
    """Index of the first scored token; tokens before it are context."""

    @property
    def num_scored(self) -> int:
        """Number of scored tokens."""
        return len(self.token_ids) - self.first

    @property
    def scored(self) -> tuple[int, ...]:
        """The scored tokens."""
        return self.token_ids[self.first :]


@dataclass(slots=True)
class Distance:
    """Sums over positions of KL divergence, top-1 agreement and likelihood."""

    num_positions: int = 0
    kl_nats: float = 0.0
    max_kl: float = 0.0
    num_same_top: int = 0
    nll_nats: float = 0.0
    """Negative log-likelihood of the text, in nats."""
    float32_nats: float = 0.0
    """Negative log-likelihood of the text in float32, in nats."""

    def add(self, reference: Tensor, found: Tensor, token_ids: Sequence[int]) -> None:
        """Add some positions.

        Args:
            reference: log-probabilities of float32. [rows, vocab_size]
            found: log-probabilities of the measured model. [rows, vocab_size]
            token_ids: the text's next token of each row.
        """
        kl = (reference.exp() * (reference - found)).sum(-1, dtype=torch.float64).clamp_min(0.0)
        given = torch.tensor(token_ids)[:, None]
        self.num_positions += len(kl)
        self.kl_nats += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.num_same_top += int((reference.argmax(-1) == found.argmax(-1)).sum())
        self.nll_nats -= float(found.gather(-1, given).sum(dtype=torch.float64))
        self.float32_nats -= float(reference.gather(-1, given).sum(dtype=torch.float64))

    @property
    def mean_kl(self) -> float:
        """Mean Kullback-Leibler divergence from float32, in nats."""
        return self.kl_nats / self.num_positions

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same most likely token."""
        return self.num_same_top / self.num_positions

    @property
    def perplexity(self) -> float:
        """Perplexity of these positions."""
        return math.exp(self.nll_nats / self.num_positions)

    @property
    def float32_perplexity(self) -> float:
        """Perplexity of float32 at the same positions."""
        return math.exp(self.float32_nats / self.num_positions)

    @property
    def rise(self) -> float:
        """Rise of the perplexity over that of float32, as a share."""
        return self.perplexity / self.float32_perplexity - 1

    def as_json(self) -> dict[str, Any]:
        """Return the figures for a result."""
        return {
            "positions": self.num_positions,
            "mean_kl": self.mean_kl,
            "max_kl": self.max_kl,
            "top1_agreement": self.top1_agreement,
            "perplexity": self.perplexity,
            "float32_perplexity": self.float32_perplexity,
            "perplexity_rise": self.rise,
        }


class StoredDistributions:
    """File of log-probabilities: float32 [positions, vocab_size]."""

    def __init__(self, path: Path, num_positions: int, vocab_size: int) -> None:
        self._rows: npt.NDArray[np.float32] = np.memmap(path, np.float32, "w+", shape=(num_positions, vocab_size))

    def put(self, windows: Iterable[Window], log_probs: LogProbs) -> None:
        """Store the distributions of windows one after another."""
        at = 0
        for window in windows:
            for rows in log_probs(window):
                self._rows[at : at + len(rows)] = rows.cpu().numpy()
                at += len(rows)

    def distance(self, windows: Iterable[Window], log_probs: LogProbs) -> Distance:
        """Compare other distributions with those stored, for the same windows."""
        distance, at = Distance(), 0
        for window in windows:
            done = 0
            for rows in log_probs(window):
                reference = torch.from_numpy(np.array(self._rows[at : at + len(rows)]))
                distance.add(reference, rows.cpu(), window.scored[done : done + len(rows)])
                done, at = done + len(rows), at + len(rows)
            assert done == window.num_scored, f"{done} of {window.num_scored} positions"
        return distance


def first_positions(windows: Iterable[Window], most: int) -> list[Window]:
    """Return the windows that score the first `most` positions; the last one is shortened.

    >>> first_positions([Window((1, 2, 3), 1), Window((2, 3, 4, 5), 2)], 3)
    [Window(token_ids=(1, 2, 3), first=1), Window(token_ids=(2, 3, 4), first=2)]
    """
    found: list[Window] = []
    for window in windows:
        count = min(most, window.num_scored)
        if count <= 0:
            break
        found.append(Window(window.token_ids[: window.first + count], window.first))
        most -= count
    return found


@contextmanager
def stored_distributions(num_positions: int, vocab_size: int) -> Generator[tuple[StoredDistributions, Path]]:
    """Create a temporary file for the distributions of some positions; yield it and its folder.

    Raises:
        InvalidParameter: the folder for temporary files has too little free space.
    """
    with tempfile.TemporaryDirectory() as folder:
        needed, free = 4 * num_positions * vocab_size, shutil.disk_usage(folder).free
        if needed > free:
            raise InvalidParameter(
                "float32_positions",
                num_positions,
                f"takes {needed / _GIB:.1f} GiB of temporary files; {free / _GIB:.1f} are free",
                "Give fewer, or set TMPDIR to a larger disk.",
            )
        yield StoredDistributions(Path(folder) / "float32", num_positions, vocab_size), Path(folder)


FLOAT32: Mapping[str, Any] = {"kernels": "reference", "dtype": "float32", "batch_invariant": False}
"""Settings of the float32 model that the others are compared with."""

_CHUNK = 512
"""Tokens per pass."""


class Float32Weights:
    """Weights as float32 numbers, dequantized if necessary; a WeightSource.

    Args:
        stored: the stored weights. Those of a GGUF file are dequantized by ggml's formulas, without the rounding of
        scales that the kernels' format may add.
    """

    def __init__(self, stored: WeightSource) -> None:
        self._stored = stored
        self.quantization = None
        self.weights = {
            name: StoredWeight(weight.shape, None, weight.is_by_rows) for name, weight in stored.weights.items()
        }

    @property
    def path(self) -> Path:
        """Path of the folder or file."""
        return self._stored.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """Return one weight in float32; `dtype` is ignored."""
        del dtype
        if isinstance(self._stored, GGUFWeights):
            return self._stored.read_float32(name, rows)
        found = self._stored.read(name, torch.float32, rows)
        return found.dequantize() if isinstance(found, QuantizedWeight) else found.float()


class DistributionModel:
    """Loaded model that scores one window at a time.

    Args:
        config: settings of the engine; ranks are ignored, as they give the same bits as one process.
        context: tokens of the longest window.
        as_numbers: whether quantized weights are dequantized to float32.
    """

    def __init__(self, config: EngineConfig, context: int, *, as_numbers: bool = False) -> None:
        prepared = prepare(config)
        self.vocab_size = prepared.config.vocab_size
        self._device = prepared.device
        self._model = load_model(
            Float32Weights(prepared.weights) if as_numbers else prepared.weights,
            prepared.config,
            Placement(prepared.operators, prepared.dtype, prepared.device, context),
            quantization=config.load.quantization,
            group_size=config.load.group_size or DEFAULT_GROUP_SIZE,
        )
        if is_quantized(prepared.kv_format):
            center_keys(self._model, prepared.tokenizer.encode, prepared.dtype, prepared.device, RowSplit())
        self._kv, self._block_tables = _storage(prepared, context)
        self._attention_layout = self._kv.attention_layout(self._model.num_heads)

    def log_probs(self, window: Window) -> Iterator[Tensor]:
        """Yield the log-probabilities of each scored position, a few rows at a time.

        Args:
            window: a window whose first scored token has index 1 or more.

        Yields:
            float32 [rows, vocab_size]; one row for each scored token in total.
        """
        token_ids, first = window.token_ids, window.first
        end = len(token_ids) - 1  # the last token is only predicted
        slice_rows = num_slice_rows(self.vocab_size)
        for begin in range(0, end, _CHUNK):
            hidden = self._forward(token_ids[begin : min(end, begin + _CHUNK)], begin)
            scored = hidden[max(0, first - 1 - begin) :]
            for row in range(0, len(scored), slice_rows):
                logits = self._model.compute_logits(scored[row : row + slice_rows])
                yield logits.float().log_softmax(-1)

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[int], begin: int) -> Tensor:
        count = len(token_ids)
        attention = AttentionMetadata.build(
            query_start_loc=np.array([0, count], np.int32),
            seq_lens=np.array([begin + count], np.int32),
            block_tables=self._block_tables,
            layout=self._attention_layout,
            operators=self._model.attention,
        )
        input_ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(begin, begin + count, device=self._device)
        return self._model.forward(input_ids, positions, attention, self._kv)


def _storage(prepared: Prepared, context: int) -> tuple[KVStorage, list[np.ndarray[Any, np.dtype[np.int32]]]]:
    """Return the KV memory of one sequence, and its block table in each KV group."""
    layout = prepared.layout
    kv = KVStorage(layout, layout.run_blocks(context), prepared.device)
    return kv, [np.array([row], np.int32) for row in kv.contiguous_page_ids(context)]
