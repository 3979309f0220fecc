"""`python -m benchmarks.reproduce r1 r2 --full`: the same as `twostroke bench reproduce`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from benchmarks.reproduce.claim import ReproduceOptions
from benchmarks.reproduce.run import reproduce
from twostroke.errors import TwostrokeError

DEFAULTS = ReproduceOptions()

app = App(name="benchmarks.reproduce", help="Reproduce results of the field, prediction beside measurement.")


@app.default
def main(*names: str, options: Annotated[ReproduceOptions, Parameter(name="*")] = DEFAULTS) -> None:
    """Reproduces the named results, or all of them.

    Parameters
    ----------
    names
        r1, r2, r3, r4, r10, r11, r14, engine-time, pinned-prefixes, vs-transformers, long-prompt,
        server-throughput, overload, two-tenants, hostile-bodies, card, or all (also when none is given).
    """
    found = reproduce(names or ("all",), options)
    if not all(reproduction.holds for reproduction in found):
        sys.exit(1)


if __name__ == "__main__":
    try:
        app()
    except TwostrokeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
