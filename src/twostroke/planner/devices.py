"""Published figures of GPUs (devices.json), for plans for a machine that is not at hand."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from twostroke.cost.step_cost import MachineLimits
from twostroke.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Data sheet of one GPU; operations are of dense matrices."""

    memory_bytes: int
    """Memory, with the data sheet's GB as 10^9 bytes: a little less than most boards have."""
    bytes_per_s: float
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float | None
    int8_ops_per_s: float | None
    fp8_flops_per_s: float | None
    """Rate of fp8 operations. Like the int8 rate it serves no plan: GPU kernels multiply 8-bit and 4-bit weights with
    unquantized activations."""
    source: str
    compute_capability: tuple[int, int]
    """Version of the GPU's instructions as torch names it; Triton's kernels need (8, 0) or more."""
    price_per_hour: float | None = None
    """List price; None: no price is the same everywhere."""

    def limits(self, name: str, dtype: str) -> MachineLimits:
        """Return the rates for a model that computes in `dtype`.

        Args:
            name: name of the device, for messages.
            dtype: type of the activations.

        Raises:
            InvalidParameter: no rate is published for the type.
        """
        rates = {"bfloat16": self.bf16_flops_per_s, "float16": self.fp16_flops_per_s}
        rate = rates.get(dtype)
        if rate is None:
            known = " or ".join(f"--dtype {other}" for other, found in rates.items() if found is not None)
            raise InvalidParameter("device_name", name, f"no rate of {dtype} is published for it", f"Give {known}.")
        return MachineLimits(rate, self.bytes_per_s)


@cache
def devices() -> Mapping[str, Device]:
    """Return all known devices by name."""
    data = resources.files("twostroke.planner").joinpath("devices.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, Device])


def find_device(name: str, parameter: str = "device_name") -> tuple[str, Device]:
    """Return a device by its name, in upper or lower case, and its name as published.

    Args:
        name: name of the device.
        parameter: parameter that holds the name, for errors.

    Raises:
        InvalidParameter: no device has that name.
    """
    by_lower = {known.lower(): known for known in devices()}
    wanted = name.lower().replace(" ", "-")
    if wanted not in by_lower:
        near = difflib.get_close_matches(wanted, by_lower, n=3)
        hint = f"Did you mean {' or '.join(by_lower[n] for n in near)}? " if near else ""
        remedy = f"{hint}Known: {', '.join(devices())}."
        raise InvalidParameter(parameter, name, "is no device whose figures are known", remedy)
    return by_lower[wanted], devices()[by_lower[wanted]]
