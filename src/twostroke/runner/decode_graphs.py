"""CUDA graphs of passes over few tokens, recorded once for each size: the host launches one graph, not every kernel.

A pass over a few tokens takes a GPU a few milliseconds and has hundreds of kernels, whose launches take the host
longer: beside an H200, 42 ms for 36 layers. A graph repeats the same kernels with the same addresses and sizes, so
inputs that differ between steps have to be at fixed addresses:

    a step      ids, positions, block tables, attention's inputs       copied to where the graph reads them
    its size    that of the next bucket                                padded with tokens of no request
    its result  the first rows of the graph's                          copied away before the next replay

A row's bits do not depend on the number of rows (docs/decisions/002), so they do not depend on the bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twostroke.kernels.interface import AttentionOperators, FixedPlan, FixedSize, RecordableAttention
from twostroke.layers.attention import AttentionLayout, AttentionMetadata
from twostroke.log import get_logger
from twostroke.model.decoder import DecoderModel
from twostroke.runner.input_batch import InputBatch
from twostroke.runner.kv_storage import KVStorage

log = get_logger(__name__)

PART_ROWS = 1024
"""Partial results that a graph has room for, where contexts are split: 16 MiB for 32 heads of 128. Steps that need more
read so much that launching their kernels no longer takes most of the time."""
_PART_ROWS_RATIO = 4
"""Ratio of the partial results of two successive sizes of graphs. Each partial result of a layer is a program, whether
a step needs it or not: a graph for 1,024 of them would launch 8,192 programs a layer where a step of one sequence has
64."""
_MIN_PART_ROWS = 16
_BUCKET_STEP = 8
"""Step between bucket sizes of decodes above this size."""
MIXED_TOKENS = 1024
"""Most tokens of a recorded pass in which some sequence has several. A GPU takes as long for more of them as the host
takes to launch the kernels."""
MIXED_CONTEXT = 16_384
"""Longest context of such a pass, in tokens. Contexts are not split in it, because most of the programs that a pass
would need room for would be idle. A GPU takes as long for a longer context as the host takes to launch all kernels."""
_MIXED_BUCKET_STEP = 64
_MIXED_BUCKETS_PER_DOUBLING = 8


class Recording(Protocol):
    """Work that can be repeated."""

    @property
    def output(self) -> Tensor:
        """Tensor that receives the result of each replay."""
        ...

    def replay(self) -> None:
        """Enqueue the work once more."""
        ...


class Recorder(Protocol):
    """Maker of recordings."""

    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Do the work once for its effects on compilers and caches, and once to record it."""
        ...


