"""Changes of logits before temperature, in the order that SamplingParams documents.

Each function changes a few entries of a few rows in place. Entries are addressed by their index in the flattened [R *
V] tensor, so one gather and one scatter handle all rows together. No entry is computed from another row's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twostroke.kernels.memory import send
from twostroke.sampling.rowwise import keep_set_bits_
from twostroke.sampling.state import SamplingState


def process_logits(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias and penalties.

    logits: float32 [R, V], changed.
    """
    _keep_grammatical(logits, states)
    _keep_allowed(logits, states)
    _forbid(logits, states)
    _add_bias(logits, states)
    _penalise(logits, states)


def _flat_indices(logits: Tensor, rows: Sequence[int], ids: Sequence[np.ndarray | Sequence[int]]) -> Tensor:
    """Return the indices of each row's token ids in logits.view(-1). int64 [total number of ids]."""
    vocab_size = logits.shape[1]
    parts = [np.asarray(row_ids, np.int64) + row * vocab_size for row, row_ids in zip(rows, ids, strict=True)]
    return send(np.concatenate(parts), logits.device)


def _keep_grammatical(logits: Tensor, states: Sequence[SamplingState]) -> None:
    for row, state in enumerate(states):
        if state.constraint is not None:
            keep_set_bits_(logits[row], state.constraint.bits)


def _keep_allowed(logits: Tensor, states: Sequence[SamplingState]) -> None:
    allowed = {row: ids for row, state in enumerate(states) if (ids := state.rules.allowed_ids) is not None}
    if not allowed:
        return
    rows = list(allowed)
    indices = _flat_indices(logits, rows, list(allowed.values()))
    flat = logits.view(-1)
    kept = flat.index_select(0, indices)
    logits.index_fill_(0, send(np.array(rows), logits.device), -torch.inf)
    flat.index_copy_(0, indices, kept)


def _forbid(logits: Tensor, states: Sequence[SamplingState]) -> None:
    forbidden = {row: ids for row, state in enumerate(states) if len(ids := state.forbidden_ids())}
    if forbidden:
        indices = _flat_indices(logits, list(forbidden), list(forbidden.values()))
        logits.view(-1).index_fill_(0, indices, -torch.inf)


def _add_bias(logits: Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if len(state.rules.bias_ids)]
    if not rows:
        return
    indices = _flat_indices(logits, rows, [states[row].rules.bias_ids for row in rows])
    values = np.concatenate([states[row].rules.bias_values for row in rows])
    flat = logits.view(-1)
    biased = flat.index_select(0, indices).add_(send(values, logits.device))
    flat.index_copy_(0, indices, biased)


def _penalise(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply repetition, frequency and presence penalties.

    The repetition penalty is that of Keskar et al., "CTRL", 2019, section 4.1; its sign rule is Hugging Face's.
    """
    penalised = {row: counts for row, state in enumerate(states) if (counts := state.counts) and len(counts.ids)}
    if not penalised:
        return
    rows = list(penalised)
    indices = _flat_indices(logits, rows, [counts.ids for counts in penalised.values()])
    lens = [len(counts.ids) for counts in penalised.values()]
    params = [states[row].rules.params for row in rows]

    def per_entry(values: list[float]) -> Tensor:
        return send(np.repeat(np.array(values, np.float32), lens), logits.device)

    counts = send(np.concatenate([counts.counts for counts in penalised.values()]), logits.device)
    repetition = per_entry([p.repetition_penalty for p in params])
    flat = logits.view(-1)
    values = flat.index_select(0, indices)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_entry([p.frequency_penalty for p in params]) * counts
    values -= per_entry([p.presence_penalty for p in params]) * (counts > 0)
    flat.index_copy_(0, indices, values)
