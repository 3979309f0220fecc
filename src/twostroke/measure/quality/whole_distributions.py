"""A model that returns its distribution over the whole vocabulary at every position of a text.

It uses the engine's own loader, operators and KV storage, so K and V are read as they are stored. It has no scheduler:
a token's logits do not depend on the batch or on the chunks, so these are the bits that a server computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import is_quantized
from twostroke.config.load import DEFAULT_GROUP_SIZE
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.layers.row_split import RowSplit
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.loader import load_model
from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource
from twostroke.runner.key_means import center_keys
from twostroke.runner.kv_storage import KVStorage
from twostroke.sampling.logprobs import num_slice_rows
from twostroke.startup.preparation import Prepared, prepare

FLOAT32: Mapping[str, Any] = {"kernels": "reference", "dtype": "float32", "batch_invariant": False}
"""Settings of the model that the others are compared with."""

_CHUNK = 512
"""Tokens per pass."""


class FloatNumbers:
    """The numbers that a model's weights stand for, in float32; a WeightSource.

    Args:
        stored: the weights as they are. Those of a GGUF file are dequantized by ggml's formulas, without the rounding
            of scales that loading them for the kernels may bring.
    """

    def __init__(self, stored: WeightSource) -> None:
        self._stored = stored
        self.quantization = None
        self.weights = {
            name: StoredWeight(weight.shape, None, weight.is_by_rows) for name, weight in stored.weights.items()
        }

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self._stored.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """Return one weight in float32, whatever `dtype` says."""
        del dtype
        if isinstance(self._stored, GGUFWeights):
            return self._stored.read_numbers(name, rows)
        found = self._stored.read(name, torch.float32, rows)
        return found.dequantize() if isinstance(found, QuantizedWeight) else found.float()


class WholeDistributions:
    """A loaded model, scored window by window.

    Args:
        config: settings of the engine. Ranks are ignored: their bits are those of one process.
        context: tokens of the longest window.
        as_numbers: whether quantized weights become the float32 numbers that they stand for.
    """

    def __init__(self, config: EngineConfig, context: int, *, as_numbers: bool = False) -> None:
        prepared = prepare(config)
        self.vocab_size = prepared.config.vocab_size
        self._device = prepared.device
        self._model = load_model(
            FloatNumbers(prepared.weights) if as_numbers else prepared.weights,
            prepared.config,
            dtype=prepared.dtype,
            device=prepared.device,
            max_model_len=context,
            operators=prepared.operators,
            quantization=config.load.quantization,
            group_size=config.load.group_size or DEFAULT_GROUP_SIZE,
        )
        if is_quantized(prepared.kv_format):
            center_keys(self._model, prepared.tokenizer.encode, prepared.dtype, prepared.device, RowSplit())
        self._kv, self._block_tables = _storage(prepared, context)
        self._attention_layout = self._kv.attention_layout(self._model.num_heads)

    def log_probs(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """Yield log-probabilities of each scored position, a few rows at a time.

        Args:
            token_ids: of a window.
            first: index of the first token that is scored; 1 or more.

        Yields:
            float32 [rows, vocab_size]; all together one row for each of token_ids[first:].
        """
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
    return kv, [np.array([row], np.int32) for row in kv.rows_of_runs(context)]
