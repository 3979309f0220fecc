"""Settings of a server with several engine processes: the pools, their router and autoscaler, and each engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

from twostroke.config.cache import CacheConfig, check_block_size
from twostroke.config.checks import check_bool, check_choice, check_int, check_number, check_text
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import resolve_kv_format
from twostroke.config.load import DEFAULT_GROUP_SIZE, MAX_RANKS, LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter, UnknownParameter

KVTransport = Literal["auto", "shm", "tcp", "inproc", "nixl"]
PoolWorkers = Literal["process", "thread"]
MAX_WORKERS = 64
NUMERIC_SETTINGS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "group_size",
    "activation_quantization",
    "device",
    "kernels",
    "batch_invariant",
)
"""Settings that change numerics: if pools differ in one of these, tokens may differ."""
POOL_SETTINGS = (
    *NUMERIC_SETTINGS,
    "enforce_eager",
    "threads",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "block_size",
    "kv_cache_memory",
    "num_kv_blocks",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
)
"""Settings that prefill_config and decode_config may change; all others are the same in both pools."""
_SETTINGS_REMEDY = """For example '{"kv_cache_dtype": "int8"}'."""
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Number of processes per pool, and how they hand KV over."""

    prefill: int = 0
    """Processes that compute prompts and hand their KV over; 0: decode processes compute their own prompts."""
    decode: int = 0
    """Processes that decode; 0, without prefill processes: one process does everything."""
    kv_transport: KVTransport = "auto"
    """Way to move KV between workers: 'shm' reads shared memory, 'tcp' sends it, 'nixl' has NIXL read it (pip
    install 'twostroke[nixl]'), 'inproc' reads it in place between workers that are threads. 'auto' takes 'shm' on one
    machine, 'tcp' in a cluster, and 'inproc' with --pool-workers thread."""
    pool_workers: PoolWorkers = "process"
    """Run workers as processes, or as threads of the server's own process ('thread'), for a notebook or a test. Threads
    compute one at a time, and one that hangs cannot be killed."""
    prefill_block_size: int | None = None
    """Tokens per KV block of prefill processes, if different from --block-size. KV is converted in transit, and only
    blocks that are full in both sizes are handed over."""
    prefill_tensor_parallel_size: int | None = None
    """Ranks of each prefill process, if different from --tensor-parallel-size."""
    prefill_config: Mapping[str, Any] | None = field(default=None, hash=False)
    """Settings of prefill workers alone, by their names: '{"dtype": "bfloat16", "kv_cache_dtype": "int8"}'."""
    decode_config: Mapping[str, Any] | None = field(default=None, hash=False)
    """Settings of decode workers alone, by their names."""
    allow_numeric_drift: bool = False
    """Let workers differ in element type, KV format, quantization, kernels, version or device. KV is converted between
    them, and streams resume on any of them. Tokens may then differ, and responses report it (usage.numeric_drift)."""
    heartbeat_timeout_s: float = 2.0
    """Seconds without a message after which a process is killed and its work continues elsewhere."""
    step_timeout_s: float = 15.0
    """Seconds without a completed step, beyond twenty times the machine's best time for that step, after which a
    process counts as hung: it is killed, and its work continues elsewhere. Where one process does everything, seconds
    without any message count as well; it is restarted, and its requests end with an error."""
    max_prefill: int = 0
    """Most prefill processes under load; 0: the number stays at --prefill."""
    max_decode: int = 0
    """Most decode processes under load; 0: the number stays at --decode."""
    ttft_target_s: float = 1.0
    """Target for the seconds to a first token; prefill processes are added to keep it."""
    tpot_target_s: float = 0.05
    """Target for the seconds per output token; decode processes are added, and prompts sent elsewhere, to keep it."""
    scaling_interval_s: float = 5.0
    """Seconds between decisions about the sizes of the pools."""

    cluster: str | None = None
    """Start the processes on the nodes of a Ray cluster (pip install 'twostroke[ray]'): HOST:PORT of its head, or
    'auto' for RAY_ADDRESS or the cluster that runs on this machine. Each process asks for --threads CPUs, by default
    one."""
    cluster_roles: bool = False
    """In the cluster, make each process also ask for one of the custom resource 'prefill' or 'decode', so that nodes
    with that resource serve that pool."""

    def __post_init__(self) -> None:
        """Check ranges, and that there are decode processes."""
        check_int("prefill", self.prefill, 0, MAX_WORKERS)
        check_int("decode", self.decode, 0, MAX_WORKERS)
        self._check_transport()
        if self.prefill_block_size is not None:
            check_block_size("prefill_block_size", self.prefill_block_size)
        if self.prefill_tensor_parallel_size is not None:
            check_int("prefill_tensor_parallel_size", self.prefill_tensor_parallel_size, 1, MAX_RANKS)
        self._check_settings_of_pools()
        check_bool("allow_numeric_drift", self.allow_numeric_drift)
        check_number("heartbeat_timeout_s", self.heartbeat_timeout_s, 0.2, 600, "0.2 to 600 (seconds)")
        check_number("step_timeout_s", self.step_timeout_s, 1, 86400, "1 to 86400 (seconds)")
        check_bool("cluster_roles", self.cluster_roles)
        if self.cluster is not None:
            self._check_cluster(self.cluster)
        elif self.cluster_roles:
            raise InvalidParameter("cluster_roles", True, "needs a cluster", "Add --cluster auto, or leave it out.")
        if self.prefill and not self.decode:
            raise InvalidParameter("prefill", self.prefill, "needs decode processes", "Add --decode 1.")
        for name in ("ttft_target_s", "tpot_target_s", "scaling_interval_s"):
            check_number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000 seconds", low_open=True)
        self._check_sizes_under_load()
        if not self.decode:
            names = self.__dataclass_fields__.keys() - {"prefill", "decode", "step_timeout_s"}
            self._refuse(names, "needs more than one process", "Add --prefill 1 --decode 1, or leave it out.")
        if not self.max_prefill:
            self._refuse({"ttft_target_s"}, "is the target for adding prefill processes", "Add --max-prefill.")
        if not (self.max_prefill or self.max_decode):
            self._refuse({"scaling_interval_s"}, "needs pools of variable size", "Add --max-prefill or --max-decode.")

    def _check_settings_of_pools(self) -> None:
        """Check names; values are checked with the settings that both pools share (config/pools.py)."""
        for source in ("prefill_config", "decode_config"):
            given = getattr(self, source)
            if given is None:
                continue
            if not isinstance(given, Mapping):
                raise InvalidParameter(source, given, "must be an object of settings", _SETTINGS_REMEDY)
            for name in cast(Mapping[Any, Any], given):
                if name not in POOL_SETTINGS:
                    raise UnknownParameter(str(name), POOL_SETTINGS, source)
        for name in ("block_size", "tensor_parallel_size"):
            value = getattr(self, f"prefill_{name}")
            if value is not None and name in (self.prefill_config or {}):
                limit = f"prefill_config also sets {name}"
                raise InvalidParameter(f"prefill_{name}", value, limit, "Leave one of them out.")

    def _check_transport(self) -> None:
        check_choice("kv_transport", self.kv_transport, get_args(KVTransport))
        check_choice("pool_workers", self.pool_workers, get_args(PoolWorkers))
        if self.kv_transport == "inproc" and self.pool_workers != "thread":
            remedy = "Add --pool-workers thread, or use --kv-transport shm."
            raise InvalidParameter("kv_transport", "inproc", "is for workers that are threads of one process", remedy)

    def _check_sizes_under_load(self) -> None:
        for name, fewest in (("max_prefill", self.prefill), ("max_decode", self.decode)):
            most = getattr(self, name)
            check_int(name, most, 0, MAX_WORKERS)
            if most and not fewest:
                remedy = f"Add --{name.removeprefix('max_')} 1, or leave it out."
                raise InvalidParameter(name, most, "needs a pool with at least one process", remedy)
            if most and most < fewest:
                limit = f"must be at least {name.removeprefix('max_')}, {fewest}"
                raise InvalidParameter(name, most, limit)

    def _refuse(self, names: Set[str], limit: str, remedy: str) -> None:
        """Refuse settings that would change nothing."""
        for name, one in self.__dataclass_fields__.items():
            if name in names and getattr(self, name) != one.default:
                raise InvalidParameter(name, getattr(self, name), limit, remedy)

    def _check_cluster(self, cluster: str) -> None:
        check_text("cluster", cluster)
        if cluster != "auto" and not _HOST_AND_PORT.fullmatch(cluster):
            remedy = "Use --cluster auto on a node of the cluster; ray:// is for clients outside, which have no node."
            raise InvalidParameter("cluster", cluster, "must be 'auto' or HOST:PORT", remedy)
        if self.pool_workers == "thread":
            raise InvalidParameter("pool_workers", "thread", "a cluster needs processes", "Leave out one of them.")
        if self.kv_transport == "shm":
            remedy = "Leave it out, or use --kv-transport tcp."
            raise InvalidParameter("kv_transport", "shm", "processes on several nodes share no memory", remedy)

    @property
    def transport(self) -> Literal["shm", "tcp", "inproc", "nixl"]:
        """Way to move KV, with 'auto' resolved."""
        if self.kv_transport != "auto":
            return self.kv_transport
        if self.pool_workers == "thread":
            return "inproc"
        return "shm" if self.cluster is None else "tcp"

    @property
    def num_workers(self) -> int:
        """Number of processes; 0: no pools."""
        return self.prefill + self.decode


