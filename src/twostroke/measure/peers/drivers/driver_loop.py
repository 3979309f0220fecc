"""The protocol's far end: `python driver_loop.py DRIVER CLASS`, in any environment. Standard library only.

One JSON object a line comes in and one goes out, until the input ends:

    {"do": "load", "model": PATH, "precision": "bf16", "threads": 2, "max_model_len": 1024, "max_num_seqs": 32}
        {"loaded": {"version": "1.2.3", ...}}
    {"do": "run", "prompts": [[17, 4], [9, 9]], "max_tokens": 2}
        {"tokens": [[0.013, 0], [0.013, 1], [0.020, 0], [0.020, 1]]}

    {"do": "score", "token_ids": [5, 17, 4], "first": 1, "path": FILE}
        {"scored": 2}                    FILE: float32 logits [2, vocab_size], those that tokens 1 and 2 are drawn from

Every output token is reported as it came: seconds since the prompts were handed over, and whose it is. What is made
of these times is computed in one place for all engines (`options.py`). A failure is an answer too:

        {"failed": "missing" | "unsupported" | "error", "why": TEXT}
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, Protocol, runtime_checkable

TokenTime = tuple[float, int]
"""Seconds since the prompts were handed over, and which prompt's token this is."""


@dataclass(frozen=True)
class EngineOrder:
    """What an engine is to load, and how large its work will be."""

    model: str
    """A Hugging Face folder or a GGUF file, whichever the engine reads."""
    precision: str
    """Type of the weights: bf16, int8 or int4; "gguf" keeps those of the file."""
    activation_quantization: str | None
    """As twostroke's setting; other engines do as they do."""
    threads: int
    max_model_len: int
    """Tokens of the longest request, prompt and output."""
    max_num_seqs: int
    """Most requests at once."""
    kv_cache_dtype: str | None = None
    """Type of K and V by the engine's own name; None is its default. Only engines that `score` get it."""


class DrivenEngine(Protocol):
    """One engine, loaded. NotImplementedError says what it does not run, and what it does."""

    @property
    def about(self) -> dict[str, str]:
        """Its version, and what it says about how it runs."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """All prompts at once, greedily, each to exactly `max_tokens` tokens whatever they are."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """An engine that shows its logits, for `bench quality`."""

    def score(self, token_ids: Sequence[int], first: int, path: str) -> int:
        """Write the logits that token_ids[first:] are predicted from to a file.

        Args:
            token_ids: a text from its beginning.
            first: index of the first token that is predicted; 1 or more.
            path: where they go: float32 [len(token_ids) - first, vocab_size], native byte order.

        Returns:
            Number of rows that were written.
        """
        ...


def serve(load: Callable[[EngineOrder], DrivenEngine]) -> None:
    """Answers orders until the input ends, or until one fails."""
    answers = _claim_stdout()
    engine: DrivenEngine | None = None
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        try:
            kind = order.pop("do")
            if kind == "load":
                engine = load(EngineOrder(**order))
                answer: dict[str, Any] = {"loaded": engine.about}
            elif kind == "score":
                if not isinstance(engine, Scorer):
                    raise NotImplementedError("its driver does not show logits")
                answer = {"scored": engine.score(**order)}
            else:
                assert engine is not None, "a run was ordered before a load"
                answer = {"tokens": engine.run(order["prompts"], order["max_tokens"])}
        except ModuleNotFoundError as error:
            answer = {"failed": "missing", "why": f"{error.name} is not installed in its environment"}
        except NotImplementedError as error:
            answer = {"failed": "unsupported", "why": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": "error", "why": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "failed" in answer:
            sys.exit(1)


def _claim_stdout() -> Any:
    """The stream of answers; whatever else prints, native code too, goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main(driver: str, name: str) -> None:
    """Import a driver's file, and let its engine answer."""
    # this folder leaves the search path: a file of ours could hide a library of theirs
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    spec = spec_from_file_location("driver", driver)
    assert spec is not None, driver
    assert spec.loader is not None, driver
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    serve(getattr(module, name))


if __name__ == "__main__":
    main(*sys.argv[1:])
