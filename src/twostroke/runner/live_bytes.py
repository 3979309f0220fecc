"""LiveBytes: the bytes of live tensors, counted as torch's operators create and drop them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counter of tensors that are created while it is entered.

    Each storage counts once, however many tensors share it, from the operator that created it until the last of them is
    gone. Memory that an operator allocates and frees within one call is not seen, and neither is memory outside torch.

    >>> with LiveBytes() as counted:
    ...     x = torch.zeros(1000, dtype=torch.uint8)
    ...     y = x[:10]
    ...     del x, y
    ...     z = torch.zeros(300, dtype=torch.uint8)
    >>> counted.live, counted.peak
    (300, 1000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self.peak = 0
        """Most bytes alive so far."""
        self._known: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and count the storages that it created."""
        del types
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                storage = storage_of(leaf)
                if storage not in given:  # otherwise a view or an operation in place: not new
                    self._count(storage)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = weakref.ref(storage, self._drop)
        if known in self._known:
            return
        self._known[known] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _drop(self, gone: weakref.ref[torch.UntypedStorage]) -> None:
        self.live -= self._known.pop(gone)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage; the same object for all tensors that share it."""
    return tensor.untyped_storage()