_MAX_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Weights and limits of the router's comparison of routes."""

    tpot_target_s: float = 0.05
    """Seconds per output token that streams should keep. A prefill on a decoding member makes each of its streams one
    token late in this time."""
    late_token_s: float = 0.005
    """Cost of one late token of another request, in seconds of this request's first token; 0: late tokens are free."""
    hand_over_s: float = 0.005
    """Seconds that arranging a hand-over takes; a hand-over must win at least as much."""
    assumed_prefill_tokens_per_s: float = 1000.0
    """Rate of a member that has not prefilled yet, if no other of its kind has either (Member.kind)."""
    num_candidates: int = 4
    """Members of each kind to cost for a request: the least loaded, and as many of those with its prefix. Pools up to
    this size are searched completely."""
    max_hashes: int = 4096
    """Most block hashes to remember of each member's cache, and never more than the member has blocks."""
    hash_stride: int = 4
    """Interval of the prompt blocks to remember; a larger one is coarser and takes less memory."""
    max_links: int = 100_000
    """Most pairs of members whose measured rates are remembered; the latest are kept."""

    def __post_init__(self) -> None:
        for name in ("tpot_target_s", "assumed_prefill_tokens_per_s"):
            check_number(name, getattr(self, name), 0, _MAX_S * 1000, "more than 0", low_open=True)
        for name in ("late_token_s", "hand_over_s"):
            check_number(name, getattr(self, name), 0, _MAX_S, "0 to 1000000 seconds")
        for name in ("num_candidates", "max_hashes", "hash_stride", "max_links"):
            check_int(name, getattr(self, name), 1)


