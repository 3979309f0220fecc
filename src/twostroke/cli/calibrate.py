"""`twostroke calibrate MODEL`: measured step times on this machine, and the fastest way of drafting."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from twostroke.calibrate.options import CalibrateOptions
from twostroke.cli.flags import JsonFlag, LoadFlagsWithoutModel, LoadFromFlagsWithoutModel, ModelFlag, group, with_model


def calibrate(
    model: str | None = None,
    /,
    *,
    model_flag: ModelFlag = None,
    options: Annotated[CalibrateOptions, Parameter(name="*", group=group("Calibration"))] = CalibrateOptions(),
    load: LoadFlagsWithoutModel = LoadFromFlagsWithoutModel(),
    json_output: JsonFlag = False,
) -> None:
    """Measure the step times of a model on this machine, and every way of drafting; recommend a --speculative-config.

    The result is written to ~/.cache/twostroke. A server reads the step times there and uses them for --itl-slo;
    `twostroke plan` and `twostroke replay` of a trace use them too.

    Parameters
    ----------
    model
        A model folder, a GGUF file, a hub id, or 'embedded', which is the default.
    model_flag
        The same as MODEL.
    json_output
        Print the figures as one JSON object, as in the file, instead of tables.
    """
    from twostroke.calibrate.run import calibrate as run  # loads torch
    from twostroke.calibrate.show import print_calibration
    from twostroke.model.model_files import find_model_of
    from twostroke.startup.calibrated import place_to_write

    config = with_model(load, positional=model, flag=model_flag)
    found, output = run(options, config, progress=not json_output)
    if json_output:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        print_calibration(found)
        print(f"written: {output}")
    if options.output is not None:
        place = place_to_write(find_model_of(config).path, config)
        print(f"A server reads its calibration from {place}; copy the file there to use it.", file=sys.stderr)
