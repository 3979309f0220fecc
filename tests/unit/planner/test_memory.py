"""The plan beside engines that were really built: the same bytes, for every architecture and format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import gguf_files
import quantized_folders
from factories import uniform_layout
from held_tensors import tensors_of
from model_folders import SHAPES, write_random_model
from twostroke.communicator.interface import SingleRank
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import Quantization
from twostroke.errors import DoesNotFit
from twostroke.kernels import native
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.sizing import blocks_of_request
from twostroke.layers.row_split import RowSplit
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model
from twostroke.model.weight_source import ALL_ROWS, WeightSource, WrappedSource
from twostroke.planner.memory import MemoryPlan, kinds_of, plan_memory, with_kv_format, with_quantization
from twostroke.runner.kv_storage import KVStorage
from twostroke.startup.assembly import build_engine
from twostroke.startup.preparation import prepare

MEMORY = 1 << 28
KERNELS = ["reference", "auto"]


def plan_of(config: EngineConfig, memory_bytes: int = MEMORY) -> MemoryPlan:
    return plan_memory(prepare(config), memory_bytes)


def bytes_of(model: Any) -> int:
    """Return the bytes of all tensors except the counts of tokens by expert."""
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(model, set()))
    return num_bytes - sum(counts.nbytes for counts in model.expert_counts)


def check_exact(**given: Any) -> None:
    """Check that the plan's weights and KV equal those of an engine with the same settings."""
    config = EngineConfig.from_keywords(threads=1, **given)
    plan = plan_of(config)
    built = build_engine(EngineConfig.from_keywords(threads=1, **given, **as_given(plan, given)))
    runner: Any = built.engine._executor._runner  # pyright: ignore
    try:
        assert bytes_of(runner._model) == plan.weight_bytes
        drafts = getattr(runner, "_proposer", None)  # only a runner with a drafter has one
        assert runner._kv.nbytes == plan.kv_bytes or drafts is not None
        assert built.facts.num_blocks == plan.num_blocks
        assert built.facts.max_model_len == plan.max_model_len
        assert built.facts.kv_bytes_per_token == plan.kv_bytes_per_token * plan.num_ranks
    finally:
        built.engine.close()


