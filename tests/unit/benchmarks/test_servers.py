"""Servers beside each other under one load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.servers import OURS, ServersOptions, print_servers, run_servers
from twostroke.errors import InvalidParameter, SetupError

AGAIN = f"again={sys.executable} -m twostroke serve embedded --port {{port}} --threads 1"
SMALL: dict[str, Any] = {
    "threads": 1,
    "streams": 2,
    "rounds": 2,
    "prompt_lengths": "fixed:8",
    "output_lengths": "fixed:4",
}


def test_ours_beside_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_servers(ServersOptions(server=(AGAIN,), results=tmp_path, **SMALL))
    assert {name: len(rates) for name, rates in results["output_tok_s"].items()} == {OURS: 2, "again": 2}
    assert results["ratios"].keys() == {"again"}
    saved = json.loads((tmp_path / "servers-embedded.json").read_text())
    assert saved["results"] == results
    again = f"again={Path(sys.executable).name} -m twostroke serve embedded --port '{{port}}' --threads 1"
    assert saved["config"]["server"] == [again], "no folder of this machine"
    print_servers(results)
    assert "again" in capsys.readouterr().out


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    ends = f"broken={sys.executable} -c \"import sys; sys.exit('no model {{port}}')\""
    with pytest.raises(SetupError, match=r"the server broken was not ready .* it said: no model \d+"):
        run_servers(ServersOptions(server=(ends,), results=tmp_path, **SMALL))
    with pytest.raises(SetupError, match="cannot be started: /no/such"):
        run_servers(ServersOptions(server=("none=/no/such {port}",), results=tmp_path, **SMALL))


@pytest.mark.parametrize("given", ["llama-server --port {port}", "a=llama-server", f"{OURS}=x {{port}}"])
def test_commands_that_are_none(given: str) -> None:
    with pytest.raises(InvalidParameter, match=r"NAME=COMMAND with a \{port\}"):
        ServersOptions(server=(given,))


def test_lengths_that_are_none() -> None:
    with pytest.raises(InvalidParameter) as refusal:
        ServersOptions(prompt_lengths="many")
    assert refusal.value.name == "prompt_lengths"
