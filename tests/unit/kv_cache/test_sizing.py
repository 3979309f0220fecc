"""The start-up arithmetic: exact, monotone, and never a default that does not fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factories import uniform_layout
from model_folders import SHAPES
from twostroke.config.cache import CacheConfig
from twostroke.config.kv_format import KVFormat
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import DoesNotFit
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.sizing import FreeMemory, KVDemand, KVSizing, blocks_of_request, size_kv_cache
from twostroke.model.checkpoint import read_model_config
from twostroke.runner.kv_storage import KVStorage
from twostroke.scheduler.scheduler import Scheduler

LAYOUT = uniform_layout([None] * 4, block_size=16, num_kv_heads=2, head_dim=8, kv_format="bf16")
PER_BLOCK = 4 * 16 * 2 * 2 * 8 * 2


def size(layout: KVLayout = LAYOUT, config: CacheConfig | None = None, **given: int | None) -> KVSizing:
    arguments: dict[str, Any] = {
        "max_model_len": None,
        "model_context": 4096,
        "max_tokens_per_step": 512,
    } | {name: value for name, value in given.items() if not name.endswith("_bytes")}
    memory: dict[str, Any] = {"free_bytes": 1 << 30, "step_bytes": 0, "context_bytes": 0}
    memory |= {name: value for name, value in given.items() if name in memory}
    beside = arguments.pop("bytes_beside_block", 0)
    return size_kv_cache(layout, config or CacheConfig(), KVDemand(**arguments), FreeMemory(**memory), beside)


@pytest.mark.parametrize("family", SHAPES)
def test_predicted_bytes_are_allocated_bytes(family: str, random_models: dict[str, Path]) -> None:
    model = read_model_config(random_models[family])
    layout = KVLayout.of(model.kv_specs, block_size=16, kv_format="f32")
    sizing = size(layout, CacheConfig(num_kv_blocks=200), model_context=640)
    storage = KVStorage(layout, sizing.num_blocks, torch.device("cpu"))
    assert storage.nbytes == sizing.kv_bytes == 200 * layout.bytes_per_block
    # 2 x layers x KV heads x head_dim x bytes, K and V: the formula with the factor that is often forgotten
    per_token = 2 * sum(spec.num_kv_heads * spec.head_dim for spec in model.kv_specs) * 4
    assert layout.bytes_per_token == per_token
    assert len(layout.groups) == len(set(model.kv_specs))
    widths = [2 * group.spec.num_kv_heads * group.spec.head_dim * 4 * len(group.layer_ids) for group in layout.groups]
    filled = [width * group.pages_per_block for width, group in zip(widths, layout.groups, strict=True)]
    assert layout.bytes_per_block == max(filled) * layout.block_size


@pytest.mark.parametrize("config", [{"num_kv_blocks": 300}, {"kv_cache_memory": 300 * PER_BLOCK}, {}], ids=str)
def test_the_self_check_has_a_block_of_its_own_in_each_group_and_room_for_bad_ones(config: dict[str, int]) -> None:
    windows = [None, None, 64, 64]
    layout = uniform_layout(windows, block_size=16, num_kv_heads=2, head_dim=8, kv_format="bf16")
    plain, checked = (
        size(layout, CacheConfig(**config, kv_check_rate=rate), free_bytes=600 * layout.bytes_per_block)
        for rate in (0, 0.01)
    )
    assert (plain.num_scratch_blocks, checked.num_scratch_blocks) == (0, 2)
    storage = KVStorage(layout, checked.num_blocks, torch.device("cpu"), checked.num_scratch_blocks)
    assert storage.nbytes == checked.kv_bytes
    if "num_kv_blocks" in config:
        assert (checked.num_blocks, checked.kv_bytes) == (300, 302 * layout.bytes_per_block)
    else:  # the same memory, and two blocks of it are not for requests
        assert (plain.num_blocks - checked.num_blocks, plain.kv_bytes) == (2, checked.kv_bytes)
    longest = layout.peak_blocks(checked.max_model_len, 512)
    assert checked.num_blocks - longest >= 2 >= len(layout.groups)


def test_with_the_self_check_the_named_remedy_works() -> None:
    config = CacheConfig(num_kv_blocks=100, kv_check_rate=1.0)
    with pytest.raises(DoesNotFit, match="--kv-check-rate may take 1 out of use") as refused:
        size(config=config, max_model_len=1600)
    numbers = re.search(r"--max-model-len (\d+) or less, or give more with --num-kv-blocks (\d+)", str(refused.value))
    assert numbers is not None
    assert size(config=config, max_model_len=int(numbers[1])).num_blocks == 100
    enough = CacheConfig(num_kv_blocks=int(numbers[2]), kv_check_rate=1.0)
    assert size(config=enough, max_model_len=1600).max_model_len == 1600


def test_quantized_kv_holds_more_tokens_in_equal_bytes() -> None:
    def num_blocks(kv_format: KVFormat) -> int:
        layout = uniform_layout([None] * 4, block_size=16, num_kv_heads=2, head_dim=128, kv_format=kv_format)
        return size(layout, CacheConfig(kv_cache_memory=1 << 29)).num_blocks

    assert num_blocks("int8") / num_blocks("bf16") == pytest.approx(1.94, abs=0.01)
    assert num_blocks("int4") / num_blocks("bf16") == pytest.approx(3.76, abs=0.01)


def test_default_takes_half_of_what_is_free() -> None:
    sizing = size(free_bytes=1000 * PER_BLOCK)
    assert sizing.num_blocks == 500
    assert sizing.max_model_len == 4096
    assert sizing.full_length_requests == 500 // 256
    assert sizing.remarks == ()


@pytest.mark.parametrize("seqs", [1, 3])
def test_default_takes_no_more_than_twice_what_all_requests_can_use(seqs: int) -> None:
    """Half of 10,000 blocks is free; a request of 4096 tokens uses 256."""
    capped = size(free_bytes=10_000 * PER_BLOCK, max_num_seqs=seqs)
    assert capped.num_blocks == 2 * seqs * 256
    assert capped.kv_bytes == capped.num_blocks * PER_BLOCK
    requests = "1 request" if seqs == 1 else "3 requests"
    words = f"twice what {requests} of 4,096 tokens can use; the second half holds cached prefixes"
    assert capped.limit == words
    assert capped.full_length_requests == 2 * seqs
    alone = size(config=CacheConfig(enable_prefix_caching=False), free_bytes=10_000 * PER_BLOCK, max_num_seqs=seqs)
    assert (alone.num_blocks, alone.limit) == (seqs * 256, f"what {requests} of 4,096 tokens can use")
    shorter = size(free_bytes=10_000 * PER_BLOCK, max_num_seqs=seqs, max_model_len=100)
    assert shorter.num_blocks == 2 * seqs * 7


def test_memory_that_is_short_or_given_is_not_bounded() -> None:
    assert size(free_bytes=1000 * PER_BLOCK, max_num_seqs=64) == size(free_bytes=1000 * PER_BLOCK)
    for config in (CacheConfig(num_kv_blocks=4000), CacheConfig(kv_cache_memory=4000 * PER_BLOCK)):
        given = size(config=config, free_bytes=10_000 * PER_BLOCK, max_num_seqs=1)
        assert (given.num_blocks, given.limit) == (4000, "")


@given(
    windows=st.lists(st.sampled_from([None, 20, 64]), min_size=1, max_size=6),
    seqs=st.integers(1, 8),
    rate=st.sampled_from([0, 0.5]),
    keeps=st.booleans(),
    reservation=st.sampled_from(["paged", "contiguous"]),
)
def test_the_bound_leaves_every_request_its_room(
    windows: list[int | None], seqs: int, rate: float, keeps: bool, reservation: Literal["paged", "contiguous"]
) -> None:
    layout = uniform_layout(windows, block_size=16, num_kv_heads=1, head_dim=4, kv_format="bf16")
    keeps = (keeps or rate > 0) and reservation == "paged"
    rate = rate if keeps else 0
    config = CacheConfig(kv_check_rate=rate, enable_prefix_caching=keeps, kv_reservation=reservation)
    sizing = size(layout, config, model_context=900, free_bytes=1 << 34, max_num_seqs=seqs)
    assert (sizing.max_model_len, sizing.remarks) == (900, ())
    out_of_use = max(len(layout.groups), sizing.num_blocks // 128) if rate else 0
    needed = seqs * blocks_of_request(layout, config, 900, 512)
    assert sizing.num_blocks - out_of_use >= (2 if keeps else 1) * needed


def test_default_context_is_shortened_to_fit_and_says_so() -> None:
    sizing = size(free_bytes=200 * PER_BLOCK)
    assert sizing.max_model_len == 100 * 16
    assert "4096 -> 1600" in sizing.remarks[0]


@pytest.mark.parametrize(
    ("config", "wishes", "words"),
    [
        (CacheConfig(), {"max_model_len": 4096, "free_bytes": 200 * PER_BLOCK}, "--max-model-len 1600"),
        (CacheConfig(), {"max_model_len": 5000}, "context of 4096"),
        (CacheConfig(kv_cache_memory=1 << 31), {}, "are free"),
        (CacheConfig(kv_cache_memory=100), {}, "holds no block"),
        (CacheConfig(num_kv_blocks=1 << 20), {}, r"are free.* Use --num-kv-blocks \d+, or leave it out"),
        (CacheConfig(), {"free_bytes": 100}, "one KV block takes"),
        (CacheConfig(kv_cache_memory=1 << 30), {"step_bytes": 1}, "- 1 for the activations of the largest step"),
        (CacheConfig(kv_cache_memory=1 << 30), {"context_bytes": 1}, "- 1 for the tables of the longest request"),
        (CacheConfig(), {"free_bytes": 1 << 20, "context_bytes": 1 << 20}, "--max-model-len"),
        (CacheConfig(), {"free_bytes": 1 << 20, "step_bytes": 1 << 20}, "--max-num-batched-tokens"),
    ],
)
def test_an_explicit_size_that_cannot_be_had_is_refused(
    config: CacheConfig, wishes: dict[str, int], words: str
) -> None:
    with pytest.raises(DoesNotFit, match=words):
        size(config=config, **wishes)


@given(
    windows=st.lists(st.sampled_from([None, 20, 64]), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16, 128]),
    num_blocks=st.integers(1, 400),
    step=st.integers(1, 600),
)
def test_if_a_length_fits_every_shorter_one_does(
    windows: list[int | None], block_size: int, num_blocks: int, step: int
) -> None:
    layout = uniform_layout(windows, block_size=block_size, num_kv_heads=1, head_dim=4, kv_format="bf16")
    config = CacheConfig(block_size=block_size, num_kv_blocks=num_blocks)
    try:
        sizing = size(layout, config, model_context=900, max_tokens_per_step=step)
    except DoesNotFit:
        assert layout.peak_blocks(2, step) > num_blocks
        return
    longest = sizing.max_model_len
    peaks = [layout.peak_blocks(n, step) for n in range(1, 901)]
    assert peaks == sorted(peaks)
    assert peaks[longest - 1] <= num_blocks
    assert longest == 900 or peaks[longest] > num_blocks
    with_wish = dataclasses.replace(config)
    assert size(layout, with_wish, model_context=900, max_tokens_per_step=step, max_model_len=max(2, longest // 2))


def test_advice_for_too_little_memory_can_be_followed() -> None:
    layout = uniform_layout([None, 8], block_size=1, num_kv_heads=1, head_dim=4, kv_format="bf16")
    for blocks in (1, 2, 3):
        with pytest.raises(DoesNotFit, match=r"Not even 2 tokens fit.* need 4 blocks.*--max-model-len 2") as error:
            size(layout, CacheConfig(block_size=1, num_kv_blocks=blocks))
        assert "--max-model-len 1 " not in str(error.value)
        assert "at least --num-kv-blocks 4 with" in str(error.value)
        assert "--kv-cache-memory" not in str(error.value)
    enough = CacheConfig(block_size=1, kv_cache_memory=4 * layout.bytes_per_block)
    assert size(layout, enough, max_model_len=2).max_model_len == 2


def test_contiguous_runs_are_sized_as_the_scheduler_will_ask_for_them() -> None:
    """Windows save nothing there: a run holds every group's whole table."""
    layout = uniform_layout([32], block_size=16, num_kv_heads=1, head_dim=4, kv_format="bf16")
    contiguous = CacheConfig(kv_reservation="contiguous", num_kv_blocks=10, enable_prefix_caching=False)
    sizing = size(layout, contiguous, max_tokens_per_step=16)
    assert sizing.max_model_len == 160
    manager = KVCacheManager(layout, 10, contiguous, sizing.max_model_len)
    Scheduler(SchedulerConfig(max_num_batched_tokens=16), manager, max_model_len=sizing.max_model_len)
    assert size(layout, CacheConfig(num_kv_blocks=10), max_tokens_per_step=16).max_model_len == 4096


def test_memory_of_steps_and_tables_is_kept_free() -> None:
    free = 1000 * PER_BLOCK
    assert size(free_bytes=free, step_bytes=free // 4).num_blocks == 500
    assert size(free_bytes=free, step_bytes=free - 100 * PER_BLOCK).num_blocks == 100
    assert size(free_bytes=free, context_bytes=free - 100 * PER_BLOCK).num_blocks == 100
    assert size(free_bytes=free, step_bytes=free // 2, context_bytes=free // 4).num_blocks == 250
