"""Hand-over ends of an engine in a pool, and the facts that determine the bits of K and V.

Two processes compare these facts before any KV is transferred.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from twostroke.config.kv_format import KVFormat
from twostroke.config.load import DEFAULT_GROUP_SIZE, LoadConfig
from twostroke.config.model import ModelConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.handover_messages import EndHold, HandoverSettings, KVFetched, LenderAddress
from twostroke.engine.journal import Journal
from twostroke.engine.kv_endpoints import KVEndpoints
from twostroke.engine.kv_fetching import KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.errors import SetupError
from twostroke.gguf.container import parts_of
from twostroke.kernels.reference.kv_codec import recode
from twostroke.kv_transfer.block_import import BlockReading
from twostroke.kv_transfer.borrower import KVBorrower
from twostroke.kv_transfer.geometry import KV_CACHE_DTYPE, KVGeometry
from twostroke.kv_transfer.lender import KVLender, LendableMemory
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.runner.model_runner import ModelRunner
from twostroke.scheduler.scheduler import Scheduler
from twostroke.version import __version__


@dataclass(frozen=True, slots=True)
class HandoverSetup:
    """Settings of an engine in a pool, in addition to its config."""

    port: HandoverSettings
    epoch: int
    """Number that identifies the process."""
    post: Callable[[KVFetched | EndHold], object]
    """Function called in another thread with a message for PoolEngine.hand_over: an import has ended, or blocks are not
    read any more."""


def shared_memory_for(port: HandoverSettings, num_ranks: int, num_bytes: int) -> SharedMemory | None:
    """Create memory for a KV cache that other processes on this machine map; return None if none does.

    Other engines on this machine map the memory they fetch from; rank 0 maps that of all ranks, to lend and to fill it.

    Args:
        port: hand-over settings; an engine that neither lends nor fetches may have ranks on other hosts.
        num_ranks: of the engine.
        num_bytes: of each rank's cache.

    Raises:
        SetupError: the system has no such memory.
    """
    hands_over = port.lends_at is not None or port.fetches
    is_mapped_elsewhere = port.lends_at is not None and port.lends_at.is_local
    if not hands_over or (num_ranks == 1 and not is_mapped_elsewhere):
        return None
    try:
        return SharedMemory(num_ranks, num_bytes)
    except (OSError, AttributeError) as error:  # AttributeError: not Linux
        alone = " and --tensor-parallel-size 1" if num_ranks > 1 else ""
        raise SetupError(
            f"no shared memory for a KV cache of {num_bytes:,} bytes ({error}). Hand KV over by TCP (--kv-transport "
            f"tcp){alone}, or serve with one process."
        ) from None


def build_handovers(
    ends: HandoverSetup,
    geometry: KVGeometry,
    scheduler: Scheduler,
    journal: Journal,
    runner: ModelRunner,
    shared: SharedMemory | None,
) -> tuple[KVEndpoints, LenderAddress | None]:
    """Return an engine's hand-over ends, and the address at which it lends.

    Args:
        ends: settings of the ends.
        geometry: of this engine.
        scheduler: of the engine.
        journal: of the engine.
        runner: owner of the KV cache.
        shared: memory of all ranks' caches, if processes map it.

    Raises:
        SetupError: the engine cannot listen at its address, or NIXL is not installed.
    """
    kv = runner.kv
    own = kv.pool_bytes()
    others = () if shared is None else shared.descriptors[1:]
    memory = KVMemory(kv.layout, own, *(memoryview(mmap.mmap(other, len(own))) for other in others))
    block_size, port = kv.layout.block_size, ends.port
    lending = fetching = where = None
    if port.lends_at is not None:
        lent = NixlAgent(memory) if port.lends_at.by_nixl else shared if port.lends_at.is_local else None
        orders = tuple(runner.head_order(group.spec, block_size) for group in kv.layout.groups)
        lender = KVLender(
            LendableMemory(memory, lent, orders),
            geometry,
            epoch=ends.epoch,
            clock=monotonic_clock,
            is_over=lambda lease_id: ends.post(EndHold(lease_id)),
        )
        lending = KVLending(scheduler, lender, kv.layout, split_layers=memory.num_layers if memory.num_ranks > 1 else 0)
        kv.layer_written = lending.layer_written
        try:
            where = LenderAddress(lender.listen(port.lends_at), ends.epoch)
        except OSError as error:
            raise SetupError(f"{port.lends_at}: cannot lend KV there ({error}). Give another address.") from None
    if port.fetches:
        borrower = KVBorrower(
            memory,
            geometry,
            reading=BlockReading(runner.head_order, recode, runner.key_means),
            clock=monotonic_clock,
            allows_drift=port.allows_drift,
            nixl=NixlAgent(memory) if port.fetches_by_nixl else None,
        )
        fetching = KVFetching(scheduler, borrower, journal, layout=kv.layout, clock=monotonic_clock, post=ends.post)
    return KVEndpoints(scheduler, journal, monotonic_clock, lending, fetching), where


_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
_KV_CODEC = "3"
"""Version of the KV formats' meaning, so that a process does not misread KV stored by another version."""


