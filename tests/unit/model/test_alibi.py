"""ALiBi's slopes: transformers' numbers for every number of heads, and each rank those of its heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from held_tensors import tensors_of
from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.communicator.interface import SingleRank
from twostroke.config.layer_spec import alibi_slopes
from twostroke.kernels.dispatch import operators_for
from twostroke.layers.row_split import RowSplit
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_heads", [*range(1, 34), 40, 48, 56, 63, 64, 71, 96, 112, 128, 200])
def test_slopes_are_transformers(num_heads: int) -> None:
    theirs = _get_alibi_slopes(num_heads, CPU)  # powers of a base that is rounded first
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), theirs, rtol=1e-5, atol=0)


class OneOfSeveral(SingleRank):
    """A rank that is never asked to gather."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_a_rank_has_the_slopes_of_its_heads(num_ranks: int, tmp_path: Path) -> None:
    num_heads = 6
    naive_model.build(tmp_path, "Bloom", hidden_size=96, num_attention_heads=num_heads, num_hidden_layers=1)
    config, found = read_model_config(tmp_path), torch.empty(0)
    for rank in range(num_ranks):
        model = load_model(
            open_weights(tmp_path, config),
            config,
            Placement(
                operators_for(CPU, torch.bfloat16, "reference"),
                torch.bfloat16,
                CPU,
                64,
                RowSplit(OneOfSeveral(rank, num_ranks)),
            ),
        )
        own = [tensor for tensor in tensors_of(model, set()) if tensor.shape == (num_heads // num_ranks,)]
        found = torch.cat([found, *own])
    assert torch.equal(found, torch.tensor(alibi_slopes(num_heads)))


def test_far_keys_are_as_far_as_in_transformers(tmp_path: Path) -> None:
    """Twelve heads, over several partitions. Their side is in float64: it adds slopes times positions to scores."""
    num_tokens = 1000
    theirs = naive_model.build(tmp_path, "Bloom", hidden_size=96, num_attention_heads=12, num_hidden_layers=1)
    config = read_model_config(tmp_path)
    weights, operators = open_weights(tmp_path, config), operators_for(CPU, torch.float32)
    model = load_model(weights, config, Placement(operators, torch.float32, CPU, 1024))
    driver, token_ids = PagedDriver(model, num_blocks=80), [i * 7 % 199 for i in range(num_tokens)]
    found = driver.logits(driver.step([(driver.add(token_ids), num_tokens)])[0]).log_softmax(-1)
    expected = naive_model.logits(theirs.double(), token_ids).log_softmax(-1)
    assert (found - expected).abs().max().item() <= 1e-4
