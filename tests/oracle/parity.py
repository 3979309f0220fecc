"""One model, ours and transformers': the check that parity tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from oracle import naive_model
from oracle.paged_driver import DrivenRequest, PagedDriver
from twostroke.config.load import Kernels
from twostroke.kernels.dispatch import operators_for
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights

MAX_LOGPROB_ERROR = 1e-4
MAX_LAYER_ERROR = 2e-5
"""Largest error of a layer's output in float32, as a share of its largest element."""


def check_parity(
    folder: Path,
    kind: str,
    changes: dict[str, Any],
    *,
    seed: int,
    prompt_lens: list[int],
    num_decode: int,
    kernels: Kernels = "auto",
) -> None:
    """Prefill in one pass and in chunks, then greedy decoding in one mixed batch, each against one pass of theirs."""
    rng = np.random.default_rng(seed)
    theirs = naive_model.build(folder, kind, seed, **changes)
    cpu = torch.device("cpu")
    operators = operators_for(cpu, torch.float32, kernels)
    config = read_model_config(folder)
    model = load_model(open_weights(folder, config), config, Placement(operators, torch.float32, cpu, 1024))
    driver = PagedDriver(model, num_blocks=400, block_size=int(2 ** rng.integers(0, 7)) if seed else 16, seed=seed)
    requests: list[DrivenRequest] = []
    ours: list[list[torch.Tensor]] = []
    for prompt_len in prompt_lens:
        prompt = rng.integers(0, model.config.vocab_size, prompt_len).tolist()
        whole = driver.add(prompt)
        one_pass = driver.step([(whole, prompt_len)])[0]
        driver.free(whole)
        request = driver.add(prompt)
        chunks = []
        while request.num_computed < prompt_len:
            num_tokens = int(rng.integers(1, prompt_len - request.num_computed + 1))
            chunks.append(driver.step([(request, num_tokens)])[0])
        assert torch.equal(torch.cat(chunks), one_pass), "chunks change bits"
        requests.append(request)
        ours.append([driver.logits(one_pass)])
    for _ in range(num_decode):
        for request, logits in zip(requests, ours, strict=True):
            request.token_ids.append(int(logits[-1][-1].argmax()))
        hidden = torch.cat(driver.step([(request, 1) for request in requests]))
        for logits, row in zip(ours, driver.logits(hidden), strict=True):
            logits.append(row[None])
    for request, logits in zip(requests, ours, strict=True):
        expected = naive_model.logits(theirs, request.token_ids)
        found = torch.cat(logits)
        error = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
        assert error <= MAX_LOGPROB_ERROR, error
        num_prompt = len(request.token_ids) - num_decode
        assert expected[num_prompt - 1 : -1].argmax(-1).tolist() == request.token_ids[num_prompt:]


def check_layers(
    folder: Path, kind: str, changes: dict[str, Any], *, chunks: list[int], kernels: Kernels = "auto"
) -> None:
    """Compare every layer's output of a prompt and of decoded tokens, from paged KV, with one pass of transformers.

    Args:
        folder: folder for the model.
        kind: architecture by transformers' name.
        changes: changes of its configuration.
        chunks: tokens of each step; those of one token are decodes.
        kernels: our kernels.
    """
    theirs = naive_model.build(folder, kind, **changes)
    cpu = torch.device("cpu")
    config = read_model_config(folder)
    model = load_model(
        open_weights(folder, config),
        config,
        Placement(operators_for(cpu, torch.float32, kernels), torch.float32, cpu, 1024),
    )
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, sum(chunks)).tolist()
    driver = PagedDriver(model)
    request = driver.add(token_ids)
    steps = [driver.layer_outputs(request, num_tokens) for num_tokens in chunks]
    expected = naive_model.layer_outputs(theirs, token_ids)
    assert len(expected) == config.num_layers + 2
    for place, theirs_there in enumerate(expected):
        ours = torch.cat([step[place] for step in steps])
        error = ((ours - theirs_there).abs().max() / theirs_there.abs().max()).item()
        assert error <= MAX_LAYER_ERROR, f"hidden state {place}: off by {error:.2g} of the largest element"
