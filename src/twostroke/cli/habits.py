"""First words and flags of Ollama, llama.cpp, vLLM, SGLang and TGI, each with its name here."""

from __future__ import annotations

from collections.abc import Sequence

_TALK = "`twostroke chat MODEL` talks to a model, `twostroke generate MODEL PROMPT` completes a text"
_FETCH = "a model that is given by its short name or hub id (OWNER/NAME) is fetched when it is first used, and kept"
_KEPT = (
    "`twostroke models` lists those with short names; others are where you put them, or in the cache of the Hugging "
    "Face hub (`hf cache ls` lists it)"
)
_SERVER = "`twostroke serve MODEL` serves one model until it is stopped with Ctrl-C"

COMMANDS = {
    "run": _TALK,
    "complete": _TALK,
    "cli": _TALK,
    "llama-cli": _TALK,
    "pull": _FETCH,
    "push": "nothing is uploaded; `hf upload` does that",
    "download": _FETCH,
    "install": _FETCH,
    "get": _FETCH,
    "fetch": _FETCH,
    "search": "models are found at huggingface.co; `twostroke models` lists those with short names",
    "login": "`hf auth login` keeps a token for the Hugging Face hub",
    "update": "`pip install --upgrade twostroke` brings the newest release",
    "upgrade": "`pip install --upgrade twostroke` brings the newest release",
    "list": _KEPT,
    "ls": _KEPT,
    "rm": _KEPT,
    "cp": _KEPT,
    "ask": _TALK,
    "prompt": _TALK,
    "info": "`twostroke plan MODEL` says what a model is and takes",
    "inspect": "`twostroke plan MODEL` says what a model is and takes",
    "eval": "`twostroke bench quality` measures what a model predicts of a text",
    "benchmark": "`twostroke bench` lists what can be measured",
    "show": "`twostroke plan MODEL` says what a model is and takes",
    "create": "a model is a folder, a GGUF file or a hub id; a system message is given with `twostroke chat --system`",
    "ps": _SERVER,
    "stop": _SERVER,
    "start": _SERVER,
    "server": _SERVER,
    "llama-server": _SERVER,
    "api-server": _SERVER,
    "launch": _SERVER,
    "launch_server": _SERVER,
    "deploy": _SERVER,
    "up": _SERVER,
    "load": _SERVER,
    "kill": _SERVER,
    "web": f"{_SERVER}; its address shows a page to try it on",
    "ui": f"{_SERVER}; its address shows a page to try it on",
    "embed": f"{_SERVER}, and answers POST /v1/embeddings",
    "tokenize": f"{_SERVER}, and answers POST /tokenize",
    "batch": "`twostroke run-batch REQUESTS --output RESULTS` answers a file of requests",
    "convert": "GGUF files and Hugging Face folders are read as they are; `twostroke quantize` makes a smaller copy",
}
"""Commands of others: what to do here."""

_LENGTH = "--max-model-len"
_OUTPUT = "--max-tokens"
_PROMPT = "the prompt itself, behind the model: twostroke generate MODEL PROMPT"
_GPU = "--device cuda, which puts the whole model on the GPU"
_HUB = "the hub id itself, in the model's place"
_KV = "--kv-cache-dtype"
_UNNEEDED = "nothing: leave it out"

_REQUESTS = "the file of requests itself: twostroke run-batch REQUESTS --output RESULTS"
_SLOTS = "--max-num-seqs"
_RANKS = "--tensor-parallel-size"

FLAGS = {
    "-help": "--help",
    "-?": "--help",
    "-m": "--model",
    "--model-path": "--model",
    "--model-id": "--model",
    "--tokenizer-path": "--tokenizer",
    "--tp": _RANKS,
    "--tp-size": _RANKS,
    "--num-shard": _RANKS,
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--max-running-requests": _SLOTS,
    "--max-concurrent-requests": _SLOTS,
    "--max-batch-size": _SLOTS,
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--max-total-tokens": _LENGTH,
    "--quantize": "--quantization",
    "--listen": "--host",
    "--hostname": "--host",
    "-p": _PROMPT,
    "--prompt": _PROMPT,
    "-f": "--prompt-file",
    "--file": "--prompt-file",
    "-n": _OUTPUT,
    "--predict": _OUTPUT,
    "--n-predict": _OUTPUT,
    "--num-predict": _OUTPUT,
    "--max-new-tokens": _OUTPUT,
    "-c": _LENGTH,
    "--ctx-size": _LENGTH,
    "--num-ctx": _LENGTH,
    "--context-length": _LENGTH,
    "--max-seq-len": _LENGTH,
    "-t": "--threads",
    "-C": "--cpu-affinity, a list of CPUs as 0,2 or 0-3",
    "--cpu-mask": "--cpu-affinity, a list of CPUs as 0,2 or 0-3",
    "-Cr": "--cpu-affinity",
    "--cpu-range": "--cpu-affinity",
    "-b": "--max-num-batched-tokens",
    "-ub": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-s": "--seed",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-ngl": _GPU,
    "--gpu-layers": _GPU,
    "--n-gpu-layers": _GPU,
    "-hf": _HUB,
    "--hf-repo": _HUB,
    "-ctk": _KV,
    "-ctv": _KV,
    "--cache-type-k": _KV,
    "--cache-type-v": _KV,
    "-md": "--speculative-config",
    "--model-draft": "--speculative-config",
    "--speculative-model": "--speculative-config",
    "-a": "--served-model-name",
    "-i": _REQUESTS,
    "--input-file": _REQUESTS,
    "--output-file": "--output",
    "--alias": "--served-model-name",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-cnv": "`twostroke chat MODEL`",
    "--conversation": "`twostroke chat MODEL`",
    "--interactive": "`twostroke chat MODEL`",
    "--jinja": f"{_UNNEEDED}; the model's chat template is always used",
    "--trust-remote-code": f"{_UNNEEDED}; no code of a model is ever run",
    "--enable-auto-tool-choice": f"{_UNNEEDED}; --tool-call-parser is enough",
    "--disable-log-requests": f"{_UNNEEDED}; requests are not logged",
    "--disable-log-stats": f"{_UNNEEDED}; figures are at /metrics",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--swap-space": "--kv-offloading-size",
    "--allowed-origins": "--cors-origins",
    "--guided-decoding-backend": f"{_UNNEEDED}; there is one backend",
    "--format": "--structured-outputs",
    "--json-schema": "--structured-outputs",
    "--grammar": "--structured-outputs",
    "--num-gpu": _GPU,
}
"""Flags of others: what does the same here."""


def flag_here(unknown: str, arguments: Sequence[str]) -> str | None:
    """Return what an unknown flag is called here; None if nobody has one of this name.

    Args:
        unknown: as the parser cut it: of -ngl it may name -n alone.
        arguments: the words as they were typed.
    """
    typed = [argument.partition("=")[0] for argument in arguments]
    whole = [word for word in typed if word in FLAGS and word.startswith(unknown)]
    name = whole[0] if whole else unknown
    return f"{name} of other programs is here {FLAGS[name]}" if name in FLAGS else None
