"""`twostroke view LOG`: a recorded run in the browser, without its model."""

from __future__ import annotations

from pathlib import Path

from twostroke.cli.event_logs import refuse_traces


def view(event_log: Path, /, *more: Path, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Show a recorded run in the browser: batch, blocks, queue and timelines, step by step. No model is loaded.

    Parameters
    ----------
    event_log
        A file that --event-log wrote, or the dump of a server's flight recorder.
    more
        Files of the other processes of a server with --prefill and --decode.
    host
        Address to listen on; by default only this machine can connect.
    port
        Port to listen on; 0 takes a free one, which is printed.
    """
    from twostroke.api.view import view as run  # slow imports, needed by this command only

    refuse_traces((event_log, *more))

    run((event_log, *more), host, port)
