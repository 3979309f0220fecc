"""The load generator guidellm, of the vLLM project, over every endpoint of ours that it knows.

Arguments: the server's URL, a folder for what it writes, the folder of the model's tokenizer. Runs in an environment
with guidellm. Prompts are synthetic, the tokenizer is a folder: nothing is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_REQUESTS = 48
MOST_STREAMS = 8
"""On a busy machine guidellm may end before it has read its last streams, and then counts them nowhere."""
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
LOADS = {
    "/v1/chat/completions": f"kind=concurrent,streams={MOST_STREAMS}",
    "/v1/completions": "kind=poisson,rate=8",
    "/v1/responses": "kind=concurrent,streams=4",
}
"""How requests arrive there: as answers come, or at random at a rate."""


def main(url: str, out: Path, tokenizer: Path) -> None:
    """Run all loads; every requested token has to arrive."""
    print(json.dumps({path: measured(url, path, out, tokenizer) for path in LOADS}))


def measured(url: str, path: str, out: Path, tokenizer: Path) -> dict[str, float]:
    """Run one load."""
    written = out / f"{path.replace('/', '_')}.json"
    written.unlink(missing_ok=True)
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},model=embedded,request_format={path}"]
    command += ["--profile", LOADS[path], "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={written}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (benchmark,) = json.loads(written.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals["errored"] == totals["incomplete"] == 0, totals
    assert NUM_REQUESTS - MOST_STREAMS <= totals["successful"] <= NUM_REQUESTS, totals
    lengths = metrics["output_token_count"]["successful"]
    assert lengths["min"] == lengths["max"] == OUTPUT_TOKENS, lengths
    named = {"ttft_ms": "time_to_first_token_ms", "itl_ms": "inter_token_latency_ms"}
    return {name: round(metrics[metric]["successful"]["median"], 2) for name, metric in named.items()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
