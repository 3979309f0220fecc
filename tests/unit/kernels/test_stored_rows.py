"""Rows that are packed straight from files, against rows that are read, taken apart and packed: to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.gguf_blocks import TYPES_BY_NAME, random_blocks
from twostroke.config.layer_spec import Activation
from twostroke.gguf.container import TYPES
from twostroke.kernels import native
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.stored_rows import StoredRows
from twostroke.kernels.streamed_weight import StreamedWeight
from twostroke.model.gguf.blocks import REPACKED, repack

pytestmark = pytest.mark.skipif(not native.is_built(), reason="only the native kernels pack from files")

NUM_ROWS = 180
"""No whole number of panels, gated or not."""


class File:
    """Random blocks of a type in a file, behind some other bytes; rows are asked for in an order of their own."""

    def __init__(self, path: Path, type_name: str, order: np.ndarray[Any, Any]) -> None:
        kind = TYPES[TYPES_BY_NAME[type_name]]
        blocks = random_blocks(kind, (1e-3, 2e-2))
        self.data = np.resize(blocks, (NUM_ROWS, blocks.shape[1]))
        path.write_bytes(b"header of 24 bytes......" + self.data.tobytes())
        self.descriptor = os.open(path, os.O_RDONLY)
        self.type_name, self.order, self.num_checks = type_name, order, 0
        self.shape = (NUM_ROWS, self.data.shape[1] // kind.block_bytes * kind.block_size)
        self.num_read = 0
        offsets = 24 + order.astype(np.int64) * self.data.shape[1]
        files = np.full(NUM_ROWS, self.descriptor, np.int32)
        self.stored = StoredRows(type_name, REPACKED[type_name].format, files, offsets, self.check)

    def check(self) -> None:
        self.num_checks += 1

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        self.num_read += end - begin
        kind = TYPES[TYPES_BY_NAME[self.type_name]]
        blocks = torch.from_numpy(self.data[self.order[begin:end]]).unflatten(-1, (-1, kind.block_bytes))
        return repack(self.type_name, blocks, (end - begin, self.shape[1]), torch.bfloat16)

    def panels(self, stored: StoredRows | None, activation: Activation | None) -> torch.Tensor:
        weight = StreamedWeight(self.shape, torch.bfloat16, self.rows, stored)
        operators = native.operators()
        packed: Any = (
            operators.pack_linear(weight, None)
            if activation is None
            else operators.pack_gated(weight, None, activation)
        )
        return packed.panels._packed


Files = Callable[..., File]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Files]:
    made: list[File] = []

    def make(type_name: str, order: np.ndarray[Any, Any] | None = None) -> File:
        made.append(File(tmp_path / f"{len(made)}.bin", type_name, np.arange(NUM_ROWS) if order is None else order))
        return made[-1]

    yield make
    for one in made:
        os.close(one.descriptor)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("type_name", native.block_types())
def test_panels_are_the_same(type_name: str, activation: Activation | None, file: Files, threads: int) -> None:
    stored = file(type_name)
    found = stored.panels(stored.stored, activation)
    assert stored.num_read == 0
    assert stored.num_checks == 1
    assert torch.equal(found, stored.panels(None, activation))
    assert found.any()


def test_rows_in_an_order_of_their_own(file: Files) -> None:
    stored = file("Q4_K", np.random.default_rng(3).permutation(NUM_ROWS))
    found = stored.panels(stored.stored, None)
    assert stored.num_read == 0
    assert torch.equal(found, stored.panels(None, None))


def test_rows_of_several_files(file: Files) -> None:
    first, second = file("Q6_K"), file("Q6_K")
    parts = [first.stored.select_rows(slice(0, 70)), second.stored.select_rows(slice(70, None))]
    together = StoredRows.stack(parts)
    assert together is not None
    found = first.panels(together, None)
    assert (first.num_read, first.num_checks, second.num_checks) == (0, 1, 1)
    first.data[70:] = second.data[70:]
    assert torch.equal(found, first.panels(None, None))


def test_rows_of_several_types_are_not_packed_together(file: Files) -> None:
    assert StoredRows.stack([file("Q6_K").stored, file("Q4_K").stored]) is None


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_rows_that_cannot_be_used_are_read_the_other_way(type_name: str, tmp_path: Path, file: Files) -> None:
    """The other reader's error says what is wrong with them."""

    def cut(stored: File, path: Path) -> None:
        os.truncate(path, 24 + stored.data.size - 1)

    def not_finite(stored: File, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[24 + 150 * stored.data.shape[1] : 26 + 150 * stored.data.shape[1]] = b"\x00\x7e"
        path.write_bytes(content)

    for i, spoil in enumerate((cut, not_finite)):
        stored = file(type_name)
        spoil(stored, tmp_path / f"{i}.bin")
        assert torch.equal(stored.panels(stored.stored, None), stored.panels(None, None))
        assert stored.num_read == 2 * NUM_ROWS


def test_a_file_that_changed_is_an_error(file: Files) -> None:
    stored = file("Q4_K")

    def refuse(what: str) -> None:
        raise ValueError(what)

    changed = StoredRows(
        "Q4_K", stored.stored.format, stored.stored.files, stored.stored.offsets, partial(refuse, "it")
    )
    with pytest.raises(ValueError, match="it"):
        stored.panels(changed, None)
