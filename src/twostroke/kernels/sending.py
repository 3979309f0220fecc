"""Small arrays' way from the host to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def send(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on the device, in the order of what is enqueued there; nobody waits.

    From memory that is not pinned, torch's copy to a GPU would return only when everything enqueued before it is done.
    torch keeps the pinned memory until the copy is. On a CPU the tensor is the array's own memory.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
