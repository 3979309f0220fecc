"""`twostroke calibrate MODEL`: how long its steps take on this machine, and which way of drafting is the fastest."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
from cyclopts import Parameter

from twostroke.calibrate.options import CalibrateOptions
from twostroke.cli.flags import JsonFlag, LoadBesideModel, LoadBesideModelFlags, ModelFlag, with_model


def calibrate(
    model: str | None = None,
    /,
    *,
    model_flag: ModelFlag = None,
    options: Annotated[CalibrateOptions, Parameter(name="*", group="Calibration")] = CalibrateOptions(),
    load: LoadBesideModelFlags = LoadBesideModel(),
    json_output: JsonFlag = False,
) -> None:
    """Measure the step times of a model on this machine, and every way of drafting; recommend a --speculative-config.

    A server finds the step times beside the model and goes by them (--itl-slo); so does `twostroke plan`.

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

    found, output = run(options, with_model(load, by_place=model, by_flag=model_flag), progress=not json_output)
    if json_output:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        print_calibration(found)
        print(f"written: {output}")