MAX_REPLICAS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Size limits of one pool and rules for changing its size. Each pool has its own."""

    min_replicas: int = 1
    max_replicas: int = 1
    ttft_target_s: float = 1.0
    """Target of the prefill pool, for requests that are handed over."""
    tpot_target_s: float = 0.05
    """Target of the decode pool."""
    queue_share: float = 0.5
    """Share of the TTFT target that waiting may take; the rest is for the prompt's own prefill."""
    up_utilization: float = 0.8
    """Utilization above which members are added."""
    down_utilization: float = 0.6
    """Utilization that the remaining members may have at most when one is removed. Below up_utilization, so that the
    pool's size is stable between the two."""
    max_step_up: int = 4
    """Most members that one decision adds."""
    hold_intervals: int = 6
    """Consecutive intervals that must favour fewer members before one is removed."""

    def __post_init__(self) -> None:
        check_int("min_replicas", self.min_replicas, 1, MAX_REPLICAS)
        limit = f"at least min_replicas, {self.min_replicas}, and at most {MAX_REPLICAS}"
        check_int("max_replicas", self.max_replicas, self.min_replicas, MAX_REPLICAS, limit=limit)
        for name in ("ttft_target_s", "tpot_target_s"):
            check_number(name, getattr(self, name), 0, 1e6, "more than 0 and at most 1000000 seconds", low_open=True)
        for name in ("queue_share", "up_utilization", "down_utilization"):
            check_number(name, getattr(self, name), 0, 1, "more than 0 and at most 1", low_open=True)
        for name in ("max_step_up", "hold_intervals"):
            check_int(name, getattr(self, name), 1)
        if self.down_utilization >= self.up_utilization:
            limit = f"must be less than up_utilization, {self.up_utilization:g}, or the pool grows and shrinks in turn"
            raise InvalidParameter("down_utilization", self.down_utilization, limit)