def as_given(plan: MemoryPlan, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the plan's number of blocks, since this machine has other memory."""
    return {} if "num_kv_blocks" in given else {"num_kv_blocks": plan.num_blocks}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", SHAPES)
def test_exact_for_every_architecture(
    random_models: dict[str, Path], family: str, quantization: str | None, kernels: str
) -> None:
    check_exact(model=str(random_models[family]), quantization=quantization, kernels=kernels)


@pytest.mark.parametrize("family", SHAPES)
def test_exact_in_bfloat16(random_models: dict[str, Path], family: str) -> None:
    """Norms and activations that compute in float32 are kept in it."""
    check_exact(model=str(random_models[family]), dtype="bfloat16")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_with_biases_odd_widths_and_tied_heads(tmp_path: Path, dtype: str, kernels: str) -> None:
    odd = {"vocab_size": 330, "intermediate_size": 72, "tie_word_embeddings": True}
    write_random_model(tmp_path, "llama", dtype=dtype, attention_bias=True, mlp_bias=True, **odd)
    for quantization in (None, "int8"):
        check_exact(model=str(tmp_path), kernels=kernels, quantization=quantization)


@pytest.mark.parametrize("name", quantized_folders.NAMES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_exact_for_every_published_format(name: str, kernels: str, tmp_path: Path) -> None:
    config = EngineConfig.from_keywords(model=with_tokenizer(quantized_folders.FIXTURES / name, tmp_path))
    check_exact(model=config.load.model, kernels=kernels, dtype="bfloat16")


def with_tokenizer(folder: Path, to: Path) -> str:
    """Add a tokenizer, since the fixtures have none."""
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    from model_folders import write_tokenizer

    write_tokenizer(to, 96)
    return str(to)


@pytest.mark.parametrize("name", gguf_files.NAMES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_exact_for_every_gguf_file(name: str, kernels: str) -> None:
    check_exact(model=str(gguf_files.fixture(name)), kernels=kernels)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "f32", "int8", "int4"])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_exact_for_every_kv_format(random_models: dict[str, Path], kv_cache_dtype: str, block_size: int) -> None:
    """Some layers of Qwen2 have a window."""
    check_exact(model=str(random_models["qwen2"]), kv_cache_dtype=kv_cache_dtype, block_size=block_size)


def test_exact_with_scratch_blocks(random_models: dict[str, Path]) -> None:
    check_exact(model=str(random_models["qwen2"]), kv_check_rate=0.5)


def test_kinds_of_layers_add_up(random_models: dict[str, Path]) -> None:
    plan = plan_of(EngineConfig.from_keywords(model=str(random_models["qwen2"])))
    assert [(kind.window, kind.num_layers) for kind in plan.kinds] == [(None, 2), (24, 1)]
    assert sum(kind.bytes_per_token for kind in plan.kinds) == plan.kv_bytes_per_token


def test_other_formats_are_planned_as_if_they_had_been_asked_for(random_models: dict[str, Path]) -> None:
    model = str(random_models["llama"])
    config = EngineConfig.from_keywords(model=model)
    prepared = prepare(config)
    for kv_cache_dtype in ("int8", "int4"):
        asked = plan_of(EngineConfig.from_keywords(model=model, kv_cache_dtype=kv_cache_dtype))
        assert plan_memory(with_kv_format(prepared, kv_cache_dtype), MEMORY) == asked
    for quantization in ("int8", "int4"):
        asked = plan_of(EngineConfig.from_keywords(model=model, quantization=quantization))
        assert plan_memory(with_quantization(prepared, quantization), MEMORY) == asked


def test_drafts_are_counted() -> None:
    for method in ("draft_model", "medusa", "eagle"):
        with_drafts = EngineConfig.from_keywords(model="embedded", speculative_config={"method": method})
        plan = plan_of(with_drafts)
        alone = plan_of(EngineConfig.from_keywords(model="embedded"))
        assert plan.draft_weight_bytes > 0
        assert plan.num_blocks < alone.num_blocks
        assert plan.weight_bytes == alone.weight_bytes


def test_ranks_share_the_memory_and_the_rows(random_models: dict[str, Path]) -> None:
    if not native.is_built():
        pytest.skip("ranks need the native kernels")
    model = str(random_models["llama"])
    alone, half = (plan_of(EngineConfig.from_keywords(model=model, tensor_parallel_size=n)) for n in (1, 2))
    assert half.memory_bytes == MEMORY // 2
    assert half.kv_bytes_per_token * 2 == alone.kv_bytes_per_token
    assert alone.weight_bytes // 2 < half.weight_bytes < alone.weight_bytes


@pytest.mark.parametrize(("family", "num_ranks"), [("mistral", 2), ("qwen3", 4)])
def test_ranks_that_have_the_same_kv_head_count_it_each(
    random_models: dict[str, Path], family: str, num_ranks: int
) -> None:
    """The allocated bytes agree: one head for each rank."""
    if not native.is_built():
        pytest.skip("ranks need the native kernels")
    config = EngineConfig.from_keywords(model=str(random_models[family]), tensor_parallel_size=num_ranks)
    plan, prepared = plan_of(config), prepare(config)
    spec = prepared.config.layers[0].kv
    assert plan.kv_bytes_per_token == prepared.config.num_layers * 2 * spec.head_dim * 4
    assert KVStorage(prepared.layout, plan.num_blocks, prepared.device).nbytes == plan.kv_bytes


def test_weights_that_do_not_fit_are_refused_with_their_bytes(random_models: dict[str, Path]) -> None:
    config = EngineConfig.from_keywords(model=str(random_models["llama"]))
    prepared = prepare(config)
    whole = plan_memory(prepared, MEMORY).weight_bytes
    words = (
        r": 1,000 more than there are. .*would not fit either \(int8 takes 300,032, .*beside the largest step and one"
    )
    with pytest.raises(DoesNotFit, match=words):
        plan_memory(prepared, whole - 1000)


def test_a_card_that_is_too_small_shows_its_share_in_the_sum() -> None:
    config = EngineConfig.from_keywords(model="embedded")
    on_card = replace(prepare(config), settings=replace(config, load=replace(config.load, device="cuda")))
    with pytest.raises(DoesNotFit, match=r"^0\.9 x 100,000,000 bytes - 1.*= 0 for KV; one KV block takes"):
        plan_memory(on_card, 100_000_000)


LAYOUTS = st.builds(
    uniform_layout,
    st.lists(st.sampled_from([None, None, 8, 40]), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16, 128]),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 64]),
    kv_format=st.sampled_from(["f32", "bf16", "int8", "int4"]),
)


