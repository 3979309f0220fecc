"""Properties of the card that plans of the programs use."""

from __future__ import annotations

import torch

_NUM_PROCESSORS = 132
_SHARED_MEMORY = 232_448
"""Values of an H200, for the interpreter, where there is no card to ask."""


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors, which is the number of programs that run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _NUM_PROCESSORS


def shared_memory_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # getattr as in torch's own code, because not every build has the attribute
    return int(getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY))


def has_tma(device: torch.device) -> bool:
    """Return whether the card can copy blocks of a matrix by a descriptor (TMA), which exists since capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
