"""`twostroke serve` whose engine process has faults (faulty_engine.py); takes the arguments of `serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twostroke.api import serve
from twostroke.cli.main import main
from twostroke.cluster.remote_engine import RemoteEngine

FAULTY = (sys.executable, str(Path(__file__).parent / "faulty_engine.py"))


class FaultyRemoteEngine(RemoteEngine):
    """Remote engine whose process is the faulty one."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, command=FAULTY, **settings)


if __name__ == "__main__":
    module: Any = serve
    module.RemoteEngine = FaultyRemoteEngine
    sys.argv.insert(1, "serve")
    sys.exit(main())
