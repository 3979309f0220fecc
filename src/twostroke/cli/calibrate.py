"""`twostroke calibrate MODEL`: how long its steps take on this machine, and which way of drafting is the fastest."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from twostroke.calibrate.options import CalibrateOptions
from twostroke.cli.flags import JsonFlag, LoadBesideModel, LoadBesideModelFlags, ModelFlag, group, with_model


def calibrate(
    model: str | None = None,
    /,
    *,
    model_flag: ModelFlag = None,
    options: Annotated[CalibrateOptions, Parameter(name="*", group=group("Calibration"))] = CalibrateOptions(),
    load: LoadBesideModelFlags = LoadBesideModel(),
    json_output: JsonFlag = False,
) -> None:
    """Measure the step times of a model on this machine, and every way of drafting; recommend a --speculative-config.

    The file goes to ~/.cache/twostroke. A server finds the step times there and goes by them (--itl-slo); so do
    `twostroke plan` and `twostroke replay` of a trace.

    Parameters
    ----------
    model
        A model folder, a GGUF file, a hub id, or 'embedded', which is the default.
    model_flag
        The same as a flag.
    json_output
        The figures as one JSON object, as they are written to the file, instead of tables.
    """
    from twostroke.calibrate.run import calibrate as run  # loads torch
    from twostroke.calibrate.show import print_calibration
    from twostroke.model.model_files import find_model_of
    from twostroke.startup.calibrated import place_to_write

    config = with_model(load, by_place=model, by_flag=model_flag)
    found, output = run(options, config, progress=not json_output)
    if json_output:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        print_calibration(found)
        print(f"written: {output}")
    if options.output is not None:
        place = place_to_write(find_model_of(config).path, config)
        print(f"A server looks for it in {place}; copy it there to serve by it.", file=sys.stderr)
