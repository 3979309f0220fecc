"""Every committed result was measured on a clean checkout of a commit that is in this repository's history."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = {path.stem: path for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}
COMMITS_LOST = {
    "companions",
    "compare-Qwen2.5-Coder-1.5B.Q4_K_M",
    "qwen3-0.6b-bf16-batch1",
    "qwen3-0.6b-bf16-batch32",
    "qwen3-0.6b-bf16-batch8",
    "qwen3-0.6b-int4-batch1",
    "qwen3-0.6b-int4-batch32",
    "qwen3-0.6b-int4-batch8",
    "qwen3-0.6b-int8-batch1",
    "qwen3-0.6b-int8-batch32",
    "qwen3-0.6b-int8-batch8",
    "spec-gate",
    "spec-gate-models",
}
"""Results of commits that a rewrite of the history dropped, until they are measured again. No name may be added."""
UNCLEAN: set[str] = set()
"""Results of checkouts with changes, until they are measured again. No name may be added."""


@cache
def history() -> frozenset[str]:
    """Return the commits that lead to HEAD; skip the test in a tree without them."""
    top, shallow = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "--is-shallow-repository")
    if top is None or Path(top).resolve() != ROOT.resolve():
        pytest.skip("not a git checkout: commits of results cannot be looked up")
    if shallow != "false":
        pytest.skip("a shallow clone: commits of results cannot be looked up (git fetch --unshallow)")
    return frozenset((_git("rev-list", "HEAD") or "").split())


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def result(name: str) -> dict[str, Any]:
    return json.loads(RESULTS[name].read_text())


def test_every_result_is_of_a_commit_before_this_one() -> None:
    commits = history()
    lost = {name for name in RESULTS if result(name)["commit"] not in commits}
    assert lost == COMMITS_LOST, "measure again what was measured elsewhere; take off the list what was"


def test_every_result_is_of_a_clean_checkout() -> None:
    """Files that training/ wrote do not say it."""
    assert {name for name in RESULTS if result(name).get("dirty", False)} == UNCLEAN
