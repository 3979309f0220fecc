"""Text of each command's `--help`: the flags that people use first, a line each, and examples.

A flag without a line here is shown with its description from `--help-all`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMMANDS: Mapping[str, str] = {
    "serve": "Serve a model to clients of OpenAI's API.",
    "chat": "Talk to a model in the terminal.",
    "generate": "Complete one prompt.",
    "run-batch": "Answer a file of requests.",
    "models": "List or fetch the models that have short names.",
    "plan": "Predict memory and speed before a model is loaded.",
    "quantize": "Write a smaller copy of a model.",
    "calibrate": "Measure step times; recommend a way of drafting.",
    "train-medusa": "Train heads that draft for a model.",
    "explain": "Show where the time of one request went.",
    "doctor": "Find the bottleneck of a server or a recorded run.",
    "replay": "Predict a recorded run with other settings.",
    "view": "Show a recorded run in the browser.",
    "bench": "Measure a server, a model or this machine.",
}
"""Commands in the order of `twostroke --help`, each with what it does."""

LINES: Mapping[str, str] = {
    "--api-key": "Key that clients need; once for each key.",
    "--backend": "Kernels to measure.",
    "--batch-sizes": "Numbers of requests in a step.",
    "--compare": "Devices to compare with, or 'none'.",
    "--configuration": "Settings to compare; once for each set.",
    "--contexts": "Context lengths to time, in tokens.",
    "--data": "Text file like what the model will write.",
    "--decode": "Number of decode processes.",
    "--default-max-tokens": "Output tokens of a chat without a limit.",
    "--device": "cpu, or cuda for an NVIDIA GPU.",
    "--device-name": "Plan for a known GPU, such as H100-SXM.",
    "--drafts": "Time drafting as well as plain steps.",
    "--endpoint": "completions or chat.",
    "--event-log": "File for the event log (explain, replay).",
    "--goodput": "Limit that counts, such as ttft:300 (ms).",
    "--host": "Address to listen on.",
    "--json": "Print JSON instead of text.",
    "--kv-cache-dtype": "auto, bf16, f32, fp8, int8 or int4.",
    "--kv-cache-memory": "Memory for the KV cache, such as 4GiB.",
    "--link-bytes-per-s": "Speed of a link to a second machine.",
    "--max-concurrency": "Most requests at a time.",
    "--max-model-len": "Longest prompt plus output, in tokens.",
    "--max-num-batched-tokens": "Most tokens of a step.",
    "--max-num-seqs": "Most requests that run at a time.",
    "--max-text-tokens": "Tokens of the text to use.",
    "--max-tokens": "Most tokens to generate.",
    "--measured": "Event log to print beside the plan.",
    "--memory": "Memory to plan with, such as 24GB.",
    "--methods": "Ways of drafting to time.",
    "--minutes": "How long to train; default: 30.",
    "--model": "Model folder, GGUF file or hub id.",
    "--name": "Name of the files to write.",
    "--num-heads": "Tokens drafted at once.",
    "--num-layers": "Blocks of a head.",
    "--num-requests": "Number of requests.",
    "--operator": "Operator to measure; default: all.",
    "--output-lengths": "Output tokens of a request.",
    "--png": "Draw the result into this PNG file.",
    "--port": "Port to listen on; 0 takes a free one.",
    "--prefill": "Number of prefill processes.",
    "--price-per-hour": "Price of the machine, to print costs.",
    "--prompt": "Plan one prompt: its text, or @FILE.",
    "--prompt-file": "Read the prompt from a file.",
    "--prompt-lengths": "Prompt tokens of a request.",
    "--quantization": "Quantize while loading: int8, int4 or fp8.",
    "--quick": "Fewer shapes, in less time.",
    "--quiet": "Print no start-up lines and no figures.",
    "--reasoning-parser": "Format of the model's reasoning.",
    "--repeats": "Number of repetitions.",
    "--request-rate": "Requests a second, at random times.",
    "--requests": "Print whether so many users fit at once.",
    "--results": "Folder to write the result to.",
    "--resume": "Continue from the last checkpoint.",
    "--search": "Search numbers of workers for two limits.",
    "--seed": "Seed of the random numbers.",
    "--served-model-name": "Names that clients may use for the model.",
    "--set": "Setting to change, as KEY=VALUE.",
    "--speculative-config": 'Draft tokens: \'{"method": "ngram"}\'.',
    "--steps": "Steps to time at each size.",
    "--stop": "Text that ends the output.",
    "--structured-outputs": 'Form of the output: \'{"regex": "[0-9]+"}\'.',
    "--system": "System message to begin with.",
    "--temperature": "Randomness of sampling; 0 is greedy.",
    "--text": "Text file to predict.",
    "--threads": "Threads to compute with; default: all CPUs.",
    "--tool-call-parser": "Format of the model's tool calls.",
    "--top-k": "Sample from the k most likely tokens.",
    "--top-p": "Sample from this share of probability.",
    "--tpot-target-s": "Limit of the time per output token.",
    "--trace": "Mooncake trace to run instead.",
    "--ttft-target-s": "Limit of the time to the first token.",
    "--url": "Address of a running server.",
    "--workload": "Trace or event log to search with.",
}
"""One line for each flag. A line fits beside its flag in a terminal of 80 columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpPage:
    """Short help of one command."""

    flags: str
    """Flags to show, separated by blanks; required flags and arguments are always shown."""
    examples: tuple[tuple[str, str], ...]
    """Commands that work as they are written, each with what it does."""
    lines: Mapping[str, str] | None = None
    """Lines that replace those of LINES for this command."""


