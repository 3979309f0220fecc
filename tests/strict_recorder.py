"""A stand-in for CUDA graphs that does on the CPU what they do, and fails where they would silently be wrong.

A graph repeats what was launched while it was recorded: the same kernels with the same numbers, on the same addresses.
Here the work itself is done again. So everything it launches is noted while it is recorded, and has to be the same when
it is replayed: operators, shapes, numbers, launches of Triton's programs and their grids, and the address of every
tensor that the work did not make itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Notes(TorchDispatchMode):
    """Record of the launches inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []
        self.is_in_launch = False
        self._made: dict[int, int] = {}
        """By address of its storage: the how-many-eth that was made inside."""
        self._outside: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if self.is_in_launch:  # what the interpreter needs beside the program is not the work's
            return func(*args, **(kwargs or {}))
        self.note(str(func), (args, kwargs))
        found = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(found)[0]:
            if isinstance(tensor, Tensor) and (address := tensor.untyped_storage().data_ptr()) not in self._outside:
                self._kept.append(tensor)  # so that no other gets its address
                self._made.setdefault(address, len(self._made))
        return found

    def note(self, name: str, args: Any) -> None:
        self.lines.append((name, [self._described(leaf) for leaf in tree_flatten(args)[0]]))

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return str(leaf)
        address = leaf.untyped_storage().data_ptr()
        if address not in self._made:
            self._outside.add(address)
        where = self._made.get(address, f"at {address}")
        return where, leaf.storage_offset(), tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype


@contextmanager
def _noting(notes: _Notes) -> Iterator[None]:
    """Operators of torch, and launches of Triton's programs, which go past torch."""
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes.note(f"triton {self.fn.__name__}{self.grid}", (args, kwargs))
        notes.is_in_launch = True
        try:
            return launch(self, *args, **kwargs)
        finally:
            notes.is_in_launch = False

    interpreter.GridExecutor.__call__ = noted
    try:
        with notes:
            yield
    finally:
        interpreter.GridExecutor.__call__ = launch


@dataclass(eq=False)
class StrictRecording:
    work: Callable[[], Tensor]
    lines: list[Any]
    output: Tensor
    num_replays: int = 0

    def replay(self) -> None:
        notes = _Notes()
        with _noting(notes):
            found = self.work()
        for recorded, now in zip(self.lines, notes.lines, strict=True):
            assert recorded == now, f"recorded as {recorded}; a graph would not do {now}"
        self.output.copy_(found)
        self.num_replays += 1


@dataclass(eq=False)
class StrictRecorder:
    recordings: list[StrictRecording] = field(default_factory=list[StrictRecording])

    def record(self, work: Callable[[], Tensor]) -> StrictRecording:
        notes = _Notes()
        with _noting(notes):
            output = work()
        assert len(notes.lines) > 10
        self.recordings.append(StrictRecording(work, notes.lines, output.clone()))
        return self.recordings[-1]