def identity_facts(path: Path, config: ModelConfig, load: LoadConfig, token_ids: Sequence[int]) -> dict[str, str]:
    """Return the identity of a model. Two folders with the same weights are the same model, whatever their names.

    Args:
        path: of the weights.
        config: of the model, fixed for the longest request.
        load: load settings of the user.
        token_ids: of the text from which the means of keys are computed (runner/key_means.py); quantized keys are
            stored without these means.
    """
    ropes = (sorted(asdict(rope).items()) for rope, _ in config.ropes)
    rope = "; ".join(" ".join(f"{name}={value}" for name, value in fields if value is not None) for fields in ropes)
    return {
        "architecture": config.architecture,
        "shape": f"{config.num_layers} layers of {config.hidden_size}, {config.vocab_size} tokens",
        "rope": rope,
        "maths": _digest(_maths(config)),
        "KV codec": _KV_CODEC,
        "tokenizer": f"one with the tokens {_digest(token_ids)}",
        "weights": fingerprint(path) if load.load_format == "auto" else f"random, of {_digest(config)}",
    }


def numerics_facts(
    kernels: str, device: str, load: LoadConfig, *, dtype: str, kv_format: KVFormat, quantization: str | None
) -> dict[str, str]:
    """Return the facts that determine the numerics, named like the settings where there is one.

    Args:
        kernels: name of the operators.
        device: type of the device.
        load: load settings of the user.
        dtype: type of activations.
        kv_format: format of K and V.
        quantization: quantization of the weights as the checkpoint stores them.
    """
    quantized = load.quantization or quantization or "none"
    if load.quantization == "int4":
        quantized += f", group size {load.group_size or DEFAULT_GROUP_SIZE}"
    of_activations = load.activation_quantization or ("int8" if kernels.startswith("native ") else "none")
    return {
        "twostroke": __version__,
        "kernels": kernels,
        "device": device,
        "dtype": dtype,
        KV_CACHE_DTYPE: kv_format,
        "quantization": quantized,
        "activation_quantization": "none" if quantized == "none" else of_activations,
        "batch_invariant": "yes" if load.batch_invariant else "no",
    }


def _maths(config: ModelConfig) -> ModelConfig:
    """Return the config without the fields that do not change the model's computation."""
    return replace(config, dtype="", max_position_embeddings=0, max_context=0, early_exit_layers=())


def _digest(value: object) -> str:
    """Return a digest of a value's `repr`: of token ids, or of a shape, which alone determines random weights."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def fingerprint(path: Path) -> str:
    """Return a digest of weight files: of their sizes and of samples spread over each.

    Reading whole files would take as long as loading. Two fine-tunes of one model differ nearly everywhere, so some
    samples differ.
    """
    files = parts_of(path) if path.is_file() else sorted(path.glob("*.safetensors"))
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            for i in range(_NUM_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()
