"""`twostroke generate [MODEL] PROMPT`: stream a completion to the terminal, then one line of figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from twostroke.cli.flags import (
    CompletionSampling,
    CompletionSamplingFlags,
    EngineFlagsWithoutModel,
    JsonFlag,
    ModelFlag,
    QuietFlag,
    with_model,
)
from twostroke.cli.prompt_words import model_and_prompt
from twostroke.errors import EngineError
from twostroke.outputs import JoinedDeltas

if TYPE_CHECKING:
    from twostroke.client.text_engine import TextEngine
    from twostroke.outputs import RequestMetrics, RequestOutput


def generate(
    *words: str,
    prompt_file: Path | None = None,
    model_flag: ModelFlag = None,
    engine_flags: Annotated[EngineFlagsWithoutModel, Parameter(name="*")] = EngineFlagsWithoutModel(),
    sampling: CompletionSamplingFlags = CompletionSampling(),
    json_output: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Complete a prompt: `twostroke generate [MODEL] PROMPT`.

    Sampling is greedy and the output has at most 128 tokens by default.

    Parameters
    ----------
    words
        The model (without it, the embedded one runs) and the prompt. "-" reads the prompt from stdin. Put a prompt that
        begins with "-" after "--", behind all flags.
    model_flag
        A model folder, a hub id, or 'embedded'; the same as MODEL.
    prompt_file
        Read the prompt from a file, or from stdin with "-"; the only word is then the model.
    json_output
        Print one JSON object with ids, text and metrics instead of streaming.
    quiet
        Print the text only: no start-up lines, no figures.
    """
    model, prompt = model_and_prompt(words, prompt_file, has_model=model_flag is not None)
    engine = started_engine(engine_flags, model, model_flag, quiet=quiet)
    from twostroke.client.output_processor import OutputKind

    if not quiet and model is None and model_flag is None:
        sys.stderr.write(
            "note     no model was named; the embedded model, made for Python code, completes the prompt\n"
        )
    engine.submit(prompt, sampling, kind=OutputKind.DELTA)
    output = run_and_print(engine, echo="" if json_output else prompt, silent=json_output)
    engine.close()
    if json_output:
        print_json(output)
    elif not quiet and output.metrics is not None:
        sys.stderr.write(f"\n{summary(output, output.metrics)}\n")
    if output.error is not None:
        raise EngineError(output.error)


def started_engine(
    flags: EngineFlagsWithoutModel, model: str | None, model_flag: str | None, *, quiet: bool
) -> TextEngine:
    """Load the model that a command names, as an argument or with a flag; print the start-up lines on stderr."""
    load = with_model(flags.load, positional=model, flag=model_flag)
    from twostroke.client.text_engine import build_text_engine  # loads torch
    from twostroke.engine.facts import printed_lines

    engine = build_text_engine(flags.config(load))
    if not quiet:
        sys.stderr.writelines(line + "\n" for line in printed_lines(engine.startup_lines))
    return engine


def run_and_print(
    engine: TextEngine, *, echo: str = "", silent: bool = False, between_steps: Callable[[], None] = lambda: None
) -> RequestOutput:
    """Run the only request, which was submitted with deltas, and return its whole output.

    The text of the first sequence is printed on stdout as it is generated, that of the others at the end.

    Args:
        engine: the engine that has the request.
        echo: text to print before each output.
        silent: whether to print nothing.
        between_steps: called before each step; an exception that it raises ends the run.
    """
    if not silent:
        print(echo, end="", flush=True)
    deltas = JoinedDeltas()
    while engine.has_work:
        between_steps()
        for delta in engine.step():
            deltas.add(delta)
            if not silent:
                print("".join(part.text for part in delta.outputs if part.index == 0), end="", flush=True)
    output = deltas.joined()
    if not silent:
        print()
        for other in output.outputs[1:]:
            print(f"--- {other.index + 1} of {len(output.outputs)}\n{echo}{other.text}")
    return output


def print_json(output: RequestOutput) -> None:
    """Print the output as one line of JSON and flush it, because a caller may wait for it."""
    if output.prompt_logprobs is not None:
        output.prompt_logprobs = list(output.prompt_logprobs)
    fields = {name: getattr(output, name) for name in output.__struct_fields__}
    fields["metrics"] = output.metrics
    del fields["times"]
    print(json.dumps(msgspec.to_builtins(fields)), flush=True)


def summary(output: RequestOutput, metrics: RequestMetrics) -> str:
    """Return the metrics of one request in one line."""
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(o.token_ids) for o in output.outputs)
    computed = num_prompt - output.num_cached_tokens
    prefill_s = max(metrics.ttft_s - metrics.queue_time_s, 1e-9)
    parts = [
        f"prompt {num_prompt} tokens ({output.num_cached_tokens} cached)",
        f"output {num_output} tokens ({', '.join(str(o.finish_reason) for o in output.outputs)})",
        f"TTFT {metrics.ttft_s * 1e3:.1f} ms",
        f"prefill {computed / prefill_s:,.0f} tok/s",
    ]
    if metrics.tpot_s:
        # over all sequences of the request, unlike tpot_s
        decode_tok_s = (num_output - 1) / max(metrics.e2e_s - metrics.ttft_s, 1e-9)
        parts += [f"TPOT {metrics.tpot_s * 1e3:.2f} ms", f"decode {decode_tok_s:,.0f} tok/s"]
    if metrics.drafts is not None:
        drafts = metrics.drafts
        accepted = f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens} drafts accepted"
        parts.append(f"{accepted}, {drafts.tokens_per_pass:.2f} tokens a pass")
    return " | ".join([*parts, f"seed {output.outputs[0].seed}"])
