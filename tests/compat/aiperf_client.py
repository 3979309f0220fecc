"""NVIDIA's load generator aiperf over every endpoint of ours that it knows; it reads /metrics along the way.

Arguments: the server's URL, a folder for what it writes, the folder of the model's tokenizer. Runs in an environment
with aiperf. Prompts are made of words that it brings along, the tokenizer is a folder: nothing is downloaded.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_REQUESTS = 48
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
GENERATION = ["--streaming", "--osl", str(OUTPUT_TOKENS), "--osl-stddev", "0"]
SERVER_COUNTS = "--use-server-token-count"
EXACT = [SERVER_COUNTS, "--extra-inputs", "ignore_eos:true"]
GREEDY = ["--extra-inputs", "temperature:0"]
"""Where the end of the text cannot be ignored; a drawn answer may be empty, which aiperf takes for an error."""
AS_ANSWERS_COME, AT_RANDOM = ["--concurrency", "8"], ["--request-rate", "8"]
LOADS = {
    "chat": [*GENERATION, *EXACT, *AS_ANSWERS_COME],
    "completions": [*GENERATION, *EXACT, *AT_RANDOM],
    # aiperf takes usage from response.completed alone; an answer that max_output_tokens ends is response.incomplete
    "responses": [*GENERATION, *GREEDY, *AS_ANSWERS_COME],
    "messages": [*GENERATION, *GREEDY, SERVER_COUNTS, *AS_ANSWERS_COME],
    "embeddings": AT_RANDOM,
}
"""Kinds of endpoints, and how requests arrive there."""


def main(url: str, out: Path, tokenizer: Path) -> None:
    """Run both loads; every requested token has to arrive."""
    print(json.dumps({kind: measured(kind, url, out / kind, tokenizer) for kind in LOADS}))


def measured(kind: str, url: str, out: Path, tokenizer: Path) -> dict[str, float]:
    """Run one load."""
    shutil.rmtree(out, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", "embedded", "--url", url]
    command += ["--endpoint-type", kind, "--tokenizer", str(tokenizer), *LOADS[kind]]
    command += ["--isl", str(PROMPT_TOKENS), "--isl-stddev", "0", "--request-count", str(NUM_REQUESTS)]
    command += ["--random-seed", "1", "--ui-type", "none", "--output-artifact-dir", str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    results: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    assert not results["error_summary"], results["error_summary"]
    assert results["request_count"]["avg"] == NUM_REQUESTS, results["request_count"]
    read = json.loads((out / "server_metrics_export.json").read_text())["metrics"]
    assert "twostroke:e2e_request_latency_seconds" in read, list(read)
    metrics = {"latency_ms": "request_latency"}
    if "--streaming" in LOADS[kind]:
        lengths = results["output_sequence_length"]
        if SERVER_COUNTS in LOADS[kind]:
            assert lengths["max"] == OUTPUT_TOKENS, lengths
        least = OUTPUT_TOKENS if EXACT[-1] in LOADS[kind] else 1
        assert lengths["min"] >= least, lengths
        metrics |= {"ttft_ms": "time_to_first_token", "itl_ms": "inter_token_latency"}
    return {name: round(results[metric]["p50"], 2) for name, metric in metrics.items()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
