"""Memory that this process may still take by the kernel and its control group, and memory of a step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.kernels.reference.attention_plan import MAX_GATHERED, MAX_SCORES, PARTITION
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.elementwise import Rotary
from twostroke.runner.decode_graphs import PART_ROWS
from twostroke.runner.input_batch import RequestTable
from twostroke.sampling.logprobs import num_slice_rows

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_FLOAT32 = 4
_RUNS_BYTES = 8 << 20
"""Bytes of partial sums for products that do not fill a card: four 64 x 64 tiles for each of about 128 processors."""


def step_bytes(model: ModelConfig, *, max_tokens: int, max_num_seqs: int, bytes_per_element: int) -> int:
    """Return the most memory that one step takes besides weights and KV.

    ```
    per token      3 hidden (residual, norm, output; 4 where two norms read the residual, or layers a copy of it)
                   + token inputs of all layers (Gemma 4) + the largest of
                     attention  2 qkv + 3 q            a product's output exists twice while tiles are joined,
                     MLP        5 intermediate         gate and up are two of them, their product one
                                or, without a gate, 2 and 4 in float32 (the activation)
                     inputs     5 times the token inputs of all layers, while they are computed
                   and 2 hidden in float32 (the norm)
    per logits row 5 vocab in float32                  logits, processed, probabilities, sorted, noise
    per scored row 4 vocab in float32                  logits in tiles and joined, log-probabilities, sorted
    attention      the K and V gathered by a pass, twice, and in float32 where they are stored in another format; its
                   scores in both types and its float32 results
    ```

    Args:
        model: shape of the model.
        max_tokens: tokens of the largest step.
        max_num_seqs: rows of logits that are sampled at once; prompt log-probabilities come in slices.
        bytes_per_element: bytes of a weight or activation.
    """
    without_gate = 2 + 4 * _FLOAT32 // bytes_per_element
    of_layers = (
        max(
            2 * (layer.q_size + 2 * layer.kv_size) + 3 * layer.q_size,
            (5 if layer.has_gate else without_gate) * layer.intermediate_size,
            _of_experts(layer, model.hidden_size, bytes_per_element),
        )
        for layer in model.kinds
    )
    per_token = _num_elements(model, of_layers) * bytes_per_element + 2 * model.hidden_size * _FLOAT32
    sampled = 5 * min(max_num_seqs, max_tokens)
    scored = 4 * min(num_slice_rows(model.vocab_size), max_tokens)
    gathered = MAX_GATHERED * (2 * bytes_per_element + _FLOAT32)
    results = MAX_SCORES * max(layer.kv.head_dim for layer in model.kinds) // PARTITION * _FLOAT32
    attention = gathered + MAX_SCORES * (bytes_per_element + 2 * _FLOAT32) + results
    return max_tokens * per_token + max(sampled, scored) * model.vocab_size * _FLOAT32 + attention


def _of_experts(layer: LayerSpec, hidden_size: int, bytes_per_element: int) -> int:
    """Return the most numbers that a layer's experts hold for each token.

    For each chosen expert: the rows that it reads, its product twice while parts are joined, its result, and that in
    float32. For the token: its row in float32 for the router, the sum of experts in float32 and in its own type, and
    the results of the shared expert. Beside an MLP also the MLP's result, the experts' input, and the router's normed
    row in float32.
    """
    if layer.experts is None:
        return 0
    spec, floats = layer.experts, _FLOAT32 // bytes_per_element
    of_pair = (4 + floats) * hidden_size + 6 * spec.intermediate_size
    of_shared = 5 * spec.shared_size + 2 * hidden_size if spec.shared_size else 0
    beside_mlp = (floats + 2) * hidden_size if layer.intermediate_size else 0
    return spec.num_chosen * of_pair + (2 * floats + 2) * hidden_size + of_shared + beside_mlp + 8 * spec.num_experts


def _num_elements(model: ModelConfig, of_layers: Iterable[int]) -> int:
    """Return the most numbers that a step holds for each token.

    Args:
        model: shape of the model.
        of_layers: numbers per token that each kind of layer holds besides the residual stream.
    """
    has_two_readers = any(layer.is_parallel and layer.norms != "shared" for layer in model.kinds)
    inputs = sum(layer.token_input_size for layer in model.layers)
    num_hidden = 4 if has_two_readers or inputs else 3
    return num_hidden * model.hidden_size + inputs + max(*of_layers, 5 * inputs)


def gpu_step_bytes(model: ModelConfig, *, max_tokens: int, max_num_seqs: int, bytes_per_element: int) -> int:
    """Return the most memory that one step takes on a GPU besides weights and KV, by what Triton's kernels allocate.

    ```
    per token      hidden and token inputs of all layers, as above, + the largest of
                     attention  qkv + q             a product is written once, heads are rotated in place
                     MLP        3 intermediate      gate and up, and their product; without a gate as above
                     inputs     as above
    per logits row 5 vocab in float32               logits, processed, probabilities, sorted, noise
    per scored row 3 vocab in float32               logits, log-probabilities, sorted
    attention      partial results of split contexts in float32
    products       the runs of those that do not fill a card, in float32
    ```

    The result is a prediction for plans: an engine measures its card.

    Args:
        model: shape of the model.
        max_tokens: tokens of the largest step.
        max_num_seqs: rows of logits sampled at once; prompt log-probabilities are computed in slices.
        bytes_per_element: bytes of a weight or activation.
    """
    sampled = 5 * min(max_num_seqs, max_tokens)
    scored = 3 * min(num_slice_rows(model.vocab_size), max_tokens)
    logits = max(sampled, scored) * model.vocab_size * _FLOAT32
    return _card_pass_bytes(model, max_tokens, bytes_per_element) + logits


def recorded_bytes(model: ModelConfig, *, max_tokens: int, bytes_per_element: int) -> int:
    """Return the most memory that recorded passes take on a GPU.

    They share one pool, as large as the largest pass needs. Their results and plans together take less than that again.

    Args:
        model: shape of the model.
        max_tokens: tokens of the largest pass that is recorded.
        bytes_per_element: bytes of a weight or activation.
    """
    return 2 * _card_pass_bytes(model, max_tokens, bytes_per_element)


def _card_pass_bytes(model: ModelConfig, max_tokens: int, bytes_per_element: int) -> int:
    """Return the part of `gpu_step_bytes` that is not logits."""
    without_gate = 2 + 4 * _FLOAT32 // bytes_per_element
    of_layers = (
        max(
            2 * (layer.q_size + layer.kv_size),
            (3 if layer.has_gate else without_gate) * layer.intermediate_size,
            _of_experts(layer, model.hidden_size, bytes_per_element),
        )
        for layer in model.kinds
    )
    elements = _num_elements(model, of_layers)
    attention = PART_ROWS * max(layer.q_size for layer in model.kinds) * _FLOAT32
    return max_tokens * elements * bytes_per_element + attention + _RUNS_BYTES


def context_bytes(
    model: ModelConfig, layout: KVLayout, *, max_model_len: int, max_num_seqs: int, bytes_per_element: int
) -> int:
    """Return the memory that grows with the longest request: the rotary tables and the table of live requests.

    The KV memory limits the longest request, but this size has to be known before. So it is computed for the length
    that the user or else the model asks for. A context that is shortened to fit takes less. (Preempted requests keep
    their rows: while many of them wait, there are more than `max_num_seqs`.)
    """
    rotary = sum(Rotary.bytes_for(head_dim, max_model_len, bytes_per_element) for _, head_dim in model.ropes)
    return rotary + RequestTable.bytes_for(layout, max_model_len, max_num_seqs)


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: tuple[Path, ...] | None = None) -> int:
    """Return the bytes that can be taken without swapping: the machine's available memory, within its control groups'
    limits.

    Files that the kernel can drop again (page cache) count as free on both sides.

    Args:
        meminfo: the kernel's account of memory.
        cgroups: folders of control groups that limit this process; default: its own and all above.
    """
    available = _available_bytes(meminfo)
    for folder in own_cgroups() if cgroups is None else cgroups:
        left = _cgroup_bytes_left(folder)
        if left is not None:
            available = min(available, left)
    return max(available, 0)


def own_cgroups(
    membership: Path = Path("/proc/self/cgroup"), v2: Path = _CGROUP_V2, v1: Path = _CGROUP_V1
) -> tuple[Path, ...]:
    """Return the control groups of this process and their parents, each of which may set a limit.

    ```
    0::/user.slice/job.scope      version 2: /sys/fs/cgroup/user.slice/job.scope, .../user.slice, /sys/fs/cgroup
    4:memory:/docker/1234         version 1: the same below /sys/fs/cgroup/memory
    ```

    Inside a container the paths may be the host's. Missing folders set no limit, and the root is the container's own
    group.
    """
    found = [v2, v1]
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        root = v2 if not controllers else v1 if "memory" in controllers.split(",") else None
        parts = PurePosixPath(path).parts[1:]
        if root is not None and ".." not in parts:  # ".." means a group outside this namespace
            found += [root.joinpath(*parts[:depth]) for depth in range(len(parts), 0, -1)]
    return tuple(found)


def _available_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _bytes_by_sysconf()


def _bytes_by_sysconf() -> int:
    """Return free memory without /proc (macOS): free pages where the system reports them, otherwise half of all
    pages."""
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_bytes_left(folder: Path) -> int | None:
    """Return limit minus use of one control group; None if it sets no limit or does not exist."""
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
            stat = (folder / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or int(limit) >= 1 << 60:  # no limit: "max", or a huge number in version 1
            return None
        droppable = sum(int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == cache_key)
        return int(limit) - (used - droppable)
    return None
