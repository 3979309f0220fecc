"""`twostroke serve` whose engine process has faults (faulty_engine.py); takes the arguments of `serve`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from twostroke.api import serve
from twostroke.cli.main import main
from twostroke.engine.remote_engine import RemoteEngine

FAULTY = (sys.executable, str(Path(__file__).parent / "faulty_engine.py"))

if __name__ == "__main__":
    module: Any = serve
    module.RemoteEngine = partial(RemoteEngine, command=FAULTY)
    sys.argv.insert(1, "serve")
    sys.exit(main())
