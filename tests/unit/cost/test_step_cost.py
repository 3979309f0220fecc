"""Hand-derived numbers; the factor num_kv_heads, which is easily forgotten, is in all of them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from factories import LLAMA_3_8B, uniform_layout, uniform_shape
from twostroke.batch import BlockTableUpdate, Limit, ScheduledBatch, ScheduledRequest, Stroke
from twostroke.cost.step_cost import MachineLimits, Share, shares_of, step_cost
from twostroke.kv_cache.layout import KVLayout

H100 = MachineLimits(flops_per_s=989.4e12, bytes_per_s=3.35e12)
GIB = 2**30


def kv_layout(num_layers: int, num_kv_heads: int) -> KVLayout:
    return uniform_layout([None] * num_layers, block_size=16, num_kv_heads=num_kv_heads, head_dim=128, kv_format="bf16")


def test_kv_bytes_of_known_models() -> None:
    assert kv_layout(32, 32).bytes_per_token == 512 * 1024, "Llama-2-7B"
    assert kv_layout(32, 32).bytes_per_token * 4096 == 2 * GIB
    assert kv_layout(80, 8).bytes_per_token * 100_000 / GIB == pytest.approx(30.5, abs=0.05), "Llama-3-70B"
    assert kv_layout(32, 8).bytes_per_token * 100_000 / GIB == pytest.approx(12.2, abs=0.05), "Llama-3-8B"
    assert kv_layout(96, 96).bytes_per_token == 4_718_592, "MHA with 96 layers and heads"
    assert kv_layout(96, 8).bytes_per_token == 384 * 1024, "the same with 8 KV heads"
    assert kv_layout(36, 8).bytes_per_token * 32_768 / GIB == 4.5, "Qwen3-8B"


def test_parameters_of_llama_3_8b() -> None:
    matrices = LLAMA_3_8B.num_layer_parameters + LLAMA_3_8B.num_head_parameters
    embedding, norms = 4096 * 128256, (2 * 32 + 1) * 4096
    assert matrices + embedding + norms == 8_030_261_248


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    n = 32_768
    cost = step_cost(LLAMA_3_8B, [Share(0, n, 1)], H100)
    linear = 2 * LLAMA_3_8B.num_layer_parameters * n
    attention = 4 * 32 * 32 * 128 * n * (n + 1) // 2
    assert cost.operations == linear + attention + 2 * 4096 * 128256
    assert attention / H100.flops_per_s == pytest.approx(0.28, abs=0.005)
    assert cost.bound == "compute"
    assert cost.kv_written_bytes == n * 131_072 == cost.kv_read_bytes
    assert cost.seconds == pytest.approx(0.75, abs=0.02)


def test_a_decode_is_bound_by_memory_and_reads_the_weights_whatever_the_batch() -> None:
    one = step_cost(LLAMA_3_8B, [Share(1000, 1, 1)], H100)
    many = step_cost(LLAMA_3_8B, [Share(1000, 1, 1)] * 64, H100)
    assert one.bound == many.bound == "memory"
    assert one.weight_bytes == many.weight_bytes == 2 * (8_030_261_248 - 4096 * 128256 - 65 * 4096)
    assert many.operations == 64 * one.operations
    assert many.kv_read_bytes == 64 * one.kv_read_bytes == 64 * 1001 * 131_072
    assert many.intensity > 30 * one.intensity
    assert one.seconds == pytest.approx(4.48e-3, rel=0.02)


def test_a_chunk_that_does_not_sample_leaves_the_head_alone() -> None:
    chunk = step_cost(LLAMA_3_8B, [Share(0, 512, 0)], H100)
    last = step_cost(LLAMA_3_8B, [Share(0, 512, 1)], H100)
    assert last.operations - chunk.operations == 2 * 4096 * 128256
    assert last.weight_bytes - chunk.weight_bytes == 2 * 4096 * 128256


def test_nothing_costs_nothing() -> None:
    cost = step_cost(LLAMA_3_8B, [], H100)
    assert (cost.operations, cost.weight_bytes, cost.intensity, cost.seconds) == (0, 0, 0, 0)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=3),
    start=st.integers(0, 20),
    num_tokens=st.integers(1, 20),
)
def test_attention_against_counting(windows: list[int | None], start: int, num_tokens: int) -> None:
    shape = uniform_shape(
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        windows=tuple(windows),
        bytes_per_weight=1,
    )
    cost = step_cost(shape, [Share(start, num_tokens, 0)], H100)
    pairs, seen = 0, 0
    for window in windows:
        keys = [{k for k in range(q + 1) if window is None or k > q - window} for q in range(start, start + num_tokens)]
        pairs += sum(map(len, keys))
        seen += len(set().union(*keys))
    linear = 2 * shape.num_layer_parameters * num_tokens
    assert cost.operations == linear + 4 * pairs
    assert cost.kv_read_bytes == 4 * seen
    assert cost.kv_written_bytes == 4 * num_tokens * len(windows)


def test_shares_of_a_batch() -> None:
    tables = (BlockTableUpdate(0, ()),)
    batch = ScheduledBatch(
        step=0,
        requests=(
            ScheduledRequest("a", Stroke.DECODE, 9, 3, 2, True, tables),
            ScheduledRequest("b", Stroke.PREFILL, 0, 5, 0, False, tables),
        ),
        limited_by=Limit.NONE,
    )
    assert shares_of(batch) == (Share(9, 3, 3), Share(0, 5, 0))