_MODEL = "--quantization --device --threads --max-model-len"
_MEMORY = "--kv-cache-memory --kv-cache-dtype --max-num-seqs"
_SAMPLING = "--max-tokens --temperature --top-p --top-k --seed --stop --structured-outputs"
_RUN = "--num-requests --prompt-lengths --output-lengths --request-rate"
_TRACE = {"--trace": "File to write a Chrome trace to (Perfetto)."}

PAGES: Mapping[str, HelpPage] = {
    "serve": HelpPage(
        flags=f"--host --port --api-key --served-model-name --tool-call-parser --reasoning-parser {_MODEL} {_MEMORY}"
        " --preset --speculative-config --prefill --decode --event-log",
        examples=(
            ("twostroke serve", "the embedded model on port 8000"),
            ("twostroke serve ./Qwen3-0.6B --quantization int8", "a model folder, quantized"),
            ("twostroke serve model.gguf --port 8001", "a GGUF file on another port"),
            ("twostroke serve ./Qwen3-0.6B --prefill 1 --decode 2", "three processes"),
        ),
    ),
    "chat": HelpPage(
        flags=f"--system {_MODEL} {_MEMORY} --speculative-config {_SAMPLING} --json --quiet",
        examples=(
            ("twostroke chat smollm2", "a small chat model"),
            ('twostroke chat ./Qwen3-0.6B --system "Be brief."', "with a system message"),
        ),
    ),
    "generate": HelpPage(
        flags=f"--prompt-file {_MODEL} {_MEMORY} --speculative-config --event-log {_SAMPLING} --json --quiet",
        examples=(
            ('twostroke generate "def quicksort(items):"', "the embedded model"),
            ('twostroke generate ./Qwen3-0.6B "Once upon" --temperature 0.7', "sampled"),
            ("git diff | twostroke generate ./Qwen3-0.6B -", "a prompt from stdin"),
        ),
    ),
    "run-batch": HelpPage(
        flags=f"--output --served-model-name --default-max-tokens --max-concurrency --model {_MODEL} {_MEMORY}"
        " --preset --speculative-config --event-log --quiet",
        lines={"--served-model-name": "Names that requests may use for the model."},
        examples=(("twostroke run-batch in.jsonl -o out.jsonl --model smollm2", "again: continue"),),
    ),
    "models": HelpPage(
        flags="--accept-terms",
        examples=(("twostroke models", "list them"), ("twostroke models smollm2", "fetch one")),
    ),
    "quantize": HelpPage(
        flags="--quantization --group-size --quiet",
        lines={"--quantization": "int8 or int4."},
        examples=(("twostroke quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --quantization int4", "4 bits"),),
    ),
    "train-medusa": HelpPage(
        flags="--data --output --num-heads --num-layers --minutes --resume --seed --threads --quiet",
        examples=(("twostroke train-medusa ./Qwen3-0.6B --data corpus.txt", "30 minutes"),),
    ),
    "calibrate": HelpPage(
        flags=f"{_MODEL} --drafts --methods --data --repeats --max-num-seqs --output --json",
        examples=(
            ("twostroke calibrate ./Qwen3-0.6B", "step times and drafts"),
            ("twostroke calibrate ./Qwen3-0.6B --no-drafts", "step times alone, about a minute"),
        ),
    ),
    "plan": HelpPage(
        flags=f"{_MODEL} {_MEMORY} --device-name --memory --price-per-hour --prompt --requests --compare --measured"
        " --png --search --workload --ttft-target-s --tpot-target-s --json",
        examples=(
            ("twostroke plan ./Qwen3-0.6B", "this machine"),
            ("twostroke plan ./Qwen3-0.6B --device-name H100-SXM", "a known GPU"),
            ("twostroke plan ./Qwen3-0.6B --search --workload trace.jsonl", "workers"),
        ),
    ),
    "explain": HelpPage(
        flags="--event-log --url --api-key --trace --json",
        lines={"--event-log": "File that --event-log wrote.", "--api-key": "Key of the server.", **_TRACE},
        examples=(
            ("twostroke explain request-0 --event-log events.jsonl", "from a file"),
            ("twostroke explain cmpl-... --url http://127.0.0.1:8000", "from a running server"),
        ),
    ),
    "view": HelpPage(
        flags="--host --port",
        examples=(("twostroke view events.jsonl", "the page is at http://127.0.0.1:8000"),),
    ),
    "replay": HelpPage(
        flags="--set --png --model --device-name --memory --max-num-batched-tokens --max-num-seqs --json",
        lines={"--device-name": "Of a trace: a known GPU, such as H100-SXM.", "--model": "Of a trace: the model."},
        examples=(
            ("twostroke replay events.jsonl --set max_num_batched_tokens=128", "smaller steps"),
            ("twostroke replay events.jsonl --set prefill=1 --set decode=1", "two pools"),
            ("twostroke replay trace.jsonl --model smollm2 --device-name L4", "a trace"),
        ),
    ),
    "doctor": HelpPage(
        flags="--url --api-key --link-bytes-per-s --json",
        lines={"--api-key": "Key of the server."},
        examples=(
            ("twostroke doctor events.jsonl", "a recorded run"),
            ("twostroke doctor --url http://127.0.0.1:8000", "a running server"),
        ),
    ),
    "bench offline": HelpPage(
        flags=f"--model {_MODEL} {_MEMORY} {_RUN} --trace --name --results --price-per-hour",
        examples=(("twostroke bench offline --num-requests 32", "all at once"),),
    ),
    "bench serve": HelpPage(
        flags=f"--url --model --api-key --endpoint {_RUN} --max-concurrency --goodput --trace --name --results"
        " --price-per-hour",
        lines={"--model": "Name of the model at the server.", "--api-key": "Key of the server."},
        examples=(("twostroke bench serve --request-rate 4 --goodput ttft:300", "4 a second"),),
    ),
    "bench quality": HelpPage(
        flags="--model --text --configuration --max-text-tokens --threads --name --results",
        examples=(("twostroke bench quality --model ./Qwen3-0.6B --text book.txt", "on a text"),),
    ),
    "bench start": HelpPage(
        flags="--model --quantization --kv-cache-memory --repeats --name --results",
        examples=(("twostroke bench start --model ./Qwen3-0.6B", "seconds and memory"),),
    ),
    "bench kernels": HelpPage(
        flags="--model --operator --backend --quick --threads --results",
        examples=(("twostroke bench kernels --quick", "every operator, few shapes"),),
    ),
    "bench sweep": HelpPage(
        flags=f"--model {_MODEL} --kv-cache-memory --kv-cache-dtype --prompt-lengths --contexts --batch-sizes --steps"
        " --repeats --price-per-hour --name --results",
        lines={"--prompt-lengths": "Prompt lengths to time, in tokens."},
        examples=(("twostroke bench sweep --model ./Qwen3-0.6B", "times over sizes"),),
    ),
    "bench diff": HelpPage(
        flags="", examples=(("twostroke bench diff before.json after.json", "two saved results side by side"),)
    ),
    "bench summarize": HelpPage(
        flags="--price-per-hour", examples=(("twostroke bench summarize events.jsonl", "the figures of a run"),)
    ),
}
"""Short help of each command, by its words."""
