"""`twostroke plan MODEL`: a model's memory and speed on a machine, before it is deployed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from twostroke.cli.event_logs import read_run
from twostroke.cli.flags import ExplicitDevice, JsonFlag, ModelFlag, PlannedEngineFlags, group, with_model
from twostroke.config.engine import EngineConfig
from twostroke.engine.event_sinks import consistent_events
from twostroke.errors import InvalidParameter
from twostroke.planner.options import PlanOptions, SearchOptions


def plan(
    model: str | None = None,
    /,
    *,
    model_flag: ModelFlag = None,
    options: Annotated[PlanOptions, Parameter(name="*", group=group("Plan"))] = PlanOptions(),
    engine: Annotated[PlannedEngineFlags, Parameter(name="*")] = PlannedEngineFlags(),
    search: Annotated[SearchOptions, Parameter(name="*", group=group("Search"))] = SearchOptions(),
    json_output: JsonFlag = False,
) -> None:
    """Predict a model's memory and the floors of its times, on this machine or a known GPU, and the effect of changes.

    Memory is predicted to the byte. With --prompt: predict memory and time of one prompt. Weights are not read: of a
    folder config.json is enough.

    Parameters
    ----------
    model
        A model folder, a GGUF file, a hub id, or 'embedded', which is the default.
    model_flag
        The same as MODEL.
    json_output
        Print the plan as one JSON object instead of tables.
    """
    from twostroke.planner.after_run import compare, observed_run
    from twostroke.planner.machine import planned_load
    from twostroke.planner.plan import make_plan  # loads torch

    loaded = with_model(engine.load, positional=model, flag=model_flag)
    if options.device_name is not None and isinstance(loaded.device, ExplicitDevice) and loaded.device != "cuda":
        limit = f"contradicts --device-name {options.device_name}, which is a GPU"
        raise InvalidParameter("--device", str(loaded.device), limit, "Give one of the two.")
    if options.device_name is not None:  # known devices are GPUs; none need be on this machine
        loaded = replace(loaded, device="cuda")
    config = engine.config(planned_load(loaded))
    if search.search:
        _search(config, options, search, as_json=json_output)
        return
    logs = () if options.measured is None else (options.measured,)
    measured = read_run(logs, "measured") if logs else None
    with consistent_events(logs, "measured"):
        seen = None if measured is None else observed_run(measured)
    made = make_plan(config, options, run=seen)
    if options.png is not None:
        from twostroke.planner.figure import draw_plan

        draw_plan(made, options.png)
    after = None
    if measured is not None:
        with consistent_events(logs, "measured"):
            after = compare(made, measured)
    if json_output:
        from twostroke.planner.report import as_json

        print(json.dumps(as_json(made, after)))
        return
    from twostroke.planner.show import print_after_run, print_plan

    print_plan(made)
    if after is not None:
        print_after_run(after)
    if options.png is not None:
        print(f"drawn: {options.png}")


def _search(config: EngineConfig, options: PlanOptions, search: SearchOptions, *, as_json: bool) -> None:
    from twostroke.planner.search import search_placement  # loads torch
    from twostroke.planner.show_search import print_search, searched_json

    found = search_placement(config, options, search)
    if as_json:
        print(json.dumps(searched_json(found)))
    else:
        print_search(found)
