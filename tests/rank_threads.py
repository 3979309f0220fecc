"""Ranks as threads of the test's process, in place of processes of their own: the same code, without their start."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence

import pytest

from twostroke.errors import RankLost
from twostroke.startup import ranks
from twostroke.startup.rank_process import serve_rank


class RankThread:
    """A RankProcess."""

    def __init__(self, rank: int, size: int, address: str, descriptors: Sequence[int] = ()) -> None:
        del descriptors  # they are this process's
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(rank, size, address), daemon=True)
        self._thread.start()

    def _serve(self, rank: int, size: int, address: str) -> None:
        try:
            serve_rank(rank, size, address)
        except RankLost:
            pass
        except BaseException as error:  # it is the code to exit with, elsewhere
            self._error = error

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else int(self._error is not None)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        if self._error is not None:
            raise self._error
        return code

    def kill(self) -> None:
        pass  # a thread cannot be killed; the test that waits for it fails


def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "spawn_rank", RankThread)
