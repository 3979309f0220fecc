"""A small tensor's way to the host, begun at once and waited for later."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor, as it is behind the work that has been enqueued so far.

    Waiting for it waits for that work alone. `tensor.tolist()` would wait for all that was enqueued since, too: with a
    step enqueued behind this one, for a whole step.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Begins it; the tensor may not change before `wait` returns. On a CPU there is nothing to copy."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
