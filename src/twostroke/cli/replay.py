"""`twostroke replay LOG`: what other settings would have made of a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twostroke.cli.flags import JsonFlag
from twostroke.engine.event_sinks import read_events

SetFlag = Annotated[tuple[str, ...], Parameter(name="--set", negative="")]


def replay(event_log: Path, *, set_: SetFlag = (), json_output: JsonFlag = False) -> None:
    """Decide a recorded run again, predict it in simulated time, and predict it with other settings.

    The scheduler is the one that serves; only time is predicted, from a model that is fitted to the log's steps. Its
    error on the run as it was recorded is printed first.

    Parameters
    ----------
    event_log
        A file that --event-log wrote, of one engine.
    set_
        A setting to change, as KEY=VALUE; give it several times to change several at once. Settings of the scheduler
        and of the KV cache by their names (max_num_batched_tokens=256), request_rate_factor=2 for requests that arrive
        twice as fast, step_time_factor=0.5 for a machine that is twice as fast.
    json_output
        The figures as one JSON object instead of a table.
    """
    from twostroke.planner.replay import replay_log
    from twostroke.planner.show_replay import print_replayed, replayed_json
    from twostroke.simulation.settings import WhatIf

    what_ifs = (WhatIf.read(set_),) if set_ else ()
    found = replay_log(list(read_events(event_log)), what_ifs)
    if json_output:
        print(json.dumps(replayed_json(found)))
    else:
        print_replayed(found)