@given(
    layout=LAYOUTS,
    num_blocks=st.integers(1, 5000),
    reservation=st.sampled_from(["paged", "contiguous"]),
    step=st.sampled_from([1, 16, 512]),
    lengths=st.tuples(st.integers(1, 4096), st.integers(1, 4096)),
)
def test_what_fits_fits_for_shorter(
    layout: KVLayout, num_blocks: int, reservation: Any, step: int, lengths: tuple[int, int]
) -> None:
    is_paged = reservation == "paged"
    cache = CacheConfig(block_size=layout.block_size, kv_reservation=reservation, enable_prefix_caching=is_paged)
    plan = bare_plan(layout, cache, num_blocks, step)
    short, long = sorted(lengths)
    num_requests = plan.concurrent_requests(long)
    assert num_requests <= plan.concurrent_requests(short)
    needed = blocks_of_request(layout, cache, plan.max_model_len if reservation == "contiguous" else long, step)
    assert num_requests * needed <= num_blocks


def bare_plan(layout: KVLayout, cache: CacheConfig, num_blocks: int, step: int) -> MemoryPlan:
    return MemoryPlan(
        model="none",
        architecture="none",
        num_parameters=1,
        num_active_parameters=0,
        experts=(),
        bytes_per_expert_weight=None,
        dtype="bfloat16",
        quantization=None,
        num_ranks=1,
        splits_by_expert=False,
        memory_bytes=MEMORY,
        others_bytes=0,
        utilization=None,
        reserve_bytes=0,
        weight_bytes=0,
        draft_weight_bytes=0,
        step_bytes=0,
        context_bytes=0,
        kv_bytes=num_blocks * layout.bytes_per_block,
        kv_bytes_per_token=layout.bytes_per_token,
        kv_bytes_per_block=layout.bytes_per_block,
        kinds=kinds_of(layout),
        num_blocks=num_blocks,
        num_scratch_blocks=0,
        max_model_len=4096,
        max_num_seqs=64,
        remarks=(),
        layout=layout,
        cache=cache,
        max_tokens_per_step=step,
    )


@pytest.mark.parametrize("memory", [MEMORY >> 1, MEMORY, MEMORY << 3])
def test_more_memory_never_holds_less(random_models: dict[str, Path], memory: int) -> None:
    config = EngineConfig.from_keywords(model=str(random_models["mistral"]))
    less, more = plan_of(config, memory), plan_of(config, memory + (1 << 20))
    assert less.num_blocks <= more.num_blocks
    assert less.max_model_len <= more.max_model_len