def prefill_engine(config: EngineConfig, pools: PoolConfig) -> EngineConfig:
    """Return the engine settings of a prefill worker, without speculative decoding.

    Raises:
        InvalidParameter: a value of prefill_config is out of its range, or contradicts another setting.
    """
    given: dict[str, Any] = dict(pools.prefill_config or {})
    flags = {
        "block_size": pools.prefill_block_size,
        "tensor_parallel_size": pools.prefill_tensor_parallel_size,
    }
    given |= {name: value for name, value in flags.items() if value is not None}
    return _changed("prefill_config", replace(config, speculative_config=None), given)


def decode_engine(config: EngineConfig, pools: PoolConfig) -> EngineConfig:
    """Return the engine settings of a decode worker.

    Raises:
        InvalidParameter: a value of decode_config is out of its range, or contradicts another setting.
    """
    return _changed("decode_config", config, pools.decode_config or {})


def check_numerics(config: EngineConfig, pools: PoolConfig) -> None:
    """Check that both pools compute with the same numerics, as far as settings determine it, or that drift is allowed.

    Raises:
        InvalidParameter: pools differ in a setting that tokens depend on, and drift is not allowed.
    """
    if pools.allow_numeric_drift:
        return
    prefill, decode = (_numerics(one(config, pools)) for one in (prefill_engine, decode_engine))
    differing = [name for name in NUMERIC_SETTINGS if prefill[name] != decode[name]]
    if differing:
        sides = (", ".join(f"{name}={side[name]}" for name in differing) for side in (prefill, decode))
        limit = "prefill workers have {}, decode workers {}: tokens may differ from one to the other".format(*sides)
        remedy = "Give both pools the same values, or allow it (--allow-numeric-drift)."
        source = "prefill_config" if pools.prefill_config else "decode_config"
        raise InvalidParameter(source, dict(getattr(pools, source)), limit, remedy)


def _numerics(config: EngineConfig) -> dict[str, Any]:
    """Return the values of NUMERIC_SETTINGS, with defaults and aliases resolved as far as possible without the
    model."""
    load = config.load
    found: dict[str, Any] = {name: getattr(load, name) for name in NUMERIC_SETTINGS if name != "kv_cache_dtype"}
    wanted = config.cache.kv_cache_dtype
    known = wanted != "auto" or load.dtype != "auto"
    found["kv_cache_dtype"] = resolve_kv_format(wanted, load.dtype) if known else "auto"
    if load.quantization == "int4":
        found["group_size"] = load.group_size or DEFAULT_GROUP_SIZE
    return found


def _changed(source: str, config: EngineConfig, given: Mapping[str, Any]) -> EngineConfig:
    """Return a config with some settings changed; errors name `source`."""
    if config.load.cpu_affinity is not None:
        limit = "pools are several processes, which would share these CPUs"
        raise InvalidParameter("cpu_affinity", config.load.cpu_affinity, limit, "Leave it out.")
    parts: dict[str, Any] = {"load": config.load, "cache": config.cache, "scheduler": config.scheduler}
    kinds = {"load": LoadConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
    of_part = {part: {f.name: given[f.name] for f in fields(kind) if f.name in given} for part, kind in kinds.items()}
    changed = of_part["load"]
    if changed.get("quantization", "int4") != "int4":  # a shared group size only applies to int4
        changed.setdefault("group_size", None)
    if "kv_cache_memory" in given or "num_kv_blocks" in given:  # each replaces the other
        of_part["cache"] = {"kv_cache_memory": None, "num_kv_blocks": None, **of_part["cache"]}
    try:
        return replace(config, **{part: replace(parts[part], **values) for part, values in of_part.items() if values})
    except InvalidParameter as error:
        name = f"{source}.{error.name}" if error.name in given else error.name
        raise InvalidParameter(name, error.value, error.limit, error.remedy) from None
