"""EleutherAI's lm-eval with its model `local-completions`: a choice, a generation and a rolling log-likelihood.

Arguments: the server's URL, a folder for what it writes. Runs in an environment with lm-eval[api]. The tasks and their
texts are ours (lm_eval_tasks/), so nothing is downloaded; tokens come from the server (/tokenizer_info, /tokenize).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"
METRICS = {"own_choice": "acc,none", "own_generation": "exact_match,none", "own_text": "bits_per_byte,none"}


def main(url: str, out: Path) -> None:
    """Run the tasks, and check their figures."""
    asked = f"base_url={url}/v1/completions,model=embedded,tokenizer_backend=remote,num_concurrent=4,max_length=2048"
    run = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", asked]
    tasks = ["--tasks", ",".join(METRICS), "--include_path", ".", "--batch_size", "4", "--output_path", str(out)]
    for old in out.rglob("results_*.json"):
        old.unlink()
    subprocess.run([sys.executable, *run, *tasks], check=True, cwd=TASKS, stdout=sys.stderr)
    (written,) = out.rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    found = {task: results[task][metric] for task, metric in METRICS.items()}
    assert found["own_choice"] == 1.0, found  # Python over words in any order
    assert found["own_generation"] == 1.0, found
    assert 0 < found["own_text"] < 4, found  # bits per byte; noise is 8
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
