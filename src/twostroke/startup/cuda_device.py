"""Checks that a model can run on the GPU that PyTorch finds, with remedies."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from twostroke.config.load import LoadConfig
from twostroke.errors import InvalidParameter, SetupError

BFLOAT16_CAPABILITY = (8, 0)
REMEDY = "or take --device cpu"
_NO_GPUS = "No CUDA GPUs are available"
"""PyTorch's message if the driver has no device for this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """PyTorch's information about CUDA on this machine."""

    torch_version: str
    built_for: str | None
    """CUDA version that PyTorch was built for; None: CPUs only."""
    failure: str | None
    """Error message if CUDA does not start."""
    num_devices: int = 0
    name: str = ""
    """Name of the requested device; all further fields are about it."""
    capability: tuple[int, int] = (0, 0)
    built_architectures: tuple[str, ...] = ()
    """Architectures with machine code ("sm_90"), or with code that a driver can compile ("compute_90")."""
    total_bytes: int = 0
    free_bytes: int = 0


def device_of(load: LoadConfig, rank: int) -> torch.device:
    """Return a rank's device: each rank has a GPU of its own on its host.

    >>> device_of(LoadConfig(device="cuda", tensor_parallel_size=4), 3)
    device(type='cuda', index=3)
    """
    if load.device == "cpu":
        return torch.device("cpu")
    return torch.device(load.device, rank if load.num_local_ranks > 1 else 0)


def cuda_facts(index: int = 0) -> CudaFacts:
    """Return the facts of this process, and of one of its devices if that exists; start CUDA."""
    version, built_for = torch.__version__, torch.version.cuda
    if built_for is None:
        return CudaFacts(torch_version=version, built_for=None, failure=None)
    try:
        torch.cuda.init()
        num_devices = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, or a device that does not answer
        if _NO_GPUS in str(error):  # the driver works, but `init` raises before devices can be counted
            return CudaFacts(torch_version=version, built_for=built_for, failure=None)
        return CudaFacts(torch_version=version, built_for=built_for, failure=str(error))
    if not num_devices:
        return CudaFacts(torch_version=version, built_for=built_for, failure=None)
    index = min(index, num_devices - 1)
    free, total = torch.cuda.mem_get_info(index)
    return CudaFacts(
        torch_version=version,
        built_for=built_for,
        failure=None,
        num_devices=num_devices,
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        built_architectures=tuple(torch.cuda.get_arch_list()),
        total_bytes=total,
        free_bytes=free,
    )


def check_cuda(facts: CudaFacts) -> None:
    """Refuse a machine on which no model can run.

    Raises:
        SetupError: the message says what is missing, and what to do.
    """
    if facts.built_for is None:
        raise SetupError(
            f"device=cuda: this PyTorch ({facts.torch_version}) was built for CPUs only. Install one that was built "
            f"for CUDA (https://pytorch.org/get-started/locally), {REMEDY}."
        )
    where = f"device=cuda: this PyTorch ({facts.torch_version}) was built for CUDA {facts.built_for}, and"
    if facts.failure is not None:
        raise SetupError(
            f"{where} CUDA does not start: {_first_sentence(facts.failure)}. Install an NVIDIA driver for "
            f"CUDA {facts.built_for} or later, or a PyTorch for the CUDA of the driver that is there (nvidia-smi), "
            f"{REMEDY}."
        )
    if not facts.num_devices:
        raise SetupError(
            f"{where} there is no NVIDIA GPU that this process may use. Make one visible (CUDA_VISIBLE_DEVICES, or "
            f"--gpus of a container), {REMEDY}."
        )
    if not _has_code_for(facts.capability, facts.built_architectures):
        raise SetupError(
            f"{where} it has no code for {facts.name}, of compute capability {_dotted(facts.capability)}; it has "
            f"{', '.join(facts.built_architectures)}. Install a PyTorch that has it, {REMEDY}."
        )


def check_gpu_for_each_rank(facts: CudaFacts, load: LoadConfig) -> None:
    """Refuse more ranks than this host has GPUs.

    Raises:
        InvalidParameter: the message has their number.
    """
    if load.num_local_ranks > facts.num_devices:
        raise InvalidParameter(
            "tensor_parallel_size",
            load.tensor_parallel_size,
            f"each rank takes a GPU of its own, and this process may use {facts.num_devices} ({facts.name})",
            f"Take --tensor-parallel-size {facts.num_devices}, or make more visible (CUDA_VISIBLE_DEVICES).",
        )


def check_dtype(facts: CudaFacts, dtype: str) -> None:
    """Refuse a type in which the GPU cannot compute.

    Raises:
        SetupError: the message names a type in which it can.
    """
    if dtype == "bfloat16" and facts.capability < BFLOAT16_CAPABILITY:
        raise SetupError(
            f"dtype=bfloat16: {facts.name} has compute capability {_dotted(facts.capability)}, and bfloat16 begins at "
            f"{_dotted(BFLOAT16_CAPABILITY)}. Take --dtype float16 or float32, {REMEDY}."
        )


def _has_code_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether code for a capability exists.

    Machine code runs on later minor versions of its major version; code to be compiled runs on all later versions.

    >>> _has_code_for((8, 9), ("sm_80", "sm_90")), _has_code_for((7, 0), ("sm_80",))
    (True, False)
    >>> _has_code_for((12, 0), ("sm_90", "compute_90"))
    True
    """
    for architecture in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)a?", architecture)
        if found is None:
            continue
        built = int(found[2]), int(found[3])
        if built <= capability and (found[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _first_sentence(text: str) -> str:
    """Return the beginning of an error report; the rest advises users of PyTorch."""
    return re.split(r"(?<=\w)[.:](?:\s|$)|\n", text.strip())[0]
