"""Free memory as the machine and the control group see it, from files like the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factories import uniform_layout
from model_folders import write_random_model
from twostroke.config.rope import RopeConfig
from twostroke.layers.elementwise import Rotary, inverse_frequencies
from twostroke.model.checkpoint import read_model_config
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from twostroke.runner.input_batch import RequestTable
from twostroke.runner.memory import context_bytes, free_host_bytes, own_cgroups, step_bytes
from twostroke.sampling_params import SamplingParams

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal:  {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    return path


def cgroup(folder: Path, limit: str, used: int, droppable: int, *, version: int) -> Path:
    folder.mkdir()
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    )
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {droppable}\n")
    return folder


def test_without_a_control_group_the_machine_decides(meminfo: Path, tmp_path: Path) -> None:
    assert free_host_bytes(meminfo, (tmp_path / "none",)) == 16 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_cuts_it_down(meminfo: Path, tmp_path: Path, version: int) -> None:
    folder = cgroup(tmp_path / "group", str(8 * GIB), 5 * GIB, 1 * GIB, version=version)
    assert free_host_bytes(meminfo, (folder,)) == 4 * GIB  # the page cache can be dropped again


@pytest.mark.parametrize(("version", "unlimited"), [(2, "max"), (1, str((1 << 63) - 4096))])
def test_an_unlimited_group_changes_nothing(meminfo: Path, tmp_path: Path, version: int, unlimited: str) -> None:
    folder = cgroup(tmp_path / "group", unlimited, 5 * GIB, 0, version=version)
    assert free_host_bytes(meminfo, (folder,)) == 16 * GIB


def test_a_full_group_has_nothing_left(meminfo: Path, tmp_path: Path) -> None:
    folder = cgroup(tmp_path / "group", str(GIB), 2 * GIB, 0, version=2)
    assert free_host_bytes(meminfo, (folder,)) == 0


def test_the_own_group_and_all_above_it_count(meminfo: Path, tmp_path: Path) -> None:
    root = cgroup(tmp_path / "root", "max", 0, 0, version=2)
    slice_ = cgroup(root / "user.slice", str(6 * GIB), 1 * GIB, 0, version=2)
    cgroup(slice_ / "job.scope", str(8 * GIB), 1 * GIB, 0, version=2)
    v1 = cgroup(tmp_path / "v1", str((1 << 63) - 4096), 0, 0, version=1)
    cgroup(v1 / "docker", str(3 * GIB), 1 * GIB, 0, version=1)
    membership = tmp_path / "cgroup"

    def free(text: str) -> int:
        membership.write_text(text)
        return free_host_bytes(meminfo, own_cgroups(membership, root, v1))

    assert free("0::/user.slice/job.scope\n") == 5 * GIB
    assert free("0::/\n") == 16 * GIB
    assert free("0::/user.slice/gone.scope\n") == 5 * GIB
    assert free("0::/../user.slice\n") == 16 * GIB
    assert free("4:cpu,memory:/docker\n9:name=systemd:/user.slice\n0::/\n") == 2 * GIB
    membership.unlink()
    assert own_cgroups(membership, root, v1) == (root, v1)


def test_without_proc_the_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_host_bytes(tmp_path / "none", ()) < 1 << 50
    monkeypatch.setattr(os, "sysconf_names", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2})
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.get)
    assert free_host_bytes(tmp_path / "none", ()) == 2 * GIB


_LARGEST_STEP = """
import sys
from twostroke import LLM, SamplingParams
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes

