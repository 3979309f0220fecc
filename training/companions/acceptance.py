"""Acceptance of drafts by position, on the held-out modules.

A position is drawn from a held-out module. The target reads the text before it and generates one token, which needs no
draft, and five more, which a companion has to draft. A draft counts only if all drafts before it were accepted, so
every companion may be given the target's own tokens.  B is the batch, C the context, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from training.companions.draft import Draft
from training.companions.eagle import Eagle
from training.companions.medusa import Medusa
from training.companions.target import Target
from training.model import KVCache
from training.train import Tokens

NUM_DRAFTS = 5
CONTEXT = 512
TEMPERATURE = 0.8

Choice = Callable[[Tensor, int], Tensor]
"""Function from logits [B, V] and the index of the token (0 is the one without a draft) to tokens [B]."""


@dataclass(frozen=True)
class Passage:
    """A context and the target's continuation."""

    context: Tensor
    """Token ids of the context, [B, C]."""
    features: Tensor
    """Inputs of EAGLE's layers, [B, C, 3H]."""
    normed: Tensor
    """State after the final norm at the last position of the context, [B, H]."""
    written: Tensor
    """The target's own tokens, [B, 1 + NUM_DRAFTS]."""
    exits: dict[int, Tensor]
    """Logits of the early exits for the drafts, [B, NUM_DRAFTS, V]."""


def shared_noise(seed: int, batch: int, vocab_size: int) -> Tensor:
    """Return Gumbel noise per position and token, shared by target and drafters: [B, 1 + NUM_DRAFTS, V]."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(batch, 1 + NUM_DRAFTS, vocab_size, generator=generator).clamp(1e-10, 1.0 - 1e-7)
    return -(-uniform.log()).log()


def write(target: Target, context: Tensor, choose: Choice) -> Passage:
    """Generate the target's continuation, one token at a time."""
    depth, head = target.config.num_hidden_layers, target.model.head
    cache: KVCache = []
    states = target.model.hidden_states(context, target.dtype, cache)
    features = torch.cat([states[n] for n in target.layers], dim=-1)
    normed = target.model.model.norm(states[depth][:, -1])
    written = [choose(head(states[depth][:, -1]), 0)]
    exits: dict[int, list[Tensor]] = {n: [] for n in target.exits}
    for i in range(1, NUM_DRAFTS + 1):
        states = target.model.hidden_states(written[-1][:, None], target.dtype, cache)
        written.append(choose(head(states[depth][:, -1]), i))
        for n in target.exits:
            exits[n].append(head(states[n][:, -1]))
    return Passage(
        context, features, normed, torch.stack(written, 1), {n: torch.stack(rows, 1) for n, rows in exits.items()}
    )


def drafts_of_model(draft: Draft, passage: Passage, choose: Choice) -> Tensor:
    """Return the draft model's drafts [B, NUM_DRAFTS], each given the target's tokens before it."""
    tokens = torch.cat((passage.context, passage.written[:, :-1]), dim=1)
    logits = draft.llama(tokens)[:, -NUM_DRAFTS:]
    return torch.stack([choose(logits[:, i], i + 1) for i in range(NUM_DRAFTS)], 1)


def drafts_of_heads(medusa: Medusa, passage: Passage, choose: Choice) -> Tensor:
    """Return the heads' drafts [B, heads], all from the last state of the context."""
    rows = [F.linear(medusa.heads(passage.normed, i), medusa.output) for i in range(len(medusa.weights))]
    return torch.stack([choose(logits, i + 1) for i, logits in enumerate(rows)], 1)


def drafts_of_eagle(eagle: Eagle, passage: Passage, choose: Choice) -> Tensor:
    """Return EAGLE's drafts [B, NUM_DRAFTS], computed on its own states, within its draft vocabulary."""
    tokens = torch.cat((passage.context, passage.written), dim=1)[:, : CONTEXT + NUM_DRAFTS]
    found = []
    for i, states in enumerate(eagle.unroll(passage.features, tokens, NUM_DRAFTS)):
        logits = eagle.eagle.lm_head(states[:, -1])
        wide = torch.full((len(logits), eagle.config.vocab_size), float("-inf"))
        found.append(choose(wide.index_copy(1, eagle.chosen, logits), i + 1))
    return torch.stack(found, 1)


def drafts(companions: dict[str, Draft | Medusa | Eagle], passage: Passage, choose: Choice) -> dict[str, Tensor]:
    """Return the drafts [B, drafts] of each companion, and of the target's early exits."""
    found: dict[str, Tensor] = {}
    for name, companion in companions.items():
        if isinstance(companion, Draft):
            found[name] = drafts_of_model(companion, passage, choose)
        elif isinstance(companion, Medusa):
            found[name] = drafts_of_heads(companion, passage, choose)
        else:
            found[name] = drafts_of_eagle(companion, passage, choose)
    for depth, logits in passage.exits.items():
        found[f"exit_{depth}"] = torch.stack([choose(logits[:, i], i + 1) for i in range(NUM_DRAFTS)], 1)
    return found


def draw_contexts(documents: list[Tokens], count: int, seed: int) -> Tensor:
    """Return ``count`` contexts [count, C], each before a different position of the documents."""
    places = [(d, p) for d, document in enumerate(documents) for p in range(CONTEXT, len(document))]
    chosen = np.random.default_rng(seed).permutation(len(places))[:count]
    rows = [documents[places[i][0]][places[i][1] - CONTEXT : places[i][1]].astype(np.int64) for i in chosen]
    return torch.from_numpy(np.stack(rows))


def shares(stood: Tensor) -> dict[str, list[float] | list[int] | float]:
    """Return the acceptance at each position, given that all drafts before it were accepted.

    ``stood`` [N, drafts] says whether the draft equals the target's token.
    """
    until = stood.long().cumprod(1)
    given = [len(stood), *until.sum(0).tolist()]
    return {
        "share": [after / max(before, 1) for before, after in pairwise(given)],
        "given": given[:-1],
        "tokens_a_pass": 1.0 + until.sum(1).float().mean().item(),
    }


@torch.no_grad()
def measure(
    target: Target,
    companions: dict[str, Draft | Medusa | Eagle],
    documents: list[Tokens],
    count: int,
    seed: int,
    batch: int = 16,
) -> dict[str, dict[str, dict[str, list[float] | list[int] | float]]]:
    """Measure greedy, and sampled with the same noise for target and drafters; return mode -> companion -> figures."""
    stood: dict[str, dict[str, list[Tensor]]] = {"greedy": {}, "sampled": {}}
    parts = draw_contexts(documents, count, seed).split(batch)
    for number, context in enumerate(tqdm(parts, desc="acceptance")):
        noise = shared_noise(seed + number, len(context), target.config.vocab_size)
        choices: dict[str, Choice] = {
            "greedy": lambda logits, i: logits.argmax(-1),
            "sampled": lambda logits, i, noise=noise: (logits / TEMPERATURE + noise[:, i]).argmax(-1),
        }
        for mode, choose in choices.items():
            passage = write(target, context, choose)
            for name, guesses in drafts(companions, passage, choose).items():
                right = passage.written[:, 1 : 1 + guesses.shape[1]]
                stood[mode].setdefault(name, []).append(guesses == right)
    return {mode: {name: shares(torch.cat(rows)) for name, rows in by.items()} for mode, by in stood.items()}
