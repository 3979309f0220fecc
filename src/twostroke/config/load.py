"""Settings of the model, the place where it runs, and its limits.

CPUs are listed in the syntax of taskset and llama.cpp's --cpu-range: `0,2` or `0-3,8`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from twostroke.config.checks import check_bool, check_choice, check_int, check_text
from twostroke.errors import InvalidParameter
from twostroke.plain_words import counted

_MAX_CPUS = 4096
_PART = re.compile(r"\d{1,4}(-\d{1,4})?", re.ASCII)


def read_cpu_list(name: str, given: object) -> tuple[int, ...]:
    """Return the CPUs of a list, in its order.

    >>> read_cpu_list("cpu_affinity", "0-3,8")
    (0, 1, 2, 3, 8)

    Raises:
        InvalidParameter: it is no list, or names a CPU twice.
    """
    remedy = "For example 0,2 or 0-3,8."
    found: list[int] = []
    if not isinstance(given, str):
        raise InvalidParameter(name, given, "must be a string", remedy)
    for part in given.split(","):
        if not _PART.fullmatch(part.strip()):
            raise InvalidParameter(name, given, "must be numbers of CPUs and ranges of them, with commas", remedy)
        first, _, last = part.strip().partition("-")
        if int(last or first) < int(first):
            raise InvalidParameter(name, given, f"the range {part.strip()} ends before it begins", remedy)
        if int(last or first) >= _MAX_CPUS:
            raise InvalidParameter(name, given, f"CPUs go to {_MAX_CPUS - 1}")
        found += range(int(first), int(last or first) + 1)
    twice = next((cpu for cpu in found if found.count(cpu) > 1), None)
    if twice is not None:
        raise InvalidParameter(name, given, f"names CPU {twice} twice", "Each thread needs its own CPU.")
    return tuple(found)


def cpu_words(cpus: Sequence[int]) -> str:
    """Return some CPUs as words for a message.

    >>> cpu_words([0]), cpu_words([0, 2])
    ('CPU 0', 'CPUs 0, 2')
    """
    return f"CPU{'' if len(cpus) == 1 else 's'} {', '.join(map(str, cpus))}"


DType = Literal["auto", "float32", "float16", "bfloat16"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Kernels = Literal[
    "auto", "reference", "native", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_dotprod", "triton"
]

QuantizationOnLoad = Literal["int8", "int4", "fp8"]
QuantizationOnFile = Literal["int8", "int4"]
"""Formats that `twostroke quantize` writes."""
Quantization = Literal["int8", "int4", "fp8", "awq", "gptq", "compressed-tensors", "mxfp4", "gguf"]
ActivationQuantization = Literal["int8", "none"]

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 32
"""Weights that share a scale, in 4 bits."""

MAX_THREADS = 4096
MAX_RANKS = 64
_PORT_DIGITS = 5
"""Most digits of a port. Python refuses to parse integers of thousands of digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings of the model to load and the place where it runs."""

    model: str = "embedded"
    """A Hugging Face model folder, a GGUF file, a hub id, or 'embedded' for the model that ships with the package."""
    tokenizer: str | None = None
    """Another tokenizer: a folder, a GGUF file, a hub id or 'embedded'; default: the model's own."""
    load_format: LoadFormat = "auto"
    """Source of the weights: 'auto' reads the model's files, 'dummy' makes random ones of config.json's shape."""
    dtype: DType = "auto"
    """Type of weights and activations, and of KV unless kv_cache_dtype sets another. 'auto' keeps the checkpoint's
    type, but takes bfloat16 for a quantized GGUF file, and for float16 on the native kernels of a CPU. If all matrices
    of a GGUF file are quantized, activations are float32 and KV is bfloat16."""
    quantization: Quantization | None = None
    """Quantize the weights while loading: 'int8' or 'fp8' (e4m3; a scale per channel), or 'int4' (a scale per group of
    weights). A quantized checkpoint needs no setting; the name of its method ('awq', 'gptq', 'compressed-tensors',
    'mxfp4', 'gguf') is then checked against it."""
    group_size: int | None = None
    """Weights that share a scale in quantization 'int4': 32 (the default), 64 or 128; larger groups are less exact."""
    activation_quantization: ActivationQuantization | None = None
    """Type of the activations that quantized weights are multiplied with. 'int8' quantizes activations on the fly: the
    native kernels' default, faster for one request at a time. 'none' keeps them as they are: more exact, and faster
    with long prompts and large batches on processors with Intel AMX. torch's operators only support 'none'."""
    device: Device = "cpu"
    """Device that the model runs on."""
    kernels: Kernels = "auto"
    """Kernels to compute with: 'auto' takes the native kernels at the best level of this processor, or Triton's on a
    GPU, or else torch's operators; 'reference' takes torch's operators; 'triton' takes the GPU's or fails; any other
    name is a level of the native kernels."""
    batch_invariant: bool = True
    """Keep a request's tokens the same, bit for bit, alone and in any batch. Without it, float weights are multiplied
    by torch's products (on a GPU: cuBLAS), which may be faster, but may sum a row in another order in another batch.
    The native kernels of a CPU are always batch-invariant."""
    enforce_eager: bool = False
    """On a GPU: use no CUDA graphs for decodes; the host launches every kernel of every step."""
    threads: int | None = None
    """Threads of the model's operators, in each rank; default: the processors that this process may use, divided among
    the ranks."""
    cpu_affinity: str | None = None
    """CPUs that the threads are pinned to, one each, first the one that runs the model: '0,2' or '0-3,8'. With several
    ranks on this machine, the first rank gets the first CPUs. torch's operators share them. Without `threads`, the list
    also sets the number of threads. Default: the operating system places threads. Linux only."""
    tensor_parallel_size: int = 1
    """Processes (ranks) that compute the model together, each with its share of every matrix's rows and of the KV
    heads; the output stays the same bit for bit. Sizes of KV memory are per rank."""
    tensor_parallel_address: str | None = None
    """host:port where the other ranks reach this one, if they are started by hand, one per host (`python -m
    twostroke.startup.rank_process RANK SIZE HOST:PORT`); default: they are started here. Anyone who reaches the port
    may join, so use a private network."""
    enable_expert_parallel: bool = False
    """With several ranks and a model with experts: give each rank whole experts instead of a share of the rows of each;
    the output stays the same bit for bit. Pays off if experts are few and large, or the links between ranks are slow.
    """
    packed_cache: str | None = None
    """Folder that keeps the packed form of the weights for the next start, which maps it into memory: 'default' is
    ~/.cache/twostroke/packed. It is as large as the weights; native kernels on one rank only."""
    verify: bool = False
    """Hash the model's files and the packed form completely, and compare them with the hashes in packed_cache."""
    max_model_len: int | None = None
    """Longest prompt plus output; default: the model's context, shortened to fit into the KV memory."""
    max_logprobs: int = 20
    """Most log-probabilities a request may ask for per token."""
    event_log: Path | None = None
    """File for the event log: one JSON object per line, without the text of prompts or outputs."""

    def __post_init__(self) -> None:
        """Check what needs no model; paths may be strings or Path objects."""
        for name, path_type in (("model", str), ("tokenizer", str), ("packed_cache", str), ("event_log", Path)):
            self._convert_path(name, path_type)
        check_choice("load_format", self.load_format, get_args(LoadFormat))
        check_choice("dtype", self.dtype, get_args(DType))
        if self.quantization is not None:
            check_choice("quantization", self.quantization, get_args(Quantization))
        self._check_load_format()
        check_bool("enforce_eager", self.enforce_eager)
        if self.enforce_eager and self.device != "cuda":
            raise InvalidParameter("enforce_eager", True, f"changes nothing with device={self.device}", "Leave it out.")
        self._check_group_size()
        if self.activation_quantization is not None:
            check_choice("activation_quantization", self.activation_quantization, get_args(ActivationQuantization))
        check_choice("device", self.device, get_args(Device))
        check_choice("kernels", self.kernels, get_args(Kernels))
        self._check_batch_invariant()
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS)
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        self._check_address()
        self._check_expert_parallel()
        self._check_cpu_affinity()
        self._check_packed_cache()
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2, limit="a whole number of at least 2 (one in, one out)")
        check_int("max_logprobs", self.max_logprobs, 0)

    @property
    def num_local_ranks(self) -> int:
        """Ranks that share this host's memory and processors."""
        return 1 if self.tensor_parallel_address else self.tensor_parallel_size

    def cpus_of(self, rank: int) -> tuple[int, ...]:
        """Return the CPUs that a rank's threads are pinned to; empty: no pinning."""
        if self.cpu_affinity is None:
            return ()
        cpus = read_cpu_list("cpu_affinity", self.cpu_affinity)
        size = len(cpus) // self.num_local_ranks
        first = rank % self.num_local_ranks * size
        return cpus[first : first + size]

    def _check_cpu_affinity(self) -> None:
        if self.cpu_affinity is None:
            return
        name, given, ranks = "cpu_affinity", self.cpu_affinity, self.num_local_ranks
        num_cpus = len(read_cpu_list(name, given))
        if self.device != "cpu":
            limit = f"applies to CPU threads, and the model runs on device={self.device}"
            raise InvalidParameter(name, given, limit, "Leave it out.")
        if self.threads is not None and self.threads * ranks != num_cpus:
            of_ranks = "" if ranks == 1 else f" in each of {ranks} ranks"
            needed = f"threads={self.threads}{of_ranks} needs {self.threads * ranks}, one each"
            limit = f"names {counted(num_cpus, 'CPU')}, and {needed}"
            raise InvalidParameter(name, given, limit, "Name as many, or leave threads out.")
        if num_cpus % ranks:
            limit = f"names {counted(num_cpus, 'CPU')}, which {ranks} ranks cannot share equally"
            raise InvalidParameter(name, given, limit, "Name the same number for each rank.")

    def _check_address(self) -> None:
        address = self.tensor_parallel_address
        if address is None:
            return
        check_text("tensor_parallel_address", address)
        host, _, port = address.rpartition(":")
        is_port = port.isdecimal() and len(port) <= _PORT_DIGITS and 0 < int(port) < 1 << 16
        if not host or "/" in host or not is_port:
            raise InvalidParameter(
                "tensor_parallel_address", address, "must be host:port", "For example 10.0.0.1:5555."
            )
        if self.tensor_parallel_size == 1:
            limit = "changes nothing without tensor_parallel_size of 2 or more"
            raise InvalidParameter("tensor_parallel_address", address, limit)

    def _check_expert_parallel(self) -> None:
        check_bool("enable_expert_parallel", self.enable_expert_parallel)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            limit = "needs several ranks, and tensor_parallel_size is 1"
            raise InvalidParameter(
                "enable_expert_parallel", True, limit, "Give --tensor-parallel-size, or leave it out."
            )

    def _check_batch_invariant(self) -> None:
        check_bool("batch_invariant", self.batch_invariant)
        if not self.batch_invariant and self.device == "cpu" and self.kernels not in ("reference", "triton"):
            limit = f"applies to GPUs and to torch's kernels, not to device=cpu with kernels={self.kernels}"
            raise InvalidParameter("batch_invariant", False, limit, "Leave it out, or use --kernels reference.")

    def _check_packed_cache(self) -> None:
        check_bool("verify", self.verify)
        if self.packed_cache is None:
            if self.verify:
                limit = "compares with the hashes in a packed cache, and none is named"
                raise InvalidParameter("verify", True, limit, "Give packed_cache too (--packed-cache default).")
            return
        name, given, remedy = "packed_cache", self.packed_cache, "Leave it out."
        if self.device != "cpu" or self.kernels in ("reference", "triton"):
            limit = f"keeps what native kernels pack, not device={self.device} and kernels={self.kernels}"
            raise InvalidParameter(name, given, limit, remedy)
        if self.tensor_parallel_size > 1:
            limit = f"keeps whole models, not the shares of {self.tensor_parallel_size} ranks"
            raise InvalidParameter(name, given, limit, remedy)
        if self.load_format == "dummy":
            raise InvalidParameter(name, given, "keeps the weights of files, not random ones", remedy)

    def _check_load_format(self) -> None:
        if self.load_format == "auto" or self.quantization in (None, *get_args(QuantizationOnLoad)):
            return
        limit = f"random weights are floats, and quantization={self.quantization} needs a quantized checkpoint"
        remedy = f"Quantize them while loading ({', '.join(get_args(QuantizationOnLoad))}), or leave one out."
        raise InvalidParameter("load_format", self.load_format, limit, remedy)

    def _check_group_size(self) -> None:
        if self.group_size is None:
            return
        check_int("group_size", self.group_size, 1)
        if self.group_size not in GROUP_SIZES:
            raise InvalidParameter("group_size", self.group_size, f"must be one of {', '.join(map(str, GROUP_SIZES))}")
        if self.quantization != "int4":
            raise InvalidParameter("group_size", self.group_size, "changes nothing without quantization int4")

    def _convert_path(self, name: str, path_type: type[str] | type[Path]) -> None:
        given: Any = getattr(self, name)
        if given is None and name != "model":
            return
        if not isinstance(given, str | Path):
            raise InvalidParameter(name, cast(object, given), "must be a string or a Path")
        check_text(name, str(given) if given else given)
        object.__setattr__(self, name, path_type(given))
