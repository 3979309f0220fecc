"""Tiny engines for `benchmarks compare`: scripts that speak the protocol by themselves, one honest and some that fail.

The honest one needs half a second for all prompts together and a tenth for each step after, on a clock of its own, so
that every figure is known beforehand.
"""

from __future__ import annotations

from pathlib import Path

from twostroke.measure.peers.peer import Peer

_HEAD = """
import json, sys, time, os
def answer(message):
    print(json.dumps(message), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "load":
        {load}
    else:
        count = len(order["prompts"])
        tokens = [[0.5 + 0.1 * k, i] for k in range(order["max_tokens"]) for i in range(count)]
        {run}
"""
_LOAD, _RUN = 'answer({"loaded": {"version": "1", "order": json.dumps(order)}})', 'answer({"tokens": tokens})'

SCRIPTS: dict[str, tuple[str, str]] = {
    "honest": (_LOAD, _RUN),
    "missing": ('answer({"failed": "missing", "why": "engine is not installed in its environment"})', _RUN),
    "dies": (_LOAD, 'sys.stderr.write("out of memory\\n"); sys.exit(3)'),
    "names its model": ('answer({"failed": "error", "why": "cannot load " + order["model"]})', _RUN),
    "dies later": (_LOAD, f"sys.exit(3) if order['max_tokens'] == 6 else {_RUN}"),
    "hangs": (_LOAD, "time.sleep(600)"),
    "babbles": (_LOAD, 'print("<html>", flush=True)'),
    "answers something else": (_LOAD, "answer([1, 2])"),
    "loses tokens": (_LOAD, 'answer({"tokens": tokens[1:]})'),
    "invents requests": (_LOAD, 'answer({"tokens": [[t, i + 1] for t, i in tokens]})'),
    "knows no time": (_LOAD, 'answer({"tokens": [[float("nan"), i] for t, i in tokens]})'),
}


def script_peer(folder: Path, name: str) -> Peer:
    """Write one of SCRIPTS."""
    load, run = SCRIPTS[name]
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(_HEAD.replace("{load}", load).replace("{run}", run))
    return Peer(name, path)
