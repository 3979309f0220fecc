"""Frozen model that computes the final hidden states of a text, with the package's own kernels."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from twostroke.config.kv_format import resolve_kv_format
from twostroke.kernels.dispatch import operators_for
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.attention import AttentionMetadata
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.loader import load_model
from twostroke.model.model_files import ModelFiles
from twostroke.runner.kv_storage import KVStorage

_BLOCK_SIZE = 16


class Backbone:
    """Runner of equally long windows on the CPU, each with its own KV blocks.

    Args:
        files: the model.
        window: tokens of a window.
        max_windows: most windows in one pass.
        threads: of the operators; default: the processors that this process may use.
    """

    def __init__(self, files: ModelFiles, window: int, max_windows: int, threads: int | None = None) -> None:
        config = files.config().fixed_for(window)
        self._device, self.dtype = torch.device("cpu"), getattr(torch, config.dtype)
        operators = operators_for(self._device, self.dtype)
        operators.set_num_threads(threads or _usable_processors())
        self._model: DecoderModel = load_model(
            files.weights(config, None), config, Placement(operators, self.dtype, self._device, window)
        )
        layout = KVLayout.of(config.kv_specs, block_size=_BLOCK_SIZE, kv_format=resolve_kv_format("auto", config.dtype))
        self._num_blocks = layout.run_blocks(window)
        self._kv = KVStorage(layout, self._num_blocks * max_windows, self._device)
        self._longest = window
        self._attention_layout = self._kv.attention_layout(self._model.num_heads)
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        # The head's output for unit vectors is its matrix, whatever its storage format.
        head = self._model.compute_logits(torch.eye(self.hidden_size, dtype=self.dtype)).mT
        self.output_head = head.clone().to(self.dtype)  # a copy for the same reason as in `states`

    def states(self, token_ids: Tensor) -> Tensor:
        """Return the final-normed states of windows [n, T] int64: [n, T, H]."""
        num_windows, length = token_ids.shape
        firsts = range(0, num_windows * self._num_blocks, self._num_blocks)
        rows = [self._kv.contiguous_page_ids(self._longest, first) for first in firsts]
        tables = [np.array(of_group, np.int32) for of_group in zip(*rows, strict=True)]
        attention = AttentionMetadata.build(
            query_start_loc=np.arange(num_windows + 1, dtype=np.int32) * length,
            seq_lens=np.full(num_windows, length, np.int32),
            block_tables=tables,
            layout=self._attention_layout,
            operators=self._model.attention,
        )
        positions = torch.arange(length).repeat(num_windows)
        hidden = self._model.forward(token_ids.reshape(-1), positions, attention, self._kv)
        # a copy, because inference tensors cannot take part in a computation with gradients
        return hidden.clone().view(num_windows, length, -1)


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