class CudaGraphs:
    """Recorder of CUDA graphs. All share one pool of memory, because they run one after the other and keep only their
    results."""

    def __init__(self) -> None:
        """Use the current device."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Recording:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            # thread_local: other threads may use CUDA meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = work()
        except BaseException:
            # after a failure, torch raises before it restores the stream
            torch.cuda.set_stream(before)
            raise
        return _CudaGraph(graph, output)


@dataclass(frozen=True, slots=True, eq=False)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedPass:
    recording: Recording
    plans: Sequence[FixedPlan]
    """One plan per KV group."""


def bucket_of(num_tokens: int) -> int:
    """Return the tokens of the recorded pass that fits a decode of `num_tokens`.

    >>> [bucket_of(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)]
    [1, 2, 4, 8, 8, 16, 24, 64]
    """
    if num_tokens > _BUCKET_STEP:
        return -(-num_tokens // _BUCKET_STEP) * _BUCKET_STEP
    return 1 << (num_tokens - 1).bit_length()


def mixed_bucket_of(num_tokens: int) -> int:
    """Return the tokens of the recorded pass that fits `num_tokens`, where some sequence has several.

    At 512 and more, at most an eighth of the tokens are padding.

    >>> [mixed_bucket_of(n) for n in (2, 65, 512, 513, 640, 1000)]
    [64, 128, 512, 640, 640, 1024]
    """
    step = max(_MIXED_BUCKET_STEP, (1 << (num_tokens - 1).bit_length()) // _MIXED_BUCKETS_PER_DOUBLING)
    return -(-num_tokens // step) * step


def largest_pass(max_num_seqs: int, max_num_tokens: int) -> int:
    """Return the most tokens of a recorded pass.

    >>> largest_pass(64, 8192), largest_pass(64, 300), largest_pass(2000, 8192)
    (1024, 320, 2000)
    """
    return max(bucket_of(max_num_seqs), mixed_bucket_of(min(MIXED_TOKENS, max_num_tokens)))


def part_rows_bucket(num_part_rows: int) -> int:
    """Return the partial results of the smallest recorded pass that fits `num_part_rows`.

    >>> [part_rows_bucket(n) for n in (0, 1, 16, 17, 65, 1024)]
    [0, 16, 16, 64, 256, 1024]
    """
    room = PART_ROWS if num_part_rows else 0
    while room // _PART_ROWS_RATIO >= max(num_part_rows, _MIN_PART_ROWS):
        room //= _PART_ROWS_RATIO
    return room


class DecodeGraphs:
    """Recorded passes of one model.

    Args:
        model: a model whose attention is `recordable`.
        kv: the KV memory.
        max_model_len: longest request, in tokens.
        max_num_seqs: most sequences in a step.
        max_num_tokens: most tokens in a step.
        device: where the model runs.
        recorder: makes the recordings.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: KVStorage,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_tokens: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        layout = kv.attention_layout(model.num_heads)
        attention = recordable(model.attention, layout)
        assert attention is not None, "attention that cannot be recorded"
        self._model, self._kv, self._attention, self._layout = model, kv, attention, layout
        self._recorder = recorder
        self._max_blocks = kv.layout.num_pages(max_model_len)
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = largest_pass(max_num_seqs, max_num_tokens)
        self._input_ids, self._positions = torch.zeros(2, self._max_num_tokens, dtype=torch.int64, device=device)
        self._passes: dict[FixedSize, _RecordedPass] = {}
        self._num_requested = Counter[FixedSize]()
        self._failed = set[FixedSize]()
        """Sizes that could not be recorded; their kernels are launched one by one."""

    def prepare(self, flat: InputBatch, positions: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Copy a step to where its recorded pass reads it, and return the replay.

        The first step of a size is not recorded, since it may be the only one of that size.

        Args:
            flat: the step.
            positions: int64 [num_tokens], on the device.

        Returns:
            A function from ids, int64 [num_tokens] on the device, to hidden states [num_tokens, hidden_size], which may
            be called any number of times. None if there is no such pass.
        """
        num_tokens, num_seqs = len(flat.input_ids), len(flat.seq_lens)
        are_decodes = num_tokens == num_seqs
        if num_seqs > self._max_num_seqs:  # a step with branches of drafts
            return None
        if not are_decodes and (num_tokens > MIXED_TOKENS or flat.seq_lens.max() > MIXED_CONTEXT):
            return None
        room = bucket_of(num_tokens) if are_decodes else mixed_bucket_of(num_tokens)
        if room > self._max_num_tokens:
            return None
        shapes = self._layout.shapes
        steps = [
            attention.plan_on_host(shape, flat.query_start_loc, flat.seq_lens, table, splits=are_decodes)
            for attention, shape, table in zip(self._attention, shapes, flat.block_tables, strict=True)
        ]
        num_part_rows = max(step.num_part_rows for step in steps)
        if num_part_rows > PART_ROWS:
            return None
        size = FixedSize(
            num_tokens=room,
            num_seqs=room if are_decodes else min(room, self._max_num_seqs),
            max_blocks=self._max_blocks,
            num_part_rows=part_rows_bucket(num_part_rows),
        )
        recorded = self._passes.get(size) or self._record(size)
        if recorded is None:
            return None
        for plan, step in zip(recorded.plans, steps, strict=True):
            plan.fill(step)
        self._positions[:num_tokens].copy_(positions)

        def replay(input_ids: Tensor) -> Tensor:
            self._input_ids[:num_tokens].copy_(input_ids)
            recorded.recording.replay()
            return recorded.recording.output[:num_tokens].clone()

        return replay

    def _record(self, size: FixedSize) -> _RecordedPass | None:
        self._num_requested[size] += 1
        if self._num_requested[size] == 1 or size in self._failed:
            return None
        num_tokens = size.num_tokens
        of_groups = zip(self._attention, self._layout.shapes, strict=True)
        plans = [attention.fixed_plan(shape, size) for attention, shape in of_groups]
        metadata = AttentionMetadata(self._layout, num_tokens, self._attention, tuple(plan.plan for plan in plans))
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]

        def work() -> Tensor:
            return self._model.forward(input_ids, positions, metadata, self._kv)

        try:
            recording = self._recorder.record(work)
        except RuntimeError as error:  # such as too little memory; no request depends on a recording
            self._failed.add(size)
            log.warning(
                "the pass over %d tokens could not be recorded, and is launched kernel by kernel: %s", num_tokens, error
            )
            return None
        self._passes[size] = _RecordedPass(recording, plans)
        split = f", contexts split into up to {size.num_part_rows}" if size.num_part_rows else ""
        log.info("recorded the pass over %d tokens%s", num_tokens, split)
        return self._passes[size]


def recordable(attention: AttentionOperators, layout: AttentionLayout) -> tuple[RecordableAttention, ...] | None:
    """Return the operator of each KV group; None if some cannot be recorded."""
    found = [attention[shape.kv] for shape in layout.shapes]
    able = [operator for operator in found if isinstance(operator, RecordableAttention)]
    return tuple(able) if len(able) == len(found) else None