@pytest.mark.parametrize("kernels", KERNELS)
def test_early_exit_holds_no_second_weight(kernels: str) -> None:
    drafts = {"speculative_config": {"method": "early_exit", "exit_layer": 3}, "num_kv_blocks": 50, "kernels": kernels}
    config = EngineConfig.from_keywords(model="embedded", threads=1, **drafts)
    plan = plan_of(config)
    assert plan.draft_weight_bytes == 0
    built = build_engine(config)
    runner: Any = built.engine._executor._runner  # pyright: ignore
    try:
        of_target = {tensor.data_ptr() for tensor in tensors_of(runner._model, set())}
        of_drafter = [t for t in tensors_of(runner._proposer, set()) if t.is_floating_point() or is_packed(t)]
        assert len(of_drafter) > 10, "it runs layers"
        assert {tensor.data_ptr() for tensor in of_drafter} <= of_target
    finally:
        built.engine.close()


@pytest.mark.parametrize("method", ["draft_model", "medusa", "eagle"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_exact_with_those_who_draft(kernels: str, method: str) -> None:
    drafts = {"speculative_config": {"method": method}, "num_kv_blocks": 50, "kernels": kernels}
    config = EngineConfig.from_keywords(model="embedded", threads=1, **drafts)
    plan = plan_of(config)
    built = build_engine(config)
    runner: Any = built.engine._executor._runner  # pyright: ignore
    try:
        seen: set[int] = set()
        assert sum(tensor.nbytes for tensor in tensors_of(runner._model, seen)) == plan.weight_bytes
        own = [t.nbytes for t in tensors_of(runner._proposer, seen) if t.is_floating_point() or is_packed(t)]
        assert sum(own) == plan.draft_weight_bytes
        assert plan.kv_bytes == 50 * plan.kv_bytes_per_block
        has_own_kv = method != "medusa"
        assert (runner._kv.nbytes < plan.kv_bytes) is has_own_kv
    finally:
        built.engine.close()


def is_packed(tensor: Tensor) -> bool:
    return tensor.dtype is torch.uint8


class OneOfSeveral(SingleRank):
    """Communicator of a rank that is never asked to gather."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Recording(WrappedSource):
    """Notes which weights are read."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source, source.weights)
        self.names: set[str] = set()

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        self.names.add(name)
        return super().read(name, dtype, rows)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_exact_where_ranks_have_whole_experts(
    random_models: dict[str, Path], family: str, num_ranks: int, quantization: Quantization | None
) -> None:
    """Each rank reads only its own experts."""
    if not native.is_built():
        pytest.skip("ranks need the native kernels")
    given = {"model": str(random_models[family]), "quantization": quantization, "tensor_parallel_size": num_ranks}
    prepared = prepare(EngineConfig.from_keywords(**given, enable_expert_parallel=True))
    sizes: list[int] = []
    read: list[set[str]] = []
    for rank in range(num_ranks):
        source = Recording(prepared.weights)
        split = RowSplit(OneOfSeveral(rank, num_ranks), splits_by_expert=True)
        placement = Placement(prepared.operators, prepared.dtype, prepared.device, 64, split)
        sizes.append(bytes_of(load_model(source, prepared.config, placement, quantization=quantization)))
        read.append({name for name in source.names if ".experts." in name})
    assert max(sizes) == plan_memory(prepared, MEMORY).weight_bytes
    assert len(set.union(*read)) == sum(map(len, read)) > 0, "no expert is read twice"


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", SHAPES)
def test_exact_for_the_rank_that_has_most(
    random_models: dict[str, Path], family: str, num_ranks: int, quantization: Quantization | None
) -> None:
    if not native.is_built():
        pytest.skip("ranks need the native kernels")
    given = {"model": str(random_models[family]), "quantization": quantization, "tensor_parallel_size": num_ranks}
    config = EngineConfig.from_keywords(**given)
    prepared = prepare(config)
    sizes = [
        bytes_of(
            load_model(
                prepared.weights,
                prepared.config,
                Placement(
                    prepared.operators, prepared.dtype, prepared.device, 64, RowSplit(OneOfSeveral(rank, num_ranks))
                ),
                quantization=quantization,
            )
        )
        for rank in range(num_ranks)
    ]
    assert max(sizes) == plan_memory(prepared, MEMORY).weight_bytes
