"""Threads on CPUs that the user names: which, who refuses, and that outputs are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from twostroke import LLM, SamplingParams
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.pools import PoolConfig, prefill_engine
from twostroke.errors import InvalidParameter
from twostroke.kernels import native
from twostroke.startup.preparation import prepare

CAN_PIN = hasattr(os, "sched_setaffinity")
USABLE = sorted(os.sched_getaffinity(0)) if CAN_PIN else []
needs_two = pytest.mark.skipif(len(USABLE) < 2, reason="two CPUs, and a system that pins threads to them")


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"cpu_affinity": "0,x"}, "must be numbers of CPUs and ranges of them"),
        ({"cpu_affinity": ""}, "must be numbers of CPUs and ranges of them"),
        ({"cpu_affinity": "3-1"}, "the range 3-1 ends before it begins"),
        ({"cpu_affinity": "0-3,2"}, "names CPU 2 twice"),
        ({"cpu_affinity": "0-9999"}, "CPUs go to 4095"),
        ({"cpu_affinity": 3}, "must be a string"),
        ({"cpu_affinity": "0-3", "threads": 2}, "names 4 CPUs, and threads=2 needs 2, one each"),
        ({"cpu_affinity": "0", "threads": 2}, "names 1 CPU, and threads=2 needs 2, one each"),
        ({"cpu_affinity": "0-2", "tensor_parallel_size": 2}, "names 3 CPUs, which 2 ranks cannot share equally"),
        ({"cpu_affinity": "0", "device": "cuda"}, "applies to CPU threads"),
    ],
    ids=str,
)
def test_what_contradicts_is_refused(given: dict[str, Any], limit: str) -> None:
    with pytest.raises(InvalidParameter, match="cpu_affinity=") as raised:
        LoadConfig(**given)
    assert limit in str(raised.value)


def test_ranks_of_a_machine_have_their_own() -> None:
    load = LoadConfig(cpu_affinity="8,0-2", tensor_parallel_size=2, threads=2)
    assert [load.cpus_of(rank) for rank in range(2)] == [(8, 0), (1, 2)]
    elsewhere = LoadConfig(cpu_affinity="0-1", tensor_parallel_size=2, tensor_parallel_address="host:1")
    assert [elsewhere.cpus_of(rank) for rank in range(2)] == [(0, 1), (0, 1)]
    assert LoadConfig().cpus_of(0) == ()


def test_pools_refuse_it() -> None:
    config = EngineConfig.from_keywords(cpu_affinity="0")
    with pytest.raises(InvalidParameter, match="pools are several processes"):
        prefill_engine(config, PoolConfig(prefill=1, decode=1))


@pytest.mark.skipif(not CAN_PIN, reason="a system that pins threads")
def test_cpus_that_the_process_may_not_use_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"may not use CPU 4095; it may use CPU.* Name some of these"):
        prepare(EngineConfig.from_keywords(cpu_affinity="4095"))


def test_a_system_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(InvalidParameter, match="cpu_affinity='0': Darwin has no sched_setaffinity"):
        prepare(EngineConfig.from_keywords(cpu_affinity="0"))


def places() -> list[list[int]]:
    """Return the processors on which each thread of this process may run."""
    return sorted(sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task"))


def show_places(kernels: str) -> None:
    """Write the places of threads while a model exists that has generated, and after it."""
    first, second = USABLE[:2]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    plain = LLM("embedded", threads=2, kernels=kernels, kv_cache_memory="16MiB")
    expected = plain.generate("Once", params)[0].outputs[0].token_ids
    del plain
    llm = LLM("embedded", cpu_affinity=f"{second},{first}", kernels=kernels, kv_cache_memory="16MiB")
    assert llm.generate("Once", params)[0].outputs[0].token_ids == expected
    assert f"2 threads on CPUs {second}, {first}" in llm.engine.startup_lines[0]
    own, found = sorted(os.sched_getaffinity(0)), places()
    llm.close()
    sys.stdout.write(f"own {own} threads {found} after {sorted(os.sched_getaffinity(0))}\n")


def shown(kernels: str) -> str:
    script = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_cpu_affinity as t; "
    command = [sys.executable, "-c", f"{script}t.show_places({kernels!r})"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout


@needs_two
@pytest.mark.skipif(not native.is_built(), reason="native kernels")
def test_each_thread_has_its_cpu_and_the_callers_is_given_back() -> None:
    first, second = USABLE[:2]
    found = shown("native")
    assert f"own [{second}] " in found
    assert f"[{first}]" in found.partition("threads")[2].partition("after")[0], found
    assert found.rstrip().endswith(f"after {USABLE}"), found


@needs_two
def test_threads_of_torch_share_the_cpus() -> None:
    assert f"own {USABLE[:2]} " in shown("reference")


@needs_two
@pytest.mark.skipif(not native.is_built(), reason="native kernels")
def test_threads_that_nobody_pins_go_where_they_like_again() -> None:
    """A pool of as many threads is made anew."""
    operators = native.operators()
    assert operators.pin_threads is not None

    def num_pinned() -> int:
        return sum(place == [USABLE[1]] for place in places())

    before = num_pinned()
    operators.pin_threads(USABLE[:2])
    pinned = num_pinned()
    operators.set_num_threads(2)
    assert (pinned, num_pinned()) == (before + 1, before)
    operators.set_num_threads(1)