folder, tokens, seqs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = SamplingParams(max_tokens=2, prompt_logprobs=3, logprobs=3, top_p=0.9, repetition_penalty=1.1, seed=0)
sizes = dict(max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=1024, kv_cache_memory=1 << 26)
with LLM(folder, threads=1, **sizes) as llm:
    llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 2, params)  # what is allocated once, whatever the step
    prompts = [{"prompt_token_ids": [i] * (tokens // seqs)} for i in range(seqs)]
    before, resets = resident_bytes(), reset_peak()
    llm.generate(prompts, params)
    print(peak_resident_bytes() - before if resets else -1)
"""


WIDE_INPUTS: dict[str, Any] = {
    "intermediate_size": 256,
    "vocab_size": 2000,
    "hidden_size_per_layer_input": 1024,
    "vocab_size_per_layer_input": 2000,
}
"""With Gemma 4's layers, more numbers a token than its residual stream or its MLP has."""


@pytest.mark.parametrize(
    ("family", "fields", "tokens", "seqs"),
    [("llama", {}, 2048, 4), ("llama", {}, 512, 2), ("gemma4", WIDE_INPUTS, 2048, 4)],
    ids=str,
)
def test_the_largest_step_takes_no_more_than_was_set_aside(
    family: str, fields: dict[str, Any], tokens: int, seqs: int, tmp_path: Path
) -> None:
    """A process of its own, because memory that was free before would hide what a step takes."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 32_000, **fields}
    folder = write_random_model(tmp_path, family, max_position_embeddings=1024, **sizes)
    config = read_model_config(folder)
    command = [sys.executable, "-c", _LARGEST_STEP, str(folder), str(tokens), str(seqs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken = int(done.stdout.split()[-1])
    if taken < 0:
        pytest.skip("this kernel does not let a process reset its peak")
    kv_bytes = sum(spec.bytes_per_token("f32") for spec in config.kv_specs) * tokens  # touched for the first time
    reserved = step_bytes(config, max_tokens=tokens, max_num_seqs=seqs, bytes_per_element=4)
    assert taken - kv_bytes <= reserved, "the reserve is too small"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_tables_take_what_is_counted_and_little_to_make(dtype: torch.dtype) -> None:
    head_dim, num_positions = 128, 50_001
    rope = RopeConfig(rope_type="default", theta=10_000.0)
    before, resets = resident_bytes(), reset_peak()
    rotary = Rotary(rope, head_dim, max_model_len=num_positions, dtype=dtype, device=torch.device("cpu"))
    taken = peak_resident_bytes() - before
    counted = Rotary.bytes_for(head_dim, num_positions, dtype.itemsize)
    assert rotary.nbytes == counted
    if resets:
        assert taken <= counted + (20 << 20), "a whole context in float32 is 25 MB, and there were several"
    frequencies, _ = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos, sin = rotary(torch.arange(num_positions))
    assert torch.equal(cos.squeeze(1), torch.cat([angles.cos()] * 2, -1).to(dtype))
    assert torch.equal(sin.squeeze(1), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype))


LAYOUT = uniform_layout([None, 64], block_size=16, num_kv_heads=1, head_dim=4, kv_format="bf16")


def _add(table: RequestTable, count: int, token_ids: list[int]) -> None:
    rules: Any = SimpleNamespace(rules=SimpleNamespace(params=SamplingParams()))
    for _ in range(count):
        table.add(f"r{len(table)}", [len(table), *token_ids], rules, len(token_ids) + 1)


@pytest.mark.parametrize("num_requests", [1, 8, 9, 33])
def test_the_table_of_requests_takes_what_is_counted(num_requests: int) -> None:
    table = RequestTable(LAYOUT, 1000)
    _add(table, num_requests, [1])
    grown = 1.5 if num_requests > 8 else 1  # while it was copied the last time
    assert table.nbytes * grown == RequestTable.bytes_for(LAYOUT, 1000, num_requests)


def test_a_table_that_grows_copies_what_is_known_and_no_more() -> None:
    """A row is as long as the longest request may be; copying all of it would write into memory that is not needed."""
    table = RequestTable(LAYOUT, 1000)
    _add(table, 8, [7, 8, 9])
    table.token_ids[:, 4:] = -1
    _add(table, 1, [7, 8, 9])
    assert [table.token_ids[i, :4].tolist() for i in range(9)] == [[i, 7, 8, 9] for i in range(9)]
    assert not table.token_ids[:, 4:].any()
    assert table.num_tokens.tolist() == [4] * 9 + [0] * 7


def test_what_grows_with_the_context_is_kept_free(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "llama")
    config = read_model_config(folder)
    sizes: dict[str, Any] = {"layout": LAYOUT, "max_num_seqs": 64, "bytes_per_element": 4}
    short, long = (context_bytes(config, max_model_len=n, **sizes) for n in (640, 6400))
    assert long == 10 * short - 9 * 4 * 96, "all of it, but a count of tokens per row"
    rotary, ids = 2 * 640 * config.layers[0].kv.head_dim * 4, 96 * 640 * 4
    assert rotary + ids < short < rotary + ids * 1.2
