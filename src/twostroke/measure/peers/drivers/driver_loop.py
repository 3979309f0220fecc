"""Engine's side of the protocol: `python driver_loop.py DRIVER CLASS`, in any environment. Standard library only.

It reads one JSON object per line and answers each with one, until the input ends:

    {"do": "load", "model": PATH, "precision": "bf16", "threads": 2, "max_model_len": 1024, "max_num_seqs": 32}
        {"loaded": {"version": "1.2.3", ...}}
    {"do": "run", "prompts": [[17, 4], [9, 9]], "max_tokens": 2}
        {"tokens": [[0.013, 0], [0.013, 1], [0.020, 0], [0.020, 1]]}

    {"do": "score", "token_ids": [5, 17, 4], "first": 1, "path": FILE}
        {"scored": 2}                    FILE: float32 logits [2, vocab_size], from which tokens 1 and 2 are predicted

Each output token is reported as [seconds since the prompts were passed in, index of its prompt]. The figures are
computed from these times in one place for all engines (`options.py`). A failure is an answer too:

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
"""Seconds since the prompts were passed in, and the index of the token's prompt."""


@dataclass(frozen=True)
class LoadCommand:
    """Model to load, and the size of the work to expect."""

    model: str
    """A Hugging Face folder or a GGUF file, whichever the engine reads."""
    precision: str
    """Type of the weights: bf16, int8 or int4; "gguf" keeps those of the file."""
    activation_quantization: str | None
    """Twostroke's setting of that name; other engines ignore it."""
    threads: int
    max_model_len: int
    """Prompt and output tokens of the longest request."""
    max_num_seqs: int
    """Most concurrent requests."""
    kv_cache_dtype: str | None = None
    """Type of K and V under the engine's own name; None: its default. Only for engines with `score`."""


class DrivenEngine(Protocol):
    """Loaded engine. NotImplementedError says what it cannot run, and what it can."""

    @property
    def about(self) -> dict[str, str]:
        """Version of the engine, and details of how it runs."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """Run all prompts at once, greedily, each to exactly `max_tokens` tokens, ignoring ends of text."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Engine that can return its logits, for `bench quality`."""

    def score(self, token_ids: Sequence[int], first: int, path: str) -> int:
        """Write the logits from which token_ids[first:] are predicted to a file.

        Args:
            token_ids: a text from its beginning.
            first: index of the first predicted token; 1 or more.
            path: output file: float32 [len(token_ids) - first, vocab_size], native byte order.

        Returns:
            Number of rows written.
        """
        ...


def serve(load: Callable[[LoadCommand], DrivenEngine]) -> None:
    """Answer orders until the input ends or one fails."""
    answers = _claim_stdout()
    engine: DrivenEngine | None = None
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        try:
            kind = order.pop("do")
            if kind == "load":
                engine = load(LoadCommand(**order))
                answer: dict[str, Any] = {"loaded": engine.about}
            elif kind == "score":
                if not isinstance(engine, Scorer):
                    raise NotImplementedError("its driver cannot return logits")
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
    """Return the stream for answers, and send all other output, also of native code, to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main(driver: str, name: str) -> None:
    """Import a driver's file and serve its engine."""
    # remove this folder from the search path: our files could hide libraries of the engine
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
