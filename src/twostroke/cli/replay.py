"""`twostroke replay FILE`: prediction of a recorded run with other settings, or of an engine on a trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twostroke.cli.event_logs import read_logs
from twostroke.cli.flags import JsonFlag, ModelFlag, TraceEngineFlags, group, with_model
from twostroke.config.engine import EngineConfig
from twostroke.engine.event_sinks import consistent_events, is_event_log
from twostroke.errors import InvalidParameter
from twostroke.measure.figure import check_png
from twostroke.planner.options import TraceOptions
from twostroke.simulation.settings import WhatIf
from twostroke.simulation.trace import is_trace

SetFlag = Annotated[tuple[str, ...], Parameter(name="--set", negative="")]


def replay(
    path: Path,
    /,
    *,
    set_: SetFlag = (),
    model: ModelFlag = None,
    options: Annotated[TraceOptions, Parameter(name="*", group=group("Trace"))] = TraceOptions(),
    engine: Annotated[TraceEngineFlags, Parameter(name="*")] = TraceEngineFlags(),
    png: Path | None = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict a recorded run with other settings, or run a Mooncake trace in simulated time.

    The server's own scheduler decides each step; only times are predicted. For an event log, times come from a model
    fitted to its steps. Its error on the recorded run is printed first. Above 25 %, or with fewer than 10 requests, no
    what-if is answered and the exit code is 1; single figures with a larger error are left out. For a trace, times come
    from the model's calibration on this machine, or from the floors of a published device.

    Parameters
    ----------
    path
        A file that --event-log wrote, of one engine; or a Mooncake trace, which most other flags apply to.
    set_
        A setting to change, as KEY=VALUE; repeat the flag to change several. Settings of the scheduler and the KV cache
        have their own names (max_num_batched_tokens=256). request_rate_factor=2 makes requests arrive twice as fast;
        step_time_factor=0.5 is a machine that is twice as fast; prefill=1, decode=1 and link_bytes_per_s=1.25e9 are two
        pools, each process on such a machine.
    model
        For a trace: a model folder, a GGUF file, a hub id, or 'embedded', which is the default. Weights are not read.
    png
        Also draw the replay of an event log into this PNG file: the gap before each token, measured and predicted
        (needs the extra 'bench').
    json_output
        Print the figures as one JSON object instead of a table.
    """
    check_png(png)
    what_ifs = (WhatIf.read(set_),) if set_ else ()
    asks_for_a_trace = (model, options, engine) != (None, TraceOptions(), TraceEngineFlags())
    if asks_for_a_trace and is_event_log(path):
        limit = "must be a Mooncake trace beside --model, settings of an engine or of a machine; it is an event log"
        raise InvalidParameter("path", str(path), limit, "Leave these out, and give settings by --set KEY=VALUE.")
    if asks_for_a_trace or is_trace(path):
        if png is not None:
            raise InvalidParameter("png", str(png), "draws the replay of an event log", "Leave it out for a trace.")
        config = engine.config(with_model(engine.load, positional=None, flag=model))
        _replay_trace(path, config, options, what_ifs, json_output)
    else:
        _replay_log(path, what_ifs, png, json_output)


def _replay_log(path: Path, what_ifs: Sequence[WhatIf], png: Path | None, as_json: bool) -> None:
    from twostroke.planner.replay import replay_log
    from twostroke.planner.show_replay import print_replayed, replayed_json

    events = read_logs((path,), "path")
    with consistent_events((path,), "path"):
        found = replay_log(events, what_ifs)
    if png is not None:
        from twostroke.planner.figure import draw_replayed

        draw_replayed(found, png)
    if as_json:
        print(json.dumps(replayed_json(found)))
    else:
        print_replayed(found)
    if what_ifs and found.refusal:
        sys.exit(1)


def _replay_trace(
    path: Path, config: EngineConfig, options: TraceOptions, what_ifs: Sequence[WhatIf], as_json: bool
) -> None:
    from twostroke.planner.show_replay import print_replayed_trace, replayed_trace_json
    from twostroke.planner.trace_replay import replay_trace  # loads torch

    found = replay_trace(path, config, options, what_ifs)
    if as_json:
        print(json.dumps(replayed_trace_json(found)))
    else:
        print_replayed_trace(found)
