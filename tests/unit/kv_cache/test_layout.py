"""The division of KV memory for published models: a table for each kind of layer, little waste, bytes as predicted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.claim import ReproduceOptions
from benchmarks.reproduce.skewed import skewed_workloads
from model_folders import write_tokenizer
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.model import ModelConfig
from twostroke.kv_cache.layout import MAX_WASTE, KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.model.checkpoint import read_model_config
from twostroke.planner.memory import plan_memory
from twostroke.runner.kv_storage import KVStorage
from twostroke.startup.preparation import prepare

FIXTURES = Path(__file__).parents[2] / "fixtures"
"""config.json of each size, see make.py of each family."""
DECISIONS = {
    "gemma3": "043-one-block-table-for-each-kind-of-layer.md",
    "gemma4": "044-pages-of-unlike-widths.md",
}
"""Their tables have the waste of each size."""
SIZES = {
    "gemma3/1b": (8, (16, 88)),
    "gemma3/4b": (8, (8, 48)),
    "gemma3/12b": (16, (16, 80)),
    "gemma3/27b": (16, (16, 80)),
    "gemma4/e2b": (16, (16, 32)),
    "gemma4/e4b": (8, (16, 40)),
    "gemma4/31b": (16, (16, 160)),
}
"""Tokens of a page, and of a block of window layers and of full ones, at the default block size."""


def config_of(size: str) -> ModelConfig:
    return read_model_config(FIXTURES / size)


def layout_of(size: str, block_size: int = 16) -> KVLayout:
    return KVLayout.of(config_of(size).kv_specs, block_size=block_size, kv_format="bf16")


@pytest.mark.parametrize("size", SIZES)
def test_gemma_has_a_block_table_for_each_kind_of_layer(size: str) -> None:
    config, layout = config_of(size), layout_of(size)
    assert len(layout.groups) == len(set(config.kv_specs)) == 2
    assert (layout.block_size, tuple(map(layout.tokens_per_block, layout.groups))) == SIZES[size]
    per_token = sum(2 * spec.num_kv_heads * spec.head_dim * 2 for spec in config.kv_specs)
    assert layout.bytes_per_token == per_token
    for group in layout.groups:
        filled = group.pages_per_block * layout.bytes_per_page(group)
        assert 0.94 * layout.bytes_per_block < filled <= layout.bytes_per_block


@pytest.mark.parametrize("size", SIZES)
def test_the_skewed_workload_wastes_little(size: str, tmp_path: Path) -> None:
    """Every request of it, from its prompt, computed in one step, to its last token."""
    layout = layout_of(size)
    workload = skewed_workloads(ReproduceOptions(traces=tmp_path))["imitated"]
    longest = workload.max_request_tokens
    kv = KVCacheManager(
        layout, layout.run_blocks(longest), CacheConfig(enable_prefix_caching=False), max_model_len=longest
    )
    allocated = filled = 0
    for request in workload.requests:
        num_prompt_tokens, start = len(request.prompt_token_ids), 0
        kv.admit("r", kv.find_cached((), num_prompt_tokens), 0)
        for end in range(num_prompt_tokens, num_prompt_tokens + request.max_tokens):
            assert kv.try_allocate("r", start, end) is not None
            usage, start = kv.usage(), end
            allocated, filled = allocated + usage.allocated_bytes, filled + usage.filled_bytes
        kv.free("r")
    waste = 1 - filled / allocated
    assert 0 < waste <= MAX_WASTE
    family, _, name = size.partition("/")
    decision = Path(__file__).parents[3] / "docs" / "decisions" / DECISIONS[family]
    row = next(line for line in decision.read_text().splitlines() if line.startswith(f"| {name.upper()} |"))
    assert row.endswith(f"| {100 * waste:.1f} % |"), f"{size}: {waste:.4f}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"block_size": 32, "kv_check_rate": 0.1}], ids=str)
def test_a_plan_is_what_is_allocated(size: str, options: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(FIXTURES / size / "config.json", tmp_path)
    write_tokenizer(tmp_path)
    given = {"model": str(tmp_path), "load_format": "dummy", "num_kv_blocks": 3000, "max_model_len": 512}
    config = EngineConfig.from_keywords(**given, **options)
    prepared = prepare(config)
    plan = plan_memory(prepared, 1 << 40)
    storage = KVStorage(prepared.layout, plan.num_blocks, torch.device("meta"), plan.num_scratch_blocks)
    assert plan.kv_bytes == storage.nbytes == (3000 + plan.num_scratch_blocks) * prepared.layout.bytes_per_block


def test_blocks_of_one_kind_of_layer_have_as_many_tokens_as_asked_for() -> None:
    spec = config_of("gemma3/1b").kv_specs[0]
    for block_size in (1, 16, 128):
        layout = KVLayout.of([spec] * 26, block_size=block_size, kv_format="bf16")
        assert (layout.block_size, layout.prefix_tokens, layout.tokens_per_block(layout.groups[0])) == (block_size,) * 3


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("size", SIZES)
def test_every_block_size_is_divided(size: str, block_size: int) -> None:
    layout = layout_of(size, block_size)
    assert block_size % layout.block_size == 0
    assert layout.prefix_tokens <= 24 * block_size
    for num_blocks in (0, 1, 2, 100):
        capacity = layout.capacity_tokens(num_blocks)
        assert layout.run_blocks(capacity) <= num_blocks < layout.run_blocks(capacity + 1)
