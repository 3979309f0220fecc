"""What the programs' plans ask of the card."""

from __future__ import annotations

import torch

_NUM_PROCESSORS = 132
_SHARED_MEMORY = 232_448
"""Where there is no card to ask (in the interpreter): an H200's."""


def processors_of(device: torch.device) -> int:
    """Streaming multiprocessors: how many programs it takes until each has something to do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _NUM_PROCESSORS


def shared_memory_of(device: torch.device) -> int:
    """Bytes that one program may have."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # torch's own code asks in this way, too: not every build says it
    return int(getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY))


def has_copy_engine(device: torch.device) -> bool:
    """Whether the card reads blocks of a matrix by itself, from a description of it: since capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
